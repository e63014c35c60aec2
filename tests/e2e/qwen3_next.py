"""A Qwen3-Next of transformers whose memory is in our pools, as `hybrid_driver.Engine` runs it."""

from typing import Any

import torch
from transformers import DynamicCache

from pagoda import Batch, Pools, from_hf

__all__ = ["Qwen3Next"]


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
