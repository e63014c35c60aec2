"""Kernels that are looked up once: which launches are the lookup's, and which the compiled kernel's."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagoda.kernels import _launch as launch
from pagoda.kernels._launch import Launch


class Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.calls.append(("compiled", grid, args))


class Kernel:
    """What Triton's kernels do: launch, and give what was compiled; nothing where they are interpreted."""

    def __init__(self, is_interpreted: bool = False) -> None:
        self.calls: list[Any] = []
        self.made = None if is_interpreted else Compiled(self.calls)

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.calls.append(("looked up", grid, args, options))
            return self.made

        return run


def test_a_kernel_is_looked_up_once_for_each_device_and_constant(monkeypatch: pytest.MonkeyPatch):
    device = 0
    monkeypatch.setattr(launch, "_TAKES_ALL", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    kernel = Kernel()
    start = Launch(kernel, num_warps=8)
    start((1, 1, 1), "a", 5, constants=(16,))
    start((2, 1, 1), "b", 6, constants=(16,))
    start((3, 1, 1), "c", 7, constants=(32,))
    device = 1
    start((4, 1, 1), "d", 8, constants=(16,))
    assert kernel.calls == [
        ("looked up", (1, 1, 1), ("a", 5, 16), {"num_warps": 8}),
        ("compiled", (2, 1, 1), ("b", 6, 16)),
        ("looked up", (3, 1, 1), ("c", 7, 32), {"num_warps": 8}),
        ("looked up", (4, 1, 1), ("d", 8, 16), {"num_warps": 8}),
    ]


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_interpreted_kernels_and_those_of_older_versions_are_looked_up_every_time(
    monkeypatch: pytest.MonkeyPatch, is_interpreted: bool
):
    monkeypatch.setattr(launch, "_TAKES_ALL", is_interpreted)
    kernel = Kernel(is_interpreted)
    start = Launch(kernel)
    for _ in range(3):
        start((1, 1, 1), constants=(2,))
    assert [call[0] for call in kernel.calls] == ["looked up"] * 3
