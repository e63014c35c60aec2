"""Casts between float32 and narrower floats, in Triton. In: numbers or their bits; out: the other.

Casts round to nearest, ties to even. Where a GPU or Triton's interpreter lacks a cast or rounds differently,
the cast is spelled out in integer operations: `is_spelled` tells where, and kernels take it as IS_SPELLED.
bfloat16 is then read and written as its bits.
"""

# Kernels are written in Triton's language, which mypy cannot type.
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
    """Whether casts are spelled out in integers: in Triton's interpreter, and on GPUs older than sm_89."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)


def readable(tensor: torch.Tensor, is_spelled: bool) -> torch.Tensor:
    """Return a tensor as a kernel takes it: bfloat16 as its bits where casts are spelled out."""
    return tensor.view(torch.uint16) if is_spelled and tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def rounded(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round float32 to the bits of a narrower float, ties to even, spelled out in integers.

    For Triton's interpreter, whose cast to bfloat16 truncates and whose cast to fp8 rounds differently, and
    for GPUs older than sm_89, which have no cast to fp8. x is in the range of the narrow type, or NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = normal - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number, adding 2^k leaves x, in units of the smallest subnormal, in the low
    # bits.
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
    """Cast float32 to what a pointer to `kind` takes: the bits of bfloat16 where casts are spelled out."""
    if IS_SPELLED and kind == tl.uint16:
        return rounded(x, 7, 127).to(tl.uint16)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return x.to(kind)


@triton.jit
def wide(x, IS_SPELLED: tl.constexpr):
    """Cast a number to float32, from the bits of bfloat16 where casts are spelled out."""
    if IS_SPELLED and x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return x.to(tl.float32)


@triton.jit
def from_fp8(byte, IS_SPELLED: tl.constexpr):
    if IS_SPELLED:
        size = (byte & 0x7F).to(tl.uint32)
        # The bits move to their places in float32; multiplying by 2^120 corrects the exponent bias, and is
        # right for subnormal numbers, too.
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
    """Return the low or the high fp4 number of each byte as float32."""
    # Exponent and mantissa bit move to their places in float32; multiplying by 2^126 corrects the bias.
    pairs = pairs.to(tl.uint32)
    size = (pairs << (18 if IS_HIGH else 22)) & 0x01C00000
    sign = (pairs << (24 if IS_HIGH else 28)) & 0x80000000
    return (size | sign).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def to_fp4(x):
    """Return fp4 codes in the low four bits of uint32, rounded to nearest, ties to even.

    Numbers out of range, and NaN, become the largest."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Added to 2^22 times the power of two at or below x, the last mantissa bit is worth one fp4 step. The sum
    # therefore ends in the number of steps and begins with the exponent, which counts for two codes; the 3
    # makes exponents start at 0.
    power = tl.maximum((size.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    steps = (size + power * 4194307.0).to(tl.uint32, bitcast=True)
    return steps + (steps >> 22) + tl.where(x < 0, 8, 0).to(tl.uint32)
