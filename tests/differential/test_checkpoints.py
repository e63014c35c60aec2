"""The manager's checkpoints against a plain model, bench/checkpoints: the same hits, cuts, saves and ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.checkpoints import real
from bench.checkpoints.model import Model
from bench.checkpoints.order import Rule
from bench.checkpoints.paths import paths_of
from bench.checkpoints.workloads import PAGE, Request, Workload, seeded
from profiles import examples


def compare(workload: Workload, num_checkpoints: int) -> None:
    paths = paths_of(workload)
    planned = Model(paths, num_checkpoints, Rule(num_checkpoints)).run()
    longest = max(path.total_tokens for together in paths.rounds for path in together)
    for i, outcome in enumerate(real.run(workload, num_checkpoints, 2 * paths.num_nodes + longest, longest)):
        assert outcome == planned[i], f"request {i}"


@pytest.mark.parametrize("num_checkpoints", [16, 48])
@pytest.mark.parametrize("name", ["chains", "chats", "templates"])
def test_the_manager_plans_what_the_model_plans(name: str, num_checkpoints: int) -> None:
    compare(seeded(name, 100), num_checkpoints)


@pytest.mark.long
@pytest.mark.parametrize("num_checkpoints", [16, 24, 96, 256])
@pytest.mark.parametrize("name", ["agents", "chats + scans"])
def test_the_manager_plans_what_the_model_plans_for_long(name: str, num_checkpoints: int) -> None:
    compare(seeded(name, 100), num_checkpoints)


@st.composite
def trees(draw: st.DrawFn) -> list[Request]:
    """Requests that continue, repeat, or part from earlier ones, at page boundaries and inside pages."""
    told = [np.zeros(0, np.int32)]
    requests = []
    for i in range(draw(st.integers(1, 40))):
        before = told[draw(st.integers(0, len(told) - 1))]
        at = len(before) if draw(st.booleans()) else draw(st.integers(0, len(before)))
        new = draw(st.one_of(st.integers(0 if at else 1, 80), st.sampled_from([PAGE, 1_500, 3_000])))
        own = np.arange(i * 10_000, i * 10_000 + new + draw(st.integers(0, 50)), dtype=np.int32)
        prompt = np.concatenate((before[:at], own[:new]))
        requests.append(Request(prompt, own[new:]))
        told.append(np.concatenate((prompt, own[new:])))
    return requests


@settings(max_examples=examples(60), deadline=None)
@given(trees(), st.integers(1, 12), st.sampled_from([100, 2_048]), st.integers(1, 3))
def test_random_requests(requests: list[Request], num_checkpoints: int, chunk: int, running: int) -> None:
    def replay() -> Iterator[Request]:
        return iter(requests)

    compare(Workload("random", replay, running=running, chunk=chunk), num_checkpoints)


def test_an_eviction_recomputes_a_limited_number_of_worths() -> None:
    # Documents of one length, of which more and more are asked for again: the worth of all of them rises.
    num_checkpoints = 3 * Rule.most_updates

    def document(number: int) -> Request:
        return Request(np.full(5 * PAGE + 1, number, np.int32), np.zeros(0, np.int32))

    def requests() -> Iterator[Request]:
        yield from map(document, range(num_checkpoints))
        for i in range(num_checkpoints // 4):
            yield document(num_checkpoints - 1 - 2 * i)
            yield document(num_checkpoints - 2 - 2 * i)
            yield document(num_checkpoints + i)

    compare(Workload("documents", requests, running=1, chunk=2_048), num_checkpoints)
