"""Casts between float32 and narrower floats, in Triton. In: numbers or their bits; out: the other.

To nearest, of two equally near the even one. Where a GPU, or Triton's interpreter, has no such cast or rounds
otherwise, casts are spelled out in integers: `is_spelled` says where, and kernels take it as IS_SPELLED.
bfloat16 is then read and written as its bits.
"""

# Kernels are Triton's language, not Python's.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "from_fp4",
    "from_fp8",
    "is_spelled",
    "narrow",
    "readable",
    "rounded",
    "to_fp4",
    "to_fp8",
    "wide",
]


def is_spelled(device: torch.device) -> bool:
    """Whether casts are spelled out in integers: in Triton's interpreter, and on GPUs before 8.9."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)


def readable(tensor: torch.Tensor, is_spelled: bool) -> torch.Tensor:
    """A tensor as a kernel takes it: bfloat16 as its bits where casts are spelled out."""
    return tensor.view(torch.uint16) if is_spelled and tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def rounded(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 to the bits of a narrower float, to nearest even, spelled out in integers.

    For Triton's interpreter, whose own cast to bfloat16 truncates and to fp8 rounds otherwise, and
    for GPUs before 8.9, which have no cast to fp8. |x| is in the range of the narrow type, or NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = normal - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal: adding 2^k leaves, in the lowest bits, the multiple of the quantum.
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    lifted = magnitude.to(tl.float32, bitcast=True) + tl.full((), MAGIC, tl.uint32).to(
        tl.float32, bitcast=True
    )
    subnormal = lifted.to(tl.uint32, bitcast=True) - MAGIC
    rounded = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    TOP: tl.constexpr = 0x7FC0 if BIAS == 127 else 0x7F
    SIGN_AT: tl.constexpr = 15 if BIAS == 127 else 7
    return tl.where(magnitude > 0x7F800000, TOP, rounded) | ((bits >> 31) << SIGN_AT)


@triton.jit
def narrow(x, kind: tl.constexpr, IS_SPELLED: tl.constexpr):
    """float32 to what a pointer to `kind` takes; to the bits of bfloat16 where casts are spelled."""
    if IS_SPELLED and kind == tl.uint16:
        return rounded(x, 7, 127).to(tl.uint16)
    else:  # noqa: RET505 (Triton compiles what stands behind a return)
        return x.to(kind)


@triton.jit
def wide(x, IS_SPELLED: tl.constexpr):
    """A number as float32; bits of bfloat16 where casts are spelled."""
    if IS_SPELLED and x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return x.to(tl.float32)


@triton.jit
def from_fp8(byte, IS_SPELLED: tl.constexpr):
    if IS_SPELLED:
        size = (byte & 0x7F).to(tl.uint32)
        # The same digits in float32, whose exponent begins 120 lower; subnormal numbers come right as well.
        x = (size << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        x = tl.where(size == 0x7F, float("nan"), x)
        return x * tl.where(byte > 0x7F, -1.0, 1.0)
    else:  # noqa: RET505
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def to_fp8(x, IS_SPELLED: tl.constexpr):
    if IS_SPELLED:
        return rounded(x, 3, 7).to(tl.uint8)
    else:  # noqa: RET505
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_fp4(pairs, IS_HIGH: tl.constexpr):
    """One half of bytes as float32."""
    # Its exponent and its digit where float32 has them, whose exponents begin 126 lower.
    pairs = pairs.to(tl.uint32)
    size = (pairs << (18 if IS_HIGH else 22)) & 0x01C00000
    sign = (pairs << (24 if IS_HIGH else 28)) & 0x80000000
    return (size | sign).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def to_fp4(x):
    """Codes, of which the low four bits count, as uint32: to nearest, of two equally near the even one. What
    is larger than all, and NaN, becomes the largest."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Next to 2^22 times the power of two below, the last digit is worth a step. So the sum ends in the number
    # of steps, and begins with the exponent, which counts for two; the 3 makes exponents begin at 0.
    power = tl.maximum((size.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    steps = (size + power * 4194307.0).to(tl.uint32, bitcast=True)
    return steps + (steps >> 22) + tl.where(x < 0, 8, 0).to(tl.uint32)
