"""The real manager, driven by a workload without a model and without pools.

In: a workload and a number of checkpoints. Out: for each request its hit, its cuts and its saves. There are
pages for everything, so that only checkpoints are short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.checkpoints.model import Outcome, stops
from bench.checkpoints.paths import rounds_of
from bench.checkpoints.workloads import Request, Tokens, Workload
from pagoda.layout import FullAttention, GatedDelta, Layout
from pagoda.manager import Delta, Manager

FULL = FullAttention(kv_heads=1, k_dim=16, v_dim=16)
STATE = GatedDelta(key_heads=1, value_heads=1, key_dim=16, value_dim=16, kernel=4)


@dataclass
class _Row:
    number: int
    tokens: Tokens
    at: int
    lengths: Iterator[int]
    outcome: Outcome


def run(workload: Workload, num_checkpoints: int, num_pages: int, max_tokens: int) -> list[Outcome]:
    layout = Layout([FULL, STATE], workload.page_tokens)
    capacity = {"full": num_pages, "checkpoint": num_checkpoints}
    manager = Manager(layout, capacity, num_rows=workload.running, max_tokens=max_tokens)
    outcomes: list[Outcome] = []
    for together in rounds_of(workload.requests(), workload.running):
        rows = [_admit(manager, request, workload) for request in together]
        outcomes += [row.outcome for row in rows]
        _compute(manager, rows)
    return outcomes


def _admit(manager: Manager, request: Request, workload: Workload) -> _Row:
    tokens = np.concatenate((request.prompt, request.answer))
    row, hit, _ = admitted = manager.admit(request.prompt)
    manager.reserve(row, len(request.answer))
    lengths = stops(
        hit, admitted.cuts, len(request.prompt), len(tokens), workload.chunk, workload.page_tokens
    )
    return _Row(row, tokens, hit, lengths, Outcome(hit, admitted.cuts))


def _compute(manager: Manager, rows: list[_Row]) -> None:
    """Run rows to their ends, a step for all of them at a time, and release them."""
    while rows:
        running, counts, parts = [], [], []
        for row in rows:
            length = next(row.lengths, 0)
            if not length:
                manager.release(row.number)
                continue
            running.append(row)
            counts.append(length - row.at)
            parts.append(row.tokens[row.at : length])
            row.at = length
        numbers = [row.number for row in running]
        delta = manager.plan(numbers, counts)
        _note_saves(delta, rows)
        if running:
            manager.commit(numbers, np.concatenate(parts), counts)
        manager.pass_fence(delta.step)
        rows = running


def _note_saves(delta: Delta, rows: list[_Row]) -> None:
    by_number = {row.number: row.outcome for row in rows}
    for number, length, id in zip(*(section.tolist() for section in delta.saves), strict=True):
        by_number[number].saves.append((length, id))
