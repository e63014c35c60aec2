"""A tour of the prefix tree: it grows, splits, protects and evicts, with a drawing after each step."""

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

NUM_PAGES, PAGE_TOKENS = 40, 4
SYSTEM = "You are a teacher. Answer in plain words."
SKY_BLUE = f"{SYSTEM} Why is the sky blue and not green?"
SKY_DARK = f"{SYSTEM} Why is the sky dark during the night?"
BIRDS = f"{SYSTEM} How do birds find their way home again?"
ANSWER = "Blue light scatters more than red light does, so blue reaches us from everywhere."


class _Words:
    """A toy tokenizer: every word is a token."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        words = text.split()
        self.words += dict.fromkeys(word for word in words if word not in self.words)
        return [self.words.index(word) for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


class _Tour:
    """One small tree, its pages, and what a request does with both."""

    def __init__(self, pen: Pen) -> None:
        self.pen = pen
        self.words = _Words()
        self.pages = FreeList(NUM_PAGES, what="pages")
        self.tree = PrefixTree(PAGE_TOKENS)

    def begin(self, text: str, namespace: str = "") -> Lease:
        """Begin a request: match, lock the matched prefix, compute and insert the rest."""
        tokens = self.words.encode(text)
        lease = self.tree.lock(self.tree.match(tokens, namespace))
        found, reused = lease.length, self.tree.page_ids(lease)
        self.extend(lease, tokens[found:])
        where = f", in {_pages(reused)}" if found else ""
        self.pen.say(f"“… {' '.join(text.split()[-4:])}”: {found} of {len(tokens)} tokens are cached{where}")
        return lease

    def extend(self, lease: Lease, tokens: list[int]) -> None:
        self.tree.insert(tokens, self.pages.alloc(len(tokens) // PAGE_TOKENS), lease)

    def evict(self, num_tokens: int) -> None:
        freed = self.tree.evict(num_tokens).page_ids
        self.pages.free(freed)
        self.pen.say(f"evict({num_tokens}) returned {_pages(freed)}")

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
    """Grow, split, protect, evict and drop, and draw the tree after each step. `device` is not used."""
    tour = _Tour(pen)
    tree, words = tour.tree, tour.words
    pen.part("The tree: what is already computed")

    pen.title("A first prompt: nothing is cached yet, and its pages become one node")
    pen.say(f"Here a word is a token, and a page has {PAGE_TOKENS} tokens. Only whole pages are kept.")
    tree.release(tour.begin(SKY_BLUE))
    tour.draw()

    pen.title("A second prompt shares only the beginning: the node is split")
    tree.release(tour.begin(SKY_DARK))
    tour.draw()

    pen.title("A third prompt shares only the system prompt")
    tree.release(tour.begin(BIRDS))
    tour.draw()

    pen.title("A running request has a lease, which protects its prefix from eviction")
    lease = tour.begin(SKY_BLUE)
    tour.draw()

    pen.title("As it generates, its answer extends the leaf in place, page by page")
    answer, num_nodes = words.encode(ANSWER), tree.num_nodes
    for begin in range(0, len(answer) - PAGE_TOKENS + 1, PAGE_TOKENS):
        tour.extend(lease, answer[begin : begin + PAGE_TOKENS])
        pen.say(f"the lease covers {lease.length} tokens; {tree.num_nodes} nodes, as before")
    if tree.num_nodes != num_nodes:
        raise PagodaError("a running request added a node")
    tour.draw()

    pen.title("The request ends; eviction trims colder leaves from their ends")
    tree.release(lease)
    tour.draw()
    pen.say("↓")
    tour.evict(2 * PAGE_TOKENS)
    tour.draw()

    pen.title("A prompt that will not come again can be demoted: it is evicted first")
    lease = tour.begin("Throw this prompt away, it was only a test.")
    tree.demote(lease)
    tree.release(lease)
    tour.draw()
    pen.say("↓")
    tour.evict(2 * PAGE_TOKENS)
    tour.draw()

    pen.title("Namespaces do not share: in another one, the same words are not cached")
    tree.release(tour.begin(SKY_BLUE, namespace="tenant-b"))
    tour.draw()
    freed = tree.drop("tenant-b").page_ids
    tour.pages.free(freed)
    pen.say(f"drop('tenant-b') returned {_pages(freed)}")

    pen.title("Mistakes raise an error and change nothing")
    held = tree.lock(tree.match(words.encode(SKY_BLUE)))
    before = tree.counts()
    pen.make(
        [
            ("release a lease twice", lambda: tree.release(lease), DoubleFreeError),
            ("insert below a released lease", lambda: tree.insert(answer[:4], [1], lease), NotHeldError),
            ("evict more than is evictable", lambda: tree.evict(tree.num_tokens), CapacityError),
            ("insert the padding page", lambda: tree.insert(answer[:4], [0]), PagodaError),
        ]
    )
    if tree.counts() != before:
        raise PagodaError("a mistake changed the tree")
    tree.release(held)

    pen.title("All requests end, and nothing has leaked")
    tour.evict(tree.num_tokens)
    tour.draw()
    tree.check()
    tour.pages.check()
    if tour.pages.num_free != NUM_PAGES or tree.num_nodes:
        raise PagodaError("pages or nodes have leaked")
    _race(pen)


def _race(pen: Pen) -> None:
    """Measure the calls on a larger tree."""
    num_prompts, shared, own, page_tokens = 200, 512, 512, 16
    prompts = np.random.default_rng(0).integers(0, 50_000, (num_prompts, shared + own), dtype=np.int32)
    prompts[:, :shared] = prompts[0, :shared]
    ids = np.arange(1, num_prompts * (shared + own) // page_tokens + 1, dtype=np.int32).reshape(
        num_prompts, -1
    )
    tree = PrefixTree(page_tokens)

    def each(what: str, calls: int, total_s: float) -> None:
        pen.say(f"{what:<58} {total_s / calls * 1e6:8.1f} µs")

    pen.say(
        f"\nTimes on this machine, with {num_prompts} prompts of {shared + own:,} tokens that share {shared}:"
    )
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
