"""Identifies a model's weights, so that keys and values of other weights are never reused. In: a model; out:
a short text.

The identity covers the memory of each tensor and how often it was written in place. Writes that torch does
not count (`parameter.data`, numpy) are detected by a sample of elements. Types of modules, their settings and
hooks, the config and the attention implementation are covered too. Not detected: writes to a small part of a
tensor behind torch's back, and functions that change their behaviour."""

from __future__ import annotations

import functools
import hashlib
import itertools
import marshal
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as every_module

__all__ = ["Look", "identity", "settings"]

SAMPLE = 64  # elements per tensor
SIMPLE = {bool, int, float, str}
NESTED = {dict, list, tuple}
PLAIN = {torch.Tensor, torch.nn.Parameter}
USUAL = frozenset(torch.nn.Module().__dict__) - {"training"}  # attributes of every module
# Modules of these packages have settings in public attributes; private ones change while they run.
KNOWN = ("torch.", "transformers.")

# Addresses are reused after an object is gone; these numbers are not.
_unused = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def identity(model: torch.nn.Module) -> str:
    """Return 16 hexadecimal digits. Cost and errors are those of `Look`."""
    return Look(model).identity


class Look:
    """A snapshot of a model's identity. Has views of its weights, so keep it no longer than one call.

    Cost: a walk over all modules and one copy of the samples to the host, some 0.1 ms per layer; on a GPU it
    waits for the device. Errors: RuntimeError for tensors that do not count writes; TypeError or ValueError
    for unsupported tensors and attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._marks, tensors, self.drops = _marks(model)
        self._samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._is_window = True  # the samples are views of the weights, not copies
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel() and not tensor.is_meta:
                    if type(tensor) not in PLAIN or not tensor.is_contiguous():
                        tensor, self._is_window = tensor.flatten(), False  # rare
                    sample = tensor.as_strided(*_grid(tensor.shape))
                    self._samples.setdefault((tensor.dtype, tensor.device), []).append(sample)
        self._elements = self._read()
        digest = hashlib.blake2b(self._marks, digest_size=8)
        digest.update(self._elements)
        self.identity = digest.hexdigest()

    def is_still(self, model: torch.nn.Module) -> bool:
        """Return whether the identity is unchanged. Costs three quarters of a Look. Errors: as above."""
        if not self._is_window:
            return Look(model).identity == self.identity
        # With the same marks, tensors have the same memory, so the samples still are views of it.
        return _marks(model)[0] == self._marks and self._read() == self._elements

    def _read(self) -> bytes:
        """Return the current elements of the samples, by dtype and device."""
        read: list[bytes] = []
        for (dtype, device), some in self._samples.items():
            elements = torch.cat(some).cpu().contiguous().view(torch.uint8)
            read += f"{dtype} {device} {len(elements)}".encode(), elements.numpy().tobytes()
        return b"".join(read)


def _marks(model: torch.nn.Module) -> tuple[bytes, list[torch.Tensor], bool]:
    """Return the identity of everything except the elements of tensors, the tensors, and whether dropout is
    active. Walks over all modules each time, to see added, replaced and removed ones."""
    config = getattr(model, "config", None)
    everywhere = (*every_module._global_forward_hooks, *every_module._global_forward_pre_hooks)
    marks: list[Any] = [None if config is None else settings(config), everywhere]
    tensors: list[torch.Tensor] = []
    drops = False
    found, places = [model], {id(model): 0}
    for module in found:  # it grows
        made_of: Any = type(module)
        kind, is_known, names = _looked_at(made_of, tuple(module.__dict__))
        values = list(map(module.__dict__.get, names))
        own = [*module._parameters.items(), *module._buffers.items()]
        if not SIMPLE.issuperset(map(type, values)):  # rare
            simple, more = _sorted_out(names, values, is_known)
            names, values = tuple(simple), list(simple.values())
            own += more
        marks += kind, names, values
        if module._forward_hooks or module._forward_pre_hooks:
            # torch numbers hooks and does not reuse numbers.
            marks.append((tuple(module._forward_hooks), tuple(module._forward_pre_hooks)))
        for name, tensor in own:
            if tensor is not None:
                marks += name, _place(tensor)
                tensors.append(tensor)
        for name, child in module._modules.items():
            if child is not None:
                if (place := places.setdefault(id(child), len(found))) == len(found):
                    found.append(child)
                marks += name, place
        if module.training:
            drops = drops or _drops(module)
    # Takes a quarter of the time of repr. Version 2 writes values only; later ones also object identity.
    return marshal.dumps(marks, 2), tensors, drops


def _sorted_out(
    names: Iterable[str], values: Iterable[Any], is_known: bool
) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]:
    """Return the attributes of a module that are part of its identity, as simple values, and its tensors."""
    simple: dict[str, Any] = {}
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, value in zip(names, values, strict=True):
        if type(value) in SIMPLE:
            simple[name] = value
        elif type(value) in NESTED and not is_known:
            simple[name] = repr(value)
        elif isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif name == "forward":
            simple[name] = _number(value)
    return simple, tensors


@functools.lru_cache(maxsize=1024)
def _looked_at(kind: type[Any], names: tuple[str, ...]) -> tuple[int, bool, tuple[str, ...]]:
    """Return the number of a module type, whether it is a known one, and the attributes to look at."""
    is_known = kind.__module__.startswith(KNOWN)
    count = [name for name in names if name not in USUAL and not (is_known and name[0] == "_")]
    return _number(kind), is_known, tuple(count)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = tensor._version  # raises RuntimeError for tensors made in inference mode
    memory = tensor.untyped_storage()
    at = _number(memory), memory.nbytes(), tensor.storage_offset(), tensor.stride()
    return at, version, tuple(tensor.shape), str(tensor.dtype)


def _number(thing: Any) -> int:
    """Return a number that no other object in this process has or had."""
    found = _numbers.get(thing)
    if found is None:
        found = _numbers[thing] = next(_unused)
    return found


@functools.lru_cache(maxsize=1024)
def _grid(shape: torch.Size) -> tuple[tuple[int], tuple[int]]:
    """Return the size and stride of a sample of a contiguous tensor, spread over its rows and columns."""
    size, row = shape.numel(), shape[-1] if shape else 1
    step = max(1, size // SAMPLE)
    if step > row:  # the column moves by the golden ratio from row to row, so that columns are spread
        step = step // row * row - row + max(1, round(0.618 * row))
    else:
        step = next((s for s in range(step, 1, -1) if math.gcd(s, row) == 1), 1)
    return (min(SAMPLE, size),), (step,)


def _drops(module: torch.nn.Module) -> bool:
    """Return whether a module in training mode applies dropout."""
    return any("dropout" in name and value for name, value in vars(module).items()) or bool(
        getattr(module, "p", 0) and "Dropout" in type(module).__name__
    )


def settings(config: Any) -> list[tuple[str, str]]:
    """Return the settings of a config as text."""
    config = config.get_text_config(decoder=True)
    found = [(name, repr(value)) for name, value in vars(config).items() if name[0] != "_"]
    return [("attention", str(config._attn_implementation)), *sorted(found)]
