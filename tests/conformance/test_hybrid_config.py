"""contracts/hybrid.md: config, schedule, schema, block budget, and the facts of the model family."""

import dataclasses
import inspect
import json
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pagoda
from conformance.hybrid_models import CSA, FAILS, HCA, SCHEDULE, SWA, manager_of, tiny
from pagoda import ConfigError, from_hf, model_config
from pagoda.compat import (
    AttentionType,
    DSV4Config,
    KVCacheManager,
    LayerCacheSchema,
    LayerSpec,
    build_schema,
    compute_block_budget,
)
from pagoda.layout import Entry, TensorSpec, compressed_fp8, index_keys, plain

FLASH, PRO = DSV4Config.flash(), DSV4Config.pro()


def schemas_of(config: DSV4Config) -> list[LayerCacheSchema]:
    return [build_schema(config, spec) for spec in config.schedule()]


# --- the facts of the model family


@pytest.mark.parametrize(
    ("config", "layers", "heads", "topk", "counts", "first"),
    [(FLASH, 43, 64, 512, (21, 20, 2), SWA), (PRO, 61, 128, 1024, (30, 31, 0), HCA)],
    ids=["flash", "pro"],
)
def test_flash_and_pro_are_what_the_table_says(
    config: DSV4Config,
    layers: int,
    heads: int,
    topk: int,
    counts: tuple[int, int, int],
    first: AttentionType,
) -> None:
    assert (config.num_layers, config.num_query_heads, config.index_topk) == (layers, heads, topk)
    assert (config.head_dim, config.rope_dim, config.window) == (512, 64, 128)
    assert (config.csa_ratio, config.hca_ratio, config.index_head_dim) == (4, 128, 128)
    assert (config.block_tokens, config.unaccepted) == (128, 1)
    types = [spec.attn_type for spec in config.schedule()]
    assert [spec.layer_idx for spec in config.schedule()] == list(range(layers))
    assert tuple(types.count(kind) for kind in (CSA, HCA, SWA)) == counts
    assert types[:2] == [first, first]
    assert all(kind is (CSA if number % 2 == 0 else HCA) for number, kind in list(enumerate(types))[2:])


def test_an_entry_is_584_bytes_and_a_key_132_or_68() -> None:
    assert FLASH.entry == compressed_fp8(512, 64)
    assert FLASH.entry.num_bytes == 448 + 64 * 2 + 7 + 1 == 584
    assert FLASH.index.num_bytes == 128 + 4
    assert DSV4Config.from_hf(model_config("deepseek-v4-pro"), index_dtype="fp4").index.num_bytes == 64 + 4


