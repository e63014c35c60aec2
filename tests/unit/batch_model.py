"""What the buffers of a batch hold, one number at a time: slow, and written from the documentation alone."""

from itertools import accumulate
from typing import Any, NamedTuple

from unit.work_model import DECODE_QUERIES, work_model


class Pages(NamedTuple):
    """A group as kernels see it. `table[row]` has the ids of its pages, 0 for none."""

    name: str
    page_tokens: int
    kernel_page_tokens: int
    window: int | None  # None also where sink tokens are read however far the window is
    table: list[list[int]]
    max_indices: int
    target: int = 0  # programs of its work list; 0: it has none
    list_target: int = 0  # programs that the delta has a list for, if fewer

    @property
    def width(self) -> int:
        return len(self.table[0]) * self.page_tokens // self.kernel_page_tokens


class Row(NamedTuple):
    number: int
    length: int
    count: int


def positions_read(row: Row, window: int | None) -> list[set[int]]:
    """For each query of a row, the positions that it reads."""
    return [
        {at for at in range(query + 1) if window is None or query - at < window}
        for query in range(row.length - row.count, row.length)
    ]


def slot_at(group: Pages, row: Row, position: int) -> int:
    page = group.table[row.number][position // group.page_tokens]
    return page * group.page_tokens + position % group.page_tokens if page else -1


def kernel_page_at(group: Pages, row: Row, column: int) -> int:
    """The page of the kernel that column `column` of the row's tokens lies in: that of its first token."""
    slot = slot_at(group, row, column * group.kernel_page_tokens)
    return max(slot, 0) // group.kernel_page_tokens


def model(groups: list[Pages], rows: list[Row], num_rows: int, num_tokens: int) -> dict[str, Any]:
    """Every buffer by name, as lists, padded; `indices` as far as they are listed."""
    padding = [Row(0, 0, 0)] * (num_rows - len(rows))
    starts, positions = [0], []
    for row in rows:
        starts.append(starts[-1] + row.count)
        positions += range(row.length - row.count, row.length)
    spare = num_tokens - len(positions)
    found: dict[str, Any] = {
        "rows": [row.number for row in [*rows, *padding]],
        "lengths": [row.length for row in [*rows, *padding]],
        "query_start_loc": starts + [starts[-1]] * len(padding),
        "positions": positions + [0] * spare,
        "batch_indices": [i for i, row in enumerate(rows) for _ in range(row.count)] + [-1] * spare,
        "extends": _extends(rows, num_rows),
    }
    for group in groups:
        for name, numbers in _of_group(group, [*rows, *padding]).items():
            found[f"{group.name}.{name}"] = numbers
        found[f"{group.name}.slot_mapping"] += [-1] * spare
        for name, numbers in _work_of_group(group, rows, num_rows).items():
            found[f"{group.name}.{name}"] = numbers
    return found


def _extends(rows: list[Row], num_rows: int) -> list[list[int]]:
    listed, tokens = [], 0
    for i, row in enumerate(rows):
        if row.count > DECODE_QUERIES:
            listed.append([i, tokens])
            tokens += row.count
    return [[len(listed), tokens], *listed, *[[0, 0]] * (num_rows - len(listed))]


def _work_of_group(group: Pages, rows: list[Row], num_rows: int) -> dict[str, Any]:
    if not group.target:
        return {"runs": [], "tasks": [], "splits": []}
    lengths, counts = [row.length for row in rows], [row.count for row in rows]
    starts = [0, *accumulate(counts)]
    planned = group.list_target or group.target
    work = work_model(lengths, counts, group.window, planned)
    tasks = [
        [
            begin,
            end,
            i,
            part,
            starts[i],
            counts[i],
            lengths[i],
            work.splits[i][0] if part == work.splits[i][1] >= 0 else 0,
        ]
        for (begin, end, _, _), (i, part) in zip(work.segments, work.members, strict=True)
    ]
    return {
        "runs": work.runs + [len(tasks)] * (group.target - planned),
        "tasks": tasks + [[0] * 8] * (num_rows + group.target - len(tasks)),
        "splits": work.splits + [[0, -1]] * (num_rows - len(rows)),
    }


def _of_group(group: Pages, rows: list[Row]) -> dict[str, Any]:
    slots, table, indptr, indices, last, begins = [], [], [0], [], [], []
    wanted, size = 0, group.kernel_page_tokens
    for row in rows:
        slots += [slot_at(group, row, at) for at in range(row.length - row.count, row.length)]
        oldest = 0 if group.window is None else max(0, row.length - row.count - group.window + 1)
        columns = range(oldest // size, -(-row.length // size))
        read = set().union(*positions_read(row, group.window))
        if row.count:  # the list is what queries read, and nothing else
            assert sorted({at // size for at in read}) == list(columns)
        pages = [kernel_page_at(group, row, column) for column in columns]
        table.append([0] * group.width)
        table[-1][columns.start : columns.stop] = pages
        wanted += len(pages)
        is_listed = wanted <= group.max_indices
        indices += pages if is_listed else []
        indptr.append(len(indices))
        begins.append(columns.start * size)
        last.append(row.length - columns[-1] * size if pages and is_listed else 0)
    return {
        "slot_mapping": slots,
        "page_table": table,
        "indptr": indptr,
        "indices": indices,
        "last_page_len": last,
        "begins": begins,
    }
