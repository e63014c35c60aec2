"""Which checkpoints a tree has and which one it gives up, in plain Python.

In: what happens to checkpoints; out: the next one to go. Two classes: tails and branch points, which
requests are likely to resume from, and interval points and tails that a deeper tail has superseded. The
second goes first, by powers of two of the gap to the checkpoint before, then by age; of the first goes what
is worth least: inflation at its last use + share of its kind that was resumed * gap. A worth is looked at
again when it is the least, and at each eviction that of one id, in turn; what was not used for long then goes
first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

TAILS = ("fresh", "continued")  # of paths that begin anew or part from others; that go on where one ended


@dataclass
class Save:
    """A checkpoint that a row has and the tree has not."""

    length: int
    kind: str
    is_rolling: bool
    id: int = 0  # known from the delta that saves it


@dataclass
class Kept:
    save: Save
    kind: str
    inflation: float
    used: int  # saves of tails and branch points until its last use
    is_resumed: bool = False
    is_second: bool = False
    worth: float = 0.0
    order: int = 0


def prior() -> dict[str, list[float]]:
    shares = {"fresh": 0.4, "continued": 0.8, "branch": 0.8, "interval": 0.8}
    return {kind: [16.0, 16.0 * share] for kind, share in shares.items()}


@dataclass
class Checkpoints:
    """The checkpoints of a tree, by their contents. `parent(contents)`: those of one page less, 0 if none."""

    total: int
    interval: int
    parent: Callable[[int], int]
    kept: dict[int, Kept] = field(default_factory=dict)
    reuse: dict[str, list[float]] = field(default_factory=prior)  # a kind: how many were saved, and resumed
    inflation: float = 0.0
    clock: int = 0
    saves: int = 0  # of tails and branch points
    hand: int = 0  # the id that was looked at last
    num_held: int = 0  # by rows
    saved: int = 0
    resumed: int = 0
    evicted: int = 0

    @property
    def num_free(self) -> int:
        return self.total - len(self.kept) - self.num_held

    @property
    def saves_intervals(self) -> bool:
        return self.num_free > 0 or any(it.is_second for it in self.kept.values())

    def before(self, key: int) -> int:
        """The checkpoint before it on its path, 0 if there is none."""
        key = self.parent(key)
        while key and key not in self.kept:
            key = self.parent(key)
        return key

    def gap(self, key: int) -> int:
        before = self.before(key)
        return self.kept[key].save.length - (self.kept[before].save.length if before else 0)

    def look_again(self, key: int) -> None:
        it = self.kept[key]
        if self.saves - it.used > 8 * self.total:
            it.is_second, it.worth = True, -1
        else:
            self.look_at(key)

    def look_at(self, key: int) -> None:
        it, gap = self.kept[key], self.gap(key)
        saved, resumed = self.reuse[it.kind]
        it.worth = gap.bit_length() - 1 if it.is_second else it.inflation + resumed / saved * gap

    def enlist(self, key: int, is_second: bool) -> None:
        self.clock += 1
        it = self.kept[key]
        it.is_second, it.order = is_second, self.clock
        self.look_at(key)

    def count_saved(self, kind: str) -> None:
        counts = self.reuse[kind]
        counts[0] += 1
        if counts[0] > 2000:
            counts[:] = [n / 2 for n in counts]

    def keep(self, key: int, save: Save) -> None:
        """A row's save goes into the tree, if its contents have none yet; it is the row's no more."""
        self.num_held -= 1
        if key in self.kept:
            return
        self.saved += 1
        self.saves += save.kind != "interval"
        self.kept[key] = Kept(save, save.kind, self.inflation, self.saves)
        self.count_saved(save.kind)
        self.enlist(key, save.kind == "interval")
        if save.kind in TAILS:
            self.supersede(self.before(key))

    def supersede(self, key: int) -> None:
        """A tail continues the one here or above, if nothing of the first class is between them."""
        while key and self.kept[key].is_second:
            key = self.before(key)
        if key and self.kept[key].kind in TAILS:
            self.enlist(key, True)

    def resume(self, key: int, is_near: bool, parts: bool) -> None:
        """A request resumed from it."""
        self.resumed += 1
        it = self.kept[key]
        if is_near and not it.is_resumed:
            it.is_resumed = True
            self.reuse[it.kind][1] += 1
        if parts and it.kind != "branch":
            it.kind = "branch"
            self.count_saved("branch")
            self.reuse["branch"][1] += 1
        it.inflation, it.used = self.inflation, self.saves
        self.enlist(key, it.is_second and not parts)

    def top(self, also_first: bool) -> int:
        those = [(not it.is_second, it.worth, it.order, key) for key, it in self.kept.items()]
        is_first, _, _, key = min(those, default=(True, 0, 0, 0))
        return key if also_first or not is_first else 0

    def next(self, also_first: bool) -> int:
        """The one to give up, 0 if there is none."""
        if self.total == 0:
            return 0
        self.hand = self.hand % self.total + 1
        for key, it in self.kept.items():
            if it.save.id == self.hand:
                self.look_again(key)
        while key := self.top(also_first):
            self.look_again(key)
            if self.top(also_first) == key:
                return key
        return 0

    def take(self, save: Save, saves: list[Save], safe: int) -> bool:
        """Find a checkpoint for a row's save, and add it to its saves; False if there is none.

        A rolling save goes over the row's own, unless that is one of the first `safe` tokens and the tree has
        another to give up.
        """
        if self.num_free == 0:
            own = next((it for it in saves if it.is_rolling), None) if save.is_rolling else None
            key = self.next(save.kind != "interval") if own is None or own.length <= safe else 0
            if key:
                gone = self.kept.pop(key)
                if not gone.is_second:
                    self.inflation = max(self.inflation, gone.worth)
                self.evicted += 1
            elif own is not None:
                saves.remove(own)
                self.num_held -= 1
            else:
                return False
        saves.append(save)
        self.num_held += 1
        return True

    def lose(self, key: int) -> None:
        """Its page was evicted."""
        if self.kept.pop(key, None) is not None:
            self.evicted += 1

    def counts(self) -> tuple[int, ...]:
        """As in `CheckpointStats`."""
        return (
            self.total,
            self.num_free,
            len(self.kept),
            self.num_held,
            self.saved,
            self.resumed,
            self.evicted,
        )
