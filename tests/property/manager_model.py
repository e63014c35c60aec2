"""What docs/manager.md promises, in plain Python. In: the calls a manager gets; out: what it must answer.

`Contents` names what a token's keys and values are: a number for each (namespace, extra keys, tokens so far).
`Model` has rows, leases and cached pages as lists and dicts. Where no group has a window it knows every hit,
every eviction and every count exactly; where one has, it knows what a hit may and must at least be.
With states a hit also needs a checkpoint, and the model knows which ones there are (`Checkpoints`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.checkpoints.model import NEAR_PAGES, NEAR_TOKENS, cuts_of
from bench.checkpoints.order import Kind
from property.checkpoint_model import Checkpoints, Save

Ranges = list[tuple[int, int, bytes]]


class Contents:
    """Numbers for prefixes: equal if and only if namespace, extra keys and all tokens are. 0 is nothing's."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.drops: dict[bytes, int] = {}  # a namespace that was dropped is another one afterwards

    def of(self, space: bytes, ranges: Ranges, tokens: Iterable[int], drops: int | None = None) -> list[int]:
        at, found = self.number((space, self.drops.get(space, 0) if drops is None else drops)), []
        for position, token in enumerate(tokens):
            key = next(((k, b) for b, e, k in ranges if b <= position < e), None)
            at = self.number((at, token, key))
            found.append(at)
        return found

    def number(self, of: object) -> int:
        return self.numbers.setdefault(of, len(self.numbers) + 1)


@dataclass(frozen=True)
class GroupModel:
    name: str
    page_tokens: int
    window: int | None
    total: int
    ratio: int = 1  # tokens per entry

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def first_read(self, committed: int) -> int:
        """The first position that a query at `committed` reads."""
        return 0 if self.window is None else max(0, committed - self.window + 1)


@dataclass
class RowModel:
    """A running request. `known` are its tokens as far as drawn, `steps` in which step each was planned."""

    space: bytes
    ranges: Ranges
    prompt: list[int]
    known: list[int]
    reserved: int
    committed: int
    path: list[int]  # cached pages that its lease covers, by their contents
    ends: list[int]  # a group: pages it has in its table
    steps: list[int]
    drops: int  # of its namespace, before it came
    named: int  # the last step whose delta names it: its table is written, or its pages are copied
    is_stored: bool = True  # what it commits is cached
    is_fork: bool = False
    duplicates: set[int] = field(default_factory=set)  # pages of its path of which it has its own copy
    is_bad: bool = False  # depends on pages that were invalidated
    cuts: dict[int, Kind] = field(default_factory=dict)  # where to save its prefill: the kind of checkpoint
    saves: list[Save] = field(default_factory=list)
    prompt_length: int = 0  # beyond it, it decodes
    tail: Kind = Kind.FRESH  # the kind of its tails; continued if it goes on where another path ended

    @property
    def computed(self) -> int:
        return len(self.steps)


@dataclass
class CachedPage:
    depth: int
    parent: int  # the page before it; 0 if there is none
    num_leases: int = 0
    used: int = 0


@dataclass
class Waiting:
    """What a row left. Steps up to `fence` may use it."""

    fence: int
    path: list[int]
    own: list[int]


