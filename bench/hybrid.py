"""Compressed attention on the GPU: every gather and every quantising write against a device copy of the same
bytes, and the host time of a request against bookkeeping in device tensors."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.measure import graph_microseconds, save, table
from bench.staging import host_microseconds
from pagoda.compat import AttentionType, DSV4Config, KVCacheManager, LayerSpec
from pagoda.kernels import _compress_reference as compress_reference
from pagoda.kernels import _entries_reference as entries_reference
from pagoda.kernels import compress, entries
from pagoda.kernels.entries import Codec, Ring, Tokens
from pagoda.layout._entries import compressed_fp8, index_keys

Row = dict[str, Any]

KV, FP8_KEYS, FP4_KEYS = compressed_fp8(512, 64), index_keys(128, "fp8"), index_keys(128, "fp4")
BF16 = torch.bfloat16
PIECE = 256 << 20  # bytes: an H200 copies several pieces faster than one tensor of a gigabyte


class Work(NamedTuple):
    """One call: its name, the bytes that it must read and write, the kernel, and the torch reference."""

    name: str
    num_bytes: int
    call: Callable[[], None]
    reference: Callable[[], None]


def work(name: str, num_bytes: int, kernel: str, args: tuple[Any, ...]) -> Work:
    """Return a call of a kernel of `entries`, by name."""
    calls = [functools.partial(getattr(each, kernel), *args) for each in (entries, entries_reference)]
    return Work(name, num_bytes, calls[0], calls[1])


class Batch:
    """Requests with `num_tokens` new tokens each after `start` others, over pools of noise."""

    def __init__(self, num_requests: int, num_tokens: int, start: int) -> None:
        self.num_requests, self.num_tokens, self.start = num_requests, num_tokens, start
        ids = torch.arange(num_requests, dtype=torch.int32, device="cuda")
        positions = start + torch.arange(num_tokens, dtype=torch.int32, device="cuda")
        self.tokens = Tokens(
            1 + ids[torch.randperm(num_requests, device="cuda")],
            ids.repeat_interleave(num_tokens),
            positions.repeat(num_requests),
        )
        self.total = num_requests * num_tokens

    def pages(self, entry: Any, ratio: int, block: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return a table of shuffled blocks, their pages, and the entries per page."""
        num_blocks = -(-(self.start + self.num_tokens) // block)
        per_page = block // ratio
        ids = 1 + torch.randperm(self.num_requests * num_blocks, device="cuda", dtype=torch.int32)
        table = torch.full((self.num_requests + 1, num_blocks), -1, dtype=torch.int32, device="cuda")
        table[1:] = ids.view(self.num_requests, num_blocks)
        shape = (ids.shape[0] + 1, entry.page_bytes(per_page))
        return table, torch.randint(0, 126, shape, dtype=torch.uint8, device="cuda"), per_page

    def ring(self, codec: Codec, size: int) -> Ring:
        """Return rings with the last tokens of each request."""
        shape = (self.num_requests + 1, size)
        data, scales = (
            torch.randint(0, 126, (*shape, n), dtype=torch.uint8, device="cuda")
            for n in (codec.data_bytes, codec.scale_bytes)
        )
        held = self.start + self.num_tokens - size + torch.arange(size, dtype=torch.int32, device="cuda")
        positions = torch.full(shape, -1, dtype=torch.int32, device="cuda")
        positions[1:, held % size] = held.clamp(min=-1)
        return Ring(data, scales, positions)


def values_of(batch: Batch, dim: int) -> torch.Tensor:
    return torch.randn(batch.total, dim, dtype=BF16, device="cuda")


def chosen(batch: Batch, k: int) -> Work:
    codec, ratio = Codec.of(KV), 4
    table, pages, per_page = batch.pages(KV, ratio, 128)
    visible = batch.start // ratio
    # Every entry of a request is about equally likely: an indexer's picks are spread over the context.
    picks = torch.randint(0, visible, (batch.total, k), dtype=torch.int32, device="cuda")
    out = torch.empty(batch.total, k, codec.dim, dtype=BF16, device="cuda")
    mask = torch.empty(batch.total, k, dtype=torch.bool, device="cuda")
    args = codec, batch.tokens, ratio, picks, table, pages, per_page, out, mask
    moved = batch.total * k * (4 + codec.num_bytes - 1 + codec.dim * 2 + 1)
    return work(f"gather_compressed_kv, {batch.total:,} × {k}", moved, "gather_chosen", args)


def all_entries(batch: Batch, entry: Any, ratio: int, name: str) -> Work:
    codec = Codec.of(entry)
    table, pages, per_page = batch.pages(entry, ratio, 128)
    width = (batch.start + batch.num_tokens) // ratio
    out = torch.empty(batch.num_requests, width, codec.dim, dtype=BF16, device="cuda")
    lens = torch.empty(batch.num_requests, dtype=torch.int32, device="cuda")
    args = codec, batch.tokens, ratio, table, pages, per_page, out, lens
    moved = batch.num_requests * width * (_used_bytes(codec) + codec.dim * 2)
    return work(f"{name}, {batch.num_requests:,} × {width:,}", moved, "gather_all", args)


def windows(batch: Batch) -> Work:
    codec = Codec.of(KV)
    ring = batch.ring(codec, 128)
    out = torch.empty(batch.total, 128, codec.dim, dtype=BF16, device="cuda")
    lens = torch.empty(batch.total, dtype=torch.int32, device="cuda")
    args = codec, batch.tokens, 128, ring, out, lens
    moved = batch.total * 128 * (_used_bytes(codec) + 4 + codec.dim * 2)
    return work(f"gather_swa_kv, {batch.total:,} × 128", moved, "gather_windows", args)


def chunk(batch: Batch) -> Work:
    codec = Codec.of(KV)
    ring = batch.ring(codec, 128)
    width = 127 + batch.num_tokens
    values = values_of(batch, codec.dim)
    out = torch.empty(batch.num_requests, width, codec.dim, dtype=BF16, device="cuda")
    lens = torch.empty(batch.num_requests, dtype=torch.int32, device="cuda")
    args = codec, batch.tokens, 128, ring, values, out, lens
    before = batch.num_requests * 127 * (_used_bytes(codec) + 4)
    moved = before + values.numel() * 2 + out.numel() * 2
    return work(f"gather_swa_chunk, {batch.num_requests:,} × {width:,}", moved, "gather_chunk", args)


def write_window(batch: Batch) -> Work:
    codec = Codec.of(KV)
    ring = batch.ring(codec, 128)
    values = values_of(batch, codec.dim)
    args = codec, batch.tokens, values, ring
    moved = values.numel() * 2 + batch.total * (codec.num_bytes + 4)
    return work(f"write_swa, {batch.total:,} tokens", moved, "store_window", args)


def write_entries(batch: Batch, entry: Any, ratio: int, name: str) -> Work:
    codec = Codec.of(entry)
    table, pages, per_page = batch.pages(entry, ratio, 128)
    values = values_of(batch, codec.dim)
    args = codec, batch.tokens, values, ratio, table, pages, per_page
    ends = batch.num_requests * ((batch.start + batch.num_tokens) // ratio - batch.start // ratio)
    return work(
        f"{name}, {ends:,} entries of {batch.total:,} tokens",
        ends * (codec.dim * 2 + codec.num_bytes) + batch.total * 8,
        "store_entries",
        args,
    )


def compressor(batch: Batch, ratio: int, channels: int) -> Work:
    """Compress and push: the tokens of each finished entry are read, and values and scores of all written."""
    places = ratio * channels // 512
    shape = (batch.num_requests + 1, places, channels)
    state = [torch.randn(shape, device="cuda") for _ in range(2)]
    given = [torch.randn(batch.total, channels, device="cuda") for _ in range(2)]
    out = torch.empty(batch.total, 512, device="cuda")
    weight = torch.ones(512, device="cuda")
    angles = torch.rand(2, batch.total, 32, device="cuda")
    ends = batch.num_requests * ((batch.start + batch.num_tokens) // ratio - batch.start // ratio)

    def both(kernels: Any) -> None:
        kernels.compress(batch.tokens, *given, ratio, *state, out, (weight, 1e-6), (angles[0], angles[1]))
        kernels.push(batch.tokens, *given, *state)

    calls = [functools.partial(both, each) for each in (compress, compress_reference)]
    kept = batch.num_requests * min(places, batch.num_tokens)
    # Each token is read once per entry that it is part of: half of its channels if it is part of two.
    moved = ends * ratio * channels * 8 + kept * channels * 16 + out.numel() * 4
    return Work(f"compress and push, ratio {ratio}, {batch.total:,} tokens", moved, *calls)


def _used_bytes(codec: Codec) -> int:
    """Return the bytes of an entry without padding, which is one of eight scale bytes in DeepSeek-V4."""
    scale = 4 if codec.scale_dtype == "float32" else 1
    return codec.data_bytes + codec.num_scales * scale


def copy_microseconds(num_bytes: int) -> float:
    """Return the device time of a copy that reads half of the bytes and writes half, at once or in pieces."""
    source = torch.randint(0, 256, (num_bytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    pieces = list(zip(source.split(PIECE), target.split(PIECE), strict=True))

    def in_pieces() -> None:
        for a, b in pieces:
            b.copy_(a)

    whole = graph_microseconds([lambda: target.copy_(source)])
    return whole if len(pieces) == 1 else min(whole, graph_microseconds([in_pieces]))


def reference_microseconds(call: Callable[[], None]) -> float:
    """Return the wall time of the torch reference, which waits for the device: the best of three."""
    call()
    return min(host_microseconds(call, 1, 1) for _ in range(3))


def measure(works: list[Callable[[], Work]], is_large: bool) -> list[Row]:
    rows = []
    for make in works:
        work = make()
        copy_us = copy_microseconds(work.num_bytes)
        us = graph_microseconds([work.call])
        rows.append(
            {
                "call": work.name,
                "MB moved": work.num_bytes / 1e6,
                "copy µs": copy_us,
                "ours µs": us,
                "TB/s": work.num_bytes / us / 1e6,
                ("ours / copy speed" if is_large else "× the copy"): copy_us / us
                if is_large
                else us / copy_us,
                "torch reference µs": reference_microseconds(work.reference),
            }
        )
        del work
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def large() -> list[Row]:
    decode, many = lambda: Batch(8_192, 1, 4_095), lambda: Batch(16, 128, 262_016)
    return measure(
        [
            lambda: chosen(many(), 512),
            lambda: all_entries(Batch(16, 1, 8_388_607), KV, 128, "gather_all_compressed_kv"),
            lambda: all_entries(Batch(16, 1, 1_048_575), FP8_KEYS, 4, "gather_index, fp8"),
            lambda: all_entries(Batch(16, 1, 1_048_575), FP4_KEYS, 4, "gather_index, fp4"),
            lambda: windows(decode()),
            lambda: chunk(Batch(128, 8_192, 4_096)),
            lambda: write_window(Batch(8_192, 128, 4_096)),
            lambda: write_entries(Batch(512, 8_192, 0), KV, 4, "write_compressed"),
            lambda: write_entries(Batch(1_536, 8_192, 0), FP8_KEYS, 4, "write_index, fp8"),
            lambda: write_entries(Batch(1_536, 8_192, 0), FP4_KEYS, 4, "write_index, fp4"),
            lambda: compressor(Batch(16, 8_192, 0), 4, 1_024),
            lambda: compressor(Batch(16, 8_192, 0), 128, 512),
        ],
        is_large=True,
    )


def small() -> list[Row]:
    """Measure 256 requests with one new token each; every fourth of them, or each, ends an entry."""
    step = lambda: Batch(256, 1, 8_191)  # noqa: E731
    return measure(
        [
            lambda: chosen(step(), 512),
            lambda: all_entries(step(), KV, 128, "gather_all_compressed_kv"),
            lambda: all_entries(step(), FP8_KEYS, 4, "gather_index, fp8"),
            lambda: all_entries(step(), FP4_KEYS, 4, "gather_index, fp4"),
            lambda: windows(step()),
            lambda: chunk(step()),
            lambda: write_window(step()),
            lambda: write_entries(step(), KV, 4, "write_compressed"),
            lambda: write_entries(step(), FP8_KEYS, 4, "write_index, fp8"),
            lambda: write_entries(step(), FP4_KEYS, 4, "write_index, fp4"),
            lambda: compressor(step(), 4, 1_024),
            lambda: compressor(step(), 128, 512),
        ],
        is_large=False,
    )


class OnDevice:
    """Rows and blocks as in the public design: in device tensors, found by a scan and read back."""

    def __init__(self, num_rows: int, num_blocks: int, columns: int) -> None:
        self.is_free = torch.ones(num_rows, dtype=torch.bool, device="cuda")
        self.free_blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32, device="cuda")
        self.num_free = num_blocks
        self.table = torch.full((num_rows, columns), -1, dtype=torch.int32, device="cuda")
        self.lens = torch.zeros(num_rows, dtype=torch.int32, device="cuda")

    def admit(self) -> int:
        row = int(self.is_free.nonzero()[0])
        self.is_free[row] = False
        return row

    def allocate(self, row: int) -> int:
        self.num_free -= 1
        block = int(self.free_blocks[self.num_free])
        at = int(self.lens[row])
        self.table[row, at] = block
        self.lens[row] += 1
        return block

    def release(self, row: int) -> None:
        n = int(self.lens[row])
        self.free_blocks[self.num_free : self.num_free + n] = self.table[row, :n]
        self.num_free += n
        self.table[row] = -1
        self.lens[row] = 0
        self.is_free[row] = True


def requests() -> list[Row]:
    config = DSV4Config(num_layers=3, num_query_heads=64, index_topk=512, compress_ratios=(0, 4, 128))
    schedule = [
        LayerSpec(0, AttentionType.SWA),
        LayerSpec(1, AttentionType.CSA),
        LayerSpec(2, AttentionType.HCA),
    ]
    manager = KVCacheManager(config, schedule, 64, 65_536)
    public = OnDevice(64, 32_768, 512)

    def ours() -> None:
        row = manager.admit_request()
        for _ in range(8):
            manager.allocate_block(1, row)
        manager.release_request(row)

    def theirs() -> None:
        row = public.admit()
        for _ in range(8):
            public.allocate(row)
        public.release(row)

    ours()
    theirs()
    mine, other = host_microseconds(ours, 50), host_microseconds(theirs, 50)
    return [
        {
            "a request": "admit, 8 blocks, release",
            "ours µs": mine,
            "kept in device tensors µs": other,
            "times faster": other / mine,
        }
    ]


def run() -> None:
    torch.manual_seed(0)
    rows = large()
    table("compressed attention: at least one gigabyte, by graph replay", rows)
    decode = small()
    table("compressed attention: 256 requests with one new token, by graph replay", decode)
    host = requests()
    table("host time of a request", host)
    save("hybrid", rows + decode + host)
