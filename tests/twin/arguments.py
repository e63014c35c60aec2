"""The arguments of the twin, read and checked. In: whatever a caller gives; out: plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.errors import ArgumentError, OutOfRangeError
from pagoda.layout._numbers import as_integer

__all__ = [
    "HOLE",
    "Element",
    "Ints",
    "as_array",
    "as_bytes",
    "as_int",
    "as_ints",
    "as_items",
    "elements_of",
    "read_checkpoints",
    "read_columns",
    "read_tokens",
    "token_of",
]

Ints: TypeAlias = npt.NDArray[np.int32]
Element: TypeAlias = int | tuple[int, bytes, int]  # a token, under a key with the key and its begin

HOLE = -1
LOW, HIGH = -(2**31), 2**31 - 1


def as_array(values: Sequence[int]) -> Ints:
    """[len(values)] int32."""
    return np.array(values, dtype=np.int32)


def as_int(value: Any, name: str, low: int, high: int) -> int:
    """An integer within bounds."""
    number = as_integer(value)
    if number is None:
        raise ArgumentError(f"{name}: give an integer, not {type(value).__name__}")
    if not low <= number <= high:
        raise ArgumentError(f"{name}: give an integer from {low} to {high}")
    return number


def as_bytes(value: Any, name: str) -> bytes:
    """Bytes, or the UTF-8 of a str."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise ArgumentError(f"{name}: give a str of valid characters") from None
    raise ArgumentError(f"{name}: give bytes or str, not {type(value).__name__}")


def as_items(value: Any, name: str, what: str) -> list[Any]:
    """The items of an iterable that is not text."""
    if not isinstance(value, (str, bytes, dict)):
        try:
            return list(value)
        except TypeError:
            pass
    raise ArgumentError(f"{name}: give a list or tuple of {what}")


def as_ints(values: Any, name: str) -> list[int]:
    """A one-dimensional array of int32 or int64 on the host, or a sequence of integers."""
    if isinstance(values, (bytearray, memoryview)):
        values = np.asarray(values)
    if not isinstance(values, np.ndarray) and hasattr(values, "__dlpack__"):
        try:
            values = np.from_dlpack(values)
        except Exception:
            raise ArgumentError(f"{name}: cannot be read on the host") from None
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise ArgumentError(f"{name}: give one dimension, not {values.ndim}")
        if values.size == 0 and values.dtype == np.float64:  # numpy.array([])
            return []
        if values.dtype not in (np.int32, np.int64):
            raise ArgumentError(f"{name}: give int32 or int64, not {values.dtype}")
        if not values.flags.c_contiguous:
            raise ArgumentError(f"{name}: not contiguous")
        values = values.tolist()
    return [as_int(item, name, LOW, HIGH) for item in as_items(values, name, "ids, or an array")]


def read_tokens(values: Any) -> list[int]:
    """Tokens, none negative."""
    tokens = as_ints(values, "tokens")
    for position, token in enumerate(tokens):
        if token < 0:
            raise OutOfRangeError(f"tokens[{position}] = {token} is out of range", token, position)
    return tokens


def token_of(element: Element) -> int:
    """The token alone."""
    return element[0] if isinstance(element, tuple) else element


def elements_of(tokens: list[int], extra_keys: Any, base: int, page_tokens: int) -> list[tuple[Element, ...]]:
    """Tokens of positions base, base + 1, … as whole pages of what makes two of them equal."""
    elements: list[Element] = list(tokens)
    after = 0
    for item in as_items(extra_keys, "extra_keys", "(begin, end, key)"):
        parts = as_items(item, "extra_keys", "(begin, end, key)")
        if len(parts) != 3:
            raise ArgumentError("extra_keys: give a list of (begin, end, key)")
        begin = as_int(parts[0], "extra_keys", 0, 2**63 - 1)
        end = as_int(parts[1], "extra_keys", 0, 2**63 - 1)
        key = as_bytes(parts[2], "extra_keys")
        if begin < after or end <= begin:
            raise ArgumentError("extra_keys: give ranges in order that do not overlap")
        after = end
        for at in range(max(begin - base, 0), min(end - base, len(tokens))):
            elements[at] = (tokens[at], key, begin)
    return [
        tuple(elements[at : at + page_tokens])
        for at in range(0, len(elements) - page_tokens + 1, page_tokens)
    ]


def read_columns(
    page_ids: Any, num_tokens: int, windows: Sequence[int | None], page_tokens: int
) -> list[list[int]]:
    """[columns][pages] page ids; the last page may be partly filled."""
    whole, all_pages = num_tokens // page_tokens, -(-num_tokens // page_tokens)
    one_each = (
        [page_ids]
        if len(windows) == 1
        else as_items(page_ids, "page_ids", "arrays of page ids, one per column")
    )
    if len(one_each) != len(windows):
        raise ArgumentError(f"page_ids: give a list or tuple of {len(windows)} arrays, one per column")
    columns = []
    for array, window in zip(one_each, windows, strict=True):
        ids = as_ints(array, "page_ids")
        if len(ids) not in (whole, all_pages):
            raise ArgumentError(f"page_ids: {len(ids)} ids, but {num_tokens} tokens fill {whole} pages")
        for position, id in enumerate(ids):
            is_hole = window is not None and id == HOLE
            if not is_hole and (id < 1 or (id + 1) * page_tokens > 2**31):
                raise OutOfRangeError(f"page_ids[{position}] = {id} is out of range", id, position)
        columns.append(ids)
    return columns


def read_checkpoints(
    checkpoints: Any, has_states: bool, base: int, end: int, page_tokens: int
) -> list[tuple[int, int]]:
    """(length, state id) pairs, ascending, at whole pages after base and up to end."""
    items = as_items(checkpoints, "checkpoints", "(length, state id)")
    if items and not has_states:
        raise ArgumentError("checkpoints: this tree was built without states")
    pairs: list[tuple[int, int]] = []
    for position, item in enumerate(items):
        parts = as_items(item, "checkpoints", "(length, state id)")
        if len(parts) != 2:
            raise ArgumentError("checkpoints: give a list of (length, state id)")
        length = as_int(parts[0], "checkpoints", -(2**63), 2**63 - 1)
        state = as_int(parts[1], "checkpoints", LOW, HIGH)
        if length % page_tokens or not base < length <= end:
            raise ArgumentError(f"checkpoints: {length} is not a whole page of {base} … {end}")
        if pairs and length <= pairs[-1][0]:
            raise ArgumentError("checkpoints: give them in order of length")
        if state < 0:
            raise OutOfRangeError(
                f"checkpoints[{position}] has state id {state}: state ids must not be negative",
                state,
                position,
            )
        pairs.append((length, state))
    return pairs
