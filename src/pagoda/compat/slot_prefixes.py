"""`PrefixCacheManager`: which slot of a caller's cache holds the prefix of a sequence.

In: tokens; out: (slot, version). Every prefix points to a slot and owns none: in a `PrefixTree` it is a page
of one token with two columns, slot + 1 and version + 1.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagoda.compat._words import in_words
from pagoda.compat.tokens import HostTokens, host_tokens, require_range
from pagoda.errors import ArgumentError, CapacityError, InvariantError, OutOfRangeError, UsageError
from pagoda.layout._numbers import count
from pagoda.pools._arguments import AnyIds, number
from pagoda.tree import Lease, Match, PrefixTree

__all__ = ["PrefixCacheManager"]

MISS = (0, -1, 0)  # length, slot and version when nothing is found
_log = logging.getLogger(__name__)


class Versions(Protocol):
    """An object that knows the version of each slot, such as `SlotAllocator`."""

    def version(self, idx: int) -> int: ...


class PrefixCacheManager:
    """Maps every prefix of the inserted sequences to the slot that holds it, at most `max_capacity` prefixes.

    Referenced prefixes are never evicted, even if they alone exceed `max_capacity`. It needs no device: the
    cache belongs to the caller. Thread-safe.

    Errors: ConfigError for a negative capacity.
    """

    def __init__(self, max_capacity: int = 1000) -> None:
        self.max_capacity = count(max_capacity, "max_capacity", low=0)
        self._tree = PrefixTree(1, windows=(None, None))
        self._references: dict[bytes, list[Lease]] = {}  # by the digest of a sequence
        self._is_over = False  # whether referenced prefixes exceed max_capacity
        self._lock = threading.RLock()

    @property
    def num_tokens(self) -> int:
        """Cached tokens, which is the number of distinct prefixes."""
        return self._tree.num_tokens

    def insert(self, token_ids: AnyIds, slot: int, slot_ver: int) -> None:
        """Point every prefix of a sequence to a slot at a version, even if it pointed elsewhere.

        The caller holds one reference to the sequence until it calls `release`, and still owns the slot.
        Over capacity, the least recently used unreferenced tails are evicted. Errors: ArgumentError,
        OutOfRangeError.
        """
        tokens = host_tokens(token_ids, "token_ids")
        entry = _entry_id(slot, "slot"), _entry_id(slot_ver, "slot_ver")
        if tokens.size == 0:
            return
        with self._lock:
            lease = self._tree.lock(self._match(tokens))
            try:
                new = tokens[lease.length :]
                present = self._tree.insert(new, _columns(entry, new.size), lease).present
                if present:
                    self._tree.replace(tokens[:present], _columns(entry, present))
                self._refer(tokens, lease)
            except BaseException:
                self._tree.release(lease)
                raise
            is_news = self._evict_excess()
        self._warn_if(is_news)

    def find(self, token_ids: AnyIds) -> tuple[int, int, int]:
        """Return (length, slot, version) of the longest cached prefix and renew it; (0, −1, 0) for a miss.

        The slot may have been reallocated since; `find_valid` checks that. Errors: ArgumentError,
        OutOfRangeError.
        """
        tokens = host_tokens(token_ids, "token_ids")
        with self._lock:
            found = self._match(tokens)
            with self._tree.lock(found) as lease:
                length = lease.length  # shorter if a finalizer evicted in between
        if length == 0:
            return MISS
        slot, version = (int(column[length - 1]) - 1 for column in found.columns)
        return length, slot, version

    def find_valid(self, token_ids: AnyIds, slots: Versions) -> tuple[int, int, int]:
        """As `find`, but return the longest prefix whose slot still has the version it was inserted with.

        `slots` is the `SlotAllocator` of these slots. Longer but outdated prefixes are not renewed. Cost:
        O(tokens), and one call of `slots.version` per change of slot, from the end. Errors: ArgumentError,
        OutOfRangeError.
        """
        tokens = host_tokens(token_ids, "token_ids")
        if not callable(getattr(slots, "version", None)):
            raise ArgumentError(f"slots: give a SlotAllocator, not {type(slots).__name__}")
        entries = np.stack(self._match(tokens).columns) - 1  # [2, found]: slots, versions
        # Where the slot or its version changes. Each run is checked once, the longest prefix first, and
        # without our lock: `slots` has its own lock, and a finalizer that runs under it may call us.
        ends = np.flatnonzero((entries[:, 1:] != entries[:, :-1]).any(axis=0)) + 1
        for length in (entries.shape[1], *reversed(ends.tolist())):
            if length == 0:
                break
            slot, version = entries[:, length - 1].tolist()
            if _is_current(slots, slot, version):
                with self._lock, self._tree.lock(self._match(tokens[:length])):
                    return length, slot, version
        return MISS

    def _match(self, tokens: HostTokens) -> Match:
        try:
            return self._tree.match(tokens)
        except UsageError as error:
            in_words(error, tokens="token_ids")
            raise

    def pin(self, token_ids: AnyIds) -> None:
        """Add a reference to a sequence, which protects it from eviction. Does nothing if it is not cached.

        Errors: ArgumentError, OutOfRangeError.
        """
        tokens = host_tokens(token_ids, "token_ids")
        with self._lock:
            found = self._match(tokens)
            if tokens.size == 0 or found.length < tokens.size:
                return
            lease = self._tree.lock(found)
            if lease.length == tokens.size:
                self._refer(tokens, lease)
            else:  # a finalizer evicted in between
                self._tree.release(lease)

    def release(self, token_ids: AnyIds) -> None:
        """Drop a reference to a sequence, which stays cached. Does nothing if there is no reference.

        Errors: ArgumentError, OutOfRangeError.
        """
        tokens = host_tokens(token_ids, "token_ids")
        require_range(tokens, 0, 2**31 - 1, "token_ids", "tokens")
        key = _digest(tokens)
        with self._lock:
            leases = self._references.get(key)
            if not leases:
                return
            lease = leases.pop()
            if not leases:
                del self._references[key]
            self._tree.release(lease)
            is_news = self._evict_excess()
        self._warn_if(is_news)

    def _refer(self, tokens: HostTokens, lease: Lease) -> None:
        key = _digest(tokens)
        while True:
            leases = self._references.setdefault(key, [])
            leases.append(lease)
            if self._references.get(key) is leases:
                return
            leases.pop()  # a finalizer released the last reference in between and removed its list

    def _evict_excess(self) -> bool:
        """Enforce the capacity as far as references allow. Return whether they newly prevent it."""
        excess, evictable = self._tree.num_tokens - self.max_capacity, self._tree.evictable_tokens
        was_over, self._is_over = self._is_over, excess > evictable
        if excess > 0 and evictable > 0:
            with suppress(CapacityError):  # a finalizer has evicted the excess in between
                self._tree.evict(min(excess, evictable))
        return self._is_over and not was_over

    def _warn_if(self, is_news: bool) -> None:
        """Log a warning, without our lock: handlers have locks, and a finalizer under one may call us."""
        if is_news:
            _log.warning(
                "%d cached tokens are referenced, more than max_capacity = %d: they stay until release()",
                self._tree.num_tokens,
                self.max_capacity,
            )

    def copy_kv(
        self, token_ids: AnyIds, target_slot: int, kv_cache: Sequence[torch.Tensor], n_layers: int
    ) -> None:
        """Copy a cached sequence's positions, in the first n_layers layers, from its slot to another.

        `kv_cache` is (k_cache, v_cache), each [slot, position, layer, heads, dim]. Does nothing for a
        sequence that is not cached. Cost: one copy per tensor. Errors: ArgumentError for a cache with too few
        positions or layers, or whose elements share memory; OutOfRangeError for a slot that it does not have.
        Neither tensor is written then.
        """
        tokens = host_tokens(token_ids, "token_ids")
        target, num_layers = number(target_slot, "target_slot"), number(n_layers, "n_layers")
        caches = _require_caches(kv_cache, num_layers)
        for cache in caches:
            _require_slot(target, cache, "target_slot")
        found = self._match(tokens)
        if tokens.size == 0 or found.length < tokens.size:
            return
        slot = int(found.columns[0][-1]) - 1
        for cache in caches:
            _require_slot(slot, cache, "the cached slot")
            if tokens.size > cache.shape[1]:
                raise ArgumentError(
                    f"token_ids has {tokens.size} tokens, but kv_cache only {cache.shape[1]} positions"
                )
        if slot == target:
            return
        with torch.inference_mode():  # caches made under it cannot be written otherwise
            for cache in caches:
                cache[target, : tokens.size, :num_layers] = cache[slot, : tokens.size, :num_layers]

    def reset(self) -> None:
        """Forget everything, references included."""
        with self._lock:
            self._tree.reset()
            self._references.clear()
            self._is_over = False

    def check(self) -> None:
        """Verify invariant 16 and the tree's. Walks over everything. Errors: InvariantError."""
        with self._lock:
            self._tree.check()
            num_references = sum(map(len, self._references.values()))
            if num_references != self._tree.num_leases or not all(self._references.values()):
                raise InvariantError(
                    16, f"{num_references} references are counted, but the tree has {self._tree.num_leases}"
                )
            if self._tree.num_tokens > self.max_capacity and self._tree.evictable_tokens:
                raise InvariantError(
                    16,
                    f"{self._tree.num_tokens} tokens exceed max_capacity although not all are referenced",
                )


