"""The Triton kernel of gather against bytes cut out by hand and the torch reference, bit for bit."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.kernels import _gather_reference as gather_reference

if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    gather_fused = pytest.importorskip("pagoda.kernels._gather_fused", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = settings(
    max_examples=300 if DEVICE == "cuda" else 80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NUM_PAGES = 5
GUARD = 0xA5


def noise(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)


def judge(slots: torch.Tensor, buffers: list[torch.Tensor], page_tokens: int, offset: int) -> None:
    """Gather with both into the middle of larger tensors, and compare every byte of these."""
    n, num_slots = slots.shape[0], NUM_PAGES * page_tokens
    sizes = [pages.shape[1] // page_tokens for pages in buffers]
    expected = []
    for pages, size in zip(buffers, sizes, strict=True):
        whole = pages.numpy().tobytes()
        rows = (whole[s * size :][:size] if 0 <= s < num_slots else bytes(size) for s in slots.tolist())
        expected.append(bytes([GUARD] * offset) + b"".join(rows) + bytes([GUARD] * 16))
    for kernels, device in ((gather_fused, DEVICE), (gather_reference, "cpu")):
        pool = [pages.to(device, copy=True) for pages in buffers]
        rooms = [torch.full((offset + n * size + 16,), GUARD, dtype=torch.uint8).to(device) for size in sizes]
        outs = [room[offset : offset + n * size] for room, size in zip(rooms, sizes, strict=True)]
        addresses, out_addresses = (
            torch.tensor([tensor.data_ptr() for tensor in tensors], device=device) for tensors in (pool, outs)
        )
        kernels.gather(slots.to(device), pool, addresses, page_tokens, outs, out_addresses)
        assert [room.cpu().numpy().tobytes() for room in rooms] == expected, kernels.__name__
        assert all(torch.equal(mine.cpu(), pages) for mine, pages in zip(pool, buffers, strict=True))


@CASES
@given(data=st.data())
def test_gather_agrees_for_any_width_alignment_and_padding(data: st.DataObject):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    page_tokens = data.draw(st.sampled_from([1, 3, 4, 16]))
    sizes = data.draw(  # bytes of a row
        st.lists(st.sampled_from([1, 2, 6, 8, 16, 48, 128, 1152]), min_size=1, max_size=2)
    )
    buffers = [noise(random, NUM_PAGES, page_tokens * size) for size in sizes * data.draw(st.integers(1, 3))]
    num_slots = NUM_PAGES * page_tokens
    if data.draw(st.booleans()):
        pages = torch.randint(0, NUM_PAGES, (data.draw(st.integers(0, 4)),), generator=random)
        slots = (pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
    else:
        slots = torch.randint(0, num_slots, (data.draw(st.integers(0, 40)),), generator=random)
    n = slots.shape[0]
    for at in data.draw(st.lists(st.integers(0, n - 1), max_size=3) if n else st.just([])):
        slots[at] = data.draw(st.sampled_from([-1, -7, num_slots, 2**31 - 1]))  # these give zeros
    slots = slots.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    judge(slots, buffers, page_tokens, data.draw(st.sampled_from([0, 1, 2, 4, 8, 16])))


@pytest.mark.parametrize("size", [8 * 1023, 8 * 1024, 8 * 1025, 8 * 2500, 2051])
def test_rows_wider_than_a_block_and_no_power_of_two(size: int):
    random = torch.Generator().manual_seed(0)
    buffers = [noise(random, NUM_PAGES, 2 * width) for width in (size, 24)]
    judge(torch.tensor([3, 0, 9, 7, -1, 5, 6, 10, 8]), buffers, 2, 0)


def test_more_tokens_than_a_program_has():
    random = torch.Generator().manual_seed(0)
    for n in (127, 128, 129, 1025):
        slots = torch.randint(-1, NUM_PAGES * 4, (n,), generator=random)
        judge(slots, [noise(random, NUM_PAGES, 4 * 8)] * 2, 4, 0)


def test_the_judge_sees_one_wrong_byte(monkeypatch: pytest.MonkeyPatch):
    random = torch.Generator().manual_seed(0)
    right = gather_reference.gather

    def wrong(*arguments: object) -> None:
        right(*arguments)  # type: ignore[arg-type]
        arguments[4][1].view(-1)[9] ^= 1  # type: ignore[index]

    monkeypatch.setattr(gather_reference, "gather", wrong)
    with pytest.raises(AssertionError, match="gather_reference"):
        judge(torch.tensor([3, 4]), [noise(random, NUM_PAGES, 32)] * 2, 4, 0)
