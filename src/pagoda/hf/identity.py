"""Which weights a model has, so that what others computed is never found. In: a model; out: a short text.

Part of it is where each tensor lies and how often it was written in place; writes that torch does not count
(`parameter.data`) are seen in a sample of its elements. Adapters, hooks, dtype and the way attention is
computed count too. What escapes: writing to a few elements through `.data`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["identity"]

SAMPLE = 16  # elements of each tensor
# What adapters of the peft library keep in each layer they change: which are active, merged, how strong.
ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def identity(model: torch.nn.Module) -> str:
    """16 hexadecimal digits. Cost: a walk over all modules, and one copy of a sample to the host: a few
    milliseconds for a hundred layers; on a GPU it waits for the device."""
    digest = hashlib.blake2b(digest_size=8)
    config = getattr(model, "config", None)
    digest.update(repr((type(model).__qualname__, getattr(config, "_attn_implementation", None))).encode())
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for module in model.modules():
        marks = tuple(_marks(module))
        if marks:
            digest.update(repr(marks).encode())
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is None:
                    continue
                digest.update(repr(_place(tensor)).encode())
                if tensor.numel() and tensor.device.type != "meta":
                    samples.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor.detach()))
    for some in samples.values():
        digest.update(torch.cat(some).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tuple(tensor.shape), str(tensor.dtype), str(tensor.device)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        return tensor[(0,) * (tensor.dim() - 1)][:SAMPLE].reshape(-1) if tensor.dim() else tensor.reshape(1)
    flat = tensor.view(-1)
    return flat[:: max(1, flat.shape[0] // SAMPLE)][:SAMPLE]


def _marks(module: torch.nn.Module) -> Iterator[Any]:
    """What changes a module's output besides its tensors: hooks, adapters."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        yield from (("hook", id(hook)) for hook in hooks.values())
    if "forward" in module.__dict__:
        yield "forward", id(module.__dict__["forward"])
    for name in ADAPTER:
        if name in module.__dict__:
            value = module.__dict__[name]
            yield name, sorted(value.items()) if isinstance(value, dict) else value
