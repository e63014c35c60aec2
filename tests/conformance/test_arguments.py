"""Every call of the public designs with one bad argument at a time: it is refused, and by its own name."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conformance.hybrid_models import tiny
from pagoda import compat
from pagoda.errors import PagodaError

# What is no integer, whatever it is wanted for. A bool is none either.
NO_INTEGER = [True, np.True_, torch.tensor(True), np.array(True), 1.5, None, "1", [1], {}]
NO_SIZE = [-1, *NO_INTEGER]
NO_IDS = [
    True,
    [True],
    [1, True],
    (1, np.True_),
    [torch.tensor(1), torch.tensor(True)],
    np.array([True, False]),
    torch.tensor([True, False]),
    torch.tensor(True),
    [0.5],
    torch.tensor([0.5]),
    "12",
    None,
    {},
    [[1], [1, 2]],
]
NOT_FLAT = [[[1, 2], [3, 4]], np.ones((1, 2), dtype=np.int32), torch.ones(2, 2, dtype=torch.int64)]
BAD_IDS = [*NO_IDS, *NOT_FLAT]
NO_TOKENS = [[-1], [2**31], *BAD_IDS]
NO_DEVICE = ["nowhere", "meta", 1.5]


def kv_pool(**changed: Any) -> compat.KVPool:
    return compat.KVPool(
        **({"size": 8, "layer_num": 2, "k_head_num": 2, "k_head_dim": 4, "device": "cpu"} | changed)
    )


def gdn_pool(**changed: Any) -> compat.GDNPool:
    sizes = {
        "max_reqs": 3,
        "num_gdn_layers": 2,
        "num_v_heads": 2,
        "head_k_dim": 3,
        "head_v_dim": 5,
        "conv_dim": 7,
        "conv_kernel_size": 4,
        "max_track_slots": 2,
    }
    return compat.GDNPool(device="cpu", **(sizes | changed))


def slots(**changed: Any) -> compat.TokenToKVPoolAllocator:
    made = compat.TokenToKVPoolAllocator(**({"size": 8, "device": "cpu", "page_size": 2} | changed))
    made.alloc(4)
    return made


def rows() -> compat.ReqToTokenPool:
    made = compat.ReqToTokenPool(3, 8, "cpu")
    made.alloc(2)
    return made


def blocks() -> compat.BlockAllocator:
    made = compat.BlockAllocator(4, "cpu")
    made.acquire(2)
    return made


def numbered() -> compat.SlotAllocator:
    made = compat.SlotAllocator(4)
    made.alloc()
    return made


def prefixes() -> compat.PrefixCacheManager:
    made = compat.PrefixCacheManager()
    made.insert([1, 2, 3], 1, 1)
    return made


def radix() -> compat.RadixCacheManager:
    made = compat.RadixCacheManager("cpu")
    made.insert_prefix([1, 2, 3], [1, 2, 3])
    return made


def cache() -> compat.CacheManager:
    made = compat.CacheManager("cpu", 8)
    made.allocate(4)
    return made


def schedule() -> list[compat.LayerSpec]:
    return [compat.LayerSpec(0, compat.AttentionType.SWA), compat.LayerSpec(1, compat.AttentionType.CSA)]


def schema() -> compat.LayerCacheSchema:
    return compat.build_schema(tiny(), schedule()[1])


def manager(**changed: Any) -> compat.KVCacheManager:
    sizes = {
        "config": tiny(),
        "schedule": schedule(),
        "max_concurrent_requests": 3,
        "max_context_tokens": 16,
        "device": "cpu",
    }
    made = compat.KVCacheManager(**(sizes | changed))
    made.admit_request()
    return made


def states() -> compat.StateCachePool:
    return compat.StateCachePool(schema(), 2, "cpu")


def handle() -> compat.LayerCacheHandle:
    return manager().acquire(1, [1], [0], [0])


def kv_cache() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 8, 2, 1, 1), torch.zeros(4, 8, 2, 1, 1)


k = torch.zeros(1, 2, 4)
NO_TENSOR = [None, 1, torch.zeros(3, 3), [0.0]]

# What is called, with good arguments, and bad ones by name.
CALLS: list[tuple[Callable[[], Callable[..., Any]], dict[str, Any], dict[str, list[Any]]]] = [
    (
        lambda: compat.KVPool,
        {"size": 8, "layer_num": 2, "k_head_num": 2, "k_head_dim": 4, "device": "cpu", "page_size": 2},
        {
            "size": [3, 2**31, *NO_SIZE],
            "layer_num": [0, *NO_SIZE],
            "k_head_num": [0, *NO_SIZE],
            "k_head_dim": [0, *NO_SIZE],
            "v_head_num": [0, *[bad for bad in NO_SIZE if bad is not None]],
            "v_head_dim": [0, *[bad for bad in NO_SIZE if bad is not None]],
            "page_size": [0, 3, *NO_SIZE],
            "device": NO_DEVICE,
            "dtype": [torch.int8, None, "float16"],
            "k_scale": [[2.0, 2.0], 1.0],
            "v_scale": [[2.0, 2.0], 1.0],
        },
    ),
    *(
        (lambda name=name: getattr(kv_pool(), name), {"layer_id": 0}, {"layer_id": [2, *NO_SIZE]})  # type: ignore[misc]
        for name in ("get_key_buffer", "get_value_buffer", "get_kv_buffer")
    ),
    (
        lambda: kv_pool().set_kv_buffer,
        {"layer_id": 0, "indices": [1], "k": k, "v": k},
        {
            "layer_id": [2, *NO_SIZE],
            "indices": [[9], [-2], [[1, True]], *NO_IDS],
            "k": NO_TENSOR,
            "v": NO_TENSOR,
        },
    ),
    (
        lambda: compat.TokenToKVPoolAllocator,
        {"size": 8, "device": "cpu", "page_size": 2},
        {"size": [3, 2**31, *NO_SIZE], "page_size": [0, 3, *NO_SIZE], "device": NO_DEVICE},
    ),
    (lambda: slots().alloc, {"need_size": 1}, {"need_size": NO_SIZE}),
    (lambda: slots().alloc_host, {"need_size": 1}, {"need_size": NO_SIZE}),
    (lambda: slots().free, {"indices": [2]}, {"indices": [[0], [6], [99], *BAD_IDS]}),
    (
        lambda: slots().alloc_extend,
        {"old_lens": [1], "new_lens": [2], "last_slots": [2]},
        {
            "old_lens": [[3], [-1], [1, 1], *BAD_IDS],
            "new_lens": [[0], [1, 1], *BAD_IDS],
            "last_slots": [[9], [3], [1, 1], *BAD_IDS],
        },
    ),
    (
        lambda: compat.ReqToTokenPool,
        {"max_reqs": 3, "max_context_len": 8, "device": "cpu"},
        {"max_reqs": NO_SIZE, "max_context_len": [0, *NO_SIZE], "device": NO_DEVICE},
    ),
    (lambda: rows().alloc, {"n": 1}, {"n": NO_SIZE}),
    (lambda: rows().free, {"slot": 1}, {"slot": [0, 3, 4, [1, 1], *BAD_IDS]}),
    (
        lambda: rows().write,
        {"index": (1, slice(0, 2)), "values": [3, 4]},
        {
            "index": [
                1,
                (1,),
                (9, slice(0, 2)),
                (True, slice(0, 2)),
                ([1, 2], slice(0, 2)),
                (1, slice(0, 9)),
                (1, slice(True, 3)),
                (1, slice(0, 4, 2)),
                (1, slice(2, 0)),
                ([[1, 2]], [0, 1]),
                ([1, 2], [[0, 1]]),
                ([1, True], [0, 1]),
                ([1, 2], [0, 8]),
                ([1, 4], [0, 1]),
                ([1, 2, 3], [0, 1, 2]),
            ],
            "values": [[1], [1, 2, 3], [1, 2**31], [0.5, 1.0], [1, True], [[1, 2]]],
        },
    ),
    (
        lambda: compat.make_req_to_token_pool,
        {"max_reqs": 3, "max_context_len": 8, "device": "cpu"},
        {"max_reqs": NO_SIZE, "max_context_len": [0, *NO_SIZE], "device": NO_DEVICE},
    ),
    (
        lambda: compat.GDNPool,
        {
            "max_reqs": 3,
            "num_gdn_layers": 2,
            "num_v_heads": 2,
            "head_k_dim": 3,
            "head_v_dim": 5,
            "conv_dim": 7,
            "conv_kernel_size": 4,
            "device": "cpu",
        },
        {
            "max_reqs": NO_SIZE,
            "max_track_slots": NO_SIZE,
            **{
                name: [0, *NO_SIZE]
                for name in (
                    "num_gdn_layers",
                    "num_v_heads",
                    "head_k_dim",
                    "head_v_dim",
                    "conv_dim",
                    "conv_kernel_size",
                )
            },
            "device": NO_DEVICE,
            "dtype": [torch.int8, None],
        },
    ),
    (lambda: gdn_pool().get_layer_state, {"gdn_layer_idx": 1}, {"gdn_layer_idx": [2, *NO_SIZE]}),
    (lambda: gdn_pool().reset_states, {"req_pool_indices": [1]}, {"req_pool_indices": [[9], [-1], *BAD_IDS]}),
    (
        lambda: gdn_pool().copy_states,
        {"src_index": [1], "dst_index": [2]},
        {"src_index": [[9], [1, 2], *BAD_IDS], "dst_index": [[9], *BAD_IDS]},
    ),
    (lambda: gdn_pool().free_track_slot, {"slot": 4}, {"slot": [0, 1, 5, 9, *NO_SIZE]}),
    (
        lambda: compat.BlockAllocator,
        {"num_total_blocks": 3, "device": "cpu"},
        {"num_total_blocks": NO_SIZE, "device": NO_DEVICE},
    ),
    (lambda: blocks().acquire, {"n": 1}, {"n": NO_SIZE}),
    (lambda: blocks().release, {"ids": [1]}, {"ids": [[0], [3], [9], [1, 1], *BAD_IDS]}),
    (lambda: compat.SlotAllocator, {"max_slots": 3}, {"max_slots": NO_SIZE}),
    (lambda: numbered().free, {"idx": 0}, {"idx": [1, 9, *NO_SIZE]}),
    (lambda: numbered().occupy, {"idx": 1}, {"idx": [0, 9, *NO_SIZE]}),
    (lambda: numbered().is_free, {"idx": 1}, {"idx": [9, *NO_SIZE]}),
    (lambda: numbered().version, {"idx": 1}, {"idx": [9, *NO_SIZE]}),
    (lambda: compat.PrefixCacheManager, {"max_capacity": 3}, {"max_capacity": NO_SIZE}),
    (
        lambda: prefixes().insert,
        {"token_ids": [1], "slot": 1, "slot_ver": 1},
        {"token_ids": NO_TOKENS, "slot": [2**31, *NO_SIZE], "slot_ver": [2**31, *NO_SIZE]},
    ),
    *(
        (lambda name=name: getattr(prefixes(), name), {"token_ids": [1]}, {"token_ids": NO_TOKENS})  # type: ignore[misc]
        for name in ("find", "pin", "release")
    ),
    (
        lambda: prefixes().find_valid,
        {"token_ids": [1], "slots": compat.SlotAllocator(2)},
        {"token_ids": NO_TOKENS, "slots": [None, 1]},
    ),
    (
        lambda: prefixes().copy_kv,
        {"token_ids": [1, 2], "target_slot": 2, "kv_cache": kv_cache(), "n_layers": 1},
        {
            "token_ids": NO_TOKENS,
            "target_slot": [4, *NO_SIZE],
            "kv_cache": [None, kv_cache()[:1], (1, 2)],
            "n_layers": [3, *NO_SIZE],
        },
    ),
    (
        lambda: compat.get_mha_cache_per_page,
        {"head_dim": 8, "num_kv_heads": 2, "num_layers": 3},
        {
            **{name: [0, *NO_SIZE] for name in ("head_dim", "num_kv_heads", "num_layers", "page_size")},
            "tp_size": [0, *NO_SIZE],
            "dtype_size": [0, -1, True, None, math.nan],
        },
    ),
    (
        lambda: compat.get_num_pages_for_kv_cache,
        {"available_memory": 8, "cache_per_page": 2},
        {"available_memory": [-1, True, None, math.inf], "cache_per_page": [0, -1, True, None, math.nan]},
    ),
    (
        lambda: compat.create_page_table,
        {"max_running_req": 2, "max_seq_len": 3},
        {"max_running_req": NO_SIZE, "max_seq_len": NO_SIZE, "device": NO_DEVICE},
    ),
    (
        lambda: compat.find_first_diff_pos,
        {"tensor1": [1, 2], "tensor2": [1, 3]},
        {"tensor1": [1, None, "12", *NOT_FLAT], "tensor2": [1, None, "12", [0.5], *NOT_FLAT]},
    ),
    (
        lambda: compat.RadixCacheManager,
        {"device": "cpu", "page_size": 1},
        {"device": NO_DEVICE, "page_size": [0, *NO_SIZE]},
    ),
    (lambda: radix().match_prefix, {"input_ids": [1, 2]}, {"input_ids": NO_TOKENS}),
    (lambda: radix().lock_handle, {"handle": None}, {"handle": [1, compat.RadixCacheHandle(0)]}),
    (
        lambda: radix().insert_prefix,
        {"input_ids": [5, 6], "indices": [5, 6]},
        {"input_ids": NO_TOKENS, "indices": [[5], [5, 5], [5, 1], [5, -1], [5, 2**31], *BAD_IDS]},
    ),
    (lambda: radix().evict, {"size": 1}, {"size": NO_SIZE}),
    (lambda: compat.RadixCacheHandle, {"cached_len": 0}, {"cached_len": NO_SIZE, "node": [1, "root"]}),
    (
        lambda: compat.CacheManager,
        {"device": "cpu", "num_pages": 3},
        {"device": NO_DEVICE, "num_pages": [2**31, *NO_SIZE], "page_size": [0, *NO_SIZE]},
    ),
    (
        lambda: lambda input_ids: cache().match_req(compat.Request(0, input_ids, 0, 0, 0)),
        {"input_ids": [1]},
        {"input_ids": [[], *NO_TOKENS]},
    ),
    (lambda: cache().match_req, {"req": compat.Request(0, [1], 0, 0, 0)}, {"req": [None, 1]}),
    (lambda: cache().lock, {"handle": None}, {"handle": [1, compat.RadixCacheHandle(0)]}),
    (lambda: cache().unlock, {"handle": None}, {"handle": [1, compat.RadixCacheHandle(0)]}),
    (
        lambda: cache().allocate,
        {"needed_len": 1, "after": 1},
        {"needed_len": NO_SIZE, "after": [0, 5, 9, *[bad for bad in NO_SIZE if bad is not None]]},
    ),
    (lambda: cache().free, {"indices": [1]}, {"indices": [[0], [5], [9], [1, 1], *BAD_IDS]}),
    (
        lambda: cache().free_and_cache_finished_req,
        {"old_handle": None, "input_ids": [1, 2], "indices": [1, 2]},
        {
            "old_handle": [1, compat.RadixCacheHandle(0)],
            "input_ids": NO_TOKENS,
            "indices": [[1], [1, 1], [1, 5], [1, 9], [0, 1], *BAD_IDS],
        },
    ),
    (lambda: compat.format_radix_tree, {"root": radix().root_node}, {"root": [1], "max_depth": NO_SIZE}),
    (lambda: compat.print_radix_tree, {"root": radix().root_node}, {"root": [1], "max_depth": NO_SIZE}),
    (
        lambda: compat.LayerSpec,
        {"layer_idx": 0, "attn_type": "swa"},
        {"layer_idx": NO_SIZE, "attn_type": ["other", None]},
    ),
    (
        lambda: compat.DSV4Config,
        {"num_layers": 2, "num_query_heads": 4, "index_topk": 2, "compress_ratios": (4, 128)},
        {
            **{
                name: [0, *NO_SIZE]
                for name in ("num_layers", "num_query_heads", "index_topk", "head_dim", "rope_dim", "window")
            },
            "block_tokens": [0, 100, *NO_SIZE],
            "compress_ratios": [(4,), (True, 4), 4, (3, 4)],
            "entry": [1],
            "index": [1],
        },
    ),
    (
        lambda: compat.build_schema,
        {"config": tiny(), "spec": schedule()[0]},
        {"config": [None, 1], "spec": [None, 1]},
    ),
    (
        lambda: compat.compute_block_budget,
        {
            "config": tiny(),
            "schedule": schedule(),
            "max_context_tokens": 16,
            "max_concurrent_requests": 2,
        },
        {
            "config": [None],
            "schedule": [[], None, [1]],
            "max_context_tokens": [0, *NO_SIZE],
            "max_concurrent_requests": [0, *NO_SIZE],
            "memory": [-1, True, "much", 1],
        },
    ),
    (
        lambda: compat.KVCacheManager,
        {
            "config": tiny(),
            "schedule": schedule(),
            "max_concurrent_requests": 3,
            "max_context_tokens": 16,
            "device": "cpu",
        },
        {
            "config": [None],
            "schedule": [[], None, [1]],
            "max_concurrent_requests": [0, *NO_SIZE],
            "max_context_tokens": [0, *NO_SIZE],
            "num_blocks_per_csa_layer": [bad for bad in NO_SIZE if bad is not None],
            "num_blocks_per_hca_layer": [bad for bad in NO_SIZE if bad is not None],
            "device": NO_DEVICE,
        },
    ),
    (lambda: manager().release_request, {"slot": 1}, {"slot": [0, 2, 9, *NO_SIZE]}),
    (
        lambda: manager().allocate_block,
        {"layer_idx": 1, "request_slot": 1},
        {"layer_idx": [0, 9, *NO_SIZE], "request_slot": [0, 2, 9, *NO_SIZE]},
    ),
    (
        lambda: manager().acquire,
        {"layer_idx": 1, "request_slots": [1], "positions": [0], "request_ids": [0]},
        {
            "layer_idx": [9, *NO_SIZE],
            "request_slots": [[9], [2], [1, 1], *BAD_IDS],
            "positions": [[-2], [16], [0, 1], *BAD_IDS],
            "request_ids": [[-2], [1], [0, 0], *BAD_IDS],
        },
    ),
    (
        lambda: compat.PagedKVPool,
        {"schema": schema(), "num_blocks": 2, "device": "cpu"},
        {"schema": [None], "num_blocks": NO_SIZE, "device": NO_DEVICE},
    ),
    (
        lambda: compat.StateCachePool,
        {"schema": schema(), "max_concurrent_requests": 2, "device": "cpu"},
        {"schema": [None], "max_concurrent_requests": NO_SIZE, "device": NO_DEVICE},
    ),
    (lambda: states().reset_slot, {"slot": 1}, {"slot": [0, 3, *NO_SIZE]}),
    (
        lambda: states().snapshot,
        {"slot": 1, "length": None},
        {"slot": [0, 3, *NO_SIZE], "length": [3, *[bad for bad in NO_SIZE if bad is not None]]},
    ),
    (
        lambda: states().restore,
        {"slot": 1, "snapshot": states().snapshot(1)},
        {"slot": [0, 3, *NO_SIZE], "snapshot": [None, {}]},
    ),
    (
        lambda: handle().gather_compressed_kv,
        {"topk_indices": torch.zeros(1, 1, dtype=torch.int32)},
        {"topk_indices": NO_TENSOR, "out": [1, torch.zeros(3, 3)], "mask": [1, torch.zeros(3, 3)]},
    ),
    (
        lambda: handle().gather_all_compressed_kv,
        {},
        {"out": [1, torch.zeros(3, 3)], "lens": [1, torch.zeros(3, 3)]},
    ),
    (lambda: handle().gather_swa_kv, {}, {"out": [1, torch.zeros(3, 3)], "lens": [1, torch.zeros(3, 3)]}),
    (lambda: handle().write_swa, {"kv": torch.zeros(1, tiny().head_dim)}, {"kv": NO_TENSOR}),
    (lambda: handle().write_compressed, {"kv": torch.zeros(1, tiny().head_dim)}, {"kv": NO_TENSOR}),
]


@pytest.mark.parametrize(("make", "good"), [(make, good) for make, good, _ in CALLS])
def test_the_good_arguments_are_good(make: Any, good: dict[str, Any]) -> None:
    if make().__name__ not in ("free_track_slot",):
        make()(**good)


def test_a_bad_argument_is_refused_by_its_name() -> None:
    wrong = []
    for make, good, bad in CALLS:
        for name, values in bad.items():
            for value in values:
                call = make()
                where = f"{getattr(call, '__qualname__', call)}({name}={value!r})"
                try:
                    call(**(good | {name: value}))
                except PagodaError as error:
                    if name not in str(error):
                        wrong.append(f"{where}: {type(error).__name__}: {error}")
                except Exception as error:
                    wrong.append(f"{where} raised {type(error).__name__}: {error}")
                else:
                    wrong.append(f"{where} was taken")
    assert not wrong, "\n".join(wrong)
