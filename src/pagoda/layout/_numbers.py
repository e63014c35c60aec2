"""Numbers that people write: counts, sizes in bytes, lengths in tokens. In: anything; out: an integer or a
ConfigError that names the argument."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import Any

from pagoda.errors import ArgumentError, ConfigError

__all__ = ["count", "counted", "integer", "num_bytes", "num_tokens", "show", "show_bytes", "show_tokens"]

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_AMOUNT = re.compile(r"([0-9]+(?:[._][0-9]+)*|\.[0-9]+)\s*([kmgtp]?)(i?b?)", re.IGNORECASE | re.ASCII)
_LARGEST = 2**62


def integer(value: Any, name: str, low: int, error: type[ConfigError] | type[ArgumentError]) -> int:
    """An integer of at least `low`, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise error(f"{name}: give an integer, not {type(value).__name__}") from None
    if number < low:
        raise error(f"{name}: give {low} or more, not {max(number, -(10**18))}")
    return number


def count(value: Any, name: str, low: int = 1) -> int:
    """A size of something to be built, at least `low`, or a ConfigError that names it."""
    size = integer(value, name, low, ConfigError)
    if size > _LARGEST:
        raise ConfigError(f"{name}: larger than any memory")
    return size


def num_bytes(value: Any, name: str = "memory") -> int:
    """Bytes from an integer or from text: '80GiB', '1.5 GB', '512M'. O(1).

    'GiB' and a bare 'G' are 2^30, 'GB' is 10^9, as for the other letters. Errors: ConfigError.
    """
    if not isinstance(value, str):
        return count(value, name, low=0)
    found = _AMOUNT.fullmatch(value.strip())
    if found is None:
        raise ConfigError(f"{name}: {show(value)} is no size: write for example 80GiB, 1.5GB or 512M")
    digits, letter, unit = found.group(1), found.group(2).lower(), found.group(3).lower()
    if unit == "i" or (unit == "ib" and not letter):
        raise ConfigError(f"{name}: {show(value)} is no size: write GiB for 2^30 bytes, GB for 10^9")
    scale = (_DECIMAL if unit == "b" else _BINARY)[letter]
    return count(int(_fraction(digits, value, name) * scale), name, low=0)


def num_tokens(value: Any, name: str = "context") -> int:
    """Tokens from an integer or from text: '131072', '128k' (128 × 1,024), '1M' (1,024 × 1,024). O(1).

    Errors: ConfigError, also for fewer than 1 token.
    """
    if not isinstance(value, str):
        return count(value, name)
    found = _AMOUNT.fullmatch(value.strip())
    if found is None or found.group(3) or found.group(2).lower() not in ("", "k", "m"):
        raise ConfigError(f"{name}: {show(value)} is no number of tokens: write for example 8192, 128k or 1M")
    tokens = _fraction(found.group(1), value, name) * _BINARY[found.group(2).lower()]
    if tokens.denominator != 1:
        raise ConfigError(f"{name}: {show(value)} is no whole number of tokens")
    return count(int(tokens), name)


def show(value: object, most: int = 40) -> str:
    """Any value in a message: quoted, on one line, cut. O(1)."""
    try:
        return repr(str(value)[:most])
    except (RecursionError, ValueError):  # nested without end, or an integer of thousands of digits
        return f"a {type(value).__name__} too long to print"


def show_bytes(size: float | Fraction) -> str:
    """Bytes in the unit that people would use: '131,072 B' below a MiB, '1.5 MiB', '80 GiB'. O(1)."""
    size = float(size)
    for unit, letter in ((2**40, "T"), (2**30, "G"), (2**20, "M")):
        if size >= unit:
            return f"{size / unit:,.2f}".rstrip("0").rstrip(".") + f" {letter}iB"
    return f"{size:,.2f}".rstrip("0").rstrip(".") + " B"


def counted(number: int, word: str, plural: str | None = None) -> str:
    """'1 call', '2 calls', '1,000 leaves'. O(1)."""
    return f"{number:,} {word if number == 1 else plural or word + 's'}"


def show_tokens(tokens: int) -> str:
    """Tokens as people write them: '128k', '1M', '5,000'. O(1)."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit:,}{letter}"
    return f"{tokens:,}"


def _fraction(digits: str, value: str, name: str) -> Fraction:
    if len(digits) > 40:
        raise ConfigError(f"{name}: {show(value)} is longer than any number of bytes")
    try:
        return Fraction(digits)
    except ValueError:
        raise ConfigError(f"{name}: {show(value)} is no number") from None
