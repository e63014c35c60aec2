"""The work list of a group, row by row: slow, and written from the documentation alone."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

DECODE_QUERIES, TILE = 8, 32


class Model(NamedTuple):
    segments: list[list[int]]
    members: list[list[int]]
    splits: list[list[int]]
    runs: list[int]
    num_parts: int
    extend_parts: int

    def section(self, begin: int, target: int) -> tuple[list[int], list[int]]:
        """Its words in the directory of a delta's work, and its own words at `begin`."""
        members = begin + 4 * len(self.segments)
        splits = members + 2 * len(self.members)
        entry = [target, begin, len(self.segments), members, len(self.members), splits]
        words = [word for part in self[:3] for row in part for word in row] + self.runs
        return [*entry, self.num_parts, self.extend_parts], [*words, *[0] * (-len(words) % 4)]


def span_of(length: int, count: int, window: int | None) -> range:
    """The keys that a row's queries read."""
    return range(0 if window is None else max(0, length - count - window + 1), length)


def work_model(lengths: Sequence[int], counts: Sequence[int], window: int | None, target: int) -> Model:
    """The list of a step's rows."""
    spans = [span_of(*row, window) for row in zip(lengths, counts, strict=True)]
    decode = [i for i, count in enumerate(counts) if 1 <= count <= DECODE_QUERIES]
    tiles = sum(-(-count // TILE) for count in counts if count > DECODE_QUERIES)
    quota = max(256, math.ceil(sum(len(spans[i]) for i in decode) / target))
    alone = sum(max(1, math.ceil((len(spans[i]) - quota // 16) / quota)) for i in decode)
    programs: list[list[tuple[int, range]]] = [[]]  # the keys of rows that each program reads
    for i in decode:
        keys = spans[i]
        while keys:
            room = quota - sum(len(read) for _, read in programs[-1])
            if len(keys) <= room + quota // 16:
                cut = len(keys)
            else:
                cut = min(len(keys), math.ceil((keys.start + room) / 64) * 64 - keys.start)
            programs[-1].append((i, keys[:cut]))
            keys = keys[cut:]
            if sum(len(read) for _, read in programs[-1]) >= quota or (alone <= target and not keys):
                programs.append([])
    programs += [[]] * (target - len(programs))
    pieces = [piece for program in programs for piece in program]
    splits, num_parts, extend_parts = [], 0, 1
    for i, (count, span) in enumerate(zip(counts, spans, strict=True)):
        parts = sum(row == i for row, _ in pieces)
        if count > DECODE_QUERIES:
            parts = max(1, min(target // 4 // tiles, 16, -(-len(span) // 1024)))
            extend_parts = max(extend_parts, parts)
        splits.append([parts, num_parts if parts > 1 else -1])
        num_parts += parts * count if parts > 1 else 0
    members = []
    for number, (i, _) in enumerate(pieces):
        before = sum(row == i for row, _ in pieces[:number])
        members.append([i, -1 if splits[i][0] == 1 else splits[i][1] + before * counts[i]])
    return Model(
        [[keys.start, keys.stop, number, 1] for number, (_, keys) in enumerate(pieces)],
        members,
        splits,
        [0, *accumulate(len(program) for program in programs[:target])],
        num_parts,
        extend_parts,
    )


def require_even(model: Model, target: int) -> None:
    """No program reads many more keys than the others, and only the last one, or the last of a row that
    shares its programs with no other, may have fewer."""
    assert len(model.runs) == target + 1
    assert (model.runs[0], model.runs[-1]) == (0, len(model.segments))
    keys = [
        sum(end - begin for begin, end, *_ in model.segments[first:last])
        for first, last in pairwise(model.runs)
    ]
    quota = max(256, -(-sum(keys) // target))
    busy = [n for n in keys if n]
    assert keys == busy + [0] * (target - len(busy))
    rows = [{model.members[s][0] for s in range(*run)} for run in pairwise(model.runs)][: len(busy)]
    shares = any(len(of) > 1 for of in rows)
    assert all(n >= quota or not shares for n in busy[:-1])
    assert shares or all(
        n >= quota for n, one, other in zip(busy, rows, rows[1:], strict=False) if one == other
    )
    assert all(n <= quota + max(quota // 16, 63) for n in busy)


def require_cover(model: Model, lengths: Sequence[int], counts: Sequence[int], window: int | None) -> None:
    """Every key of a decode row's span is in exactly one segment, and every result has a part of its own."""
    keys: dict[int, list[int]] = {i: [] for i in range(len(lengths))}
    results: list[int] = []
    for begin, end, first, n in model.segments:
        assert begin < end
        for row, part in model.members[first : first + n]:
            keys[row] += range(begin, end)
            assert (part >= 0) == (model.splits[row][0] > 1)
            results += range(part, part + counts[row]) if part >= 0 else []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        is_decode = 1 <= count <= DECODE_QUERIES
        assert keys[row] == (list(span_of(length, count, window)) if is_decode else [])
        parts, first = model.splits[row]
        if not is_decode and parts > 1:
            results += range(first, first + parts * count)
    assert sorted(results) == list(range(model.num_parts))
