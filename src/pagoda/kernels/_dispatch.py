"""Which implementation serves a call: Triton kernels on CUDA, the torch reference elsewhere.

An operation is declared once, with its docstring, and marked by `operation`; a torch module and a Triton
module implement it under the same name. In: a call; out: the same call to one of the two, with its device
current.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import ParamSpec

import torch

from pagoda.errors import ConfigError

__all__ = ["on_device", "operation", "triton_module"]

P = ParamSpec("P")
_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device current: Triton launches there, and current streams are those of this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.cache
def triton_module(name: str) -> ModuleType:
    """Import and return `pagoda.kernels.<name>`, whose kernels serve CUDA.

    Errors: ConfigError if triton is not installed.
    """
    try:
        return import_module(f"pagoda.kernels.{name}")
    except ModuleNotFoundError as missing:  # plain indexing would work, at a quarter of the speed
        raise ConfigError(
            "pools and batches on CUDA need triton: pip install 'pagoda-kv[triton]'"
        ) from missing


def operation(fused: str, reference: ModuleType) -> Callable[[Callable[P, torch.Tensor]], Callable[P, None]]:
    """Mark the declaration of an operation. Its body returns a tensor: the call runs on that tensor's device.

    fused: the name of the Triton module in `pagoda.kernels`. Triton is imported by the first call on CUDA.
    """

    def declare(where: Callable[P, torch.Tensor]) -> Callable[P, None]:
        name = where.__name__
        parameters = inspect.signature(where).parameters.values()
        optional = [(at, p.name, p.default) for at, p in enumerate(parameters) if p.default is not p.empty]

        @functools.wraps(where)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            device = where(*args, **kwargs).device
            for at, given, default in optional:  # implementations take every argument
                if at >= len(args):
                    kwargs.setdefault(given, default)
            with on_device(device):
                module = triton_module(fused) if device.type == "cuda" else reference
                getattr(module, name)(*args, **kwargs)

        call.__annotations__ = {**where.__annotations__, "return": None}
        return call

    return declare
