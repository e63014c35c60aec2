"""`KVCacheManager` against plain lists, over random sequences of calls.

The model knows which row has which blocks, and how many each layer asked for. After every step `check()`
passes, ids are conserved, and the tables on the device are what the model says; a call that fails leaves all
that can be observed as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance.hybrid_models import LAYERS, SCHEDULE, exact, free_lists, observe, parts_of
from pagoda import CapacityError, UsageError, kernels
from pagoda.compat import DSV4Config, KVCacheManager
from pagoda.errors import ArgumentError, NotHeldError, OutOfRangeError
from profiles import examples
from property.test_reentrancy import sweep

SETTINGS = settings(
    max_examples=examples(80),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)

GROUPS = {"csa": (2, 5), "hca": (3, 8)}
GROUP_OF = {layer: name for name, layers in GROUPS.items() for layer in layers}
NUM_ROWS, MAX_BLOCKS = 3, 3
NUM_BLOCKS = {"csa": 5, "hca": 4}  # fewer than the rows could fill
COMPRESSED = sorted(GROUP_OF)
RATIOS = {"csa": 4, "hca": 16}


class Hybrid(RuleBasedStateMachine):
    """Rows that come and go, and take blocks layer by layer."""

    def __init__(self, device: str, kind: type[KVCacheManager] = KVCacheManager) -> None:
        super().__init__()
        self.device, self.kind = device, kind
        self.blocks: dict[int, dict[str, list[int]]] = {}  # of running rows
        self.taken: dict[int, dict[int, int]] = {}
        self.lengths: dict[int, int] = {}

    @initialize()
    def make(self) -> None:
        self.manager = self.kind(
            exact(),
            SCHEDULE,
            NUM_ROWS,
            MAX_BLOCKS * 16,
            NUM_BLOCKS["csa"],
            NUM_BLOCKS["hca"],
            self.device,
        )
        self.begins = [
            {name: part[1].clone() for name, part in parts_of(pool).items()}
            for pool in self.manager.state_pools.values()
        ]
        self.addresses = self.where()

    def where(self) -> list[int]:
        tables = [*self.manager.block_tables.values(), *self.manager.block_lens.values()]
        return [table.data_ptr() for table in tables if table is not None]

    def free_blocks(self, name: str) -> list[int]:
        held = {block for blocks in self.blocks.values() for block in blocks[name]}
        return [block for block in range(1, NUM_BLOCKS[name] + 1) if block not in held]

    def fails(self, error: type[BaseException], call: Callable[[], Any]) -> None:
        before = observe(self.manager)
        with pytest.raises(error):
            call()
        assert observe(self.manager) == before

    def row(self, data: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(self.blocks))))

    # --- rows

    @rule()
    def admit(self) -> None:
        free = [row for row in range(1, NUM_ROWS + 1) if row not in self.blocks]
        if not free:
            self.fails(CapacityError, self.manager.admit_request)
            return
        row = self.manager.admit_request()
        assert row == free[0]
        self.blocks[row] = {name: [] for name in GROUPS}
        self.taken[row] = dict.fromkeys(COMPRESSED, 0)
        self.lengths[row] = 0
        for pool, begin in zip(self.manager.state_pools.values(), self.begins, strict=True):
            for name, part in parts_of(pool).items():
                assert torch.equal(part[row], begin[name]), name

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        row = self.row(data)
        self.manager.release_request(row)
        del self.blocks[row], self.taken[row], self.lengths[row]
        self.fails(NotHeldError, lambda: self.manager.release_request(row))

    @rule(
        row=st.sampled_from([0, -1, NUM_ROWS + 1, 1, 2, 3, 2**40, "1", None, 1.5]), is_release=st.booleans()
    )
    def name_a_row_that_does_not_run(self, row: Any, is_release: bool) -> None:
        if row in self.blocks:
            return
        call = self.manager.release_request if is_release else lambda row: self.manager.allocate_block(2, row)
        self.fails(UsageError, lambda: call(row))

    # --- blocks

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), layer=st.sampled_from(COMPRESSED), times=st.integers(1, 3))
    def allocate(self, data: Any, layer: int, times: int) -> None:
        row, name = self.row(data), GROUP_OF[layer]
        for _ in range(times):
            held, n, free = self.blocks[row][name], self.taken[row][layer], self.free_blocks(name)
            if n == len(held) and (n == MAX_BLOCKS or not free):
                self.fails(CapacityError, lambda: self.manager.allocate_block(layer, row))
                return
            block = self.manager.allocate_block(layer, row)
            if n == len(held):
                assert block == free[0]
                held.append(block)
            assert block == held[n]
            self.taken[row][layer] = n + 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), layer=st.sampled_from([0, 1, 4, 9, -1, "2", None, 2.0]))
    def name_a_layer_without_blocks(self, data: Any, layer: Any) -> None:
        row = self.row(data)
        self.fails(ArgumentError, lambda: self.manager.allocate_block(layer, row))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), layer=st.sampled_from(COMPRESSED), is_written=st.booleans())
    def allocate_while_the_device_fails(self, data: Any, layer: int, is_written: bool) -> None:
        """Ctrl-C before the launch, or behind it."""
        row, name = self.row(data), GROUP_OF[layer]
        held = self.blocks[row][name]
        is_new = self.taken[row][layer] == len(held)
        if not is_new or len(held) == MAX_BLOCKS or not self.free_blocks(name):
            return
        write, failed = kernels.set_table, []

        def fail(*args: Any) -> None:
            if failed:
                return write(*args)
            failed.append(1)
            if is_written:
                write(*args)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "set_table", fail)
            self.fails(KeyboardInterrupt, lambda: self.manager.allocate_block(layer, row))
        assert failed

    # --- steps

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), size=st.integers(1, 9))
    def write_tokens(self, data: Any, size: int) -> None:
        """Every layer writes; lengths go on whether or not there are blocks for them."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.blocks)), min_size=1, unique=True))
        ids = [number for number in range(len(rows)) for _ in range(size)]
        positions = [self.lengths[row] + at for row in rows for at in range(size)]
        if max(positions) >= self.manager.max_context_tokens:
            before = observe(self.manager)
            with pytest.raises(OutOfRangeError, match="positions"):
                self.manager.acquire(LAYERS[0], rows, positions, ids)
            assert observe(self.manager) == before
            return
        values = torch.ones(len(ids), 16, device=self.device)
        for layer in LAYERS:
            handle = self.manager.acquire(layer, rows, positions, ids)
            handle.write_swa(values)
            if layer in GROUP_OF:
                handle.write_compressed(values)
                _, lens = handle.gather_all_compressed_kv()
                per = RATIOS[GROUP_OF[layer]]
                assert lens.tolist() == [(self.lengths[row] + size) // per for row in rows]
        for row in rows:
            self.lengths[row] += size

    # --- what always holds

    @invariant()
    def passes_its_own_check(self) -> None:
        self.manager.check()

    @invariant()
    def ids_are_conserved(self) -> None:
        for name, layers in GROUPS.items():
            for layer in layers:
                ids = free_lists(self.manager)[layer]
                free = [block for block in range(1, ids.num_ids + 1) if ids.is_free(block)]
                assert free == self.free_blocks(name)
                assert ids.num_held == sum(len(blocks[name]) for blocks in self.blocks.values())
        assert self.manager._manager.stats().rows == len(self.blocks)

    @invariant()
    def tables_on_the_device_are_those_of_the_model(self) -> None:
        for name, layers in GROUPS.items():
            wanted = [self.blocks.get(row, {}).get(name, []) for row in range(NUM_ROWS + 1)]
            padded = [[*blocks, *[-1] * (MAX_BLOCKS - len(blocks))] for blocks in wanted]
            for layer in layers:
                assert self.manager.block_tables[layer].tolist() == padded
                assert self.manager.block_lens[layer].tolist() == list(map(len, wanted))
        assert self.where() == self.addresses

    @invariant()
    def the_null_block_and_row_0_are_nobody_s(self) -> None:
        for pool in self.manager.paged_pools.values():
            assert pool is None or not bool(pool.entries[0].any())
        for pool in self.manager.state_pools.values():
            assert pool.positions[0].unique().tolist() == [-1]


@pytest.mark.hypothesis
def test_rows_and_blocks(device: str) -> None:
    run_state_machine_as_test(lambda: Hybrid(device), settings=SETTINGS)


# --- the machine finds out who is wrong


class LeavesStates(KVCacheManager):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        rows = [(table, -1) for table in self._pools.tables.values()]
        rows += [(lens[:, None], 0) for lens in self._lens.values()]
        self._release = self._admission = kernels.Regions.of(rows, self.device)


class LeavesTables(KVCacheManager):
    def release_request(self, slot: int) -> None:
        tables = self._pools.tables.values()
        before = [table.clone() for table in tables]
        super().release_request(slot)
        for table, kept in zip(tables, before, strict=True):
            table.copy_(kept)


class LeaksWhenFull(KVCacheManager):
    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        try:
            return super().allocate_block(layer_idx, request_slot)
        except CapacityError:
            for ids in free_lists(self).values():
                if ids is not None and ids.num_free:
                    ids.alloc(1)
            raise


class HasATableALayer(KVCacheManager):
    """Every call allocates, whoever asks."""

    def allocate_block(self, layer_idx: int, request_slot: int) -> int:
        block = super().allocate_block(layer_idx, request_slot)
        for layer in GROUPS[GROUP_OF[layer_idx]]:
            self._taken[layer][request_slot] = self._taken[layer_idx][request_slot]
        return block


class KeepsCounts(KVCacheManager):
    def release_request(self, slot: int) -> None:
        before = [taken.copy() for taken in self._taken.values()]
        super().release_request(slot)
        for taken, kept in zip(self._taken.values(), before, strict=True):
            taken[:] = kept


class ForgetsToUndo(KVCacheManager):
    def _take_back(self, group: str, row: int, n: int) -> None:
        pass


class ReleasesAnything(KVCacheManager):
    def release_request(self, slot: int) -> None:
        try:
            super().release_request(slot)
        except NotHeldError:
            return


@pytest.mark.parametrize(
    "wrong",
    [
        LeavesStates,
        LeavesTables,
        LeaksWhenFull,
        HasATableALayer,
        KeepsCounts,
        ForgetsToUndo,
        ReleasesAnything,
    ],
    ids=lambda it: it.__name__,
)
def test_a_defect_is_found(wrong: type[KVCacheManager]) -> None:
    once = settings(SETTINGS, phases=[Phase.generate], database=None, derandomize=True, print_blob=False)
    with pytest.raises((AssertionError, UsageError, CapacityError, pytest.fail.Exception)):
        run_state_machine_as_test(lambda: Hybrid("cpu", wrong), settings=once)


# --- finalizers that call the same manager in the middle of its calls


def test_a_finalizer_may_call_what_is_being_called(device: str) -> None:
    config: DSV4Config = exact()
    manager = KVCacheManager(config, SCHEDULE, 64, MAX_BLOCKS * 16, 400, 400, device)

    def live() -> None:
        row = manager.admit_request()
        blocks = [manager.allocate_block(2, row) for _ in range(2)]
        assert [manager.allocate_block(5, row) for _ in range(2)] == blocks
        manager.allocate_block(3, row)
        manager.release_request(row)

    assert sweep(live) > 20
    manager.check()
    assert all(ids is None or ids.num_held == 0 for ids in free_lists(manager).values())
    assert all(table is None or table.unique().tolist() == [-1] for table in manager.block_tables.values())
    assert all(lens is None or lens.unique().tolist() == [0] for lens in manager.block_lens.values())
