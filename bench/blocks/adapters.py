"""One adapter per implementation: how it is constructed and called, nothing else.

To measure another one, subclass `Adapter`, implement its methods, and add it to `ADAPTERS`. `make`, `batch`
and `sampled` run outside the timed region and turn numpy data into what an engine that uses this
implementation would already have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.blocks.workload import Tokens

WINDOW = 1_024
MAX_TOKENS = 131_072
NUM_ROWS = 512


class Adapter:
    name = "base"
    num_windows = 0  # window groups beside the full one

    def __init__(self, num_pages: int, page: int) -> None:
        """`num_pages` for each group."""
        raise NotImplementedError

    # Not timed.
    def make(self, name: str, tokens: Tokens) -> Any:
        """Return a new request."""
        raise NotImplementedError

    def batch(self, requests: list[Any]) -> Any:
        """Return the running requests for `grow`, in the form in which an engine keeps them."""
        return requests

    def sampled(self, tokens: Tokens) -> Any:
        """Return the tokens for `grow`: one per request."""
        return tokens

    def held(self, request: Any) -> list[int]:
        """Return how many pages a running request holds in each group."""
        raise NotImplementedError

    # Timed verbs.
    def hash(self, request: Any) -> None:
        """Compute what a look-up needs to know about the tokens."""

    def look_up(self, request: Any) -> None:
        """Find the hit without changing anything, as a scheduler may do repeatedly for waiting requests."""
        raise NotImplementedError

    def match(self, request: Any) -> None:
        """Do the look-up that `allocate` builds on, if it is a separate call."""

    def allocate(self, request: Any) -> bool:
        """Allocate pages for the whole prompt, which can be hit from now on. False if memory is short."""
        raise NotImplementedError

    def hit(self, request: Any) -> int:
        """Return how many tokens of the last `allocate` or `look_up` need not be computed. Not timed."""
        raise NotImplementedError

    def grow(self, batch: Any, tokens: Any) -> None:
        """Run a step: one more token per request."""
        raise NotImplementedError

    def free(self, request: Any) -> None:
        """End the request; its tokens stay cached until memory is needed."""
        raise NotImplementedError

    def settle(self) -> None:
        """Make freed pages available to the next request, if that takes the end of a step."""


# ------------------------------------------------------------------------------------------ ours


class PagodaRequest:
    __slots__ = ("hit", "row", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.row, self.hit = tokens, 0, 0


class Pagoda(Adapter):
    """`pagoda.manager.Manager`. Each request is a step: its delta is planned and its fence passes."""

    name = "pagoda"

    def __init__(self, num_pages: int, page: int) -> None:
        from pagoda.errors import CapacityError
        from pagoda.layout import FullAttention, Layout, WindowAttention
        from pagoda.manager import Manager

        # Different sizes, because layers with the same geometry share a group.
        layers: list[Any] = [FullAttention(kv_heads=8, k_dim=128, v_dim=128)]
        for i in range(self.num_windows):
            layers.append(WindowAttention(kv_heads=8, k_dim=128, v_dim=128 + i, window=WINDOW))
        layout = Layout(layers, page)
        capacity = {group.name: num_pages for group in layout.groups}
        assert len(capacity) == self.num_windows + 1, capacity
        self.CapacityError = CapacityError
        self.manager = Manager(layout, capacity, num_rows=NUM_ROWS, max_tokens=MAX_TOKENS)

    def make(self, name: str, tokens: Tokens) -> PagodaRequest:
        return PagodaRequest(tokens.copy())  # as fresh as a list is that was just made

    def batch(self, requests: list[PagodaRequest]) -> Any:
        return np.array([request.row for request in requests], np.int32)

    def held(self, request: PagodaRequest) -> list[int]:
        manager = self.manager
        return [
            int(np.count_nonzero(manager.page_ids(request.row, group.name)))
            for group in manager.layout.groups
        ]

    def look_up(self, request: PagodaRequest) -> None:
        self.manager.can_admit(request.tokens)

    def allocate(self, request: PagodaRequest) -> bool:
        manager, tokens = self.manager, request.tokens
        try:
            admitted = manager.admit(tokens)
        except self.CapacityError:
            self.settle()
            return False
        row, hit = admitted.row, admitted.hit
        manager.pass_fence(manager.plan(row, len(tokens) - hit).step)
        manager.commit(row, tokens[hit:])
        request.row, request.hit = row, hit
        return True

    def hit(self, request: PagodaRequest) -> int:
        if request.row == 0:  # looked up only, which gives no length: admitted and released, it does
            admitted = self.manager.admit(request.tokens)
            self.manager.release(admitted.row)
            self.manager.pass_fence(self.manager.plan().step)
            return admitted.hit
        return request.hit

    def grow(self, batch: Any, tokens: Any) -> None:
        manager = self.manager
        manager.reserve(batch)
        delta = manager.plan(batch)
        manager.commit(batch, tokens)
        manager.pass_fence(delta.step)

    def free(self, request: PagodaRequest) -> None:
        self.manager.release(request.row)

    def settle(self) -> None:
        self.manager.pass_fence(self.manager.plan().step)


class PagodaSixGroups(Pagoda):
    name, num_windows = "pagoda-6-groups", 5


class PagodaTwoGroups(Pagoda):
    """The same model in Pagoda's own layout: equal window layers share a group."""

    name, num_windows = "pagoda-2-groups", 1


