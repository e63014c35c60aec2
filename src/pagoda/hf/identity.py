"""Which weights a model has, so that what others computed is never found. In: a model; out: a short text.

Part of it is which memory each tensor has and how often it was written in place; writes that torch does not
count (`parameter.data`) are seen in a sample of its elements. Kinds of modules, the numbers, flags and text
among their attributes, adapters, hooks, dtype and the way attention is computed count too. What escapes:
writing to a few elements through `.data`, and functions that change their mind.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from typing import Any

import torch
from torch.nn.modules import module as every_module

__all__ = ["identity"]

SAMPLE = 16  # elements of each tensor
SIMPLE = {bool, int, float, str}
# What adapters of the peft library keep in each layer they change: which are active, merged, how strong.
ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")

# Addresses are used again when what was there is gone: numbers are not.
_unused = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@torch.no_grad()
def identity(model: torch.nn.Module) -> str:
    """16 hexadecimal digits. Cost: a walk over all modules, and one copy of a sample to the host: some 0.3 ms
    a layer; on a GPU it waits for the device."""
    config = getattr(model, "config", None)
    everywhere = (*every_module._global_forward_hooks, *every_module._global_forward_pre_hooks)
    marks: list[Any] = [getattr(config, "_attn_implementation", None), everywhere]
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for module in model.modules():
        marks += _marks(module)
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
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
    version = 0 if tensor.is_inference() else tensor._version
    at = _number(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()
    return at, version, tuple(tensor.shape), tensor.dtype.itemsize, tensor.dtype.is_floating_point


def _number(thing: Any) -> int:
    """A number that nothing else has or had, in this process. O(1)."""
    found = _numbers.get(thing)
    if found is None:
        found = _numbers[thing] = next(_unused)
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """[at most SAMPLE] elements, spread over a tensor that is contiguous, of its first row otherwise."""
    if not tensor.is_contiguous():
        return tensor[(0,) * (tensor.dim() - 1)][:SAMPLE].reshape(-1) if tensor.dim() else tensor.reshape(1)
    size = tensor.numel()
    return tensor.as_strided((min(SAMPLE, size),), (max(1, size // SAMPLE),))


def _marks(module: torch.nn.Module) -> list[Any]:
    """What changes a module's output besides its tensors."""
    attributes = module.__dict__
    # Torch numbers hooks: none has the number of one that is gone.
    marks = [type(module).__qualname__, *module._forward_hooks, *module._forward_pre_hooks]
    # Names with an underscore are what transformers notes while it runs.
    marks += [item for item in attributes.items() if type(item[1]) in SIMPLE and item[0][0] != "_"]
    if "forward" in attributes:
        marks.append(_number(attributes["forward"]))
    for name in ADAPTER:
        if name in attributes:
            value = attributes[name]
            marks.append((name, sorted(value.items()) if isinstance(value, dict) else value))
    return marks
