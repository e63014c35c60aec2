"""The reference of `entries`, in plain torch: serves the CPU, and tests compare the kernels with it.

Like kernels, it writes to any tensor, also to one that requires gradients or was made under inference_mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagoda.kernels.entries import Codec, Ring, Tokens

__all__ = [
    "decode",
    "encode",
    "gather_all",
    "gather_chosen",
    "gather_chunk",
    "gather_windows",
    "is_last",
    "rows_of",
    "store_entries",
    "store_window",
]

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def encode(codec: Codec, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode numbers, [n, dim], as data, [n, data_bytes] uint8, and scales, [n, scale_bytes] uint8."""
    n = values.shape[0]
    flat, rope = values[:, : codec.flat_dim].float(), values[:, codec.flat_dim :]
    scales = torch.zeros(n, codec.scale_bytes, dtype=torch.uint8, device=values.device)
    if codec.scale_dtype is None:
        stored = flat.to(getattr(torch, codec.flat_dtype)).view(torch.uint8)
    else:
        blocks = torch.zeros(n, codec.num_scales * codec.block, device=values.device)
        blocks[:, : codec.flat_dim] = flat
        blocks = blocks.view(n, codec.num_scales, codec.block)
        # NaN and infinity do not affect the scale, so that they leave the other numbers of their block alone.
        largest = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(-1, keepdim=True)
        scale = largest.clamp(min=codec.least) / codec.largest
        if codec.scale_dtype == "float32":
            inverse, kept = 1 / scale, scale.flatten(1).contiguous().view(torch.uint8)
        else:  # the exponent rounded up
            bits = scale.view(torch.int32)
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0)
            inverse, kept = ((254 - exponent) << 23).view(torch.float32), exponent.flatten(1).byte()
        scales[:, : kept.shape[1]] = kept
        scaled = (blocks * inverse).clamp(-codec.largest, codec.largest).flatten(1)[:, : codec.flat_dim]
        stored = _to_fp4(scaled) if codec.flat_dtype == "float4_e2m1fn_x2" else _to_fp8(scaled)
    rotated = rope.to(getattr(torch, codec.rope_dtype)).contiguous().view(torch.uint8)
    return torch.cat([stored, rotated], 1), scales


