"""Numbers of entries as bytes: the formats by their definition, and layouts that no kernel knows."""

import math

import pytest
import torch

from differential.entry_layouts import ENTRIES, plain_entry
from pagoda.errors import ConfigError
from pagoda.kernels._entries_reference import decode, encode
from pagoda.kernels.entries import Codec
from pagoda.layout._entries import Entry, TensorSpec, compressed_fp8, index_keys, latent_fp8

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def numbers(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Of very different sizes from one to the next."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=random) * torch.rand(n, 1, generator=random).mul(24).sub(12).exp2()


def test_an_entry_of_deepseek_v4_byte_by_byte():
    """448 × fp8, 64 × bfloat16, 7 exponents, one byte of padding."""
    codec, values = Codec.of(compressed_fp8(512, 64)), numbers(50, 512)
    values[3, 64:128] = 0
    data, scales = encode(codec, values)
    assert (codec.dim, codec.data_bytes, codec.scale_bytes, codec.num_bytes) == (512, 576, 8, 584)
    assert (data.shape, scales.shape) == ((50, 576), (50, 8))
    assert torch.equal(data[:, 448:].contiguous().view(torch.bfloat16), values[:, 448:].bfloat16())
    assert not scales[:, 7].any()
    for row, kept, stored in zip(values, scales.tolist(), data, strict=True):
        for block in range(7):
            part = row[64 * block : 64 * block + 64]
            exponent = math.ceil(math.log2(max(float(part.abs().max()), 1e-4) / 448))
            assert kept[block] == exponent + 127
            expected = (part.double() * 2.0**-exponent).float().to(torch.float8_e4m3fn)
            assert torch.equal(stored[64 * block : 64 * block + 64], expected.view(torch.uint8))


def test_a_key_in_fp8_has_one_scale_for_all():
    codec, values = Codec.of(index_keys(128, "fp8")), numbers(50, 128)
    data, scales = encode(codec, values)
    largest = values.abs().amax(1, keepdim=True)
    torch.testing.assert_close(scales.view(torch.float32), largest.clamp(min=1e-4) / 448)
    back = decode(codec, data, scales)
    assert ((back - values).abs() <= largest / 448 * 16).all()  # half of the largest step, 32
    assert (back.abs().amax(1) >= largest[:, 0] * (1 - 2**-4)).all()


def test_keys_in_fp4_are_the_nearest_of_sixteen_numbers():
    codec, values = Codec.of(index_keys(128, "fp4")), numbers(50, 128)
    data, scales = encode(codec, values)
    assert (data.shape, scales.shape) == ((50, 64), (50, 4))
    back = decode(codec, data, scales)
    for row, kept, found in zip(values.tolist(), scales.tolist(), back.tolist(), strict=True):
        for block, byte in enumerate(kept):
            part = row[32 * block : 32 * block + 32]
            exponent = math.ceil(math.log2(max(map(abs, part)) / 6))
            assert byte == exponent + 127
            for x, y in zip(part, found[32 * block : 32 * block + 32], strict=True):
                near = min(abs(abs(x) / 2.0**exponent - number) for number in FP4)
                assert abs(abs(x) - abs(y)) / 2.0**exponent == pytest.approx(near, abs=1e-6)
                assert y == 0 or (x < 0) == (y < 0)


@pytest.mark.parametrize(
    ("middle", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_of_two_numbers_equally_near_fp4_takes_the_one_with_an_even_code(middle: float, rounded: float):
    codec = Codec.of(index_keys(32, "fp4"))
    values = torch.zeros(2, 32)
    values[:, 0], values[:, 1] = 6.0, torch.tensor([middle, -middle])  # scale 1
    data, scales = encode(codec, values)
    assert scales.tolist() == [[127], [127]]
    assert decode(codec, data, scales)[:, 1].tolist() == [rounded, -rounded]
    assert data[0, 0] & 15 == 7  # the first of two is the low half


@pytest.mark.parametrize("dim", [72, 74, 136, 138, 200, 512, 1000])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_numbers_under_one_scale_are_found_from_how_many_scales_there_are(dim: int, block: int):
    codec = Codec.of(compressed_fp8(dim, 8, block))
    assert codec.num_scales == -(-(dim - 8) // block)
    assert codec.block == block or codec.num_scales == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_quantised_comes_back_as_it_was(dtype: str):
    codec = Codec.of(plain_entry(24, 8, dtype))
    values = numbers(20, 32).to(getattr(torch, dtype))
    assert torch.equal(decode(codec, *encode(codec, values)), values.float())


def test_heads_are_numbers_like_others():
    heads = Entry("keys", (TensorSpec("keys", (2, 8), "bfloat16"), TensorSpec("rope", (1, 4), "bfloat16")))
    flat = Entry("keys", (TensorSpec("keys", (16,), "bfloat16"), TensorSpec("rope", (4,), "bfloat16")))
    assert Codec.of(heads) == Codec.of(flat)


@pytest.mark.parametrize("name", ENTRIES)
def test_what_comes_back_is_stored_as_the_same_bytes_again(name: str):
    """So what is read, moved and stored anew does not drift."""
    codec = Codec.of(ENTRIES[name])
    data, scales = encode(codec, numbers(20, codec.dim))
    back = decode(codec, data, scales)
    again = encode(codec, back)
    if codec.scale_dtype != "float32":  # a float32 scale is rounded anew
        # The largest may have become smaller than a power of two: then the exponent is less, the number same.
        torch.testing.assert_close(decode(codec, *again), back, rtol=0, atol=0)


def test_zeros_and_what_is_no_number():
    codec = Codec.of(compressed_fp8(512, 64))
    values = torch.zeros(3, 512)
    values[1, 0], values[1, 1] = torch.nan, 1.0
    values[2, 0], values[2, 1], values[2, 64] = torch.inf, 1.0, 2.0
    back = decode(codec, *encode(codec, values))
    assert torch.equal(back[0], values[0])
    assert back[1, 0].isnan()  # and nothing else of its block
    assert back[1, 1] == 1
    assert back[1, 2:].eq(0).all()
    assert back[2, 0] > 1e38
    assert back[2, 64] == 2


@pytest.mark.parametrize(
    "entry",
    [
        Entry("no scale", (TensorSpec("flat", (64,), "float8_e4m3fn"),)),
        Entry(
            "scales of plain",
            (TensorSpec("flat", (64,), "bfloat16"),),
            (TensorSpec("scale", (1,), "float32"),),
        ),
        Entry("fp8 rope", (TensorSpec("flat", (8,), "float32"), TensorSpec("rope", (8,), "float8_e4m3fn"))),
        Entry("three parts", (*plain_entry(8, 8).parts, TensorSpec("rope", (4,), "float32"))),
        Entry(
            "padding first",
            (TensorSpec("flat", (64,), "float8_e4m3fn"),),
            (TensorSpec("padding", (4,), "uint8"),),
        ),
        Entry("odd places", (TensorSpec("flat", (7,), "bfloat16"), TensorSpec("rope", (2,), "float32"))),
        compressed_fp8(512, 64, block=48),
        Entry(
            "more",
            (TensorSpec("flat", (4,), "float8_e4m3fn"),),
            (TensorSpec("scale", (5,), "float8_e8m0fnu"),),
        ),
        Entry(
            "half",
            (TensorSpec("flat", (4,), "float4_e2m1fn_x2"),),
            (TensorSpec("scale", (8,), "float8_e8m0fnu"),),
        ),
        latent_fp8(512, 64),
        "compressed",
    ],
    ids=str,
)
def test_layouts_that_no_kernel_knows(entry: Entry):
    with pytest.raises(ConfigError, match="entry"):
        Codec.of(entry)
