"""Groups: layers with one geometry and one lifetime, which share ids, a free-list, a table and a budget.

In: what each layer stores; out: the pages and states of a request, and their bytes. Layers of a paged group
store the same entries. All layers with states form one group, and may differ: one state id names the
states of a request in all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pagoda._native import first_live_token
from pagoda.errors import ConfigError
from pagoda.layout._entries import TensorSpec
from pagoda.layout._kinds import Kind, Storage
from pagoda.layout._numbers import LARGEST, count, show

__all__ = ["CHECKPOINT", "PagedGroup", "StateGroup", "form_groups", "steps_held"]

# Default tokens per page: what most kernels accept; FlashMLA needs 64.
_PAGE_TOKENS = 16
_LATENT_TOKENS = 64
# Names in a capacity besides those of paged groups.
_STATE = "state"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class PagedGroup:
    """Layers that store `storage` in pages of `page_tokens` tokens. A page id is valid in all of them.

    A page of the group is one page in every tensor of every layer. `layers` are layer numbers of the model.
    `resume_step` is that of the layout: windows free their pages in multiples of it. Errors: ConfigError if
    `page_tokens` is not a whole number of entries or does not divide `resume_step`.
    """

    name: str
    layers: tuple[int, ...]
    storage: Storage
    page_tokens: int
    resume_step: int

    def __post_init__(self) -> None:
        count(self.page_tokens, f"page_tokens of {self.name}")
        if count(self.resume_step, "resume_step") % self.page_tokens:
            raise ConfigError(
                f"resume_step: give a multiple of the page_tokens of {self.name}, {self.page_tokens}"
            )
        if self.page_tokens % self.storage.ratio:
            raise ConfigError(
                f"page_tokens of {self.name}: give a multiple of {self.storage.ratio}, the tokens per entry"
            )

    @property
    def window(self) -> int | None:
        """Tokens that a query reads, including its own; None for all."""
        return self.storage.window

    @property
    def kv_heads(self) -> int | None:
        """Heads of keys in a slot, 1 for latents; None for groups that do not store plain keys and values, or
        latents, of one dtype for every token."""
        entries = self.storage.entries
        names = tuple(entry.name for entry in entries)
        dtypes = {part.dtype for entry in entries for part in (*entry.parts, *entry.scales)}
        if self.storage.ratio > 1 or len(dtypes) > 1 or names not in (("keys", "values"), ("latent",)):
            return None
        return entries[0].parts[0].shape[0] if names[0] == "keys" else 1

    @property
    def entries_per_page(self) -> int:
        """Entries per page."""
        return self.page_tokens // self.storage.ratio

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers of the group, padding included."""
        return len(self.layers) * sum(
            entry.page_bytes(self.entries_per_page) for entry in self.storage.entries
        )

    @property
    def unit_bytes(self) -> int:
        """Bytes per id: the same as `page_bytes`."""
        return self.page_bytes

    @property
    def token_bytes(self) -> Fraction:
        """Bytes per token in all layers of the group, padding of pages included."""
        return Fraction(self.page_bytes, self.page_tokens)

    @property
    def unpadded_token_bytes(self) -> Fraction:
        """Bytes per token in all layers of the group, without padding."""
        return Fraction(
            len(self.layers) * sum(entry.num_bytes for entry in self.storage.entries), self.storage.ratio
        )

    def live_pages(self, length: int) -> tuple[range, ...]:
        """Return the pages that a request with `length` tokens stored needs in order to continue.

        [0, sink pages) and [first page in the window, end). Errors: ConfigError for a negative length.
        """
        end = -(-count(length, "length", low=0) // self.page_tokens)
        if self.window is None:
            return (range(end),)
        first = max(0, length - self.window + 1) // self.page_tokens
        sinks = min(-(-self.storage.sink_tokens // self.page_tokens), first)
        return (range(sinks), range(first, end)) if sinks else (range(first, end),)

    def peak_units(self, length: int, step: int = 1, in_flight: int = 0) -> int:
        """Return the most pages that a request holds while it grows to `length` tokens by at most `step` per
        step, with `in_flight` steps in flight (see `Layout.divide`). Errors: ConfigError."""
        return self.peak_pages(length, steps_held(in_flight) * count(step, "step"))

    def peak_pages(self, length: int, lag: int) -> int:
        """Return the most pages that a request holds while it grows to `length` tokens, if at most `lag`
        tokens are reserved beyond the last commit that freed pages. Errors: ConfigError."""
        length = count(length, "length", low=0)
        # The count grows with each page, and falls when a commit completes a `resume_step`.
        before_fall = length - (length - lag + 1) % self.resume_step
        return max(self._held(length, lag), self._held(max(0, before_fall), lag))

    def _held(self, end: int, lag: int) -> int:
        pages = -(-end // self.page_tokens)
        if self.window is None:
            return pages
        first = first_live_token(max(0, end - lag), self.window, self.resume_step) // self.page_tokens
        return pages - first + min(first, -(-self.storage.sink_tokens // self.page_tokens))

    def layer_bytes(self, layer: int, length: int) -> dict[str, int]:
        """Return the bytes by tensor that a layer has to keep of `length` tokens, without rounding up to
        pages; empty if the layer is not in this group. Errors: ConfigError."""
        kept = count(length, "length", low=0)
        if layer not in self.layers:
            return {}
        if self.window is not None:
            kept = min(kept, self.window - 1 + min(self.storage.sink_tokens, max(0, kept - self.window + 1)))
        return {entry.name: kept // self.storage.ratio * entry.num_bytes for entry in self.storage.entries}


@dataclass(frozen=True)
class StateGroup:
    """Layers with a state of fixed size per request. A state id is valid in all of them.

    `parts[i]` is the state of layer `layers[i]`. Checkpoints are saved states, in a pool with its own ids;
    requests resume from them at multiples of `resume_step`, which is that of the layout."""

    name: str
    layers: tuple[int, ...]
    parts: tuple[tuple[TensorSpec, ...], ...]
    resume_step: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all layers."""
        return sum(part.num_bytes for parts in self.parts for part in parts)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint in all layers: what a request needs of its state to resume."""
        return sum(part.checkpoint_bytes for parts in self.parts for part in parts)

    @property
    def unit_bytes(self) -> int:
        """Bytes per id: the same as `state_bytes`."""
        return self.state_bytes

    def peak_units(self, length: int, step: int = 1, in_flight: int = 0) -> int:
        """Return the states of a request: one, for any length."""
        return 1

    def layer_bytes(self, layer: int, length: int) -> dict[str, int]:
        """Return the bytes by part that a layer keeps for a request of any length; empty if the layer is not
        in this group. Errors: ConfigError."""
        count(length, "length", low=0)
        if layer not in self.layers:
            return {}
        return {part.name: part.num_bytes for part in self.parts[self.layers.index(layer)]}


def steps_held(in_flight: int) -> int:
    """Return the number of steps whose tokens a request holds beyond the last commit that freed pages.

    When step t is reserved, the fence of step t − 1 − in_flight has passed. Pages freed by a commit wait for
    the last step planned before it. Free by then are therefore the pages of commits made right after step
    t − 1 − in_flight, which are commits of steps up to t − 1 − 2 in_flight. Errors: ConfigError.
    """
    return 2 * count(in_flight, "in_flight", low=0) + 1


def form_groups(
    layers: Sequence[Sequence[Kind]], page_tokens: dict[str, int] | int | None
) -> tuple[PagedGroup | StateGroup, ...]:
    """Return the groups of a model's layers, in the order of their first layer; states come last.

    Errors: ConfigError for page sizes that do not fit a group, for an unknown group name, or for storage
    that has the name of states or checkpoints.
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
    for storage in members:
        same = sum(other.name == storage.name for other in names.values())
        names[storage.name if not same else f"{storage.name}-{same + 1}"] = storage
    for name in (_STATE, CHECKPOINT):
        if states and name in names:
            raise ConfigError(f"name of a Storage: {name!r} is reserved in layouts with states: rename it")
    if isinstance(page_tokens, dict):
        for key, tokens in page_tokens.items():
            if key not in names:
                raise ConfigError(
                    f"page_tokens: there is no paged group {show(key)}, only {', '.join(names) or 'none'}"
                )
            count(tokens, f"page_tokens of {key}")
    # Where attention is compressed at several ratios, pages end where every ratio has a whole entry.
    together = math.lcm(*(storage.ratio for storage in members))
    sizes = {name: _page_tokens(name, storage, page_tokens, together) for name, storage in names.items()}
    resume_step = math.lcm(*sizes.values())
    if not sizes:  # states alone: a boundary at every token would be too many
        usual = isinstance(page_tokens, dict) or page_tokens is None
        resume_step = _PAGE_TOKENS if usual else count(page_tokens, "page_tokens")
    if resume_step > LARGEST:
        raise ConfigError(
            "page_tokens: the least common multiple of the groups' page sizes is too large: "
            "give sizes that divide each other"
        )
    groups: list[PagedGroup | StateGroup] = [
        PagedGroup(name, tuple(members[storage]), storage, sizes[name], resume_step)
        for name, storage in names.items()
    ]
    if states:
        parts = tuple(tuple(part for kind in kinds for part in kind.state) for kinds in states.values())
        groups.append(StateGroup(_STATE, tuple(states), parts, resume_step))
    return tuple(groups)


def _page_tokens(name: str, storage: Storage, given: dict[str, int] | int | None, together: int) -> int:
    usual = _LATENT_TOKENS if storage.name == "latent" else _PAGE_TOKENS
    usual = together if storage.ratio > 1 else usual
    tokens = given.get(name, usual) if isinstance(given, dict) else usual if given is None else given
    count(tokens, f"page_tokens of {name}")
    if storage.ratio > 1 and tokens % together:
        raise ConfigError(
            f"page_tokens of {name}: give a multiple of {together}, the least common multiple of all "
            f"compression ratios, not {tokens}"
        )
    return tokens
