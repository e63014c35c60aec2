"""A tour of the memory of running requests: a manager, its pools, and a drawing of their pages."""

from __future__ import annotations

import time

import torch

from pagoda.cli._tours.pen import Pen
from pagoda.errors import CapacityError, NotHeldError, OutOfRangeError, PagodaError
from pagoda.ids import FreeList
from pagoda.layout import FullAttention, Layout
from pagoda.manager import Manager
from pagoda.pools import Pools

__all__ = ["run"]

NUM_PAGES, PAGE_TOKENS, NUM_ROWS, MAX_TOKENS = 47, 16, 8, 512
LAYERS, HEADS, DIM = 4, 8, 128
COLOURS = ("36", "35", "33", "32", "34")


class _Tour:
    """One small model, its running requests, and the pen that draws their pages."""

    def __init__(self, pen: Pen, device: str) -> None:
        self.pen = pen
        layer = FullAttention(kv_heads=HEADS, k_dim=DIM, v_dim=DIM)
        layout = Layout([layer] * LAYERS, PAGE_TOKENS)
        self.manager = Manager(layout, {"full": NUM_PAGES}, num_rows=NUM_ROWS, max_tokens=MAX_TOKENS)
        self.pools = Pools(
            layout, {"full": NUM_PAGES}, num_rows=NUM_ROWS, max_tokens=MAX_TOKENS, device=device
        )
        self.names: dict[int, str] = {}  # name of each row's request
        self.written: dict[
            int, list[torch.Tensor]
        ] = {}  # by row: keys per step, [layers, tokens, heads, dim]
        self.next_token = 0

    # ── what a request does ──────────────────────────────────────────────────────────────────────

    def admit(self, name: str, num_tokens: int) -> int:
        """Admit a prompt of new tokens; it hits nothing, and is not stored in the tree."""
        row = self.manager.admit(self.fresh(num_tokens), store=False).row
        self.names[row], self.written[row] = name, []
        return row

    def fresh(self, n: int) -> list[int]:
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    def step(self, rows: list[int], counts: list[int]) -> int:
        """Plan and compute one step, with random numbers in place of a model's keys and values."""
        delta = self.manager.plan(rows, counts)
        self.pools.apply(delta)
        batch = self.pools.batch(delta)
        keys, values = (
            torch.randn(LAYERS, batch.num_tokens, HEADS, DIM, dtype=torch.bfloat16, device=batch.device)
            for _ in range(2)
        )
        for number in range(LAYERS):
            self.pools.layer(number).store(batch, keys[number], values[number])
        for row, part in zip(rows, keys.split(counts, 1), strict=True):
            self.written[row].append(part)
        self.manager.commit(rows, self.fresh(sum(counts)), counts)
        return delta.step

    def finish(self, row: int) -> None:
        self.manager.release(row)
        del self.names[row], self.written[row]

    def is_whole(self, row: int) -> bool:
        """Return whether every layer has the row's keys where its page table says."""
        ids = self.pools.tables["full"][row].long()
        position = torch.arange(self.manager.computed(row), device=ids.device)
        slots = ids[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
        written = torch.cat(self.written[row], 1)
        return all(torch.equal(self.pools.layer(n).keys[slots], written[n]) for n in range(LAYERS))

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def draw(self) -> None:
        """Draw each page as a cell: its request and how full it is, · not in use, ░ padding."""
        cells = {0: self.pen.paint("2", "░░")}
        for row, name in self.names.items():
            left = self.manager.reserved(row)
            for page in self.manager.page_ids(row, "full").tolist():
                eighths = -(-min(left, PAGE_TOKENS) * 8 // PAGE_TOKENS)
                colour = COLOURS[(ord(name) - ord("A")) % len(COLOURS)]
                cells[page] = self.pen.paint(colour, name + " ▁▂▃▄▅▆▇█"[eighths])
                left -= PAGE_TOKENS
        for begin in range(0, NUM_PAGES + 1, 16):
            pages = range(begin, min(begin + 16, NUM_PAGES + 1))
            line = " ".join(cells.get(page, self.pen.paint("2", "· ")) for page in pages)
            self.pen.say(f"page {begin:3d}  {line}")
        (group,) = self.manager.stats().groups
        counts = f"{group.running} in use, {group.waiting} waiting for a fence, {group.free} free"
        self.pen.say(self.pen.paint("2", f"          {counts}"))


def run(pen: Pen, device: str) -> None:
    """Admit, compute, read back and release requests, and show the pages after each step.

    Errors: ConfigError for an unavailable device."""
    tour = _Tour(pen, device)
    manager, pools = tour.manager, tour.pools
    torch.manual_seed(0)
    pen.part("The pool: pages of running requests")

    pen.title("An empty pool")
    page_kib, pool_mib = pools["full"].page_bytes >> 10, pools["full"].memory_bytes() >> 20
    pen.say(
        f"{NUM_PAGES} pages of {PAGE_TOKENS} tokens on {pools.device}, keys and values of {LAYERS} layers,"
    )
    pen.say(f"{HEADS} heads × {DIM} in bfloat16: {page_kib} KiB per page, {pool_mib} MiB in total.")
    pen.say("Page 0 is padding: padded tokens are written there; no request ever holds it.")
    tour.draw()

    pen.title("Three requests are admitted: each gets whole pages, lowest ids first")
    first = [tour.admit(name, n) for name, n in (("A", 70), ("B", 150), ("C", 36))]
    tour.draw()

    pen.title("One step stores their prompts: plan, apply, batch, store")
    tour.step(first, [70, 150, 36])
    for row in first:
        if not tour.is_whole(row):
            raise PagodaError(f"the keys of request {tour.names[row]} differ from those written")
        pen.say(f"{tour.names[row]}: {manager.computed(row)} tokens × {LAYERS} layers read back, identical")

    pen.title("Twelve decode steps: each grows all requests in one call")
    last = 0
    begin = time.perf_counter()
    for _ in range(12):
        manager.reserve(first)
        last = tour.step(first, [1, 1, 1])
    each = (time.perf_counter() - begin) / 12 * 1e6
    pen.say(f"{each:.0f} µs per step on this machine, including tables, batch and stores")
    tour.draw()

    pen.title("B ends while a step may still read it: its pages wait for a fence")
    tour.finish(first[1])
    tour.draw()
    waiting = manager.stats().groups[0].waiting
    manager.pass_fence(last)
    pen.say(f"step {last} has finished: {waiting} pages are free again")

    pen.title("D reuses the pages of B")
    row = tour.admit("D", 170)
    tour.step([row], [170])
    tour.draw()

    pen.title("C is packed into a buffer, E takes its pages, C is unpacked into others")
    c, keys = first[2], tour.written[first[2]]
    num_tokens, packed = manager.computed(c), pools["full"].pack(manager.page_ids(c, "full"))
    tour.finish(c)
    delta = manager.plan()
    pools.apply(delta)
    manager.pass_fence(delta.step)
    tour.step([tour.admit("E", 40)], [40])
    back = tour.admit("C", num_tokens)
    delta = manager.plan(back, num_tokens)
    pools.apply(delta)
    pools["full"].unpack(manager.page_ids(back, "full"), packed)
    tour.written[back] = keys
    if not tour.is_whole(back):
        raise PagodaError("the unpacked keys of C differ from those written")
    pen.say(f"{packed.numel() // 1024} KiB packed and unpacked, identical")
    tour.draw()

    pen.title("Mistakes raise an error and change nothing")
    pen.make(
        [
            ("release a row that is not running", lambda: manager.release(NUM_ROWS), NotHeldError),
            ("admit more tokens than fit", lambda: manager.admit(range(500)), CapacityError),
            ("release the padding row", lambda: manager.release(0), OutOfRangeError),
        ]
    )
    tour.draw()

    pen.title("All requests end, and nothing has leaked")
    for live in list(tour.names):
        tour.finish(live)
    manager.pass_fence(manager.plan().step)
    manager.check()
    pools.check()
    tour.draw()
    if manager.stats().groups[0].free != NUM_PAGES or manager.stats().rows:
        raise PagodaError("pages or rows have leaked")
    million = FreeList(1_000_000)
    begin = time.perf_counter()
    for _ in range(1000):
        million.free(million.alloc(128))
    each = (time.perf_counter() - begin) * 1e3
    pen.say(f"For comparison, allocating and freeing 128 of a million ids takes {each:.2f} µs.")
