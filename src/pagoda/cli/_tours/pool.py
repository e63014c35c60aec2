"""A tour of the ground floor: ids, tables, pools, and what they look like."""

from __future__ import annotations

import time

import torch

from pagoda.cli._tours.pen import Pen
from pagoda.errors import CapacityError, NotHeldError, PagodaError
from pagoda.ids import FreeList
from pagoda.pools import DeviceTable, Staging, TokenPool
from pagoda.tables import PageTable

__all__ = ["run"]

NUM_PAGES, PAGE_SIZE, NUM_ROWS, MAX_PAGES = 47, 16, 8, 16
LAYERS, HEADS, DIM = 4, 8, 128
COLOURS = ("36", "35", "33", "32", "34")


class _Tour:
    """One small pool, the requests in it, and the pen that draws them."""

    def __init__(self, pen: Pen, device: str) -> None:
        self.pen = pen
        staging = Staging(device)
        self.pages = FreeList(NUM_PAGES, what="pages")
        self.rows = FreeList(NUM_ROWS, what="rows")
        self.table = PageTable(NUM_ROWS, MAX_PAGES, PAGE_SIZE)
        self.device_table = DeviceTable(NUM_ROWS, MAX_PAGES, device, staging)
        shape = (HEADS, DIM)
        self.pool = TokenPool(
            NUM_PAGES, PAGE_SIZE, LAYERS, shape, shape, torch.bfloat16, device, staging=staging
        )
        self.names: dict[int, str] = {}  # row: request

    # ── what a request does ──────────────────────────────────────────────────────────────────────

    def admit(self, name: str, num_tokens: int) -> int:
        row = int(self.rows.alloc(1)[0])
        self.grow({row: num_tokens})
        self.names[row] = name
        return row

    def grow(self, new_lens: dict[int, int]) -> torch.Tensor:
        growth = self.table.grow(self.pages, list(new_lens), list(new_lens.values()))
        self.device_table.write(*growth.writes)
        return torch.from_numpy(growth.slots)

    def write(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values for all tokens of a row: [layers, tokens, heads, dim] each, as written."""
        slots = self.slots(row)
        keys, values = (torch.randn(LAYERS, len(slots), HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
        for layer in range(LAYERS):
            self.pool.store(
                layer, slots, keys[layer].to(self.pool.device), values[layer].to(self.pool.device)
            )
        return keys, values

    def finish(self, row: int, fence: int) -> None:
        self.pages.free(self.table.release(row), fence=fence)
        self.rows.free([row])
        del self.names[row]

    def slots(self, row: int) -> torch.Tensor:
        pages = torch.from_numpy(self.table.pages(row)).long()
        every = pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
        return every.flatten()[: self.table.num_tokens(row)]

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def draw(self) -> None:
        """Every page as a cell: its request and how full it is, · free, ? quarantined, ░ padding."""
        cells = {0: self.pen.paint("2", "░░")}
        for row, name in self.names.items():
            left = self.table.num_tokens(row)
            for page in self.table.pages(row).tolist():
                eighths = -(-min(left, PAGE_SIZE) * 8 // PAGE_SIZE)
                colour = COLOURS[(ord(name) - ord("A")) % len(COLOURS)]
                cells[page] = self.pen.paint(colour, name + " ▁▂▃▄▅▆▇█"[eighths])
                left -= PAGE_SIZE
        for page in range(1, NUM_PAGES + 1):
            if page not in cells:
                cells[page] = self.pen.paint("2", "· " if self.pages.is_free(page) else "? ")
        for begin in range(0, NUM_PAGES + 1, 16):
            line = " ".join(cells[page] for page in range(begin, min(begin + 16, NUM_PAGES + 1)))
            self.pen.say(f"page {begin:3d}  {line}")
        pages = self.pages
        counts = f"{pages.num_held} held, {pages.num_quarantined} quarantined, {pages.num_free} free"
        self.pen.say(self.pen.paint("2", f"          {counts}"))


def run(pen: Pen, device: str) -> None:
    """Allocate, write, read back, free, and show the pool after each. Errors: ConfigError for a device."""
    tour = _Tour(pen, device)
    torch.manual_seed(0)
    pen.part("The pool: ids, tables, tensors")

    pen.title("A pool")
    page_kib, pool_mib = tour.pool.page_bytes >> 10, tour.pool.memory_bytes() >> 20
    pen.say(f"{NUM_PAGES} pages of {PAGE_SIZE} tokens on {tour.pool.device}, {LAYERS} layers of K and V,")
    pen.say(f"{HEADS} heads × {DIM} in bfloat16: {page_kib} KiB a page, {pool_mib} MiB in all.")
    pen.say("Page 0 is padding: it takes the writes of padded tokens; nobody holds it.")
    tour.draw()

    pen.title("Three requests come in: lowest pages first, whole pages only")
    first = [tour.admit(name, n) for name, n in (("A", 70), ("B", 150), ("C", 36))]
    tour.draw()

    pen.title("Their keys and values are written and read back")
    for row in first:
        keys, values = tour.write(row)
        slots = tour.slots(row)
        for layer in range(LAYERS):
            for written, buffer in ((keys, tour.pool.k_buffer), (values, tour.pool.v_buffer)):
                if not torch.equal(written[layer], buffer[layer].cpu()[slots]):
                    raise PagodaError(f"request {tour.names[row]}: layer {layer} did not come back")
        pen.say(f"{tour.names[row]}: {len(slots)} tokens × {LAYERS} layers, equal to the bit")

    pen.title("Twelve decode steps: one call a step for all, half-used pages first")
    begin = time.perf_counter()
    for _ in range(12):
        tour.grow({row: tour.table.num_tokens(row) + 1 for row in first})
    each = (time.perf_counter() - begin) / 12 * 1e6
    pen.say(f"{each:.0f} µs a step here, the copy of the table to the device included")
    tour.draw()

    pen.title("B ends while a step still reads it: its pages wait for the fence (?)")
    tour.finish(first[1], fence=13)
    tour.draw()
    pen.say(f"step 13 is done: {tour.pages.pass_fence(13)} pages are free again")

    pen.title("D takes what B left, lowest first")
    row = tour.admit("D", 170)
    tour.draw()

    pen.title("C moves out into one byte buffer; E takes its pages; C comes back elsewhere")
    keys_before = tour.pool.k_buffer[1].cpu()[tour.slots(first[2])]
    num_tokens, packed = tour.table.num_tokens(first[2]), tour.pool.pack(tour.table.pages(first[2]))
    tour.finish(first[2], fence=13)
    tour.write(tour.admit("E", 40))
    back = tour.admit("C", num_tokens)
    tour.pool.unpack(tour.table.pages(back), packed)
    same = torch.equal(keys_before, tour.pool.k_buffer[1].cpu()[tour.slots(back)])
    pen.say(f"{packed.numel() // 1024} KiB packed and unpacked, equal to the bit: {'yes' if same else 'NO'}")
    if not same:
        raise PagodaError("a packed page did not come back")
    tour.draw()

    pen.title("Mistakes are caught at the call and change nothing")
    held = tour.table.pages(row)
    pen.make(
        [
            ("free a page twice", lambda: tour.pages.free([int(held[0]), int(held[0])]), NotHeldError),
            ("ask for too much", lambda: tour.pages.alloc(100), CapacityError),
            ("free the padding", lambda: tour.pages.free([0]), PagodaError),
        ]
    )
    tour.draw()

    pen.title("Everything ends, and nothing has leaked")
    for live in list(tour.names):
        tour.finish(live, fence=13)
    for part in (tour.pages, tour.rows, tour.table, tour.device_table, tour.pool):
        part.check()
    tour.draw()
    if tour.pages.num_free != NUM_PAGES or tour.rows.num_free != NUM_ROWS:
        raise PagodaError("pages or rows have leaked")
    million = FreeList(1_000_000)
    begin = time.perf_counter()
    for _ in range(1000):
        million.free(million.alloc(128))
    each = (time.perf_counter() - begin) * 1e3
    pen.say(f"and 128 ids out of a million: {each:.2f} µs to allocate and free")
