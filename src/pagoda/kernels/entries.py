"""Entries of compressed attention and of windows: written quantised, read back as numbers.

In: tokens of a batch, their values, the bytes of pools; out: bytes in pools, or the caller's tensors, filled.
A `Codec`, derived from the entry's layout, says how numbers become bytes. Reference and kernel agree bit for
bit, except for the payload of NaNs. Nothing is allocated and nothing waits, so a call can be captured once a
similar call has compiled the kernel: batches with one token per request and others are compiled separately.
Entries whose ids are out of range are neither read nor written, since a kernel cannot raise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagoda.errors import ConfigError
from pagoda.kernels import _entries_reference as entries_reference
from pagoda.kernels._dispatch import operation
from pagoda.layout._entries import DTYPES, Entry

__all__ = [
    "Codec",
    "Ring",
    "Tokens",
    "gather_all",
    "gather_chosen",
    "gather_chunk",
    "gather_windows",
    "store_entries",
    "store_window",
]


class Tokens(NamedTuple):
    """The tokens of a batch: the request and the position of each.

    The tokens of one request are adjacent, at consecutive positions."""

    rows: torch.Tensor  # [B] int32: the row of each request; 0 is padding
    request_ids: torch.Tensor  # [T] int32: index into `rows` of each token's request; −1 is padding
    positions: torch.Tensor  # [T] int32 or int64, at most 2^31 − 2; negative is padding


class Ring(NamedTuple):
    """The windows of all rows, as rings of R cells: position p is in cell p % R of its row's ring."""

    data: torch.Tensor  # [num_rows + 1, R, codec.data_bytes] uint8
    scales: torch.Tensor | None  # [num_rows + 1, R, codec.scale_bytes] uint8; None if entries have no scales
    positions: torch.Tensor  # [num_rows + 1, R] int32: the position in each cell; −1 if it is empty


_PLAIN = ("float32", "bfloat16", "float16")
# The largest number of a format, and the lower bound of a block's maximum when its scale is computed: with
# it, a block of zeros has a scale whose inverse is finite.
_LARGEST = {"float8_e4m3fn": (448.0, 1e-4), "float4_e2m1fn_x2": (6.0, 6.0 * 2.0**-126)}


