"""What the picture writes on a node. In: tokens, page ids, names; out: short text that no drawing breaks on.

Text comes from tokenizers and callers: nothing in it may end a line, move the cursor, turn the direction of
writing or run off the page. What is not printable is escaped, and everything is cut to a number of columns.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Iterable, Sequence

__all__ = ["clip", "columns_of", "decode", "name_label", "page_label", "rank_label", "token_label"]

ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", '"': '\\"'}
MARKS = ("Mn", "Me")  # accents: written on top of the character before
MARKS_IN_A_ROW = 2  # accents above accents reach into the lines around them


@functools.lru_cache(4096)
def _columns_of_one(c: str) -> int:
    if unicodedata.category(c) in MARKS:
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: two for wide characters, none for marks. O(text)."""
    return len(text) if text.isascii() else sum(map(_columns_of_one, text))


def clip(pieces: Iterable[str], columns: int, has_more: bool = False, more: str = "…") -> str:
    """As many whole pieces as fit into so many columns, then `more` where some are missing. O(columns)."""
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


def _escaped(text: str) -> Iterable[str]:
    """One piece a character. Of what Unicode calls not printable (controls, marks of direction, lone
    surrogates, line separators) the number is written."""
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.category(c) in MARKS else 0
        if c in ESCAPES:
            yield ESCAPES[c]
        elif c.isprintable() and marks <= MARKS_IN_A_ROW:
            yield c
        else:
            code = ord(c)
            yield (
                f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
            )


def decode(read: Callable[[list[int]], object] | None, tokens: Sequence[int]) -> str | None:
    """The text of some tokens; None without a tokenizer, and when it fails: ids can always be shown."""
    if read is None or not tokens:
        return None
    try:
        text = read(list(tokens))
    except Exception:
        return None
    return text if isinstance(text, str) else None


def token_label(tokens: Sequence[int], text: str | None, has_more: bool, columns: int) -> str:
    """A run as `"text"` or as `[1 2 3 …]`. O(columns)."""
    if text is not None:
        return f'"{clip(_escaped(text), columns - 2, has_more)}"'
    pieces = (f"{' ' if at else ''}{token}" for at, token in enumerate(tokens))
    return f"[{clip(pieces, columns - 2, has_more, ' …')}]"


def name_label(namespace: bytes, columns: int) -> str:
    """A namespace as `"text"`, or as `b'\\xff'` where it is not UTF-8. O(namespace)."""
    try:
        return f'"{clip(_escaped(namespace.decode()), columns - 2)}"'
    except UnicodeDecodeError:
        return clip(repr(namespace), columns)


def _shortened(page_ids: Iterable[int]) -> Iterable[str]:
    """1 2 3 7 −1 −1 as `1-3`, `7`, `2 holes`."""
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
    """The pages of a run: `pages 1-4, 7`, several groups as `pages 1-4 | 2 holes, 9`. O(ids)."""
    # A letter comes first: text that runs from right to left would carry digits after it along.
    word = "page " if num_pages == 1 else "pages "
    share = max(8, (columns - len(word) + 3) // max(1, len(columns_of_ids)) - 3)
    groups = []
    for ids in columns_of_ids:
        pieces = (f"{', ' if at else ''}{piece}" for at, piece in enumerate(_shortened(ids)))
        groups.append(clip(pieces, share, len(ids) < num_pages, ", …"))
    return word + " | ".join(groups)


def rank_label(rank: int) -> str:
    """`coldest`, `2nd coldest`, … O(1)."""
    if rank == 1:
        return "coldest"
    ending = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{ending} coldest"
