"""Models of transformers whose memory is in our pools, as `hybrid_driver.Engine` runs them."""

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, apply_rotary_pos_emb

from pagoda import Batch, Layout, Pools, from_hf
from pagoda.pools._layer_step import LayerStep

__all__ = ["DeepseekV4", "Qwen3Next"]


class Qwen3Next:
    """A Qwen3-Next over pools. Each row of a step is computed by transformers with a cache that is made from
    the row's pages and state, and taken apart again: nothing else is carried from step to step."""

    def __init__(self, model: Any, page_tokens: int) -> None:
        self.model = model
        self.layout = from_hf(model.config, page_tokens=page_tokens)

    @torch.no_grad()
    def forward(self, pools: Pools, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits behind the last token of each row, [rows, vocabulary]."""
        stored: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        found = []
        counts = batch.query_start_loc.diff().tolist()
        for row, length, part in zip(
            batch.rows.tolist(), batch.lengths.tolist(), tokens.split(counts), strict=True
        ):
            start = length - len(part)
            cache = self._cache_of(pools, row, start)
            said = self.model(
                input_ids=part[None],
                position_ids=torch.arange(start, length)[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            found.append(said.logits[0, -1])
            for n, memory in enumerate(cache.layers):
                state = pools.layer(n).state
                if state:
                    # transformers keeps one input of the convolution more than anything reads.
                    state["conv"][row] = memory.conv_states[0][0, :, 1:]
                    state["recurrent"][row] = memory.recurrent_states[0][0]
                else:
                    new = tuple(side[0, :, start:].transpose(0, 1) for side in (memory.keys, memory.values))
                    stored.setdefault(n, []).append((new[0], new[1]))
        for n, parts in stored.items():
            pools.layer(n).store(batch, torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]))
        return torch.stack(found)

    def _cache_of(self, pools: Pools, row: int, length: int) -> DynamicCache:
        """The first `length` tokens of a row as transformers keeps them; a new request has a state, too."""
        cache = DynamicCache(config=self.model.config)
        for n, memory in enumerate(cache.layers):
            layer = pools.layer(n)
            if layer.state:
                conv = torch.nn.functional.pad(layer.state["conv"][row][None], (1, 0))
                memory.update_conv_state(conv)
                memory.update_recurrent_state(layer.state["recurrent"][row][None])
            elif length:
                size = layer.group.page_tokens
                pages = pools.tables[layer.group.name][row, : -(-length // size)].long()
                slots = (pages[:, None] * size + torch.arange(size)).flatten()[:length]
                assert layer.values is not None
                memory.update(
                    layer.keys[slots].transpose(0, 1)[None], layer.values[slots].transpose(0, 1)[None]
                )
        return cache


class DeepseekV4:
    """A DeepSeek-V4 over pools. The tokens of a step are computed in one call, packed; transformers computes
    all that is not memory, and each layer's attention reads and writes its entries, keys and window."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self._step: tuple[Pools, Batch] | None = None
        for module in model.modules():
            if isinstance(module, DeepseekV4Attention):
                module.forward = partial(self._attend, module)  # type: ignore[method-assign]

    @torch.no_grad()
    def forward(self, pools: Pools, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits behind the last token of each row, [rows, vocabulary]."""
        self._step = pools, batch
        logits: torch.Tensor = self.model(
            input_ids=tokens[None], position_ids=batch.positions[None], use_cache=False
        ).logits
        return logits[0, batch.query_start_loc[1:].long() - 1]

    def _attend(
        self, module: Any, hidden_states: torch.Tensor, position_embeddings: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        assert self._step is not None
        pools, batch = self._step
        step, request = pools.layer(module.layer_idx).at(batch), batch.batch_indices.long()
        hidden, positions = hidden_states[0], batch.positions  # [T, hidden], [T]
        num_tokens = len(hidden)
        cos, sin = position_embeddings[module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(hidden))
        q = module.q_b_norm(
            module.q_b_proj(residual).view(1, num_tokens, -1, module.head_dim).transpose(1, 2)
        )
        q = apply_rotary_pos_emb(q, cos, sin)[0]  # [heads, T, dim]
        kv = module.kv_norm(module.kv_proj(hidden))[None, None]
        keys, mask = self._window(step, batch, request, apply_rotary_pos_emb(kv, cos, sin)[0, 0])
        if module.compressor is not None:
            more, more_mask = self._compressed(module, step, hidden, residual, positions, request)
            keys, mask = torch.cat([keys, more], 1), torch.cat([mask, more_mask], 1)
        # [T, keys, dim]: every query has keys of its own.
        scores = torch.einsum("htd,tkd->thk", q, keys) * module.scaling
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        sinks = module.sinks.view(1, -1, 1).expand(num_tokens, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        found = torch.einsum("thk,tkd->htd", weights, keys)[None]
        found = apply_rotary_pos_emb(found, cos, -sin)[0].transpose(0, 1)
        grouped = found.reshape(1, num_tokens, module.config.o_groups, -1)
        return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None

    def _window(
        self, step: LayerStep, batch: Batch, request: torch.Tensor, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The window of each token, [T, keys, dim], and which of it exists, [T, keys]."""
        window = step.layer.window
        if batch.longest[1] == 1:
            step.write_window(kv)
            keys, lens = step.gather_window()
            return keys, torch.arange(window) < lens[:, None]
        keys, lens = step.gather_chunk(kv)
        step.write_window(kv)
        behind = batch.lengths[request] - 1 - batch.positions  # tokens of the row after each one
        own = (lens[request] - 1 - behind)[:, None]
        at = torch.arange(keys.shape[1])
        return keys[request], (at <= own) & (at > own - window)

    def _compressed(
        self,
        module: Any,
        step: LayerStep,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        request: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The compressed entries that each token reads, [T, entries, dim], and which exist, [T, entries]."""
        compressor = module.compressor
        step.write_entries(step.compress(*_projected(compressor, hidden, positions)))
        visible = (positions + 1)[:, None] // compressor.compress_rate
        if step.layer.index is None:
            entries, _ = step.gather_all()
            return entries[request], torch.arange(entries.shape[1]) < visible
        indexer = compressor.indexer
        step.write_index(step.compress_index(*_projected(indexer, hidden, positions)))
        keys, _ = step.gather_index()
        cos, sin = indexer.rotary_emb(hidden[None], position_ids=positions[None], layer_type="compress")
        q = indexer.q_b_proj(residual).view(1, len(hidden), -1, indexer.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(q, cos, sin)[0].transpose(0, 1)  # [T, heads, dim]
        scores = indexer.scorer(q[:, None], keys[request], hidden[:, None])[:, 0]  # [T, N]
        scores = scores.masked_fill(torch.arange(keys.shape[1]) >= visible, -torch.inf)
        return step.gather_chosen(scores.topk(min(indexer.index_topk, keys.shape[1])).indices)


def _projected(compressor: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
    """Values, scores, norm and rotation of a compressor's tokens, as `LayerStep.compress` takes them."""
    ratio = compressor.compress_rate
    scores = compressor.gate_proj(hidden) + compressor.position_bias[positions % ratio]
    first = positions // ratio * ratio
    cos, sin = compressor.rotary_emb(hidden[None], position_ids=first[None], layer_type="compress")
    norm = compressor.kv_norm.weight, compressor.kv_norm.variance_epsilon
    return compressor.kv_proj(hidden), scores, norm, (cos[0].float(), sin[0].float())
