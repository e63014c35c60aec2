"""Launches of kernels that have one variant. In: a kernel, arguments; out: work on a stream."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Launch"]


class Launch:
    """A kernel that is looked up once per device and set of constants, and then launched without a lookup.

    Triton inspects every argument of every launch to choose a variant, which costs more host time than the
    launch. `Launch` is for kernels with one variant, and its caller guarantees that: integers are in
    `do_not_specialize` and below 2^31, pointers are in `do_not_specialize_on_alignment` and always of one
    type.
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
        if made is not None:  # the interpreter compiles nothing
            self.compiled[key] = made


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1