@dataclass
class Model:
    groups: list[GroupModel]
    num_rows: int
    max_tokens: int
    watermark: int
    resume_step: int
    contents: Contents = field(default_factory=Contents)
    rows: dict[int, RowModel] = field(default_factory=dict)
    cached: dict[int, CachedPage] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    given: dict[int, set[int]] = field(default_factory=dict)  # a group: pages of nobody's row
    taken_back: list[tuple[int, int, int]] = field(default_factory=list)  # such pages: fence, group, number
    step: int = 1
    passed: int = 0
    clock: int = 0
    admitted: int = 0
    admitted_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    is_blurred: bool = False  # something was dropped or invalidated: what is left of it is not modelled
    checkpoints: Checkpoints | None = None  # with states
    to_save: list[tuple[int, Save]] = field(default_factory=list)  # rows and saves of the next delta

    @property
    def is_exact(self) -> bool:
        """Without groups, the tree forgets tokens that no checkpoint needs."""
        is_plain = len(self.groups) > 0 and all(group.window is None for group in self.groups)
        return is_plain and not self.is_blurred

    def add_checkpoints(self, total: int, interval: int) -> None:
        step = self.resume_step
        self.checkpoints = Checkpoints(
            total, max(step, interval - interval % step), lambda key: self.cached[key].parent
        )

    def values(self, row: RowModel, end: int) -> list[int]:
        """The contents of a row's first tokens."""
        return self.contents.of(row.space, row.ranges, row.known[:end], row.drops)

    def columns(self, g: int) -> int:
        return self.resume_step // self.groups[g].page_tokens

    # Counting

    def own(self, row: RowModel, g: int) -> int:
        return row.ends[g] - (len(row.path) - len(row.duplicates)) * self.columns(g)

    def counts(self, g: int) -> tuple[int, int, int, int, int]:
        """Pages of a group: free, evictable, leased, running, waiting."""
        n = self.columns(g)
        leased = len({key for row in self.rows.values() for key in row.path}) * n
        evictable = sum(page.num_leases == 0 for page in self.cached.values()) * n
        running = sum(self.own(row, g) for row in self.rows.values()) + len(self.given.get(g, ()))
        # What only rows that ended have leased waits as what was theirs alone.
        waiting = sum(it.own[g] for it in self.waiting) + len(self.cached) * n - leased - evictable
        waiting += sum(num_pages for _, which, num_pages in self.taken_back if which == g)
        return (
            self.groups[g].total - evictable - leased - running - waiting,
            evictable,
            leased,
            running,
            waiting,
        )

    def free_rows(self) -> int:
        return self.num_rows - len(self.rows) - len(self.waiting)

    def has_room(self, needed: list[int], spare: int, locked: int = 0) -> bool:
        for g, n in enumerate(needed):
            free, evictable, *_ = self.counts(g)
            if n + locked > 0 and n + spare > free + evictable - locked * self.columns(g):
                return False
        return True

    def make_room(self, needed: list[int]) -> None:
        for g, n in enumerate(needed):
            while self.counts(g)[0] < n:
                self.evict_one()

    def evict_one(self) -> None:
        """The page used longest ago, of one use the deepest."""
        loose = [(page.used, -page.depth, key) for key, page in self.cached.items() if page.num_leases == 0]
        key = min(loose)[2]
        del self.cached[key]
        if self.checkpoints is not None:
            self.checkpoints.lose(key)
        self.evicted_pages += sum(self.columns(g) for g in range(len(self.groups)))

    # Requests

    def page_keys(self, space: bytes, ranges: Ranges, tokens: list[int]) -> list[int]:
        """The contents of the last token of each whole page."""
        return self.contents.of(space, ranges, tokens)[self.resume_step - 1 :: self.resume_step]

    def found_path(self, space: bytes, ranges: Ranges, tokens: list[int], most: int) -> list[int]:
        path = []
        for key in self.page_keys(space, ranges, tokens[:most]):
            if key not in self.cached:
                break
            path.append(key)
        return path

    def hit_path(self, space: bytes, ranges: Ranges, tokens: list[int], most: int) -> list[int]:
        path = self.found_path(space, ranges, tokens, most)
        while self.checkpoints is not None and path and path[-1] not in self.checkpoints.kept:
            path.pop()
        return path

    def cuts(self, length: int, hit: int, branch: int, tail: Kind) -> dict[int, Kind]:
        """Where a prompt that is stored should be saved. `branch`: where it parts from
        others, or ends and others go on; 0: nowhere."""
        if self.checkpoints is None or self.checkpoints.total == 0:
            return {}
        last = (length - 1) // self.resume_step * self.resume_step
        return cuts_of(hit, last, self.checkpoints.interval, branch, tail)

    def start_state(self, row: RowModel, hit: int, found: list[int], goes_on: bool, most: int) -> None:
        """What a row that is admitted finds: pages as `found`, with others behind them if the path goes on,
        and a checkpoint at `hit`."""
        if self.checkpoints is None:
            return
        end = len(found) * self.resume_step
        parts = goes_on and len(found) < most // self.resume_step
        row.tail = Kind.CONTINUED if end > 0 and not goes_on else Kind.FRESH
        if row.is_stored:
            is_repeat = goes_on and end >= (len(row.prompt) - 1) // self.resume_step * self.resume_step
            row.cuts = self.cuts(len(row.prompt), hit, end if parts or is_repeat else 0, row.tail)
        if hit:
            is_near, is_close = end - hit <= NEAR_TOKENS, (end - hit) // self.resume_step <= NEAR_PAGES
            self.checkpoints.resume(found[hit // self.resume_step - 1], is_near, parts and is_close)

    def admission(self, path: list[int], target: int) -> tuple[list[int], int]:
        """Pages that an admission needs, and cached ones that its hit would lock."""
        hit = len(path) * self.resume_step
        needed = [group.pages_for(target) - hit // group.page_tokens for group in self.groups]
        return needed, sum(self.cached[key].num_leases == 0 for key in path)

    def can_admit(
        self, space: bytes, ranges: Ranges, tokens: list[int], reserve: int | None, most: int
    ) -> bool:
        """`most`: tokens that may hit."""
        path = self.hit_path(space, ranges, tokens, most)
        hit = len(path) * self.resume_step
        needed, locked = self.admission(path, len(tokens) if reserve is None else hit + reserve)
        return self.free_rows() > 0 and self.has_room(needed, self.watermark, locked)

    def admit(
        self,
        number: int,
        space: bytes,
        ranges: Ranges,
        tokens: list[int],
        hit: int,
        reserved: int,
        is_stored: bool,
        most: int,
    ) -> RowModel:
        """`hit` is what the manager said: with windows the model takes its word."""
        assert number not in self.rows
        found = self.found_path(space, ranges, tokens, most) if self.is_exact else []
        goes_on = any(page.parent == (found[-1] if found else 0) for page in self.cached.values())
        path = self.page_keys(space, ranges, tokens)[: hit // self.resume_step]
        if self.is_exact:
            needed, _ = self.admission(path, reserved)
            self.lease(path)
            self.make_room(needed)
        ends = [group.pages_for(reserved) for group in self.groups]
        row = RowModel(
            space,
            ranges,
            tokens,
            list(tokens),
            reserved,
            hit,
            path,
            ends,
            [0] * hit,
            self.contents.drops.get(space, 0),
            self.step,
            is_stored,
            prompt_length=len(tokens),
        )
        self.rows[number] = row
        if self.is_exact:
            self.start_state(row, hit, found, goes_on, most)
        self.admitted += 1
        self.admitted_tokens += len(tokens)
        self.hit_tokens += hit
        return row

    def lease(self, path: list[int]) -> None:
        for key in path:
            self.cached[key].num_leases += 1

    def needed_for(self, numbers: list[int], counts: list[int]) -> list[int]:
        needed = [0] * len(self.groups)
        for number, n in zip(numbers, counts, strict=True):
            row = self.rows[number]
            for g, group in enumerate(self.groups):
                needed[g] += max(0, group.pages_for(row.reserved + n) - row.ends[g])
        return needed

    def num_reservable(self, numbers: list[int], counts: list[int]) -> int:
        for i, (number, n) in enumerate(zip(numbers, counts, strict=True)):
            if self.rows[number].reserved + n > self.max_tokens:
                return i
            if not self.has_room(self.needed_for(numbers[: i + 1], counts[: i + 1]), 0):
                return i
        return len(numbers)

    def reserve(self, numbers: list[int], counts: list[int]) -> None:
        if self.is_exact:
            self.make_room(self.needed_for(numbers, counts))
        for number, n in zip(numbers, counts, strict=True):
            row = self.rows[number]
            row.reserved += n
            ends = [
                max(end, group.pages_for(row.reserved))
                for end, group in zip(row.ends, self.groups, strict=True)
            ]
            if ends != row.ends:
                row.ends, row.named = ends, self.step

    def commit(self, number: int, n: int) -> list[int]:
        """The tokens to say."""
        row = self.rows[number]
        tokens = row.known[row.committed : row.committed + n]
        row.committed += n
        if not row.is_stored:
            return tokens
        keys = self.values(row, row.committed)[self.resume_step - 1 :: self.resume_step]
        for depth in range(len(row.path), len(keys)):
            key = keys[depth]
            if self.is_exact:
                if key in self.cached:
                    row.duplicates.add(depth)
                parent = keys[depth - 1] if depth else 0
                self.cached.setdefault(key, CachedPage(depth, parent)).num_leases += 1
            row.path.append(key)
        self.exchange(row)
        if self.is_exact and self.checkpoints is not None:
            self.keep_saves(row)
        return tokens

    def plan_save(self, number: int) -> None:
        """The step that was planned last ends here: it may be saved in the next."""
        row = self.rows[number]
        kind = row.cuts.get(row.computed)
        row.cuts = {length: it for length, it in row.cuts.items() if length > row.computed}
        is_rolling = kind is None and row.computed > row.prompt_length
        if not row.is_stored or row.computed % self.resume_step or (kind is None and not is_rolling):
            return
        assert self.checkpoints is not None
        save = Save(row.computed, row.tail if kind is None else kind, is_rolling)
        if is_rolling and not any(it.is_rolling for it in row.saves):  # it will supersede the prompt's tail
            self.checkpoints.supersede(
                next((key for key in row.path[::-1] if key in self.checkpoints.kept), 0)
            )
        # While steps are in flight, the row may end before this save is committed.
        safe = row.committed if self.passed < self.step - 2 else 0
        if self.checkpoints.take(save, row.saves, safe):
            self.to_save.append((number, save))

    def last_rolling(self, row: RowModel) -> Save | None:
        """The last rolling save whose tokens are committed."""
        those = [save for save in row.saves if save.is_rolling and save.length <= row.committed]
        return max(those, key=lambda save: save.length, default=None)

    def keep_saves(self, row: RowModel) -> None:
        """What is committed goes into the tree; of rolling ones the last stays with the row."""
        assert self.checkpoints is not None
        last = self.last_rolling(row)
        for save in list(row.saves):
            if save.length > row.committed or save is last:
                continue
            row.saves.remove(save)
            if save.is_rolling:
                self.checkpoints.free.add(save.id)
            else:
                self.checkpoints.keep(row.path[save.length // self.resume_step - 1], save)

    def exchange(self, row: RowModel) -> None:
        """What no other row leases becomes one page again: the tree takes the row's, and frees its own."""
        for depth in reversed(range(len(row.path) if self.is_exact else 0)):
            if self.cached[row.path[depth]].num_leases > 1:
                break
            row.duplicates.discard(depth)

    def rollback(self, number: int, n: int) -> None:
        row = self.rows[number]
        row.reserved -= n
        del row.steps[row.reserved :]
        del row.known[max(len(row.prompt), row.reserved) :]

    def release(self, numbers: list[int]) -> None:
        """They are no part of the step being planned; only its delta can still name them. Rows of one call
        end together: no duplicate of one replaces a page that another has left."""
        for number in numbers:
            row = self.rows.pop(number)
            own = [self.own(row, g) for g in range(len(self.groups))]
            if self.is_exact and self.checkpoints is not None:
                kept = self.last_rolling(row)
                self.checkpoints.free |= {save.id for save in row.saves if save is not kept}
                if kept is not None:
                    self.checkpoints.keep(row.path[kept.length // self.resume_step - 1], kept)
            last = self.step if row.named == self.step else self.step - 1
            self.waiting.append(Waiting(last, row.path, own))
        self.pass_fence(self.passed)

    def fork(self, number: int, children: list[int]) -> None:
        parent = self.rows[number]
        parent.named = self.step
        n, stored = len(children), len(parent.path)
        if self.is_exact:
            self.make_room(self.fork_needs(number, n))
        for child in children:
            assert child not in self.rows
            ends = [group.pages_for(parent.committed) for group in self.groups]
            known = parent.known[: max(parent.committed, len(parent.prompt))]
            path = parent.path[:stored]
            if self.is_exact:
                self.lease(path)
            self.rows[child] = RowModel(
                parent.space,
                parent.ranges,
                parent.prompt,
                known,
                parent.committed,
                parent.committed,
                path,
                ends,
                parent.steps[: parent.committed],
                parent.drops,
                self.step,
                is_fork=True,
                prompt_length=parent.committed,
                tail=parent.tail,
            )

    def fork_needs(self, number: int, n: int) -> list[int]:
        parent = self.rows[number]
        return [
            n * (group.pages_for(parent.committed) - len(parent.path) * self.columns(g))
            for g, group in enumerate(self.groups)
        ]

    def can_fork(self, number: int, n: int) -> bool:
        return self.free_rows() >= n and self.has_room(self.fork_needs(number, n), 0)

    def pass_fence(self, fence: int) -> None:
        self.passed = max(self.passed, fence)
        self.taken_back = [it for it in self.taken_back if it[0] > self.passed]
        gone = sorted((it for it in self.waiting if it.fence <= fence), key=lambda it: it.fence)
        self.waiting = [it for it in self.waiting if it.fence > fence]
        for waiting in gone:
            self.clock += 1
            if not self.is_exact:
                continue
            for key in waiting.path:
                page = self.cached[key]
                page.num_leases -= 1
                page.used = self.clock if page.num_leases == 0 else page.used
        for row in self.rows.values() if gone else ():
            self.exchange(row)

    # Pages by number

    def make_room_in(self, g: int, n: int) -> None:
        if self.is_exact:
            self.make_room([n if which == g else 0 for which in range(len(self.groups))])

    def extend(self, number: int, g: int, n: int) -> None:
        self.make_room_in(g, n)
        row = self.rows[number]
        row.ends[g] += n
        row.named = self.step if n else row.named

    def spare(self, number: int, g: int) -> int:
        """Pages behind what a row reserved."""
        return self.rows[number].ends[g] - self.groups[g].pages_for(self.rows[number].reserved)

    def alloc_pages(self, g: int, page_ids: set[int]) -> None:
        self.given.setdefault(g, set()).update(page_ids)

    def free_pages(self, g: int, page_ids: set[int]) -> None:
        self.given[g] -= page_ids
        if self.step - 1 > self.passed:
            self.taken_back.append((self.step - 1, g, len(page_ids)))

    # What others compute

    def pending(self, space: bytes, ranges: Ranges, tokens: list[int], hit: int) -> tuple[set[int], int]:
        """Rows that will have computed most beyond the hit, and how much; none and the hit if nobody does."""
        mine = self.contents.of(space, ranges, tokens[:-1])
        best, length = set(), hit
        for number, row in self.rows.items():
            if not row.is_stored or row.is_fork:
                continue
            theirs = self.contents.of(row.space, row.ranges, row.prompt[: row.reserved])
            same = sum(a == b for a, b in zip(mine, theirs, strict=False))
            same -= same % self.resume_step
            if self.checkpoints is not None:
                planned = [
                    *(
                        at
                        for at, kind in row.cuts.items()
                        if kind != Kind.INTERVAL or self.checkpoints.saves_intervals
                    ),
                    *(save.length for save in row.saves if not save.is_rolling),
                ]
                same = max((at for at in planned if row.committed < at <= same), default=0)
            if same > length:
                best, length = {number}, same
            elif same == length > hit:
                best.add(number)
        return best, length

    def sure_hit(
        self, space: bytes, ranges: Ranges, tokens: list[int], most: int, saved: set[int] | None
    ) -> int:
        """A hit that must be there at least: what a running row has stored. It reads the window behind its
        last page; where another row stored a page first and left it, its own takes that page's place.
        `saved`: contents of checkpoints that are in the tree; None if a hit needs none."""
        mine, best = self.contents.of(space, ranges, tokens[:most]), 0
        for row in self.rows.values():
            length = len(row.path) * self.resume_step
            if not row.is_stored or row.is_bad or not best < length <= len(mine):
                continue
            if saved is None or row.path[-1] in saved:
                best = length if mine[length - 1] == row.path[-1] else best
        if saved is not None and not self.groups:
            best = max([best, *(i + 1 for i, key in enumerate(mine) if key in saved)])
        return best
