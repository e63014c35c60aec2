"""Names of Gluon that differ between versions of Triton. In: nothing; out: the same names for all.

Importing it raises ImportError where Triton has no Gluon for Hopper (before 3.6)."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

__all__ = ["LOG2E", "barrier", "copy"]

LOG2E = gl.constexpr(1.4426950408889634)
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
