"""One adapter per implementation: how it is constructed and called, nothing else.

To measure another one, subclass `Adapter`, implement its methods and the two `prep_*` converters, and add it
to `ADAPTERS`. The converters run outside the timed region and turn numpy data into what an engine that uses
this implementation would already have.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np


class Adapter:
    name = "base"

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    # Native input forms, not timed.
    def prep_tokens(self, tokens: np.ndarray) -> Any:
        raise NotImplementedError

    def prep_slots(self, base: int, n: int) -> Any:
        raise NotImplementedError

    def slots_to_numpy(self, slots: Any) -> np.ndarray:
        return np.asarray(slots, dtype=np.int64)

    # Timed verbs.
    def insert(self, tokens: Any, slots: Any) -> int:
        """Return the length that was cached already."""
        raise NotImplementedError

    def match(self, tokens: Any) -> tuple[int, Any, Any]:
        """Return (length of the hit, its slots, a handle to lock)."""
        raise NotImplementedError

    def match_len(self, tokens: Any) -> int:
        """Return the length alone; override it if reading the slots costs time."""
        return self.match(tokens)[0]

    def lock(self, handle: Any) -> Any:
        """Lock, and return the argument of `unlock`."""
        raise NotImplementedError

    def unlock(self, held: Any) -> None:
        raise NotImplementedError

    def evict(self, n: int) -> int:
        """Evict, and return the number of tokens evicted."""
        raise NotImplementedError

    def evictable(self) -> int:
        raise NotImplementedError

    # The life of a request; override where the implementation has a cheaper path.
    def cycle(self, prompt: Any, prompt_slots: Any, full: Any, full_slots: Any) -> int:
        """Run a request (match, lock, cache the prompt, cache the output, unlock); return its hit."""
        hit, _, handle = self.match(prompt)
        held = self.lock(handle)
        self.insert(prompt, prompt_slots)
        _, _, handle = self.match(prompt)
        self.unlock(held)
        held = self.lock(handle)
        self.insert(full, full_slots)
        self.unlock(held)
        return hit

    def chunk_step(self, tokens: Any, slots: Any, held: Any) -> Any:
        """One chunk of a chunked prefill: insert, match again, move the lock."""
        self.insert(tokens, slots)
        _, _, handle = self.match(tokens)
        if held is not None:
            self.unlock(held)
        return self.lock(handle)


# ------------------------------------------------------------------------------------------ ours


class Pagoda(Adapter):
    """`pagoda.PrefixTree`, not presized, so that its memory is counted as it grows."""

    name = "pagoda"

    def __init__(self, page_tokens: int) -> None:
        super().__init__(page_tokens)
        self.tree = self._make()

    def _make(self) -> Any:
        from pagoda.tree import PrefixTree

        return PrefixTree(self.page_tokens)

    def prep_tokens(self, tokens: np.ndarray) -> np.ndarray:
        return tokens.astype(np.int32)

    def prep_slots(self, base: int, n: int) -> np.ndarray:
        """Page ids; `base` is a multiple of every page size used here."""
        first = base // self.page_tokens
        return np.arange(first, first + n // self.page_tokens, dtype=np.int32)

    def slots_to_numpy(self, slots: np.ndarray) -> np.ndarray:
        pages = slots.astype(np.int64)[:, None] * self.page_tokens
        return (pages + np.arange(self.page_tokens)).reshape(-1)

    def insert(self, tokens: Any, slots: Any) -> int:
        return self.tree.insert(tokens, slots).present

    def match(self, tokens: Any) -> tuple[int, Any, Any]:
        match = self.tree.match(tokens)
        return match.length, match.page_ids, match

    def match_len(self, tokens: Any) -> int:
        return self.tree.match_length(tokens)

    def lock(self, handle: Any) -> Any:
        return self.tree.lock(handle)

    def unlock(self, held: Any) -> None:
        self.tree.release(held)

    def evict(self, n: int) -> int:
        return len(self.tree.evict(n).page_ids) * self.page_tokens

    def evictable(self) -> int:
        return self.tree.evictable_tokens

    # The lease follows the request, so only tokens that it does not cover yet are given. A row keeps the
    # pages that it computed even if they are duplicates, so nothing is read again after an insert.
    def cycle(self, prompt: Any, prompt_slots: Any, full: Any, full_slots: Any) -> int:
        tree = self.tree
        match = tree.match(prompt)
        hit, _ = match.length, match.page_ids
        lease = tree.lock(match)
        self._extend(prompt, prompt_slots, lease)
        self._extend(full, full_slots, lease)
        tree.release(lease)
        return hit

    def chunk_step(self, tokens: Any, slots: Any, held: Any) -> Any:
        lease = self.tree.lock(self.tree.match(tokens)) if held is None else held
        self._extend(tokens, slots, lease)
        return lease

    def _extend(self, tokens: Any, slots: Any, lease: Any) -> None:
        length = lease.length
        self.tree.insert(tokens[length:], slots[length // self.page_tokens :], lease)


class PagodaTwin(Pagoda):
    """The plain Python twin, for its answers, not for its speed."""

    name = "pagoda-twin"

    def _make(self) -> Any:
        sys.path.append(str(Path(__file__).parents[2] / "tests"))
        from twin import PrefixTwin

        return PrefixTwin(self.page_tokens)


# ---------------------------------------------------------------------------------------- SGLang


class _NullAllocator:
    """Accepts frees and only counts them, so that eviction can be seen."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed = 0

    def free(self, idx: Any) -> None:
        self.freed += len(idx)

    def free_segment(self, idx: Any, start_pos: int = 0) -> None:
        self.freed += len(idx)


