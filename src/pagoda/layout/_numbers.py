"""Reads and writes numbers: counts, bytes, tokens. In: any value; out: an integer, or an error that names the
argument; and numbers as text for people."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction
from numbers import Real
from typing import Any

from pagoda.errors import ArgumentError, ConfigError

__all__ = [
    "LARGEST",
    "as_integer",
    "count",
    "counted",
    "exact",
    "integer",
    "num_bytes",
    "num_tokens",
    "show",
    "show_bytes",
    "show_tokens",
]

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_AMOUNT = re.compile(r"([0-9]+(?:[._][0-9]+)*|\.[0-9]+)\s*([kmgtp]?)(i?b?)", re.IGNORECASE | re.ASCII)
LARGEST = 2**62


def as_integer(value: Any) -> int | None:
    """Return any integer type as an int; None for other types and for bools, including those of tensors."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integer(value: Any, name: str, low: int, error: type[ConfigError] | type[ArgumentError]) -> int:
    """Return `value` as an int of at least `low`, or raise `error`, naming it. A bool is not an integer."""
    number = as_integer(value)
    if number is None:
        raise error(f"{name}: give an integer, not {type(value).__name__}")
    if number < low:
        raise error(f"{name}: give {low} or more, not {max(number, -(10**18))}")
    return number


def count(value: Any, name: str, low: int = 1) -> int:
    """Return `value` as an int of at least `low` for something to be built. Errors: ConfigError."""
    size = integer(value, name, low, ConfigError)
    if size > LARGEST:
        raise ConfigError(f"{name}: give 2^62 or less")
    return size


def exact(value: Any, name: str) -> Fraction:
    """Return a number of at least 0, possibly a float, as its exact value. Errors: ConfigError."""
    whole = as_integer(value)
    if whole is None:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"{name}: give a finite number, not {show(value)}")
        given = Fraction(value) if isinstance(value, Fraction) else Fraction(float(value))
    else:
        given = Fraction(whole)
    if given < 0:
        raise ConfigError(f"{name}: give 0 or more, not {show(value)}")
    if given > LARGEST:
        raise ConfigError(f"{name}: give 2^62 or less")
    return given


def num_bytes(value: Any, name: str = "memory") -> int:
    """Return bytes, given an integer or text: '80GiB', '1.5 GB', '512M'.

    'GiB' and 'G' are 2^30, 'GB' is 10^9; the other letters work the same way. Errors: ConfigError.
    """
    if not isinstance(value, str):
        return count(value, name, low=0)
    found = _AMOUNT.fullmatch(value.strip())
    if found is None:
        raise ConfigError(f"{name}: {show(value)} is not a size in bytes: write 80GiB, 1.5GB or 512M")
    digits, letter, unit = found.group(1), found.group(2).lower(), found.group(3).lower()
    if unit == "i" or (unit == "ib" and not letter):
        raise ConfigError(
            f"{name}: {show(value)} is not a size in bytes: write GiB for 2^30 bytes, GB for 10^9"
        )
    scale = (_DECIMAL if unit == "b" else _BINARY)[letter]
    return count(int(_fraction(digits, value, name) * scale), name, low=0)


def num_tokens(value: Any, name: str = "context") -> int:
    """Return tokens, given an integer or text: '131072', '128k' (128 × 1,024), '1M' (1,024 × 1,024).

    Errors: ConfigError, also for fewer than 1 token.
    """
    if not isinstance(value, str):
        return count(value, name)
    found = _AMOUNT.fullmatch(value.strip())
    if found is None or found.group(3) or found.group(2).lower() not in ("", "k", "m"):
        raise ConfigError(f"{name}: {show(value)} is not a number of tokens: write 8192, 128k or 1M")
    tokens = _fraction(found.group(1), value, name) * _BINARY[found.group(2).lower()]
    if tokens.denominator != 1:
        raise ConfigError(f"{name}: {show(value)} is not a whole number of tokens")
    return count(int(tokens), name)


def show(value: object, most: int = 40) -> str:
    """Return any value as it should appear in a message: quoted, on one line, truncated."""
    try:
        return repr(str(value)[:most])
    except (RecursionError, ValueError):  # infinitely nested, or an integer of thousands of digits
        return f"a {type(value).__name__} too long to print"


def show_bytes(size: float | Fraction) -> str:
    """Return bytes in a readable unit: '131,072 B' below a MiB, '1.5 MiB', '80 GiB'."""
    size = float(size)
    for unit, letter in ((2**40, "T"), (2**30, "G"), (2**20, "M")):
        if size >= unit:
            return f"{size / unit:,.2f}".rstrip("0").rstrip(".") + f" {letter}iB"
    return f"{size:,.2f}".rstrip("0").rstrip(".") + " B"


def counted(number: int, word: str, plural: str | None = None) -> str:
    """Return a number with its noun: '1 call', '2 calls', '1,000 leaves'."""
    return f"{number:,} {word if number == 1 else plural or word + 's'}"


def show_tokens(tokens: int) -> str:
    """Return tokens in a readable unit: '128k', '1M', '5,000'."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit:,}{letter}"
    return f"{tokens:,}"


def _fraction(digits: str, value: str, name: str) -> Fraction:
    if len(digits) > 40:
        raise ConfigError(f"{name}: {show(value)} has too many digits")
    try:
        return Fraction(digits)
    except ValueError:
        raise ConfigError(f"{name}: {show(value)} is not a number") from None
