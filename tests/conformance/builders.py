"""Small pools and allocators for the tests of contracts/pools.md, and ways to look at them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagoda.compat import GDNPool, KVPool, TokenToKVPoolAllocator

PAGE_SIZES = [1, 2, 16, 64]
PLAIN = [torch.float16, torch.bfloat16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [
    *PLAIN,
    torch.float64,
    *FP8,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
FAILS = (AssertionError, pytest.fail.Exception)  # how a check says that an implementation is wrong


def kv_pool(device: str, size: int = 8, layer_num: int = 2, **changed: Any) -> KVPool:
    """A small pool; K is 2 heads of 4 and V 3 heads of 5 unless told otherwise."""
    arguments = {"k_head_num": 2, "k_head_dim": 4, "v_head_num": 3, "v_head_dim": 5, "dtype": torch.float32}
    return KVPool(size, layer_num, device=device, **(arguments | changed))


def rows_like(pool: KVPool, *lead: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random k and v for a pool: [*lead, heads, dim] float32."""
    random = torch.Generator().manual_seed(seed)
    k = torch.randn(*lead, pool.k_head_num, pool.k_head_dim, generator=random)
    v = torch.randn(*lead, pool.v_head_num, pool.v_head_dim, generator=random)
    return k.to(pool.device), v.to(pool.device)


def contents(pool: KVPool) -> list[torch.Tensor]:
    """Copies of all buffers, as bytes: NaN equals itself, and fp8 can be compared."""
    return [buffer.view(torch.uint8).cpu().clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


@contextmanager
def captured() -> Iterator[None]:
    """The current stream is being captured, by a graph that is not empty."""
    counter = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        counter.add_(1)
        yield


def allocator_of(device: str, page_size: int = 1, pages: int = 8, need_sort: bool = True) -> Any:
    return TokenToKVPoolAllocator(pages * page_size, device=device, page_size=page_size, need_sort=need_sort)


def free_slots(allocator: Any) -> list[int]:
    """Every slot that can be allocated, in order; none is taken. Not inside a free group."""
    slots = allocator.alloc_host(allocator.available_size())
    allocator.free(slots)
    return slots.tolist()


def gdn_pool(device: str, **changed: Any) -> GDNPool:
    """Two layers, 3 working rows, 2 track slots; K ≠ V everywhere."""
    arguments = {
        "max_reqs": 3,
        "num_gdn_layers": 2,
        "num_v_heads": 4,
        "head_k_dim": 3,
        "head_v_dim": 5,
        "conv_dim": 7,
        "conv_kernel_size": 4,
        "max_track_slots": 2,
    }
    return GDNPool(device=device, **(arguments | changed))


def numbered(pool: GDNPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill every state with numbers that tell layer and row apart, and copy them."""
    for state in (pool.recurrent_state, pool.conv_state):
        layers, rows = state.shape[:2]
        tags = torch.arange(1, layers * rows + 1, device=state.device).view(layers, rows)
        state.copy_(tags.view(layers, rows, *[1] * (state.dim() - 2)).expand_as(state))
    return pool.recurrent_state.clone(), pool.conv_state.clone()
