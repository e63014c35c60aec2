"""The working copy of one call, and the tokens in it.

In: what `generate` and the model do with a cache; out: keys, values and tokens of every sequence, as far as
all layers have them. A `RecordingCache` is a `DynamicCache` of transformers that also tracks the token of
each column through all operations on sequences and columns. Its windows keep columns that leave the window
until they are stored.

Two hooks of the model tell it which tokens enter a forward pass. They have no state, so that the model can be
copied and pickled."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

__all__ = ["MORE", "RecordingCache", "after_forward", "before_forward"]

MORE = 128  # a layer has room for at least so many more columns


class RecordingLayer(DynamicLayer):
    """Keys and values of all columns, in a buffer with room for more: a new column is appended in place,
    where transformers would copy all columns.

    `keys` and `values` are views of the front of the buffer, unless transformers has replaced them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room: tuple[torch.Tensor, torch.Tensor] | None = None  # [rows, heads, columns, dim] each

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if not self._has_room(begin, end):
            self._make_room(key_states, value_states, begin, end)
        assert self.room is not None
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self.room)
        return self.keys, self.values

    def _has_room(self, begin: int, end: int) -> bool:
        if self.room is None or end > self.room[0].shape[-2]:
            return False
        # Selected or repeated sequences are in other memory.
        return begin == 0 or all(
            held.data_ptr() == room.data_ptr() and held.shape[0] == room.shape[0]
            for held, room in zip(self._held(), self.room, strict=True)
        )

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor, begin: int, end: int) -> None:
        made = []
        for held, new in zip(self._held(), (keys, values), strict=True):
            rows, heads, _, dim = new.shape
            room = roomy(new, rows, heads, end, dim)
            if begin:
                room[..., :begin, :] = held
            made.append(room)
        self.room = made[0], made[1]