@dataclass(frozen=True)
class Codec:
    """How the numbers of an entry become bytes: `flat_dim` numbers in one format, then `rope_dim` in another.

    The flat numbers form blocks of `block` numbers, a power of two; the numbers of a block share a scale if
    there are scales. An entry has `data_bytes` of data and `scale_bytes` of scales, which follow the data of
    all entries of its page. A scale is float32, or the exponent of a power of two: the smallest with which
    the largest finite number of the block fits. Infinity saturates, and NaN stays NaN (fp4 has no NaN: there
    it becomes the largest number); neither changes the scale."""

    flat_dim: int
    rope_dim: int
    flat_dtype: str
    rope_dtype: str
    block: int
    scale_dtype: str | None
    num_scales: int
    data_bytes: int
    scale_bytes: int

    @staticmethod
    def of(entry: Entry) -> Codec:
        """Return the codec of an entry. Errors: ConfigError for parts that kernels do not support."""
        if not isinstance(entry, Entry):
            raise ConfigError(f"entry: give an Entry, not {type(entry).__name__}")
        flat, *rest = entry.parts
        ropes = [part for part in rest if part.name == "rope"]
        scales = [part for part in entry.scales if part.name == "scale"]
        is_known = (
            len(ropes) == len(rest) <= 1
            and len(scales) <= 1
            and (not entry.scales or entry.scales[0] in scales)
            and all(rope.dtype in _PLAIN for rope in ropes)
            and (flat.dtype in _LARGEST if scales else flat.dtype in _PLAIN)
            and all(scale.dtype in ("float32", "float8_e8m0fnu") for scale in scales)
        )
        if not is_known:
            raise ConfigError(
                f"entry {entry.name} is not supported by the kernels: give numbers in float32, bfloat16 or "
                "float16, or in fp8 or fp4 with scales in float32 or float8_e8m0fnu after the data; a part "
                "'rope' in float32, bfloat16 or float16 may follow the numbers"
            )
        # Heads make no difference to the bytes.
        flat_dim = math.prod(flat.shape) * (2 if flat.dtype == "float4_e2m1fn_x2" else 1)
        num_scales = math.prod(scales[0].shape) if scales else 0
        block = 1 << (-(-flat_dim // num_scales) - 1).bit_length() if scales else flat_dim
        # Which numbers share a scale follows from the number of scales, so the blocks must come out even.
        least_block = 2 if flat.dtype == "float4_e2m1fn_x2" else 1
        if scales and (-(-flat_dim // block) != num_scales or block < least_block):
            raise ConfigError(
                f"entry {entry.name} has {num_scales} scales for {flat_dim} numbers: give one scale per "
                f"{least_block}, {2 * least_block}, {4 * least_block} or another power of two of numbers"
            )
        # Scales and the rotated part are read as their own dtypes, so they have to be aligned.
        rope_width = DTYPES[ropes[0].dtype] if ropes else 1
        scale_width = DTYPES[scales[0].dtype] if scales else 1
        begins = [entry.data_bytes - sum(rope.num_bytes for rope in ropes), entry.data_bytes, entry.num_bytes]
        if entry.page_multiple > 1:
            begins.append(entry.page_multiple)
        widths = max(rope_width, DTYPES[flat.dtype] if not scales else 1), scale_width
        if any(begin % width for begin in begins for width in widths):
            raise ConfigError(
                f"entry {entry.name}: its parts are not aligned to their dtypes: give sizes, or padding, in "
                f"multiples of {max(widths)} bytes"
            )
        return Codec(
            flat_dim,
            math.prod(ropes[0].shape) if ropes else 0,
            flat.dtype,
            ropes[0].dtype if ropes else "bfloat16",
            block,
            scales[0].dtype if scales else None,
            num_scales,
            entry.data_bytes,
            entry.scale_bytes,
        )

    @property
    def dim(self) -> int:
        """Numbers per entry."""
        return self.flat_dim + self.rope_dim

    @property
    def num_bytes(self) -> int:
        """Bytes per entry, scales included."""
        return self.data_bytes + self.scale_bytes

    @property
    def largest(self) -> float:
        """The largest number of the flat format."""
        return _LARGEST[self.flat_dtype][0]

    @property
    def least(self) -> float:
        """The lower bound of a block's maximum when its scale is computed."""
        return _LARGEST[self.flat_dtype][1]


@operation("_entries_fused", entries_reference)
def store_window(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,  # [T, dim]
    ring: Ring,
) -> torch.Tensor:
    """Write each token's entry, and its position, to cell position % R of its row's ring, in one launch.

    Only the last R tokens of a request are written, so that no cell is written twice within a call.
    """
    return ring.data


@operation("_entries_fused", entries_reference)
def store_entries(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,  # [T, dim]
    ratio: int,
    table: torch.Tensor,  # [num_rows + 1, columns] int32: blocks of each row; below 1 means no block
    pages: torch.Tensor,  # [num_blocks + 1, page_bytes] uint8
    entries_per_page: int,
) -> torch.Tensor:
    """Write, for each token that ends a block of `ratio` tokens, its values as its row's entry of that block,
    in one launch.

    The values of other tokens are not read.
    """
    return pages


@operation("_entries_fused", entries_reference)
def gather_chosen(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    chosen: torch.Tensor,  # [T, k] int32 or int64: entries of the token's request
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,  # [T, k, dim] contiguous
    mask: torch.Tensor,  # [T, k] bool
) -> torch.Tensor:
    """Read the entries that an indexer chose for each token, in one launch.

    An index that is negative or not yet visible to the token gives zeros and False, as does padding.
    """
    return pages


@operation("_entries_fused", entries_reference)
def gather_all(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,  # [B, N, dim] contiguous
    lens: torch.Tensor,  # [B] int32
) -> torch.Tensor:
    """Read the first N entries of each request, and count all that its last token sees, in one launch.

    Outputs beyond the count are zeros. A request without tokens in the batch has a count of 0.
    """
    return pages


@operation("_entries_fused", entries_reference)
def gather_windows(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    out: torch.Tensor,  # [T, window, dim] contiguous
    lens: torch.Tensor,  # [T] int32
) -> torch.Tensor:
    """Read the window of each token, itself included, oldest first, in one launch; zeros beyond its length.

    A position that a later write has already replaced in the ring gives zeros.
    """
    return ring.data


@operation("_entries_fused", entries_reference)
def gather_chunk(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    chunk: torch.Tensor,  # [T, dim]
    out: torch.Tensor,  # [B, window − 1 + Q, dim] contiguous
    lens: torch.Tensor,  # [B] int32
) -> torch.Tensor:
    """Read, for each request, the window before its tokens and then the tokens themselves, oldest first, in
    one launch; zeros beyond its length.

    The window comes from the ring; write the ring afterwards, so that it need be no larger than the window
    however long the chunk is. The tokens come from `chunk`, rounded as if they had been stored.
    """
    return ring.data
