"""Two prefix trees and random calls for both. In: a seed; out: an AssertionError where they differ."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from pagoda.errors import CapacityError, IdError, PagodaError

HOLE = -1
NAMESPACES = [b"", b"", b"", "tenant", b"\x00\xff"]
LIMIT = 10**9


def plain(value: Any) -> Any:
    """A result, an event or a node as something that `==` compares."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value).__name__, *(plain(it) for it in value))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(it) for it in value])
    kind = type(value).__name__
    if kind == "Reset":
        return kind
    if kind == "Match":
        return (value.length, value.found, plain(value.page_ids), plain(value.columns), value.state_id)
    if kind == "Lease":
        return (value.number, value.length, value.is_held, value.state_id)
    if kind == "Inserted":
        lengths = (value.present, value.stored, value.length)
        return (*lengths, plain(value.filled), plain(value.states))
    if kind == "Freed":
        return (plain(value.page_ids), plain(value.columns), plain(value.state_ids))
    assert value is None or isinstance(value, (int, bytes, bool)), kind
    return value


def failure(error: PagodaError) -> Any:
    if isinstance(error, IdError):
        return (type(error).__name__, error.id, error.position)
    if isinstance(error, CapacityError):
        return (type(error).__name__, error.what, error.wanted, error.free, error.total)
    return type(error).__name__


