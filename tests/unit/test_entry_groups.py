"""Groups of entries in `Pools`: latents with an indexer's keys, followed through deltas and batches."""

from typing import Any

import pytest
import torch

from pagoda import ConfigError
from pagoda.errors import ArgumentError, StaleError
from pagoda.layout import FullAttention, LatentAttention, Layout, index_keys, latent
from pagoda.manager import Manager
from pagoda.pools import EntryPool, LayerStep, Pools, TokenPool

SPARSE = LatentAttention(entry=latent(12, 4, "float32"), index=index_keys(8, "float32"))
FULL = FullAttention(kv_heads=1, k_dim=4, v_dim=4, dtype="float32")
LAYOUT = Layout([SPARSE, FULL, SPARSE], page_tokens=4)
CAPACITY = {"latent": 12, "full": 12}
SIZES: dict[str, Any] = {"num_rows": 4, "max_tokens": 32}


class Engine:
    """Rows of random entries, written through batches; `told` has what each row was given, by layer."""

    def __init__(self, device: str, **more: Any) -> None:
        self.device = device
        self.manager = Manager(LAYOUT, CAPACITY, **SIZES)
        self.pools = Pools(LAYOUT, CAPACITY, **SIZES, device=device, **more)
        self.random = torch.Generator().manual_seed(0)
        self.told: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def admit(self, n: int, first: int) -> int:
        row = self.manager.admit(range(first, first + n)).row
        none = torch.zeros(0, 16, device=self.device), torch.zeros(0, 8, device=self.device)
        self.told[row] = {0: none, 2: none}
        return row

    def step(self, rows: list[int], counts: list[int], pad_to: Any = None) -> dict[int, LayerStep]:
        delta = self.manager.plan(rows, counts)
        self.pools.apply(delta)
        batch = self.pools.batch(delta, pad_to=pad_to)
        steps = {}
        for number in (0, 2):
            step = self.pools.layer(number).at(batch)
            total = batch.positions.shape[0]
            kv, keys = (torch.randn(total, n, generator=self.random).to(self.device) for n in (16, 8))
            step.write_entries(kv)
            step.write_index(keys)
            at = 0
            for row, count in zip(rows, counts, strict=True):
                told = self.told[row][number]
                given = kv[at : at + count], keys[at : at + count]
                self.told[row][number] = tuple(torch.cat(pair) for pair in zip(told, given, strict=True))
                at += count
            steps[number] = step
        return steps

    def judge(self, steps: dict[int, LayerStep], rows: list[int]) -> None:
        """All entries and keys of each row come back as they were written."""
        for number, step in steps.items():
            for which, gather in enumerate((step.gather_all, step.gather_index)):
                out, lens = gather()
                for at, row in enumerate(rows):
                    told = self.told[row][number][which]
                    assert int(lens[at]) == len(told)
                    assert torch.equal(out[at, : len(told)], told)
                    assert not bool(out[at, len(told) :].any())


def test_each_group_has_the_pool_that_holds_it(device: str):
    pools = Pools(LAYOUT, CAPACITY, **SIZES, device=device)
    assert isinstance(pools["latent"], EntryPool)
    assert isinstance(pools["full"], TokenPool)
    assert [pools.layer(n).group.name for n in range(3)] == ["latent", "full", "latent"]
    assert [pools.layer(n).index for n in range(3)] == [0, 0, 1]
    held = {tensor.data_ptr() for tensor in pools.tensors()}
    assert {page.data_ptr() for pages in pools["latent"].pages.values() for page in pages} <= held
    assert pools.memory_bytes() == sum(tensor.nbytes for tensor in pools.tensors())
    pools.check()
    pools["latent"].pages["index"][1] = pools["latent"].pages["index"][1].clone()
    with pytest.raises(Exception, match="moved"):
        pools.check()


@pytest.mark.parametrize("pad_to", [None, (4, 24)])
def test_entries_are_written_and_read_through_batches(device: str, pad_to: Any):
    engine = Engine(device)
    first, second = engine.admit(9, 0), engine.admit(6, 100)
    engine.judge(engine.step([first, second], [7, 2], pad_to), [first, second])
    engine.judge(engine.step([second, first], [4, 1], pad_to), [second, first])
    engine.judge(engine.step([first], [1], pad_to), [first])