@pytest.mark.parametrize(
    ("block_tokens", "csa", "hca"), [(128, (32, 19_008), (1, 1_152)), (256, (64, 37_440), (2, 1_728))]
)
def test_blocks_have_the_bytes_of_the_contract(
    block_tokens: int, csa: tuple[int, int], hca: tuple[int, int]
) -> None:
    config = dataclasses.replace(FLASH, block_tokens=block_tokens)
    for kind, (entries, num_bytes) in ((CSA, csa), (HCA, hca)):
        schema = build_schema(config, LayerSpec(9, kind))
        assert schema.entries_per_block == entries
        assert schema.entry.page_bytes(entries) == num_bytes
        # Data, then scales, rounded up to a multiple of the data of an entry.
        assert num_bytes == -(-entries * (576 + 8) // 576) * 576
    assert build_schema(config, LayerSpec(0, SWA)).entries_per_block == 0


@pytest.mark.parametrize(
    ("config", "exact", "at_128", "at_256"),
    [(FLASH, 3_850, 3_991.5, 3_899.25), (PRO, 5_511, 5_724, 5_586.75)],
    ids=["flash", "pro"],
)
def test_paged_bytes_a_token(config: DSV4Config, exact: int, at_128: float, at_256: float) -> None:
    compressed = [schema for schema in schemas_of(config) if schema.ratio]
    unpadded = sum(
        Fraction(schema.entry.num_bytes + (schema.index.num_bytes if schema.index else 0), schema.ratio)
        for schema in compressed
    )
    assert math.floor(unpadded) == exact
    for block_tokens, expected in ((128, at_128), (256, at_256)):
        layout = dataclasses.replace(config, block_tokens=block_tokens).layout()
        assert layout.token_bytes == expected


@pytest.mark.parametrize(("config", "mib"), [(FLASH, 14.7), (PRO, 22.2)], ids=["flash", "pro"])
def test_state_bytes_a_request(config: DSV4Config, mib: float) -> None:
    num_bytes = 0
    for schema in schemas_of(config):
        assert schema.ring_size == 128
        num_bytes += schema.ring_size * (584 + 4)  # an entry, and which position it is
        for shape in (schema.main_state_shape, schema.index_state_shape):
            num_bytes += 0 if shape is None else 2 * math.prod(shape) * 4  # values and scores, float32
    assert round(num_bytes / 2**20, 1) == mib
    group = config.layout().state_group
    assert group is not None
    assert group.state_bytes == num_bytes


def test_state_rows_of_the_compressors() -> None:
    csa, hca, swa = (build_schema(FLASH, LayerSpec(0, kind)) for kind in (CSA, HCA, SWA))
    # 2·2·512 × 8 rows, 2·2·128 × 8 rows and 2·512 × 128 rows: values and scores are one factor of two.
    assert (csa.main_state_shape, csa.index_state_shape) == ((8, 2 * 512), (8, 2 * 128))
    assert (hca.main_state_shape, hca.index_state_shape) == ((128, 512), None)
    assert (swa.main_state_shape, swa.index_state_shape) == (None, None)


@pytest.mark.parametrize("unaccepted", [1, 2, 5, 64])
def test_rows_for_tokens_that_are_written_before_they_are_accepted(unaccepted: int) -> None:
    config = dataclasses.replace(FLASH, unaccepted=unaccepted)
    csa, hca, swa = (build_schema(config, LayerSpec(0, kind)) for kind in (CSA, HCA, SWA))
    assert {schema.ring_size for schema in (csa, hca, swa)} == {128 + unaccepted - 1}
    assert csa.main_state_shape == (2 * 4 + unaccepted - 1, 1024)
    assert csa.index_state_shape == (2 * 4 + unaccepted - 1, 256)
    assert hca.main_state_shape == (128 + unaccepted - 1, 512)


# --- schema


def test_a_schema_says_all_of_a_layer() -> None:
    csa = build_schema(FLASH, LayerSpec(2, CSA))
    assert (csa.layer_idx, csa.attn_type, csa.ratio, csa.overlap) == (2, CSA, 4, True)
    assert (csa.head_dim, csa.rope_dim, csa.window, csa.ring_size, csa.block_tokens) == (
        512,
        64,
        128,
        128,
        128,
    )
    assert (csa.entries_per_block, csa.entry, csa.index) == (32, FLASH.entry, FLASH.index)
    hca = build_schema(FLASH, LayerSpec(3, HCA))
    assert (hca.ratio, hca.overlap, hca.entries_per_block, hca.index) == (128, False, 1, None)
    swa = build_schema(FLASH, LayerSpec(0, SWA))
    assert (swa.ratio, swa.overlap, swa.entries_per_block, swa.index) == (0, False, 0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        swa.layer_idx = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("entry", "num_bytes"),
    [
        # What later models use: all of it in fp8 under four scales, or in fp4 under one for each 16 numbers.
        (
            Entry(
                "all fp8", (TensorSpec("flat", (512,), "fp8"),), (TensorSpec("scale", (4,), "float32"),), 528
            ),
            528,
        ),
        (
            Entry(
                "all fp4",
                (TensorSpec("flat", (256,), "float4_e2m1fn_x2"),),
                (TensorSpec("scale", (32,), "float8_e8m0fnu"),),
                288,
            ),
            288,
        ),
        (plain("compressed", 1, 512, "bfloat16"), 1024),
    ],
    ids=lambda it: getattr(it, "name", None),
)
def test_another_entry_is_another_value(entry: Entry, num_bytes: int) -> None:
    schema = build_schema(dataclasses.replace(FLASH, entry=entry), LayerSpec(0, CSA))
    assert schema.entry.num_bytes == num_bytes
    assert schema.codec.dim == 512


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"entry": compressed_fp8(256, 64)}, "entry: give an Entry of head_dim = 512 numbers, not 256"),
        ({"index": index_keys(64, "fp8")}, "index: give an Entry of index_head_dim = 128 numbers, not 64"),
        ({"index": index_keys(128, "fp8_e5m2")}, "entry index"),
    ],
    ids=str,
)
def test_entries_that_do_not_fit_the_layer_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_schema(dataclasses.replace(FLASH, **changed), LayerSpec(0, CSA))


def test_blocks_end_where_an_entry_ends() -> None:
    swa_only = tiny(compress_ratios=(0, 0, 0, 0), block_tokens=10)
    with pytest.raises(ConfigError, match="block_tokens: give a multiple of 4"):
        build_schema(swa_only, LayerSpec(0, CSA))
    with pytest.raises(ConfigError, match="multiple of 4"):
        swa_only.layout([LayerSpec(0, CSA)])
    assert build_schema(swa_only, LayerSpec(0, SWA)).entries_per_block == 0
    # CSA alone: its ratio is the only one in use.
    config = tiny(compress_ratios=(4, 4, 4, 4), block_tokens=12)
    assert build_schema(config, LayerSpec(0, CSA)).entries_per_block == 3


