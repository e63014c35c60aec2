"""Every class that hands out ids, told once as a `Kind`: the same few questions for all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.hybrid_models import tiny
from pagoda import CapacityError
from pagoda.compat import (
    AttentionType,
    BlockAllocator,
    GDNPool,
    KVCacheManager,
    LayerSpec,
    ReqToTokenPool,
    SlotAllocator,
    TokenToKVPoolAllocator,
)

NUM = 32  # ids of every kind; pages, where slots are handed out in pages
FAILS = (AssertionError, pytest.fail.Exception)  # how a check says that an implementation is wrong


def gdn_pool(device: str, max_reqs: int = 3, max_track_slots: int = NUM) -> GDNPool:
    return GDNPool(max_reqs, 2, 2, 3, 5, 7, 4, device=device, max_track_slots=max_track_slots)


def one_by_one(alloc: Callable[[], Any], none: Any, n: int) -> list[int]:
    ids = [alloc() for _ in range(n)]
    assert none not in ids
    return ids


@dataclass(frozen=True)
class Kind:
    """One class that hands out ids, with the same few questions for all."""

    make: Callable[[str], Any]
    take: Callable[[Any, int], list[int]]  # n ids that are there
    give: Callable[[Any, list[int]], None]  # back, in one call where there is one
    num_free: Callable[[Any], int]
    free_ids: Callable[[Any], list[int]]  # all that are free; changes nothing
    ids: range  # all that are handed out
    page_size: int = 1
    gives_several: bool = True


def give_each(free: Callable[[Any], Callable[[int], None]]) -> Callable[[Any, list[int]], None]:
    def give(made: Any, ids: list[int]) -> None:
        for one in ids:
            free(made)(one)

    return give


def token_kind(page_size: int, need_sort: bool = True) -> Kind:
    def make(device: str) -> TokenToKVPoolAllocator:
        return TokenToKVPoolAllocator(NUM * page_size, device, page_size, need_sort)

    def take(made: Any, n: int) -> list[int]:
        slots: list[int] = made.alloc(n * page_size).tolist()
        return slots

    def free_ids(made: Any) -> list[int]:
        slots = made.alloc_host(made.available_size())
        made.free(slots)
        return sorted(slots.tolist())

    return Kind(
        make,
        take,
        lambda made, ids: made.free(ids),
        lambda made: made.available_size() // page_size,
        free_ids,
        range(page_size, (NUM + 1) * page_size),
        page_size,
    )


def free_rows(made: ReqToTokenPool) -> list[int]:
    rows = made.alloc(made.available_size())
    assert rows is not None
    made.free(rows)
    return sorted(rows)


def manager_of_rows(device: str) -> KVCacheManager:
    schedule = [LayerSpec(0, AttentionType.SWA), LayerSpec(1, AttentionType.CSA)]
    return KVCacheManager(tiny(), schedule, NUM, 16, device=device)


def free_requests(made: KVCacheManager) -> list[int]:
    rows = []
    while True:
        try:
            rows.append(made.admit_request())
        except CapacityError:
            break
    for row in rows:
        made.release_request(row)
    return rows


def free_blocks(made: BlockAllocator) -> list[int]:
    blocks = made.acquire_host(made.num_free)
    made.release(blocks)
    return sorted(blocks.tolist())


def free_tracks(made: GDNPool) -> list[int]:
    tracks = []
    while (track := made.alloc_track_slot()) is not None:
        tracks.append(track)
    for track in tracks:
        made.free_track_slot(track)
    return sorted(tracks)


KINDS: dict[str, Kind] = {
    **{f"slots, page_size {page_size}": token_kind(page_size) for page_size in (1, 2, 16, 64)},
    "slots, page_size 16, unsorted": token_kind(16, need_sort=False),
    "rows": Kind(
        lambda device: ReqToTokenPool(NUM, 8, device),
        lambda made, n: made.alloc(n),
        lambda made, ids: made.free(ids),
        lambda made: made.available_size(),
        free_rows,
        range(1, NUM + 1),
    ),
    "rows of a manager": Kind(
        manager_of_rows,
        lambda made, n: one_by_one(made.admit_request, None, n),
        give_each(lambda made: made.release_request),
        lambda made: len(free_requests(made)),
        free_requests,
        range(1, NUM + 1),
        gives_several=False,
    ),
    "blocks": Kind(
        lambda device: BlockAllocator(NUM, device),
        lambda made, n: made.acquire(n).tolist(),
        lambda made, ids: made.release(ids),
        lambda made: made.num_free,
        free_blocks,
        range(1, NUM + 1),
    ),
    "slots of a cache": Kind(
        lambda device: SlotAllocator(NUM),
        lambda made, n: one_by_one(made.alloc, -1, n),
        give_each(lambda made: made.free),
        lambda made: made.free_count,
        lambda made: [slot for slot in range(NUM) if made.is_free(slot)],
        range(NUM),
        gives_several=False,
    ),
    "track slots": Kind(
        gdn_pool,
        lambda made, n: one_by_one(made.alloc_track_slot, None, n),
        give_each(lambda made: made.free_track_slot),
        lambda made: len(free_tracks(made)),
        free_tracks,
        range(4, 4 + NUM),
        gives_several=False,
    ),
}
PADDED = [name for name, kind in KINDS.items() if kind.ids.start > 0]


def pages_of(kind: Kind, ids: list[int]) -> list[int]:
    """One id of each page: the first."""
    return [one for one in ids if one % kind.page_size == 0]
