"""A DeepSeek-V4 of transformers whose attention reads and writes our pools. In: a model, a config of our
cache; out: logits of requests that stand at any length.

The model computes all that is not memory: projections, norms, rotations, the indexer's scores, experts. What
a layer remembers goes through a `LayerCacheHandle`, and attention is computed from what its gathers return.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, apply_rotary_pos_emb

from pagoda.compat import DSV4Config, KVCacheManager, LayerCacheHandle

__all__ = ["Served"]


class Served:
    """A model whose layers keep what they remember in a KVCacheManager."""

    def __init__(
        self, model: PreTrainedModel, config: DSV4Config, num_rows: int, max_tokens: int, device: str
    ) -> None:
        self.model, self.config = model, config
        self.manager = KVCacheManager(config, config.schedule(), num_rows, max_tokens, device=device)
        self.device = device
        self._step: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._num_new = 0
        for module in model.modules():
            if isinstance(module, DeepseekV4Attention):
                module.forward = self._attend_of(module)  # type: ignore[method-assign]

    def admit(self) -> int:
        return self.manager.admit_request()

    def release(self, row: int) -> None:
        self.manager.release_request(row)

    def allocate(self, row: int, length: int) -> None:
        """Blocks for so many tokens, in all layers that have some."""
        for layer, blocks in self.manager.block_lens.items():
            if blocks is None:
                continue
            while int(self.manager._taken[layer][row]) * self.config.block_tokens < length:
                self.manager.allocate_block(layer, row)

    @torch.no_grad()
    def step(self, rows: Sequence[int], tokens: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Logits, [rows, new tokens, vocabulary], of as many new tokens for each row from its own start."""
        num_new = tokens.shape[1]
        for row, start in zip(rows, starts, strict=True):
            self.allocate(row, start + num_new)
        positions = torch.tensor(starts)[:, None] + torch.arange(num_new)
        request_ids = torch.arange(len(rows)).repeat_interleave(num_new)
        ids = (torch.tensor(rows), positions.flatten(), request_ids)
        on_device = [x.to(torch.int32).to(self.device) for x in ids]
        self._step, self._num_new = (on_device[0], on_device[1], on_device[2]), num_new
        found = self.model(
            input_ids=tokens.to(self.device), position_ids=positions.to(self.device), use_cache=False
        )
        return found.logits

    def _attend_of(self, module: DeepseekV4Attention) -> Any:
        def forward(
            hidden_states: torch.Tensor,
            position_embeddings: Any,
            position_ids: torch.Tensor,
            attention_mask: Any = None,
            past_key_values: Any = None,
            **others: Any,
        ) -> tuple[torch.Tensor, None]:
            assert self._step is not None
            handle = self.manager.acquire(module.layer_idx, *self._step)
            return self._attend(module, handle, hidden_states, position_embeddings, position_ids), None

        return forward

    def _attend(
        self,
        module: Any,
        handle: LayerCacheHandle,
        hidden: torch.Tensor,  # [B, S, hidden]
        embeddings: Any,
        positions: torch.Tensor,  # [B, S]
    ) -> torch.Tensor:
        batch, num_new = hidden.shape[:2]
        cos, sin = embeddings[module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(hidden))
        q = module.q_b_proj(residual).view(batch, num_new, -1, module.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(module.q_b_norm(q), cos, sin)  # [B, heads, S, dim]
        kv = module.kv_norm(module.kv_proj(hidden)).view(batch, num_new, 1, -1).transpose(1, 2)
        kv = apply_rotary_pos_emb(kv, cos, sin).reshape(batch * num_new, -1)

        keys, masks = self._window(handle, kv, batch, num_new)
        if module.compressor is not None:
            more, more_masks = self._compressed(module, handle, hidden, residual, positions)
            keys, masks = torch.cat([keys, more], 2), torch.cat([masks, more_masks], 2)
        # [B, S, heads, keys] over [B, S, keys, dim]: every query has its own.
        keys = keys.float()
        scores = torch.einsum("bhsd,bskd->bshk", q.float(), keys) * module.scaling
        scores = scores.masked_fill(~masks[:, :, None], -torch.inf)
        sinks = module.sinks.float().view(1, 1, -1, 1).expand(batch, num_new, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        found = torch.einsum("bshk,bskd->bshd", weights, keys).to(hidden.dtype)
        found = apply_rotary_pos_emb(found.transpose(1, 2), cos, -sin).transpose(1, 2)
        grouped = found.reshape(batch, num_new, module.config.o_groups, -1)
        result: torch.Tensor = module.o_b_proj(module.o_a_proj(grouped).flatten(2))
        return result

    def _window(
        self, handle: LayerCacheHandle, kv: torch.Tensor, batch: int, num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The window of each query, [B, S, keys, dim], and which of it there is, [B, S, keys]."""
        window = self.config.window
        if num_new <= self.config.unaccepted:
            handle.write_swa(kv)
            keys, lens = handle.gather_swa_kv()
            mask = torch.arange(window, device=kv.device) < lens[:, None]
            return keys.view(batch, num_new, window, -1), mask.view(batch, num_new, window)
        keys, lens = handle.gather_swa_chunk(kv)
        handle.write_swa(kv)
        at = torch.arange(keys.shape[1], device=kv.device)
        own = (lens[:, None] - num_new) + torch.arange(num_new, device=kv.device)  # [B, S]
        mask = (at <= own[..., None]) & (at > own[..., None] - window)
        return keys[:, None].expand(-1, num_new, -1, -1), mask

    def _compressed(
        self,
        module: Any,
        handle: LayerCacheHandle,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compressor, (batch, num_new) = module.compressor, positions.shape
        ratio = compressor.compress_rate
        handle.write_compressed(handle.compress(*self._projected(compressor, hidden, positions)))
        visible = (positions + 1) // ratio
        if not handle.schema.overlap:
            entries, lens = handle.gather_all_compressed_kv()
            assert torch.equal(lens.long(), visible[:, -1])  # from the length, not from blocks
            at = torch.arange(entries.shape[1], device=hidden.device)
            return entries[:, None].expand(-1, num_new, -1, -1), at < visible[..., None]
        indexer = compressor.indexer
        handle.write_index(handle.compress_index(*self._projected(indexer, hidden, positions)))
        keys, _ = handle.gather_index()
        cos, sin = indexer.rotary_emb(hidden, position_ids=positions, layer_type="compress")
        q = indexer.q_b_proj(residual).view(batch, num_new, -1, indexer.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(q, cos, sin).transpose(1, 2)
        scores = indexer.scorer(q, keys.to(hidden.dtype), hidden)  # [B, S, N]
        at = torch.arange(keys.shape[1], device=hidden.device)
        scores = scores.masked_fill(at >= visible[..., None], -torch.inf)
        chosen = scores.topk(min(indexer.index_topk, keys.shape[1])).indices.flatten(0, 1)
        entries, mask = handle.gather_compressed_kv(chosen)
        return entries.view(batch, num_new, *entries.shape[1:]), mask.view(batch, num_new, -1)

    def _projected(self, compressor: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """Values, scores, norm and rotation of a compressor's tokens, as a handle takes them."""
        part: Any = compressor
        ratio = part.compress_rate
        values = part.kv_proj(hidden).flatten(0, 1)
        scores = (part.gate_proj(hidden) + part.position_bias[positions % ratio]).flatten(0, 1)
        first = positions // ratio * ratio
        cos, sin = part.rotary_emb(hidden, position_ids=first, layer_type="compress")
        norm = part.kv_norm.weight, part.kv_norm.variance_epsilon
        return values, scores, norm, (cos.flatten(0, 1).float(), sin.flatten(0, 1).float())
