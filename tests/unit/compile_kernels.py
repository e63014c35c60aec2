"""A program: compiles every Triton kernel for a GPU that need not be there. In: its compute capability; out:
a line a kernel, with the number of variants that calls of different sizes and alignments made.

Launches compile and stop there, so tensors lie on the host. What is compiled is not run."""

import sys
from collections import defaultdict
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from differential.entry_layouts import ENTRIES
from pagoda.kernels import _attention_fused as attention_fused
from pagoda.kernels import _batch_fused as batch_fused
from pagoda.kernels import _casts_fused, _pages_fused, _store_fused, _tokens_fused
from pagoda.kernels import _compress_fused as compress_fused
from pagoda.kernels import _entries_fused as entries_fused
from pagoda.kernels import _extend_hopper as extend_hopper
from pagoda.kernels import _fused as fused
from pagoda.kernels import _gather_fused as gather_fused
from pagoda.kernels import _latent_hopper as latent_hopper
from pagoda.kernels import _states_fused as states_fused
from pagoda.kernels._regions import Region, Regions
from pagoda.kernels.entries import Codec, Ring, Tokens

CAPABILITY = int(sys.argv[1])
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # that a program may have
compiled: dict[str, set[int]] = defaultdict(set)


class NoGpu:
    """What Triton asks the driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


real_run = JITFunction.run


def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
    made = real_run(kernel, *args, grid=grid, warmup=True, **options)
    assert made is not None
    assert made.metadata.shared <= SHARED_BYTES[CAPABILITY], (kernel.__name__, args[-1], made.metadata.shared)
    compiled[kernel.__name__].add(id(made))
    return made


driver.set_active(NoGpu())
JITFunction.run = compile_only
if CAPABILITY >= 89:  # casts as they are on such a GPU, not as on the host
    _store_fused._spelled_out = lambda dtype, device: (0, 0, dtype)
    _casts_fused.is_spelled = lambda device: False


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def stores() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        pool = torch.zeros(32, 2, 64).to(dtype)
        _store_fused.store(ints(5), torch.zeros(5, 2, 64), torch.zeros(5, 2, 64), pool, pool, 1.0, 1.0)


def pages() -> None:
    buffers = [torch.zeros(4, 512, dtype=torch.uint8) for _ in range(4)]
    addresses, packed = torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2048, dtype=torch.uint8)
    _pages_fused.pack(ints(3), buffers, addresses, packed)
    _pages_fused.unpack(ints(3), buffers, addresses, packed)
    _pages_fused.copy_pages(ints(3), ints(3), buffers, addresses)
    for offset, n in ((0, 10), (1, 1), (3, 16)):  # any delta, aligned or not, one kernel
        fused._launch_writes.compiled.clear()
        fused.write_table(ints(40)[offset:], 16 - offset, offset, n, ints(40)[offset:])
    for at, value in ((0, -1), (3, 1), (16, 2**31 - 1)):  # any numbers, one kernel
        fused._launch_set.compiled.clear()
        fused.set_table(ints(40)[at % 3 :], at, value, ints(40)[at % 2 :], 20, at)
    outs = [torch.zeros(3, 32, dtype=torch.uint8) for _ in range(4)]
    gather_fused.gather(ints(3), buffers, addresses, 16, outs, addresses)


def states() -> None:
    """Any rows of any tensors, one kernel for each operation."""
    for at, n in ((0, 1), (1, 2), (16, 16)):
        rows = [Region(torch.zeros(17, 4 + at), float("-inf")), Region(ints(17, 4), -1, 3, True)]
        regions = Regions.of(rows, torch.device("cpu"))
        checkpoints = torch.zeros(n + 1, 16 + regions.checkpoint_bytes, dtype=torch.uint8)
        for launch in ("fill", "copy", "save", "restore"):
            getattr(states_fused, f"_launch_{launch}").compiled.clear()
        states_fused.fill_rows(regions, at, 1, None)
        states_fused._launch_fill.compiled.clear()
        states_fused.fill_rows(regions, at, n, ints(99)[n:])
        states_fused.copy_states(ints(99)[n:], at, 2 * at, n, regions)
        states_fused.save_states(ints(99)[n:], at, 0, 2 * at, n, regions, checkpoints)
        states_fused.restore_states(ints(99)[n:], at, 0, 2 * at, n, regions, checkpoints)


def batches() -> None:
    """Any step, aligned or not: `Launch` launches for all what the first one compiled."""
    for window, max_tokens in ((0, 64), (100, 1)):
        group = batch_fused.GroupPages(
            max_pages=20,
            page_tokens=64,
            kernel_page_tokens=64,
            window=window,
            target=3 * max_tokens,
            slot_mapping=torch.zeros(max_tokens, dtype=torch.int64),
            page_table=ints(8, 20),
            indptr=ints(9),
            indices=ints(160),
            last_page_len=ints(8),
            begins=ints(8),
            runs=ints(3 * max_tokens + 1),
            tasks=ints(8 + 3 * max_tokens, 8),
            splits=ints(8, 2),
        )
        tokens = torch.zeros(max_tokens, dtype=torch.int64)
        out = ints(8), ints(8), ints(9), tokens, ints(max_tokens), ints(9, 2)
        for groups in ([group], [group, group]):
            prepared = batch_fused.prepare(groups, torch.device("cpu"))
            for num_rows in (0, 1, 2, 7):
                for offset in (0, 1):
                    batch_fused._launch_count.compiled.clear()
                    batch_fused._launch_fill.compiled.clear()
                    sections = (offset, 16, 32 + offset, 48 - offset)
                    batch_fused.fill(
                        prepared, ints(681)[offset:], 17, ints(64)[offset:], sections, num_rows, 8, 1, out
                    )


def entries() -> None:
    tokens = Tokens(ints(2), ints(3), ints(3))
    for entry in ENTRIES.values():
        entries_of(Codec.of(entry), entry.page_bytes(32), tokens)
    of_batches = tokens._replace(positions=torch.zeros(3, dtype=torch.int64))
    entry = next(iter(ENTRIES.values()))
    entries_of(Codec.of(entry), entry.page_bytes(32), of_batches)
    for few in (_tokens_fused._FEW_TOKENS, 0):  # small batches, and large ones
        _tokens_fused._FEW_TOKENS = few
        compressors(tokens)
        compressors(of_batches)


def entries_of(codec: Codec, page_bytes: int, tokens: Tokens) -> None:
    data, scales = (torch.zeros(3, 8, n, dtype=torch.uint8) for n in (codec.data_bytes, codec.scale_bytes))
    ring = Ring(data, scales if codec.scale_bytes else None, ints(3, 8))
    blocks, table = torch.zeros(5, page_bytes, dtype=torch.uint8), ints(3, 4)
    values = torch.zeros(3, codec.dim, dtype=torch.bfloat16)
    out = torch.zeros(3, 6, codec.dim, dtype=torch.bfloat16)
    entries_fused.store_window(codec, tokens, values, ring)
    entries_fused.store_entries(codec, tokens, values, 4, table, blocks, 32)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    entries_fused.gather_chosen(codec, tokens, 4, ints(3, 6), table, blocks, 32, out, mask)
    for requests in (2, 3):  # whose tokens are looked for, or one each
        entries_fused.gather_all(codec, tokens, 4, table, blocks, 32, out[:requests], ints(requests))
    entries_fused.gather_windows(codec, tokens, 6, ring, out, ints(3))
    for requests in (2, 3):
        entries_fused.gather_chunk(codec, tokens, 6, ring, values, out[:requests], ints(requests))


def compressors(tokens: Tokens) -> None:
    for ratio, channels, dim in ((4, 1024, 512), (128, 512, 512), (4, 256, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.zeros(3, channels, dtype=dtype)
            state, out = torch.zeros(3, ratio * channels // dim, channels), torch.zeros(3, dim)
            norm, rotary = (torch.ones(dim), 1e-6), (torch.zeros(3, 32), torch.zeros(3, 32))
            for more in ((norm, rotary), (None, None)):
                compress_fused.compress(tokens, given, given, ratio, state, state, out, *more)
            compress_fused.push(tokens, given, given, state, state)


# Query heads, KV heads, k_dim, v_dim (0: latents), dtypes of the pool and of queries; with window, sinks and
# softcap, or without.
Shape = tuple[int, int, int, int, torch.dtype, torch.dtype, bool]
ATTENTION: dict[str, Shape] = {
    "grouped": (8, 2, 128, 128, torch.bfloat16, torch.bfloat16, False),
    "large": (2, 2, 256, 256, torch.float16, torch.float16, True),
    "in two pieces": (6, 2, 80, 96, torch.bfloat16, torch.float32, True),
    "e4m3": (8, 2, 128, 128, torch.float8_e4m3fn, torch.bfloat16, False),
    "latent": (128, 1, 576, 0, torch.bfloat16, torch.bfloat16, True),
    "latent in fp8": (128, 1, 576, 0, torch.float8_e5m2, torch.float16, False),
    "latent in fp8 for float32": (16, 1, 576, 0, torch.float8_e4m3fn, torch.float32, False),
}


def attention() -> None:
    """Every shape is one variant of each kernel, whatever the sizes of the batch are, and fits the device."""
    attention_fused._is_interpreted = lambda device: False
    attention_fused.is_spelled = lambda device: CAPABILITY < 89
    for name, shape in ATTENTION.items():
        takes_minutes = name == "large" or name.startswith("latent in fp8")
        if CAPABILITY < 90 and takes_minutes:
            continue
        before = {each: len(variants) for each, variants in compiled.items()}
        for sizes in ((1, 1, 1, 1), (16, 64, 16, 16), (5, 33, 7, 2**31 - 1)):
            attention_of(shape, *sizes)
        kernels = "_decode", "_extend", "_merge_runs", "_merge_tokens"
        grown = {each: len(compiled[each]) - before.get(each, 0) for each in kernels}
        assert grown == dict.fromkeys(kernels, 1), (name, grown)
    if CAPABILITY >= 90:
        hopper()


def attention_of(shape: Shape, num_rows: int, num_tokens: int, width: int, window: int) -> None:
    heads, kv_heads, k_dim, v_dim, dtype, q_dtype, has_all = shape
    keys = torch.zeros(32, kv_heads, k_dim).to(dtype)
    values = torch.zeros(32, kv_heads, v_dim).to(dtype) if v_dim else None
    call = attention_fused.Arguments(
        torch.zeros(num_tokens, heads, k_dim, dtype=q_dtype),
        torch.zeros(num_tokens, heads, v_dim or 512, dtype=q_dtype),
        keys, values, 1.0, 1.0, 0.1, 2.0 * has_all, torch.zeros(heads) if has_all else None,
        window * has_all, 16,
        ints(num_rows, width), ints(num_rows), ints(num_rows + 1), ints(num_tokens), ints(num_rows + 1, 2),
        ints(67), ints(num_rows + 66, 8), ints(num_rows, 2),
    )  # fmt: skip
    parts = attention_fused.Parts(torch.zeros(64), torch.zeros(64))
    for memory in (None, parts):
        attention_fused._launcher.cache_clear()  # a kernel that is known would be launched
        attention_fused.decode(call, memory, 8)
        attention_fused.extend(call, memory, num_rows, num_tokens, 3)
    attention_fused.merge(call, parts, 8, True)


def hopper() -> None:
    for dim, page, more in zip((64, 128), (16, 64), ((40, torch.zeros(8)), (0, None)), strict=True):
        pool, queries = (
            torch.zeros(128, 2, dim).to(torch.bfloat16),
            torch.zeros(20, 8, dim).to(torch.bfloat16),
        )
        lists = ints(4, 8), ints(4), ints(5), ints(5, 2), 4, 20, page, 0.1
        for parts in ((), (ints(4, 2), 3, 66, torch.zeros(64), torch.zeros(64))):
            extend_hopper.extend(queries, pool, pool, queries, *lists, *more, *parts)
    latents = torch.zeros(64, 1, 576, dtype=torch.bfloat16)
    for heads, sinks in ((128, None), (16, torch.zeros(16))):
        queries, out = (torch.zeros(20, heads, n, dtype=torch.bfloat16) for n in (576, 512))
        lists = ints(4, 8), ints(5), ints(67), ints(70, 8), 16, 0.1, 8
        latent_hopper.decode(queries, latents, out, *lists, sinks)


for part in (stores, pages, states, batches, entries, attention):
    part()
for name, variants in sorted(compiled.items()):
    print(name, len(variants))
