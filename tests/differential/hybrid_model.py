"""A DeepSeek-V4 of transformers whose attention reads and writes our pools. In: a model, a config of our
cache; out: logits of requests that stand at any length.

The model computes all that is not memory: projections, norms, rotations, the indexer's scores, experts. What
a layer remembers goes through a `LayerStep`, and attention is computed from what its gathers return. The
tokens of all requests are packed into one sequence, [1, T].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, apply_rotary_pos_emb

from differential.entry_layouts import plain_entry
from differential.tiny_models import TINY, tiny_config, tiny_model
from pagoda.compat import DSV4Config, KVCacheManager
from pagoda.layout._entries import compressed_fp8, index_keys
from pagoda.pools._layer_step import LayerStep

__all__ = ["BLOCK", "Served", "attend_over", "cache_config", "model_of"]

WINDOW, CSA, HCA, BLOCK, HEAD, ROPE, INDEX = 12, 4, 8, 16, 32, 8, 16


def model_of(device: str, topk: int, num_layers: int | None = None) -> PreTrainedModel:
    """Window alone, HCA and CSA layers, all or the first ones; whatever begins as zeros or ones is random, so
    that it counts."""
    config = tiny_config("deepseek_v4", torch.float32)
    config.num_hidden_layers = config.num_hidden_layers if num_layers is None else num_layers
    config.layer_types = config.layer_types[:num_layers]
    config.head_dim, config.index_head_dim, config.index_topk = HEAD, INDEX, topk
    config.index_n_heads = 16  # with few heads many entries score 0, and which of them are the best is open
    config.sliding_window = WINDOW
    config.compress_rates = {"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
    for parameters in config.rope_parameters.values():
        if isinstance(parameters, dict):
            parameters["partial_rotary_factor"] = ROPE / HEAD
    config._attn_implementation = "eager"
    model = tiny_model(config)
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("position_bias", "sinks", "norm.weight")):
            shift = torch.randn(parameter.shape, generator=random) * (0.2 if "norm" in name else 1)
            parameter.data.add_(shift)
    return model.to(device)


def cache_config(*, is_quantised: bool = False, unaccepted: int = 1) -> DSV4Config:
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
    types = TINY["deepseek_v4"].fields["layer_types"]
    return DSV4Config(
        num_layers=len(types),
        num_query_heads=6,
        index_topk=4,
        compress_ratios=tuple(ratios[each] for each in types),
        head_dim=HEAD,
        rope_dim=ROPE,
        window=WINDOW,
        csa_ratio=CSA,
        hca_ratio=HCA,
        index_head_dim=INDEX,
        block_tokens=BLOCK,
        entry=compressed_fp8(HEAD, ROPE) if is_quantised else plain_entry(HEAD - ROPE, ROPE),
        index=index_keys(INDEX, "fp8" if is_quantised else "float32"),
        unaccepted=unaccepted,
    )


def attend_over(model: PreTrainedModel, step_of: Callable[[int], LayerStep]) -> None:
    """Let each layer of a model remember through `step_of(layer)`, for the packed tokens of a step."""

    def forward(
        module: Any, hidden_states: torch.Tensor, position_embeddings: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        return _attend(module, step_of(module.layer_idx), hidden_states[0], position_embeddings), None

    for module in model.modules():
        if isinstance(module, DeepseekV4Attention):
            module.forward = partial(forward, module)  # type: ignore[method-assign]


class Served:
    """A model whose layers keep what they remember in a KVCacheManager."""

    def __init__(
        self, model: PreTrainedModel, config: DSV4Config, num_rows: int, max_tokens: int, device: str
    ) -> None:
        self.model, self.config = model, config
        self.manager = KVCacheManager(config, config.schedule(), num_rows, max_tokens, device=device)
        self.device = device
        self._step: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        attend_over(model, self._step_of)

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
        positions = (torch.tensor(starts)[:, None] + torch.arange(num_new)).flatten()
        request_ids = torch.arange(len(rows)).repeat_interleave(num_new)
        ids = [x.to(torch.int32).to(self.device) for x in (torch.tensor(rows), positions, request_ids)]
        self._step = ids[0], ids[1], ids[2]
        found = self.model(
            input_ids=tokens.reshape(1, -1).to(self.device),
            position_ids=positions[None].to(self.device),
            use_cache=False,
        )
        return found.logits.view(len(rows), num_new, -1)

    def _step_of(self, layer: int) -> LayerStep:
        assert self._step is not None
        return self.manager.acquire(layer, *self._step)


def _attend(module: Any, step: LayerStep, hidden: torch.Tensor, embeddings: Any) -> torch.Tensor:
    """Output of a layer's attention, [1, T, hidden], for the hidden states of T tokens."""
    num_tokens, (cos, sin) = len(hidden), embeddings[module.rope_layer_type]
    residual = module.q_a_norm(module.q_a_proj(hidden))
    q = module.q_b_proj(residual).view(1, num_tokens, -1, module.head_dim).transpose(1, 2)
    q = apply_rotary_pos_emb(module.q_b_norm(q), cos, sin)[0]  # [heads, T, dim]
    kv = apply_rotary_pos_emb(module.kv_norm(module.kv_proj(hidden))[None, None], cos, sin)[0, 0]

    keys, mask = _window(step, kv)
    if module.compressor is not None:
        more, more_mask = _compressed(module.compressor, step, hidden, residual)
        keys, mask = torch.cat([keys, more], 1), torch.cat([mask, more_mask], 1)
    keys = keys.float()  # [T, keys, dim]: every query has its own
    scores = torch.einsum("htd,tkd->thk", q.float(), keys) * module.scaling
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    sinks = module.sinks.float().view(1, -1, 1).expand(num_tokens, -1, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    found = torch.einsum("thk,tkd->htd", weights, keys).to(hidden.dtype)[None]
    found = apply_rotary_pos_emb(found, cos, -sin).transpose(1, 2)
    grouped = found.reshape(1, num_tokens, module.config.o_groups, -1)
    result: torch.Tensor = module.o_b_proj(module.o_a_proj(grouped).flatten(2))
    return result


def _window(step: LayerStep, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The window of each token, [T, keys, dim], and which of it there is, [T, keys]."""
    window, ring, request = step.layer.window, step.layer.ring, step.tokens.request_ids.long()
    assert ring is not None
    counts = request.bincount(minlength=len(step.tokens.rows))
    if counts.max() <= ring.positions.shape[1] - window + 1:  # nothing that is read is overwritten
        step.write_window(kv)
        keys, lens = step.gather_window()
        return keys, torch.arange(window, device=kv.device) < lens[:, None]
    keys, lens = step.gather_chunk(kv)
    step.write_window(kv)
    ends = counts.cumsum(0)[request]  # a request's tokens are the last of its keys
    own = (lens[request] - ends + torch.arange(len(kv), device=kv.device))[:, None]
    at = torch.arange(keys.shape[1], device=kv.device)
    return keys[request], (at <= own) & (at > own - window)


def _compressed(
    compressor: Any, step: LayerStep, hidden: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries that each token reads, [T, entries, dim], and which of them there are, [T, entries]."""
    request, positions = step.tokens.request_ids.long(), step.tokens.positions.long()
    step.write_entries(step.compress(*_projected(compressor, hidden, positions)))
    visible = (positions + 1)[:, None] // compressor.compress_rate
    if step.layer.index is None:
        entries, lens = step.gather_all()
        lasts = request.bincount(minlength=len(lens)).cumsum(0) - 1
        assert torch.equal(lens.long(), visible[lasts, 0])  # from the length, not from blocks
        return entries[request], torch.arange(entries.shape[1], device=hidden.device) < visible
    indexer = compressor.indexer
    step.write_index(step.compress_index(*_projected(indexer, hidden, positions)))
    keys, _ = step.gather_index()
    cos, sin = indexer.rotary_emb(hidden[None], position_ids=positions[None], layer_type="compress")
    q = indexer.q_b_proj(residual).view(1, len(hidden), -1, indexer.head_dim).transpose(1, 2)
    q = apply_rotary_pos_emb(q, cos, sin)[0].transpose(0, 1)  # [T, heads, dim]
    scores = indexer.scorer(q[:, None], keys[request].to(hidden.dtype), hidden[:, None])[:, 0]  # [T, N]
    at = torch.arange(keys.shape[1], device=hidden.device)
    scores = scores.masked_fill(at >= visible, -torch.inf)
    return step.gather_chosen(scores.topk(min(indexer.index_topk, keys.shape[1])).indices)


def _projected(compressor: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
    """Values, scores, norm and rotation of a compressor's tokens, as a `LayerStep` takes them."""
    ratio = compressor.compress_rate
    scores = compressor.gate_proj(hidden) + compressor.position_bias[positions % ratio]
    first = positions // ratio * ratio
    cos, sin = compressor.rotary_emb(hidden[None], position_ids=first[None], layer_type="compress")
    norm = compressor.kv_norm.weight, compressor.kv_norm.variance_epsilon
    return compressor.kv_proj(hidden), scores, norm, (cos[0].float(), sin[0].float())
