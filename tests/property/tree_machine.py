"""What the machine that drives a prefix tree is given. In: draws; out: tokens, ids and keys for its calls."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from property.tree_follower import Follower
from property.tree_model import HOLE, Event, TreeModel

MOST_PAGES, MOST_PAST = 7, 8

namespaces = st.sampled_from([b"", b"", b"", b"a", b"\x00\xff"])
symbols = st.lists(st.integers(0, 2), min_size=1, max_size=3)
rests = st.sampled_from([0, 0, 1, 63])  # tokens that fill no page
no_keys: st.SearchStrategy[list[tuple[int, int, bytes]]] = st.just([])
one_key = st.tuples(st.integers(0, 6), st.integers(1, 4), st.sampled_from([b"k", b"l"]))
keys = no_keys | no_keys | st.lists(one_key, max_size=2)


def flat(event: Any) -> Event:
    kind = type(event).__name__
    if kind == "Reset":
        return (kind,)
    columns = tuple(ids.tolist() for ids in event.columns)
    assert all(array.dtype == np.int32 for array in (event.tokens, *event.columns))
    assert event.keys.dtype == np.uint64
    place = (event.namespace, event.position, event.parent, event.keys.tolist(), event.tokens.tolist())
    return (kind, *place, event.extra_keys, columns, event.states, event.ids_only)


def lists(arrays: Any) -> tuple[list[int], ...]:
    arrays = list(arrays)
    assert all(array.dtype == np.int32 for array in arrays)
    return tuple(array.tolist() for array in arrays)


class TreeMachine(RuleBasedStateMachine):
    """A tree, its model, and what calls are given. Page sizes, namespaces and extra keys of all kinds."""

    kind: Any = None  # what is tested
    windows: Any = st.just((None,))
    states: Any = st.just(False)

    @initialize(data=st.data(), page_tokens=st.sampled_from([1, 2, 16, 64]))
    def build(self, data: st.DataObject, page_tokens: int) -> None:
        windows = data.draw(self.windows)
        # In pages, then in tokens: some windows end inside a page.
        self.windows_given = tuple(None if it is None else max(1, int(it * page_tokens)) for it in windows)
        self.has_states, self.page_tokens = data.draw(self.states), page_tokens
        self.tree = self.kind(page_tokens, windows=self.windows_given, states=self.has_states)
        self.model = TreeModel(page_tokens, self.windows_given, self.has_states)
        self.leases: dict[int, Any] = {}
        self.matches: list[tuple[Any, Any]] = []  # with what the model remembers of them
        self.released: list[Any] = []
        self.events: list[Any] = []
        self.tree.listen(self.events.append)
        self.follower = Follower(page_tokens)
        self.tree.listen(self.follower)
        self.next_id = 1
        self.past: list[tuple[list[int], Any]] = [([], [])]  # symbols and extra keys of earlier sequences

    # What calls are given

    def tokens(self, given: list[int], rest: int = 0) -> list[int]:
        """Pages by symbol: 0 and 1 differ in their last token only. `rest` more tokens fill no page."""
        size = self.page_tokens
        pages = [[symbol // 2] * (size - 1) + [symbol % 3] for symbol in given]
        return [token for page in pages for token in page] + [0] * (rest % size)

    def sequence(self, data: st.DataObject) -> tuple[list[int], list[tuple[int, int, bytes]]]:
        """Tokens and extra keys; most begin like an earlier sequence."""
        past, extra = data.draw(st.sampled_from(self.past))
        keep = len(past) - data.draw(st.integers(0, min(3, len(past))))
        given = (past[:keep] + data.draw(symbols))[: data.draw(st.integers(4, MOST_PAGES))]
        if data.draw(st.integers(0, 4)) == 0:
            extra = data.draw(keys)
        self.past = [*self.past[-MOST_PAST:], (given, extra)]
        return self.tokens(given, data.draw(rests)), self.ranges(extra)

    def ranges(self, given: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Extra keys over half pages, in order."""
        half, after, ranges = max(1, self.page_tokens // 2), 0, []
        for begin, length, key in sorted(given):
            if begin * half >= after:
                after = (begin + length) * half
                ranges.append((begin * half, after, key))
        return ranges

    def new_ids(self, data: st.DataObject, num_pages: int) -> list[list[int]]:
        """Ids that were never given before, with holes where a column may have them."""
        columns = []
        for window in self.windows_given:
            ids = list(range(self.next_id, self.next_id + num_pages))
            self.next_id += num_pages
            if window is not None:
                holes = data.draw(st.sets(st.integers(0, MOST_PAGES)))
                ids = [HOLE if at in holes else id for at, id in enumerate(ids)]
            columns.append(ids)
        return columns

    def as_given(self, data: st.DataObject, columns: list[list[int]]) -> Any:
        dtype = data.draw(st.sampled_from([np.int32, np.int64, None]))
        arrays = [ids if dtype is None else np.array(ids, dtype=dtype) for ids in columns]
        return arrays[0] if len(arrays) == 1 else arrays

    def news(self) -> list[Event]:
        news = [flat(event) for event in self.events]
        self.events.clear()
        return news

    def observed(self) -> Any:
        """All that a caller can see."""
        nodes = [
            (*view[:7], view.tokens.tolist(), lists(view.columns), *view[9:])
            for view in self.tree.nodes(10**9, 10**9)
        ]
        return nodes, self.tree.counts(), self.tree.namespaces(), [it.length for it in self.leases.values()]