class SGLangRadix(Adapter):
    """radix_cache.py :: RadixCache, the older Python tree."""

    name = "sglang-radix"

    def __init__(self, page_tokens: int) -> None:
        super().__init__(page_tokens)
        from bench.radix import sgl_stub

        sgl_stub.install()
        import torch
        from sglang.srt.mem_cache import base_prefix_cache
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.torch, self.b, self.RadixKey = torch, base_prefix_cache, RadixKey
        self.alloc = _NullAllocator()
        self.no_slots = torch.empty(0, dtype=torch.int64)
        self.cache = self._make()

    def _make(self) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache.create_simulated(mock_allocator=self.alloc, page_size=self.page_tokens)

    def prep_tokens(self, tokens: np.ndarray) -> Any:
        prepared = array("q")
        prepared.frombytes(tokens.astype(np.int64).tobytes())
        return prepared

    def prep_slots(self, base: int, n: int) -> Any:
        return self.torch.arange(base, base + n, dtype=self.torch.int64)

    def slots_to_numpy(self, slots: Any) -> np.ndarray:
        return slots.numpy()

    def _insert(self, tokens: Any, slots: Any) -> Any:
        return self.cache.insert(
            self.b.InsertParams(key=self.RadixKey(tokens), value=slots, prev_prefix_len=len(tokens))
        )

    def _match(self, tokens: Any) -> Any:
        return self.cache.match_prefix(self.b.MatchPrefixParams(key=self.RadixKey(tokens)))

    def insert(self, tokens: Any, slots: Any) -> int:
        return self._insert(tokens, slots).prefix_len

    def match(self, tokens: Any) -> tuple[int, Any, Any]:
        # match_prefix answers with a length and a node; the slots are read off the path when the
        # request is allocated (allocation.py :: _prefix_kv_indices).
        result = self._match(tokens)
        n, node = result.device_prefix_len, result.last_device_node
        return n, self.cache.path_device_indices(node) if n else self.no_slots, node

    def match_len(self, tokens: Any) -> int:
        return self._match(tokens).device_prefix_len

    def lock(self, handle: Any) -> Any:
        return self.cache.lock(handle)

    def unlock(self, held: Any) -> None:
        self.cache.unlock(held)

    def evict(self, n: int) -> int:
        return self.cache.evict(self.b.EvictParams(num_tokens=n)).num_tokens_evicted

    def evictable(self) -> int:
        return self.cache.evictable_size()


class SGLangUnified(SGLangRadix):
    """unified_radix_cache.py :: UnifiedRadixCache, FULL component, Python tree core."""

    name = "sglang-unified"
    core = "python"

    def _make(self) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_cache.tree_core_registry import select_tree_core_backend
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.alloc,
            page_size=self.page_tokens,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=self.core,
        )
        got = select_tree_core_backend(params)  # silently falls back to Python
        assert got == self.core, (got, self.core)
        return UnifiedRadixCache(params)

    # As checkpoint_into_tree: the insert returns the node, so there is no second match.
    def _checkpoint(self, tokens: Any, slots: Any, held: Any) -> Any:
        node = self._insert(tokens, slots).last_device_node
        self.cache.path_device_indices(node)
        if held is not None:
            self.cache.unlock(held)
        return self.cache.lock(node)

    def cycle(self, prompt: Any, prompt_slots: Any, full: Any, full_slots: Any) -> int:
        hit, _, node = self.match(prompt)
        held = self._checkpoint(prompt, prompt_slots, self.cache.lock(node))
        self._insert(full, full_slots)
        self.cache.unlock(held)
        return hit

    def chunk_step(self, tokens: Any, slots: Any, held: Any) -> Any:
        return self._checkpoint(tokens, slots, held)


class SGLangRust(SGLangUnified):
    """The same cache over the wheel's compiled Rust tree core (SGLang's default)."""

    name = "sglang-rust"
    core = "rust"


ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (Pagoda, PagodaTwin, SGLangRust, SGLangUnified, SGLangRadix)
}
PEERS = [SGLangRust.name, SGLangUnified.name, SGLangRadix.name]