def _digest(tokens: HostTokens) -> bytes:
    return blake2b(tokens.astype(np.int32, copy=False).data, digest_size=16).digest()


def _entry_id(value: Any, name: str) -> int:
    """Return a slot or version as a page id of the tree."""
    given = number(value, name)
    if given > 2**31 - 2:
        raise ArgumentError(f"{name} does not fit into int32")
    return given + 1


def _columns(entry: tuple[int, int], size: int) -> list[npt.NDArray[np.int32]]:
    return [np.full(size, page_id, dtype=np.int32) for page_id in entry]


def _is_current(slots: Versions, slot: int, version: int) -> bool:
    try:
        return slots.version(slot) == version
    except OutOfRangeError:
        return False


def _require_caches(kv_cache: Any, num_layers: int) -> list[torch.Tensor]:
    caches = list(kv_cache) if isinstance(kv_cache, (tuple, list)) else []
    if len(caches) != 2 or not all(isinstance(it, torch.Tensor) and it.dim() >= 3 for it in caches):
        raise ArgumentError("kv_cache: give (k_cache, v_cache), each [slot, position, layer, heads, dim]")
    for cache in caches:
        if cache.layout != torch.strided:
            raise ArgumentError(f"kv_cache: give dense tensors, not {cache.layout}")
        axes = zip(cache.shape, cache.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in axes):
            raise ArgumentError("kv_cache: elements of an expanded tensor share memory: give a copy of it")
    if any(num_layers > cache.shape[2] for cache in caches):
        raise ArgumentError(f"n_layers: kv_cache has only {min(cache.shape[2] for cache in caches)} layers")
    return caches


def _require_slot(slot: int, cache: torch.Tensor, name: str) -> None:
    if slot >= cache.shape[0]:
        raise OutOfRangeError(
            f"{name} = {min(slot, 10**18)} is out of range: kv_cache has {cache.shape[0]} slots", slot, 0
        )
