"""Allocating and freeing ids, by size of the list, and against the free-lists of public designs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.measure import microseconds, save, table
from pagoda import FreeList

SIZES = [10**4, 10**6, 10**7]
COUNTS = [1, 16, 128, 4096]


def fragmented(size: int) -> FreeList:
    """Return a list in which a random half of the ids is held."""
    ids = FreeList(size)
    ids.alloc(size)
    ids.free(np.flatnonzero(np.random.default_rng(0).random(size) < 0.5).astype(np.int32) + 1)
    return ids


def cycle(ids: FreeList, n: int) -> Callable[[], object]:
    return lambda: ids.free(ids.alloc(n))


def fenced_cycle(ids: FreeList, n: int) -> Callable[[], object]:
    """Free ids with their own fence, which then passes, as in a step."""
    fences = itertools.count()

    def cycle() -> None:
        fence = next(fences)
        ids.free(ids.alloc(n), fence)
        ids.pass_fence(fence)

    return cycle


class CatFreeList:
    """The free-list of the public designs: a tensor of free slots, cut at the front, appended at the back."""

    def __init__(self, size: int) -> None:
        self.slots = torch.arange(1, size + 1, dtype=torch.int32)

    def alloc(self, n: int) -> torch.Tensor:
        taken, self.slots = self.slots[:n], self.slots[n:]
        return taken

    def free(self, slots: torch.Tensor) -> None:
        self.slots = torch.cat((self.slots, slots))


class SortedFreeList(CatFreeList):
    """The same with lowest slots first: sorted whenever slots are freed."""

    def free(self, slots: torch.Tensor) -> None:
        self.slots = torch.sort(torch.cat((self.slots, slots)))[0]


def run() -> None:
    rows: list[dict[str, Any]] = []
    states = (
        ("all free", FreeList, cycle),
        ("half held, at random", fragmented, cycle),
        ("all free, behind a fence", FreeList, fenced_cycle),
    )
    for state, make, work in states:
        for size in SIZES:
            ids = make(size)
            row: dict[str, Any] = {"list": state, "ids": size}
            for n in COUNTS:
                row[f"{n:,} ids, µs"] = microseconds(work(ids, n), 1000 if n < 1000 else 50)
            rows.append(row)
    table("alloc + free, host", rows)

    size, n = 10**6, 128
    ours = microseconds(cycle(FreeList(size), n), 1000)
    peers: list[dict[str, Any]] = [{"free-list": "pagoda, lowest first", "µs": ours, "times ours": 1.0}]
    for name, peer in (("torch.cat", CatFreeList(size)), ("torch.cat + sort", SortedFreeList(size))):
        slow = microseconds(lambda peer=peer: peer.free(peer.alloc(n)), 5, 20)
        peers.append({"free-list": name, "µs": slow, "times ours": slow / ours})
    table(f"alloc + free of {n} in a list of {size:,}, same run", peers)
    save("ids", rows + peers)
