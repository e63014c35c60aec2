"""contracts/hybrid.md: the paged pool and the state pool of a layer."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from conformance.hybrid_models import CSA, HCA, SWA, parts_of, tiny
from pagoda import ConfigError
from pagoda.compat import (
    AttentionType,
    DSV4Config,
    LayerCacheSchema,
    LayerSpec,
    PagedKVPool,
    StateCachePool,
    build_schema,
)
from pagoda.compat.hybrid import StateSnapshot
from pagoda.errors import ArgumentError, InvariantError, OutOfRangeError
from pagoda.layout import index_keys

FLASH = DSV4Config.flash()
KINDS = [SWA, CSA, HCA]


def schema_of(kind: AttentionType, config: DSV4Config | None = None) -> LayerCacheSchema:
    return build_schema(config or tiny(), LayerSpec(3, kind))


# --- PagedKVPool


@pytest.mark.parametrize(
    ("kind", "block_tokens", "entry_bytes", "index_bytes"),
    [
        (CSA, 128, 19_008, 32 * 132),
        (HCA, 128, 1_152, None),
        (CSA, 256, 37_440, 64 * 132),
        (HCA, 256, 1_728, None),
    ],
)
def test_blocks_are_bytes_with_a_null_block_in_front(
    device: str, kind: AttentionType, block_tokens: int, entry_bytes: int, index_bytes: int | None
) -> None:
    schema = schema_of(kind, dataclasses.replace(FLASH, block_tokens=block_tokens))
    pool = PagedKVPool(schema, 3, device)
    assert pool.entries.shape == (4, entry_bytes)
    assert pool.entries.dtype == torch.uint8
    assert pool.entries.device.type == device
    assert not bool(pool.entries.any())
    if index_bytes is None:
        assert pool.index is None
    else:
        assert pool.index is not None
        assert (tuple(pool.index.shape), pool.index.dtype) == ((4, index_bytes), torch.uint8)
    assert pool.memory_bytes() == 4 * (entry_bytes + (index_bytes or 0))
    assert (pool.schema, pool.num_blocks, pool.device.type) == (schema, 3, device)
    pool.check()


def test_the_bytes_of_an_entry_lie_where_the_contract_says(device: str) -> None:
    """P × 576 B of data, then P × 8 B of scales; 448 B of fp8 and 64 of bfloat16 in each."""
    pool = PagedKVPool(schema_of(CSA, FLASH), 2, device)
    block, entry = 2, 5
    begin, scales = entry * 576, 32 * 576 + entry * 8
    pool.entries[block, begin : begin + 448] = 0x38  # 1 in e4m3
    pool.entries[block, begin + 448 : begin + 576 : 2] = 0x80
    pool.entries[block, begin + 449 : begin + 576 : 2] = 0x3F  # 1 in bfloat16, low byte first
    pool.entries[block, scales : scales + 7] = 127 + 3
    flat, rope, scale = (pool.view("compressed", part) for part in ("flat", "rope", "scale"))
    assert (tuple(flat.shape), flat.dtype) == ((3, 32, 448), torch.float8_e4m3fn)
    assert (tuple(rope.shape), rope.dtype) == ((3, 32, 64), torch.bfloat16)
    assert (tuple(scale.shape), scale.dtype) == ((3, 32, 7), torch.float8_e8m0fnu)
    assert flat[block, entry].float().unique().tolist() == [1]
    assert rope[block, entry].float().unique().tolist() == [1]
    assert scale[block, entry].float().unique().tolist() == [8]
    for view in (flat.float(), rope.float()):
        assert float(view.sum()) == view.shape[-1]  # nothing else was touched


def test_the_bytes_of_a_key_lie_where_the_contract_says(device: str) -> None:
    pool = PagedKVPool(schema_of(CSA, FLASH), 2, device)
    keys, scale = pool.view("index", "index"), pool.view("index", "scale")
    assert (tuple(keys.shape), keys.dtype) == ((3, 32, 128), torch.float8_e4m3fn)
    assert (tuple(scale.shape), scale.dtype) == ((3, 32, 1), torch.float32)
    scale[1, 7] = 0.5
    assert pool.index is not None
    kept = pool.index[1, 32 * 128 + 7 * 4 : 32 * 128 + 8 * 4].cpu()
    assert kept.view(torch.float32).tolist() == [0.5]
    assert int(pool.index.count_nonzero()) == 1  # the bytes of 0.5 are 0, 0, 0, 0x3F
    halves = dataclasses.replace(FLASH, index=index_keys(128, "fp4"))
    pool = PagedKVPool(schema_of(CSA, halves), 2, device)
    assert pool.view("index", "scale").shape == (3, 32, 4)
    assert pool.view("index", "index").shape == (3, 32, 64)


def test_views_are_no_copies(device: str) -> None:
    pool = PagedKVPool(schema_of(CSA, FLASH), 2, device)
    for entry, names in (("compressed", ("flat", "rope", "scale", "padding")), ("index", ("index", "scale"))):
        bytes_of = pool.entries if entry == "compressed" else pool.index
        assert bytes_of is not None
        before = bytes_of.data_ptr()
        for name in names:
            view = pool.view(entry, name)
            assert before <= view.data_ptr() < before + bytes_of.numel()
            assert view.untyped_storage().data_ptr() == bytes_of.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("entry", "part"), [("keys", "flat"), ("compressed", "index"), (None, "flat"), ("", "")]
)
def test_a_view_of_what_is_not_there_is_refused(entry: Any, part: Any) -> None:
    with pytest.raises(ArgumentError):
        PagedKVPool(schema_of(CSA), 2, "cpu").view(entry, part)


def test_a_pool_of_no_blocks_has_its_null_block(device: str) -> None:
    pool = PagedKVPool(schema_of(HCA), 0, device)
    assert pool.num_blocks == 0
    assert pool.entries.shape[0] == 1


@pytest.mark.parametrize("num_blocks", [-1, 1.0, "3", None, 2**31, 2**70])
def test_a_paged_pool_that_cannot_be_is_refused(num_blocks: Any) -> None:
    with pytest.raises(ConfigError):
        PagedKVPool(schema_of(CSA), num_blocks, "cpu")


def test_only_a_layer_with_entries_has_a_paged_pool() -> None:
    with pytest.raises(ConfigError, match="layer 3 is SWA: it has no compressed entries"):
        PagedKVPool(schema_of(SWA), 2, "cpu")
    for made in (PagedKVPool, StateCachePool):
        with pytest.raises(ConfigError, match="schema: give a LayerCacheSchema"):
            made(tiny(), 2, "cpu")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="device"):
            made(schema_of(CSA), 2, "nowhere")


def test_check_finds_blocks_that_moved(device: str) -> None:
    pool = PagedKVPool(schema_of(CSA), 2, device)
    pool.check()
    for tensor in (pool.entries, pool.index):
        assert tensor is not None
        home = tensor.data
        tensor.data = tensor.clone()
        with pytest.raises(InvariantError):
            pool.check()
        tensor.data = home
        pool.check()


# --- StateCachePool


@pytest.mark.parametrize("unaccepted", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_shapes_of_the_schema(device: str, kind: AttentionType, unaccepted: int) -> None:
    schema = schema_of(kind, tiny(unaccepted=unaccepted))
    pool = StateCachePool(schema, 5, device)
    extra = unaccepted - 1
    found = {name: (tuple(part.shape), part.dtype) for name, part in parts_of(pool).items()}
    wanted = {
        "window": ((6, 8 + extra, schema.entry.data_bytes), torch.uint8),
        "window_scales": ((6, 8 + extra, schema.entry.scale_bytes), torch.uint8),
        "positions": ((6, 8 + extra), torch.int32),
    }
    compressors = {
        SWA: {},
        CSA: {"main": (8 + extra, 32), "index": (8 + extra, 16)},
        HCA: {"main": (16 + extra, 16)},
    }
    for name, shape in compressors[kind].items():
        wanted[f"{name}_values"] = wanted[f"{name}_scores"] = ((6, *shape), torch.float32)
    assert found == wanted
    assert pool.memory_bytes() == sum(part.nbytes for part in parts_of(pool).values())
    assert (pool.schema, pool.max_concurrent_requests, pool.device.type) == (schema, 5, device)
    assert {part.device.type for part in parts_of(pool).values()} == {device}
    pool.check()


def initial_of(name: str) -> float:
    return -float("inf") if name.endswith("scores") else -1 if name == "positions" else 0


def fill(pool: StateCachePool, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for part in parts_of(pool).values():
        part.copy_(torch.randint(1, 200, part.shape, generator=random))


def bytes_of(pool: StateCachePool) -> dict[str, torch.Tensor]:
    return {name: part.cpu().clone() for name, part in parts_of(pool).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_slot_gives_a_row_what_a_new_request_begins_with(device: str, kind: AttentionType) -> None:
    pool = StateCachePool(schema_of(kind), 3, device)
    for name, part in parts_of(pool).items():
        assert bool((part == initial_of(name)).all()), name
    fill(pool)
    before = bytes_of(pool)
    pool.reset_slot(2)
    for name, part in parts_of(pool).items():
        assert bool((part[2] == initial_of(name)).all()), name
        others = [0, 1, 3]
        assert torch.equal(part[others].cpu(), before[name][others])


@pytest.mark.parametrize("slot", [0, -1, 4, 2**31, 2**70, 1.0, "1", None, [1]])
def test_a_slot_that_is_not_there_is_refused_and_nothing_changes(slot: Any) -> None:
    pool = StateCachePool(schema_of(CSA), 3, "cpu")
    fill(pool)
    kept = pool.snapshot(1)
    before = bytes_of(pool)
    for call in (
        lambda: pool.reset_slot(slot),
        lambda: pool.snapshot(slot),
        lambda: pool.restore(slot, kept),
    ):
        with pytest.raises((OutOfRangeError, ArgumentError)):
            call()
    assert same(bytes_of(pool), before)


@pytest.mark.parametrize("rows", [-1, 1.0, "3", None])
def test_a_state_pool_that_cannot_be_is_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match="max_concurrent_requests"):
        StateCachePool(schema_of(CSA), rows, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_exact_and_restores_any_slot(device: str, kind: AttentionType) -> None:
    pool = StateCachePool(schema_of(kind), 3, device)
    fill(pool)
    before = bytes_of(pool)
    kept = pool.snapshot(2)
    assert kept.length is None
    assert kept.num_bytes * 4 == pool.memory_bytes()
    pool.reset_slot(2)
    fill(pool, seed=1)
    changed = bytes_of(pool)
    pool.restore(3, kept)
    for name, part in parts_of(pool).items():
        assert torch.equal(part[3].cpu(), before[name][2])
        assert torch.equal(part[:3].cpu(), changed[name][:3])
    pool.restore(2, kept)  # a snapshot may be restored as often as one likes
    assert all(torch.equal(part[2].cpu(), before[name][2]) for name, part in parts_of(pool).items())


def live(pool: StateCachePool, slot: int, length: int) -> None:
    """Fill a slot as a request of `length` tokens would: the token at p in row p % rows, told by p + 1."""
    pool.reset_slot(slot)
    for position in range(length):
        for name, part in parts_of(pool).items():
            at = position % part.shape[1]
            part[slot, at] = position if name == "positions" else position % 250 + 1


@pytest.mark.parametrize("unaccepted", [1, 3])
@pytest.mark.parametrize("length", [0, 16, 32, 48, 160])
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_at_a_length_holds_what_a_resume_there_needs(
    device: str, kind: AttentionType, length: int, unaccepted: int
) -> None:
    schema = schema_of(kind, tiny(unaccepted=unaccepted))
    pool = StateCachePool(schema, 3, device)
    live(pool, 1, length + unaccepted - 1)  # tokens that are not accepted yet do no harm
    kept = pool.snapshot(1, length=length)
    assert kept.length == length
    # 7 entries of the window; CSA also 4 rows of both compressors, values and scores, two halves each.
    entry_bytes = schema.entry.num_bytes
    rows = 4 * (2 * 16 + 2 * 8) * 2 * 4 if kind is CSA else 0
    assert kept.num_bytes == (0 if length == 0 else 7 * entry_bytes + rows)
    assert length == 0 or kept.num_bytes == schema.kind.checkpoint_bytes
    fill(pool)
    pool.restore(3, kept)
    wanted = {name: torch.full_like(part[3], initial_of(name)) for name, part in parts_of(pool).items()}
    for position in range(max(0, length - 7), length):
        at = position % schema.ring_size
        wanted["window"][at] = wanted["window_scales"][at] = position % 250 + 1
        wanted["positions"][at] = position
    if kind is CSA:
        for position in range(max(0, length - 4), length):
            for name in ("main_values", "main_scores", "index_values", "index_scores"):
                wanted[name][position % (8 + unaccepted - 1)] = position % 250 + 1
    assert all(torch.equal(part[3], wanted[name]) for name, part in parts_of(pool).items())


@pytest.mark.parametrize("length", [-16, 8, 17, 1.0, "16", 2**31, 2**70])
def test_a_length_at_which_nothing_resumes_is_refused(length: Any) -> None:
    with pytest.raises(ArgumentError, match="length"):
        StateCachePool(schema_of(CSA), 3, "cpu").snapshot(1, length=length)


def broken_snapshots() -> dict[str, Any]:
    csa, hca = (StateCachePool(schema_of(kind), 2, "cpu") for kind in (CSA, HCA))
    whole, short = csa.snapshot(1), csa.snapshot(1, length=16)
    return {
        "another kind of layer": hca.snapshot(1),
        "another kind of layer, at a length": hca.snapshot(1, length=16),
        "nothing": None,
        "a dict": whole.parts,
        "a part less": StateSnapshot(None, {k: v for k, v in whole.parts.items() if k != "window"}),
        "a part more": StateSnapshot(None, {**whole.parts, "more": whole.parts["window"]}),
        "another length": StateSnapshot(32, whole.parts),
        "rows cut": StateSnapshot(16, {k: v[1:] for k, v in short.parts.items()}),
        "no length": StateSnapshot(None, short.parts),
        "a bad length": StateSnapshot(7, short.parts),
        "another dtype": StateSnapshot(None, {k: v.float() for k, v in whole.parts.items()}),
        "no tensors": StateSnapshot(None, dict.fromkeys(whole.parts)),  # type: ignore[arg-type]
        "another device": StateSnapshot(None, {k: v.to("meta") for k, v in whole.parts.items()}),
    }


@pytest.mark.parametrize("name", list(broken_snapshots()))
def test_a_snapshot_that_does_not_fit_is_refused_and_nothing_changes(name: str) -> None:
    pool = StateCachePool(schema_of(CSA), 3, "cpu")
    fill(pool)
    before = bytes_of(pool)
    with pytest.raises(ArgumentError):
        pool.restore(2, broken_snapshots()[name])
    assert same(bytes_of(pool), before)


def test_snapshots_of_one_layer_restore_another_of_its_kind(device: str) -> None:
    first, second = (StateCachePool(build_schema(tiny(), LayerSpec(n, CSA)), 2, device) for n in (3, 8))
    fill(first)
    second.restore(2, first.snapshot(1))
    assert torch.equal(second.main_values[2], first.main_values[1])  # type: ignore[index]


def test_states_made_under_inference_mode_are_written_outside_of_it(device: str) -> None:
    with torch.inference_mode():
        pool = StateCachePool(schema_of(CSA), 2, device)
        kept = pool.snapshot(1)
    pool.restore(2, kept)
    pool.reset_slot(1)
    kept.parts["window"].fill_(3)
    pool.window[1].fill_(4)


def test_check_finds_a_state_that_moved(device: str) -> None:
    pool = StateCachePool(schema_of(SWA), 2, device)
    pool.check()
    pool._pool.tensors["window"] = pool._pool.tensors["window"].clone()
    with pytest.raises(InvariantError):
        pool.check()


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (PagedKVPool, "schema, num_blocks, device='cuda'"),
        (StateCachePool, "schema, max_concurrent_requests, device='cuda'"),
        (StateCachePool.reset_slot, "self, slot"),
        (StateCachePool.snapshot, "self, slot, length=None"),
        (StateCachePool.restore, "self, slot, snapshot"),
    ],
)
def test_argument_names_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)) == wanted
