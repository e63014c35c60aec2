"""`PrefixTree` in plain Python, the oracle of its tests. In: tokens; out: the ids of their pages.

The same calls, errors, nodes, order and events as in docs/tree.md, written for clarity, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    DoubleFreeError,
    NotHeldError,
    StaleError,
)
from pagoda.tree._values import NodeView, Removed, Stored, TreeCounts
from twin.arguments import (
    HOLE,
    Ints,
    as_array,
    as_bytes,
    as_int,
    as_items,
    elements_of,
    read_checkpoints,
    read_columns,
    read_tokens,
)
from twin.events import Bulletin, Listener
from twin.freeing import drop, evict
from twin.nodes import Forest, Node, Page
from twin.values import Freed, Inserted, Lease, Match
from twin.views import check, count, view

__all__ = ["Freed", "Inserted", "Lease", "Match", "PrefixTwin"]

MOST = 2**63 - 1


class PrefixTwin:
    """A prefix tree over pages of `page_tokens` tokens, with one column of page ids per paged group."""

    def __init__(
        self,
        page_tokens: int = 1,
        *,
        windows: Sequence[int | None] = (None,),
        states: bool = False,
        capacity: int = 0,
    ) -> None:
        try:
            size = as_int(page_tokens, "page_tokens", 1, 2**31 - 1)
            as_int(capacity, "capacity", 0, 2**31 - 1)
            if not isinstance(states, bool):
                raise ArgumentError("states: give True or False")
            given = as_items(windows, "windows", "windows, one per column: None, or 1 token or more")
            if not given:
                raise ArgumentError(
                    "windows: give a list or tuple of windows, one per column: None, or 1 token or more"
                )
            columns = tuple(None if it is None else as_int(it, "windows", 1, 2**31 - 1) for it in given)
        except ArgumentError as error:
            raise ConfigError(str(error)) from None
        self._forest = Forest(size, columns, states)
        self._bulletin = Bulletin(size)
        self._leases: dict[int, Lease] = {}
        self._epoch = self._last_lease = 0

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return self._forest.page_tokens

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each column in tokens, or None."""
        return self._forest.windows

    @property
    def has_states(self) -> bool:
        """Whether prefixes are usable only at checkpoints."""
        return self._forest.has_states

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens."""
        return self.counts().tokens.total

    @property
    def evictable_tokens(self) -> int:
        """Number of tokens that no lease protects."""
        return self.counts().tokens.evictable

    @property
    def protected_tokens(self) -> int:
        """Number of tokens that leases protect."""
        return self.counts().tokens.protected

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.counts().nodes

    @property
    def num_leaves(self) -> int:
        """Number of nodes without children."""
        return self.counts().leaves

    @property
    def num_leases(self) -> int:
        """Number of leases that are not released yet."""
        return len(self._leases)

    # Finding

    def match(self, tokens: Any, namespace: bytes | str = b"", extra_keys: Any = ()) -> Match:
        """Find the longest usable prefix. Nothing changes.

        Errors: OutOfRangeError for a token, ArgumentError.
        """
        forest, name = self._forest, as_bytes(namespace, "namespace")
        pages = elements_of(read_tokens(tokens), extra_keys, 0, self.page_tokens)
        path = forest.descend(forest.roots[name], pages) if name in forest.roots else []
        found = [page for node, n in path for page in node.pages[:n]]
        checkpoints = path[-1][0].checkpoints_to_end() if path else {}
        length = forest.usable(found, checkpoints)
        kept = tuple(found[: length // self.page_tokens])
        columns = tuple(as_array([page.ids[column] for page in kept]) for column in range(len(self.windows)))
        state_id = checkpoints.get(length) if length > 0 else None
        return Match(length, len(found) * self.page_tokens, columns, state_id, self, name, kept)

    def match_length(self, tokens: Any, namespace: bytes | str = b"", extra_keys: Any = ()) -> int:
        """Return the length of `match` alone."""
        return self.match(tokens, namespace, extra_keys).length

    def match_many(self, prompts: Any, namespaces: Any = None, extra_keys: Any = None) -> list[Match]:
        """As `match`, for a whole queue. ArgumentError: not one namespace or list of extra keys a prompt."""
        all_tokens = as_items(prompts, "prompts", "arrays of tokens")
        if namespaces is None or isinstance(namespaces, (bytes, str)):
            namespaces = [b"" if namespaces is None else namespaces] * len(all_tokens)
        if extra_keys is None:
            extra_keys = [()] * len(all_tokens)
        names = as_items(namespaces, "namespaces", "namespaces, one per prompt")
        ranges = as_items(extra_keys, "extra_keys", "lists of extra keys, one per prompt")
        if not len(names) == len(ranges) == len(all_tokens):
            raise ArgumentError("prompts: give one namespace and one list of extra keys per prompt")
        return [self.match(*call) for call in zip(all_tokens, names, ranges, strict=True)]

    def match_lengths(self, prompts: Any, namespaces: Any = None, extra_keys: Any = None) -> Ints:
        """Return the lengths of `match_many` alone."""
        return as_array([match.length for match in self.match_many(prompts, namespaces, extra_keys)])

    # Leases

    def _held(self, lease: Lease) -> Lease:
        """Return a lease of this tree that is held."""
        if not isinstance(lease, Lease) or lease._tree is not self:
            raise ArgumentError("lease: it belongs to another tree")
        if not lease._held:
            raise NotHeldError(f"lease {lease.number} was already released", lease.number, 0)
        if lease._epoch != self._epoch:
            raise StaleError(f"lease {lease.number} is from before the tree was reset")
        return lease

    def lock(self, match: Match) -> Lease:
        """Protect what is still cached of a match. Errors: ArgumentError for a match of another tree."""
        if not isinstance(match, Match) or match._tree is not self:
            raise ArgumentError("match: it belongs to another tree")
        forest = self._forest
        now = forest.tick()
        node = forest.root(match._namespace, now)
        path = forest.descend(node, [page.elements for page in match._pages])
        there: list[Page] = []
        for page in (page for at, n in path for page in at.pages[:n]):
            if page is not match._pages[len(there)]:
                break
            there.append(page)
        length = 0
        if there:
            length = forest.usable(there, path[-1][0].checkpoints_to_end())
            node = forest.split_at(path[-1][0], length)
        forest.protect(node.path(), now)
        self._last_lease += 1
        lease = Lease(self, self._last_lease, self._epoch, node, length)
        self._leases[lease.number] = lease
        return lease

    def demote(self, lease: Lease) -> None:
        """Make the lease's own tail the coldest once it is released. Errors: NotHeldError, StaleError."""
        self._held(lease)._demoted = True

    def release(self, lease: Lease) -> None:
        """Release a lease; what no other lease protects becomes evictable.

        Errors: DoubleFreeError the second time; StaleError after a reset; ArgumentError for a lease of
        another tree.
        """
        try:
            self._held(lease)
        except NotHeldError:
            message = f"lease {lease.number} was already released"
            raise DoubleFreeError(message, lease.number, 0) from None
        forest, path = self._forest, lease._node.path()
        now, tail, is_dropped = forest.tick(), list[Node](), path[-1].is_dropped
        if lease._demoted or is_dropped:
            forest.cold -= 1
        if lease._demoted and not is_dropped:
            tail = forest.own_tail(lease._node)
        forest.unprotect(path, now)
        forest.chill(tail)
        if is_dropped:
            forest.bury(path)
        forest.rejoin(lease._node)
        forest.tidy(path[-1])
        lease._held = False
        del self._leases[lease.number]

    def page_ids(self, lease: Lease, column: int = 0) -> Ints:
        """Return the page ids of a lease, [length / page_tokens]; −1 for holes. The tree still owns them.

        Errors: NotHeldError, StaleError, ArgumentError.
        """
        node = self._held(lease)._node
        column = self._column(column)
        return as_array([page.ids[column] for page in node.pages_to_end()])

    def _column(self, column: int) -> int:
        return as_int(column, "column", 0, len(self.windows) - 1)

    # Storing

    def insert(
        self,
        tokens: Any,
        page_ids: Any,
        lease: Lease | None = None,
        *,
        namespace: bytes | str | None = None,
        extra_keys: Any = (),
        checkpoints: Any = (),
    ) -> Inserted:
        """Store a sequence, or what follows a lease; `Inserted` says which ids the tree took.

        Errors: OutOfRangeError for a token or an id; StaleError for a lease from before a reset or whose
        namespace was dropped; NotHeldError; ArgumentError.
        """
        forest, size = self._forest, self.page_tokens
        name = as_bytes(b"" if namespace is None else namespace, "namespace")
        base, start = 0, forest.roots.get(name)
        if lease is not None:
            base, start = self._held(lease).length, lease._node
            if namespace is not None:
                raise ArgumentError("namespace: leave it out, the lease has its own")
            if start.path()[-1].is_dropped:
                raise StaleError(f"lease {lease.number} belongs to a namespace that was dropped: release it")
        given = read_tokens(tokens)
        pages = elements_of(given, extra_keys, base, size)
        columns = read_columns(page_ids, len(given), self.windows, size)
        wanted = read_checkpoints(checkpoints, self.has_states, base, base + len(pages) * size, size)

        now = forest.tick()
        path = forest.descend(start, pages) if start is not None else []
        matched = sum(n for _, n in path)
        to = len(pages)
        if self.has_states:
            to = max([matched, *((length - base) // size for length, _ in wanted)])
        filled = self._fill(path, columns, base // size)
        taken = self._add_checkpoints(path, wanted)
        last = path[-1][0] if path else start
        if to > matched:
            last = forest.root(name, now) if last is None else last
            new = [(length, state) for length, state in wanted if length > base + matched * size]
            ids = [[ids[at] for ids in columns] for at in range(matched, to)]
            stored = [Page(*it) for it in zip(pages[matched:to], ids, strict=True)]
            last = self._append(forest.split_at(last, base + matched * size), stored, new, lease, now)
            taken += new
        length = 0
        if last is not None:
            reach = last.pages_to_end()[: base // size + to]
            length = forest.usable(reach, last.checkpoints_to_end())
            if lease is not None:
                self._move(lease, forest.split_at(last, length), length, now)
            # What is stored makes everything above it as hot: a child is never hotter than its parent.
            if lease is None or to > matched:
                used = last if to > matched else forest.split_at(last, length)
                forest.touch(used.path(), now)
                forest.rejoin(used)
        self._bulletin.deliver()
        states = as_array([state for _, state in taken])
        return Inserted(base + matched * size, base + to * size, length, filled, states)

    def _fill(self, path: list[tuple[Node, int]], columns: list[list[int]], base: int) -> tuple[Ints, ...]:
        """Fill the holes of a path that begins at page `base`; return the pages filled in each column."""
        filled: list[list[int]] = [[] for _ in columns]
        begin = 0
        for node, n in path:
            for column, ids in enumerate(columns):
                for index, page in enumerate(node.pages[:n]):
                    id = ids[begin + index]
                    if page.ids[column] == HOLE and id != HOLE:
                        page.ids[column] = id
                        filled[column].append(base + begin + index)
                        only = [[id if other == column else HOLE] for other in range(len(columns))]
                        self._bulletin.tell(Stored, node, index, [page], only, ids_only=True)
            begin += n
        return tuple(as_array(numbers) for numbers in filled)

    def _add_checkpoints(
        self, path: list[tuple[Node, int]], wanted: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Add checkpoints on cached pages; return those that were taken."""
        taken = []
        for length, state in wanted:
            for node, n in path:
                index = (length - node.begin) // self.page_tokens
                if 0 < index <= n and length not in node.checkpoints:
                    node.checkpoints[length] = state
                    taken.append((length, state))
                    nothing: list[list[int]] = [[] for _ in self.windows]
                    taken_here = [(length, state)]
                    self._bulletin.tell(Stored, node, index, [], nothing, taken_here, ids_only=True)
        return taken

    def _append(
        self, last: Node, pages: list[Page], states: list[tuple[int, int]], lease: Lease | None, now: int
    ) -> Node:
        """Append pages after the end of a node; return the node that they are in."""
        is_own = lease is not None and lease._node is last
        node = self._forest.grow_or_add(last, 1 if is_own else 0, now)
        if node is not last:
            last.by_first[pages[0].elements] = node
        begin = len(node.pages)
        node.pages += pages
        node.checkpoints |= states
        self._bulletin.tell_run(Stored, node, begin, states)
        return node

    def _move(self, lease: Lease, node: Node, length: int, now: int) -> None:
        """Let a lease end at the end of this node."""
        before, after = lease._node.path(), node.path()
        self._forest.protect([it for it in after if it not in before], now)
        self._forest.unprotect([it for it in before if it not in after], now)
        lease._node, lease.length = node, length

    def replace(
        self, tokens: Any, page_ids: Any, *, namespace: bytes | str = b"", extra_keys: Any = ()
    ) -> tuple[Ints, ...]:
        """Replace the ids of cached pages; the caller owns the old ones, one array per column.

        Errors: ArgumentError if not all whole pages are cached; OutOfRangeError for a token or an id.
        """
        forest, name = self._forest, as_bytes(namespace, "namespace")
        given = read_tokens(tokens)
        pages = elements_of(given, extra_keys, 0, self.page_tokens)
        columns = read_columns(page_ids, len(given), self.windows, self.page_tokens)
        path = forest.descend(forest.roots[name], pages) if name in forest.roots else []
        places = [(node, index) for node, n in path for index in range(n)]
        if len(places) < len(pages):
            raise ArgumentError(f"tokens: only {len(places)} of {len(pages)} pages are in the tree")
        old = [node.pages[index] for node, index in places]
        new = [Page(it, list(ids)) for it, *ids in zip(pages, *columns, strict=False)]
        for page, (node, index) in zip(new, places, strict=True):
            node.pages[index] = page
        for node, _ in path:
            node.family = object()
        if places:
            self._bulletin.tell_all(Removed, name, old)
            self._bulletin.tell_all(Stored, name, new)
        self._bulletin.deliver()
        return tuple(as_array([page.ids[column] for page in old]) for column in range(len(columns)))

    def punch(self, lease: Lease, column: int, end: int) -> Ints:
        """Turn a window column's pages before `end` into holes; the caller owns their ids.

        Only in runs that no other lease protects. Errors: NotHeldError, StaleError, ArgumentError.
        """
        path = self._held(lease)._node.path()
        column = self._column(column)
        if self.windows[column] is None:
            raise ArgumentError(f"column: {column} has no window, so all of its pages are needed")
        end = as_int(end, "end", 0, MOST)
        punched: list[Page] = []
        for node in reversed(path):
            for index, page in enumerate(node.pages):
                is_before = node.begin + (index + 1) * self.page_tokens <= end
                if is_before and node.leases == 1 and page.ids[column] != HOLE:
                    punched.append(page)
                    only = [[id if other == column else HOLE] for other, id in enumerate(page.ids)]
                    self._bulletin.tell(Removed, node, index, [page], only, ids_only=True)
        ids = as_array([page.ids[column] for page in punched])
        for page in punched:
            page.ids[column] = HOLE
        self._bulletin.deliver()
        return ids

    # Freeing

    def evict(self, n: int, column: int = 0) -> Freed:
        """Free ⌈n / page_tokens⌉ pages of a column from the coldest leaves; the caller owns them.

        Errors: CapacityError if fewer are evictable.
        """
        n, column = as_int(n, "n", 0, MOST), self._column(column)
        wanted, counts = -(-n // self.page_tokens), self.counts()
        there = counts.columns[column]
        if wanted > there.evictable:
            if column == 0 and self.windows[0] is None:
                raise CapacityError("evictable tokens", n, counts.tokens.evictable, counts.tokens.total)
            raise CapacityError(f"evictable pages of column {column}", wanted, there.evictable, there.total)

        freed = evict(self._forest, self._bulletin, lambda harvest: len(harvest.columns[column]) >= wanted)
        self._bulletin.deliver()
        return freed

    def evict_states(self, n: int) -> Freed:
        """Like `evict`, until n checkpoints are freed. Errors: ArgumentError for a tree without states."""
        if not self.has_states:
            raise ArgumentError("evict_states: this tree was built without states")
        n, there = as_int(n, "n", 0, MOST), self.counts().states
        if n > there.evictable:
            raise CapacityError("evictable states", n, there.evictable, there.total)
        freed = evict(self._forest, self._bulletin, lambda harvest: len(harvest.states) >= n)
        self._bulletin.deliver()
        return freed

    def drop(self, namespace: bytes | str) -> Freed:
        """Forget a namespace; the caller owns the freed ids.

        What leases protect stays theirs until they are released.
        """
        name = as_bytes(namespace, "namespace")
        freed = drop(self._forest, self._bulletin, name)
        self._bulletin.deliver()
        return freed

    def reset(self) -> None:
        """Forget everything, leases included; the caller owns all ids again."""
        if self._forest.all_nodes():
            self._bulletin.tell_reset()
        self._forest.clear()
        self._leases = {}
        self._epoch += 1
        self._bulletin.deliver()

    # Inspecting

    def namespaces(self) -> list[bytes]:
        """Return the namespaces in use, sorted."""
        return sorted(self._forest.roots)

    def counts(self) -> TreeCounts:
        """Return what is cached, and how it divides."""
        return count(self._forest, len(self._leases))

    def nodes(
        self, max_nodes: int = 1000, max_tokens: int = 32, namespace: bytes | str | None = None
    ) -> list[NodeView]:
        """Return the first nodes, with their first tokens."""
        max_nodes, max_tokens = (
            as_int(max_nodes, "max_nodes", 0, MOST),
            as_int(max_tokens, "max_tokens", 0, MOST),
        )
        name = None if namespace is None else as_bytes(namespace, "namespace")
        return view(self._forest, max_tokens, name)[:max_nodes]

    def check(self) -> None:
        """Recompute what is kept twice. Errors: InvariantError for the first difference."""
        check(self._forest, self._leases.values())

    def listen(self, listener: Listener) -> None:
        """Report what can be found, then each later event. Errors: ArgumentError if it is not callable."""
        roots = sorted(self._forest.roots.values(), key=lambda root: root.namespace)
        self._bulletin.add(listener, [node for root in roots for node in root.tree()[1:]])

    def unlisten(self, listener: Listener) -> None:
        """Stop calling a listener. Errors: ArgumentError if it does not listen."""
        self._bulletin.remove(listener)
