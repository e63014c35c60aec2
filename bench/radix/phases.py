"""The measurements of one implementation at one page size, in one process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import zlib
from typing import Any

import numpy as np

from bench.radix import workload
from bench.radix.adapters import ADAPTERS, Adapter
from bench.samples import BATCH, CLOCK_NS, each_of_batch, now, resident_bytes, stats


def load_adapter(spec: str) -> type[Adapter]:
    if spec in ADAPTERS:
        return ADAPTERS[spec]
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


def run_one(
    spec: str, page: int, scale: float, seed: int, leaves: int, use_gc: bool, evict_only: bool
) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    work = workload.make(seed=seed, scale=scale, leaves=leaves)
    make = load_adapter(spec)
    result: dict[str, Any] = {"impl": make.name, "page": page}
    gc.collect()
    if not use_gc:
        gc.disable()
    if not evict_only:
        run_main(make, work, page, result)
        gc.collect()
    run_evict(make, work, page, result)
    return result


def timed_inserts(adapter: Adapter, ops: list[workload.Op], digest: int) -> tuple[list[int], int]:
    samples = []
    for op in ops:
        tokens, slots = adapter.prep_tokens(op.tokens), adapter.prep_slots(op.base, len(op.tokens))
        begin = now()
        present = adapter.insert(tokens, slots)
        samples.append(now() - begin)
        digest = zlib.crc32(int(present).to_bytes(4, "little"), digest)
    return samples, digest


def timed_matches(
    adapter: Adapter, ops: list[workload.Op], digest: int, page: int, keep: list[Any] | None = None
) -> tuple[list[int], int, float, int]:
    samples, hits, wrong = [], 0, 0
    for op in ops:
        tokens = adapter.prep_tokens(op.tokens)
        begin = now()
        n, slots, handle = adapter.match(tokens)
        samples.append(now() - begin)
        hits += n
        if op.expect_hit >= 0 and n != op.expect_hit // page * page:
            wrong += 1
        found = np.ascontiguousarray(adapter.slots_to_numpy(slots), dtype=np.int64)
        assert len(found) == n, (len(found), n)
        digest = zlib.crc32(found.tobytes(), digest)
        if keep is not None and len(keep) < 2000:
            keep.append(handle)
    return samples, digest, hits / max(1, len(ops)), wrong


def timed_locks(adapter: Adapter, handles: list[Any], result: dict[str, Any]) -> None:
    lock, unlock, both = [], [], []
    for i in range(0, len(handles), BATCH):
        part = handles[i : i + BATCH]
        begin = now()
        held = [adapter.lock(handle) for handle in part]
        middle = now()
        for each in held:
            adapter.unlock(each)
        end = now()
        lock.append(each_of_batch(middle - begin, len(part)))
        unlock.append(each_of_batch(end - middle, len(part)))
        both.append(lock[-1] + unlock[-1] - CLOCK_NS)
    result["lock"], result["unlock"], result["lock_unlock"] = stats(lock), stats(unlock), stats(both)


def run_main(make: type[Adapter], work: workload.Workload, page: int, result: dict[str, Any]) -> None:
    # (a) Build, with resident memory per distinct cached token. Inputs are made per insert and dropped, so
    # memory that an implementation pins is counted.
    adapter = make(page)
    warm = work.build[0]
    adapter.prep_tokens(warm.tokens)
    adapter.prep_slots(warm.base, len(warm.tokens))
    gc.collect()
    before = resident_bytes()
    samples, digest = timed_inserts(adapter, work.build, 0)
    gc.collect()
    after = resident_bytes()
    cached = sum(len(op.tokens) // page * page - op.expect_hit // page * page for op in work.build)
    result["insert"] = stats(samples)
    result["insert_tokens_mean"] = round(float(np.mean([len(op.tokens) for op in work.build])), 1)
    result["cached_tokens"] = cached
    result["bytes_per_cached_token"] = round((after - before) / cached, 2)
    with contextlib.suppress(NotImplementedError):
        result["evictable_off_by"] = int(adapter.evictable()) - cached

    # (b) Matches, and (d) locks on what they found; nothing is evicted in between.
    handles: list[Any] = []
    samples, digest, hit, wrong = timed_matches(adapter, work.match_hit, digest, page, handles)
    result["match_hit"], result["match_hit_tokens"] = stats(samples), round(hit, 1)
    timed_locks(adapter, handles, result)
    result["clock_us"] = CLOCK_NS / 1e3
    handles.clear()
    # (b') The same hits, the length alone.
    samples = []
    for op in work.match_hit:
        tokens = adapter.prep_tokens(op.tokens)
        begin = now()
        adapter.match_len(tokens)
        samples.append(now() - begin)
    result["match_len"] = stats(samples)
    for name, ops in (("match_split", work.match_split), ("match_miss", work.match_miss)):
        samples, digest, _, more_wrong = timed_matches(adapter, ops, digest, page)
        result[name], wrong = stats(samples), wrong + more_wrong
    result["wrong_hits"] = wrong

    # (e) Request cycle.
    samples = []
    for prompt, full in work.cycle:
        arguments = (
            adapter.prep_tokens(prompt.tokens),
            adapter.prep_slots(prompt.base, len(prompt.tokens)),
            adapter.prep_tokens(full.tokens),
            adapter.prep_slots(full.base, len(full.tokens)),
        )
        begin = now()
        n = adapter.cycle(*arguments)
        samples.append(now() - begin)
        digest = zlib.crc32(int(n).to_bytes(4, "little"), digest)
    result["cycle"] = stats(samples)

    # (f) A long prompt in chunks.
    total, last, held = 0, 0, None
    for op in work.chunked:
        tokens, slots = adapter.prep_tokens(op.tokens), adapter.prep_slots(op.base, len(op.tokens))
        begin = now()
        held = adapter.chunk_step(tokens, slots, held)
        last = now() - begin - CLOCK_NS
        total += last
    adapter.unlock(held)
    result["chunked_total_us"] = round(total / 1e3, 1)
    result["chunked_last_us"] = round(last / 1e3, 1)
    result["chunked_len"] = len(work.chunked[-1].tokens)
    result["digest"] = f"{digest:08x}"


def run_evict(make: type[Adapter], work: workload.Workload, page: int, result: dict[str, Any]) -> None:
    # (c) Eviction in small steps from a fresh tree with `leaves` leaves.
    adapter = make(page)
    timed_inserts(adapter, work.evict_build, 0)
    samples, freed = [], 0
    for n in work.evict_steps:
        begin = now()
        freed += adapter.evict(n)
        samples.append(now() - begin)
    result["evict"] = stats(samples)
    result["evict_ok"], result["evict_tokens"] = freed >= sum(work.evict_steps), freed
    # Steady state: the pool is full; evict a little, insert a request, repeat.
    samples = []
    for n, op in zip(work.evict_steps, work.evict_refill, strict=True):
        begin = now()
        adapter.evict(n)
        samples.append(now() - begin)
        adapter.insert(adapter.prep_tokens(op.tokens), adapter.prep_slots(op.base, len(op.tokens)))
    result["evict_steady"] = stats(samples)
    result["evict_leaves"] = len(work.evict_build)