class Driver:
    """Two trees, and a generator of calls for both."""

    def __init__(
        self, pair: tuple[Any, Any], windows: tuple[int | None, ...], longest: int, seed: int
    ) -> None:
        self.pair, self.windows, self.longest = pair, windows, longest
        self.size, self.has_states = pair[0].page_tokens, pair[0].has_states
        self.random = random.Random(seed)
        self.past: list[tuple[list[int], list[Any]]] = [([], [])]  # sequences and their extra keys
        self.leases: list[tuple[Any, Any]] = []
        self.matches: list[tuple[Any, Any]] = []
        self.old: list[tuple[Any, Any]] = []  # released, or from before a reset
        self.events: tuple[list[Any], list[Any]] = ([], [])
        self.is_listening = False
        self.next_id = 1
        self.hole_share = self.random.choice([0.05, 0.3, 0.7])
        self.key_share = self.random.choice([0, 0, 0.2])
        self.tokens_wanted = self.random.choice([3, 10, 30]) * longest
        self.count: dict[str, int] = {}
        self.calls: list[tuple[Callable[[], None], int]] = [
            (self.match, 600),
            (self.match_many, 100),
            (self.lock, 600),
            (self.release, 600),
            (self.insert, 800),
            (self.insert_behind, 800),
            (self.page_ids, 200),
            (self.evict, 200),
            (self.replace, 100),
            (self.misuse, 100),
            (self.nodes, 20),
            (self.drop, 20),
            (self.reset, 4),
            (self.listen, 4),
            (self.punch, 300 if any(windows) else 0),
            (self.evict_states, 200 if self.has_states else 0),
        ]
        if self.random.random() < 0.7:  # without a listener the native tree takes other ways
            self.listen()

    def both(self, name: str, of: Callable[[int], tuple[Any, ...]], **named: Any) -> tuple[Any, Any] | None:
        """One call to both; what came back, or None when both refused alike."""
        results: list[Any] = []
        for index, tree in enumerate(self.pair):
            try:
                results.append((True, getattr(tree, name)(*of(index), **named)))
            except PagodaError as error:
                results.append((False, failure(error)))
        (ok, left), (also, right) = results
        key = name if ok else f"{name} refused"
        self.count[key] = self.count.get(key, 0) + 1
        assert (ok, plain(left) if ok else left) == (also, plain(right) if also else right), (name, named)
        if self.events[0] or self.events[1]:
            assert plain(self.events[0]) == plain(self.events[1]), (name, named)
            for events in self.events:
                events.clear()
        return (left, right) if ok else None

    # What calls are given

    def pages(self, n: int) -> list[int]:
        """Tokens of n pages, few of which differ, and some only in their last token."""
        tokens: list[int] = []
        for _ in range(n):
            symbol = self.random.choice([0, 0, 0, 1, 2])
            tokens += [symbol // 2] * (self.size - 1) + [symbol]
        return tokens

    def keys(self, length: int) -> list[Any]:
        if self.random.random() >= self.key_share:
            return []
        ranges, at = [], 0
        for _ in range(self.random.randint(1, 2)):
            begin = at + self.random.randint(0, length // 2)
            at = begin + self.random.randint(1, length // 2 + 1)
            ranges.append((begin, at, self.random.choice([b"x", "x", "y"])))
        return ranges

    def sequence(self) -> tuple[list[int], list[Any]]:
        """One that begins like an earlier one, most of the time."""
        tokens, ranges = self.random.choice(self.past)
        keep = self.random.randint(0, len(tokens))
        if self.random.random() < 0.8:
            keep = keep // self.size * self.size
        tokens = tokens[:keep]
        most = self.longest // self.size
        tokens = (tokens + self.pages(self.random.choice([0, 0, 1, 2, most // 2])))[: self.longest]
        if self.random.random() < 0.1:
            tokens = tokens + [0] * self.random.randint(0, self.size)
        if self.random.random() < 0.1:
            ranges = self.keys(self.longest)
        self.past = [*self.past[-12:], (tokens, ranges)]
        return tokens, ranges

    def ids(self, num_tokens: int) -> Any:
        num_pages, columns = num_tokens // self.size, list[Any]()
        extra = num_tokens % self.size > 0 and self.random.random() < 0.5
        share = self.random.choice([0, 0, self.hole_share, 1])
        for window in self.windows:
            ids = list(range(self.next_id, self.next_id + num_pages + extra))
            self.next_id += num_pages + 1
            if window is not None and share > 0:
                ids = [HOLE if self.random.random() < share else id for id in ids]
            columns.append(np.array(ids, dtype=np.int32) if self.random.random() < 0.3 else ids)
        return columns[0] if len(columns) == 1 else columns

    def checkpoints(self, base: int, num_tokens: int) -> list[tuple[int, int]]:
        num_pages = num_tokens // self.size
        if not self.has_states or num_pages == 0:
            return []
        at = {num_pages} if self.random.random() < 0.6 else set()
        at |= {self.random.randint(1, num_pages) for _ in range(self.random.choice([0, 0, 1, 2]))}
        self.next_id += len(at)
        return [(base + n * self.size, self.next_id + n) for n in sorted(at)]

    # Calls

    def match(self) -> None:
        tokens, ranges = self.sequence()
        given: Any = np.array(tokens, dtype=np.int64) if self.random.random() < 0.3 else tokens
        name = self.random.choice(NAMESPACES)
        self.both("match_length", lambda _: (given, name, ranges))
        match = self.both("match", lambda _: (given, name, ranges))
        if match is not None:
            self.matches = [*self.matches[-8:], match]

    def match_many(self) -> None:
        sequences = [self.sequence() for _ in range(self.random.randint(0, 4))]
        prompts, ranges = [it[0] for it in sequences], [it[1] for it in sequences]
        names = self.random.choice([None, b"", "tenant", [self.random.choice(NAMESPACES) for _ in prompts]])
        self.both("match_many", lambda _: (prompts, names, ranges))
        self.both("match_lengths", lambda _: (prompts, names, ranges))

    def lock(self) -> None:
        if not self.matches or self.random.random() < 0.5:
            self.match()
        if len(self.leases) < 8:
            match = self.random.choice(self.matches)
            lease = self.both("lock", lambda index: (match[index],))
            assert lease is not None
            self.leases.append(lease)

    def release(self) -> None:
        if not self.leases:
            return
        lease = self.random.choice(self.leases)
        if self.random.random() < 0.3:
            self.both("demote", lambda index: (lease[index],))
        self.both("release", lambda index: (lease[index],))
        self.leases.remove(lease)
        self.old = [*self.old[-5:], lease]

    def insert(self) -> None:
        tokens, ranges = self.sequence()
        ids, name = self.ids(len(tokens)), self.random.choice(NAMESPACES)
        checkpoints = self.checkpoints(0, len(tokens))
        named = {"namespace": name, "extra_keys": ranges, "checkpoints": checkpoints}
        self.both("insert", lambda _: (tokens, ids), **named)

    def insert_behind(self) -> None:
        if not self.leases:
            return
        lease = self.random.choice(self.leases)
        base, num_pages = lease[0].length, self.random.choice([0, 1, 1, 2, self.longest // self.size // 2])
        num_pages = min(num_pages, max(0, self.longest - base) // self.size + 1)
        tokens = self.pages(num_pages) + [0] * self.random.choice([0, 0, self.size - 1])
        ids, ranges = self.ids(len(tokens)), self.keys(self.longest)
        named = {"extra_keys": ranges, "checkpoints": self.checkpoints(base, len(tokens))}
        self.both("insert", lambda index: (tokens, ids, lease[index]), **named)
        assert plain(lease[0]) == plain(lease[1])

    def page_ids(self) -> None:
        if self.leases:
            lease, column = self.random.choice(self.leases), self.random.randrange(len(self.windows))
            self.both("page_ids", lambda index: (lease[index], column))

    def punch(self) -> None:
        if self.leases:
            lease, column = self.random.choice(self.leases), self.random.randrange(len(self.windows))
            end = self.random.choice([lease[0].length, self.random.randint(0, self.longest)])
            self.both("punch", lambda index: (lease[index], column, end))

    def replace(self) -> None:
        tokens, ranges = self.sequence()
        name = self.random.choice(NAMESPACES)
        there = self.pair[0].match(tokens, name, ranges).found
        tokens = tokens[: there if self.random.random() < 0.9 else None]
        ids = self.ids(len(tokens))
        self.both("replace", lambda _: (tokens, ids), namespace=name, extra_keys=ranges)

    def evict(self) -> None:
        column = self.random.randrange(len(self.windows))
        tally = self.pair[0].counts().columns[column]
        excess = self.pair[0].num_tokens - self.tokens_wanted
        few = self.random.randint(0, min(6 * self.size, tally.evictable * self.size))
        n = self.random.choice([few, few, few, min(max(0, excess), tally.evictable * self.size)])
        if self.random.random() < 0.03:
            n = self.random.choice([tally.evictable * self.size, tally.evictable * self.size + 1, 2**40])
        self.both("evict", lambda _: (n, column))

    def evict_states(self) -> None:
        most = self.pair[0].counts().states.evictable
        n = self.random.choice([0, 1, 2, most // 2, most + 1])
        self.both("evict_states", lambda _: (n,))

    def misuse(self) -> None:
        """One thing wrong with a call, which both refuse alike."""
        tokens, ranges = self.sequence()
        tokens = tokens + self.pages(1)
        lease = self.random.choice([None, *self.leases])
        base = 0 if lease is None else lease[0].length
        ids, checkpoints = self.ids(len(tokens)), self.checkpoints(base, len(tokens))
        which = self.random.choice(["token", "id", "lengths", "checkpoint", "state", "namespace", "lease"])
        named: dict[str, Any] = {"extra_keys": ranges, "checkpoints": checkpoints}
        if which == "token":
            tokens[self.random.randrange(len(tokens))] = self.random.choice([-1, -(2**31)])
        elif which == "id":
            column = ids if len(self.windows) == 1 else self.random.choice(ids)
            last = 2**31 // self.size - 1  # the last page whose slots are below 2^31
            column[self.random.randrange(len(tokens) // self.size)] = self.random.choice([0, -1, -2, last])
        elif which == "lengths":
            tokens = tokens + self.pages(1)
        elif which == "checkpoint":
            named["checkpoints"] = [*checkpoints, (base + self.random.randint(-1, len(tokens) + 1), 5)]
        elif which == "state":
            named["checkpoints"] = [(base + self.size, -1)]
        elif which == "namespace":
            named["namespace"] = self.random.choice(NAMESPACES)
        elif self.old:
            lease = self.random.choice(self.old)
            for call in ("release", "demote", "page_ids"):
                self.both(call, lambda index: (lease[index],))
            named["checkpoints"] = []
        self.both("insert", lambda index: (tokens, ids, lease and lease[index]), **named)

    def drop(self) -> None:
        name = self.random.choice(NAMESPACES)
        self.both("drop", lambda _: (name,))

    def nodes(self) -> None:
        most_nodes, most_tokens = self.random.randint(0, 9), self.random.randint(0, 2 * self.size)
        name = self.random.choice([None, *NAMESPACES])
        self.both("nodes", lambda _: (most_nodes, most_tokens, name))

    def reset(self) -> None:
        self.both("reset", lambda _: ())
        self.old, self.leases = self.leases, []

    def listen(self) -> None:
        """Begins or ends: whoever begins late is told what is there."""
        call = "unlisten" if self.is_listening else "listen"
        self.both(call, lambda index: (self.events[index].append,))
        self.is_listening = not self.is_listening

    def run(self, num_calls: int) -> None:
        calls, weights = [it[0] for it in self.calls], [it[1] for it in self.calls]
        for at, call in enumerate(self.random.choices(calls, weights, k=num_calls)):
            call()
            if at % 25 == 0:
                if self.pair[0].num_tokens > 2 * self.tokens_wanted:
                    self.evict()
                assert plain(self.pair[0].counts()) == plain(self.pair[1].counts())
                assert self.pair[0].namespaces() == self.pair[1].namespaces()
            if at % 300 == 0:
                self.compare()
        self.compare()

    def compare(self) -> None:
        for tree in self.pair:
            tree.check()
        left, right = (tree.nodes(LIMIT, LIMIT) for tree in self.pair)
        assert plain(left) == plain(right)


def drive(
    make: tuple[Any, Any], page_tokens: int, windows: Any, states: bool, longest: int, calls: int, seed: int
) -> Driver:
    pair = tuple(kind(page_tokens, windows=windows, states=states, capacity=seed % 3 * 500) for kind in make)
    driver = Driver((pair[0], pair[1]), windows, longest, seed)
    driver.run(calls)
    return driver