# --- config


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[
            (name, bad)
            for name in (
                "num_layers", "num_query_heads", "index_topk", "head_dim", "rope_dim", "window", "csa_ratio",
                "hca_ratio", "index_head_dim", "block_tokens", "unaccepted",
            )
            for bad in (0, -1, 1.5, "4", None)
        ],
        ("rope_dim", 16),
        ("head_dim", 4),
        ("compress_ratios", (0, 4, 16)),
        ("compress_ratios", (0, 4, 16, 8)),
        ("compress_ratios", (0, 4, 16, -4)),
        ("compress_ratios", (0, 4, 16, "4")),
        ("compress_ratios", "0444"),
        ("compress_ratios", None),
        ("compress_ratios", 4),
        ("block_tokens", 8),
        ("block_tokens", 24),
        ("csa_ratio", 16),
        ("entry", "fp8"),
        ("index", 132),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(**{name: bad})
    assert name in str(error.value) or (name, bad) in (("head_dim", 4), ("csa_ratio", 16))


def test_a_config_is_frozen_and_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLASH.window = 64  # type: ignore[misc]
    assert DSV4Config.flash() == FLASH
    assert hash(DSV4Config.flash()) == hash(FLASH)
    assert tiny(compress_ratios=[0, 4, 16, 4]) == tiny()


def test_from_hf_reads_a_dict_a_path_and_an_object(tmp_path: Path) -> None:
    values = model_config("deepseek-v4-pro")
    (tmp_path / "config.json").write_text(json.dumps(values))
    for given in (
        values,
        tmp_path,
        tmp_path / "config.json",
        str(tmp_path),
        SimpleNamespace(to_dict=lambda: values),
    ):
        assert DSV4Config.from_hf(given) == PRO


def test_from_hf_agrees_with_the_layout_of_the_same_config() -> None:
    for name in ("deepseek-v4-flash", "deepseek-v4-pro"):
        for options in ({}, {"kv_dtype": "bf16", "index_dtype": "fp4"}, {"unaccepted": 5}):
            config = DSV4Config.from_hf(model_config(name), **options)
            assert config.layout() == from_hf(model_config(name), **options)
    wide = DSV4Config.from_hf(model_config("deepseek-v4-pro"), block_tokens=256)
    assert wide.layout() == from_hf(model_config("deepseek-v4-pro"), page_tokens=256)


def test_from_hf_of_other_sizes() -> None:
    values = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6},
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "sliding_window": 10,
        "index_head_dim": 16,
        "index_topk": 7,
        "num_attention_heads": 5,
    }
    config = DSV4Config.from_hf(values)
    assert (config.head_dim, config.rope_dim, config.window, config.index_head_dim) == (32, 8, 10, 16)
    assert (config.csa_ratio, config.hca_ratio, config.compress_ratios) == (2, 6, (0, 2, 6))
    assert (config.num_query_heads, config.index_topk) == (5, 7)
    assert config.block_tokens == 132  # 128 is no multiple of 6
    assert DSV4Config.from_hf(values, block_tokens=6).block_tokens == 6


@pytest.mark.parametrize(
    "bad", [model_config("llama-3.1-8b"), model_config("qwen3-next-80b-a3b"), {}, None, 7, "nowhere"], ids=str
)
def test_from_hf_of_another_model_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError):
        DSV4Config.from_hf(bad)


# --- schedule


@pytest.mark.parametrize(
    ("layer_idx", "attn_type"),
    [(-1, CSA), (1.0, CSA), ("1", CSA), (None, CSA), (0, "full"), (0, 4), (0, None)],
)
def test_a_layer_that_cannot_be_is_refused(layer_idx: Any, attn_type: Any) -> None:
    with pytest.raises(ConfigError):
        LayerSpec(layer_idx, attn_type)


@pytest.mark.parametrize(
    "schedule",
    [[], 3, "csa", LayerSpec(0, CSA), [CSA], [None], [(0, CSA)], [LayerSpec(0, CSA), LayerSpec(0, HCA)]],
    ids=str,
)
def test_a_schedule_that_cannot_be_is_refused(schedule: Any) -> None:
    for call in (
        lambda: tiny().layout(schedule),
        lambda: compute_block_budget(tiny(), schedule, 64, 2),
        lambda: manager_of("cpu", schedule=schedule),
    ):
        with pytest.raises(ConfigError, match="schedule"):
            call()


def test_a_manager_needs_a_schedule() -> None:
    with pytest.raises(ConfigError, match="schedule"):
        manager_of("cpu", schedule=None)