def roomy(like: torch.Tensor, rows: int, heads: int, columns: int, dim: int) -> torch.Tensor:
    """Return an uninitialised [rows, heads, columns and room for more, dim]; in memory, the heads of a column
    are adjacent."""
    more = max(MORE, columns // 8)
    return like.new_empty(rows, columns + more, heads, dim).transpose(1, 2)


class RecordingWindow(DynamicSlidingWindowLayer):
    """A window that also keeps all columns since `begin`, until they are stored in the pools."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.begin = 0  # first column of `parts`
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # [rows, heads, columns, dim] each

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.parts.append((key_states, value_states))
        found: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return found

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values from column `begin` on."""
        if len(self.parts) > 1:
            keys, values = zip(*self.parts, strict=True)
            self.parts = [(torch.cat(keys, dim=-2), torch.cat(values, dim=-2))]
        return self.parts[0]

    def forget(self, column: int) -> None:
        """Drop all columns before `column`."""
        if column <= self.begin or not self.parts:
            return
        keys, values = self.joined()
        # Clone: a view would keep the whole tensor alive.
        self.parts = [
            (keys[..., column - self.begin :, :].clone(), values[..., column - self.begin :, :].clone())
        ]
        self.begin = column

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.parts:
            keys, values = self.joined()
            end = max(0, keys.shape[-2] - abs(tokens_to_remove))
            self.parts = [(keys[..., :end, :], values[..., :end, :])]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._select(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._select(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(lambda part: part[indices, ...])

    def _select(self, pick: Any) -> None:
        if self.parts:
            keys, values = self.joined()
            self.parts = [(pick(keys), pick(values))]


class RecordingCache(DynamicCache):
    """The cache of one call, with `num_cached` columns filled in before the model runs.

    All layers have `num_columns` columns, of the tokens that `tokens` returns. `is_lost` means that it could
    not track them."""

    def __init__(self, config: Any, tokens: torch.Tensor, num_cached: int) -> None:
        super().__init__(config=config)
        self.layers = [
            RecordingWindow(layer.sliding_window)
            if type(layer) is DynamicSlidingWindowLayer
            else RecordingLayer()
            if type(layer) is DynamicLayer
            else layer
            for layer in self.layers
        ]
        self.num_cached = num_cached
        self.is_lost = False
        self.on_prefill: Any = None  # called once, after the first pass
        self._prompt = tokens.shape[1]
        self._tokens = [tokens[:, :num_cached]]  # [rows, columns] each
        self._entering: torch.Tensor | None = None
        self._has_run = False

    @property
    def is_known(self) -> bool:
        """Whether all layers are of kinds that can be filled and stored."""
        return all(type(layer) in (RecordingLayer, RecordingWindow) for layer in self.layers)

    @property
    def num_columns(self) -> int:
        """Columns that every layer has, even after an interruption."""
        return sum(part.shape[1] for part in self._tokens)

    def tokens(self) -> torch.Tensor:
        """Return the tokens of all columns: [rows, num_columns] int64."""
        if len(self._tokens) > 1:
            self._tokens = [torch.cat(self._tokens, dim=1)]
        return self._tokens[0]

    def fill(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill in the cached columns of a layer: [rows, heads, columns, dim] each.

        A window takes its last columns. Other layers take `num_cached` columns, followed by room for more."""
        layer: Any = self.layers[number]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, RecordingWindow):
            layer.cumulative_length = layer.begin = self.num_cached
        else:
            layer.room = keys, values
            layer.keys, layer.values = keys[..., : self.num_cached, :], values[..., : self.num_cached, :]

    def columns(self, number: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return keys and values of a layer, [rows, heads, end − begin, dim] each; None if a window has
        dropped some of them."""
        layer: Any = self.layers[number]
        if isinstance(layer, RecordingWindow):
            if begin < layer.begin or not layer.parts:
                return None
            keys, values = layer.joined()
            begin, end = begin - layer.begin, end - layer.begin
        else:
            keys, values = layer.keys, layer.values
        if keys is None or keys.shape[-2] < end:
            return None
        return keys[..., begin:end, :], values[..., begin:end, :]

    def forget(self, column: int) -> None:
        """Drop the columns of windows before `column`."""
        for layer in self.layers:
            if isinstance(layer, RecordingWindow):
                layer.forget(column)

    def trim(self) -> None:
        """Copy each layer without its room for more columns, as in transformers' own cache. Errors: those of
        torch if there is no memory for the copy; some layers then keep their room."""
        for layer in self.layers:
            if isinstance(layer, RecordingLayer) and layer.room is not None:
                layer.room = None
                layer.keys, layer.values = (
                    held.clone(memory_format=torch.contiguous_format) for held in layer._held()
                )

    def close(self) -> None:
        """Turn this into a plain DynamicCache, which the caller may keep."""
        for layer in self.layers:
            if isinstance(layer, RecordingWindow):
                del layer.parts, layer.begin
                object.__setattr__(layer, "__class__", DynamicSlidingWindowLayer)
            elif isinstance(layer, RecordingLayer):
                del layer.room
                object.__setattr__(layer, "__class__", DynamicLayer)
        kept = ("layers", "layer_class_to_replicate", "offloading")
        self.__dict__ = {name: value for name, value in self.__dict__.items() if name in kept}
        object.__setattr__(self, "__class__", DynamicCache)

    # Operations of transformers on sequences and columns.

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            kept = self.tokens()
            self._tokens = [kept[:, : max(0, kept.shape[1] - abs(tokens_to_remove))]]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        tokens = self.tokens()
        self._tokens = [tokens.index_select(0, beam_idx.to(tokens.device))]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._tokens = [self.tokens().repeat_interleave(repeats, dim=0)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._tokens = [self.tokens()[indices.to(self.tokens().device), ...]]

    def reset(self) -> None:
        super().reset()  # type: ignore[no-untyped-call]
        self.is_lost = True

    # Forward passes of the model.

    def enter(self, tokens: Any) -> None:
        """Begin a forward pass with these tokens."""
        self.settle()
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or self._entering is not None:
            self.is_lost = True  # embeddings, or a pass that was interrupted and repeated
        self._entering = tokens

    def arrive(self) -> None:
        """End a forward pass: all layers have its tokens."""
        if isinstance(self._entering, torch.Tensor):
            self._tokens.append(self._entering)
        self._entering = None
        self._has_run = True

    def settle(self) -> None:
        """Call `on_prefill` once the first pass is over: before the second pass, or at the end, so that it
        does not delay the first token."""
        if self._has_run and self.on_prefill is not None and not self.is_lost:
            waiting, self.on_prefill = self.on_prefill, None
            waiting()

    def repeats_cached(self, num_tokens: int) -> bool:
        """Return whether the first pass gets the whole prompt although part of it is cached, as in assisted
        decoding."""
        return not self._has_run and self.num_cached > 0 and num_tokens >= self._prompt


def before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: tell a recording cache which tokens enter."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, RecordingCache):
        return None
    if args or kwargs.get("inputs_embeds") is not None:
        cache.enter(None)
        return None
    tokens = kwargs.get("input_ids")
    if isinstance(tokens, torch.Tensor) and cache.repeats_cached(tokens.shape[-1]):
        tokens = tokens[:, cache.num_cached :]
        kwargs = {**kwargs, "input_ids": tokens}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., cache.num_cached :]
    cache.enter(tokens)
    return args, kwargs


def after_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: tell a recording cache that all layers have the tokens."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, RecordingCache):
        cache.arrive()
