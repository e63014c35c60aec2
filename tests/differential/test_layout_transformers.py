"""Layouts against real caches: what a model of transformers holds after n tokens, tensor by tensor.

Every family runs as a tiny random model with its own cache. What that cache holds is `layer_bytes`, to the
byte; where transformers keeps more or less by its own choice, `DIFFERENCES` says how much, and why.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers", reason="needs transformers: its caches are what layouts are compared with"
)

import transformers

from differential.tiny_models import TINY, WINDOW, config_class, tiny_config, tiny_model, tokens
from pagoda.layout import (
    CompressedAttention,
    FullAttention,
    GatedDelta,
    KimiDelta,
    Kind,
    LatentAttention,
    Layout,
    Lightning,
    Mamba1,
    Mamba2,
    RingWindow,
    SharedAttention,
    ShortConv,
    WindowAttention,
    from_hf,
)

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
KEEPS_LATENT = (5, 18)  # since then DeepSeek-V3.2's cache holds the latent vector itself
# Families whose latent vector earlier versions expand, because it stands beside an indexer.
EXPANDED = ("deepseek_v32", "glm_moe_dsa")
LENGTHS = (1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 16, 45)
DTYPES = [torch.bfloat16, torch.float32]
# One of each kind of layer, and of each cache that is not transformers' usual one.
TOKEN_BY_TOKEN = [
    "mistral, window", "gemma3n_text", "llama4_text", "deepseek_v32", "deepseek_v4", "qwen3_next",
    "kimi_linear", "minimax", "lfm2", "jamba", "bamba", "zamba2", "nemotron_h",
]  # fmt: skip

CONVOLVING = (GatedDelta, KimiDelta, Mamba1, Mamba2, ShortConv)

# Our tensors, by kind of layer, and what transformers calls them.
STATES = {"conv": ("conv_states[0]",), "recurrent": ("recurrent_states[0]",)}
TENSORS: dict[type[Kind], dict[str, tuple[str, ...]]] = {
    FullAttention: {"keys": ("keys",), "values": ("values",)},
    WindowAttention: {"keys": ("keys",), "values": ("values",)},
    LatentAttention: {"latent": ("keys", "values"), "index": ("indexer_keys",)},
    SharedAttention: {},
    RingWindow: {"window": ("keys", "values"), "positions": ()},
    CompressedAttention: {
        "window": ("keys", "values"),
        "positions": (),
        "compressed": ("compressed_kv[compressor]",),
        "index": ("compressed_kv[indexer]",),
        "main_values": ("buffer_kv[compressor]", "overlap_kv[compressor]"),
        "main_scores": ("buffer_gate[compressor]", "overlap_gate[compressor]"),
        "index_values": ("buffer_kv[indexer]", "overlap_kv[indexer]"),
        "index_scores": ("buffer_gate[indexer]", "overlap_gate[indexer]"),
    },
    **{kind: STATES for kind in CONVOLVING},
    Lightning: {"recurrent": ("linear_cache",)},
}


@dataclass(frozen=True)
class At:
    """Where a difference is looked at: the layer, the config, tokens so far, bytes of the model's dtype."""

    kind: Any
    config: Any
    length: int
    width: int


@dataclass(frozen=True)
class Difference:
    """Bytes that transformers keeps beyond ours (or below, if negative) in a tensor of a kind of layer."""

    name: str
    kinds: tuple[type[Kind], ...]
    tensor: str
    extra: Callable[[At], int]
    reason: str
    family: str | None = None
    before: tuple[int, int] | None = None  # the version of transformers that no longer differs

    def applies(self, kind: Kind, tensor: str, model_type: str) -> bool:
        return (
            type(kind) in self.kinds
            and tensor == self.tensor
            and self.family in (None, model_type)
            and (self.before is None or self.before > VERSION)
        )


def rows_kept(at: At) -> int:
    """Rows of a window that transformers keeps: what the next token reads, and no more than there are."""
    return min(at.length, at.kind.window - 1)


def compressor(dim: Callable[[At], int]) -> Callable[[At], int]:
    """transformers' rows of a compressor in the model's dtype, less ours in float32."""

    def extra(at: At) -> int:
        ratio, size = at.kind.ratio, dim(at)
        waiting = at.length % ratio
        if not at.kind.overlap:
            return waiting * size * at.width - ratio * size * 4
        before = ratio if at.length >= ratio else 0
        return (waiting * 2 * size + before * size) * at.width - 2 * ratio * 2 * size * 4

    return extra