def test_an_indexer_s_choice_is_read_from_the_token_s_own_row(device: str):
    engine = Engine(device)
    first, second = engine.admit(5, 0), engine.admit(5, 100)
    step = engine.step([second, first], [5, 3])[0]
    chosen = torch.tensor([[0, 4]] * 5 + [[2, 3]] * 3, device=device, dtype=torch.int32)
    out, mask = step.gather_chosen(chosen)
    # A token sees the entries up to its own.
    assert mask.tolist() == [[True, False]] * 4 + [[True, True]] + [[False, False]] * 2 + [[True, False]]
    assert torch.equal(out[4], engine.told[second][0][0][[0, 4]])
    assert torch.equal(out[7, 0], engine.told[first][0][0][2])


def test_a_fork_copies_pages_of_entries_and_of_keys(device: str):
    engine = Engine(device)
    parent = engine.admit(6, 0)
    engine.step([parent], [6])
    engine.manager.commit(parent, range(6))
    child = engine.manager.fork(parent)
    engine.told[child] = dict(engine.told[parent])
    engine.manager.reserve([parent, child], 3)
    steps = engine.step([child, parent], [3, 3])  # each writes to its own copy of the half-full page
    engine.judge(steps, [child, parent])


def test_pages_are_packed_and_unpacked_with_all_their_entries(device: str):
    engine = Engine(device)
    row = engine.admit(8, 0)
    engine.step([row], [8])
    pool = engine.pools["latent"]
    ids = engine.manager.page_ids(row, "latent")
    packed = pool.pack(ids)
    # Two layers; 4 entries of 16 and of 8 numbers in a page.
    assert packed.shape == (2, pool.page_bytes) == (2, 2 * 4 * (16 + 8) * 4)
    before = [page.clone() for page in pool.tensors()]
    for page in pool.tensors():
        page.zero_()
    pool.unpack(ids, packed)
    rest = [n for n in range(13) if n not in ids]
    for page, kept in zip(pool.tensors(), before, strict=True):
        assert torch.equal(page[ids.tolist()], kept[ids.tolist()])
        assert not bool(page[rest].any())


def test_what_a_layer_does_not_have_is_refused():
    engine = Engine("cpu")
    row = engine.admit(4, 0)
    step = engine.step([row], [4])[0]
    for call, what in (
        (step.gather_window, "window"),
        (lambda: step.write_window(torch.zeros(4, 16)), "window"),
        (lambda: step.gather_chunk(torch.zeros(4, 16)), "window"),
        (lambda: step.compress(torch.zeros(4, 16), torch.zeros(4, 16)), "compressor"),
        (lambda: step.compress_index(torch.zeros(4, 8), torch.zeros(4, 8)), "compressor"),
    ):
        with pytest.raises(ArgumentError, match=f"layer 0: it has no {what}"):
            call()
    entries, plain = engine.pools.layer(2), engine.pools.layer(1)
    for read in (lambda: entries.keys, lambda: entries.values, lambda: entries.k_scale):
        with pytest.raises(ArgumentError, match="layer 2 stores entries"):
            read()
    delta = engine.manager.plan()
    engine.pools.apply(delta)
    stale, batch = engine.pools.batch(delta), engine.pools.batch(delta)
    with pytest.raises(ArgumentError, match="layer 2 stores entries"):
        entries.store(batch, torch.zeros(0, 16))
    with pytest.raises(ArgumentError, match="layer 1 has neither entries nor"):
        plain.at(batch)
    with pytest.raises(StaleError):
        entries.at(stale)
    with pytest.raises(ArgumentError, match="batch: give"):
        entries.at(None)  # type: ignore[arg-type]


def test_scales_of_a_group_of_entries_are_refused():
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ConfigError, match=f"{name}: group latent stores entries"):
            Pools(LAYOUT, CAPACITY, **SIZES, device="cpu", **{name: {"latent": [1.0, 1.0]}})


def test_at_most_two_entries_share_a_page():
    entries = [latent(4, 4, "float32"), index_keys(8, "float32"), index_keys(8, "fp8")]
    with pytest.raises(ConfigError, match="one Entry or two"):
        EntryPool(1, 1, 1, entries, "cpu")
