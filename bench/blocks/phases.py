"""The measurements of one implementation, in one process."""

from __future__ import annotations

import gc
import importlib
import zlib
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

from bench.blocks import workload
from bench.blocks.adapters import ADAPTERS, WINDOW, Adapter
from bench.blocks.workload import Expected, Tokens, Workload
from bench.samples import CLOCK_NS, now, resident_bytes, stats

SCENARIOS = ("memory", "admit", "hit", "evict", "decode")
LIVE = 16  # requests that run at a time while the pool is too small
MEMORY_TOKENS = 1_000_000


def load_adapter(spec: str) -> type[Adapter]:
    if spec in ADAPTERS:
        return ADAPTERS[spec]
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


def run_one(
    spec: str, page: int, scale: float, seed: int, use_gc: bool, scenarios: Collection[str]
) -> dict[str, Any]:
    make = load_adapter(spec)
    result: dict[str, Any] = {"impl": make.name, "page": page, "groups": make.num_windows + 1}
    if "memory" in scenarios:  # first: in a clean heap
        run_memory(make, page, result)
    work = workload.make(seed, scale)
    gc.collect()
    gc.freeze()
    if not use_gc:
        gc.disable()
    run = {"admit": run_admit, "hit": run_hit, "evict": run_evict, "decode": run_decode}
    result["digests"] = {}
    for name, scenario in run.items():
        if name in scenarios:
            scenario(make, work, page, result)
            gc.collect()
    return result


class Answers:
    """The hits of a scenario, in order: their digest, and how many are wrong."""

    def __init__(self) -> None:
        self.digest, self.wrong, self.hits, self.tokens = 0, 0, 0, 0

    def add(self, hit: int, tokens: Tokens, expected: int | None = None) -> None:
        self.digest = zlib.crc32(int(hit).to_bytes(4, "little"), self.digest)
        self.wrong += expected is not None and hit != expected
        self.hits += hit
        self.tokens += len(tokens)

    def report(self, result: dict[str, Any], name: str) -> None:
        result["digests"][name] = f"{self.digest:08x}" + f", {self.wrong} wrong" * (self.wrong > 0)
        result[f"{name}_hit_rate"] = round(self.hits / self.tokens, 4)


class Requests:
    """Times requests one at a time, each from its first look-up to its end."""

    PARTS = ("hash", "match", "allocate", "free")

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.samples: dict[str, list[int]] = {part: [] for part in (*self.PARTS, "all", "without hash")}

    def run(self, name: str, tokens: Tokens) -> int:
        """Run one request and return its hit."""
        adapter = self.adapter
        request = adapter.make(name, tokens)
        t0 = now()
        adapter.hash(request)
        t1 = now()
        adapter.match(request)
        t2 = now()
        done = adapter.allocate(request)
        t3 = now()
        adapter.free(request)
        t4 = now()
        assert done, "no room"
        for part, ns in zip(self.PARTS, (t1 - t0, t2 - t1, t3 - t2, t4 - t3), strict=True):
            self.samples[part].append(ns)
        # With the cost of the clock once, as `stats` expects.
        self.samples["all"].append(t4 - t0 - 3 * CLOCK_NS)
        self.samples["without hash"].append(t4 - t1 - 2 * CLOCK_NS)
        return adapter.hit(request)

    def report(self, result: dict[str, Any], name: str) -> None:
        for part, samples in self.samples.items():
            result[name if part == "all" else f"{name}: {part}"] = stats(samples)


def expected_of(make: type[Adapter], page: int) -> Expected:
    return Expected(page, WINDOW if make.num_windows else 0)


def run_admit(make: type[Adapter], work: Workload, page: int, result: dict[str, Any]) -> None:
    """All prompts, one at a time, in a pool that holds them all; then look-ups."""
    # Expected hits are computed first, so that nothing else runs between the requests.
    expected = expected_of(make, page)
    wanted = [expected.request(tokens) for tokens in work.prompts]
    wanted_then = [expected.hit(tokens) for tokens in work.lookups]
    adapter = make(len(expected.full) + 4_096, page)
    requests, answers = Requests(adapter), Answers()
    for i, tokens in enumerate(work.prompts):
        answers.add(requests.run(f"a{i}", tokens), tokens, wanted[i])
    requests.report(result, "admit")
    answers.report(result, "admit")

    answers = Answers()
    samples, hashes = [], []
    for i, tokens in enumerate(work.lookups):
        request = adapter.make(f"l{i}", tokens)
        t0 = now()
        adapter.hash(request)
        t1 = now()
        adapter.look_up(request)
        t2 = now()
        samples.append(t2 - t0 - CLOCK_NS)
        hashes.append(t1 - t0)
        answers.add(adapter.hit(request), tokens, wanted_then[i])
    result["look up"], result["look up: hash"] = stats(samples), stats(hashes)
    answers.report(result, "look up")


