"""Content keys. In: a namespace and pages; out: 64 bits per page that identify everything up to its end.

The same rule as native/core/content_key.hpp, written a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twin.arguments import Element

__all__ = ["page_keys", "ranges_of"]


def _absorb(key: int, word: int) -> int:
    mixed = (key ^ word) * 0x9E3779B97F4A7C15 % 2**64
    return mixed ^ (mixed >> 32)


def _key_of_bytes(data: bytes) -> int:
    key = 0xD1342543DE82EF95
    for byte in data:
        key = _absorb(key, byte)
    return _absorb(key, len(data))


def page_keys(namespace: bytes, pages: Iterable[Sequence[Element]]) -> list[int]:
    """Return the key of each page; the pages begin a sequence."""
    key, keys = _key_of_bytes(namespace), []
    for page in pages:
        for element in page:
            if isinstance(element, tuple):
                token, extra, begin = element
                for word in (2**32 + token, begin, _key_of_bytes(extra)):
                    key = _absorb(key, word)
            else:
                key = _absorb(key, element)
        keys.append(key)
    return keys


def ranges_of(elements: Iterable[Element], position: int) -> tuple[tuple[int, int, bytes], ...]:
    """Return the extra keys over these elements, which begin at `position`, as (begin, end, key)."""
    ranges: list[tuple[int, int, bytes]] = []
    before: tuple[int, bytes] | None = None
    for at, element in enumerate(elements, position):
        over = (element[2], element[1]) if isinstance(element, tuple) else None
        if over is not None and over == before:
            ranges[-1] = (ranges[-1][0], at + 1, ranges[-1][2])
        elif over is not None:
            ranges.append((over[0], at + 1, over[1]))
        before = over
    return tuple(ranges)
