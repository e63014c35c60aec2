"""Layers of compressed attention through `Manager` and `Pools`: the same bytes and the same answers as a
handle of the public design that is told rows, positions and blocks one by one."""

from typing import Any

import numpy as np
import pytest
import torch

from conformance.hybrid_models import CSA, LAYERS, SCHEDULE, exact, manager_of, parts_of, tiny
from pagoda import Manager
from pagoda.compat import DSV4Config
from pagoda.errors import ArgumentError, StaleError
from pagoda.pools import EntryPool, LayerStep, Pools

SIZES: dict[str, Any] = {"num_rows": 4, "max_tokens": 80}
CAPACITY = {"csa": 12, "hca": 9, "checkpoint": 3}


class Both:
    """An engine over manager and pools, and a face that is given the same tokens."""

    def __init__(self, device: str, config: DSV4Config) -> None:
        self.device, layout = device, config.layout(SCHEDULE)
        self.manager = Manager(layout, CAPACITY, **SIZES)
        self.pools = Pools(layout, CAPACITY, **SIZES, device=device)
        self.face = manager_of(device, config)
        self.random = torch.Generator().manual_seed(0)
        self.lengths: dict[int, int] = {}

    def admit(self, n: int) -> int:
        row = self.manager.admit(np.arange(n) + 1000 * len(self.lengths), reserve=n).row
        assert self.face.admit_request() == row
        for _ in range(-(-n // 16)):
            for layer in (2, 3):
                self.face.allocate_block(layer, row)
        self.lengths[row] = 0
        return row

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def step(self, rows: list[int], counts: list[int], pad_to: Any = None) -> None:
        """Write and read a step in all layers, in both, and compare."""
        delta = self.manager.plan(rows, counts)
        self.pools.apply(delta)
        batch = self.pools.batch(delta, pad_to=pad_to)
        total = sum(counts)
        ids = [at for at, n in enumerate(counts) for _ in range(n)]
        starts = [self.lengths[row] for row in rows]
        positions = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
        for number, idx in enumerate(LAYERS):
            ours, theirs = self.pools.layer(number).at(batch), self.face.acquire(idx, rows, positions, ids)
            schema = self.face.schemas[idx]
            kv, padding = self.numbers(total, 16), batch.positions.shape[0] - total
            self.same(ours.gather_chunk(padded(kv, padding)), theirs.gather_swa_chunk(kv), len(rows))
            ours.write_window(padded(kv, padding))
            theirs.write_swa(kv)
            self.same(ours.gather_window(), theirs.gather_swa_kv(), total)
            if not schema.ratio:
                continue
            values, scores = (self.numbers(total, 32 if schema.overlap else 16) for _ in range(2))
            made = ours.compress(padded(values, padding), padded(scores, padding))
            assert torch.equal(made[:total], theirs.compress(values, scores))
            ours.write_entries(made)
            theirs.write_compressed(made[:total])
            self.same(ours.gather_all(), theirs.gather_all_compressed_kv(), len(rows))
            if schema.attn_type is CSA:
                values, scores = self.numbers(total, 16), self.numbers(total, 16)
                keys = ours.compress_index(padded(values, padding), padded(scores, padding))
                ours.write_index(keys)
                theirs.write_index(theirs.compress_index(values, scores))
                self.same(ours.gather_index(), theirs.gather_index(), len(rows))
                chosen = torch.randint(-1, 12, (total, 3), generator=self.random).to(self.device)
                self.same(
                    ours.gather_chosen(padded(chosen, padding)), theirs.gather_compressed_kv(chosen), total
                )
        for row, n in zip(rows, counts, strict=True):
            self.lengths[row] += n

    def same(self, ours: Any, theirs: Any, n: int) -> None:
        """Equal up to padding, which is zeros."""
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine[:n], other)
            assert not bool(mine[n:].any())

    def judge(self) -> None:
        """States and entries have the same bytes."""
        for number, idx in enumerate(LAYERS):
            layer = self.pools.layer(number)
            for name, part in parts_of(self.face.state_pools[idx]).items():
                assert torch.equal(layer.state[name][1:], part[1:]), name
            if layer.place is None:
                continue
            table = self.face.block_tables[idx]
            for row, length in self.lengths.items():
                n = length // 16
                ids = self.pools.tables[layer.group.name][row, :n].long()
                theirs = table[row, :n].long()
                for name, pages in layer.pool.layer(layer.index).items():
                    paged = self.face.paged_pools[idx]
                    other = paged.index if name == "index" else paged.entries
                    assert torch.equal(pages[ids], other[theirs]), (idx, name)


def padded(values: torch.Tensor, n: int) -> torch.Tensor:
    fill = float("nan") if values.is_floating_point() else 0
    return torch.cat([values, torch.full((n, *values.shape[1:]), fill, device=values.device).to(values)])


@pytest.mark.parametrize("config", [exact(), tiny(), tiny(unaccepted=3)], ids=["exact", "fp8", "unaccepted"])
@pytest.mark.parametrize("pad_to", [None, (4, 48)], ids=["", "padded"])
def test_a_batch_says_what_tokens_given_one_by_one_say(device: str, config: DSV4Config, pad_to: Any) -> None:
    both = Both(device, config)
    first, second, third = both.admit(40), both.admit(37), both.admit(5)
    both.step([second, first], [17, 3], pad_to)
    both.step([first, third, second], [21, 5, 1], pad_to)
    both.step([first, second], [1, 1], pad_to)
    both.step([second, first], [13, 15], pad_to)
    both.judge()


def test_layers_of_a_model_are_told_apart(device: str) -> None:
    both = Both(device, exact())
    layers = [both.pools.layer(number) for number in range(5)]
    assert [None if layer.place is None else layer.group.name for layer in layers] == [
        None,
        "csa",
        "hca",
        "csa",
        "hca",
    ]
    assert all(isinstance(layer.pool, EntryPool) for layer in layers[1:])
    assert [layer.entries.ratio for layer in layers[1:]] == [4, 16, 4, 16]
    assert [layer.entries.window for layer in layers] == [8] * 5


def test_a_batch_of_another_step_is_refused_by_a_window_alone() -> None:
    both = Both("cpu", exact())
    row = both.admit(8)
    delta = both.manager.plan(row, 4)
    both.pools.apply(delta)
    stale, batch = both.pools.batch(delta), both.pools.batch(delta)
    window = both.pools.layer(0)
    assert isinstance(window.at(batch), LayerStep)
    assert "layer 0: 4 tokens of 1 requests" in repr(window.at(batch))
    with pytest.raises(StaleError):
        window.at(stale)
    with pytest.raises(ArgumentError, match="batch: give"):
        window.at(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="layer 0: it has no compressed entries"):
        window.at(batch).gather_all()
    with pytest.raises(ArgumentError, match="layer 0 stores no pages"):
        window.keys  # noqa: B018


def test_a_row_resumes_from_a_checkpoint_over_shared_blocks(device: str) -> None:
    """What the next request reads after a hit is what the first one would have read."""
    both = Both(device, exact())
    tokens = np.arange(40)
    manager, pools = both.manager, both.pools

    def run(row: int, counts: list[int], start: int, random: torch.Generator) -> list[torch.Tensor]:
        read = []
        for n in counts:
            delta = manager.plan(row, n)
            pools.apply(delta)
            batch = pools.batch(delta)
            for number in range(1, 5):
                step = pools.layer(number).at(batch)
                channels = 32 if number % 2 else 16
                kv, values, scores = (
                    torch.randn(48, width, generator=random)[start : start + n].to(device)
                    for width in (16, channels, channels)
                )
                read += [step.gather_chunk(kv)[0]]
                step.write_window(kv)
                step.write_entries(step.compress(values, scores))
                read += [step.gather_all()[0]]
            manager.commit(row, tokens[start : start + n])
            manager.pass_fence(delta.step)
            start += n
        return read

    admitted = manager.admit(tokens)
    assert admitted.cuts[-1] == 32  # requests resume at multiples of 16
    run(admitted.row, [32], 0, torch.Generator().manual_seed(1))
    wanted = run(admitted.row, [8], 32, torch.Generator().manual_seed(2))
    manager.release(admitted.row)
    noise = manager.admit(np.arange(500, 530), read=False, store=False)  # takes the row meanwhile
    run_noise = manager.plan(noise.row, 30)
    pools.apply(run_noise)
    pools.layer(1).at(pools.batch(run_noise)).write_window(both.numbers(30, 16))
    manager.pass_fence(run_noise.step)
    again = manager.admit(tokens)
    assert again.hit == 32
    found = run(again.row, [8], 32, torch.Generator().manual_seed(2))
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    manager.check()


def test_a_layer_without_pages_refuses_a_batch_of_another_layout():
    """There is no group to compare, but the rows of other pools are other requests."""
    layout = tiny().layout(SCHEDULE)
    other = tiny().layout(SCHEDULE[:-1])
    ours = Pools(layout, CAPACITY, **SIZES, device="cpu")
    theirs = Pools(other, CAPACITY, **SIZES, device="cpu")
    manager = Manager(other, CAPACITY, **SIZES)
    delta = manager.plan(manager.admit(range(3)).row, 3)
    theirs.apply(delta)
    batch = theirs.batch(delta)
    ring = next(layer for layer in map(ours.layer, range(len(SCHEDULE))) if layer.place is None)
    with pytest.raises(ArgumentError, match=f"pools with another layout than layer {ring.number}"):
        ring.at(batch)
