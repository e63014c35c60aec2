"""Entries of compressed attention and of windows: written quantised, read back as numbers.

In: tokens of a batch, their values, the bytes of pools; out: bytes, or the caller's tensors, filled. How the
numbers of an entry become bytes is a `Codec`, read off its layout. A torch reference (`entries_reference`)
says what is right and serves the CPU, a Triton kernel (`entries_fused`) serves CUDA; this module picks one.
Both agree bit for bit, but for which NaN a NaN is. Nothing is made and nothing waits, so that every call can
be captured once one like it, of a token a request or of more, has compiled it. Ids out of range, which a
kernel cannot raise for, are neither read nor written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from pagoda.errors import ConfigError
from pagoda.kernels import _entries_reference as entries_reference
from pagoda.kernels import on_device, pick
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
    """The tokens of a batch: whose they are, and where they stand.

    Those of one request stand side by side, at positions that rise by one."""

    rows: torch.Tensor  # [B] int32: the row of each request; 0 is padding
    request_ids: torch.Tensor  # [T] int32: which of `rows` a token belongs to; −1 is padding
    positions: torch.Tensor  # [T] int32, at most 2^31 − 2; below 0 is padding


class Ring(NamedTuple):
    """The windows of all rows: position p lies in place p % R of its row's."""

    data: torch.Tensor  # [num_rows + 1, R, codec.data_bytes] uint8
    scales: torch.Tensor | None  # [num_rows + 1, R, codec.scale_bytes] uint8, None for entries without
    positions: torch.Tensor  # [num_rows + 1, R] int32: which position lies there, −1 for none


_PLAIN = ("float32", "bfloat16", "float16")
# The largest number of a format, and the least that the largest of a block counts for: so that a block of
# zeros has a scale, of which 1 / scale is finite too.
_LARGEST = {"float8_e4m3fn": (448.0, 1e-4), "float4_e2m1fn_x2": (6.0, 6.0 * 2.0**-126)}


@dataclass(frozen=True)
class Codec:
    """How the numbers of one entry become bytes: `flat_dim` of them in one format, in blocks of `block`, a
    power of two, that share a scale if they have one, then `rope_dim` in another.

    An entry is `data_bytes` long, its scales `scale_bytes`; they lie behind the data of all entries of
    its page. A scale is float32, or the exponent of a power of two: the least with which the largest of
    the block fits. fp8 saturates and keeps a NaN; in fp4, which has none, it becomes the largest number."""

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
        """The codec of a layout of bytes. O(1). Errors: ConfigError for parts that no kernel knows."""
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
                f"entry {entry.name}: kernels know numbers in float32, bfloat16 or float16, or in fp8 or fp4 "
                "with scales in float32 or as powers of two behind the data, and a rotated part behind them"
            )
        # Heads are numbers like any others: they make no other bytes.
        flat_dim = math.prod(flat.shape) * (2 if flat.dtype == "float4_e2m1fn_x2" else 1)
        num_scales = math.prod(scales[0].shape) if scales else 0
        block = 1 << (-(-flat_dim // num_scales) - 1).bit_length() if scales else flat_dim
        # Which numbers a scale is for follows from how many there are: so none may be left over.
        least_block = 2 if flat.dtype == "float4_e2m1fn_x2" else 1
        if scales and (-(-flat_dim // block) != num_scales or block < least_block):
            raise ConfigError(
                f"entry {entry.name}: {num_scales} scales of {flat_dim} numbers: give one for every "
                f"{least_block}, {2 * least_block}, {4 * least_block} or another power of two of them"
            )
        # Scales and the rotated part are read as what they are, so they have to begin where such may stand.
        rope_width = DTYPES[ropes[0].dtype] if ropes else 1
        scale_width = DTYPES[scales[0].dtype] if scales else 1
        begins = [entry.data_bytes - sum(rope.num_bytes for rope in ropes), entry.data_bytes, entry.num_bytes]
        if entry.page_multiple > 1:
            begins.append(entry.page_multiple)
        widths = max(rope_width, DTYPES[flat.dtype] if not scales else 1), scale_width
        if any(begin % width for begin in begins for width in widths):
            raise ConfigError(
                f"entry {entry.name}: its parts begin between the places of their numbers: give sizes, or "
                f"padding, in multiples of {max(widths)} bytes"
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
        """Numbers of an entry. O(1)."""
        return self.flat_dim + self.rope_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of an entry with its scales. O(1)."""
        return self.data_bytes + self.scale_bytes

    @property
    def largest(self) -> float:
        """The largest number that the flat format holds. O(1)."""
        return _LARGEST[self.flat_dtype][0]

    @property
    def least(self) -> float:
        """What the largest of a block at least counts for. O(1)."""
        return _LARGEST[self.flat_dtype][1]


def _for(tensor: torch.Tensor) -> ModuleType:
    return pick("_entries_fused", entries_reference, tensor.device)


def store_window(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,  # [T, dim]
    ring: Ring,
) -> None:
    """Write each token's entry to place position % R of its row's ring, and the position beside it.

    Of a request's tokens only the last R are written, so that none is written over within a call. One launch.
    """
    with on_device(ring.data.device):
        _for(ring.data).store_window(codec, tokens, values, ring)


def store_entries(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,  # [T, dim]
    ratio: int,
    table: torch.Tensor,  # [num_rows + 1, columns] int32: blocks of each row; below 1 is none
    pages: torch.Tensor,  # [num_blocks + 1, page_bytes] uint8
    entries_per_page: int,
) -> None:
    """Write the values of each token that ends a block of `ratio` tokens as its row's entry of that block.

    The values of other tokens are not read. One launch.
    """
    with on_device(pages.device):
        _for(pages).store_entries(codec, tokens, values, ratio, table, pages, entries_per_page)


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
) -> None:
    """Read the entries that an indexer chose for each token. One launch.

    An index below 0 or not yet visible to the token, and every index of padding, gives zeros and False.
    """
    with on_device(pages.device):
        _for(pages).gather_chosen(codec, tokens, ratio, chosen, table, pages, entries_per_page, out, mask)


def gather_all(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,  # [B, N, dim] contiguous
    lens: torch.Tensor,  # [B] int32
) -> None:
    """Read the first N entries of each request, and count all that its last token sees. One launch.

    Behind the count there are zeros. A request without tokens in the batch has none.
    """
    with on_device(pages.device):
        _for(pages).gather_all(codec, tokens, ratio, table, pages, entries_per_page, out, lens)


def gather_windows(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    out: torch.Tensor,  # [T, window, dim] contiguous
    lens: torch.Tensor,  # [T] int32
) -> None:
    """Read the window of each token, itself included, oldest first; behind its length zeros. One launch.

    A position that the ring does not hold, because a call wrote over it before it was read, gives zeros.
    """
    with on_device(ring.data.device):
        _for(ring.data).gather_windows(codec, tokens, window, ring, out, lens)


def gather_chunk(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    chunk: torch.Tensor,  # [T, dim]
    out: torch.Tensor,  # [B, window − 1 + Q, dim] contiguous
    lens: torch.Tensor,  # [B] int32
) -> None:
    """Read, a request, the window before its tokens and then the tokens themselves, oldest first; behind
    its length zeros. One launch.

    The window comes from the ring, which has to be written afterwards, so that it may be as small as the
    window however long the chunk; the tokens come from `chunk`, rounded as if they had been stored.
    """
    with on_device(ring.data.device):
        _for(ring.data).gather_chunk(codec, tokens, window, ring, chunk, out, lens)
