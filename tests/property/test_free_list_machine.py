"""FreeList against sets and lists: thousands of random calls, `check()` after each."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagoda import CapacityError, FreeList, PagodaError
from pagoda.errors import NotHeldError, OutOfRangeError

PAGE_SIZES = [1, 2, 16, 64]
RUNS = settings(max_examples=60, stateful_step_count=60, deadline=None)


class FreeListMachine(RuleBasedStateMachine):
    """Ids as three sets: free, held, and waiting by fence."""

    @initialize(
        num_ids=st.sampled_from([1, 3, 64, 65, 200]),
        first_id=st.sampled_from([0, 1, 70]),
        page_tokens=st.sampled_from(PAGE_SIZES),
    )
    def build(self, num_ids: int, first_id: int, page_tokens: int) -> None:
        self.ids = FreeList(num_ids, first_id)
        self.page_tokens = page_tokens
        self.everything = set(range(first_id, first_id + num_ids))
        self.free, self.held = set(self.everything), set[int]()
        self.waiting: dict[int, set[int]] = {}
        self.passed: int | None = None

    def observed(self) -> tuple[object, ...]:
        counts = (self.ids.num_free, self.ids.num_held, self.ids.num_quarantined)
        return (*counts, [(self.ids.is_free(i), self.ids.is_held(i)) for i in sorted(self.everything)])

    def put(self, ids: set[int], fence: int | None) -> None:
        self.held -= ids
        if fence is None or (self.passed is not None and fence <= self.passed):
            self.free |= ids
        else:
            self.waiting.setdefault(fence, set()).update(ids)

    def pick(self, data: st.DataObject, of: set[int], least: int = 0) -> list[int]:
        if len(of) < least or not of:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(of)), unique=True, min_size=least, max_size=20))

    @rule(n=st.integers(0, 250))
    def alloc(self, n: int) -> None:
        assert self.ids.can_alloc(n) == (n <= len(self.free))
        if n > len(self.free):
            before = self.observed()
            with pytest.raises(CapacityError) as caught:
                self.ids.alloc(n)
            assert (caught.value.wanted, caught.value.free, caught.value.total) == (
                n,
                len(self.free),
                len(self.everything),
            )
            assert self.observed() == before
            return
        got = self.ids.alloc(n).tolist()
        assert got == sorted(self.free)[:n]
        self.free -= set(got)
        self.held |= set(got)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        ids = self.pick(data, self.free)
        self.ids.take(ids)
        self.free -= set(ids)
        self.held |= set(ids)

    @rule(data=st.data(), fence=st.none() | st.integers(-3, 6))
    def give_back(self, data: st.DataObject, fence: int | None) -> None:
        ids = self.pick(data, self.held)
        self.ids.free(np.array(ids, dtype=data.draw(st.sampled_from([np.int32, np.int64]))), fence)
        self.put(set(ids), fence)

    @rule(data=st.data(), fence=st.none() | st.integers(-3, 6))
    def give_back_by_slots(self, data: st.DataObject, fence: int | None) -> None:
        ids = self.pick(data, self.held)
        times = 1 if self.page_tokens == 1 else data.draw(st.integers(1, 3))
        offsets = st.integers(0, self.page_tokens - 1)
        slots = [i * self.page_tokens + data.draw(offsets) for i in ids for _ in range(times)]
        self.ids.free_slots(data.draw(st.permutations(slots)), self.page_tokens, fence)
        self.put(set(ids), fence)

    @rule(fence=st.integers(-3, 6))
    def pass_fence(self, fence: int) -> None:
        freed = set().union(*(ids for f, ids in self.waiting.items() if f <= fence))
        assert self.ids.pass_fence(fence) == len(freed)
        self.waiting = {f: ids for f, ids in self.waiting.items() if f > fence}
        self.free |= freed
        self.passed = fence if self.passed is None else max(self.passed, fence)

    @rule(fence=st.integers(-3, 6))
    def recall(self, fence: int) -> None:
        ids = self.waiting.pop(fence, set())
        assert self.ids.recall(fence) == len(ids)
        self.held |= ids

    @rule(data=st.data(), fence=st.none() | st.integers(-3, 6))
    def misuse(self, data: st.DataObject, fence: int | None) -> None:
        """A bad id anywhere among good ones: the error names it and nothing changes."""
        good = self.pick(data, self.held)
        outside = [min(self.everything) - 1, max(self.everything) + 1]
        bad = data.draw(st.sampled_from(outside + sorted(self.everything - self.held) + good[:1]))
        at = data.draw(st.integers(0, len(good)))
        ids = [*good[:at], bad, *good[at:]]
        before = self.observed()
        with pytest.raises((NotHeldError, OutOfRangeError)) as caught:
            self.ids.free(ids, fence)
        assert caught.value.id == bad
        assert ids[caught.value.position] == bad
        with pytest.raises(PagodaError):
            self.ids.take([*ids, bad])
        assert self.observed() == before

    @rule()
    def reset(self) -> None:
        self.ids.reset()
        self.free, self.held = set(self.everything), set()
        self.waiting, self.passed = {}, None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ids"):
            return
        self.ids.check()
        assert self.ids.num_free + self.ids.num_held + self.ids.num_quarantined == self.ids.num_ids
        for i in self.everything:
            assert self.ids.is_free(i) == (i in self.free)
            assert self.ids.is_held(i) == (i in self.held)


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = RUNS
