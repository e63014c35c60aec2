"""One who knows a tree from its events alone. In: events; out: a picture that must equal the tree's own."""

from dataclasses import dataclass
from typing import Any

from pagoda.tree import Removed, Reset, Stored
from twin.keys import page_keys

HOLE = -1
Seen = tuple[bytes, tuple[int, ...], tuple[int, ...], int | None]  # namespace, tokens to its end, ids, state


@dataclass
class Page:
    namespace: bytes
    parent: int | None
    elements: tuple[Any, ...]  # tokens, under an extra key with the key and its begin
    ids: list[int]


class Follower:
    """Attaches what is stored to what it was told before, and complains where it cannot."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages: dict[int, Page] = {}
        self.states: dict[int, int] = {}  # by the key of the page that ends there

    def __call__(self, event: Stored | Removed | Reset) -> None:
        if isinstance(event, Reset):
            self.pages, self.states = {}, {}
            return
        size, keys = self.page_tokens, [int(key) for key in event.keys]
        assert (event.parent is None) == (event.position == 0)
        assert len(event.tokens) == len(keys) * size
        elements: list[Any] = event.tokens.tolist()
        for begin, end, key in event.extra_keys:
            for at in range(max(begin, event.position), end):
                elements[at - event.position] = (elements[at - event.position], key, begin)
        chain = [event.parent, *keys]
        if isinstance(event, Stored):
            assert event.parent is None or event.parent in self.pages, "nothing to attach it to"
        for n, key in enumerate(keys):
            ids = [int(column[n]) for column in event.columns]
            page = Page(event.namespace, chain[n], tuple(elements[n * size : (n + 1) * size]), ids)
            if isinstance(event, Stored):
                self.store(key, page, event.ids_only)
            else:
                self.remove(key, page, event.ids_only)
        for length, state in event.states:
            at = chain[(length - event.position) // size]
            assert at is not None
            if isinstance(event, Stored):
                assert self.states.setdefault(at, state) == state
            else:
                assert self.states.pop(at) == state

    def store(self, key: int, page: Page, ids_only: bool) -> None:
        if not ids_only:
            assert key not in self.pages, "stored twice"
            self.pages[key] = page
            return
        known = self.known(key, page)
        for column, id in enumerate(page.ids):
            if id != HOLE:
                assert known.ids[column] == HOLE
                known.ids[column] = id

    def remove(self, key: int, page: Page, ids_only: bool) -> None:
        known = self.known(key, page)
        if not ids_only:
            assert known.ids == page.ids
            del self.pages[key]
            return
        for column, id in enumerate(page.ids):
            if id != HOLE:
                assert known.ids[column] == id
                known.ids[column] = HOLE

    def known(self, key: int, page: Page) -> Page:
        known = self.pages[key]
        assert (known.namespace, known.parent, known.elements) == (page.namespace, page.parent, page.elements)
        return known

    def picture(self) -> list[Seen]:
        """Every page; its key must be that of all up to it."""
        seen: list[Seen] = []
        for key, page in self.pages.items():
            path = [page]
            while path[-1].parent is not None:
                path.append(self.pages[path[-1].parent])
            contents = [it.elements for it in reversed(path)]
            assert page_keys(page.namespace, contents)[-1] == key
            tokens = tuple(it[0] if isinstance(it, tuple) else it for one in contents for it in one)
            seen.append((page.namespace, tokens, tuple(page.ids), self.states.get(key)))
        assert self.states.keys() <= self.pages.keys()
        return sorted(seen, key=repr)


def shown(tree: Any, page_tokens: int) -> list[Seen]:
    """What `nodes` shows of what can be found, page by page."""
    seen: list[Seen] = []
    paths: dict[int | None, tuple[int, ...]] = {}
    for view in tree.nodes(10**9, 10**9):
        path = paths[view.number] = paths.get(view.parent, ()) + tuple(view.tokens.tolist())
        for index, ids in enumerate(zip(*view.columns, strict=True)):
            end = view.begin + (index + 1) * page_tokens
            if not view.is_lost:
                ids = tuple(int(id) for id in ids)
                seen.append((view.namespace, path[:end], ids, dict(view.checkpoints).get(end)))
    return sorted(seen, key=repr)
