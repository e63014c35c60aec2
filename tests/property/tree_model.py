"""A prefix tree that is no tree: a dict of prefixes, and leases as a list. What `PrefixTree` must answer.

In: the calls; out: every result, event and id they must give. A prefix is (space, pages), where a space is
one life of a namespace and a page is the number of what stands in it. There are no runs here: where
the result depends on how pages are grouped into runs, the model gives them one by one.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twin.keys import page_keys, ranges_of

HOLE = -1
Pages = tuple[int, ...]
Prefix = tuple[int, Pages]
# (kind, namespace, position, parent, keys, tokens, extra keys, columns, states, ids_only)
Event = tuple[Any, ...]


@dataclass
class Page:
    ids: list[int]  # one a column
    time: int  # of its last use
    order: int  # counts up as pages are stored
    birth: object = field(default_factory=object)  # another one after a replace


@dataclass
class Lease:
    space: int
    pages: Pages
    is_demoted: bool = False


@dataclass
class Gone:
    """A page that was freed, or that nobody finds any more."""

    prefix: Prefix
    ids: list[int]
    states: list[tuple[int, int]]
    is_free: bool = True


class TreeModel:
    def __init__(self, page_tokens: int, windows: Sequence[int | None], has_states: bool) -> None:
        self.page_tokens, self.windows, self.has_states = page_tokens, windows, has_states
        self.contents: dict[tuple[Any, ...], int] = {}  # what stands in a page → its number
        self.clock = self.cold = 0
        self.order, self.space_numbers = itertools.count(), itertools.count()
        self.names: dict[int, bytes] = {}  # space → namespace
        self.forget()

    def forget(self) -> None:
        self.pages: dict[Prefix, Page] = {}
        self.states: dict[Prefix, int] = {}
        self.leases: dict[int, Lease] = {}
        self.living: dict[bytes, int] = {}  # namespace → space

    # Words

    def space(self, namespace: bytes) -> int:
        if namespace not in self.living:
            self.living[namespace] = next(self.space_numbers)
            self.names[self.living[namespace]] = namespace
        return self.living[namespace]

    def read(self, tokens: list[int], extra_keys: list[tuple[int, int, bytes]], base: int = 0) -> Pages:
        """The whole pages of tokens that stand at base, base + 1, …"""
        elements: list[Any] = []
        for position, token in enumerate(tokens, base):
            over = [(key, begin) for begin, end, key in extra_keys if begin <= position < end]
            elements.append((token, *over))
        cuts = range(0, len(tokens) - self.page_tokens + 1, self.page_tokens)
        pages = [tuple(elements[at : at + self.page_tokens]) for at in cuts]
        return tuple(self.contents.setdefault(page, len(self.contents)) for page in pages)

    def tokens(self, page: int) -> list[int]:
        return [element[0] for element in list(self.contents)[page]]

    def extra_keys(self, pages: Pages) -> list[Any]:
        """The (key, begin) over each token, None where there is none."""
        contents = list(self.contents)
        return [it[1] if len(it) > 1 else None for page in pages for it in contents[page]]

    def length(self, pages: Pages) -> int:
        return len(pages) * self.page_tokens

    def there(self, space: int, pages: Pages) -> Pages:
        """The longest part that is stored."""
        n = 0
        while n < len(pages) and (space, pages[: n + 1]) in self.pages:
            n += 1
        return pages[:n]

    def is_usable(self, space: int, pages: Pages) -> bool:
        if not pages:
            return True
        length = self.length(pages)
        for column, window in enumerate(self.windows):
            for token in range(0 if window is None else max(0, length - window + 1), length):
                page = self.pages[space, pages[: token // self.page_tokens + 1]]
                if window is not None and page.ids[column] == HOLE:
                    return False
        return not self.has_states or (space, pages) in self.states

    def usable(self, space: int, pages: Pages) -> Pages:
        """The longest usable part."""
        return next(pages[:n] for n in range(len(pages), -1, -1) if self.is_usable(space, pages[:n]))

    def ids(self, space: int, pages: Pages) -> tuple[list[int], ...]:
        path = [self.pages[space, pages[:n]] for n in range(1, len(pages) + 1)]
        return tuple([page.ids[column] for page in path] for column in range(len(self.windows)))

    def holders(self, prefix: Prefix) -> int:
        space, pages = prefix
        return sum(it.space == space and it.pages[: len(pages)] == pages for it in self.leases.values())

    def continuations(self, prefix: Prefix) -> list[Prefix]:
        space, pages = prefix
        return [it for it in self.pages if it[0] == space and it[1][:-1] == pages]

    def event(
        self,
        kind: str,
        prefix: Prefix,
        num_pages: int,
        columns: Any,
        states: Sequence[tuple[int, int]] = (),
        ids_only: bool = False,
    ) -> Event:
        """About the last `num_pages` of a prefix."""
        space, pages = prefix
        before, name = len(pages) - num_pages, self.names[space]
        position, contents = before * self.page_tokens, list(self.contents)
        elements = [[(it[0], *it[1]) if len(it) > 1 else it[0] for it in contents[page]] for page in pages]
        keys = page_keys(name, elements)
        parent = keys[before - 1] if before else None
        told = [element for page in elements[before:] for element in page]
        tokens = [token for page in pages[before:] for token in self.tokens(page)]
        lists = tuple(list(ids) for ids in columns)
        ranges = ranges_of(told, position)
        return (kind, name, position, parent, keys[before:], tokens, ranges, lists, tuple(states), ids_only)

    # Calls. Each is made only with what is right.

    def match(self, namespace: bytes, pages: Pages) -> dict[str, Any]:
        space = self.space(namespace)
        found = self.there(space, pages)
        usable = self.usable(space, found)
        births = [self.pages[space, usable[:n]].birth for n in range(1, len(usable) + 1)]
        return {
            "length": self.length(usable),
            "found": self.length(found),
            "columns": self.ids(space, usable),
            "state_id": self.states.get((space, usable)) if usable else None,
            "key": (namespace, usable, births),
        }

    def lock(self, number: int, key: tuple[bytes, Pages, list[object]]) -> int:
        """The lease's length."""
        self.clock += 1
        namespace, pages, births = key
        space = self.space(namespace)
        there = self.there(space, pages)
        n = 0
        while n < len(there) and self.pages[space, there[: n + 1]].birth is births[n]:
            n += 1
        self.leases[number] = Lease(space, self.usable(space, there[:n]))
        return self.length(self.leases[number].pages)

    def touch(self, space: int, pages: Pages, time: int) -> None:
        for n in range(1, len(pages) + 1):
            if not self.holders((space, pages[:n])):
                self.pages[space, pages[:n]].time = time

    def release(self, number: int) -> None:
        self.clock += 1
        lease = self.leases[number]
        tail: list[Prefix] = []
        is_dropped = lease.space not in self.living.values()
        if lease.is_demoted or is_dropped:
            self.cold -= 1
        if lease.is_demoted and not is_dropped:
            for n in range(len(lease.pages), 0, -1):
                prefix = (lease.space, lease.pages[:n])
                if self.holders(prefix) > 1 or set(self.continuations(prefix)) - set(tail):
                    break
                tail.append(prefix)
        del self.leases[number]
        self.touch(lease.space, lease.pages, self.clock)
        for prefix in tail:
            self.pages[prefix].time = self.cold
        for n in range(len(lease.pages) if is_dropped else 0, 0, -1):
            prefix = (lease.space, lease.pages[:n])
            if self.holders(prefix):
                break
            below = [self.pages[it].time for it in self.continuations(prefix)]
            self.pages[prefix].time = max(below, default=self.cold)

    def insert(
        self,
        namespace: bytes,
        new: Pages,
        columns: Sequence[list[int]],
        number: int | None,
        checkpoints: Sequence[tuple[int, int]],
    ) -> tuple[dict[str, Any], list[Event], list[Event]]:
        """The result, the events of filled holes (in any order), and those that follow."""
        self.clock += 1
        lease = None if number is None else self.leases[number]
        space = self.space(namespace) if lease is None else lease.space
        base = () if lease is None else lease.pages
        sequence = base + new
        present = self.there(space, sequence)
        fills, events = list[Event](), list[Event]()
        filled, taken = [list[int]() for _ in self.windows], list[int]()
        for n in range(len(base), len(present)):
            ids = self.pages[space, sequence[: n + 1]].ids
            for column, given in enumerate(columns):
                id = given[n - len(base)]
                if ids[column] == HOLE and id != HOLE:
                    ids[column] = id
                    filled[column].append(n)
                    only = [[id if other == column else HOLE] for other in range(len(columns))]
                    fills.append(self.event("Stored", (space, sequence[: n + 1]), 1, only, (), True))
        for length, state in checkpoints:
            prefix = (space, sequence[: length // self.page_tokens])
            if length <= self.length(present) and prefix not in self.states:
                self.states[prefix] = state
                taken.append(state)
                nothing: list[list[int]] = [[] for _ in columns]
                events.append(self.event("Stored", prefix, 0, nothing, [(length, state)], True))
        stored = sequence
        if self.has_states:
            last = max([length for length, _ in checkpoints], default=0) // self.page_tokens
            stored = sequence[: max(last, len(present))]
        for n in range(len(present), len(stored)):
            ids = [given[n - len(base)] for given in columns]
            self.pages[space, sequence[: n + 1]] = Page(ids, self.clock, next(self.order))
        if stored != present:
            added = [it for it in checkpoints if it[0] > self.length(present)]
            self.states |= {(space, sequence[: length // self.page_tokens]): state for length, state in added}
            taken += [state for _, state in added]
            given = [ids[len(present) - len(base) : len(stored) - len(base)] for ids in columns]
            num_pages = len(stored) - len(present)
            events.append(self.event("Stored", (space, stored), num_pages, given, added))
        usable = self.usable(space, stored)
        if lease is not None:
            lease.pages = usable
            self.touch(space, base, self.clock)  # it may have become shorter
        else:
            self.touch(space, usable, self.clock)
        if stored != present:
            self.touch(space, stored, self.clock)
        lengths = {"present": present, "stored": stored, "length": usable}
        result: dict[str, Any] = {name: self.length(pages) for name, pages in lengths.items()}
        return result | {"filled": tuple(filled), "states": taken}, fills, events

    def replace(
        self, namespace: bytes, pages: Pages, columns: Sequence[list[int]]
    ) -> tuple[tuple[list[int], ...], list[Event]]:
        space = self.space(namespace)
        old = self.ids(space, pages)
        given = [ids[: len(pages)] for ids in columns]
        events = [
            self.event(kind, (space, pages), len(pages), ids, (), True)
            for kind, ids in (("Removed", old), ("Stored", given))
        ]
        for n in range(len(pages)):
            page = self.pages[space, pages[: n + 1]]
            page.ids, page.birth = [ids[n] for ids in columns], object()
        return old, events if pages else []

    def punch(self, number: int, column: int, end: int) -> tuple[list[int], list[Event]]:
        lease, ids, events = self.leases[number], list[int](), list[Event]()
        punched: list[Page] = []
        for n in range(1, len(lease.pages) + 1):
            prefix = (lease.space, lease.pages[:n])
            page = self.pages[prefix]
            is_own = self.holders(prefix) == 1 and n * self.page_tokens <= end
            if is_own and page.ids[column] != HOLE:
                ids.append(page.ids[column])
                gone = [[id if at == column else HOLE] for at, id in enumerate(page.ids)]
                if lease.space in self.living.values():
                    events.append(self.event("Removed", prefix, 1, gone, (), True))
                punched.append(page)
        for page in punched:
            page.ids[column] = HOLE
        return ids, events

    # Freeing: pages one by one.

    def remove(self, prefix: Prefix) -> Gone:
        page = self.pages.pop(prefix)
        states = [(self.length(prefix[1]), self.states.pop(prefix))] if prefix in self.states else []
        return Gone(prefix, page.ids, states)

    def evict(self, wanted: int, column: int | None) -> list[Gone]:
        """Until so many pages of a column, or so many states, came free; in the order they go."""
        gone: list[Gone] = []

        def so_far() -> int:
            if column is None:
                return sum(len(it.states) for it in gone)
            return sum(it.ids[column] != HOLE for it in gone)

        while so_far() < wanted:
            continued = {(space, pages[:-1]) for space, pages in self.pages}
            leaves = [it for it in self.pages if it not in continued and not self.holders(it)]
            prefix = min(leaves, key=lambda it: (self.pages[it].time, -len(it[1])))
            gone.append(self.remove(prefix))
            # What no checkpoint can resume from goes with it.
            while self.has_states:
                prefix = (prefix[0], prefix[1][:-1])
                if not prefix[1] or prefix in self.states or self.continuations(prefix):
                    break
                gone.append(self.remove(prefix))
        return gone

    def drop(self, namespace: bytes) -> list[Gone]:
        """All of it, in the order told; what leases hold is not free."""
        space = self.space(namespace)
        del self.living[namespace]
        gone: list[Gone] = []
        ahead: list[Prefix] = [(space, ())]
        while ahead:
            prefix = ahead.pop()
            ahead += sorted(self.continuations(prefix), key=lambda it: self.pages[it].order)
            if not prefix[1]:
                continue
            if self.holders(prefix):
                states = [(self.length(prefix[1]), self.states[prefix])] if prefix in self.states else []
                gone.append(Gone(prefix, list(self.pages[prefix].ids), states, is_free=False))
            else:
                gone.append(self.remove(prefix))
        return gone

    # Counts

    def tallies(self) -> dict[str, Any]:
        held = {prefix for prefix in self.pages if self.holders(prefix)}

        def tally(prefixes: list[Prefix], unit: int = 1) -> tuple[int, int, int]:
            protected = sum(it in held for it in prefixes)
            return (len(prefixes) * unit, (len(prefixes) - protected) * unit, protected * unit)

        continued = {(space, pages[:-1]) for space, pages in self.pages}
        return {
            "tokens": tally(list(self.pages), self.page_tokens),
            "columns": tuple(
                tally([prefix for prefix, page in self.pages.items() if page.ids[column] != HOLE])
                for column in range(len(self.windows))
            ),
            "states": tally(list(self.states)),
            "leaves": sum(prefix not in continued for prefix in self.pages),
            "leases": len(self.leases),
        }

    def namespaces(self) -> list[bytes]:
        used = {space for space, _ in self.pages} | {lease.space for lease in self.leases.values()}
        return sorted(name for name, space in self.living.items() if space in used)