_WAITING = (
    "transformers keeps only the tokens that wait for their entry, in the model's dtype, and of the block "
    "before only the half that the next entry reads; we keep fixed rows of both, in float32"
)

DIFFERENCES = [
    Difference(
        "a column more",
        CONVOLVING,
        "conv",
        lambda at: at.kind.state[0].shape[0] * at.width,
        "transformers keeps as many columns as the kernel is long; the next token reads one less",
    ),
    Difference(
        "lightning in the model's dtype",
        (Lightning,),
        "recurrent",
        lambda at: at.config.num_attention_heads * at.config.head_dim**2 * (at.width - 4),
        "MiniMax's cache has the dtype of its values; we keep states in float32, because they add up errors",
    ),
    Difference(
        "keys and values twice",
        (RingWindow,),
        "window",
        lambda at: (2 * rows_kept(at) - at.kind.window) * at.config.head_dim * at.width,
        "V4's window-only layers use transformers' plain window, which stores the one vector as keys and as "
        "values, a row less than the window and fewer at first; we keep it once, in a ring of the window",
        family="deepseek_v4",
    ),
    Difference(
        "window without its last row",
        (CompressedAttention,),
        "window",
        lambda at: (rows_kept(at) - at.kind.window) * at.config.head_dim * at.width,
        "transformers keeps what the next token reads, fewer rows at first; our ring has a row for the new "
        "one too",
    ),
    Difference(
        "no positions",
        (RingWindow, CompressedAttention),
        "positions",
        lambda at: -4 * at.kind.window,
        "transformers moves the rows of its window, which so stand in their order; ours stay where they are, "
        "and an int32 beside each says which position it holds",
    ),
    *(
        Difference(f"compressor's {name}", (CompressedAttention,), name, compressor(dim), _WAITING)
        for name, dim in {
            "main_values": lambda at: at.config.head_dim,
            "main_scores": lambda at: at.config.head_dim,
            "index_values": lambda at: at.config.index_head_dim,
            "index_scores": lambda at: at.config.index_head_dim,
        }.items()
    ),
    *(
        Difference(
            f"keys and values of every head of {family}",
            (LatentAttention,),
            "latent",
            lambda at: (
                (
                    at.config.num_attention_heads
                    * (at.config.qk_nope_head_dim + at.config.qk_rope_head_dim + at.config.v_head_dim)
                    - (at.config.kv_lora_rank + at.config.qk_rope_head_dim)
                )
                * at.length
                * at.width
            ),
            "older versions cache what the latent vector beside an indexer is expanded to",
            family=family,
            before=KEEPS_LATENT,
        )
        for family in EXPANDED
    ),
]


def held(cache: Any, num_layers: int) -> list[dict[str, torch.Tensor]]:
    """What a cache holds, by layer and name. One tensor under two names counts once, an empty one not at all.

    A cache may have fewer layers than its model: those that come last and keep nothing.
    """
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(num_layers)]
    for number, layer in enumerate(cache.layers):
        layers[number] = dict(distinct(named_tensors(layer)))
    for number, state in enumerate(getattr(cache, "linear_cache", ())):
        if len(state):
            layers[number]["linear_cache"] = state
    return layers


