"""The Triton kernels of entries against the torch reference, bit for bit, and both against plain Python."""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from differential.entry_layouts import ENTRIES
from pagoda.kernels import _entries_reference as entries_reference
from pagoda.kernels._entries_reference import decode, encode
from pagoda.kernels.entries import Codec, Ring, Tokens
from profiles import examples

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    entries_fused = pytest.importorskip("pagoda.kernels._entries_fused", reason="needs triton")
    from pagoda.kernels import _tokens_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=examples(30 if DEVICE == "cuda" else 20),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# As in production, and as large batches are treated, on small ones.
SIZES: dict[str, dict[str, int]] = {
    "small batches": {},
    "large batches": {
        "_FEW_TOKENS": 0,
        "_LONG_RUNS": 0,
        "_SCAN": 4,
        "_PROGRAM_NUMBERS": 1024,
        "_SEARCH_NUMBERS": 128,
        "_MANY_TILES": 1,
        "_MOST_TILES": 2,
    },
}


@pytest.fixture(autouse=True, params=SIZES.values(), ids=SIZES, scope="module")
def sizes(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in request.param.items():
            patch.setattr(entries_fused if hasattr(entries_fused, name) else _tokens_fused, name, size)
        yield


# numpy says so where numbers pass those of float16 or, quantised, of float32: they are infinite then.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
NUM_ROWS, NUM_PAGES, COLUMNS = 4, 9, 3


class Case(NamedTuple):
    """A batch over pools of noise: what was there before is there after, where nothing is written."""

    codec: Codec
    tokens: Tokens
    spans: list[tuple[int, int, int]]  # row, first position, number of tokens a request
    values: torch.Tensor
    table: torch.Tensor
    pages: torch.Tensor
    entries_per_page: int
    ring_data: torch.Tensor
    ring_scales: torch.Tensor
    ring_positions: torch.Tensor

    @property
    def ring(self) -> Ring:
        scales = self.ring_scales if self.codec.scale_bytes else None
        return Ring(self.ring_data, scales, self.ring_positions)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    entry = ENTRIES[draw(st.sampled_from(sorted(ENTRIES)))]
    codec = Codec.of(entry)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    entries_per_page = draw(st.sampled_from([1, 2, 5, 8]))
    ring_size = draw(st.sampled_from([1, 3, 8]))
    rows = draw(st.permutations(range(NUM_ROWS + 1)))[: draw(st.integers(0, NUM_ROWS))]
    spans = [(row, draw(st.integers(0, 30)), draw(st.integers(0, 12))) for row in rows]
    ids, positions = [], []
    for request, (_, first, number) in enumerate(spans):
        before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        ids += [request] * (before + number + behind)  # padding by its position, of a request or not
        positions += [-1] * before + [*range(first, first + number)] + [-1] * behind
        padding = draw(st.integers(0, 2))
        ids += [-1] * padding
        positions += draw(st.lists(st.integers(-5, 40), min_size=padding, max_size=padding))
    if draw(st.booleans()) and rows:  # a row that is none
        spans[0] = (draw(st.sampled_from([-1, NUM_ROWS + 1, 10**6])), *spans[0][1:])
    tokens = Tokens(
        *(
            torch.tensor(x, dtype=torch.int32).reshape(-1)
            for x in ([row for row, _, _ in spans], ids, positions)
        )
    )
    if draw(st.booleans()):  # as batches have them
        tokens = tokens._replace(positions=tokens.positions.long())
    values = torch.randn(len(ids), codec.dim, generator=random)
    values *= torch.randint(-20, 20, (len(ids), 1), generator=random).float().exp2()
    values = values.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    if draw(st.booleans()):  # a part of a wider projection: rows do not follow each other
        values = torch.cat([values, torch.full_like(values, torch.nan)], 1)[:, : codec.dim]
    table = torch.randint(-1, NUM_PAGES + 1, (NUM_ROWS + 1, COLUMNS), generator=random, dtype=torch.int32)
    # Each block once, as the free-list gives them; what is none may stand twice.
    is_first = torch.zeros_like(table, dtype=torch.bool).view(-1)
    seen: set[int] = set()
    for at, block in enumerate(table.view(-1).tolist()):
        is_first[at] = block not in seen
        seen.add(block)
    table = table.where(is_first.view_as(table), -1)

    def noise(*shape: int) -> torch.Tensor:
        """Bytes that are numbers in every format."""
        n = shape[0]
        numbers = torch.randn(n, codec.dim, generator=random)
        data, scales = encode(codec, numbers)
        return torch.cat([data, scales], 1)

    page_bytes = entry.page_bytes(entries_per_page)
    pages = torch.randint(0, 256, (NUM_PAGES, page_bytes), generator=random, dtype=torch.uint8)
    filled = noise(NUM_PAGES * entries_per_page)
    data, scales = filled.split([codec.data_bytes, codec.scale_bytes], 1)
    middle = entries_per_page * codec.data_bytes
    pages[:, :middle] = data.reshape(NUM_PAGES, -1)
    pages[:, middle : middle + entries_per_page * codec.scale_bytes] = scales.reshape(NUM_PAGES, -1)
    ring = noise((NUM_ROWS + 1) * ring_size).split([codec.data_bytes, codec.scale_bytes], 1)
    ring_data, ring_scales = (
        part.reshape(NUM_ROWS + 1, ring_size, -1).contiguous()
        if part.shape[1]
        else part.new_zeros(NUM_ROWS + 1, ring_size, 0)
        for part in ring
    )
    held = torch.randint(-1, 30, (NUM_ROWS + 1, ring_size), generator=random, dtype=torch.int32)
    at = torch.arange(ring_size, dtype=torch.int32)
    held = torch.where(held < 0, held, held // ring_size * ring_size + at)  # a position where it may stand
    return Case(codec, tokens, spans, values, table, pages, entries_per_page, ring_data, ring_scales, held)


Act = Callable[[Any, Case, dict[str, torch.Tensor]], None]


def both(case: Case, made: dict[str, torch.Tensor], act: Act) -> tuple[Case, dict[str, torch.Tensor]]:
    """Run with reference and kernel on copies of everything; the same bytes are left. Gives them."""
    results = []
    for kernels, device in ((entries_reference, "cpu"), (entries_fused, DEVICE)):
        copied = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
            if isinstance(x, torch.Tensor) else Tokens(*(y.to(device) for y in x))
            if isinstance(x, Tokens) else x
            for x in case
        ]  # fmt: skip
        outs = {name: x.to(device, copy=True) for name, x in made.items()}
        act(kernels, Case(*copied), outs)
        tensors = [x.cpu() for x in copied if isinstance(x, torch.Tensor)]
        results.append(
            (Case(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in copied)), tensors, outs)
        )
    (left, reference, outs), (_, fused, fused_outs) = results
    for a, b in zip(reference, fused, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for name, tensor in outs.items():
        mine = fused_outs[name].cpu()
        assert torch.equal(tensor.view(torch.uint8), mine.view(torch.uint8)), name
    return left._replace(tokens=case.tokens), outs


def as_read(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return decode(codec, *encode(codec, values))


def page_entry(case: Case, pages: torch.Tensor, row: int, entry: int) -> torch.Tensor | None:
    """The numbers of an entry of a row, by hand; None if it has no block."""
    if not 0 < row <= NUM_ROWS or entry // case.entries_per_page >= COLUMNS:
        return None
    block = int(case.table[row, entry // case.entries_per_page])
    if not 0 < block < NUM_PAGES:
        return None
    codec, at = case.codec, entry % case.entries_per_page
    data = pages[block, at * codec.data_bytes :][: codec.data_bytes]
    begin = case.entries_per_page * codec.data_bytes + at * codec.scale_bytes
    return decode(codec, data[None], pages[block, begin:][None, : codec.scale_bytes])[0]


def own_tokens(case: Case) -> list[tuple[int, int, int]]:
    """(token, row, position) of those that are of a row."""
    ids, positions = case.tokens.request_ids.tolist(), case.tokens.positions.tolist()
    rows = [row for row, _, _ in case.spans]
    found = ((token, rows[i], p) for token, (i, p) in enumerate(zip(ids, positions, strict=True)) if i >= 0)
    return [each for each in found if 0 < each[1] <= NUM_ROWS and each[2] >= 0]


@CASES
@given(case=cases())
def test_tokens_are_written_to_rings(case: Case):
    def act(kernels: Any, at: Case, outs: dict[str, torch.Tensor]) -> None:
        kernels.store_window(at.codec, at.tokens, at.values, at.ring)

    left, _ = both(case, {}, act)
    size = case.ring_positions.shape[1]
    expected, expected_scales, held = (
        x.clone() for x in (case.ring_data, case.ring_scales, case.ring_positions)
    )
    for token, row, position in own_tokens(case):  # in order: the last one stays
        data, scales = encode(case.codec, case.values[token : token + 1])
        expected[row, position % size], expected_scales[row, position % size] = data[0], scales[0]
        held[row, position % size] = position
    assert torch.equal(left.ring_data, expected)
    assert torch.equal(left.ring_scales, expected_scales)
    assert torch.equal(left.ring_positions, held)


@CASES
@given(case=cases(), ratio=st.sampled_from([1, 2, 3, 7]))
def test_ends_of_blocks_are_written_to_pages(case: Case, ratio: int):
    def act(kernels: Any, at: Case, outs: dict[str, torch.Tensor]) -> None:
        kernels.store_entries(at.codec, at.tokens, at.values, ratio, at.table, at.pages, at.entries_per_page)

    left, _ = both(case, {}, act)
    written = set()
    for token, row, position in own_tokens(case):
        entry = (position + 1) // ratio - 1
        found = page_entry(case, left.pages, row, entry)
        if (position + 1) % ratio == 0 and found is not None:
            assert torch.equal(found, as_read(case.codec, case.values[token : token + 1])[0])
            written.add((int(case.table[row, entry // case.entries_per_page]), entry % case.entries_per_page))
    # Nothing else changed: not the null block, not the padding of pages.
    codec, middle = case.codec, case.entries_per_page * case.codec.data_bytes
    untouched = torch.ones_like(case.pages, dtype=torch.bool)
    for block, at in written:
        untouched[block, at * codec.data_bytes :][: codec.data_bytes] = False
        untouched[block, middle + at * codec.scale_bytes :][: codec.scale_bytes] = False
    assert torch.equal(left.pages[untouched], case.pages[untouched])


@pytest.mark.parametrize(
    ("ids", "positions", "written"),
    [
        ([-1, 0, 0, -1], [8, 2, 3, 11], {0: 2}),  # padding that looks like one request's from outside
        ([0] * 5, [3, 4, 5, 6, 7], {0: 0, 1: 4}),  # a group that is not full
        ([0] * 4 + [-1], [4, 5, 6, 7, 0], {1: 3}),
        ([0, 0, 1, 1, 1, 1], [6, 7, 0, 1, 2, 3], {1: 1, 2: 5}),  # groups of two requests
        ([0, 1, 2, 3], [3, 3, 3, 3], {0: 0, 2: 1, 4: 2, 6: 3}),  # every token ends a block
        ([0, -1, 1, 7, 1], [3, 3, -1, 3, 3], {0: 0, 2: 4}),
    ],
)
def test_ends_of_blocks_in_groups_of_all_kinds(ids: list[int], positions: list[int], written: dict[int, int]):
    """`written`: which token each entry comes from; requests have two each."""
    entry = ENTRIES["float32"]
    codec, values = Codec.of(entry), torch.randn(len(ids), 16)
    parts = ([1, 2, 3, 4], ids, positions)
    tokens = Tokens(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in parts))
    table = torch.tensor([[-1], [1], [2], [3], [4]], dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(5, entry.page_bytes(2), dtype=torch.uint8, device=DEVICE)
    entries_fused.store_entries(codec, tokens, values.to(DEVICE), 4, table, pages, 2)
    expected = torch.zeros(8, 16)
    for at, token in written.items():
        expected[at] = values[token]
    assert torch.equal(pages.cpu()[1:].view(torch.float32).view(8, 16), expected)


SCALED = [name for name, entry in ENTRIES.items() if entry.scales]


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Each is widened to float32 as it is read, whatever the entry.
    [*((name, torch.float32) for name in SCALED), (SCALED[0], torch.bfloat16), (SCALED[-1], torch.float16)],
)
def test_numbers_that_are_none_become_the_same_bytes(name: str, dtype: torch.dtype):
    """NaN leaves the others of its block as they are; infinity saturates; zeros keep what they have."""
    entry = ENTRIES[name]
    codec = Codec.of(entry)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 300.0])
    random = torch.Generator().manual_seed(3)
    values = torch.randn(24, codec.dim, generator=random)
    at = torch.randint(0, len(special), (24, codec.flat_dim), generator=random)
    rare = torch.rand(24, codec.flat_dim, generator=random) < torch.linspace(0, 1, 24)[:, None]
    values[:, : codec.flat_dim] = torch.where(rare, special[at], values[:, : codec.flat_dim])
    values[-1, : codec.flat_dim] = torch.nan
    written = []
    for kernels, device in ((entries_reference, "cpu"), (entries_fused, DEVICE)):
        table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
        pages = torch.zeros(2, entry.page_bytes(24), dtype=torch.uint8, device=device)
        parts = [1], [0] * 24, range(24)
        tokens = Tokens(*(torch.tensor(x, dtype=torch.int32, device=device) for x in parts))
        kernels.store_entries(codec, tokens, values.to(dtype).to(device), 1, table, pages, 24)
        out, lens = (
            torch.zeros(1, 24, codec.dim, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        kernels.gather_all(codec, tokens, 1, table, pages, 24, out, lens)
        written.append((pages.cpu(), out.cpu()))
    (reference, read), (fused, fused_read) = written
    if codec.flat_dtype == "float8_e4m3fn":  # a NaN may have a sign or none
        for pages in (reference, fused):
            numbers = pages[:, : 24 * codec.data_bytes]
            numbers[numbers == 0xFF] = 0x7F
    assert torch.equal(reference, fused)
    torch.testing.assert_close(read, fused_read, rtol=0, atol=0, equal_nan=True)
    assert read[0, :, : codec.flat_dim].isnan().any() == (codec.flat_dtype == "float8_e4m3fn")


OUT_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype)


@CASES
@given(case=cases(), ratio=st.sampled_from([1, 2, 3]), dtype=OUT_DTYPES, data=st.data())
def test_chosen_entries(case: Case, ratio: int, dtype: torch.dtype, data: st.DataObject):
    num_tokens, k = len(case.tokens.positions), data.draw(st.integers(1, 6))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    chosen = torch.randint(-2, 16, (num_tokens, k), generator=random)
    chosen = chosen.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    made = {
        "out": poisoned(num_tokens, k, case.codec.dim, dtype=dtype),
        "mask": torch.ones(num_tokens, k, dtype=torch.bool),
        "chosen": chosen,
    }

    def act(kernels: Any, at: Case, outs: dict[str, torch.Tensor]) -> None:
        kernels.gather_chosen(
            at.codec, at.tokens, ratio, outs["chosen"], at.table, at.pages, at.entries_per_page, outs["out"],
            outs["mask"],
        )  # fmt: skip

    _, outs = both(case, made, act)
    expected = torch.zeros(num_tokens, k, case.codec.dim)
    mask = torch.zeros(num_tokens, k, dtype=torch.bool)
    for token, row, position in own_tokens(case):
        for i, entry in enumerate(chosen[token].tolist()):
            found = page_entry(case, case.pages, row, entry) if 0 <= entry < (position + 1) // ratio else None
            if found is not None:
                expected[token, i], mask[token, i] = found, True
    assert torch.equal(outs["mask"], mask)
    assert torch.equal(outs["out"], expected.to(dtype))


@CASES
@given(case=cases(), ratio=st.sampled_from([1, 2, 7]), dtype=OUT_DTYPES, width=st.integers(0, 20))
def test_all_entries(case: Case, ratio: int, dtype: torch.dtype, width: int):
    batch = len(case.spans)
    made = {
        "out": poisoned(batch, width, case.codec.dim, dtype=dtype),
        "lens": torch.full((batch,), 99, dtype=torch.int32),
    }

    def act(kernels: Any, at: Case, outs: dict[str, torch.Tensor]) -> None:
        kernels.gather_all(
            at.codec, at.tokens, ratio, at.table, at.pages, at.entries_per_page, outs["out"], outs["lens"]
        )

    _, outs = both(case, made, act)
    expected = torch.zeros(batch, width, case.codec.dim)
    lens = []
    for request, (row, first, number) in enumerate(case.spans):
        visible = (first + number) // ratio if number and 0 < row <= NUM_ROWS else 0
        lens.append(visible)
        for entry in range(min(visible, width)):
            found = page_entry(case, case.pages, row, entry)
            if found is not None:
                expected[request, entry] = found
    assert outs["lens"].tolist() == lens
    assert torch.equal(outs["out"], expected.to(dtype))


def ring_entry(case: Case, row: int, position: int) -> torch.Tensor | None:
    at = position % case.ring_positions.shape[1]
    if case.ring_positions[row, at] != position:
        return None
    return decode(case.codec, case.ring_data[row, at][None], case.ring_scales[row, at][None])[0]


@CASES
@given(case=cases(), window=st.sampled_from([1, 3, 8]), dtype=OUT_DTYPES)
def test_windows_of_tokens(case: Case, window: int, dtype: torch.dtype):
    num_tokens = len(case.tokens.positions)
    made = {
        "out": poisoned(num_tokens, window, case.codec.dim, dtype=dtype),
        "lens": torch.full((num_tokens,), 99, dtype=torch.int32),
    }

    def act(kernels: Any, at: Case, outs: dict[str, torch.Tensor]) -> None:
        kernels.gather_windows(at.codec, at.tokens, window, at.ring, outs["out"], outs["lens"])

    _, outs = both(case, made, act)
    expected, lens = torch.zeros(num_tokens, window, case.codec.dim), [0] * num_tokens
    for token, row, position in own_tokens(case):
        seen = range(max(0, position - window + 1), position + 1)
        lens[token] = len(seen)
        for i, where in enumerate(seen):
            found = ring_entry(case, row, where)
            if found is not None:
                expected[token, i] = found
    assert outs["lens"].tolist() == lens
    assert torch.equal(outs["out"], expected.to(dtype))


@CASES
@given(case=cases(), window=st.sampled_from([1, 3, 8]), dtype=OUT_DTYPES, extra=st.integers(-3, 3))
def test_windows_before_chunks_and_the_chunks(case: Case, window: int, dtype: torch.dtype, extra: int):
    batch = len(case.spans)
    width = max(0, window - 1 + max((number for _, _, number in case.spans), default=0) + extra)
    made = {
        "out": poisoned(batch, width, case.codec.dim, dtype=dtype),
        "lens": torch.full((batch,), 99, dtype=torch.int32),
    }

    def act(kernels: Any, at: Case, outs: dict[str, torch.Tensor]) -> None:
        kernels.gather_chunk(at.codec, at.tokens, window, at.ring, at.values, outs["out"], outs["lens"])

    _, outs = both(case, made, act)
    expected, lens = torch.zeros(batch, width, case.codec.dim), []
    tokens = {(row, position): token for token, row, position in own_tokens(case)}
    for request, (row, first, number) in enumerate(case.spans):
        if not number or not 0 < row <= NUM_ROWS:
            lens.append(0)
            continue
        seen = range(max(0, first - window + 1), first + number)
        lens.append(len(seen))
        for i, where in enumerate(list(seen)[:width]):
            if where >= first:
                token = tokens[row, where]
                found = as_read(case.codec, case.values[token : token + 1])[0]
            else:
                found = ring_entry(case, row, where)
            if found is not None:
                expected[request, i] = found
    assert outs["lens"].tolist() == lens
    assert torch.equal(outs["out"], expected.to(dtype))
