"""Pages of entries as bytes. Compressed attention stores one entry per few tokens.

In: a group, or entries and sizes; out: the tensors that kernels write and read, and typed views of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout import Entry, PagedGroup, TensorSpec
from pagoda.layout._numbers import count, show
from pagoda.pools._arguments import filled, layer_number, resolve_device
from pagoda.pools._pages import PagePool
from pagoda.pools._staging import Staging

__all__ = ["EntryPool"]


class EntryPool(PagePool):
    """`num_pages` pages of `entries_per_page` entries each, for `num_layers` layers; page 0 is padding.

    `pages[name][layer]` holds the entries of that name: [num_pages + 1, page_bytes] uint8. A page has the
    data of all its entries, then the scales of all, then padding, as its `Entry` says::

        | data 0 | data 1 | … | scales 0 | scales 1 | … | padding |

    Tensors are zeros at first and never move; kernels write and read them.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        num_pages: int,
        entries_per_page: int,
        num_layers: int,
        entries: Sequence[Entry],
        device: torch.device | str = "cuda",
        *,
        staging: Staging | None = None,
    ) -> None:
        self.num_pages = count(num_pages, "num_pages", low=0)
        self.entries_per_page = count(entries_per_page, "entries_per_page")
        self.num_layers = count(num_layers, "num_layers")
        self.entries = _checked(entries)
        self.device = resolve_device(device)
        if self.num_pages >= 2**31:
            raise ConfigError("num_pages: page ids exceed 2^31: give fewer pages")
        self.pages: dict[str, list[torch.Tensor]] = {
            name: [
                filled(
                    (self.num_pages + 1, entry.page_bytes(self.entries_per_page)), torch.uint8, self.device
                )
                for _ in range(self.num_layers)
            ]
            for name, entry in self.entries.items()
        }
        self._hold([page for pair in zip(*self.pages.values(), strict=True) for page in pair], staging)
        self._at = self._find()

    @classmethod
    def from_group(
        cls,
        group: PagedGroup,
        num_pages: int,
        device: torch.device | str = "cuda",
        *,
        staging: Staging | None = None,
    ) -> EntryPool:
        """Allocate the pool of a group. Layers are numbered from 0 in the order of `group.layers`.

        Errors: ConfigError.
        """
        if not isinstance(group, PagedGroup):
            raise ConfigError(f"group: give a PagedGroup of a Layout, not {type(group).__name__}")
        return cls(
            num_pages,
            group.entries_per_page,
            len(group.layers),
            group.storage.entries,
            device,
            staging=staging,
        )

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Return a layer's pages by entry name: [num_pages + 1, page_bytes] uint8 each.

        Errors: ArgumentError.
        """
        at = layer_number(layer, self.num_layers)
        return {name: tensors[at] for name, tensors in self.pages.items()}

    def view(self, layer: int, entry: str, part: str) -> torch.Tensor:
        """View one part of all entries of a layer in its dtype: [num_pages + 1, entries_per_page, *shape].

        The view is of uint8 where torch is too old for the dtype. Errors: ArgumentError for an unknown name,
        or for a part that is not aligned to its dtype.
        """
        at = layer_number(layer, self.num_layers)
        if entry not in self.entries:
            raise ArgumentError(
                f"entry: there is no {show(entry)}: the entries are {', '.join(map(repr, self.entries))}"
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
                f"part: {part} of {entry} is not aligned to {found.dtype}: read it as bytes"
            ) from None
        return typed.view(*typed.shape[:2], *found.shape)

    def _part(self, entry: Entry, name: str) -> tuple[TensorSpec, int, int]:
        """Return a part of an entry, its first offset in a page, and its stride between entries, in bytes."""
        for parts, begin, stride in (
            (entry.parts, 0, entry.data_bytes),
            (entry.scales, self.entries_per_page * entry.data_bytes, entry.scale_bytes),
        ):
            for part in parts:
                if part.name == name:
                    return part, begin, stride
                begin += part.num_bytes
        names = ", ".join(repr(part.name) for part in (*entry.parts, *entry.scales))
        raise ArgumentError(f"part: entry {entry.name} has no part {show(name)}: the parts are {names}")

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if self._find() != self._at:
            raise InvariantError(6, "a tensor of pages has moved")

    def _find(self) -> dict[str, list[int]]:
        return {name: [tensor.data_ptr() for tensor in tensors] for name, tensors in self.pages.items()}


def _checked(entries: object) -> dict[str, Entry]:
    """Return entries by name. Errors: ConfigError."""
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not 1 <= len(entries) <= 2:
        raise ConfigError("entries: give a list of one Entry or two")
    for entry in entries:
        if not isinstance(entry, Entry):
            raise ConfigError(f"entries: give an Entry, not {type(entry).__name__}")
    named = {entry.name: entry for entry in entries}
    if len(named) < len(entries):
        raise ConfigError(f"entries: names must differ: {', '.join(entry.name for entry in entries)}")
    return named
