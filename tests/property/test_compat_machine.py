"""The allocators of `pagoda.compat` against plain sets and dicts, over random sequences of calls.

Each machine knows what the contracts promise as a few sets; after every step `check()` passes and the
counters agree, and every call that fails leaves all that can be observed as it was.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagoda import CapacityError, UsageError
from pagoda.compat import BlockAllocator, GDNPool, ReqToTokenPool, SlotAllocator, TokenToKVPoolAllocator
from pagoda.errors import AlreadyHeldError, IdError, NotHeldError, OutOfRangeError

# 120 examples of up to 50 steps: some 4,000 steps a machine, in two to five seconds.
SETTINGS = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

FORMS = st.sampled_from(["list", "int32", "int64", "host tensor", "device tensor"])
NO_COUNT = st.sampled_from([-1, -(2**40), 1.5, "1", None, [1]])
NO_IDS = st.sampled_from([[1.0], ["1"], None, [None], "1", [[1], [2, 3]], [2**31], [2**70], {1: 1}])


def shaped(ids: list[int], form: str, device: str) -> Any:
    """The same ids as somebody may have them."""
    if form == "list":
        return ids
    if form == "host tensor":
        return torch.tensor(ids, dtype=torch.int64)
    if form == "device tensor":
        return torch.tensor(ids, dtype=torch.int32, device=device)
    return np.array(ids, dtype=form)


class Machine(RuleBasedStateMachine):
    """What all machines share: an object `made`, and how a call fails."""

    made: Any

    def observe(self) -> Any:
        """All of the object's state that calls can tell, without changing it."""
        raise NotImplementedError

    def fails(self, error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> None:
        before = self.observe()
        with pytest.raises(error):
            call()
        self.made.check()
        assert self.observe() == before

    @invariant()
    def passes_its_own_check(self) -> None:
        self.made.check()


class Slots(Machine):
    """`TokenToKVPoolAllocator`: every page is free, held, or collected by the open free group."""

    NUM_PAGES = 10

    def __init__(
        self, device: str, page_size: int, kind: type[TokenToKVPoolAllocator] = TokenToKVPoolAllocator
    ) -> None:
        super().__init__()
        self.device, self.p, self.kind = device, page_size, kind
        self.requests: list[list[int]] = []  # slots of requests whose pages are all held

    @initialize(need_sort=st.booleans())
    def make(self, need_sort: bool) -> None:
        self.need_sort = need_sort
        self.made = self.kind(
            self.NUM_PAGES * self.p, device=self.device, page_size=self.p, need_sort=need_sort
        )
        self.forget()

    def forget(self) -> None:
        self.free_pages = set(range(1, self.NUM_PAGES + 1))
        self.held: set[int] = set()
        self.collected: set[int] = set()
        self.unread: list[int] = []  # slots that the group got in device tensors
        self.in_group = False
        self.requests.clear()

    def observe(self) -> Any:
        free = self.made.available_size()
        if self.in_group:  # what is taken in a group can not be put back
            return free
        slots = self.made.alloc_host(free)
        self.made.free(slots)
        return free, sorted(slots.tolist())

    @invariant()
    def counts_agree(self) -> None:
        assert self.made.available_size() == len(self.free_pages) * self.p
        assert len(self.free_pages) + len(self.held) + len(self.collected) == self.NUM_PAGES
        if not self.in_group:
            assert not self.collected

    # --- taking

    def follow(self, slots: list[int], new: list[int]) -> list[int]:
        """The pages that `new` slots begin, behind `slots`: consecutive inside each page."""
        pages = []
        slots = list(slots)
        for slot in new:
            assert slot % self.p == len(slots) % self.p
            if slot % self.p == 0:
                pages.append(slot // self.p)
            else:
                assert slot == slots[-1] + 1
            slots.append(slot)
        return pages

    def take(self, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages)
        if self.need_sort:
            assert pages == sorted(self.free_pages)[: len(pages)]
        assert set(pages) <= self.free_pages
        self.free_pages -= set(pages)
        self.held |= set(pages)

    @rule(data=st.data(), on_host=st.booleans())
    def alloc(self, data: st.DataObject, on_host: bool) -> None:
        need_size = data.draw(st.integers(0, (self.NUM_PAGES // 3) * self.p + 1))
        before = self.observe()
        slots = self.made.alloc_host(need_size) if on_host else self.made.alloc(need_size)
        if -(-need_size // self.p) > len(self.free_pages):
            assert slots is None
            assert self.observe() == before
            return
        assert slots.shape == (need_size,)
        assert slots.dtype == (np.int32 if on_host else torch.int32)
        self.take(self.follow([], slots.tolist()))
        if need_size:
            self.requests.append(slots.tolist())

    @rule(more=st.integers(1, 100))
    def alloc_too_many(self, more: int) -> None:
        before = self.observe()
        assert self.made.alloc(len(self.free_pages) * self.p + more) is None
        assert self.observe() == before

    @rule(need_size=NO_COUNT)
    def alloc_nonsense(self, need_size: Any) -> None:
        self.fails(UsageError, lambda: self.made.alloc(need_size))
        self.fails(UsageError, lambda: self.made.alloc_host(need_size))

    @rule(data=st.data(), form=FORMS)
    def alloc_extend(self, data: st.DataObject, form: str) -> None:
        grown = (
            data.draw(st.lists(st.sampled_from(range(len(self.requests))), unique=True))
            if self.requests
            else []
        )
        batch = [self.requests[at] for at in grown] + [[] for _ in range(data.draw(st.integers(0, 2)))]
        more = [data.draw(st.integers(0, 2 * self.p + 1)) for _ in batch]
        old = [len(slots) for slots in batch]
        new = [length + extra for length, extra in zip(old, more, strict=True)]
        last = [slots[-1] if slots else 0 for slots in batch]
        before = self.observe()
        slots = self.made.alloc_extend(*(shaped(it, form, self.device) for it in (old, new, last)))
        need = sum(-(-after // self.p) + length // -self.p for length, after in zip(old, new, strict=True))
        if need > len(self.free_pages):
            assert slots is None
            assert self.observe() == before
            return
        rest = slots.tolist()
        assert len(rest) == sum(more)
        pages = []
        for request, extra in zip(batch, more, strict=True):
            pages += self.follow(request, rest[:extra])
            request += rest[:extra]
            del rest[:extra]
        assert len(pages) == need
        self.take(pages)
        self.requests += [request for request in batch[len(grown) :] if request]

    @rule(data=st.data())
    def alloc_extend_of_a_half_used_page_that_is_not_ours(self, data: st.DataObject) -> None:
        if self.p == 1:
            return  # no page is ever half used
        slot = data.draw(st.integers(-2 * self.p, (self.NUM_PAGES + 3) * self.p))
        used = data.draw(st.integers(1, self.p - 1))
        if slot // self.p in self.held and slot % self.p == used - 1:
            return
        self.fails(UsageError, lambda: self.made.alloc_extend([used], [used + 1], [slot]))

    @rule(
        bad=st.sampled_from(
            [
                ([3], [2], [0]),
                ([-1], [2], [0]),
                ([0], [1, 2], [0]),
                ([0, 0], [1], [0, 0]),
                ([0], [1], []),
                ([0.0], [1], [0]),
                ([0], ["1"], [0]),
                (None, [1], [0]),
            ]
        )
    )
    def alloc_extend_nonsense(self, bad: tuple[Any, Any, Any]) -> None:
        self.fails(UsageError, lambda: self.made.alloc_extend(*bad))
        self.fails(UsageError, lambda: self.made.alloc_extend_host(*bad))

    @precondition(lambda self: self.p > 1)
    @rule(data=st.data())
    def alloc_extend_of_one_half_used_page_twice(self, data: st.DataObject) -> None:
        half_used = [slots for slots in self.requests if len(slots) % self.p]
        if half_used:
            slots = data.draw(st.sampled_from(half_used))
            old, last = [len(slots)] * 2, [slots[-1]] * 2
            self.fails(UsageError, lambda: self.made.alloc_extend(old, [old[0] + 1] * 2, last))

    # --- freeing

    def named(self, slots: list[int]) -> set[int] | None:
        """The pages that free(slots) gives back, or None when it must raise."""
        pages: set[int] = set()
        for slot in slots:
            page = slot // self.p
            if self.p > 1 and (page in pages or page in self.collected):
                continue  # named again: freed once
            if page in pages or page not in self.held:
                return None
            pages.add(page)
        return pages

    def drop_requests(self, pages: set[int]) -> None:
        self.requests[:] = [it for it in self.requests if not pages & {slot // self.p for slot in it}]

    def some_slots(self, pages: set[int]) -> st.SearchStrategy[list[int]]:
        if not pages:
            return st.just([])
        slot = st.builds(
            lambda page, offset: page * self.p + offset,
            st.sampled_from(sorted(pages)),
            st.integers(0, self.p - 1),
        )
        return st.lists(slot, max_size=6, unique=self.p == 1)

    @rule(data=st.data(), form=FORMS)
    def free(self, data: st.DataObject, form: str) -> None:
        anything = st.integers(-self.p - 1, (self.NUM_PAGES + 2) * self.p)
        slots = data.draw(
            st.one_of(
                self.some_slots(self.held),
                self.some_slots(self.held | self.collected),
                st.builds(lambda good, bad: [*good, bad], self.some_slots(self.held), anything),
                st.lists(anything, max_size=4),
            )
        )
        given = shaped(slots, form, self.device)
        if self.in_group and form == "device tensor" and self.device == "cuda":
            self.made.free(given)  # checked when the group ends
            self.unread += slots
            self.drop_requests({slot // self.p for slot in slots})
            return
        pages = self.named(slots)
        if pages is None:
            self.fails(IdError, lambda: self.made.free(given))
            return
        self.made.free(given)
        self.held -= pages
        if self.in_group:
            self.collected |= pages
        else:
            self.free_pages |= pages
        self.drop_requests(pages)

    @precondition(lambda self: self.free_pages)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.free_pages)))
        slots = sorted(self.held)[:1]
        self.fails(IdError, lambda: self.made.free([*(page * self.p for page in slots), page * self.p]))

    @rule(slots=NO_IDS)
    def free_nonsense(self, slots: Any) -> None:
        self.fails(UsageError, lambda: self.made.free(slots))

    @rule()
    def merge_and_sort_free(self) -> None:
        before = self.observe()
        self.made.merge_and_sort_free()
        assert self.observe() == before

    # --- groups

    @precondition(lambda self: not self.in_group)
    @rule()
    def free_group_begin(self) -> None:
        self.made.free_group_begin()
        self.in_group = True

    @precondition(lambda self: self.in_group)
    @rule()
    def free_group_end(self) -> None:
        pages = self.named(self.unread)
        self.in_group = False
        if pages is None:
            with pytest.raises(IdError):
                self.made.free_group_end()
            self.held |= self.collected
        else:
            self.made.free_group_end()
            self.held -= pages
            self.free_pages |= self.collected | pages
        self.collected, self.unread = set(), []

    @precondition(lambda self: not self.in_group)
    @rule(data=st.data(), form=FORMS, fails=st.booleans(), begin=st.booleans())
    def free_group_as_a_context_manager(
        self, data: st.DataObject, form: str, fails: bool, begin: bool
    ) -> None:
        calls = [data.draw(self.some_slots(self.held)) for _ in range(2)]
        if self.p == 1:
            calls[1] = [slot for slot in calls[1] if slot not in calls[0]]
        free_before = self.made.available_size()
        try:
            with self.made.free_group_begin() if begin else self.made.free_group():
                for slots in calls:
                    self.made.free(shaped(slots, form, self.device))
                    assert self.made.available_size() == free_before
                self.made.check()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        pages = {slot // self.p for slots in calls for slot in slots}
        self.held -= pages
        self.free_pages |= pages
        self.drop_requests(pages)

    @rule(often=st.integers(0, 9))
    def clear(self, often: int) -> None:
        if often:
            return  # one time in ten
        self.made.clear()
        if self.in_group:
            self.made.free_group_end()
        self.forget()

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        if self.in_group:
            self.free_group_end()
        assert self.observe()[1] == [
            page * self.p + offset for page in sorted(self.free_pages) for offset in range(self.p)
        ]
        self.made.free([page * self.p for page in self.held])
        assert self.made.available_size() == self.NUM_PAGES * self.p
        self.made.check()


class Rows(Machine):
    """`ReqToTokenPool`: rows as a set, the matrix as an array."""

    NUM_ROWS, NUM_COLUMNS = 5, 6

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.made = ReqToTokenPool(self.NUM_ROWS, self.NUM_COLUMNS, device=device)
        self.address = self.made.req_to_token.data_ptr()
        self.matrix = self.made.req_to_token.cpu().numpy().copy()
        self.free_rows, self.held = set(range(1, self.NUM_ROWS + 1)), set()

    def observe(self) -> Any:
        free = self.made.available_size()
        rows = self.made.alloc(free)
        self.made.free(rows)
        return free, sorted(rows), self.made.req_to_token.tolist()

    @invariant()
    def table_and_counts_agree(self) -> None:
        assert self.made.available_size() == len(self.free_rows)
        assert self.made.req_to_token.data_ptr() == self.address
        assert self.made.req_to_token.tolist() == self.matrix.tolist()

    @rule(n=st.integers(0, NUM_ROWS + 1))
    def alloc(self, n: int) -> None:
        before = self.observe()
        rows = self.made.alloc(n)
        if n > len(self.free_rows):
            assert rows is None
            assert self.observe() == before
            return
        assert len(set(rows)) == n
        assert set(rows) <= self.free_rows
        self.free_rows -= set(rows)
        self.held |= set(rows)

    @rule(n=NO_COUNT)
    def alloc_nonsense(self, n: Any) -> None:
        self.fails(UsageError, lambda: self.made.alloc(n))

    @rule(rows=st.lists(st.integers(-2, NUM_ROWS + 2), max_size=3), form=FORMS)
    def free(self, rows: list[int], form: str) -> None:
        given = shaped(rows, form, self.device)
        if len(set(rows)) < len(rows) or not set(rows) <= self.held:
            self.fails(IdError, lambda: self.made.free(given))
            return
        self.made.free(given)
        self.held -= set(rows)
        self.free_rows |= set(rows)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        self.made.free(row)
        self.held.remove(row)
        self.free_rows.add(row)
        self.fails(IdError, lambda: self.made.free(row))

    @rule(rows=NO_IDS)
    def free_nonsense(self, rows: Any) -> None:
        self.fails(UsageError, lambda: self.made.free(rows))

    @rule(
        row=st.integers(-1, NUM_ROWS + 1),
        begin=st.integers(-1, NUM_COLUMNS + 1),
        end=st.integers(-1, NUM_COLUMNS + 1),
        off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        form=FORMS,
        first=st.integers(-5, 2**31 - 20),
    )
    def write(self, row: int, begin: int, end: int, off: int, form: str, first: int) -> None:
        values = [first + at for at in range(max(0, end - begin + off))]
        given = shaped(values, form, self.device)
        index = (row, slice(begin, end))
        is_good = 0 <= row <= self.NUM_ROWS and 0 <= begin <= end <= self.NUM_COLUMNS
        if not is_good or len(values) != end - begin:
            self.fails(UsageError, lambda: self.made.write(index, given))
            return
        self.made.write(index, given)
        self.matrix[row, begin:end] = values

    @rule(values=st.sampled_from([[1.0], ["1"], None, [2**31], torch.tensor([1.0])]))
    def write_nonsense(self, values: Any) -> None:
        self.fails(UsageError, lambda: self.made.write((1, slice(0, 1)), values))

    @rule(often=st.integers(0, 9))
    def clear(self, often: int) -> None:
        if often:
            return  # one time in ten
        self.made.clear()
        self.free_rows, self.held = set(range(1, self.NUM_ROWS + 1)), set()


class Blocks(Machine):
    """`BlockAllocator`: every block is free or held; the lowest come first."""

    NUM_BLOCKS = 12

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.made = BlockAllocator(self.NUM_BLOCKS, device=device)
        self.free_blocks, self.held = set(range(1, self.NUM_BLOCKS + 1)), set()

    def observe(self) -> Any:
        free = self.made.num_free
        blocks = self.made.acquire_host(free)
        self.made.release(blocks)
        return free, blocks.tolist()

    @invariant()
    def counts_agree(self) -> None:
        assert self.made.num_free == len(self.free_blocks)
        assert len(self.free_blocks) + len(self.held) == self.made.num_total_blocks == self.NUM_BLOCKS

    @rule(n=st.integers(0, NUM_BLOCKS // 2), on_host=st.booleans())
    def acquire(self, n: int, on_host: bool) -> None:
        call = self.made.acquire_host if on_host else self.made.acquire
        if n > len(self.free_blocks):
            before = self.observe()
            with pytest.raises(CapacityError) as error:
                call(n)
            found = (error.value.wanted, error.value.free, error.value.total)
            assert found == (n, len(self.free_blocks), self.NUM_BLOCKS)
            assert self.observe() == before
            return
        blocks = call(n).tolist()
        assert blocks == sorted(self.free_blocks)[:n]
        self.free_blocks -= set(blocks)
        self.held |= set(blocks)

    @rule(n=NO_COUNT)
    def acquire_nonsense(self, n: Any) -> None:
        self.fails(UsageError, lambda: self.made.acquire(n))
        self.fails(UsageError, lambda: self.made.acquire_host(n))

    @rule(data=st.data(), form=FORMS)
    def release(self, data: st.DataObject, form: str) -> None:
        anything = st.integers(-2, self.NUM_BLOCKS + 2)
        held = st.sampled_from(sorted(self.held)) if self.held else anything
        blocks = data.draw(
            st.one_of(
                st.lists(held, max_size=4, unique=True),
                st.lists(st.one_of(held, held, anything), max_size=4),
            )
        )
        given = shaped(blocks, form, self.device)
        if len(set(blocks)) < len(blocks) or not set(blocks) <= self.held:
            self.fails(IdError, lambda: self.made.release(given))
            return
        self.made.release(given)
        self.held -= set(blocks)
        self.free_blocks |= set(blocks)

    @rule(blocks=NO_IDS)
    def release_nonsense(self, blocks: Any) -> None:
        self.fails(UsageError, lambda: self.made.release(blocks))


class Versions(Machine):
    """`SlotAllocator`: free slots as a set, versions as a dict."""

    NUM_SLOTS = 6

    def __init__(self) -> None:
        super().__init__()
        self.made = SlotAllocator(self.NUM_SLOTS)
        self.free_slots = set(range(self.NUM_SLOTS))
        self.versions = dict.fromkeys(range(self.NUM_SLOTS), 0)

    def observe(self) -> Any:
        slots = range(self.NUM_SLOTS)
        is_free, versions = map(self.made.is_free, slots), map(self.made.version, slots)
        return self.made.free_count, list(is_free), list(versions)

    @invariant()
    def all_agrees(self) -> None:
        is_free = [slot in self.free_slots for slot in range(self.NUM_SLOTS)]
        assert self.observe() == (len(self.free_slots), is_free, list(self.versions.values()))

    @rule()
    def alloc(self) -> None:
        slot = self.made.alloc()
        assert slot == min(self.free_slots, default=-1)
        if slot >= 0:
            self.free_slots.remove(slot)
            self.versions[slot] += 1

    @rule(idx=st.integers(-2, NUM_SLOTS + 1))
    def free(self, idx: int) -> None:
        if idx in self.free_slots or idx not in self.versions:
            self.fails(IdError, lambda: self.made.free(idx))
            return
        self.made.free(idx)
        self.free_slots.add(idx)

    @rule(idx=st.integers(-2, NUM_SLOTS + 1))
    def occupy(self, idx: int) -> None:
        if idx not in self.versions:
            self.fails(OutOfRangeError, lambda: self.made.occupy(idx))
        elif idx not in self.free_slots:
            self.fails(AlreadyHeldError, lambda: self.made.occupy(idx))
        else:
            self.made.occupy(idx)
            self.free_slots.remove(idx)

    @rule(
        idx=st.sampled_from([-1, NUM_SLOTS, 2**31, 2**70, 0.0, "0", None, [0]]),
        call=st.sampled_from(["free", "occupy", "is_free", "version"]),
    )
    def ask_nonsense(self, idx: Any, call: str) -> None:
        self.fails(UsageError, lambda: getattr(self.made, call)(idx))


class Tracks(Machine):
    """`GDNPool`: track slots as a set, the state of every row as one number."""

    NUM_REQS, NUM_TRACKS = 3, 4
    NUM_ROWS = 1 + NUM_REQS + NUM_TRACKS

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.made = GDNPool(
            self.NUM_REQS,
            2,
            2,
            3,
            5,
            4,
            3,
            device=device,
            dtype=torch.float32,
            max_track_slots=self.NUM_TRACKS,
        )
        self.made.reset_states(range(self.NUM_ROWS))
        self.free_tracks = set(range(self.NUM_REQS + 1, self.NUM_ROWS))
        self.numbers = [0.0] * self.NUM_ROWS

    def states(self) -> list[list[float]]:
        """What every row holds, in both states: one number each, unless a row was torn."""
        parts = (self.made.recurrent_state, self.made.conv_state)
        rows = torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)
        return [sorted(set(row)) for row in rows.tolist()]

    def observe(self) -> Any:
        tracks = []
        while (track := self.made.alloc_track_slot()) is not None:
            tracks.append(track)
        for track in tracks:
            self.made.free_track_slot(track)
        return tracks, self.states()

    @invariant()
    def states_agree(self) -> None:
        assert self.states() == [[number] for number in self.numbers]

    @rule()
    def alloc_track_slot(self) -> None:
        track = self.made.alloc_track_slot()
        if not self.free_tracks:
            assert track is None
            return
        assert track in self.free_tracks
        self.free_tracks.remove(track)

    @rule(slot=st.integers(-1, NUM_ROWS + 1))
    def free_track_slot(self, slot: int) -> None:
        if slot in self.free_tracks or not self.NUM_REQS < slot < self.NUM_ROWS:
            self.fails(IdError, lambda: self.made.free_track_slot(slot))
            return
        self.made.free_track_slot(slot)
        self.free_tracks.add(slot)

    @rule(slot=st.sampled_from([1.0, "4", None, 2**31, 2**70, []]))
    def free_nonsense(self, slot: Any) -> None:
        self.fails(UsageError, lambda: self.made.free_track_slot(slot))

    @rule(row=st.integers(0, NUM_ROWS - 1), number=st.integers(1, 9))
    def run_a_layer(self, row: int, number: int) -> None:
        for layer in range(2):
            for state in self.made.get_layer_state(layer):
                state[row] = number
        self.numbers[row] = float(number)

    @rule(src=st.integers(-1, NUM_ROWS), dst=st.integers(-1, NUM_ROWS), as_list=st.booleans())
    def copy_states(self, src: int, dst: int, as_list: bool) -> None:
        given: Any = ([src], [dst]) if as_list else (src, dst)
        if not (0 <= src < self.NUM_ROWS and 0 <= dst < self.NUM_ROWS):
            self.fails(IdError, lambda: self.made.copy_states(*given))
            return
        self.made.copy_states(*given)
        self.numbers[dst] = self.numbers[src]

    @rule(rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=3), form=FORMS)
    def reset_states(self, rows: list[int], form: str) -> None:
        self.made.reset_states(shaped(rows, form, self.device))
        for row in rows:
            self.numbers[row] = 0.0

    @rule(rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=2), bad=st.sampled_from([-1, NUM_ROWS, 2**31]))
    def reset_a_row_that_is_not_there(self, rows: list[int], bad: int) -> None:
        self.fails(UsageError, lambda: self.made.reset_states([*rows, bad]))

    @rule(bad=st.sampled_from([([1], [2, 3]), (1.0, 2), (1, "2"), (None, 1), ([1, 2], [3])]))
    def copy_nonsense(self, bad: tuple[Any, Any]) -> None:
        self.fails(UsageError, lambda: self.made.copy_states(*bad))

    def teardown(self) -> None:
        assert set(self.observe()[0]) == self.free_tracks
        self.made.check()


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_slots(device: str, page_size: int) -> None:
    run_state_machine_as_test(lambda: Slots(device, page_size), settings=SETTINGS)


@pytest.mark.parametrize("machine", [Rows, Blocks, Tracks], ids=lambda it: it.__name__)
def test_ids(device: str, machine: Callable[[str], Machine]) -> None:
    run_state_machine_as_test(lambda: machine(device), settings=SETTINGS)


def test_versions() -> None:
    run_state_machine_as_test(Versions, settings=SETTINGS)


# --- the machine finds out who is wrong


class FreesTwice(TokenToKVPoolAllocator):
    def free(self, indices: Any) -> None:
        try:
            super().free(indices)
        except NotHeldError:
            return


class FreesAtOnce(TokenToKVPoolAllocator):
    def free_group_begin(self) -> Any:
        return nullcontext()

    free_group = free_group_begin


class TakesThoughItFails(TokenToKVPoolAllocator):
    def alloc_extend(self, *lengths: Any) -> torch.Tensor | None:
        slots = super().alloc_extend(*lengths)
        if slots is None:
            self.alloc_host(1)
        return slots


class FreesTheGoodOnes(TokenToKVPoolAllocator):
    def free(self, indices: Any) -> None:
        try:
            super().free(indices)
        except NotHeldError as error:
            super().free(list(indices)[: error.position])
            raise


class HandsOutTheHighest(TokenToKVPoolAllocator):
    def alloc_host(self, need_size: int) -> Any:
        slots = super().alloc_host(need_size)
        return slots if slots is None else slots[::-1].copy()


@pytest.mark.parametrize(
    "wrong",
    [FreesTwice, FreesAtOnce, TakesThoughItFails, FreesTheGoodOnes, HandsOutTheHighest],
    ids=lambda it: it.__name__,
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_defect_is_found(wrong: type[TokenToKVPoolAllocator], page_size: int) -> None:
    once = settings(SETTINGS, phases=[Phase.generate], database=None, derandomize=True, print_blob=False)
    with pytest.raises((AssertionError, UsageError, pytest.fail.Exception)):
        run_state_machine_as_test(lambda: Slots("cpu", page_size, wrong), settings=once)
