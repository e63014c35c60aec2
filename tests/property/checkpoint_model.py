"""Which checkpoints a tree and its rows have, in plain Python.

In: what happens to saves, by the contents they are of; out: the id of each, and counts. An id is free, a
row's, or the tree's. A save gets the lowest free id; when none is free, `Rule` says which one the tree gives
up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.checkpoints.order import TAILS, Kind, Rule


@dataclass
class Save:
    length: int
    kind: Kind
    is_rolling: bool
    id: int = 0  # from `take` on


class Checkpoints:
    """The checkpoints of a tree, by their contents. `parent(contents)`: those of one page less, 0 if none."""

    def __init__(self, total: int, interval: int, parent: Callable[[int], int]) -> None:
        self.total = total
        self.interval = interval
        self.parent = parent
        self.rule = Rule(total)
        self.free = set(range(1, total + 1))
        self.kept: dict[int, Save] = {}
        self.contents: dict[int, int] = {}  # of each id in the tree
        self.saved = self.resumed = self.evicted = 0

    @property
    def saves_intervals(self) -> bool:
        """Whether there is room for an interval point: a free id, or one of the second class."""
        return bool(self.free) or any(self.rule.is_tail(id) is None for id in self.contents)

    def before(self, key: int) -> int:
        """The checkpoint before it on its path, 0 if there is none."""
        key = self.parent(key)
        while key and key not in self.kept:
            key = self.parent(key)
        return key

    def gap(self, key: int) -> int:
        before = self.before(key)
        return self.kept[key].length - (self.kept[before].length if before else 0)

    def keep(self, key: int, save: Save) -> None:
        """A row's save goes into the tree, if its contents have none yet; it is the row's no more."""
        if key in self.kept:
            self.free.add(save.id)
            return
        self.saved += 1
        self.kept[key], self.contents[save.id] = save, key
        self.rule.add(save.id, save.kind, self.gap(key))
        if save.kind in TAILS:
            self.supersede(self.before(key))

    def supersede(self, key: int) -> None:
        """A tail continues the one here or above, if nothing of the first class is between them."""
        while key and self.rule.is_tail(self.kept[key].id) is None:
            key = self.before(key)
        if key and self.rule.is_tail(self.kept[key].id):
            self.rule.supersede(self.kept[key].id, self.gap(key))

    def resume(self, key: int, is_near: bool, parts: bool) -> None:
        """A request resumed from it."""
        self.resumed += 1
        self.rule.resume(self.kept[key].id, self.gap(key), is_near, parts)

    def take(self, save: Save, saves: list[Save], safe: int) -> bool:
        """Find an id for a row's save, and add it to its saves; False if there is none.

        A rolling save goes over the row's own, unless that is one of the first `safe` tokens and the tree has
        another to give up.
        """
        if self.total == 0:
            return False
        if not self.free:
            own = next((it for it in saves if it.is_rolling), None) if save.is_rolling else None
            id = 0
            if own is None or own.length <= safe:
                id = self.rule.give_up(save.kind != Kind.INTERVAL, lambda id: self.gap(self.contents[id]))
            if id:
                self.forget(id)
            elif own is not None:
                saves.remove(own)
                self.free.add(own.id)
            else:
                return False
        save.id = min(self.free)
        self.free.remove(save.id)
        saves.append(save)
        return True

    def lose(self, key: int) -> None:
        """Its page was evicted."""
        if key in self.kept:
            self.rule.remove(self.kept[key].id)
            self.forget(self.kept[key].id)

    def forget(self, id: int) -> None:
        """The tree has given it up."""
        del self.kept[self.contents.pop(id)]
        self.free.add(id)
        self.evicted += 1

    def counts(self) -> tuple[int, ...]:
        """As in `CheckpointStats`."""
        held = self.total - len(self.free) - len(self.kept)
        return (
            self.total,
            len(self.free),
            len(self.kept),
            held,
            self.saved,
            self.resumed,
            self.evicted,
        )