def decode(codec: Codec, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode the output of `encode`: [n, dim] float32."""
    rope_at = codec.data_bytes - codec.rope_dim * getattr(torch, codec.rope_dtype).itemsize
    stored, rope = data[:, :rope_at].contiguous(), data[:, :0].float()
    if codec.rope_dim:
        rope = data[:, rope_at:].contiguous().view(getattr(torch, codec.rope_dtype)).float()
    if codec.flat_dtype == "float4_e2m1fn_x2":
        codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1)
        numbers = _FP4.to(data.device)[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    else:
        numbers = stored.view(getattr(torch, codec.flat_dtype)).float()
    if codec.scale_dtype is not None:
        width = codec.num_scales * getattr(torch, codec.scale_dtype).itemsize
        kept = scales[:, :width].contiguous()
        if codec.scale_dtype == "float32":
            scale = kept.view(torch.float32)
        else:
            scale = (kept.int() << 23).view(torch.float32)
        numbers = numbers * scale.repeat_interleave(codec.block, 1)[:, : codec.flat_dim]
    return torch.cat([numbers, rope], 1)


def _to_fp8(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.to(torch.float8_e4m3fn).contiguous().view(torch.uint8)


def _to_fp4(scaled: torch.Tensor) -> torch.Tensor:
    """Return fp4 codes, two per byte, the first in the low half; round to nearest, ties to the even code. NaN
    becomes the largest number."""
    size = scaled.abs().nan_to_num(nan=6.0)
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for middle, is_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += ((size >= middle) if is_up else (size > middle)).byte()
    codes += 8 * (scaled < 0).byte()
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


Bytes = tuple[torch.Tensor, torch.Tensor]  # data and scales of entries, [pages, entries, bytes] each


def _in_pages(pages: torch.Tensor, codec: Codec, entries_per_page: int) -> Bytes:
    """Views of all pages: the data of all entries comes first, then the scales of all."""
    middle = entries_per_page * codec.data_bytes
    end = middle + entries_per_page * codec.scale_bytes
    data = pages[:, :middle].unflatten(1, (entries_per_page, codec.data_bytes))
    return data, pages[:, middle:end].unflatten(1, (entries_per_page, codec.scale_bytes))


def _in_ring(ring: Ring) -> Bytes:
    """Views of rings: each cell of a ring counts as a page."""
    data = ring.data.view(-1, 1, ring.data.shape[2])
    return data, data[..., :0] if ring.scales is None else ring.scales.view(-1, 1, ring.scales.shape[2])


def _read(
    codec: Codec, stored: Bytes, places: torch.Tensor, is_there: torch.Tensor, out: torch.Tensor
) -> None:
    """Read entry places[i] into out[i]; zeros if there is no such entry."""
    data, scales = stored
    places = places.flatten().where(is_there.flatten(), 0)
    page, at = places // data.shape[1], places % data.shape[1]
    numbers = decode(codec, data[page, at], scales[page, at])
    out.view(-1, codec.dim).copy_(numbers.where(is_there.view(-1, 1), 0))


def _write(codec: Codec, stored: Bytes, places: torch.Tensor, values: torch.Tensor) -> None:
    data, scales = stored
    page, at = places // data.shape[1], places % data.shape[1]
    data[page, at], scales[page, at] = encode(codec, values)


def rows_of(tokens: Tokens, num_rows: int) -> torch.Tensor:
    """The row of each token, [T] int64; 0 for padding and for ids out of range."""
    ids = tokens.request_ids.long()
    is_request = (ids >= 0) & (ids < tokens.rows.shape[0])
    if tokens.rows.shape[0] == 0:
        return torch.zeros_like(ids)
    rows = tokens.rows.long()[ids.where(is_request, 0)].where(is_request & (tokens.positions >= 0), 0)
    return rows.where((rows > 0) & (rows < num_rows), 0)


def is_last(tokens: Tokens, ring: int) -> torch.Tensor:
    """Whether a token keeps its ring cell: the token `ring` further on is padding or of another request."""
    ids, positions = tokens.request_ids, tokens.positions
    result = torch.ones_like(ids, dtype=torch.bool)
    if ring < result.shape[0]:
        result[:-ring] = (ids[:-ring] != ids[ring:]) | (positions[:-ring] + ring != positions[ring:])
    return result


def _places(
    rows: torch.Tensor, entries: torch.Tensor, table: torch.Tensor, num_pages: int, entries_per_page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's entry as page × entries_per_page + offset, and whether it has a page."""
    columns = entries // entries_per_page
    is_there = (rows > 0) & (entries >= 0) & (columns < table.shape[1])
    blocks = table[rows.where(is_there, 0), columns.where(is_there, 0)].long()
    is_there &= (blocks > 0) & (blocks < num_pages)
    return blocks * entries_per_page + entries % entries_per_page, is_there


@torch.inference_mode()
def store_window(codec: Codec, tokens: Tokens, values: torch.Tensor, ring: Ring) -> None:
    size = ring.data.shape[1]
    rows = rows_of(tokens, ring.data.shape[0])
    written = ((rows > 0) & is_last(tokens, size)).nonzero().flatten()
    positions = tokens.positions[written]
    places = rows[written] * size + positions.long() % size
    _write(codec, _in_ring(ring), places, values[written])
    ring.positions.view(-1)[places] = positions.int()


@torch.inference_mode()
def store_entries(
    codec: Codec,
    tokens: Tokens,
    values: torch.Tensor,
    ratio: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
) -> None:
    lengths = tokens.positions.long() + 1
    rows = rows_of(tokens, table.shape[0]).where(lengths % ratio == 0, 0)
    places, is_there = _places(rows, lengths // ratio - 1, table, pages.shape[0], entries_per_page)
    written = is_there.nonzero().flatten()
    _write(codec, _in_pages(pages, codec, entries_per_page), places[written], values[written])


@torch.inference_mode()
def gather_chosen(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    chosen: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    entries = chosen.long()
    visible = (tokens.positions.long() + 1) // ratio
    rows = rows_of(tokens, table.shape[0])[:, None].expand_as(entries)
    rows = rows.where(entries < visible[:, None], 0)
    places, is_there = _places(rows, entries, table, pages.shape[0], entries_per_page)
    _read(codec, _in_pages(pages, codec, entries_per_page), places, is_there, out)
    mask.copy_(is_there)


@torch.inference_mode()
def gather_all(
    codec: Codec,
    tokens: Tokens,
    ratio: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    entries_per_page: int,
    out: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    batch, width = out.shape[:2]
    lengths = torch.zeros(batch, dtype=torch.int64, device=out.device)
    rows = rows_of(tokens, table.shape[0])
    real = (rows > 0).nonzero().flatten()
    ids = tokens.request_ids[real].long()
    lengths.scatter_reduce_(0, ids, tokens.positions[real].long() + 1, "amax")
    of_requests = torch.zeros_like(lengths).scatter_(0, ids, rows[real])
    entries = torch.arange(width, device=out.device).expand(batch, width)
    of_entries = of_requests[:, None].where(entries < (lengths // ratio)[:, None], 0)
    places, is_there = _places(of_entries, entries, table, pages.shape[0], entries_per_page)
    _read(codec, _in_pages(pages, codec, entries_per_page), places, is_there, out)
    lens.copy_(lengths // ratio)


def _from_ring(
    rows: torch.Tensor, positions: torch.Tensor, ring_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ring cell of each position, and whether the ring still has that position."""
    size = ring_positions.shape[1]
    places = rows * size + positions % size
    is_there = (rows > 0) & (positions >= 0)
    return places, is_there & (ring_positions.view(-1)[places.where(is_there, 0)] == positions)


@torch.inference_mode()
def gather_windows(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    out: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    rows = rows_of(tokens, ring.data.shape[0])
    last = tokens.positions.long()
    lengths = (last + 1).clamp(max=window).where(rows > 0, 0)
    at = torch.arange(window, device=out.device)
    positions = (last + 1 - lengths)[:, None] + at
    of_positions = rows[:, None].where(at < lengths[:, None], 0)
    places, is_there = _from_ring(of_positions, positions, ring.positions)
    _read(codec, _in_ring(ring), places, is_there, out)
    lens.copy_(lengths)


@torch.inference_mode()
def gather_chunk(
    codec: Codec,
    tokens: Tokens,
    window: int,
    ring: Ring,
    chunk: torch.Tensor,
    out: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    batch, width = out.shape[:2]
    device, num_tokens = out.device, tokens.positions.shape[0]
    token_rows = rows_of(tokens, ring.data.shape[0])
    real = (token_rows > 0).nonzero().flatten()
    ids = tokens.request_ids[real].long()
    counts = torch.zeros(batch, dtype=torch.int64, device=device).scatter_add_(0, ids, torch.ones_like(ids))
    firsts = torch.full((batch,), num_tokens, device=device).scatter_reduce_(0, ids, real, "amin")
    rows = torch.zeros_like(counts).scatter_(0, ids, token_rows[real])
    starts = torch.zeros_like(counts)
    if num_tokens:
        starts = tokens.positions.long()[firsts.clamp(max=num_tokens - 1)].where(counts > 0, 0)
    before = starts.clamp(max=window - 1)
    at = torch.arange(width, device=device).expand(batch, width)
    is_before = at < before[:, None]
    places, is_there = _from_ring(
        rows[:, None].where(is_before, 0), (starts - before)[:, None] + at, ring.positions
    )
    _read(codec, _in_ring(ring), places, is_there, out)
    in_chunk = at - before[:, None]
    is_in_chunk = (in_chunk >= 0) & (in_chunk < counts[:, None])
    from_chunk = (firsts[:, None] + in_chunk)[is_in_chunk]
    out[is_in_chunk] = decode(codec, *encode(codec, chunk[from_chunk])).to(out.dtype)
    lens.copy_(before + counts)