def run_hit(make: type[Adapter], work: Workload, page: int, result: dict[str, Any]) -> None:
    """Prompts of 2,000 tokens of which 1,500 are cached, one at a time."""
    expected = expected_of(make, page)
    wanted = [expected.request(tokens) for tokens in work.prefixes + work.hits][len(work.prefixes) :]
    adapter = make(len(expected.full) + 4_096, page)
    before, requests, answers = Requests(adapter), Requests(adapter), Answers()
    for i, tokens in enumerate(work.prefixes):
        before.run(f"p{i}", tokens)
    for i, tokens in enumerate(work.hits):
        answers.add(requests.run(f"h{i}", tokens), tokens, wanted[i])
    requests.report(result, "hit")
    answers.report(result, "hit")


def run_evict(make: type[Adapter], work: Workload, page: int, result: dict[str, Any]) -> None:
    """All prompts, 16 at a time, in a pool for a third of their pages; the second half is timed."""
    adapter = make(distinct_pages(work, page) // 3, page)
    running: deque[Any] = deque()
    samples, without_hash, answers = [], [], Answers()
    warm = len(work.prompts) // 2
    for i, tokens in enumerate(work.prompts):
        request = adapter.make(f"e{i}", tokens)
        t0 = now()
        adapter.hash(request)
        t1 = now()
        adapter.match(request)
        while not adapter.allocate(request):
            adapter.free(running.popleft())
            adapter.match(request)
        running.append(request)
        if len(running) > LIVE:
            adapter.free(running.popleft())
            adapter.settle()
        t2 = now()
        if i >= warm:
            samples.append(t2 - t0 - CLOCK_NS)
            without_hash.append(t2 - t1)
            answers.add(adapter.hit(request), tokens)
    result["evict"], result["evict: without hash"] = stats(samples), stats(without_hash)
    answers.report(result, "evict")


def run_decode(make: type[Adapter], work: Workload, page: int, result: dict[str, Any]) -> None:
    """256 requests that each grow by one token per step; afterwards all their tokens have to be cached."""
    steps = len(work.sampled)
    longest = max(len(tokens) for tokens in work.running) + steps
    adapter = make(len(work.running) * (-(-longest // page) + 1) + 64, page)
    requests = [adapter.make(f"d{i}", tokens) for i, tokens in enumerate(work.running)]
    for request in requests:
        adapter.hash(request)
        adapter.match(request)
        assert adapter.allocate(request)
    batch = adapter.batch(requests)
    samples = []
    for step in work.sampled:
        tokens = adapter.sampled(step)
        begin = now()
        adapter.grow(batch, tokens)
        samples.append(now() - begin)
    result["decode"] = stats(samples)
    # The pages of every request, and the hit of its next turn.
    answers = Answers()
    held = [adapter.held(request) for request in requests]
    answers.digest = zlib.crc32(np.array(held, np.int32).tobytes())
    result["decode_held"] = np.sum(held, axis=0).tolist()
    for request in requests:
        adapter.free(request)
    for i, prompt in enumerate(work.running):
        said = np.concatenate((prompt, work.sampled[:, i], prompt[:1]))
        request = adapter.make(f"n{i}", said)
        adapter.hash(request)
        adapter.look_up(request)
        answers.add(adapter.hit(request), said, (len(said) - 1) // page * page)
    answers.report(result, "decode")


def run_memory(make: type[Adapter], page: int, result: dict[str, Any]) -> None:
    """Resident bytes per cached token, those of the pool included, after the requests have ended."""
    prompts = np.random.default_rng(7).integers(0, workload.VOCAB, (MEMORY_TOKENS // 2_000, 2_000), np.int32)

    def fill(adapter: Adapter, prompts: Tokens) -> None:
        for i, tokens in enumerate(prompts):
            request = adapter.make(f"m{i}", tokens)
            adapter.hash(request)
            adapter.match(request)
            assert adapter.allocate(request)
            adapter.free(request)

    fill(make(1_000, page), prompts[:2])  # imports and one-time allocations do not count
    gc.collect()
    before = resident_bytes()
    adapter = make(MEMORY_TOKENS // page + 64, page)
    gc.collect()
    empty = resident_bytes()
    fill(adapter, prompts)
    gc.collect()
    after = resident_bytes()
    result["pool_bytes_per_token"] = round((empty - before) / MEMORY_TOKENS, 2)
    result["bytes_per_token"] = round((after - before) / MEMORY_TOKENS, 2)


def distinct_pages(work: Workload, page: int) -> int:
    """Return the distinct whole pages of all prompts: what an unlimited pool would hold."""
    expected = Expected(page)
    for tokens in work.prompts:
        expected.request(tokens)
    return len(expected.full)
