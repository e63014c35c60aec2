"""Nothing waits for the device: torch raises at any call that would."""

import numpy as np
import pytest
import torch

from bench.measure import no_waiting
from pagoda import FreeList, StatePool, TokenPool, compat
from pagoda.pools import DeviceTable, StateSpec
from pagoda.tables import PageTable

pytestmark = pytest.mark.gpu


def test_the_mode_finds_a_read_back():
    one = torch.ones(1, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        one.item()


def test_allocation_and_freeing_of_host_ids():
    slots, blocks = (
        compat.TokenToKVPoolAllocator(4096, page_size=16),
        compat.BlockAllocator(100),
    )
    with no_waiting():
        for _ in range(50):
            got = slots.alloc(100)
            assert got is not None
            host = slots.alloc_host(100)
            assert host is not None
            more = slots.alloc_extend([100], [120], [int(host[-1])])
            assert more is not None
            with slots.free_group():
                slots.free(host)
            slots.clear()
            blocks.release(blocks.acquire_host(5))
            blocks.acquire(1)


def test_rows_and_what_is_written_to_them():
    rows, values = compat.ReqToTokenPool(16, 64), torch.tensor([7, 8, 9], device="cuda")
    with no_waiting():
        (row,) = rows.alloc() or []
        rows.write((row, slice(0, 3)), [7, 8, 9])
        rows.write((row, slice(0, 3)), values)
        rows.write(([row], [5]), [3])
        rows.free(row)


def test_table_pushes():
    pages, table, copy = FreeList(1000), PageTable(8, 100, 4), DeviceTable(8, 100)
    with no_waiting():
        for step in range(1, 50):
            copy.write(*table.grow(pages, range(1, 9), [4 * step] * 8).writes)


def test_stores_and_packs():
    pool = TokenPool(64, 16, 2, (4, 32), (4, 32), torch.bfloat16)
    k = torch.randn(50, 4, 32, device="cuda")
    slots = torch.arange(16, 66, device="cuda")
    with no_waiting():
        for where in (slots, slots.int(), np.arange(16, 66), list(range(16, 66))):
            pool.store(0, where, k, k)
        pool.store(1, slots, k.transpose(1, 2).contiguous().transpose(1, 2), k)
        out = pool.pack([1, 2])
        pool.unpack([3, 4], out)
        pool.pack(slots[:2], out)


def test_states():
    states = StatePool(8, 2, {"s": StateSpec((3,), torch.float32)})
    gdn, rows = (
        compat.GDNPool(4, 2, 2, 4, 6, 20, 4, max_track_slots=2),
        torch.tensor([1, 2], device="cuda"),
    )
    with no_waiting():
        states.reset([1, 2])
        states.copy([1], [2])
        track = gdn.alloc_track_slot()
        assert track == 5
        gdn.copy_states(1, track)
        gdn.reset_states(rows)