# ------------------------------------------------------------------------------------------ vLLM


class Vllm(Adapter):
    """v1/core/kv_cache_manager.py :: KVCacheManager, called in the order of its scheduler."""

    name = "vllm-sha256"
    hash_name = "sha256"

    def __init__(self, num_pages: int, page: int) -> None:
        from bench.blocks import vllm_stub

        vllm_stub.install()
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.request import Request, RequestStatus

        self.Request, self.RUNNING = Request, RequestStatus.RUNNING
        self.sampling = SamplingParams(max_tokens=1 << 20)
        hash_function = get_hash_fn_by_name(self.hash_name)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(page, hash_function)
        shape = {"block_size": page, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        for i in range(self.num_windows):
            groups.append(KVCacheGroupSpec([f"window{i}"], SlidingWindowSpec(sliding_window=WINDOW, **shape)))
        # One pool for all groups; one block of it is the null block.
        num_blocks = num_pages * len(groups) + 1
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_TOKENS,
            scheduler_block_size=page,
            hash_block_size=page,
            max_in_flight_tokens=8_192,
            enable_caching=True,
        )

    def make(self, name: str, tokens: Tokens) -> Any:
        request = self.Request(
            request_id=name,
            prompt_token_ids=tokens.tolist(),
            sampling_params=self.sampling,
            pooling_params=None,
            block_hasher=None,
        )
        request._block_hasher = self.hasher  # so that `hash` can be timed apart
        return request

    def sampled(self, tokens: Tokens) -> list[int]:
        return tokens.tolist()

    def held(self, request: Any) -> list[int]:
        managers = self.manager.coordinator.single_type_managers
        return [sum(not b.is_null for b in each.req_to_blocks[request.request_id]) for each in managers]

    def hash(self, request: Any) -> None:
        request.update_block_hashes()

    def look_up(self, request: Any) -> None:
        request.found = self.manager.get_computed_blocks(request)

    match = look_up

    def allocate(self, request: Any) -> bool:
        blocks, hit, _ = request.found
        new = request.num_tokens - hit
        if self.manager.allocate_slots(request, new, hit, blocks, full_sequence_must_fit=True) is None:
            return False
        request.num_computed_tokens = request.num_tokens
        request.status = self.RUNNING
        return True

    def hit(self, request: Any) -> int:
        return request.found[1]

    def grow(self, batch: Any, tokens: Any) -> None:
        for request, token in zip(batch, tokens, strict=True):
            request.append_output_token_ids(token)
        allocate = self.manager.allocate_slots
        for request in batch:
            allocate(request, 1)
            request.num_computed_tokens += 1

    def free(self, request: Any) -> None:
        self.manager.free(request)


class VllmXxhash(Vllm):
    name, hash_name = "vllm-xxhash", "xxhash"


class VllmCbor(Vllm):
    name, hash_name = "vllm-sha256-cbor", "sha256_cbor"


class VllmXxhashCbor(Vllm):
    name, hash_name = "vllm-xxhash-cbor", "xxhash_cbor"


class VllmSixGroups(Vllm):
    name, num_windows = "vllm-6-groups-sha256", 5


class VllmSixGroupsXxhash(VllmXxhash):
    name, num_windows = "vllm-6-groups-xxhash", 5


OURS: list[type[Adapter]] = [Pagoda, PagodaSixGroups, PagodaTwoGroups]
PEERS: list[type[Adapter]] = [
    Vllm, VllmXxhash, VllmCbor, VllmXxhashCbor, VllmSixGroups, VllmSixGroupsXxhash
]  # fmt: skip
ADAPTERS = {adapter.name: adapter for adapter in OURS + PEERS}
