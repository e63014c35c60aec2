"""The order of a model's layers. In: the fields of its config; out: the name of each layer's kind.

families.py says which function belongs to which family.
"""

from __future__ import annotations

from collections.abc import Callable

from pagoda.layout._configs.fields import Fields

__all__ = [
    "Types",
    "all_of",
    "deepseek_v4",
    "every",
    "exaone4",
    "full_at",
    "gemma3",
    "glm_moe_dsa",
    "jamba",
    "kimi",
    "listed",
    "llama4",
    "minimax",
    "nemotron_h",
    "sliding_every_other",
    "sliding_from_layer",
    "sliding_if_given",
    "smollm3",
    "zamba2",
]

MAX_LAYERS = 10_000  # against nonsense

Types = Callable[[Fields], list[str]]

# Names of layer kinds in older configs.
ALSO = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=MAX_LAYERS)


def listed(otherwise: Types) -> Types:
    """Use the types that a config lists, by their current names, or else what `otherwise` derives."""

    def types(fields: Fields) -> list[str]:
        for name in ("layer_types", "layers_block_type"):
            found = fields.items(name)
            if found is not None:
                return [ALSO.get(str(each), str(each)) for each in found]
        return otherwise(fields)

    return types


def all_of(kind: str) -> Types:
    return lambda fields: [kind] * num_layers(fields)


def every(period: int, kind: str, others: str, period_field: str = "") -> Types:
    """The last of every `period` layers is of kind `kind`, the rest are `others`."""

    def types(fields: Fields) -> list[str]:
        step = fields.integer(period_field, default=period) if period_field else period
        return [kind if (i + 1) % step == 0 else others for i in range(num_layers(fields))]

    return types


def has_window(fields: Fields) -> bool:
    """Return whether there is a window; some configs write 0 or -1 where others write null."""
    window = fields.get("sliding_window")
    return window is not None and (isinstance(window, bool) or window not in (0, -1))


def sliding_if_given(fields: Fields) -> list[str]:
    """All layers slide if there is a window (Mistral), unless the config switches it off (Qwen)."""
    is_on = has_window(fields) and fields.get("use_sliding_window") is not False
    return ["sliding_attention" if is_on else "full_attention"] * num_layers(fields)


def sliding_from_layer(fields: Fields) -> list[str]:
    """Layers from `max_window_layers` on slide, if the config switches it on (Qwen2, Qwen3)."""
    is_on = fields.get("use_sliding_window") is True and has_window(fields)
    first = fields.integer("max_window_layers", low=0)
    n = num_layers(fields)
    return ["sliding_attention" if is_on and i >= first else "full_attention" for i in range(n)]


def sliding_every_other(fields: Fields) -> list[str]:
    """Every other layer before `max_window_layers` slides, if the config switches it on (Qwen2-MoE)."""
    is_on = fields.get("use_sliding_window") is True
    last = fields.integer("max_window_layers", low=0)
    n = num_layers(fields)
    return ["sliding_attention" if is_on and i % 2 == 0 and i < last else "full_attention" for i in range(n)]


def has_positions(fields: Fields) -> list[bool]:
    """Return which layers rotate their keys: those marked 1 in `no_rope_layers`, or all but the last of
    every `no_rope_layer_interval`."""
    given = fields.items("no_rope_layers")
    if given:
        return [bool(each) for each in given]
    step = fields.integer("no_rope_layer_interval", default=4)
    return [(i + 1) % step != 0 for i in range(num_layers(fields))]


def llama4(fields: Fields) -> list[str]:
    """Layers with positions attend within chunks."""
    return ["chunked_attention" if each else "full_attention" for each in has_positions(fields)]


def smollm3(fields: Fields) -> list[str]:
    """Layers without positions slide, if the config switches it on."""
    is_on = fields.get("use_sliding_window") is True and has_window(fields)
    return ["sliding_attention" if is_on and not each else "full_attention" for each in has_positions(fields)]


def gemma3(fields: Fields) -> list[str]:
    return every(6, "full_attention", "sliding_attention", "sliding_window_pattern")(fields)


def exaone4(fields: Fields) -> list[str]:
    """One full layer in four; without a window all are full."""
    if not has_window(fields):
        return all_of("full_attention")(fields)
    return every(4, "full_attention", "sliding_attention", "sliding_window_pattern")(fields)


def glm_moe_dsa(fields: Fields) -> list[str]:
    """Layers with their own indexer store its keys; the others reuse the previous selection. The config has
    a list, a pattern of letters, or `index_topk_freq`: the first of so many layers has an indexer."""
    given = fields.items("indexer_types")
    if given is None and fields.has("index_topk_pattern"):
        pattern = fields.get("index_topk_pattern")
        given = list(pattern) if isinstance(pattern, str) else fields.items("index_topk_pattern")
    if given is None:
        step = fields.integer("index_topk_freq", default=1)
        offset = fields.integer("index_skip_topk_offset", default=2, low=0)
        given = [
            "full" if max(i - offset + 1, 0) % step == 0 else "shared" for i in range(num_layers(fields))
        ]
    names = {"full": "indexed_attention", "F": "indexed_attention"}
    names |= {"shared": "full_attention", "S": "full_attention"}
    return [names.get(str(each), f"indexed by {each}") for each in given]


def full_at(name: str, others: str) -> Types:
    """The config lists the layers that have attention (Bamba, LFM2)."""

    def types(fields: Fields) -> list[str]:
        n = num_layers(fields)
        given = fields.integers(name)
        full = set(range(n) if given is None and others == "conv" else given or [])
        return ["full_attention" if i in full else others for i in range(n)]

    return types


def jamba(fields: Fields) -> list[str]:
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", low=0, high=period - 1)
    n = num_layers(fields)
    return ["full_attention" if i % period == offset else "linear_attention" for i in range(n)]


def kimi(fields: Fields) -> list[str]:
    """The config lists the full layers, counted from 1."""
    n = num_layers(fields)
    own = fields.inner("linear_attn_config")
    full = own.integers("full_attn_layers") if own is not None else None
    if full is None:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(n)]
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(n)]


def minimax(fields: Fields) -> list[str]:
    """0 is lightning attention, 1 full attention."""
    given = fields.integers("attn_type_list")
    if given is not None:
        return [{0: "linear_attention", 1: "full_attention"}.get(each, str(each)) for each in given]
    return every(2, "linear_attention", "full_attention")(fields)


def zamba2(fields: Fields) -> list[str]:
    """The pattern of Zamba2-2.7B, which its config omits."""
    plain, hybrid = ["linear_attention"], ["hybrid"]
    return [*plain, *((plain * 5 + hybrid) * 7), *plain * 4, *hybrid, *plain * 3, *hybrid, *plain * 2]


def nemotron_h(fields: Fields) -> list[str]:
    """One letter per layer; without a pattern, the four layers that the config class defaults to."""
    pattern = fields.get("hybrid_override_pattern") or "ME*-"
    if not isinstance(pattern, str):
        raise fields.error(f"hybrid_override_pattern should be letters, not {str(pattern)[:40]!r}")
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [names.get(letter, letter) for letter in pattern]


def deepseek_v4(fields: Fields) -> list[str]:
    """One ratio per layer; ratios beyond the last layer belong to multi-token prediction. Without a list, two
    layers of the highest ratio, then both ratios in turn."""
    n = num_layers(fields)
    ratios = fields.integers("compress_ratios")
    if ratios is None:
        ratios = [128 if i < 2 or i % 2 == 0 else 4 for i in range(n)]
    names = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    return [names.get(ratio, f"compressed by {ratio}") for ratio in ratios[:n]]
