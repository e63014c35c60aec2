"""A DeepSeek-V4 of transformers whose memory is in our pools, as `hybrid_driver.Engine` runs it."""

from typing import Any

import torch

from differential.hybrid_model import attend_over
from pagoda import Batch, Layout, Pools
from pagoda.pools._layer_step import LayerStep

__all__ = ["DeepseekV4"]


class DeepseekV4:
    """A DeepSeek-V4 over pools. The tokens of a step are computed in one call; each layer reads and writes
    its entries, indexer keys, window and compressors."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self._step: tuple[Pools, Batch] | None = None
        attend_over(model, self._step_of)

    @torch.no_grad()
    def forward(self, pools: Pools, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits behind the last token of each row, [rows, vocabulary]."""
        self._step = pools, batch
        logits: torch.Tensor = self.model(
            input_ids=tokens[None], position_ids=batch.positions[None], use_cache=False
        ).logits
        return logits[0, batch.query_start_loc[1:].long() - 1]

    def _step_of(self, layer: int) -> LayerStep:
        assert self._step is not None
        pools, batch = self._step
        return pools.layer(layer).at(batch)
