"""Pools past 2^31 elements: offsets are 64-bit."""

import pytest
import torch

from pagoda import TokenPool

pytestmark = pytest.mark.gpu

WIDTH = 8 * 128
NUM_PAGES = 2**17 + 7  # of 16 slots: 2^31 elements and more


@pytest.fixture(scope="module")
def pool() -> TokenPool:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    return TokenPool(NUM_PAGES, 16, 1, (8, 128), (8, 128), torch.bfloat16, "cuda")


def test_store_reaches_both_sides_of_the_border(pool: TokenPool):
    border = 2**31 // WIDTH
    assert pool.k_buffer[0].numel() > 2**31 + 100 * WIDTH
    slots = torch.tensor([border - 1, border, pool.num_slots - 1, 16], device="cuda")
    k, v = (torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pool.store(0, slots, k, v)
    assert torch.equal(pool.k_buffer[0][slots], k)
    assert torch.equal(pool.v_buffer[0][slots], v)
    written = pool.k_buffer[0].view(pool.num_slots, -1).any(dim=1).nonzero().flatten()
    assert written.tolist() == sorted(slots.tolist())


def test_rows_are_read_past_the_border_too(pool: TokenPool):
    far = pool.v_buffer[0].view(-1)
    far[:WIDTH].fill_(3)
    far[2**31 + 64 : 2**31 + 64 + WIDTH].normal_()
    rows = far.as_strided((2, WIDTH), (2**31 + 64, 1))
    target = TokenPool(4, 16, 1, (8, 128), None, torch.bfloat16, "cuda")
    target.store(0, [20, 21], rows, None)
    assert torch.equal(target.k_buffer[0][20:22].view(2, -1), rows)


def test_pages_are_packed_past_the_border(pool: TokenPool):
    pool.k_buffer[0][-16:].normal_()
    packed = pool.pack([NUM_PAGES, 1])
    pool.unpack([2, NUM_PAGES - 1], packed)
    assert torch.equal(pool.k_buffer[0][32:48], pool.k_buffer[0][-16:])
    assert torch.equal(pool.v_buffer[0][-32:-16], pool.v_buffer[0][16:32])
