"""A model's layers and the memory they need. In: kinds of layers; out: groups, bytes, lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from pagoda.errors import ArgumentError, ConfigError
from pagoda.layout._groups import PagedGroup, StateGroup, form_groups
from pagoda.layout._kinds import Kind, SharedAttention, Storage
from pagoda.layout._numbers import count, integer
from pagoda.layout._sizing import (
    CHECKPOINTS,
    Budget,
    Mix,
    Running,
    divide,
    longest_request,
    max_requests,
    memory_for,
)

__all__ = ["Layout", "Need"]


@dataclass(frozen=True)
class Need:
    """What a group needs for a request to resume: `pages`, as page numbers within the request, or
    a checkpoint of `checkpoint_bytes` taken at that length."""

    group: str
    pages: tuple[range, ...] = ()
    checkpoint_bytes: int = 0


class Layout:
    """What every layer of a model stores, and the groups that the layers form. Immutable. Layouts are equal
    if their layers and groups are equal.

    `layers` has one Kind per layer; a list of kinds if a layer stores several things (attention and a state),
    or an empty list if it stores nothing. `page_tokens` is the number of tokens per page, for all groups or
    by group name. The default is 16, for latent attention 64, and for compressed attention the least common
    multiple of all ratios. Groups are not padded to a common page size. A layout with states and no pages
    resumes at multiples of `page_tokens`, 16 by default. `name` and `context` (the longest context that the
    model was made for) are informative.

    Errors: ConfigError.
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
        raise AttributeError(f"{name}: a Layout is immutable: make a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a Layout is immutable: make a new one")

    @property
    def layers(self) -> tuple[tuple[Kind, ...], ...]:
        """The kinds of each layer, by layer number."""
        return self._layers

    @property
    def groups(self) -> tuple[PagedGroup | StateGroup, ...]:
        """The paged groups in the order of their first layer, then the group of states."""
        return self._groups

    @property
    def name(self) -> str:
        """The model's name; may be empty."""
        return self._name

    @property
    def context(self) -> int | None:
        """The longest context the model was made for, if known."""
        return self._context

    @property
    def page_tokens(self) -> dict[str, int]:
        """Tokens per page of each paged group, by name."""
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
        """The groups with pages."""
        return tuple(group for group in self._groups if isinstance(group, PagedGroup))

    @cached_property
    def state_group(self) -> StateGroup | None:
        """The group of all states, or None."""
        return next((group for group in self._groups if isinstance(group, StateGroup)), None)

    def group(self, name: str) -> PagedGroup | StateGroup:
        """Return the group called `name`. Errors: ArgumentError, listing the names."""
        for group in self._groups:
            if group.name == name:
                return group
        names = ", ".join(group.name for group in self._groups)
        raise ArgumentError(f"name: there is no group {str(name)[:40]!r}, only {names or 'none'}")

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values `layer` reads: itself, or the one it shares.

        Errors: ArgumentError.
        """
        for kind in self._layers[self._number(layer)]:
            if isinstance(kind, SharedAttention):
                return kind.layer
        return self._number(layer)

    def layer_bytes(self, layer: int, length: int) -> dict[str, int]:
        """Return the bytes by tensor that one layer has to keep for a request of `length` tokens: what the
        next token reads, without rounding up to pages, and the state. Errors: ArgumentError, ConfigError."""
        number = self._number(layer)
        count(length, "length", low=0)
        stored: dict[str, int] = {}
        for group in self._groups:
            stored |= group.layer_bytes(number, length)
        return stored

    @property
    def token_bytes(self) -> Fraction:
        """Bytes per token of all groups that keep every token, padding of pages included.

        Windows and states do not grow with the length and are not counted.
        """
        return sum((g.token_bytes for g in self.paged_groups if g.window is None), Fraction(0))

    def request_bytes(self, length: int, step: int = 1, in_flight: int = 0) -> int:
        """Return the most bytes that a request holds while it grows to `length` tokens by at most `step` per
        step, with `in_flight` steps in flight (see `divide`): its pages and state. Errors: ConfigError."""
        return sum(group.peak_units(length, step, in_flight) * group.unit_bytes for group in self._groups)

    @cached_property
    def resume_step(self) -> int:
        """Requests resume at multiples of this many tokens, where every group has whole pages and states may
        have a checkpoint."""
        return self._groups[0].resume_step if self._groups else 1

    def resume_lengths(self, length: int) -> range:
        """Return the lengths above 0 at which a request of `length` tokens can resume; at least its last
        token is computed. Errors: ConfigError."""
        return range(self.resume_step, count(length, "length", low=0), self.resume_step)

    def resume_needs(self, length: int) -> tuple[Need, ...]:
        """Return what each group needs for a request to resume at `length`.

        Errors: ArgumentError for a length that is not a multiple of `resume_step`.
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
        """Return the layout of each of `ranks` tensor-parallel ranks: heads are divided, or repeated if ranks
        outnumber KV heads; what all heads share is on every rank. Errors: ConfigError."""
        count(ranks, "ranks")
        layers = []
        for number, kinds in enumerate(self._layers):
            try:
                layers.append([kind.shard(ranks) for kind in kinds])
            except ConfigError as unfit:
                raise ConfigError(f"layer {number}: {unfit}") from None
        # Groups that differed only in their heads may now be one.
        sizes: dict[Storage, int] = {}
        for group in self.paged_groups:
            first = group.layers[0]
            pairs = zip(layers[first], self._layers[first], strict=True)
            storage = next(new.storage for new, old in pairs if old.storage == group.storage)
            if storage is not None and sizes.setdefault(storage, group.page_tokens) != group.page_tokens:
                raise ConfigError(
                    f"group {group.name} merges with another group on {ranks} ranks: give both the same "
                    "page_tokens"
                )
        names = Layout(layers).paged_groups
        page_tokens = {g.name: sizes[g.storage] for g in names} or self.resume_step
        return Layout(layers, page_tokens, name=self._name, context=self._context)

    def divide(
        self,
        memory: int | str,
        mix: Mix,
        *,
        chunk: int = 1,
        checkpoints: int = CHECKPOINTS,
        in_flight: int = 0,
    ) -> Budget:
        """Divide memory between the groups so that as many requests as possible run at once.

        `memory` is a number of bytes or text such as '80GiB'. `mix` is the length of requests: one length, an
        iterable of lengths, or a mapping from lengths to weights. Each request counts with the most that it
        holds while it grows. If the layout has states, the pool of checkpoints has a share of its own, with
        `checkpoints` of `checkpoint_bytes` for each request; with 0, no request resumes. The default, 2, has
        room for the end of a prompt and the end of its answer.

        A manager of this capacity runs these requests without a CapacityError if the engine works as follows.
        In step t, it reserves at most one token per request, except that some requests may share `chunk`
        tokens of prefill in any way; it plans the step; then it commits the tokens of step t − `in_flight`
        and passes its fence. An engine that waits for each step has 0 steps in flight. A request counts from
        its admission until the fence that its release waits for has passed. Computing cached tokens again
        takes more memory (docs/layouts.md).

        Errors: ConfigError, also if the longest request of the mix does not fit by itself."""
        return divide(self._groups, memory, mix, Running(chunk, checkpoints, in_flight))

    def max_requests(
        self,
        memory: int | str,
        length: int,
        *,
        chunk: int = 1,
        checkpoints: int = CHECKPOINTS,
        in_flight: int = 0,
    ) -> int:
        """Return how many requests of `length` tokens fit into `memory` at once, possibly 0.

        Arguments as for `divide`. Errors: ConfigError.
        """
        return max_requests(self._groups, memory, length, Running(chunk, checkpoints, in_flight))

    def memory_for(
        self,
        requests: int,
        length: int,
        *,
        chunk: int = 1,
        checkpoints: int = CHECKPOINTS,
        in_flight: int = 0,
    ) -> int:
        """Return the bytes needed for `requests` requests of `length` tokens at once, padding included.

        Arguments as for `divide`. Errors: ConfigError.
        """
        return memory_for(self._groups, requests, length, Running(chunk, checkpoints, in_flight))

    def longest_request(
        self, memory: int | str, *, chunk: int = 1, checkpoints: int = CHECKPOINTS, in_flight: int = 0
    ) -> int | None:
        """Return the length of the longest request that fits by itself; None if any length fits, 0 if
        none does.

        Arguments as for `divide`. Errors: ConfigError.
        """
        return longest_request(self._groups, memory, Running(chunk, checkpoints, in_flight))

    def _number(self, layer: int) -> int:
        number = integer(layer, "layer", 0, ArgumentError)
        if number >= len(self._layers):
            raise ArgumentError(
                f"layer: {min(number, 10**18)} is out of range: layers are 0 to {len(self._layers) - 1}"
            )
        return number


def _read_layers(layers: Any) -> tuple[tuple[Kind, ...], ...]:
    """Return layers as tuples of kinds. Errors: ConfigError, naming the layer."""
    if isinstance(layers, (Kind, str)) or not isinstance(layers, Sequence):
        raise ConfigError("layers: give a list with one Kind per layer")
    read = tuple((kinds,) if isinstance(kinds, Kind) else kinds for kinds in layers)
    if not read:
        raise ConfigError("layers: give at least one layer")
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
                    f"layers[{number}] shares layer {kind.layer}: give an earlier layer that stores pages"
                )
        names = [part.name for kind in kinds for part in kind.state]
        paged = [entry.name for kind in kinds if kind.storage for entry in kind.storage.entries]
        if len({*names, *paged}) < len(names) + len(paged):
            raise ConfigError(f"layers[{number}] stores duplicate names: {', '.join(names + paged)}")
    return tuple(tuple(kinds) for kinds in read)