def test_a_type_may_be_its_value() -> None:
    assert LayerSpec(3, "hca") == LayerSpec(3, HCA)  # type: ignore[arg-type]
    assert {kind.name for kind in AttentionType} == {"SWA", "CSA", "HCA"}


# --- block budget


@pytest.mark.parametrize(
    ("context", "requests", "blocks"),
    [(1, 1, 1), (128, 1, 1), (129, 1, 2), (1_000_000, 1, 7_813), (1_000_000, 3, 23_439), (256, 4, 8)],
)
def test_the_budget_is_requests_times_blocks_rounded_up(context: int, requests: int, blocks: int) -> None:
    assert compute_block_budget(FLASH, FLASH.schedule(), context, requests) == {"csa": blocks, "hca": blocks}


def check_the_longest_requests_fit(budget: Any) -> None:
    """Every token of every request at its longest lies in a block."""
    for context in (1, 127, 128, 129, 200, 1_000_000):
        for requests in (1, 3):
            tokens_in_blocks = budget(FLASH, FLASH.schedule(), context, requests)["hca"] * 128
            assert tokens_in_blocks >= context * requests


def test_defect_context_divided_by_128_and_rounded_down() -> None:
    check_the_longest_requests_fit(compute_block_budget)
    with pytest.raises(FAILS):
        check_the_longest_requests_fit(
            lambda config, schedule, context, requests: {"hca": requests * (context // config.block_tokens)}
        )


def test_kinds_that_a_schedule_does_not_have_get_no_blocks() -> None:
    assert compute_block_budget(tiny(), [LayerSpec(0, SWA)], 64, 2) == {"csa": 0, "hca": 0}
    assert compute_block_budget(tiny(), [LayerSpec(0, HCA)], 64, 2) == {"csa": 0, "hca": 8}


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("schedule", [SCHEDULE, SCHEDULE[:1], SCHEDULE[1:2]], ids=len)
def test_what_fits_into_given_bytes_fits_and_no_block_more_does(
    requests: int, schedule: list[LayerSpec]
) -> None:
    config, context = tiny(), 50

    def made(blocks: dict[str, int]) -> int:
        return KVCacheManager(
            config, schedule, requests, context, blocks["csa"], blocks["hca"], device="cpu"
        ).memory_bytes()

    enough = compute_block_budget(config, schedule, context, requests)
    whole = made(enough)
    one = {name: min(n, 4) for name, n in enough.items()}  # the blocks of one request: 50 tokens
    least = made(one)
    for memory in {least, least + 1, (least + whole) // 2, max(least, whole - 1), whole, whole + 10**6}:
        budget = compute_block_budget(config, schedule, context, requests, memory=memory)
        assert made(budget) <= memory
        if budget != enough:
            assert made({name: n + 1 for name, n in budget.items()}) > memory
        else:
            assert memory >= whole
    with pytest.raises(ConfigError, match="memory: the states of"):
        compute_block_budget(config, schedule, context, requests, memory=least - 1)
    assert compute_block_budget(config, schedule, context, requests, memory="1GiB") == enough


@pytest.mark.parametrize(
    ("context", "requests", "memory"),
    [(0, 1, None), (-1, 1, None), (1.5, 1, None), (64, 0, None), (64, "1", None), (64, 1, -1), (64, 1, "x")],
)
def test_a_budget_that_cannot_be_is_refused(context: Any, requests: Any, memory: Any) -> None:
    with pytest.raises(ConfigError):
        compute_block_budget(tiny(), SCHEDULE, context, requests, memory=memory)


@pytest.mark.parametrize("config", [None, {}, FLASH.layout()], ids=lambda it: type(it).__name__)
def test_what_is_no_config_is_refused(config: Any) -> None:
    for call in (
        lambda: compute_block_budget(config, SCHEDULE, 64, 1),
        lambda: build_schema(config, LayerSpec(0, CSA)),
        lambda: KVCacheManager(config, SCHEDULE, 1, device="cpu"),
    ):
        with pytest.raises(ConfigError, match="config: give a DSV4Config"):
            call()


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (build_schema, "config, spec"),
        (LayerSpec, "layer_idx, attn_type"),
        (
            compute_block_budget,
            "config, schedule, max_context_tokens, max_concurrent_requests, *, memory=None",
        ),
    ],
)
def test_argument_names_are_part_of_the_contract(call: Any, wanted: str) -> None:
    signature = inspect.signature(call)
    parameters = [it.replace(annotation=it.empty) for it in signature.parameters.values()]
    found = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    assert found == f"({wanted})"
    assert getattr(pagoda.compat, call.__name__) is call
