"""Groups: layers with one geometry and one lifetime, which share ids, a free-list, a table and a budget.

In: what layers keep; out: pages and rows, in bytes, for a length. A paged group has pages; all layers that
keep states form one group, whose unit is a request's row: its layers may differ, because one id names the
states of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pagoda.errors import ConfigError
from pagoda.layout._entries import TensorSpec
from pagoda.layout._kinds import Kind, Storage
from pagoda.layout._numbers import count, show

__all__ = ["PagedGroup", "StateGroup", "form_groups"]

# Tokens of a page where nobody says: what most kernels take; FlashMLA takes 64.
_USUAL_PAGE_TOKENS = {"full": 16, "window": 16, "latent": 64}


@dataclass(frozen=True)
class PagedGroup:
    """Layers that keep `storage` in pages of `page_tokens` tokens: one page id is valid in all of them.

    A page of a group is a page in each tensor of each layer. `layers` are numbers in the model.
    Errors: ConfigError for pages that hold no whole number of entries.
    """

    name: str
    layers: tuple[int, ...]
    storage: Storage
    page_tokens: int

    def __post_init__(self) -> None:
        count(self.page_tokens, f"page_tokens of {self.name}")
        if self.page_tokens % self.storage.ratio:
            raise ConfigError(
                f"page_tokens of {self.name}: give a multiple of {self.storage.ratio}, "
                "the tokens of one entry"
            )

    @property
    def window(self) -> int | None:
        """Tokens that a query reads, its own included; None if all. O(1)."""
        return self.storage.window

    @property
    def entries_per_page(self) -> int:
        """Entries of a page. O(1)."""
        return self.page_tokens // self.storage.ratio

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers of the group, its padding included. O(tensors of a layer)."""
        return len(self.layers) * sum(
            entry.page_bytes(self.entries_per_page) for entry in self.storage.entries
        )

    @property
    def unit_bytes(self) -> int:
        """As `page_bytes`: what one more id costs. O(tensors of a layer)."""
        return self.page_bytes

    @property
    def token_bytes(self) -> Fraction:
        """Bytes a token in all layers of the group, padding of pages included. O(tensors of a layer)."""
        return Fraction(self.page_bytes, self.page_tokens)

    @property
    def unpadded_token_bytes(self) -> Fraction:
        """Bytes a token in all layers of the group, without padding. O(tensors of a layer)."""
        return Fraction(
            len(self.layers) * sum(entry.num_bytes for entry in self.storage.entries), self.storage.ratio
        )

    def live_pages(self, length: int) -> tuple[range, ...]:
        """Which pages of a request still matter once `length` tokens are stored, to go on from there. O(1).

        [0, sink pages) and [first page the window reaches, end). Errors: ConfigError below 0.
        """
        end = -(-count(length, "length", low=0) // self.page_tokens)
        if self.window is None:
            return (range(end),)
        first = max(0, length - self.window + 1) // self.page_tokens
        sinks = min(-(-self.storage.sink_tokens // self.page_tokens), first)
        return (range(sinks), range(first, end)) if sinks else (range(first, end),)

    def num_pages(self, length: int) -> int:
        """Pages of a request of `length` stored tokens, once those that left its window are freed. O(1)."""
        return sum(map(len, self.live_pages(length)))

    def peak_units(self, length: int, step: int = 1) -> int:
        """The most pages a request holds while it grows to `length` tokens, `step` at a time. O(1).

        Before a step the pages behind the window are freed; during it the window of its first token and the
        step's own tokens are held, wherever they begin in a page. Errors: ConfigError.
        """
        length, step = count(length, "length", low=0), count(step, "step")
        whole = -(-length // self.page_tokens)
        if self.window is None:
            return whole
        held = self.window - 1 + step
        sinks = -(-self.storage.sink_tokens // self.page_tokens)
        return min(whole, sinks + (held + self.page_tokens - 2) // self.page_tokens + 1)

    def layer_bytes(self, layer: int, length: int) -> dict[str, int]:
        """Bytes that a layer, by its number in the model, has to keep of `length` tokens, by tensor, pages
        aside; nothing if it is not of this group. O(layers + tensors). Errors: ConfigError."""
        kept = count(length, "length", low=0)
        if layer not in self.layers:
            return {}
        if self.window is not None:
            kept = min(kept, self.window - 1 + min(self.storage.sink_tokens, max(0, kept - self.window + 1)))
        return {entry.name: kept // self.storage.ratio * entry.num_bytes for entry in self.storage.entries}


@dataclass(frozen=True)
class StateGroup:
    """Layers that keep a state: one row id names a request's states in all of them.

    `parts[i]` is what layer `layers[i]` keeps a row, `checkpoint_bytes` what a checkpoint has to keep of a
    row."""

    name: str
    layers: tuple[int, ...]
    parts: tuple[tuple[TensorSpec, ...], ...]
    checkpoint_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all layers. O(layers)."""
        return sum(part.num_bytes for parts in self.parts for part in parts)

    @property
    def unit_bytes(self) -> int:
        """As `row_bytes`: what one more id costs. O(layers)."""
        return self.row_bytes

    def peak_units(self, length: int, step: int = 1) -> int:
        """Rows of a request: one, however long. O(1)."""
        return 1

    def layer_bytes(self, layer: int, length: int) -> dict[str, int]:
        """Bytes that a layer, by its number in the model, keeps of a request, by part, however long it is;
        nothing if it is not of this group. O(layers). Errors: ConfigError."""
        count(length, "length", low=0)
        if layer not in self.layers:
            return {}
        return {part.name: part.num_bytes for part in self.parts[self.layers.index(layer)]}


def form_groups(
    layers: Sequence[Sequence[Kind]], page_tokens: dict[str, int] | int | None
) -> tuple[PagedGroup | StateGroup, ...]:
    """The groups of a model's layers, in the order of their first layer; states come last. O(layers).

    Errors: ConfigError for page sizes that do not fit a group, or that name none.
    """
    members: dict[Storage, list[int]] = {}
    states: dict[int, list[Kind]] = {}
    for number, kinds in enumerate(layers):
        for kind in kinds:
            if kind.storage is not None:
                members.setdefault(kind.storage, []).append(number)
            if kind.state:
                states.setdefault(number, []).append(kind)
    names: dict[str, Storage] = {}
    for pages in members:
        same = sum(other.name == pages.name for other in names.values())
        names[pages.name if not same else f"{pages.name}-{same + 1}"] = pages
    if isinstance(page_tokens, dict):
        for key, tokens in page_tokens.items():
            if key not in names:
                raise ConfigError(
                    f"page_tokens: there is no paged group {show(key)}, only {', '.join(names) or 'none'}"
                )
            count(tokens, f"page_tokens of {key}")
    elif page_tokens is not None and not names:
        count(page_tokens, "page_tokens")
    # Where attention is compressed at several ratios, a page of each ends where all have a whole entry.
    together = math.lcm(*(pages.ratio for pages in members))
    groups: list[PagedGroup | StateGroup] = []
    for name, pages in names.items():
        tokens = _page_tokens(name, pages, page_tokens, together)
        groups.append(PagedGroup(name, tuple(members[pages]), pages, tokens))
    if states:
        parts = tuple(tuple(part for kind in kinds for part in kind.state) for kinds in states.values())
        checkpoint_bytes = sum(kind.checkpoint_bytes for kinds in states.values() for kind in kinds)
        groups.append(StateGroup("state", tuple(states), parts, checkpoint_bytes))
    return tuple(groups)


def _page_tokens(name: str, pages: Storage, given: dict[str, int] | int | None, together: int) -> int:
    usual = together if pages.ratio > 1 else _USUAL_PAGE_TOKENS.get(pages.name, 16)
    tokens = given.get(name, usual) if isinstance(given, dict) else usual if given is None else given
    count(tokens, f"page_tokens of {name}")
    if pages.ratio > 1 and tokens % together:
        raise ConfigError(
            f"page_tokens of {name}: give a multiple of {together}, where entries of all ratios end, "
            f"not {tokens}"
        )
    return tokens