def named_tensors(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(layer).items():
        items = {name: value}
        if isinstance(value, dict):
            items = {f"{name}[{key}]": each for key, each in value.items()}
        # Numbers that a layer keeps as tensors have no dimensions.
        yield from ((n, t) for n, t in items.items() if isinstance(t, torch.Tensor) and t.dim() and t.numel())


def distinct(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, tensor in tensors:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in seen:
            seen.add(place)
            yield name, tensor


def mismatches(layout: Layout, cache: Any, config: Any, length: int) -> tuple[list[str], set[str]]:
    """What a layout says otherwise than a cache after `length` tokens, and the differences that were met."""
    found: list[str] = []
    met: set[str] = set()
    caches = held(cache, len(layout.layers))
    for number, kinds in enumerate(layout.layers):
        theirs = {name: tensor.nbytes for name, tensor in caches[number].items()}
        ours = layout.layer_bytes(number, length)
        for kind in kinds:
            for tensor, names in TENSORS[type(kind)].items():
                if tensor not in ours:
                    continue
                at = At(kind, config, length, config.dtype.itemsize)
                expected = ours.pop(tensor)
                for difference in DIFFERENCES:
                    if difference.applies(kind, tensor, config.model_type):
                        expected += difference.extra(at)
                        met |= {difference.name} if difference.extra(at) else set()
                actual = sum(theirs.pop(name, 0) for name in names)
                if actual != expected:
                    found.append(f"layer {number}, {tensor}, {length} tokens: {actual} B, not {expected} B")
        if theirs or ours:
            found.append(
                f"layer {number}, {length} tokens: only in the cache {theirs}, only in the layout {ours}"
            )
    return found, met


@functools.cache
def model_of(case: str, dtype: torch.dtype) -> Any:
    if config_class(TINY[case].model_type) is None:
        pytest.skip(f"transformers {transformers.__version__} has no {TINY[case].model_type}")
    return tiny_model(tiny_config(case, dtype))


def layout_of(model: Any) -> Layout:
    return from_hf(model.config, kv_dtype=model.dtype, index_dtype=model.dtype)


def fed(model: Any, chunks: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """How many tokens a model has seen after each chunk, and its cache then."""
    ids = tokens(sum(chunks))
    cache: dict[str, Any] = {}
    done = 0
    for chunk in chunks:
        with torch.inference_mode():
            output = model(ids[:, done : done + chunk], use_cache=True, **cache)
        # State-space models have another name for it.
        name = "cache_params" if "cache_params" in output else "past_key_values"
        cache = {name: output[name]}
        done += chunk
        yield done, output[name]


def compare(case: str, dtype: torch.dtype, chunks: Sequence[int]) -> list[str]:
    model = model_of(case, dtype)
    layout = layout_of(model)
    return [text for n, cache in fed(model, chunks) for text in mismatches(layout, cache, model.config, n)[0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TINY)
def test_a_cache_holds_what_the_layout_says(case: str, dtype: torch.dtype) -> None:
    assert [text for length in LENGTHS for text in compare(case, dtype, [length])] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TINY)
def test_a_cache_fed_in_two_chunks(case: str, dtype: torch.dtype) -> None:
    assert compare(case, dtype, [WINDOW + 1, 31]) == []


@pytest.mark.parametrize("case", TOKEN_BY_TOKEN)
def test_a_cache_fed_token_by_token(case: str) -> None:
    assert compare(case, torch.bfloat16, [1] * (WINDOW + 4)) == []


@pytest.mark.parametrize("case", TINY)
def test_tensors_have_the_shapes_of_their_parts(case: str) -> None:
    """Bytes are products: heads taken for dimensions would not be seen in them."""
    model = model_of(case, torch.bfloat16)
    layout, length = layout_of(model), 5
    ((_, cache),) = fed(model, [length])
    compared = 0
    is_latent = VERSION >= KEEPS_LATENT or TINY[case].model_type not in EXPANDED
    for tensors, kinds in zip(held(cache, len(layout.layers)), layout.layers, strict=True):
        for kind in kinds:
            for name, shape in expected_shapes(kind, length, is_latent).items():
                assert tuple(tensors[name].shape) == shape, (name, kind)
                compared += 1
    assert compared > 0


def expected_shapes(kind: Kind, length: int, is_latent: bool) -> dict[str, tuple[int, ...]]:
    """Shapes in transformers, [batch, heads, tokens, dim] or [batch, …], from ours."""
    shapes: dict[str, tuple[int, ...]] = {}
    if isinstance(kind, FullAttention):
        for entry in kind.storage.entries:
            heads, dim = entry.parts[0].shape
            shapes[entry.name] = (1, heads, length, dim)
    elif isinstance(kind, LatentAttention):
        if kind.index is not None:
            shapes["indexer_keys"] = (1, length, *kind.index.parts[0].shape)
        if is_latent:
            for name, part in zip(("keys", "values"), kind.entry.parts, strict=True):
                shapes[name] = (1, 1, length, *part.shape)
    elif isinstance(kind, RingWindow):
        shapes["keys"] = (1, 1, length, *kind.entry.parts[0].shape[1:])
    for part in kind.state:
        if part.name == "conv":
            channels, columns = part.shape
            shapes["conv_states[0]"] = (1, channels, columns + 1)
        elif part.name == "recurrent":
            (name,) = TENSORS[type(kind)]["recurrent"]
            shapes[name] = (1, *part.shape)
    return shapes


def test_layers_that_share_have_no_layer_in_the_cache() -> None:
    model = model_of("gemma3n_text", torch.bfloat16)
    layout = layout_of(model)
    ((_, cache),) = fed(model, [5])
    sharing = [n for n, kinds in enumerate(layout.layers) if isinstance(kinds[0], SharedAttention)]
    assert sharing == list(range(len(cache.layers), len(layout.layers))) == [4, 5]
    assert [layout.source(n) for n in sharing] == [
        model.model.layers[n].self_attn.kv_shared_layer_index for n in sharing
    ]


def test_every_difference_is_met() -> None:
    met: set[str] = set()
    for case in TINY:
        model = model_of(case, torch.bfloat16)
        for length, cache in fed(model, [5]):
            met |= mismatches(layout_of(model), cache, model.config, length)[1]
    named = {each.name for each in DIFFERENCES if each.before is None or each.before > VERSION}
    assert met == named


def but(**fields: Any) -> Callable[[Kind], Kind]:
    return lambda kind: replace(kind, **fields)


def instead(other: Kind | None) -> Callable[[Kind], Kind | None]:
    return lambda kind: other


# A layout with one thing wrong, which the comparison has to notice: a case, a kind of layer, what it becomes.
WRONG: dict[str, tuple[str, type[Kind], Callable[[Kind], Kind | None]]] = {
    "a KV head more": ("llama", FullAttention, but(kv_heads=4)),
    "keys wider than values": ("llama", FullAttention, but(k_dim=10, v_dim=6)),
    "another dtype": ("llama", FullAttention, but(dtype="float32")),
    "a layer that keeps nothing": ("llama", FullAttention, instead(None)),
    "a longer window": ("mistral, window", WindowAttention, but(window=WINDOW + 1)),
    "a shorter window": ("mistral, window", WindowAttention, but(window=WINDOW - 1)),
    "a sink": ("mistral, window", WindowAttention, but(sink_tokens=1)),
    "no window": ("gemma3_text", WindowAttention, instead(FullAttention(kv_heads=3, k_dim=14, v_dim=14))),
    "not shared": ("gemma3n_text", SharedAttention, instead(FullAttention(kv_heads=3, k_dim=14, v_dim=14))),
    "not latent": ("deepseek_v3", LatentAttention, instead(FullAttention(kv_heads=1, k_dim=26, v_dim=26))),
    "no indexer": ("deepseek_v32", LatentAttention, but(index=None)),
    "a longer ring": ("deepseek_v4", RingWindow, but(unaccepted=2)),
    "a ratio more": ("deepseek_v4", CompressedAttention, but(ratio=8)),
    "an overlap": ("deepseek_v4", CompressedAttention, but(overlap=True)),
    "wider rows": ("deepseek_v4", CompressedAttention, but(head_dim=17)),
    "more rows": ("deepseek_v4", CompressedAttention, but(unaccepted=2)),
    "heads swapped": ("qwen3_next", GatedDelta, but(key_heads=6, value_heads=2)),
    "a longer kernel": ("qwen3_next", GatedDelta, but(kernel=4)),
    "a rounded state": ("qwen3_next", GatedDelta, but(state_dtype="bfloat16")),
    "a linear head more": ("kimi_linear", KimiDelta, but(heads=6)),
    "not expanded": ("jamba", Mamba1, but(channels=48)),
    "one group": ("mamba2", Mamba2, but(groups=1)),
    "dimensions swapped": ("mamba2", Mamba2, but(head_dim=10, state_dim=16)),
    "half of a hybrid": ("falcon_h1", Mamba2, instead(None)),
    "a shorter kernel": ("lfm2", ShortConv, but(kernel=4)),
    "a lightning head less": ("minimax", Lightning, but(heads=5)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_layout_is_noticed(mistake: str) -> None:
    case, wrong, change = WRONG[mistake]
    model = model_of(case, torch.bfloat16)
    right = layout_of(model)
    layers = [list(kinds) for kinds in right.layers]
    number, place = next(
        (n, i) for n, kinds in enumerate(layers) for i, kind in enumerate(kinds) if type(kind) is wrong
    )
    changed = change(layers[number].pop(place))
    layers[number] += [] if changed is None else [changed]
    length = WINDOW + 4
    ((_, cache),) = fed(model, [length])
    assert mismatches(right, cache, model.config, length)[0] == []
    found = mismatches(Layout(layers), cache, model.config, length)[0]
    assert found
    assert all(text.startswith(f"layer {number}, ") for text in found)
