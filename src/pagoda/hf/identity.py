"""Which weights a model has, so that what others computed is never found. In: a model; out: a short text.

Part of it is which memory each tensor has and how often it was written in place; writes that torch does not
count (`parameter.data`, numpy) are seen where a sample of its elements changes. Kinds of modules, their
settings, hooks, the config and the way attention is computed count too. What escapes: writing to a small
part of a tensor behind torch's back, and functions that change their mind."""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from typing import Any

import torch
from torch.nn.modules import module as every_module

__all__ = ["identity", "settings"]

SAMPLE = 64  # elements of each tensor
SIMPLE = {bool, int, float, str}
NESTED = {dict, list, tuple}
USUAL = frozenset(torch.nn.Module().__dict__) - {"training"}  # what every module has
# Modules of these keep their settings in plain names; names with an underscore are notes while they run.
KNOWN = ("torch.", "transformers.")

# Addresses are used again when what was there is gone: numbers are not.
_unused = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@torch.no_grad()
def identity(model: torch.nn.Module) -> str:
    """16 hexadecimal digits. Cost: a walk over all modules, and one copy of a sample to the host: some 0.3 ms
    a layer; on a GPU it waits for the device. Errors: RuntimeError for tensors that do not count writes."""
    config = getattr(model, "config", None)
    everywhere = (*every_module._global_forward_hooks, *every_module._global_forward_pre_hooks)
    marks: list[Any] = [None if config is None else settings(config), everywhere]
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for module in model.modules():
        more, tensors = _marks(module)
        marks += more
        for tensor in (*module._parameters.values(), *module._buffers.values(), *tensors):
            if tensor is None:
                continue
            marks.append(_place(tensor))
            if tensor.numel() and tensor.device.type != "meta":
                samples.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor))
    digest = hashlib.blake2b(repr((marks, list(samples))).encode(errors="surrogatepass"), digest_size=8)
    for some in samples.values():
        digest.update(torch.cat(some).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = tensor._version  # a RuntimeError for those made in inference mode
    at = _number(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()
    return at, version, tuple(tensor.shape), tensor.dtype.itemsize, tensor.dtype.is_floating_point


def _number(thing: Any) -> int:
    """A number that nothing else has or had, in this process. O(1)."""
    found = _numbers.get(thing)
    if found is None:
        found = _numbers[thing] = next(_unused)
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """[at most SAMPLE] elements, spread over rows and columns of a tensor that is contiguous."""
    if not tensor.is_contiguous():
        tensor = tensor.flatten()  # a copy: few are so
    size, row = tensor.numel(), tensor.shape[-1] if tensor.dim() else 1
    step = max(1, size // SAMPLE)
    if step > row:  # from row to row the column moves by the golden section: columns far apart come first
        step = step // row * row - row + max(1, round(0.618 * row))
    else:
        step = next((s for s in range(step, 1, -1) if math.gcd(s, row) == 1), 1)
    return tensor.as_strided((min(SAMPLE, size),), (step,))


def settings(config: Any) -> list[tuple[str, str]]:
    """What a config says, as text. O(its fields)."""
    config = config.get_text_config(decoder=True)
    found = [(name, repr(value)) for name, value in vars(config).items() if name[0] != "_"]
    return [("attention", str(config._attn_implementation)), *sorted(found)]


def _marks(module: torch.nn.Module) -> tuple[list[Any], list[torch.Tensor]]:
    """What changes a module's output besides its parameters and buffers: settings, hooks, tensors."""
    # Torch numbers hooks: none has the number of one that is gone.
    marks = [type(module).__qualname__, *module._forward_hooks, *module._forward_pre_hooks]
    tensors = []
    is_known = type(module).__module__.startswith(KNOWN)
    for name, value in module.__dict__.items():
        if name in USUAL or (is_known and name[0] == "_"):
            continue
        if type(value) in SIMPLE or (type(value) in NESTED and not is_known):
            marks.append((name, value))
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        elif name == "forward":
            marks.append(_number(value))
    return marks, tensors
