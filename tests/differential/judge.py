"""Plain transformers as the judge of `pagoda.hf`. In: a case of `TINY`; out: models, prompts, and what must
be equal.

Weights as transformers draws them are so small that an answer hardly depends on its prompt: a cache with
wrong contents would pass. Those of `sharp_model` are scaled up until keys and values matter, and logits are
compared besides tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

from differential.tiny_models import VOCABULARY, tiny_config, tiny_model

__all__ = ["GREEDY", "LOGITS", "assert_same", "batch", "prompt", "sharp", "sharp_model", "spoil"]

SHARP = 7  # times as large: keeps the size of what goes through a layer of 48 channels
# No token ends an answer, so that all have the same length.
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
LOGITS: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}


def sharp(model: Any) -> Any:
    """The same model with larger matrices. Cost: one pass over them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARP)
    return model


def sharp_model(
    case: str, dtype: torch.dtype = torch.float32, seed: int = 0, num_layers: int | None = None
) -> Any:
    """A tiny model of a case, the same for the same seed, whose answers depend on their prompts; all of its
    layers, or the first ones."""
    config = tiny_config(case, torch.float32)
    config.tie_word_embeddings = False  # tied ones answer with the last token again and again
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    return sharp(tiny_model(config, seed)).to(dtype)


def prompt(*parts: tuple[int, int] | int) -> torch.Tensor:
    """[1, length] int64: random tokens, part after part: `length`, or (length, seed). Parts of one seed begin
    alike. None is a special token."""
    rows = []
    for part in parts:
        length, seed = part if isinstance(part, tuple) else (part, 0)
        generator = torch.Generator().manual_seed(1000 + seed)
        rows.append(torch.randint(3, VOCABULARY, (1, length), generator=generator))
    return torch.cat(rows, dim=1)


def batch(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of rows, padded on the left."""
    length = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - row.shape[1] :] = row
        mask[number, length - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(ours: Any, plain: Any) -> None:
    """Equal tokens, and logits that differ by rounding only."""
    assert type(ours) is type(plain)
    if isinstance(ours, torch.Tensor):
        assert ours.tolist() == plain.tolist()
        return
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("logits", "scores"):
        if plain.get(name) is not None:
            assert len(ours[name]) == len(plain[name])
            for mine, theirs in zip(ours[name], plain[name], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def spoil(cache: Any) -> None:
    """Changes all keys and values that a cache holds, so that an answer which uses them is wrong."""
    for pool in cache._memory._pools.pools.values():
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.add_(
                torch.randn(buffer.shape, generator=torch.Generator().manual_seed(7)).to(buffer.dtype)
            )
