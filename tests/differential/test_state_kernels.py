"""The Triton kernels of states, and their torch reference, against states as plain dictionaries."""

import math
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.kernels import Region, Regions
from pagoda.kernels import _states_reference as reference
from profiles import examples

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    fused = pytest.importorskip("pagoda.kernels._states_fused", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=examples(300 if DEVICE == "cuda" else 80),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
VALUES = {
    torch.uint8: [0, 255],
    torch.int32: [-1, 7],
    torch.int64: [-(2**40) - 3, 5],
    torch.float16: [0.0, -2.5],
    torch.float32: [-math.inf, 1.25],
}


@CASES
@given(
    parts=st.lists(
        st.sampled_from(list(VALUES)).flatmap(
            lambda dtype: st.tuples(
                st.just(dtype),
                st.sampled_from(VALUES[dtype]),
                st.sampled_from([(), (0,), (1,), (3,), (2, 4), (16,), (5, 7), (1024,), (3000,)]),
                st.integers(0, 3),
            )
        ),
        max_size=5,
    ),
    num_rows=st.integers(1, 4),
    data=st.data(),
)
def test_a_row_of_all_tensors_is_filled_and_nothing_else(
    parts: list[tuple[torch.dtype, float, tuple[int, ...], int]], num_rows: int, data: st.DataObject
):
    """Rows of any size, which begin anywhere, in the middle of a larger tensor; of all tensors or of some."""
    row = data.draw(st.integers(0, num_rows - 1))
    some = data.draw(st.none() | st.tuples(*[st.integers(0, len(parts))] * 2).map(sorted))
    for kernels, device in ((fused, DEVICE), (reference, "cpu")):
        wholes, rows, expected = [], [], []
        for number, (dtype, value, shape, offset) in enumerate(parts):
            row_size = math.prod(shape)
            whole = torch.arange(offset + num_rows * row_size + 3, device=device).remainder(100).to(dtype)
            begin = offset + row * row_size
            wanted = whole.tolist()
            if some is None or some[0] <= number < some[1]:
                wanted[begin : begin + row_size] = [value] * row_size
            wholes.append(whole)
            expected.append(wanted)
            rows.append((whole[offset : offset + num_rows * row_size].view(num_rows, *shape), value))
        regions = Regions.of(rows, torch.device(device))
        kernels.fill_rows(regions if some is None else regions.some(*some), row, 1, None)
        assert [whole.tolist() for whole in wholes] == expected, kernels.__name__


# ── saves and restores ──────────────────────────────────────────────────────────────────────────────

NUM_ROWS, NUM_CHECKPOINTS, LONGEST = 5, 4, 40  # row 0 and checkpoint 0 included
OUTSIDE = [-1, -(2**31), 77, 2**31 - 1]
NUMPY = {torch.uint8: np.uint8, torch.int32: np.int32, torch.float32: np.float32, torch.float16: np.float16}


@dataclass(frozen=True)
class Part:
    """One part of a state, as a layout describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float
    kept: int | None = None
    holds_positions: bool = False


@st.composite
def some_parts(draw: st.DrawFn) -> Part:
    dtype = draw(st.sampled_from([torch.uint8, torch.int32, torch.float32, torch.float16]))
    initial = draw(st.sampled_from(VALUES[dtype]))
    cell = draw(st.sampled_from([(), (1,), (3,), (4,), (8,), (2, 16), (600,)]))
    match draw(st.sampled_from(["whole", "ring", "nothing", "positions"])):
        case "whole":
            return Part(draw(st.sampled_from([cell, (3, *cell), (17, *cell)])), dtype, initial)
        case "nothing":
            return Part(draw(st.sampled_from([cell, (6, *cell)])), dtype, initial, kept=0)
        case "ring":
            cells = draw(st.integers(1, 9))
            return Part((cells, *cell), dtype, initial, kept=draw(st.integers(0, cells)))
    cells = draw(st.integers(1, 9))
    return Part((cells,), torch.int32, -1, kept=draw(st.integers(0, cells)), holds_positions=True)


class States:
    """What each row holds of a part: its value at each position, and what the whole part contains."""

    def __init__(self, part: Part, noise: np.random.Generator) -> None:
        self.part = part
        self.tensor = self.noise(noise, (NUM_ROWS, *part.shape))  # as it is in the pool

    def noise(self, noise: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return noise.integers(1, 100, shape).astype(NUMPY[self.part.dtype])

    def run(self, row: int, length: int, noise: np.random.Generator) -> dict[int, np.ndarray]:
        """Compute a request of this length in a row: each token goes to its cell."""
        part = self.part
        if part.kept is None:
            self.tensor[row] = self.noise(noise, part.shape)
            return {}
        self.tensor[row] = part.initial
        if not part.shape:
            return {}
        tokens = {}
        for position in range(length):
            token = position if part.holds_positions else self.noise(noise, part.shape[1:])
            tokens[position] = self.tensor[row, position % part.shape[0]] = token
        return tokens

    def resumed(self, row: int, length: int, tokens: dict[int, np.ndarray]) -> np.ndarray:
        """Return what a row contains after it has resumed at this length, from its tokens alone."""
        part = self.part
        if part.kept is None:
            return self.tensor[row].copy()
        state = np.full(part.shape, part.initial, dtype=NUMPY[part.dtype])
        for position in range(max(0, length - part.kept), length):
            state[position % part.shape[0]] = tokens[position]
        return state


def pool_of(states: list[States], offset: int, device: str) -> tuple[Regions, list[torch.Tensor]]:
    """The states in tensors that begin at any element, between guards of other content."""
    wholes, regions = [], []
    for each in states:
        part = each.part
        whole = torch.full((offset + each.tensor.size + 3,), 77, dtype=part.dtype)
        whole[offset : offset + each.tensor.size] = torch.from_numpy(each.tensor.reshape(-1).copy())
        whole = whole.to(device)
        tensor = whole[offset : offset + each.tensor.size].view(NUM_ROWS, *part.shape)
        wholes.append(whole)
        regions.append(Region(tensor, part.initial, part.kept, part.holds_positions))
    return Regions.of(regions, torch.device(device)), wholes


def sections(data: st.DataObject, *contents: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Sections in one array, and where they begin: anywhere, in any order."""
    packed: list[int] = []
    begins = [0] * len(contents)
    for number in data.draw(st.permutations(range(len(contents)))):
        packed += [-9] * data.draw(st.integers(0, 3))
        begins[number] = len(packed)
        packed += contents[number]
    offset = data.draw(st.integers(0, min(begins)))  # aligned to nothing
    return torch.tensor(packed, dtype=torch.int32)[offset:], [begin - offset for begin in begins]


@CASES
@given(
    parts=st.lists(some_parts(), max_size=5),
    offset=st.sampled_from([0, 0, 1, 4]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_row_resumes_with_what_its_tokens_say(
    parts: list[Part], offset: int, seed: int, data: st.DataObject
):
    noise = np.random.default_rng(seed)
    states = [States(part, noise) for part in parts]
    saved = data.draw(st.lists(st.integers(0, NUM_ROWS - 1), max_size=NUM_CHECKPOINTS, unique=True))
    ids = data.draw(st.permutations(range(NUM_CHECKPOINTS)))[: len(saved)]
    lengths = [data.draw(st.integers(1, LONGEST)) for _ in saved]
    tokens = [[each.run(*pair, noise) for each in states] for pair in zip(saved, lengths, strict=True)]
    bad = data.draw(st.lists(st.sampled_from(OUTSIDE), max_size=2))  # such a pair is not copied
    wrong = [0] * len(bad)
    saves = [[*saved, *bad], [*lengths, *(1 for _ in bad)], [*ids, *wrong]]
    if data.draw(st.booleans()):
        saves = [[*saved, *wrong], [*lengths, *(1 for _ in bad)], [*ids, *bad]]
    targets = data.draw(st.permutations(range(NUM_ROWS)))[: len(saved)]
    restores = [[*targets, *saves[0][len(saved) :]], *saves[1:]]
    expected = [each.tensor.copy() for each in states]
    for each, content, number in zip(states, expected, range(len(states)), strict=True):
        for row, length, target, of in zip(saved, lengths, targets, tokens, strict=True):
            content[target] = each.resumed(row, length, of[number])

    packed, (save_rows, save_lengths, save_ids) = sections(data, *saves)
    more, (rows, at_lengths, at_ids) = sections(data, *restores)
    n = len(saves[0])
    found = []
    for kernels, device in ((fused, DEVICE), (reference, "cpu")):
        regions, wholes = pool_of(states, offset, device)
        before = [whole.clone() for whole in wholes]
        checkpoints = torch.full((NUM_CHECKPOINTS, max(16, regions.checkpoint_bytes)), 99, dtype=torch.uint8)
        checkpoints = checkpoints.to(device)
        kernels.save_states(packed.to(device), save_rows, save_lengths, save_ids, n, regions, checkpoints)
        assert all(torch.equal(*pair) for pair in zip(wholes, before, strict=True))
        kept = checkpoints.clone()
        kernels.restore_states(more.to(device), rows, at_lengths, at_ids, n, regions, checkpoints)
        assert torch.equal(checkpoints, kept)
        for whole, region, content in zip(wholes, regions.rows, expected, strict=True):
            assert np.array_equal(region.tensor.cpu().numpy(), content), kernels.__name__
            assert whole[:offset].eq(77).all()
            assert whole[offset + content.size :].eq(77).all()
        unused = [at for at in range(NUM_CHECKPOINTS) if at not in ids]
        assert checkpoints[unused].eq(99).all()
        found.append(kept.cpu())
    assert torch.equal(*found)


@CASES
@given(parts=st.lists(some_parts(), max_size=5), offset=st.sampled_from([0, 1, 4]), data=st.data())
def test_copies_and_resets_of_several_rows(parts: list[Part], offset: int, data: st.DataObject):
    noise = np.random.default_rng(5)
    states = [States(part, noise) for part in parts]
    order = data.draw(st.permutations(range(NUM_ROWS)))
    split = data.draw(st.integers(1, NUM_ROWS - 1))  # no row is source and target
    targets = order[split:]
    sources = [data.draw(st.sampled_from(order[:split])) for _ in targets]
    resets = data.draw(st.lists(st.integers(0, NUM_ROWS - 1), unique=True))
    for ids in (sources, targets, resets):
        for at in data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=1) if ids else st.just([])):
            ids[at] = data.draw(st.sampled_from(OUTSIDE))
    expected = [each.tensor.copy() for each in states]
    for content, part in zip(expected, parts, strict=True):
        for source, target in zip(sources, targets, strict=True):
            if 0 <= source < NUM_ROWS and 0 <= target < NUM_ROWS:
                content[target] = content[source]
        content[[row for row in resets if 0 <= row < NUM_ROWS]] = part.initial
    packed, (sources_at, targets_at, resets_at) = sections(data, sources, targets, resets)
    for kernels, device in ((fused, DEVICE), (reference, "cpu")):
        regions, wholes = pool_of(states, offset, device)
        kernels.copy_states(packed.to(device), sources_at, targets_at, len(sources), regions)
        kernels.fill_rows(regions, resets_at, len(resets), packed.to(device))
        for whole, region, content in zip(wholes, regions.rows, expected, strict=True):
            assert np.array_equal(region.tensor.cpu().numpy(), content), kernels.__name__
            assert whole[:offset].eq(77).all()
            assert whole[offset + content.size :].eq(77).all()


def test_parts_of_which_nothing_is_kept_and_parts_without_bytes_are_reset():
    shapes = [(4,), (4, 2), (0,), ()]
    for kernels, device in ((fused, DEVICE), (reference, "cpu")):
        tensors = [torch.full((3, *shape), 5, dtype=torch.int32, device=device) for shape in shapes]
        kept = [(-1, 0, True), (2, 0, False), (0, None, False), (7, 0, False)]
        regions = Regions.of([Region(*each) for each in zip(tensors, *zip(*kept, strict=True), strict=True)],
                             torch.device(device))  # fmt: skip
        assert regions.checkpoint_bytes == 0
        packed = torch.tensor([1, 6, 1], dtype=torch.int32, device=device)
        checkpoints = torch.zeros(2, 16, dtype=torch.uint8, device=device)
        kernels.save_states(packed, 0, 1, 2, 1, regions, checkpoints)
        kernels.restore_states(packed, 0, 1, 2, 1, regions, checkpoints)
        for tensor, (value, _, _) in zip(tensors, kept, strict=True):
            assert tensor[1].eq(value).all(), kernels.__name__
            assert tensor[[0, 2]].eq(5).all()
        assert not checkpoints.any()


def test_checkpoints_have_no_padding_between_parts_and_no_part_is_less_aligned_than_its_size():
    shapes = [(3,), (32,), (2, 5), (16,), (7,), (1,), (4,)]
    regions = Regions.of([(torch.zeros(2, *shape), 0.0) for shape in shapes], torch.device("cpu"))
    sizes = [4 * math.prod(shape) for shape in shapes]
    spans = sorted((at, at + size) for at, size in zip(regions.offsets, sizes, strict=True))
    assert [end for _, end in spans][:-1] == [begin for begin, _ in spans][1:]
    assert spans[-1][1] == sum(sizes)
    assert regions.checkpoint_bytes == -(-sum(sizes) // 16) * 16
    for at, size in zip(regions.offsets, sizes, strict=True):
        assert at % math.gcd(size, 16) == 0
