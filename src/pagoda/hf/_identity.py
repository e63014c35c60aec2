"""Which weights a model has, so that what others computed is never found. In: a model; out: a short text.

Part of it is which memory each tensor has and how often it was written in place; writes that torch does not
count (`parameter.data`, numpy) are seen where a sample of its elements changes. Kinds of modules, their
settings, hooks, the config and the way attention is computed count too. What escapes: writing to a small
part of a tensor behind torch's back, and functions that change their mind."""

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

SAMPLE = 64  # elements of each tensor
SIMPLE = {bool, int, float, str}
NESTED = {dict, list, tuple}
PLAIN = {torch.Tensor, torch.nn.Parameter}
USUAL = frozenset(torch.nn.Module().__dict__) - {"training"}  # what every module has
# Modules of these keep their settings in plain names; names with an underscore are notes while they run.
KNOWN = ("torch.", "transformers.")

# Addresses are used again when what was there is gone: numbers are not.
_unused = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def identity(model: torch.nn.Module) -> str:
    """16 hexadecimal digits. Cost and errors as of `Look`."""
    return Look(model).identity


class Look:
    """One look at a model. Holds windows into its weights, so keep it no longer than a call.

    Cost: a walk over all modules, and one copy of a sample to the host: some 0.1 ms a layer; on a GPU it
    waits for the device. Errors: RuntimeError for tensors that do not count writes, and
    what else torch or marshal say of tensors and names of other kinds."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._marks, tensors, self.drops = _marks(model)
        self._samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._is_window = True  # the samples are of the weights themselves, not of copies
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel() and not tensor.is_meta:
                    if type(tensor) not in PLAIN or not tensor.is_contiguous():
                        tensor, self._is_window = tensor.flatten(), False  # few are so
                    sample = tensor.as_strided(*_grid(tensor.shape))
                    self._samples.setdefault((tensor.dtype, tensor.device), []).append(sample)
        self._elements = self._read()
        digest = hashlib.blake2b(self._marks, digest_size=8)
        digest.update(self._elements)
        self.identity = digest.hexdigest()

    def is_still(self, model: torch.nn.Module) -> bool:
        """Whether it would look the same now. Cost: three quarters of a look. Errors: as above."""
        if not self._is_window:
            return Look(model).identity == self.identity
        # With the same marks tensors have the same memory: that which the samples look into.
        return _marks(model)[0] == self._marks and self._read() == self._elements

    def _read(self) -> bytes:
        """The elements that the samples have now, kind by kind."""
        read: list[bytes] = []
        for (dtype, device), some in self._samples.items():
            elements = torch.cat(some).cpu().contiguous().view(torch.uint8)
            read += f"{dtype} {device} {len(elements)}".encode(), elements.numpy().tobytes()
        return b"".join(read)


def _marks(model: torch.nn.Module) -> tuple[bytes, list[torch.Tensor], bool]:
    """All of a model that is no element of a tensor, its tensors, and whether some part drops things.

    Walks over the modules anew each time, so that what was added, replaced or taken away is seen."""
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
        if not SIMPLE.issuperset(map(type, values)):  # of few modules
            simple, more = _sorted_out(names, values, is_known)
            names, values = tuple(simple), list(simple.values())
            own += more
        marks += kind, names, values
        if module._forward_hooks or module._forward_pre_hooks:
            # Torch numbers hooks: none has the number of one that is gone.
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
    # A quarter of the time of repr. Version 2 writes values alone, later ones also which are one object.
    return marshal.dumps(marks, 2), tensors, drops


def _sorted_out(
    names: Iterable[str], values: Iterable[Any], is_known: bool
) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]:
    """Of a module's attributes those that count, as simple values, and the tensors among them."""
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
    """The number of a kind of module, whether it is a known one, and which of its attributes count."""
    is_known = kind.__module__.startswith(KNOWN)
    count = [name for name in names if name not in USUAL and not (is_known and name[0] == "_")]
    return _number(kind), is_known, tuple(count)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = tensor._version  # a RuntimeError for those made in inference mode
    memory = tensor.untyped_storage()
    at = _number(memory), memory.nbytes(), tensor.storage_offset(), tensor.stride()
    return at, version, tuple(tensor.shape), str(tensor.dtype)


def _number(thing: Any) -> int:
    """A number that nothing else has or had, in this process."""
    found = _numbers.get(thing)
    if found is None:
        found = _numbers[thing] = next(_unused)
    return found


@functools.lru_cache(maxsize=1024)
def _grid(shape: torch.Size) -> tuple[tuple[int], tuple[int]]:
    """How many elements of a contiguous tensor are a sample, and how far it is from one to the next: spread
    over rows and columns."""
    size, row = shape.numel(), shape[-1] if shape else 1
    step = max(1, size // SAMPLE)
    if step > row:  # from row to row the column moves by the golden section: columns far apart come first
        step = step // row * row - row + max(1, round(0.618 * row))
    else:
        step = next((s for s in range(step, 1, -1) if math.gcd(s, row) == 1), 1)
    return (min(SAMPLE, size),), (step,)


def _drops(module: torch.nn.Module) -> bool:
    """Whether a module in training mode leaves things out at random."""
    return any("dropout" in name and value for name, value in vars(module).items()) or bool(
        getattr(module, "p", 0) and "Dropout" in type(module).__name__
    )


def settings(config: Any) -> list[tuple[str, str]]:
    """What a config says, as text."""
    config = config.get_text_config(decoder=True)
    found = [(name, repr(value)) for name, value in vars(config).items() if name[0] != "_"]
    return [("attention", str(config._attn_implementation)), *sorted(found)]
