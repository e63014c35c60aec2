"""PageTable, call by call."""

import numpy as np
import pytest

from pagoda import CapacityError, ConfigError, FreeList
from pagoda.errors import ArgumentError, NotHeldError, OutOfRangeError
from pagoda.tables import PageTable


def test_growth_gives_slots_and_what_to_write():
    pages, table = FreeList(10), PageTable(3, 5, 4)
    slots, writes = table.grow(pages, [1, 3], [6, 2])
    assert slots.tolist() == [4, 5, 6, 7, 8, 9, 12, 13]
    assert writes.entries.tolist() == [1 * 5 + 0, 1 * 5 + 1, 3 * 5 + 0]
    assert writes.page_ids.tolist() == [1, 2, 3]
    assert (writes.entries.dtype, writes.page_ids.dtype, slots.dtype) == (np.int64, np.int32, np.int32)
    slots, writes = table.grow(pages, [3, 1], [3, 9])
    assert slots.tolist() == [14, 10, 11, 16]
    assert writes == ([7], [4])
    assert table.pages(1).tolist() == [1, 2, 4]
    assert (table.num_tokens(1), table.num_pages(1)) == (9, 3)


def test_a_prefix_is_appended_and_grown_from():
    pages, table = FreeList(10), PageTable(2, 5, 4)
    prefix = pages.alloc(2)
    writes = table.append(2, prefix, 8)
    assert writes.entries.tolist() == [10, 11]
    assert writes.page_ids.tolist() == [1, 2]
    assert table.grow(pages, [2], [9]).slots.tolist() == [12]


def test_a_prefix_may_end_inside_a_page():
    pages, table = FreeList(10), PageTable(2, 5, 4)
    table.append(1, pages.alloc(2), 6)
    assert table.grow(pages, [1], [7]).slots.tolist() == [10]
    with pytest.raises(ArgumentError, match="ends inside a page"):
        table.append(1, pages.alloc(1), 1)


def test_release_gives_the_pages_back_to_the_caller_and_empties_the_row():
    pages, table = FreeList(10), PageTable(2, 5, 4)
    table.grow(pages, [1, 2], [9, 1])
    held = table.release(1)
    assert held.tolist() == [1, 2, 3]
    assert (table.num_tokens(1), table.pages(1).tolist()) == (0, [])
    pages.free(held)
    assert table.grow(pages, [2, 1], [5, 1]).writes.page_ids.tolist() == [1, 2]
    assert table.release(1).tolist() == [2]
    table.check()


def snapshot(pages: FreeList, table: PageTable) -> tuple[object, ...]:
    rows = range(1, table.num_rows + 1)
    return pages.num_free, [(table.num_tokens(r), table.pages(r).tolist()) for r in rows]


@pytest.mark.parametrize(
    ("rows", "lens", "error"),
    [
        ([1, 2], [7], ArgumentError),
        ([1, 1], [7, 8], ArgumentError),
        ([1], [5], ArgumentError),  # shrinks
        ([1], [-1], ArgumentError),
        ([2, 0], [7, 7], OutOfRangeError),
        ([2, 3], [7, 7], OutOfRangeError),
        ([2, -1], [7, 7], OutOfRangeError),
        ([2, 1], [1, 21], CapacityError),  # six columns
        ([2, 1], [17, 20], CapacityError),  # eight pages
        ([1.5], [7], ArgumentError),
        ("12", [7, 7], ArgumentError),
    ],
)
def test_bad_growth_changes_neither_table_nor_pages(rows: list[int], lens: list[int], error: type[Exception]):
    pages, table = FreeList(7), PageTable(2, 5, 4)
    table.grow(pages, [1], [6])
    before = snapshot(pages, table)
    with pytest.raises(error):
        table.grow(pages, rows, lens)
    assert snapshot(pages, table) == before
    table.check()
    pages.check()


def test_the_error_of_a_full_row_names_it():
    pages, table = FreeList(9), PageTable(2, 2, 4)
    table.grow(pages, [2], [3])
    with pytest.raises(CapacityError, match="pages of row 2: 3 wanted, 1 free of 2"):
        table.grow(pages, [2], [9])


def test_two_rows_that_share_a_half_used_page_do_not_both_grow_into_it():
    pages, table = FreeList(9), PageTable(2, 4, 4)
    shared = pages.alloc(1)
    table.append(1, shared, 2)
    table.append(2, shared, 2)
    with pytest.raises(ArgumentError, match="another request grows too"):
        table.grow(pages, [1, 2], [3, 3])
    assert table.num_tokens(1) == 2


def test_a_last_page_that_was_freed_is_not_grown_into():
    pages, table = FreeList(9), PageTable(2, 4, 4)
    table.grow(pages, [1], [2])
    pages.free([1])
    with pytest.raises(NotHeldError):
        table.grow(pages, [1], [3])


@pytest.mark.parametrize(
    ("row", "page_ids", "num_tokens", "error"),
    [
        (1, [1, 2], 4, ArgumentError),
        (1, [1], 5, ArgumentError),
        (1, [1], -1, ArgumentError),
        (1, [0], 4, OutOfRangeError),
        (1, [3, -1], 8, OutOfRangeError),
        (1, [2**29], 4, OutOfRangeError),  # its slots pass int32
        (0, [1], 4, OutOfRangeError),
        (3, [1], 4, OutOfRangeError),
        (1, [1, 2, 3, 4, 5, 6], 24, CapacityError),
        ("1", [1], 4, ArgumentError),
    ],
)
def test_bad_prefixes_change_nothing(row: int, page_ids: list[int], num_tokens: int, error: type[Exception]):
    pages, table = FreeList(7), PageTable(2, 5, 4)
    before = snapshot(pages, table)
    with pytest.raises(error):
        table.append(row, page_ids, num_tokens)
    assert snapshot(pages, table) == before
    table.check()


@pytest.mark.parametrize("row", [0, 3, -1, 2**40])
def test_rows_that_are_not_there(row: int):
    table = PageTable(2, 5, 4)
    for call in (table.num_tokens, table.num_pages, table.pages, table.release):
        with pytest.raises(OutOfRangeError, match="rows are 1 to 2"):
            call(row)


@pytest.mark.parametrize("sizes", [(-1, 5, 4), (2, 0, 4), (2, 5, 0), (2.0, 5, 4), (2**31, 5, 4)])
def test_sizes_that_are_none(sizes: tuple[int, int, int]):
    with pytest.raises(ConfigError):
        PageTable(*sizes)


def test_only_a_free_list_of_pages_gives_pages():
    table = PageTable(2, 5, 4)
    with pytest.raises(ArgumentError, match="FreeList"):
        table.grow([1, 2], [1], [1])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="page 0 is padding"):
        table.grow(FreeList(4, first_id=0), [1], [1])


def test_a_large_table_costs_no_memory_until_it_is_written():
    table = PageTable(4096, 65_536, 16)  # 1 GiB of entries
    table.grow(FreeList(10), [4096], [20])
    assert table.pages(4096).tolist() == [1, 2]
