"""Keys and values of token-addressed layers, by slot."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagoda import kernels
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.kernels.gather import gather
from pagoda.layout import PagedGroup
from pagoda.layout._numbers import count
from pagoda.pools._arguments import (
    AnyIds,
    filled,
    host_ids,
    is_unread,
    layer_number,
    refuse_capture,
    require_buffer,
    require_range,
    resolve_device,
    unread_ids,
)
from pagoda.pools._staging import Staging, staging_of

__all__ = ["TokenPool"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, *kernels.FP8_DTYPES)


class TokenPool:
    """K and V of `num_layers` layers with one geometry: one tensor a layer and side.

    Each is [(num_pages + 1) * page_tokens, heads, dim]: page 0 is padding, a slot is page * page_tokens +
    offset, one slot is valid in all layers. `k_shape` and `v_shape` are (heads, dim); without
    `v_shape` there are only keys (latent attention). Tensors are zeros, never move, and may be
    supplied as `k_buffer` and `v_buffer`: contiguous, of exactly that shape, dtype and device.

    fp8 pools store value / scale, with a scale a layer and side.

    Errors: ConfigError, naming the argument.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        num_layers: int,
        k_shape: tuple[int, int],
        v_shape: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        *,
        k_scale: Sequence[float] | None = None,
        v_scale: Sequence[float] | None = None,
        k_buffer: Sequence[torch.Tensor] | None = None,
        v_buffer: Sequence[torch.Tensor] | None = None,
        pin_memory: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self.num_pages = count(num_pages, "num_pages", low=0)
        self.page_tokens = count(page_tokens, "page_tokens")
        self.num_layers = count(num_layers, "num_layers")
        self.num_slots = (self.num_pages + 1) * self.page_tokens
        if self.num_slots > 2**31 - 1:
            raise ConfigError(f"{self.num_slots} slots pass 2^31: give fewer pages")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: give one of {', '.join(map(str, DTYPES))}, not {dtype}")
        self.dtype = dtype
        self.device = resolve_device(device)
        self.k_shape = _geometry(k_shape, "k_shape")
        self.v_shape = None if v_shape is None else _geometry(v_shape, "v_shape")
        self.k_scale = self._scales(k_scale, "k_scale")
        self.v_scale = self._scales(v_scale, "v_scale")
        if self.v_shape is None and v_buffer is not None:
            raise ConfigError("v_buffer: this pool has no values: give v_shape too")
        pinned = bool(pin_memory) and self.device.type == "cpu" and torch.cuda.is_available()
        self.k_buffer = self._buffers(self.k_shape, k_buffer, "k_buffer", pinned)
        self.v_buffer = (
            [] if self.v_shape is None else self._buffers(self.v_shape, v_buffer, "v_buffer", pinned)
        )
        self._staging = staging_of(self.device, staging)
        # K, V, K, V, ...: every buffer as bytes by page, and where it begins.
        sides = [self.k_buffer, self.v_buffer] if self.v_buffer else [self.k_buffer]
        with torch.inference_mode(False):
            self._pages = [
                side.view(self.num_pages + 1, -1).view(torch.uint8)
                for pair in zip(*sides, strict=True)
                for side in pair
            ]
        self._addresses = torch.tensor(
            [b.data_ptr() for b in self._pages], dtype=torch.int64, device=self.device
        )
        self._at = [buffer.data_ptr() for buffer in (*self.k_buffer, *self.v_buffer)]
        self._lock = threading.RLock()

    def _scales(self, scales: Sequence[float] | None, name: str) -> list[float]:
        if scales is None:
            return [1.0] * self.num_layers
        if self.dtype not in kernels.FP8_DTYPES:
            raise ConfigError(f"{name}: only fp8 pools have scales, not {self.dtype}")
        try:
            values = [float(operator.truediv(scale, 1)) for scale in scales]  # numbers, not their text
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name}: give one number a layer") from None
        if len(values) != self.num_layers:
            raise ConfigError(f"{name} has {len(values)} entries for {self.num_layers} layers")
        with np.errstate(over="ignore"):
            used = np.array(values).astype(np.float32)  # what kernels divide by
        if not np.isfinite(used).all() or not (used > 0).all():
            raise ConfigError(f"{name}: scales are finite and above 0 in float32, not {values}")
        return values

    def _buffers(
        self, shape: tuple[int, int], given: Sequence[torch.Tensor] | None, name: str, pinned: bool
    ) -> list[torch.Tensor]:
        whole = (self.num_slots, *shape)
        if given is None:
            return [filled(whole, self.dtype, self.device, pinned=pinned) for _ in range(self.num_layers)]
        if not isinstance(given, (list, tuple)) or len(given) != self.num_layers:
            raise ConfigError(f"{name}: give a list of {self.num_layers} tensors, one a layer")
        for layer, buffer in enumerate(given):
            require_buffer(buffer, whole, self.dtype, self.device, f"{name}[{layer}]")
        return list(given)

    @classmethod
    def from_group(
        cls,
        group: PagedGroup,
        num_pages: int,
        device: torch.device | str = "cuda",
        *,
        k_scale: Sequence[float] | None = None,
        v_scale: Sequence[float] | None = None,
        staging: Staging | None = None,
    ) -> TokenPool:
        """The pool of a group of layers: its page has the bytes that the group says.

        Layers are numbered from 0 in the order of `group.layers`. Cost: that of the memory. Errors:
        ConfigError, also for what is not plain keys and values: compressed entries, scales, indexer keys.
        """
        if not isinstance(group, PagedGroup):
            raise ConfigError(f"group: give a PagedGroup of a Layout, not {type(group).__name__}")
        entries = group.storage.entries
        dtypes = {part.dtype for entry in entries for part in (*entry.parts, *entry.scales)}
        names = tuple(entry.name for entry in entries)
        if names not in (("keys", "values"), ("latent",)) or len(dtypes) > 1 or group.storage.ratio > 1:
            raise ConfigError(
                f"group {group.name}: a TokenPool holds keys and values, or a latent, of one dtype, "
                f"not {', '.join(names)} of {', '.join(sorted(dtypes))}"
            )
        if names == ("latent",):  # one head, its parts side by side
            k_shape, v_shape = (1, sum(part.shape[0] for part in entries[0].parts)), None
        else:
            k_shape, v_shape = ((e.parts[0].shape[0], e.parts[0].shape[1]) for e in entries)
        return cls(
            num_pages,
            group.page_tokens,
            len(group.layers),
            k_shape,
            v_shape,
            getattr(torch, dtypes.pop()),
            device,
            k_scale=k_scale,
            v_scale=v_scale,
            staging=staging,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all layers, K and V: what `pack` writes for it. O(1)."""
        return sum(pages.shape[1] for pages in self._pages)

    def memory_bytes(self) -> int:
        """Bytes of all buffers, the padding page included. O(1)."""
        return self.page_bytes * (self.num_pages + 1)

    def store(self, layer: int, slots: AnyIds, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Write keys and values of n tokens to n slots of a layer.

        `slots` has any shape. Leading dimensions of keys and values hold n elements, trailing ones
        heads × dim: [n, h, d], [b, s, h, d] and [n, h*d] all work, in any float dtype and stride. Slot −1
        is not written; slots of page 0 are padding. Of tokens with one slot any may win. On CUDA keys and
        values must not lie in slots that the call writes. Several threads may call; each call writes
        K and V together. Cost: on CUDA one launch for both, at memory speed, which can be captured once
        a call before has compiled it.

        Slots on the host are checked; a device tensor is not, since that would read it back: slots
        out of range in it are not written. Errors: ArgumentError, OutOfRangeError; CaptureError for
        host slots on CUDA.
        """
        at = layer_number(layer, self.num_layers)
        on_device = self._staging.send_ids(slots, "slots", -1, self.num_slots - 1)
        n = on_device.shape[0]
        _require_rows(keys, n, self.k_shape, self.device, "keys")
        v_pool = None
        if self.v_shape is None:
            if values is not None:
                raise ArgumentError("values: this pool has keys only: give None")
        else:
            if values is None:
                raise ArgumentError("values: this pool has values: give a tensor")
            _require_rows(values, n, self.v_shape, self.device, "values")
            v_pool = self.v_buffer[at]
        with self._lock:
            kernels.store(
                on_device, keys, values, self.k_buffer[at], v_pool, self.k_scale[at], self.v_scale[at]
            )

    def gather(
        self, slots: AnyIds, out_k: Sequence[torch.Tensor], out_v: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Copy keys and values of n tokens of all layers into tensors of the caller.

        `out_k` and `out_v` are lists of one tensor a layer; pools of keys alone take no `out_v`. Each is
        contiguous, in the pool's dtype and on its device, and of any shape with n × heads × dim elements:
        [n, h, d], or [b, s, h, d] for slots [b, s]. Slot −1 gives zeros, so that batches are padded; slots of
        page 0 give what lies there. fp8 comes as it is stored, value / scale. No output lies in the
        pool or in another. Several threads may call. Cost: on CUDA one small copy of addresses
        and host slots and one launch at copy speed; on the CPU a copy a layer and side, at best where
        slots run through whole pages.

        Slots on the host are checked; a device tensor is not: slots out of range in it give zeros.
        Errors: ArgumentError, OutOfRangeError; CaptureError, since addresses have to be sent. A call that
        raises has written nothing.
        """
        if is_unread(slots, self.device):
            on_device = unread_ids(slots, "slots")
            outs, at = self._outs(out_k, out_v, on_device.shape[0])
            (out_addresses,) = self._staging.send(at)
        else:
            ids = host_ids(slots, "slots")
            require_range(ids, -1, self.num_slots - 1, "slots", "slots")
            outs, at = self._outs(out_k, out_v, ids.size)
            on_device, out_addresses = self._staging.send(ids, at)
        with self._lock:
            gather(on_device, self._pages, self._addresses, self.page_tokens, outs, out_addresses)

    def pack(self, page_ids: AnyIds, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy pages of all layers into one buffer: [n, page_bytes] uint8, a page's bytes together.

        Layer after layer, K before V, each [page_tokens, heads, dim] in the pool's dtype. `out` is the
        caller's, contiguous on the pool's device, or made here. Cost: one launch at copy speed.
        Errors: ArgumentError; OutOfRangeError for ids on the host; CaptureError when something has
        to be made inside a capture.
        """
        ids = self._staging.send_ids(page_ids, "page_ids", 0, self.num_pages)
        if out is None:
            refuse_capture(self.device, "pack without out")
            out = torch.empty(ids.shape[0], self.page_bytes, dtype=torch.uint8, device=self.device)
        packed = self._packed(out, ids.shape[0], "out")
        with self._lock:
            kernels.pack(ids, self._pages, self._addresses, packed)
        return out

    def unpack(self, page_ids: AnyIds, packed: torch.Tensor) -> None:
        """Copy what `pack` gave into these pages of all layers. Cost and errors as for `pack`.

        A page that stands twice gets either content.
        """
        ids = self._staging.send_ids(page_ids, "page_ids", 0, self.num_pages)
        checked = self._packed(packed, ids.shape[0], "packed")
        with self._lock:
            kernels.unpack(ids, self._pages, self._addresses, checked)

    def copy_pages(self, source: AnyIds, target: AnyIds, *, is_disjoint: bool = False) -> None:
        """Copy page source[i] of all layers to page target[i].

        All sources are read before a target is written. Cost: one launch at copy speed where no
        page is both source and target, else two and room for the copied pages. Ids on the host are looked at
        to know; for those in device tensors `is_disjoint` is the caller's word, and with it the call can be
        captured. Errors: ArgumentError when lengths differ or a target stands twice on the host;
        OutOfRangeError for ids on the host; CaptureError as for `pack`.
        """
        if is_unread(source, self.device) or is_unread(target, self.device):
            read, written = (
                self._staging.send_ids(ids, name, 0, self.num_pages)
                for ids, name in ((source, "source"), (target, "target"))
            )
            _require_pairs(read.shape[0], written.shape[0])
        else:
            read_ids, written_ids = host_ids(source, "source"), host_ids(target, "target")
            require_range(read_ids, 0, self.num_pages, "source", "source")
            require_range(written_ids, 0, self.num_pages, "target", "target")
            _require_pairs(read_ids.size, written_ids.size)
            if np.unique(written_ids).size != written_ids.size:
                raise ArgumentError("target: a page stands twice")
            is_disjoint = not np.isin(read_ids, written_ids).any()
            read, written = self._staging.send(read_ids, written_ids)
        room = None
        if not is_disjoint:
            refuse_capture(self.device, "copy_pages of pages that may be source and target")
            room = torch.empty(read.shape[0], self.page_bytes, dtype=torch.uint8, device=self.device)
        with self._lock:
            if room is None:
                kernels.copy_pages(read, written, self._pages, self._addresses)
            else:
                kernels.pack(read, self._pages, self._addresses, room)
                kernels.unpack(written, self._pages, self._addresses, room)

    def _outs(self, out_k: Any, out_v: Any, n: int) -> tuple[list[torch.Tensor], npt.NDArray[np.int64]]:
        """Outputs for n tokens in the order of `_pages`, and where they begin. Errors: ArgumentError."""
        self._require_outs(out_k, n, self.k_shape, "out_k")
        if self.v_shape is None:
            if out_v is not None:
                raise ArgumentError("out_v: this pool has keys only: give None")
            outs = list(out_k)
        else:
            self._require_outs(out_v, n, self.v_shape, "out_v")
            outs = [out for pair in zip(out_k, out_v, strict=True) for out in pair]
        begins = np.array([out.data_ptr() for out in outs], dtype=np.int64)
        ends = begins + np.array([out.nbytes for out in outs], dtype=np.int64)
        if n and (_overlap_each_other(begins, ends) or self._is_in_pool(begins, ends)):
            raise ArgumentError(
                "out_k, out_v: an output overlaps another or the pool: give each its own memory"
            )
        return outs, begins

    def _require_outs(self, outs: Any, n: int, shape: tuple[int, int], name: str) -> None:
        if not isinstance(outs, (list, tuple)) or len(outs) != self.num_layers:
            raise ArgumentError(f"{name}: give a list of {self.num_layers} tensors, one a layer")
        wanted = n * shape[0] * shape[1]
        for layer, out in enumerate(outs):
            if not isinstance(out, torch.Tensor) or out.dtype != self.dtype or out.device != self.device:
                raise ArgumentError(f"{name}[{layer}]: give a tensor of {self.dtype} on {self.device}")
            if out.layout != torch.strided or not out.is_contiguous() or out.is_neg():
                raise ArgumentError(f"{name}[{layer}] is not contiguous, or is negated: give plain memory")
            if out.numel() != wanted:
                raise ArgumentError(
                    f"{name}[{layer}] has shape {tuple(out.shape)}: {n} tokens of {shape[0]} heads of "
                    f"{shape[1]} are {wanted} elements"
                )

    def _is_in_pool(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> bool:
        """Whether one of these stretches of memory overlaps a buffer."""
        at = np.array(self._at, dtype=np.int64)
        sizes = [buffer.nbytes for buffer in (*self.k_buffer, *self.v_buffer)]
        return bool(((begins[:, None] < at + sizes) & (at < ends[:, None])).any())

    def check(self) -> None:
        """Verify invariant 6. O(layers). Errors: InvariantError."""
        if [buffer.data_ptr() for buffer in (*self.k_buffer, *self.v_buffer)] != self._at:
            raise InvariantError(6, "a buffer of the pool has moved")
        self._staging.check()

    def _packed(self, packed: Any, n: int, name: str) -> torch.Tensor:
        wanted = n * self.page_bytes
        if (
            not isinstance(packed, torch.Tensor)
            or packed.dtype != torch.uint8
            or packed.device != self.device
        ):
            raise ArgumentError(f"{name}: give a uint8 tensor on {self.device}")
        if packed.numel() != wanted or not packed.is_contiguous():
            raise ArgumentError(
                f"{name}: give {wanted} contiguous bytes for {n} pages, not shape {tuple(packed.shape)}"
            )
        return packed.view(n, self.page_bytes)


def _overlap_each_other(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> bool:
    order = np.argsort(begins)
    return bool((ends[order][:-1] > begins[order][1:]).any())


def _require_pairs(num_sources: int, num_targets: int) -> None:
    if num_sources != num_targets:
        raise ArgumentError(f"source has {num_sources} pages and target {num_targets}: give one a page")


def _geometry(shape: tuple[int, int], name: str) -> tuple[int, int]:
    try:
        heads, dim = shape
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: give (heads, dim), not {shape!r}") from None
    return count(heads, f"heads of {name}"), count(dim, f"dim of {name}")


def _require_rows(rows: Any, n: int, shape: tuple[int, int], device: torch.device, name: str) -> None:
    """An ArgumentError unless some split of the dimensions gives n elements before and heads × dim behind."""
    if not isinstance(rows, torch.Tensor) or not rows.is_floating_point() or rows.layout != torch.strided:
        found = f"{rows.layout} of {rows.dtype}" if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise ArgumentError(f"{name}: give a dense tensor of floats, not {found}")
    if rows.device != device:
        raise ArgumentError(f"{name} is on {rows.device} and the pool on {device}")
    width = shape[0] * shape[1]
    splits = range(rows.dim() + 1)
    if not any(math.prod(rows.shape[:s]) == n and math.prod(rows.shape[s:]) == width for s in splits):
        raise ArgumentError(
            f"{name} has shape {tuple(rows.shape)}: its leading dimensions should hold {n} tokens "
            f"and its trailing ones {shape[0]} heads of {shape[1]}"
        )
