"""The machine's own limit: comparing and copying bytes that are not in its caches."""

from __future__ import annotations

import ctypes

import numpy as np

from bench.samples import now

_libc = ctypes.CDLL(None)
_compare, _copy = _libc.memcmp, _libc.memcpy
_compare.argtypes = _copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_compare.restype, _copy.restype = ctypes.c_int, ctypes.c_void_p


def compare_and_copy_ns(query: np.ndarray, tokens: np.ndarray, ids: np.ndarray, out: np.ndarray) -> int:
    """Time one memcmp and one memcpy, the cost of calling them and of the clock included."""
    compare, copy = _compare, _copy  # no global look-ups in the timed region
    a, b, c, d = query.ctypes.data, tokens.ctypes.data, out.ctypes.data, ids.ctypes.data
    token_bytes, id_bytes = tokens.nbytes, ids.nbytes
    begin = now()
    differs = compare(a, b, token_bytes)
    copy(c, d, id_bytes)
    elapsed = now() - begin
    assert not differs
    return elapsed


def calls_ns() -> int:
    """Time the same calls on 0 bytes: the overhead in a sample of `compare_and_copy_ns`."""
    nothing = np.empty(0, dtype=np.int32)
    return compare_and_copy_ns(nothing, nothing, nothing, nothing)
