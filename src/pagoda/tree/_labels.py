"""Labels of nodes in a drawing. In: tokens, page ids, names; out: short text that fits on a line.

Text comes from tokenizers and callers, so nothing in it may end a line, move the cursor, change the direction
of writing or overflow the line. Characters that are not printable are escaped, and labels are cut to a number
of terminal columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

__all__ = ["clip", "columns_of", "decode", "name_label", "page_label", "rank_label", "token_label"]

ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", '"': '\\"'}
# Latin letters, punctuation, arrows, mathematics, boxes: one column each, whatever their neighbours are.
PLAIN = re.compile("[ -~\u00a1-\u00ac\u00ae-\u02ff\u2010-\u2027\u2190-\u22ff\u2500-\u259f]*")
MARKS_IN_A_ROW = 2  # more accents on one character would reach into the lines around it


@cache
def _widths() -> ModuleType | None:
    """Return the library that knows the width of characters (extra `rich`), or None."""
    try:
        return import_module("wcwidth")
    except ModuleNotFoundError:
        return None


def columns_of(text: str) -> int:
    """Return how many terminal columns a text takes: two for wide characters, none for marks.

    Without wcwidth every character that is not plain counts as two, the widest that exists.
    """
    if PLAIN.fullmatch(text):
        return len(text)
    widths = _widths()  # imported for such text only
    if widths is None:
        return sum(1 if PLAIN.fullmatch(c) else 2 for c in text)
    return int(widths.width(text))


def clip(pieces: Iterable[str], columns: int, has_more: bool = False, more: str = "…") -> str:
    """Join as many whole pieces as fit into so many columns, then `more` if some are missing.

    The pieces of a str are its graphemes: a character with its accents, both halves of a flag.
    """
    if isinstance(pieces, str) and not PLAIN.fullmatch(pieces):
        pieces = _graphemes(pieces)
    kept: list[str] = []
    room = columns
    for piece in pieces:
        kept.append(piece)
        room -= columns_of(piece)
        if room < 0:
            has_more = True
            break
    if has_more:
        while kept and room < columns_of(more):
            room += columns_of(kept.pop())
        kept.append(more if kept else "…")
    return "".join(kept)


def _graphemes(text: str) -> Iterable[str]:
    """Split a text into what a reader sees as characters."""
    widths = _widths()
    return text if widths is None else widths.iter_graphemes(text)


def _escaped(text: str) -> Iterable[str]:
    """Yield one piece per character with its marks. Characters that Unicode calls not printable (controls,
    direction marks, lone surrogates, line separators) become escapes, and so does a mark without a base."""
    if PLAIN.fullmatch(text):
        yield from (ESCAPES.get(c, c) for c in text)
        return
    widths = _widths()
    for cluster in _graphemes(text):
        piece, room = "", 0  # room for more marks on the last character
        for c in cluster:
            is_mark = widths is not None and widths.wcwidth(c) == 0
            if c.isprintable() and c not in ESCAPES and (room or not is_mark):
                piece += c
                room = room - 1 if is_mark else MARKS_IN_A_ROW
                continue
            if piece:
                yield piece
            yield ESCAPES.get(c) or _number(ord(c))
            piece, room = "", 0
        if piece:
            yield piece


def _number(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def decode(read: Callable[[list[int]], object] | None, tokens: Sequence[int]) -> str | None:
    """Return the text of tokens, or None without a tokenizer or if it fails: ids can be shown instead."""
    if read is None or not tokens:
        return None
    try:
        text = read(list(tokens))
    except Exception:
        return None
    return text if isinstance(text, str) else None


def token_label(tokens: Sequence[int], text: str | None, has_more: bool, columns: int) -> str:
    """Return a run as `"text"` or as `[1 2 3 …]`."""
    if text is not None:
        return f'"{clip(_escaped(text), columns - 2, has_more)}"'
    pieces = (f"{' ' if at else ''}{token}" for at, token in enumerate(tokens))
    return f"[{clip(pieces, columns - 2, has_more, ' …')}]"


def name_label(namespace: bytes, columns: int) -> str:
    """Return a namespace as `"text"`, or as `b'\\xff'` if it is not UTF-8."""
    try:
        return f'"{clip(_escaped(namespace.decode()), columns - 2)}"'
    except UnicodeDecodeError:
        return clip(repr(namespace), columns)


def _shortened(page_ids: Iterable[int]) -> Iterable[str]:
    """Yield 1 2 3 7 −1 −1 as `1-3`, `7`, `2 holes`."""
    first, times = 0, 0

    def piece() -> str:
        if first < 0:
            return "1 hole" if times == 1 else f"{times} holes"
        return str(first) if times == 1 else f"{first}-{first + times - 1}"

    for page in page_ids:
        if times and page == (first if first < 0 else first + times):
            times += 1
            continue
        if times:
            yield piece()
        first, times = page, 1
    if times:
        yield piece()


def page_label(columns_of_ids: Sequence[Sequence[int]], num_pages: int, columns: int) -> str:
    """Return the pages of a run: `pages 1-4, 7`; with several columns, `pages 1-4 | 2 holes, 9`."""
    # Starts with a letter: digits right after right-to-left text would be reordered with it.
    word = "page " if num_pages == 1 else "pages "
    share = max(8, (columns - len(word) + 3) // max(1, len(columns_of_ids)) - 3)
    groups = []
    for ids in columns_of_ids:
        pieces = (f"{', ' if at else ''}{piece}" for at, piece in enumerate(_shortened(ids)))
        groups.append(clip(pieces, share, len(ids) < num_pages, ", …"))
    return word + " | ".join(groups)


def rank_label(rank: int) -> str:
    """Return `coldest`, `2nd coldest`, …"""
    if rank == 1:
        return "coldest"
    ending = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{ending} coldest"
