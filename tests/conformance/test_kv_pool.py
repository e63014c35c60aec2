"""contracts/pools.md: `KVPool`, what it is; the names; the factories."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagoda
from conformance.builders import (
    FP8,
    PAGE_SIZES,
    PLAIN,
    kv_pool,
    rows_like,
)
from pagoda import ConfigError, PagodaError
from pagoda.compat import (
    GDNPool,
    KVPool,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    make_full_attention_net_mem_pool,
    make_req_to_token_pool,
)

SIGNATURES: list[tuple[Any, str]] = [
    (
        KVPool,
        "size, layer_num, k_head_num, k_head_dim, device='cuda', dtype=torch.float16, v_head_num=None, "
        "v_head_dim=None, pin_memory=True, page_size=1, k_scale=None, v_scale=None",
    ),
    (TokenToKVPoolAllocator, "size, device='cuda', page_size=1, need_sort=True"),
    (ReqToTokenPool, "max_reqs, max_context_len, device='cuda'"),
    (
        GDNPool,
        "max_reqs, num_gdn_layers, num_v_heads, head_k_dim, head_v_dim, conv_dim, conv_kernel_size, "
        "device='cuda', dtype=torch.bfloat16, max_track_slots=0",
    ),
    (
        make_full_attention_net_mem_pool,
        "size, layer_num, k_head_num, k_head_dim, v_head_num, v_head_dim, device='cuda', "
        "dtype=torch.float16, page_size=1, need_sort=True, pin_memory=True",
    ),
    (make_req_to_token_pool, "max_reqs, max_context_len, device='cuda'"),
    (KVPool.get_key_buffer, "self, layer_id"),
    (KVPool.get_value_buffer, "self, layer_id"),
    (KVPool.get_kv_buffer, "self, layer_id"),
    (KVPool.set_kv_buffer, "self, layer_id, indices, k, v"),
    (KVPool.mem_bytes, "self"),
    (TokenToKVPoolAllocator.alloc, "self, need_size"),
    (TokenToKVPoolAllocator.free, "self, indices"),
    (TokenToKVPoolAllocator.free_group_begin, "self"),
    (TokenToKVPoolAllocator.free_group_end, "self"),
    (TokenToKVPoolAllocator.available_size, "self"),
    (TokenToKVPoolAllocator.clear, "self"),
    (TokenToKVPoolAllocator.merge_and_sort_free, "self"),
    (ReqToTokenPool.alloc, "self, n=1"),
    (ReqToTokenPool.free, "self, slot"),
    (ReqToTokenPool.write, "self, index, values"),
    (ReqToTokenPool.available_size, "self"),
    (ReqToTokenPool.clear, "self"),
    (GDNPool.get_layer_state, "self, gdn_layer_idx"),
    (GDNPool.reset_states, "self, req_pool_indices"),
    (GDNPool.copy_states, "self, src_index, dst_index"),
    (GDNPool.alloc_track_slot, "self"),
    (GDNPool.free_track_slot, "self, slot"),
    (GDNPool.mem_bytes, "self"),
]


@pytest.mark.parametrize(("call", "wanted"), SIGNATURES, ids=lambda it: getattr(it, "__qualname__", ""))
def test_argument_names_their_order_and_defaults_are_part_of_the_contract(call: Any, wanted: str) -> None:
    parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
    assert ", ".join(map(str, parameters)) == wanted


@pytest.mark.parametrize("call", [call for call, _ in SIGNATURES if "." not in call.__qualname__])
def test_every_name_imports_from_the_package(call: Any) -> None:
    assert getattr(pagoda.compat, call.__name__) is call
    assert call.__name__ in pagoda.compat.__all__


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", [*PLAIN, *FP8], ids=str)
def test_each_layer_has_a_k_and_a_v_buffer_of_size_plus_page_size_rows(
    device: str, page_size: int, dtype: torch.dtype
) -> None:
    pool = kv_pool(device, 2 * page_size, 3, dtype=dtype, page_size=page_size)
    assert isinstance(pool.k_buffer, list)
    assert isinstance(pool.v_buffer, list)
    assert [tuple(buffer.shape) for buffer in pool.k_buffer] == [(3 * page_size, 2, 4)] * 3
    assert [tuple(buffer.shape) for buffer in pool.v_buffer] == [(3 * page_size, 3, 5)] * 3
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        assert buffer.dtype == dtype
        assert buffer.device.type == device


def test_heads_and_dim_of_v_default_to_those_of_k(device: str) -> None:
    pool = KVPool(8, 1, 2, 4, device=device)
    assert (pool.v_head_num, pool.v_head_dim) == (2, 4)
    assert pool.v_buffer[0].shape == pool.k_buffer[0].shape


@pytest.mark.parametrize(("v_head_num", "v_head_dim"), [(1, None), (None, 7), (5, 3), (1, 1)])
def test_heads_and_dim_of_v_may_differ_from_those_of_k(
    device: str, v_head_num: int | None, v_head_dim: int | None
) -> None:
    pool = kv_pool(device, v_head_num=v_head_num, v_head_dim=v_head_dim)
    assert pool.k_buffer[0].shape[1:] == (2, 4)
    assert pool.v_buffer[0].shape[1:] == (v_head_num or 2, v_head_dim or 4)
    k, v = rows_like(pool, 3)
    pool.set_kv_buffer(1, torch.tensor([8, 1, 5], device=device), k, v)
    assert torch.equal(pool.k_buffer[1][[8, 1, 5]], k)
    assert torch.equal(pool.v_buffer[1][[8, 1, 5]], v)


def test_arguments_of_the_pool_are_its_attributes(device: str) -> None:
    given = {
        "size": 8,
        "layer_num": 2,
        "k_head_num": 2,
        "k_head_dim": 4,
        "dtype": torch.float8_e5m2,
        "v_head_num": 3,
        "v_head_dim": 5,
        "pin_memory": False,
        "page_size": 4,
        "k_scale": [0.5, 2.0],
        "v_scale": [0.25, 4.0],
    }
    pool = KVPool(device=device, **given)
    assert {name: getattr(pool, name) for name in given} == given
    assert torch.device(pool.device).type == device


def test_scales_are_one_by_default(device: str) -> None:
    pool = kv_pool(device, dtype=torch.float8_e4m3fn)
    assert list(pool.k_scale) == list(pool.v_scale) == [1.0, 1.0]


def test_buffers_are_handed_out_as_views_without_a_copy(device: str) -> None:
    pool = kv_pool(device)
    for layer in range(2):
        k, v = pool.get_kv_buffer(layer)
        assert k.data_ptr() == pool.get_key_buffer(layer).data_ptr() == pool.k_buffer[layer].data_ptr()
        assert v.data_ptr() == pool.get_value_buffer(layer).data_ptr() == pool.v_buffer[layer].data_ptr()
        assert k.shape == pool.k_buffer[layer].shape
        k[3], v[3] = 7, 8
        assert bool((pool.k_buffer[layer][3] == 7).all())
        assert bool((pool.v_buffer[layer][3] == 8).all())


@pytest.mark.parametrize("dtype", [*PLAIN, *FP8], ids=str)
def test_mem_bytes_counts_all_buffers(device: str, dtype: torch.dtype) -> None:
    pool = kv_pool(device, 8, 3, page_size=4, dtype=dtype)
    assert pool.mem_bytes() == 3 * 12 * (2 * 4 + 3 * 5) * dtype.itemsize


def test_pin_memory_by_default_does_not_fail_on_a_machine_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.is_available():  # the defect that this is about
        with pytest.raises(RuntimeError):
            torch.empty(1, pin_memory=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pool, _ = make_full_attention_net_mem_pool(8, 1, 2, 4, 2, 4, device="cpu")
    assert pool.pin_memory
    assert not pool.k_buffer[0].is_cuda
    assert KVPool(8, 1, 2, 4, device="cpu").pin_memory


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [True, False])
def test_pin_memory_pins_cpu_pools_and_leaves_cuda_pools_alone(pin_memory: bool) -> None:
    on_host = kv_pool("cpu", pin_memory=pin_memory)
    assert all(buffer.is_pinned() == pin_memory for buffer in (*on_host.k_buffer, *on_host.v_buffer))
    assert kv_pool("cuda", pin_memory=pin_memory).k_buffer[0].is_cuda


@pytest.mark.parametrize(
    "bad",
    [
        {"size": -8},
        {"size": 8.0},
        {"size": "8"},
        {"size": 2**40},
        {"size": 9, "page_size": 2},
        {"page_size": 0},
        {"page_size": -1},
        {"page_size": 1.5},
        {"layer_num": 0},
        {"layer_num": -1},
        {"k_head_num": 0},
        {"k_head_dim": -4},
        {"k_head_dim": "4"},
        {"v_head_num": 0},
        {"v_head_dim": 2.5},
        {"dtype": torch.int32},
        {"dtype": "float16"},
        {"device": "nowhere"},
        {"device": "meta"},
        {"dtype": torch.float8_e5m2, "k_scale": [1.0]},
        {"dtype": torch.float8_e5m2, "v_scale": [1.0, 1.0, 1.0]},
        {"dtype": torch.float8_e5m2, "k_scale": [0.0, 1.0]},
        {"dtype": torch.float8_e5m2, "k_scale": [1.0, float("nan")]},
        {"dtype": torch.float8_e5m2, "v_scale": [1.0, -1.0]},
        {"dtype": torch.float8_e5m2, "v_scale": ["one", "two"]},
        {"dtype": torch.float8_e5m2, "k_scale": [None, 1.0]},
        {"dtype": torch.float8_e5m2, "k_scale": 1.0},
    ],
    ids=str,
)
def test_a_pool_that_cannot_be_is_refused_with_a_typed_error(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        kv_pool(**({"device": "cpu"} | bad))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    "make",
    [
        lambda: KVPool(8, 1, 1, 1),
        lambda: TokenToKVPoolAllocator(8),
        lambda: ReqToTokenPool(8, 8),
        lambda: GDNPool(1, 1, 1, 1, 1, 3, 4),
    ],
)
def test_a_cuda_device_that_is_not_there_is_a_typed_error(make: Callable[[], Any]) -> None:
    with pytest.raises(PagodaError):
        make()


def test_make_req_to_token_pool_makes_one(device: str) -> None:
    pool = make_req_to_token_pool(3, 7, device=device)
    assert isinstance(pool, ReqToTokenPool)
    assert (pool.size, pool.max_context_len) == (3, 7)
    assert torch.device(pool.device).type == device


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_make_full_attention_net_mem_pool_makes_a_pool_and_its_allocator(device: str, page_size: int) -> None:
    pool, allocator = make_full_attention_net_mem_pool(
        4 * page_size,
        3,
        2,
        4,
        1,
        5,
        device=device,
        dtype=torch.bfloat16,
        page_size=page_size,
        need_sort=False,
        pin_memory=False,
    )
    assert isinstance(pool, KVPool)
    assert isinstance(allocator, TokenToKVPoolAllocator)
    assert (pool.size, pool.layer_num, pool.k_head_num, pool.k_head_dim) == (4 * page_size, 3, 2, 4)
    assert (pool.v_head_num, pool.v_head_dim) == (1, 5)
    assert (pool.dtype, pool.page_size, pool.pin_memory) == (torch.bfloat16, page_size, False)
    assert (allocator.size, allocator.page_size, allocator.need_sort) == (4 * page_size, page_size, False)
    for made in (pool, allocator):
        assert torch.device(made.device).type == device
    slots = allocator.alloc(4 * page_size)  # every slot of one is a row of the other
    k = torch.arange(4 * page_size, device=device).view(-1, 1, 1).expand(-1, 2, 4).bfloat16()
    pool.set_kv_buffer(2, slots, k, k[:, :1, :1].expand(-1, 1, 5))
    assert torch.equal(pool.get_key_buffer(2)[slots.long()], k)
