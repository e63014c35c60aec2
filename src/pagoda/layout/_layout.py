"""A model's layers, and every question about their memory. In: kinds of layers; out: groups, bytes,
lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from pagoda.errors import ArgumentError, ConfigError
from pagoda.layout._groups import PagedGroup, StateGroup, form_groups
from pagoda.layout._kinds import Kind, SharedAttention, Storage
from pagoda.layout._numbers import count, integer
from pagoda.layout._sizing import Budget, Mix, divide, longest_request, max_requests, memory_for

__all__ = ["Layout", "Need"]


@dataclass(frozen=True)
class Need:
    """What a group has to hold for a request to resume: `pages`, by their place in the request, or
    a checkpoint of `checkpoint_bytes` taken at that length."""

    group: str
    pages: tuple[range, ...] = ()
    checkpoint_bytes: int = 0


class Layout:
    """What every layer of a model stores, and the groups they form. Frozen; equal when its layers and pages
    are.

    `layers` has a Kind a layer, or a list of them where a layer keeps more than one thing (attention beside a
    state), or an empty list where it keeps nothing. `page_tokens` is the tokens of a page: one number for all
    groups, or a number a group by name; left out, 16, for latent attention 64, for compressed attention
    the least tokens after which an entry of every ratio is whole. No group is padded to the pages of another.
    `name` and `context` (the longest the model was made for) are for people to read.

    Cost: O(layers). Errors: ConfigError.
    """

    _layers: tuple[tuple[Kind, ...], ...]
    _groups: tuple[PagedGroup | StateGroup, ...]
    _name: str
    _context: int | None

    def __init__(
        self,
        layers: Sequence[Kind | Sequence[Kind]],
        page_tokens: int | Mapping[str, int] | None = None,
        *,
        name: str = "",
        context: int | None = None,
    ) -> None:
        sizes = dict(page_tokens) if isinstance(page_tokens, Mapping) else page_tokens
        read = _read_layers(layers)
        self.__dict__.update(
            _layers=read,
            _name=str(name),
            _context=None if context is None else count(context, "context"),
            _groups=form_groups(read, sizes),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Layout is frozen: make another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a Layout is frozen: make another one")

    @property
    def layers(self) -> tuple[tuple[Kind, ...], ...]:
        """What each layer keeps, by its number. O(1)."""
        return self._layers

    @property
    def groups(self) -> tuple[PagedGroup | StateGroup, ...]:
        """The groups: paged ones in the order of their first layer, then the states. O(1)."""
        return self._groups

    @property
    def name(self) -> str:
        """What the model is called; may be empty. O(1)."""
        return self._name

    @property
    def context(self) -> int | None:
        """The longest context the model was made for, if known. O(1)."""
        return self._context

    @property
    def page_tokens(self) -> dict[str, int]:
        """Tokens of a page of each paged group. O(groups)."""
        return {group.name: group.page_tokens for group in self.paged_groups}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self._layers == other._layers and self._groups == other._groups

    def __hash__(self) -> int:
        return hash((self._layers, self._groups))

    def __repr__(self) -> str:
        groups = ", ".join(f"{group.name} × {len(group.layers)}" for group in self._groups)
        return f"Layout({self._name or 'no name'}: {len(self._layers)} layers; {groups or 'nothing stored'})"

    @cached_property
    def paged_groups(self) -> tuple[PagedGroup, ...]:
        """The groups that have pages. O(1)."""
        return tuple(group for group in self._groups if isinstance(group, PagedGroup))

    @cached_property
    def state_group(self) -> StateGroup | None:
        """The group of all states, or None. O(1)."""
        return next((group for group in self._groups if isinstance(group, StateGroup)), None)

    def group(self, name: str) -> PagedGroup | StateGroup:
        """The group of that name. O(groups). Errors: ArgumentError, listing the names."""
        for group in self._groups:
            if group.name == name:
                return group
        names = ", ".join(group.name for group in self._groups)
        raise ArgumentError(f"name: there is no group {str(name)[:40]!r}, only {names or 'none'}")

    def source(self, layer: int) -> int:
        """The layer whose keys and values this one reads: itself, or the one it shares. O(1).

        Errors: ArgumentError.
        """
        for kind in self._layers[self._number(layer)]:
            if isinstance(kind, SharedAttention):
                return kind.layer
        return self._number(layer)

    def layer_bytes(self, layer: int, length: int) -> dict[str, int]:
        """Bytes that one layer has to keep for a request of `length` tokens, by tensor, before they are cut
        into pages: what the next token will read, and all of a state. O(layers). Errors: ArgumentError,
        ConfigError."""
        number = self._number(layer)
        count(length, "length", low=0)
        stored: dict[str, int] = {}
        for group in self._groups:
            stored |= group.layer_bytes(number, length)
        return stored

    @property
    def token_bytes(self) -> Fraction:
        """Bytes that one more token costs for good: pages of groups that keep every token, padding included.

        O(groups). Windows and states do not grow, and do not count here.
        """
        return sum((g.token_bytes for g in self.paged_groups if g.window is None), Fraction(0))

    def request_bytes(self, length: int, step: int = 1) -> int:
        """The most bytes that a request of `length` tokens holds while it grows by `step` at a time.
        O(groups).

        Whole pages, and a row of states. Errors: ConfigError.
        """
        return sum(group.peak_units(length, step) * group.unit_bytes for group in self._groups)

    @cached_property
    def resume_step(self) -> int:
        """Requests resume at multiples of this: where every group has whole pages. O(1)."""
        return math.lcm(*(group.page_tokens for group in self.paged_groups))

    def resume_lengths(self, length: int) -> range:
        """At which lengths a request of `length` tokens can resume, 0 aside; at least its last token is
        computed.

        O(1). Errors: ConfigError.
        """
        return range(self.resume_step, count(length, "length", low=0), self.resume_step)

    def resume_needs(self, length: int) -> tuple[Need, ...]:
        """What each group has to hold for a request to resume at `length`. O(groups).

        Errors: ArgumentError for a length at which nothing can resume.
        """
        number = integer(length, "length", 0, ArgumentError)
        if number % self.resume_step:
            raise ArgumentError(
                f"length: requests resume at multiples of {self.resume_step}, not {min(number, 10**18)}"
            )
        if number == 0:
            return tuple(Need(group.name) for group in self._groups)
        return tuple(
            Need(group.name, pages=group.live_pages(number))
            if isinstance(group, PagedGroup)
            else Need(group.name, checkpoint_bytes=group.checkpoint_bytes)
            for group in self._groups
        )

    def shard(self, ranks: int) -> Layout:
        """The layout of each of `ranks` tensor-parallel ranks: heads divided, or repeated where ranks
        outnumber KV heads; what all heads share is on every rank. O(layers). Errors: ConfigError."""
        count(ranks, "ranks")
        layers = []
        for number, kinds in enumerate(self._layers):
            try:
                layers.append([kind.shard(ranks) for kind in kinds])
            except ConfigError as unfit:
                raise ConfigError(f"layer {number}: {unfit}") from None
        # Groups that differed in their heads alone may be one now.
        sizes: dict[Storage, int] = {}
        for group in self.paged_groups:
            first = group.layers[0]
            pairs = zip(layers[first], self._layers[first], strict=True)
            pages = next(new.storage for new, old in pairs if old.storage == group.storage)
            if pages is not None and sizes.setdefault(pages, group.page_tokens) != group.page_tokens:
                raise ConfigError(
                    f"group {group.name} is one with another on {ranks} ranks: give both one page size"
                )
        names = Layout(layers).paged_groups
        return Layout(
            layers, {g.name: sizes[g.storage] for g in names}, name=self._name, context=self._context
        )

    def divide(self, memory: int | str, mix: Mix, *, chunk: int = 1, checkpoints: int = 0) -> Budget:
        """Divide bytes between the groups so that as many requests as possible run at once.

        `memory` is a number or text such as '80GiB'. `mix` says how long requests are: a length, a list, an
        array or another iterable of lengths, or lengths with their weights; each counts with the most it
        holds while it grows. `chunk` tokens of prefill are in flight a step, over all requests: windows hold
        them besides. `checkpoints` are kept a request besides its own row of states; each is charged a whole
        row, because it lies in the pool of states, even where it needs less of one (`checkpoint_bytes`).
        O(lengths × groups × log memory). Errors: ConfigError, also when the longest of the mix does not fit
        by itself."""
        return divide(self._groups, memory, mix, chunk, checkpoints)

    def max_requests(self, memory: int | str, length: int, *, chunk: int = 1, checkpoints: int = 0) -> int:
        """How many requests of `length` tokens fit into `memory` at once; 0 when not one does. O(groups).

        Arguments as for `divide`. Errors: ConfigError.
        """
        return max_requests(self._groups, memory, length, chunk, checkpoints)

    def memory_for(self, requests: int, length: int, *, chunk: int = 1, checkpoints: int = 0) -> int:
        """Bytes in which so many requests of `length` tokens fit at once, padding included. O(groups).

        Arguments as for `divide`. Errors: ConfigError.
        """
        return memory_for(self._groups, requests, length, chunk, checkpoints)

    def longest_request(self, memory: int | str, *, chunk: int = 1, checkpoints: int = 0) -> int | None:
        """Tokens of the longest request that fits by itself; None when any does, 0 when none. O(groups ×
        log memory).

        Errors: ConfigError.
        """
        return longest_request(self._groups, memory, chunk, checkpoints)

    def _number(self, layer: int) -> int:
        number = integer(layer, "layer", 0, ArgumentError)
        if number >= len(self._layers):
            raise ArgumentError(
                f"layer: there are layers 0 to {len(self._layers) - 1}, not {min(number, 10**18)}"
            )
        return number


def _read_layers(layers: Any) -> tuple[tuple[Kind, ...], ...]:
    """Layers as tuples of kinds, or a ConfigError that names the layer."""
    if isinstance(layers, (Kind, str)) or not isinstance(layers, Sequence):
        raise ConfigError("layers: give a list with what each layer keeps")
    read = tuple((kinds,) if isinstance(kinds, Kind) else kinds for kinds in layers)
    if not read:
        raise ConfigError("layers: give at least one")
    for number, kinds in enumerate(read):
        if isinstance(kinds, str) or not isinstance(kinds, Sequence):
            raise ConfigError(f"layers[{number}]: give a Kind, or a list of them")
        for kind in kinds:
            if not isinstance(kind, Kind):
                raise ConfigError(f"layers[{number}]: give a Kind, not {type(kind).__name__}")
            if isinstance(kind, SharedAttention) and (
                kind.layer >= number or not any(other.storage for other in read[kind.layer])
            ):
                raise ConfigError(
                    f"layers[{number}] shares layer {kind.layer}: give an earlier one that keeps pages"
                )
        names = [part.name for kind in kinds for part in kind.state]
        paged = [entry.name for kind in kinds if kind.storage for entry in kind.storage.entries]
        if len({*names, *paged}) < len(names) + len(paged):
            raise ConfigError(f"layers[{number}] keeps two things of one name: {', '.join(names + paged)}")
    return tuple(tuple(kinds) for kinds in read)
