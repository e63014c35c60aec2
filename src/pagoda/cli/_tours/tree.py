"""A tour of the prefix tree: it grows, splits, protects, evicts, and what it looks like meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from pagoda.cli._tours.pen import Pen
from pagoda.errors import CapacityError, DoubleFreeError, NotHeldError, PagodaError
from pagoda.ids import FreeList
from pagoda.tree import Lease, PrefixTree, draw_text
from pagoda.tree._labels import page_label

__all__ = ["run"]

NUM_PAGES, PAGE_SIZE = 40, 4
SYSTEM = "You are a teacher. Answer in plain words."
SKY_BLUE = f"{SYSTEM} Why is the sky blue and not green?"
SKY_DARK = f"{SYSTEM} Why is the sky dark during the night?"
BIRDS = f"{SYSTEM} How do birds find their way home again?"
ANSWER = "Blue light scatters more than red light does, so blue reaches us from everywhere."


class _Words:
    """A toy tokenizer: every word that it meets is a token."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        words = text.split()
        self.words += dict.fromkeys(word for word in words if word not in self.words)
        return [self.words.index(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


class _Tour:
    """One small tree, the pages that it owns, and what a request does with both."""

    def __init__(self, pen: Pen) -> None:
        self.pen = pen
        self.words = _Words()
        self.pages = FreeList(NUM_PAGES, what="pages")
        self.tree = PrefixTree(PAGE_SIZE)

    def begin(self, text: str, namespace: str = "") -> Lease:
        """A request: look up, protect what is there, compute and insert the rest."""
        tokens = self.words.encode(text)
        lease = self.tree.lock(self.tree.match(tokens, namespace))
        found, reused = lease.length, self.tree.page_ids(lease)
        self.extend(lease, tokens[found:])
        where = f", in {_pages(reused)}" if found else ""
        self.pen.say(f"“… {' '.join(text.split()[-4:])}”: {found} of {len(tokens)} tokens are there{where}")
        return lease

    def extend(self, lease: Lease, tokens: list[int]) -> None:
        self.tree.insert(tokens, self.pages.alloc(len(tokens) // PAGE_SIZE), lease)

    def evict(self, num_tokens: int) -> None:
        freed = self.tree.evict(num_tokens).page_ids
        self.pages.free(freed)
        self.pen.say(f"evict({num_tokens}) gave back {_pages(freed)}")

    def draw(self) -> None:
        self.pen.say(
            draw_text(
                self.tree,
                tokenizer=self.words,
                max_tokens=20,
                width=self.pen.width,
                colour=self.pen.has_colour,
            )
        )


def _pages(ids: np.ndarray) -> str:
    return page_label([ids.tolist()], len(ids), 40)


def run(pen: Pen, device: str) -> None:
    """Grow a tree, split, protect, evict and drop, and show it after each. It needs no device."""
    tour = _Tour(pen)
    tree, words = tour.tree, tour.words
    pen.part("The tree: what is already computed")

    pen.title("A first prompt: nothing is there yet, its pages become one run")
    pen.say(f"Every word is a token here; a page has {PAGE_SIZE}. Only whole pages are kept.")
    tree.release(tour.begin(SKY_BLUE))
    tour.draw()

    pen.title("A second prompt leaves the first inside its run: the run is split")
    tree.release(tour.begin(SKY_DARK))
    tour.draw()

    pen.title("A third shares the system prompt alone")
    tree.release(tour.begin(BIRDS))
    tour.draw()

    pen.title("A request locks its prefix: a lease protects it up to the root")
    lease = tour.begin(SKY_BLUE)
    tour.draw()

    pen.title("It runs: page by page its answer continues the leaf in place")
    answer, num_nodes = words.encode(ANSWER), tree.num_nodes
    for begin in range(0, len(answer) - PAGE_SIZE + 1, PAGE_SIZE):
        tour.extend(lease, answer[begin : begin + PAGE_SIZE])
        pen.say(f"the lease covers {lease.length} tokens; {tree.num_nodes} nodes, as before")
    if tree.num_nodes != num_nodes:
        raise PagodaError("a running request made a node")
    tour.draw()

    pen.title("It ends, most recently used: eviction trims the tails of colder leaves")
    tree.release(lease)
    tour.draw()
    pen.say("↓")
    tour.evict(2 * PAGE_SIZE)
    tour.draw()

    pen.title("Nobody will ask this again: demoted, it goes first, though it came last")
    lease = tour.begin("Throw this prompt away, it was only a test.")
    tree.demote(lease)
    tree.release(lease)
    tour.draw()
    pen.say("↓")
    tour.evict(2 * PAGE_SIZE)
    tour.draw()

    pen.title("Namespaces do not share: under another name the same words are new")
    tree.release(tour.begin(SKY_BLUE, namespace="tenant-b"))
    tour.draw()
    freed = tree.drop("tenant-b").page_ids
    tour.pages.free(freed)
    pen.say(f"drop('tenant-b') gave back {_pages(freed)}")

    pen.title("Mistakes are caught at the call and change nothing")
    held = tree.lock(tree.match(words.encode(SKY_BLUE)))
    before = tree.counts()
    pen.make(
        [
            ("release a lease twice", lambda: tree.release(lease), DoubleFreeError),
            ("insert under it", lambda: tree.insert(answer[:4], [1], lease), NotHeldError),
            ("evict it all", lambda: tree.evict(tree.num_tokens), CapacityError),
            ("insert the padding page", lambda: tree.insert(answer[:4], [0]), PagodaError),
        ]
    )
    if tree.counts() != before:
        raise PagodaError("a mistake has changed the tree")
    tree.release(held)

    pen.title("Everything ends, and nothing has leaked")
    tour.evict(tree.num_tokens)
    tour.draw()
    tree.check()
    tour.pages.check()
    if tour.pages.num_free != NUM_PAGES or tree.num_nodes:
        raise PagodaError("pages or nodes have leaked")
    _race(pen)


def _race(pen: Pen) -> None:
    """How long the calls take here, on a tree of some size."""
    num_prompts, shared, own, page_tokens = 200, 512, 512, 16
    prompts = np.random.default_rng(0).integers(0, 50_000, (num_prompts, shared + own), dtype=np.int32)
    prompts[:, :shared] = prompts[0, :shared]
    ids = np.arange(1, num_prompts * (shared + own) // page_tokens + 1, dtype=np.int32).reshape(
        num_prompts, -1
    )
    tree = PrefixTree(page_tokens)

    def each(what: str, calls: int, total_s: float) -> None:
        pen.say(f"{what:<58} {total_s / calls * 1e6:8.1f} µs")

    pen.say(f"\nand on {num_prompts} prompts of {shared + own:,} tokens, the first {shared} in common, here:")
    begin = time.perf_counter()
    for prompt, page_ids in zip(prompts, ids, strict=True):
        tree.insert(prompt, page_ids)
    each("insert one", num_prompts, time.perf_counter() - begin)
    begin = time.perf_counter()
    for prompt in prompts:
        tree.match(prompt)
    each(
        f"match one: {tree.match_length(prompts[-1]):,} tokens found",
        num_prompts,
        time.perf_counter() - begin,
    )
    evictions = tree.num_tokens // 64 // 2
    begin = time.perf_counter()
    for _ in range(evictions):
        tree.evict(64)
    each("evict 64 tokens", evictions, time.perf_counter() - begin)
    tree.check()
