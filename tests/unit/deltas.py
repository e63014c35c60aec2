"""Deltas put together by hand, after the format that native/core/delta.hpp describes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pagoda.manager import Delta
from pagoda.pools import Pools
from unit.work_model import work_model

FORMAT = 0x50474431
KINDS = [
    "rows", "lengths", "counts", "starts",
    "save_rows", "save_lengths", "save_ids", "restore_rows", "restore_lengths", "restore_ids", "reset_rows",
    "state_sources", "state_targets", "places", "page_ids", "sources", "targets",
    "work",
]  # fmt: skip
Section = tuple[int, int, Sequence[int]]  # kind, group, content


def packed_of(step: int, num_groups: int, sections: Sequence[Section]) -> np.ndarray:
    """[words] int32: the head, the directory, and the sections, each at a multiple of four words."""
    head = [FORMAT, step & (2**31 - 1), step >> 31, num_groups, len(sections)]
    begin = -(-(len(head) + 4 * len(sections)) // 4) * 4
    body: list[int] = []
    for kind, group, content in sections:
        head += [kind, group, begin + len(body), len(content)]
        body += [*content, *[-7] * (-len(content) % 4)]  # what lies between sections is nobody's
    return np.array([*head, *[-7] * (begin - len(head)), *body], dtype=np.int32)


def work_of(
    lengths: Sequence[int], counts: Sequence[int], windows: Sequence[int | None], targets: Sequence[int]
) -> list[int]:
    """The section of work: the list of each group, none where its target is 0."""
    head: list[int] = []
    body: list[int] = []
    for window, target in zip(windows, targets, strict=True):
        entry, words = [0] * 8, list[int]()
        if target:
            entry, words = work_model(lengths, counts, window, target).section(
                8 * len(windows) + len(body), target
            )
        head += entry
        body += words
    return [*head, *body]


def lists_for(pools: Pools) -> dict[str, Any]:
    """Arguments of `delta_of`: the work lists that a manager would make for these pools."""
    geometries = pools._buffers.geometries.values()
    return {
        "windows": [geometry.window or None for geometry in geometries],
        "targets": [geometry.target for geometry in geometries],
    }


def delta_of(
    step: int,
    *,
    rows: Sequence[int] = (),
    lengths: Sequence[int] = (),
    counts: Sequence[int] = (),
    starts: Sequence[int] | None = None,
    places: Sequence[int] = (),
    page_ids: Sequence[int] = (),
    copies: Sequence[tuple[Sequence[int], Sequence[int]]] = ((), ()),
    num_groups: int = 2,
    saves: Sequence[Sequence[int]] = ((), (), ()),
    restores: Sequence[Sequence[int]] = ((), (), ()),
    resets: Sequence[int] = (),
    state_copies: Sequence[Sequence[int]] = ((), ()),
    windows: Sequence[int | None] = (),
    targets: Sequence[int] = (),
    work: Sequence[int] | None = None,
) -> Delta:
    """A delta of these sections; `copies` has sources and targets of each group that has some.

    Its work lists are right for groups of these windows and targets: by default none, and 1, which fits pools
    of any workers. `work` is another section.
    """
    if starts is None:
        starts = [0, *accumulate(counts)] if rows else []
    sections: list[Section] = [
        (KINDS.index(name) + 1, 0, content)
        for name, content in (
            ("rows", rows), ("lengths", lengths), ("counts", counts), ("starts", starts),
            *zip(("save_rows", "save_lengths", "save_ids"), saves, strict=True),
            *zip(("restore_rows", "restore_lengths", "restore_ids"), restores, strict=True),
            ("reset_rows", resets), *zip(("state_sources", "state_targets"), state_copies, strict=True),
            ("places", places), ("page_ids", page_ids),
        )
        if len(content)
    ]  # fmt: skip
    for group, pair in enumerate(copies):
        for name, content in zip(("sources", "targets"), pair, strict=bool(pair)):
            if len(content):
                sections.append((KINDS.index(name) + 1, group, content))
    if work is None and rows and num_groups and min(lengths) >= 0:
        targets = targets or [1] * num_groups
        work = work_of(lengths, counts, windows or [None] * num_groups, targets) if any(targets) else ()
    if work:
        sections.append((KINDS.index("work") + 1, 0, work))
    return Delta(packed_of(step, num_groups, sections))
