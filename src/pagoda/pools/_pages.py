"""Pages of several tensors that move together: `PagePool`, the base of pools with pages.

In: page ids; out: pages packed into one buffer, unpacked from it, or copied to other pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagoda import kernels
from pagoda.errors import ArgumentError
from pagoda.pools._arguments import AnyIds, host_ids, is_unread, refuse_capture, require_range
from pagoda.pools._staging import Staging, staging_of

__all__ = ["PagePool"]


class PagePool:
    """Pages 1 … num_pages of several tensors on one device; page 0 is padding. An id is valid in all tensors.

    The tensors are those of a layer, then those of the next one. A layer has one or two, which may differ in
    bytes per page.
    """

    num_pages: int
    num_layers: int
    device: torch.device

    def _hold(self, tensors: Sequence[torch.Tensor], staging: Staging | None) -> None:
        """Take the tensors, which are contiguous and begin with page 0, and never move."""
        self._staging = staging_of(self.device, staging)
        self._tensors = list(tensors)
        with torch.inference_mode(False):  # pages are written outside of it
            self._pages = [
                tensor.view(self.num_pages + 1, -1).view(torch.uint8)  # [num_pages + 1, bytes of a page]
                for tensor in tensors
            ]
        self._addresses = torch.tensor(
            [pages.data_ptr() for pages in self._pages], dtype=torch.int64, device=self.device
        )
        self._lock = threading.RLock()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all tensors of all layers: what `pack` writes per page."""
        return sum(pages.shape[1] for pages in self._pages)

    def memory_bytes(self) -> int:
        """Bytes of all tensors, the padding page included."""
        return self.page_bytes * (self.num_pages + 1)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors, layer by layer."""
        return list(self._tensors)

    def pack(self, page_ids: AnyIds, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy pages of all layers into one buffer: [n, page_bytes] uint8, one page after the other.

        A page is packed layer by layer: keys before values, or entries in their order. `out` is the caller's,
        contiguous on the pool's device; without it, a tensor is allocated. Cost: one launch at copy speed.
        Errors: ArgumentError; OutOfRangeError for ids on the host; CaptureError if the call has to allocate
        or send something during a capture.
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
        """Copy the output of `pack` into these pages of all layers. Cost and errors are those of `pack`.

        A page id that is duplicated gets the content of any of its copies.
        """
        ids = self._staging.send_ids(page_ids, "page_ids", 0, self.num_pages)
        checked = self._packed(packed, ids.shape[0], "packed")
        with self._lock:
            kernels.unpack(ids, self._pages, self._addresses, checked)

    def copy_pages(self, source: AnyIds, target: AnyIds, *, is_disjoint: bool = False) -> None:
        """Copy page source[i] of all layers to page target[i].

        All sources are read before any target is written. Cost: one launch at copy speed if no page is both
        source and target, else two launches and memory for the copied pages. The call finds that out for ids
        on the host; for device tensors the caller may promise it with `is_disjoint`, and then the call can be
        captured. Errors: ArgumentError if lengths differ or host ids have a duplicate target;
        OutOfRangeError for ids on the host; CaptureError as in `pack`.
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
                raise ArgumentError("target has a duplicate: give each page once")
            is_disjoint = not np.isin(read_ids, written_ids).any()
            read, written = self._staging.send(read_ids, written_ids)
        room = None
        if not is_disjoint:
            refuse_capture(self.device, "copy_pages without is_disjoint=True")
            room = torch.empty(read.shape[0], self.page_bytes, dtype=torch.uint8, device=self.device)
        with self._lock:
            if room is None:
                kernels.copy_pages(read, written, self._pages, self._addresses)
            else:
                kernels.pack(read, self._pages, self._addresses, room)
                kernels.unpack(written, self._pages, self._addresses, room)

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


def _require_pairs(num_sources: int, num_targets: int) -> None:
    if num_sources != num_targets:
        raise ArgumentError(
            f"source has {num_sources} pages and target {num_targets}: give one source per target"
        )
