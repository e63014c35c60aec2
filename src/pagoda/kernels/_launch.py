"""Launches of kernels whose arguments make no variants. In: a kernel, arguments; out: work on a stream."""

from __future__ import annotations

from typing import Any

import torch
import triton

__all__ = ["Launch"]

# A compiled kernel is launched with all its arguments since 3.3; before, without the constants.
_TAKES_ALL = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


class Launch:
    """A kernel that is looked up once a device and set of constants, and then launched as it was compiled.

    Triton asks every argument of every launch which variant of a kernel it needs, which costs the host more
    than the launch. So this is for kernels of which there is one: integers in `do_not_specialize` and below
    2^31, pointers in `do_not_specialize_on_alignment` and always of one type. Of that the caller is sure.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.compiled: dict[tuple[int, ...], Any] = {}  # by device and constants

    def __call__(self, grid: tuple[int, int, int], *args: Any, constants: tuple[int, ...] = ()) -> None:
        """Launch on the current stream of the current device; constants are the kernel's last arguments."""
        key = (_current_device(), *constants)
        found = self.compiled.get(key)
        if found is not None:
            found[grid](*args, *constants)
            return
        made = self.kernel[grid](*args, *constants, **self.options)
        if made is not None and _TAKES_ALL:  # the interpreter makes none
            self.compiled[key] = made


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1
