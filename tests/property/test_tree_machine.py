"""The prefix tree against a dict of prefixes: thousands of random calls, every result and event predicted."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pagoda.errors import (
    ArgumentError,
    CapacityError,
    DoubleFreeError,
    NotHeldError,
    OutOfRangeError,
    StaleError,
)
from pagoda.tree import PrefixTree
from profiles import examples
from property.tree_follower import Follower, shown
from property.tree_machine import MOST_PAGES, TreeMachine, keys, lists, namespaces, rests, symbols
from property.tree_model import HOLE, Gone, Pages
from twin import PrefixTwin

RUNS = settings(max_examples=examples(60), stateful_step_count=60)
MOST_LEASES, MOST_MATCHES = 5, 6


class PlainMachine(TreeMachine):
    """Full attention: one column, no states."""

    # Finding and leases

    def a_match(self, data: st.DataObject, namespace: bytes) -> tuple[Any, Any]:
        tokens, ranges = self.sequence(data)
        match = self.tree.match(np.array(tokens, dtype=np.int32), namespace, ranges)
        expected = self.model.match(namespace, self.model.read(tokens, ranges))
        assert (match.length, match.found) == (expected["length"], expected["found"])
        assert lists(match.columns) == expected["columns"]
        assert match.page_ids.tolist() == expected["columns"][0]
        assert match.state_id == expected["state_id"]
        assert self.tree.match_length(tokens, namespace, ranges) == match.length
        return match, expected["key"]

    @rule(data=st.data(), namespace=namespaces)
    def match(self, data: st.DataObject, namespace: bytes) -> None:
        self.matches = [*self.matches[-MOST_MATCHES:], self.a_match(data, namespace)]

    @precondition(lambda self: len(self.model.pages) > 5)
    @rule(data=st.data())
    def match_many(self, data: st.DataObject) -> None:
        sequences = [self.sequence(data) for _ in range(data.draw(st.integers(0, 3)))]
        prompts, extra = [it[0] for it in sequences], [it[1] for it in sequences]
        names = [data.draw(namespaces) for _ in prompts]
        model = self.model
        expected = [
            model.match(name, model.read(tokens, ranges))
            for name, tokens, ranges in zip(names, prompts, extra, strict=True)
        ]
        matches = self.tree.match_many(prompts, names, extra)
        assert [match.length for match in matches] == [it["length"] for it in expected]
        assert [lists(match.columns) for match in matches] == [it["columns"] for it in expected]
        lengths = self.tree.match_lengths(prompts, names, extra)
        assert (lengths.dtype, lengths.tolist()) == (np.int32, [it["length"] for it in expected])

    @precondition(lambda self: len(self.leases) < MOST_LEASES)
    @rule(data=st.data(), namespace=namespaces)
    def lock(self, data: st.DataObject, namespace: bytes) -> None:
        """A match of just now, which is kept for later."""
        self.match(data, namespace)
        self.locks(*self.matches[-1])

    @precondition(lambda self: self.matches and len(self.leases) < MOST_LEASES)
    @rule(data=st.data())
    def lock_an_old_match(self, data: st.DataObject) -> None:
        self.locks(*data.draw(st.sampled_from(self.matches)))

    def locks(self, match: Any, key: Any) -> None:
        lease = self.tree.lock(match)
        assert lease.number not in self.leases
        assert lease.is_held
        assert lease.length == self.model.lock(lease.number, key)
        self.leases[lease.number] = lease

    def a_lease(self, data: st.DataObject) -> Any:
        return self.leases[data.draw(st.sampled_from(sorted(self.leases)))]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_demoted=st.booleans())
    def release(self, data: st.DataObject, is_demoted: bool) -> None:
        lease = self.a_lease(data)
        if is_demoted:
            self.tree.demote(lease)
            self.model.leases[lease.number].is_demoted = True
        self.tree.release(lease)
        self.model.release(lease.number)
        del self.leases[lease.number]
        self.released.append(lease)
        assert not lease.is_held
        assert self.news() == []

    # Storing

    def stores(
        self,
        data: st.DataObject,
        tokens: list[int],
        pages: Pages,
        lease: Any,
        namespace: bytes,
        ranges: Any,
    ) -> None:
        base = 0 if lease is None else lease.length
        checkpoints = []
        if self.has_states:
            at = data.draw(st.sets(st.integers(1, MOST_PAGES), max_size=2))
            at |= {len(pages)} if data.draw(st.integers(0, 3)) else set()
            states = [(base + n * self.page_tokens, self.next_id + n) for n in sorted(at)]
            checkpoints = [it for it in states if base < it[0] <= base + len(pages) * self.page_tokens]
        columns = self.new_ids(data, len(pages))
        if len(tokens) % self.page_tokens and data.draw(st.booleans()):
            columns = [[*ids, 2**24] for ids in columns]  # of the page that is not full
        given = {"extra_keys": ranges, "checkpoints": checkpoints}
        number = None if lease is None else lease.number
        if lease is None:
            given["namespace"] = namespace
        if lease is not None and self.model.leases[number].space not in self.model.living.values():
            before = self.observed()
            with pytest.raises(StaleError):
                self.tree.insert(tokens, self.as_given(data, columns), lease, **given)
            assert self.observed() == before
            return
        inserted = self.tree.insert(tokens, self.as_given(data, columns), lease, **given)
        expected, fills, events = self.model.insert(namespace, pages, columns, number, checkpoints)
        assert (inserted.present, inserted.stored, inserted.length) == (
            expected["present"],
            expected["stored"],
            expected["length"],
        )
        assert lists(inserted.filled) == expected["filled"]
        assert inserted.states.tolist() == expected["states"]
        assert lease is None or lease.length == inserted.length
        news = self.news()
        assert sorted(news[: len(fills)], key=repr) == sorted(fills, key=repr)
        assert news[len(fills) :] == events

    @rule(data=st.data())
    def insert_a_few(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            self.insert(data, b"")

    @rule(data=st.data(), namespace=namespaces)
    def insert(self, data: st.DataObject, namespace: bytes) -> None:
        tokens, ranges = self.sequence(data)
        self.stores(data, tokens, self.model.read(tokens, ranges), None, namespace, ranges)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), given=symbols, extra=keys, rest=rests)
    def insert_behind_a_lease(self, data: st.DataObject, given: list[int], extra: Any, rest: int) -> None:
        lease = self.a_lease(data)
        # A range that began before the lease's end covers all from its begin.
        over = self.model.extra_keys(self.model.leases[lease.number].pages)
        ranges = [
            it
            for it in self.ranges(extra)
            if all(over[at] == (it[2], it[0]) for at in range(it[0], lease.length))
        ]
        tokens = self.tokens(given, rest)
        self.stores(data, tokens, self.model.read(tokens, ranges, lease.length), lease, b"", ranges)

    @rule(data=st.data(), namespace=namespaces, whole=st.booleans())
    def replace(self, data: st.DataObject, namespace: bytes, whole: bool) -> None:
        tokens, ranges = self.sequence(data)
        pages = self.model.read(tokens, ranges)
        there = self.model.there(self.model.space(namespace), pages)
        if whole:
            pages, tokens = there, tokens[: len(there) * self.page_tokens]
        columns = self.new_ids(data, len(pages))
        given_ids = self.as_given(data, columns)
        if len(there) < len(pages):
            before = self.observed()
            with pytest.raises(ArgumentError):
                self.tree.replace(tokens, given_ids, namespace=namespace, extra_keys=ranges)
            assert self.observed() == before
            return
        old = self.tree.replace(tokens, given_ids, namespace=namespace, extra_keys=ranges)
        expected, events = self.model.replace(namespace, pages, columns)
        assert isinstance(old, tuple)
        assert lists(old) == expected
        assert self.news() == events

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), end=st.integers(0, MOST_PAGES * 64))
    def punch(self, data: st.DataObject, end: int) -> None:
        lease, column = self.a_lease(data), data.draw(st.integers(0, len(self.windows_given) - 1))
        if self.windows_given[column] is None:
            before = self.observed()
            with pytest.raises(ArgumentError):
                self.tree.punch(lease, column, end)
            assert self.observed() == before
            return
        ids = self.tree.punch(lease, column, end)
        expected, events = self.model.punch(lease.number, column, end)
        assert (ids.dtype, ids.tolist()) == (np.int32, expected)
        assert self.news() == events

    # Freeing

    def frees(self, freed: Any, gone: list[Gone], told: list[Gone], *, deepest_first: bool) -> None:
        """What came free is what the model frees page by page, each run's pages in order of position."""
        ordered: list[Gone] = []
        num_columns, at = len(self.windows_given), 0
        for event in self.news():
            # How the pages lie in runs is the tree's own; each run is one event.
            run = told[at : at + len(event[4])]
            at += len(run)
            assert run
            if deepest_first:
                run = run[::-1]
            last = run[-1].prefix
            assert [it.prefix for it in run] == [
                (last[0], last[1][: len(last[1]) - back]) for back in reversed(range(len(run)))
            ]
            ids = [[it.ids[column] for it in run] for column in range(num_columns)]
            states = [state for it in run for state in it.states]
            assert event == self.model.event("Removed", last, len(run), ids, states)
            ordered += [it for it in run if it.is_free]
        assert at == len(told)
        # Nobody is told again what was lost before, so nobody knows in which runs it lay.
        lost = [it for it in gone if it not in told]
        in_order = sorted if lost else list
        ordered += lost
        columns = [[it.ids[at] for it in ordered if it.ids[at] != HOLE] for at in range(num_columns)]
        assert [in_order(ids) for ids in lists(freed.columns)] == [in_order(ids) for ids in columns]
        assert freed.page_ids.tolist() == freed.columns[0].tolist()
        state_ids = [state for it in ordered for _, state in it.states]
        assert freed.state_ids.dtype == np.int32
        assert in_order(freed.state_ids.tolist()) == in_order(state_ids)

    def evicts(self, freed: Any, gone: list[Gone]) -> None:
        living = self.model.living.values()
        self.frees(freed, gone, [it for it in gone if it.prefix[0] in living], deepest_first=True)

    @precondition(lambda self: len(self.model.pages) > 2)
    @rule(data=st.data(), num_pages=st.sampled_from([0, 1, 1, 1, 2, 2, 3, 4, 8]), less=st.integers(0, 63))
    def evict(self, data: st.DataObject, num_pages: int, less: int) -> None:
        n = max(0, num_pages * self.page_tokens - less % self.page_tokens)
        wanted, column = -(-n // self.page_tokens), data.draw(st.integers(0, len(self.windows_given) - 1))
        tallies = self.model.tallies()
        total, evictable, _ = tallies["columns"][column]
        if wanted > evictable:
            before = self.observed()
            with pytest.raises(CapacityError) as caught:
                self.tree.evict(n, column)
            error = (caught.value.what, caught.value.wanted, caught.value.free, caught.value.total)
            if column == 0 and self.windows_given[0] is None:
                assert error == ("evictable tokens", n, tallies["tokens"][1], tallies["tokens"][0])
            else:
                assert error == (f"evictable pages of column {column}", wanted, evictable, total)
            assert self.observed() == before
            return
        self.evicts(self.tree.evict(n, column), self.model.evict(wanted, column))

    @precondition(lambda self: self.model.states)
    @rule(n=st.sampled_from([0, 1, 1, 2, 4]))
    def evict_states(self, n: int) -> None:
        total, evictable, _ = self.model.tallies()["states"]
        if n > evictable:
            before = self.observed()
            with pytest.raises(CapacityError) as caught:
                self.tree.evict_states(n)
            error = (caught.value.what, caught.value.wanted, caught.value.free, caught.value.total)
            assert error == ("evictable states", n, evictable, total)
            assert self.observed() == before
            return
        self.evicts(self.tree.evict_states(n), self.model.evict(n, None))

    @precondition(lambda self: len(self.model.pages) > 15)
    @rule(namespace=namespaces)
    def drop(self, namespace: bytes) -> None:
        freed, told = self.tree.drop(namespace), self.model.drop(namespace)
        self.frees(freed, [it for it in told if it.is_free], told, deepest_first=False)

    @precondition(lambda self: len(self.model.pages) > 25)
    @rule()
    def reset(self) -> None:
        self.tree.reset()
        self.model.forget()
        assert self.news() == [("Reset",)]
        for lease in self.leases.values():
            assert not lease.is_held
            with pytest.raises(StaleError):
                self.tree.release(lease)
        self.leases, self.released = {}, []

    # Errors

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([self.misuse_insert, self.misuse_leases, self.misuse_types]))(data)

    def misuse_insert(self, data: st.DataObject) -> None:
        given = data.draw(symbols)
        bad = data.draw(st.sampled_from(["token", "id", "fewer", "more", "type"]))
        lease = self.a_lease(data) if self.leases and data.draw(st.booleans()) else None
        if lease is not None and self.model.leases[lease.number].space not in self.model.living.values():
            lease = None
        tokens, columns = self.tokens([*given, 1]), self.new_ids(data, len(given) + 1)
        column = data.draw(st.integers(0, len(columns) - 1))
        error: Any = ArgumentError
        if bad == "token":
            error, at = OutOfRangeError, data.draw(st.integers(0, len(tokens) - 1))
            tokens[at] = data.draw(st.sampled_from([-1, -(2**31)]))
        elif bad == "id":
            error, at = OutOfRangeError, data.draw(st.integers(0, len(given)))
            is_full = self.windows_given[column] is None
            values = [0, -2, 2**31 // self.page_tokens, *([HOLE] if is_full else [])]
            columns[column][at] = data.draw(st.sampled_from([it for it in values if it < 2**31]))
        elif bad == "fewer":
            columns[column].pop()
        elif bad == "more":
            columns[column].append(1)
        given_ids = "ids" if bad == "type" else self.as_given(data, columns)
        before = self.observed()
        with pytest.raises(error) as caught:
            self.tree.insert(tokens, given_ids, lease)
        if error is OutOfRangeError:
            wrong = tokens if bad == "token" else columns[column]
            assert (caught.value.position, caught.value.id) == (at, wrong[at])
        assert self.observed() == before
        assert self.news() == []

    def misuse_leases(self, data: st.DataObject) -> None:
        before = self.observed()
        other = self.kind(self.page_tokens, windows=self.windows_given, states=self.has_states)
        match = other.match([])
        foreign = other.lock(match)
        with pytest.raises(ArgumentError):
            self.tree.lock(match)
        for call in (self.tree.release, self.tree.demote, self.tree.page_ids):
            with pytest.raises(ArgumentError):
                call(foreign)
        nothing: Any = [[] for _ in self.windows_given]
        with pytest.raises(ArgumentError):
            self.tree.insert([], nothing[0] if len(nothing) == 1 else nothing, foreign)
        if self.released:
            lease = data.draw(st.sampled_from(self.released))
            with pytest.raises(DoubleFreeError) as caught:
                self.tree.release(lease)
            assert caught.value.id == lease.number
            for call in (self.tree.demote, self.tree.page_ids):
                with pytest.raises(NotHeldError):
                    call(lease)
        assert self.observed() == before

    def misuse_types(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from([-1, "1", 1.0]))
        namespace: Any = data.draw(st.sampled_from([3, None, "\ud800"]))
        before = self.observed()
        for call in (self.tree.evict, self.tree.evict_states, self.tree.nodes):
            with pytest.raises(ArgumentError):
                call(n)
        with pytest.raises(ArgumentError):
            self.tree.evict(0, len(self.windows_given))
        if not self.has_states:
            with pytest.raises(ArgumentError):
                self.tree.evict_states(0)
        with pytest.raises(ArgumentError):
            self.tree.match([1], namespace)
        with pytest.raises(ArgumentError):
            self.tree.drop(namespace)
        for ranges in ([(3, 2, b"")], [(0, 2, b""), (1, 3, b"")], [(-1, 2, b"")], [(0, 1, 3)], [(0, 1)], 7):
            with pytest.raises(ArgumentError):
                self.tree.match([1], b"", ranges)
        assert self.observed() == before

    # After every step

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        counts, expected = self.tree.counts(), self.model.tallies()
        assert tuple(counts.tokens) == expected["tokens"]
        assert tuple(tuple(it) for it in counts.columns) == expected["columns"]
        assert tuple(counts.states) == expected["states"]
        assert (counts.leaves, counts.leases) == (expected["leaves"], expected["leases"])
        assert self.tree.namespaces() == self.model.namespaces()
        for number, lease in self.leases.items():
            mine = self.model.leases[number]
            assert lease.length == self.model.length(mine.pages)
            ids = self.model.ids(mine.space, mine.pages)
            assert lists(self.tree.page_ids(lease, column) for column in range(len(ids))) == ids
        properties = (self.tree.num_tokens, self.tree.evictable_tokens, self.tree.protected_tokens)
        assert properties == tuple(counts.tokens)
        assert (self.tree.num_nodes, self.tree.num_leaves, self.tree.num_leases) == tuple(counts[3:])

    @invariant()
    def can_be_followed(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.follower.picture() == shown(self.tree, self.page_tokens)

    @rule()
    def follow_anew(self) -> None:
        """Who comes late is told first what is there."""
        self.tree.unlisten(self.follower)
        self.follower = Follower(self.page_tokens)
        self.tree.listen(self.follower)
        assert self.news() == []

    @invariant()
    def shows_what_it_holds(self) -> None:
        if not hasattr(self, "tree"):
            return
        views = self.tree.nodes(10**9, 10**9)
        paths: dict[int | None, list[int]] = {}  # node → the tokens up to its end
        seen = []
        for view in views:
            path = paths[view.number] = paths.get(view.parent, []) + view.tokens.tolist()
            assert (view.begin, view.end) == (len(path) - len(view.tokens), len(path))
            states = dict(view.checkpoints)
            for index, ids in enumerate(zip(*view.columns, strict=True)):
                end = view.begin + (index + 1) * self.page_tokens
                held = None if view.leases == 0 else view.leases
                seen.append((view.namespace, view.is_dropped, path[:end], ids, states.get(end), held))
        assert len(views) - self.tree.num_nodes == sum(view.parent is None for view in views)
        expected = []
        for (space, pages), page in self.model.pages.items():
            tokens = [token for number in pages for token in self.model.tokens(number)]
            name = self.model.names[space]
            state, is_dropped = self.model.states.get((space, pages)), self.model.living.get(name) != space
            held = self.model.holders((space, pages)) or None
            expected.append((name, is_dropped, tokens, tuple(page.ids), state, held))
        assert sorted(seen, key=repr) == sorted(expected, key=repr)


class GroupsMachine(PlainMachine):
    """Windows, states, several columns: holes, fills, checkpoints."""

    windows: Any = st.sampled_from([(None, 2), (1.5, None), (3, 0.2), (None,), (2,), (None, None, 2.5)])
    states: Any = st.booleans()


def case_of(machine: type[PlainMachine], kind: Any) -> Any:
    named = type(f"{machine.__name__}Of{kind.__name__}", (machine,), {"kind": kind})
    case = named.TestCase
    case.settings = RUNS
    return case


TestPlain = case_of(PlainMachine, PrefixTree)
TestPlainTwin = case_of(PlainMachine, PrefixTwin)
TestGroups = case_of(GroupsMachine, PrefixTree)
TestGroupsTwin = case_of(GroupsMachine, PrefixTwin)
