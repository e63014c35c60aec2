"""Pages of entries as bytes: what compressed attention keeps of every few tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import Entry, PagedGroup, TensorSpec
from pagoda.layout._numbers import count, show
from pagoda.pools._arguments import filled, layer_number, resolve_device

__all__ = ["EntryPool"]


class EntryPool:
    """Pages of `entries_per_page` entries, `num_pages` of them, for `num_layers` layers; page 0 is null.

    `pages[name][layer]` holds the entries of that name: [num_pages + 1, page_bytes] uint8. A page has the
    data of all its entries, then the scales of all, then padding, as its `Entry` says::

        | data 0 | data 1 | … | scales 0 | scales 1 | … | padding |

    Tensors begin as zeros and never move; kernels write and read them.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        num_pages: int,
        entries_per_page: int,
        num_layers: int,
        entries: Sequence[Entry],
        device: torch.device | str = "cuda",
    ) -> None:
        self.num_pages = count(num_pages, "num_pages", low=0)
        self.entries_per_page = count(entries_per_page, "entries_per_page")
        self.num_layers = count(num_layers, "num_layers")
        self.entries = _checked(entries)
        self.device = resolve_device(device)
        if self.num_pages >= 2**31:
            raise ConfigError("num_pages: ids pass 2^31: give fewer")
        self.pages: dict[str, list[torch.Tensor]] = {
            name: [
                filled(
                    (self.num_pages + 1, entry.page_bytes(self.entries_per_page)), torch.uint8, self.device
                )
                for _ in range(self.num_layers)
            ]
            for name, entry in self.entries.items()
        }
        self._at = self._addresses()

    @classmethod
    def from_group(cls, group: PagedGroup, num_pages: int, device: torch.device | str = "cuda") -> EntryPool:
        """The pool of a group of layers: its page has the bytes that the group says.

        Layers are numbered from 0 in the order of `group.layers`. Cost: that of the memory. Errors:
        ConfigError.
        """
        if not isinstance(group, PagedGroup):
            raise ConfigError(f"group: give a PagedGroup of a Layout, not {type(group).__name__}")
        return cls(num_pages, group.entries_per_page, len(group.layers), group.storage.entries, device)

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's pages, by the name of the entry: [num_pages + 1, page_bytes] uint8. O(entries).

        Errors: ArgumentError.
        """
        at = layer_number(layer, self.num_layers)
        return {name: tensors[at] for name, tensors in self.pages.items()}

    def view(self, layer: int, entry: str, part: str) -> torch.Tensor:
        """One part of all entries of a layer as what it is: [num_pages + 1, entries_per_page, *shape].

        A view of the bytes, of the part's dtype; of uint8 where torch is too old to know that one. O(1).
        Errors: ArgumentError for a name that is not there, or a part whose bytes lie between the places of
        its numbers, which no view can have.
        """
        at = layer_number(layer, self.num_layers)
        if entry not in self.entries:
            raise ArgumentError(
                f"entry: there is no {show(entry)} here, only {', '.join(map(repr, self.entries))}"
            )
        found, begin, stride = self._part(self.entries[entry], part)
        pages = self.pages[entry][at]
        raw = pages.as_strided(
            (self.num_pages + 1, self.entries_per_page, found.num_bytes), (pages.shape[1], stride, 1), begin
        )
        try:
            typed: torch.Tensor = raw.view(getattr(torch, found.dtype, torch.uint8))
        except RuntimeError:
            raise ArgumentError(
                f"part: {part} of {entry} lies between the places of {found.dtype}: read it as bytes"
            ) from None
        return typed.view(*typed.shape[:2], *found.shape)

    def _part(self, entry: Entry, name: str) -> tuple[TensorSpec, int, int]:
        """A part of an entry, where in a page the first one begins, and how far the next is."""
        for parts, begin, stride in (
            (entry.parts, 0, entry.data_bytes),
            (entry.scales, self.entries_per_page * entry.data_bytes, entry.scale_bytes),
        ):
            for part in parts:
                if part.name == name:
                    return part, begin, stride
                begin += part.num_bytes
        names = ", ".join(repr(part.name) for part in (*entry.parts, *entry.scales))
        raise ArgumentError(f"part: {entry.name} has no {show(name)}, only {names}")

    def memory_bytes(self) -> int:
        """Bytes of all pages, page 0 included. O(layers)."""
        return sum(math.prod(tensor.shape) for tensors in self.pages.values() for tensor in tensors)

    def check(self) -> None:
        """Verify invariant 6. O(layers). Errors: InvariantError."""
        if self._addresses() != self._at:
            raise InvariantError(6, "pages of entries have moved")

    def _addresses(self) -> dict[str, list[int]]:
        return {name: [tensor.data_ptr() for tensor in tensors] for name, tensors in self.pages.items()}


def _checked(entries: object) -> dict[str, Entry]:
    """Entries by their names, or a ConfigError."""
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        raise ConfigError("entries: give at least one Entry, in a list")
    for entry in entries:
        if not isinstance(entry, Entry):
            raise ConfigError(f"entries: give an Entry, not {type(entry).__name__}")
    named = {entry.name: entry for entry in entries}
    if len(named) < len(entries):
        raise ConfigError(f"entries: two are named alike: {', '.join(entry.name for entry in entries)}")
    return named
