"""Keys and values by slot, for layers that keep every token. In: slots and tensors; out: buffers, copies."""

from __future__ import annotations

import math
import operator
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
    require_buffer,
    require_range,
    resolve_device,
    unread_ids,
)
from pagoda.pools._pages import PagePool
from pagoda.pools._staging import Staging

__all__ = ["TokenPool"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, *kernels.FP8_DTYPES)


class TokenPool(PagePool):
    """Keys and values of `num_layers` layers with one geometry: one K and one V tensor per layer.

    Each is [(num_pages + 1) * page_tokens, heads, dim]. Page 0 is padding; slot = page id * page_tokens +
    offset, and a slot is valid in all layers. `k_shape` and `v_shape` are (heads, dim); without `v_shape`
    there are only keys (latent attention). Tensors are zeros at first and never move. The caller may supply
    them as `k_buffer` and `v_buffer`: contiguous, of exactly that shape, dtype and device.

    fp8 pools store value / scale, with one scale per layer for K and one for V.

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
            raise ConfigError(f"num_pages, page_tokens: {self.num_slots} slots exceed 2^31: give fewer pages")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: give one of {', '.join(map(str, DTYPES))}, not {dtype}")
        self.dtype = dtype
        self.device = resolve_device(device)
        self.k_shape = _geometry(k_shape, "k_shape")
        self.v_shape = None if v_shape is None else _geometry(v_shape, "v_shape")
        self.k_scale = self._scales(k_scale, "k_scale")
        self.v_scale = self._scales(v_scale, "v_scale")
        if self.v_shape is None and v_buffer is not None:
            raise ConfigError("v_buffer: this pool has no values: give v_shape, too, or no v_buffer")
        pinned = bool(pin_memory) and self.device.type == "cpu" and torch.cuda.is_available()
        self.k_buffer = self._buffers(self.k_shape, k_buffer, "k_buffer", pinned)
        self.v_buffer = (
            [] if self.v_shape is None else self._buffers(self.v_shape, v_buffer, "v_buffer", pinned)
        )
        sides = [self.k_buffer, self.v_buffer] if self.v_buffer else [self.k_buffer]
        self._hold([side for pair in zip(*sides, strict=True) for side in pair], staging)
        self._at = [buffer.data_ptr() for buffer in (*self.k_buffer, *self.v_buffer)]

    def _scales(self, scales: Sequence[float] | None, name: str) -> list[float]:
        if scales is None:
            return [1.0] * self.num_layers
        if self.dtype not in kernels.FP8_DTYPES:
            raise ConfigError(f"{name}: only fp8 pools have scales, and this one is {self.dtype}: give None")
        try:
            values = [float(operator.truediv(scale, 1)) for scale in scales]  # refuses strings
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name}: give one number per layer") from None
        if len(values) != self.num_layers:
            raise ConfigError(f"{name} has {len(values)} scales for {self.num_layers} layers: give one each")
        with np.errstate(over="ignore"):
            used = np.array(values).astype(np.float32)  # what kernels divide by
        if not np.isfinite(used).all() or not (used > 0).all():
            raise ConfigError(f"{name}: give scales that are finite and above 0 in float32, not {values}")
        return values

    def _buffers(
        self, shape: tuple[int, int], given: Sequence[torch.Tensor] | None, name: str, pinned: bool
    ) -> list[torch.Tensor]:
        whole = (self.num_slots, *shape)
        if given is None:
            return [filled(whole, self.dtype, self.device, pinned=pinned) for _ in range(self.num_layers)]
        if not isinstance(given, (list, tuple)) or len(given) != self.num_layers:
            raise ConfigError(f"{name}: give a list of {self.num_layers} tensors, one per layer")
        for layer, buffer in enumerate(given):
            require_buffer(buffer, whole, self.dtype, self.device, f"{name}[{layer}]")
        return list(given)

    @staticmethod
    def can_hold(group: PagedGroup) -> bool:
        """Whether a group stores plain keys and values of every token, or a latent: one entry per slot."""
        return group.kv_heads is not None

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
        """Allocate the pool of a group. Layers are numbered from 0 in the order of `group.layers`.

        Errors: ConfigError, also for groups that store more than plain keys and values: compressed entries,
        scales, indexer keys.
        """
        if not isinstance(group, PagedGroup):
            raise ConfigError(f"group: give a PagedGroup of a Layout, not {type(group).__name__}")
        entries, dtypes = group.storage.entries, _dtypes(group)
        names = tuple(entry.name for entry in entries)
        if not cls.can_hold(group):
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

    def store(self, layer: int, slots: AnyIds, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Write keys and values of n tokens to n slots of a layer.

        `slots` may have any shape. The leading dimensions of keys and values cover n tokens, the trailing
        ones heads × dim: [n, h, d], [b, s, h, d] and [n, h*d] all work, with any float dtype and strides.
        Slot −1 is not written; slots of page 0 are padding. If several tokens have the same slot, any may
        win. On CUDA, keys and values must not overlap slots that the call writes. Thread-safe: each call
        writes K and V together. Cost: on CUDA one launch for both, at memory speed, which can be captured
        once an earlier call has compiled it.

        Slots on the host are checked. Slots in a device tensor are not, since that would read them back:
        those out of range are not written. Errors: ArgumentError, OutOfRangeError; CaptureError for host
        slots on CUDA.
        """
        at = layer_number(layer, self.num_layers)
        on_device = self._staging.send_ids(slots, "slots", -1, self.num_slots - 1, any_shape=True)
        n = on_device.shape[0]
        _require_rows(keys, n, self.k_shape, self.device, "keys")
        v_pool = None
        if self.v_shape is None:
            if values is not None:
                raise ArgumentError("values: this pool has no values: give None")
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
        """Copy keys and values of n tokens of all layers into the caller's tensors.

        `out_k` and `out_v` are lists of one tensor per layer; pools without values take no `out_v`. Each is
        contiguous, in the pool's dtype, on its device, and of any shape with n × heads × dim elements:
        [n, h, d], or [b, s, h, d] for slots [b, s]. Slot −1 gives zeros, for padded batches; slots of page 0
        give whatever is stored there. fp8 comes as it is stored, value / scale. Outputs must not overlap the
        pool or each other. Thread-safe. Cost: on CUDA one small copy of addresses and host slots and one
        launch at copy speed; on the CPU two copies per layer, fastest where slots cover whole pages.

        Slots on the host are checked. Slots in a device tensor are not: those out of range give zeros.
        Errors: ArgumentError, OutOfRangeError; CaptureError, since addresses have to be sent.
        """
        if is_unread(slots, self.device):
            on_device = unread_ids(slots, "slots", any_shape=True)
            outs, at = self._outs(out_k, out_v, on_device.shape[0])
            (out_addresses,) = self._staging.send(at)
        else:
            ids = host_ids(slots, "slots", any_shape=True)
            require_range(ids, -1, self.num_slots - 1, "slots", "slots")
            outs, at = self._outs(out_k, out_v, ids.size)
            on_device, out_addresses = self._staging.send(ids, at)
        with self._lock:
            gather(on_device, self._pages, self._addresses, self.page_tokens, outs, out_addresses)

    def _outs(self, out_k: Any, out_v: Any, n: int) -> tuple[list[torch.Tensor], npt.NDArray[np.int64]]:
        """Return the outputs in the order of `_pages`, and their addresses. Errors: ArgumentError."""
        self._require_outs(out_k, n, self.k_shape, "out_k")
        if self.v_shape is None:
            if out_v is not None:
                raise ArgumentError("out_v: this pool has no values: give None")
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
            raise ArgumentError(f"{name}: give a list of {self.num_layers} tensors, one per layer")
        wanted = n * shape[0] * shape[1]
        for layer, out in enumerate(outs):
            if not isinstance(out, torch.Tensor) or out.dtype != self.dtype or out.device != self.device:
                raise ArgumentError(f"{name}[{layer}]: give a tensor of {self.dtype} on {self.device}")
            if out.layout != torch.strided or not out.is_contiguous() or out.is_neg():
                raise ArgumentError(f"{name}[{layer}]: give a contiguous tensor without a lazy negation")
            if out.numel() != wanted:
                raise ArgumentError(
                    f"{name}[{layer}] has shape {tuple(out.shape)}: give {wanted} elements, {n} tokens of "
                    f"{shape[0]} heads of {shape[1]}"
                )

    def _is_in_pool(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> bool:
        """Whether one of these ranges of addresses overlaps a buffer."""
        at = np.array(self._at, dtype=np.int64)
        sizes = [buffer.nbytes for buffer in (*self.k_buffer, *self.v_buffer)]
        return bool(((begins[:, None] < at + sizes) & (at < ends[:, None])).any())

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if [buffer.data_ptr() for buffer in (*self.k_buffer, *self.v_buffer)] != self._at:
            raise InvariantError(6, "a buffer of the pool has moved")
        self._staging.check()


def _overlap_each_other(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> bool:
    order = np.argsort(begins)
    return bool((ends[order][:-1] > begins[order][1:]).any())


def _dtypes(group: PagedGroup) -> set[str]:
    return {part.dtype for entry in group.storage.entries for part in (*entry.parts, *entry.scales)}


def _geometry(shape: tuple[int, int], name: str) -> tuple[int, int]:
    try:
        heads, dim = shape
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: give (heads, dim), not {shape!r}") from None
    return count(heads, f"heads of {name}"), count(dim, f"dim of {name}")


def _require_rows(rows: Any, n: int, shape: tuple[int, int], device: torch.device, name: str) -> None:
    """Raise an ArgumentError unless the dimensions split into leading n tokens and trailing heads × dim."""
    if not isinstance(rows, torch.Tensor) or not rows.is_floating_point() or rows.layout != torch.strided:
        found = f"{rows.layout} of {rows.dtype}" if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise ArgumentError(f"{name}: give a dense tensor of floats, not {found}")
    if rows.device != device:
        raise ArgumentError(f"{name} is on {rows.device} and the pool on {device}: move it there")
    width = shape[0] * shape[1]
    splits = range(rows.dim() + 1)
    if not any(math.prod(rows.shape[:s]) == n and math.prod(rows.shape[s:]) == width for s in splits):
        raise ArgumentError(
            f"{name} has shape {tuple(rows.shape)}: give leading dimensions of {n} tokens and trailing ones "
            f"of {shape[0]} heads of {shape[1]}"
        )
