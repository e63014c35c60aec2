"""Kernels of compressed attention past 2^31 bytes and elements: what lies far away is what lies near."""

import pytest
import torch

from pagoda.kernels import Regions, fill_rows
from pagoda.kernels.compress import compress, push
from pagoda.kernels.entries import (
    Codec,
    Ring,
    Tokens,
    gather_all,
    gather_chosen,
    gather_windows,
    store_entries,
    store_window,
)
from pagoda.layout._entries import compressed_fp8

ENTRY = compressed_fp8(512, 64)
CODEC, PER_PAGE, PAGE_BYTES = Codec.of(ENTRY), 32, ENTRY.page_bytes(32)
BF16 = torch.bfloat16

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def memory():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def one_request(row: int, num_tokens: int) -> Tokens:
    return Tokens(ints([row]), ints([0] * num_tokens), ints(list(range(num_tokens))))


def test_pages_past_the_border():
    num_blocks = 2**32 // PAGE_BYTES
    values = torch.randn(2 * PER_PAGE, 512, dtype=BF16, device="cuda")
    tokens, read = one_request(1, len(values)), []
    chosen = torch.randint(0, len(values), (len(values), 7), dtype=torch.int32, device="cuda")
    for blocks, last in ((3, 2), (num_blocks, num_blocks - 1)):
        pages = torch.zeros(blocks, PAGE_BYTES, dtype=torch.uint8, device="cuda")
        table = ints([-1, -1, last, 1]).view(2, 2)
        store_entries(CODEC, tokens, values, 1, table, pages, PER_PAGE)
        out, lens = torch.zeros(1, len(values), 512, dtype=BF16, device="cuda"), ints([0])
        gather_all(CODEC, tokens, 1, table, pages, PER_PAGE, out, lens)
        picked = torch.zeros(*chosen.shape, 512, dtype=BF16, device="cuda")
        mask = torch.zeros(chosen.shape, dtype=torch.bool, device="cuda")
        gather_chosen(CODEC, tokens, 1, chosen, table, pages, PER_PAGE, picked, mask)
        written = pages.any(1).nonzero().flatten().tolist()
        assert written == sorted([1, last])
        read.append((pages[last], out, picked, mask))
    assert num_blocks * PAGE_BYTES > 2**31 + 2**30
    for near, far in zip(*read, strict=True):
        assert torch.equal(near, far)
    assert torch.allclose(read[0][1][0].float(), values.float(), rtol=0.07, atol=0.05)


def test_rings_past_the_border():
    values, read = torch.randn(200, 512, dtype=BF16, device="cuda"), []
    for row in (1, 2**32 // (128 * CODEC.data_bytes)):
        data, scales = (
            torch.zeros(row + 1, 128, n, dtype=torch.uint8, device="cuda")
            for n in (CODEC.data_bytes, CODEC.scale_bytes)
        )
        ring = Ring(data, scales, torch.full((row + 1, 128), -1, dtype=torch.int32, device="cuda"))
        tokens = one_request(row, 200)
        store_window(CODEC, tokens, values, ring)
        out, lens = torch.zeros(200, 128, 512, dtype=BF16, device="cuda"), ints([0] * 200)
        gather_windows(CODEC, tokens, 128, ring, out, lens)
        assert data.view(row + 1, -1).any(1).nonzero().flatten().tolist() == [row]
        read.append((data[row], scales[row], ring.positions[row], out))
    for near, far in zip(*read, strict=True):
        assert torch.equal(near, far)
    assert torch.allclose(read[0][3][199].float(), values[72:].float(), rtol=0.07, atol=0.05)


def test_outputs_past_the_border():
    num_tokens = 2**31 // (128 * 512) + 3
    shapes = ((2, 128, CODEC.data_bytes), (2, 128, CODEC.scale_bytes))
    data, scales = (torch.randint(100, 120, shape, dtype=torch.uint8, device="cuda") for shape in shapes)
    ring = Ring(data, scales, torch.arange(128, dtype=torch.int32, device="cuda").repeat(2, 1))
    each = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    tokens = Tokens(torch.ones_like(each), each, torch.full_like(each, 127))
    out = torch.zeros(num_tokens, 128, 512, dtype=BF16, device="cuda")
    gather_windows(CODEC, tokens, 128, ring, out, torch.zeros_like(each))
    assert out.numel() > 2**31
    assert out[0].any()
    assert all(torch.equal(out[0], out[at]) for at in (1, num_tokens - 3, num_tokens - 1))


def test_values_past_the_border():
    """Tokens so far apart that the third begins behind 2^31 numbers."""
    stride = 2**30 + 16
    base = torch.zeros(2 * stride + 512, dtype=BF16, device="cuda")
    values = base.as_strided((3, 512), (stride, 1))
    values.copy_(torch.randn(3, 512, device="cuda"))
    read = []
    for given in (values.contiguous(), values):
        pages = torch.zeros(2, PAGE_BYTES, dtype=torch.uint8, device="cuda")
        store_entries(CODEC, one_request(1, 3), given, 1, ints([-1, 1]).view(2, 1), pages, PER_PAGE)
        read.append(pages)
    assert torch.equal(*read)
    assert read[0].any()


def test_states_of_compressors_past_the_border():
    """All tokens of an entry but the last come from the state of the last row."""
    values, scores = (torch.randn(128, 512, device="cuda") for _ in range(2))
    read = []
    for row in (1, 2**31 // (128 * 512) + 2):
        state = [torch.zeros(row + 1, 128, 512, device="cuda") for _ in range(2)]
        push(one_request(row, 127), values[:127], scores[:127], *state)
        out = torch.zeros(1, 512, device="cuda")
        last = Tokens(ints([row]), ints([0]), ints([127]))
        compress(last, values[127:], scores[127:], 128, *state, out)
        assert state[0].view(row + 1, -1).any(1).nonzero().flatten().tolist() == [row]
        read.append(out)
    assert torch.equal(*read)
    torch.testing.assert_close(read[0][0], (scores.softmax(0) * values).sum(0), rtol=1e-5, atol=1e-5)


def test_rows_past_the_border_are_filled():
    num_rows = 2**32 // 131_072
    whole = torch.zeros(num_rows, 131_072, dtype=torch.uint8, device="cuda")
    fill_rows(Regions.of([(whole, 3)], whole.device), num_rows - 1)
    assert whole.any(1).nonzero().flatten().tolist() == [num_rows - 1]
    assert (whole[-1] == 3).all()
