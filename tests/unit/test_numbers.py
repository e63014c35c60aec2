"""Numbers that people write: what is read, what is refused, and that what is shown can be read again."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ArgumentError, ConfigError
from pagoda.layout._numbers import count, integer, num_bytes, num_tokens, show_bytes, show_tokens

BYTES = [
    (0, 0),
    (5, 5),
    (np.int64(7), 7),
    (2**62, 2**62),
    ("0", 0),
    ("123", 123),
    ("123B", 123),
    ("123 b", 123),
    ("1k", 1_024),
    ("1K", 1_024),
    ("1KiB", 1_024),
    ("1kib", 1_024),
    ("1KB", 1_000),
    ("1kb", 1_000),
    ("512M", 536_870_912),
    ("512MiB", 536_870_912),
    ("512MB", 512_000_000),
    ("80GiB", 85_899_345_920),
    ("80G", 85_899_345_920),
    ("80GB", 80_000_000_000),
    ("80 GB", 80_000_000_000),
    ("  80 GiB\n", 85_899_345_920),
    ("1.5 GB", 1_500_000_000),
    ("1.5GiB", 1_610_612_736),
    (".5k", 512),
    ("0.1GB", 100_000_000),  # a float would give 100,000,000.00000001 or less
    ("0.3GB", 300_000_000),
    ("141.1GB", 141_100_000_000),
    ("2T", 2_199_023_255_552),
    ("2TB", 2_000_000_000_000),
    ("1P", 1_125_899_906_842_624),
    ("1PB", 1_000_000_000_000_000),
    ("1_000_000", 1_000_000),
    ("007", 7),
]
NO_BYTES = [
    "", " ", "k", "GiB", ".", "1.", "1..5", "1.2.3", "1__0", "_1", "1_", "-1", "+1", "−1", "1e9", "0x10",
    "1,000", "80Gi", "80 Gi", "5i", "5ib", "5iB", "80GBps", "80GiBs", "GB80", "80 G B", "80 G iB", "1 0",
    "1E", "1EiB", "1ZB", "nan", "inf", "NaN", "infinity", "1/2", "１GB", "٣GB", "80\u212aB", "5\x00",
    "all", "9" * 41, "9" * 5_000, "1" + "0" * 39, "5000P", "1.5.GB", "80GiB 80GiB", "0b1", "True",
]  # fmt: skip
NOT_NUMBERS = [
    None,
    1.0,
    1.5,
    float("nan"),
    float("inf"),
    b"80GiB",
    [80],
    (80,),
    {},
    {"a": 1},
    1j,
    object(),
    Fraction(1),
    str,
]


class TestBytes:
    @pytest.mark.parametrize(("given", "expected"), BYTES)
    def test_read(self, given, expected):
        assert num_bytes(given) == expected
        assert type(num_bytes(given)) is int

    @pytest.mark.parametrize("given", NO_BYTES)
    def test_refused(self, given):
        with pytest.raises(ConfigError, match=r"^memory: ") as refused:
            num_bytes(given)
        assert len(str(refused.value)) < 150

    @pytest.mark.parametrize(
        "given", [*NOT_NUMBERS, -1, -(10**5_000), 2**62 + 1, 10**5_000], ids=lambda v: str(type(v))
    )
    def test_what_is_no_number_of_bytes_is_refused(self, given):
        with pytest.raises(ConfigError, match=r"^cache: "):
            num_bytes(given, "cache")

    def test_the_error_shows_what_to_write(self):
        with pytest.raises(ConfigError, match=r"'80 gigs' is not a size in bytes: write 80GiB"):
            num_bytes("80 gigs")
        with pytest.raises(ConfigError, match=r"write GiB for 2\^30 bytes, GB for 10\^9"):
            num_bytes("80Gi")

    @given(st.integers(0, 2**62))
    def test_digits_are_read_as_they_stand(self, size):
        assert num_bytes(str(size)) == num_bytes(f"{size:_}") == num_bytes(f"{size} B") == size

    @given(st.integers(0, 2**10), st.integers(0, 999), st.sampled_from(["k", "M", "G", "T"]))
    def test_decimals_are_exact(self, whole, thousandths, letter):
        decimal = 10 ** (3 * (1 + "kMGT".index(letter)))
        binary = 2 ** (10 * (1 + "kMGT".index(letter)))
        text = f"{whole}.{thousandths:03}"
        assert num_bytes(f"{text}{letter}B") == (whole * 1000 + thousandths) * (decimal // 1000)
        assert num_bytes(f"{text}{letter}iB") == (whole * 1000 + thousandths) * binary // 1000


TOKENS = [
    (1, 1),
    (np.int32(9), 9),
    ("1", 1),
    ("8192", 8_192),
    ("131072", 131_072),
    ("128k", 131_072),
    ("128K", 131_072),
    (" 128 k ", 131_072),
    ("0.5k", 512),
    ("1.5k", 1_536),
    ("1M", 1_048_576),
    ("1m", 1_048_576),
    ("0.25M", 262_144),
    ("1_000", 1_000),
]
NO_TOKENS = [
    "", "0", "0k", "-1", "1.5", "0.0001k", "128kB", "128KiB", "128ki", "128b", "1G", "1T", "1P", "many",
    "1e6", "1,000", "１k",
    "9" * 50, "9" * 20,
]  # fmt: skip


class TestTokens:
    @pytest.mark.parametrize(("given", "expected"), TOKENS)
    def test_read(self, given, expected):
        assert num_tokens(given) == expected
        assert type(num_tokens(given)) is int

    @pytest.mark.parametrize("given", NO_TOKENS)
    def test_refused(self, given):
        with pytest.raises(ConfigError, match=r"^context: "):
            num_tokens(given)

    @pytest.mark.parametrize("given", [*NOT_NUMBERS, 0, -1, 2**62 + 1, 10**5_000], ids=lambda v: str(type(v)))
    def test_what_is_no_number_of_tokens_is_refused(self, given):
        with pytest.raises(ConfigError, match=r"^length: "):
            num_tokens(given, "length")

    @given(st.integers(1, 2**40))
    def test_what_is_shown_says_the_same_number(self, tokens):
        assert num_tokens(show_tokens(tokens).replace(",", "")) == tokens

    @pytest.mark.parametrize(
        ("tokens", "text"),
        [
            (0, "0"),
            (1, "1"),
            (999, "999"),
            (1_000, "1,000"),
            (1_023, "1,023"),
            (1_024, "1k"),
            (1_025, "1,025"),
            (131_072, "128k"),
            (128_000, "125k"),
            (163_840, "160k"),
            (1_000_000, "1,000,000"),
            (1_048_576, "1M"),
            (1_572_864, "1,536k"),
            (2**30, "1,024M"),
        ],
    )
    def test_shown(self, tokens, text):
        assert show_tokens(tokens) == text


class TestShownBytes:
    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (1, "1 B"),
            (100, "100 B"),
            (1_000, "1,000 B"),
            (3_850.25, "3,850.25 B"),
            (3_991.5, "3,991.5 B"),
            (131_072, "131,072 B"),
            (2**20 - 1, "1,048,575 B"),
            (2**20, "1 MiB"),
            (10 * 2**20, "10 MiB"),
            (100 * 2**20, "100 MiB"),
            (15_420_416, "14.71 MiB"),
            (23_270_400, "22.19 MiB"),
            (3 * 2**29, "1.5 GiB"),
            (80 * 2**30, "80 GiB"),
            (1_000 * 2**30, "1,000 GiB"),
            (2**40, "1 TiB"),
            (2**60, "1,048,576 TiB"),
        ],
    )
    def test_shown(self, size, text):
        assert show_bytes(size) == text

    @given(st.integers(0, 2**60))
    def test_what_is_shown_is_near_what_is_meant(self, size):
        read = num_bytes(show_bytes(size).replace(",", ""))
        unit = next((u for u in (2**40, 2**30, 2**20) if size >= u), 1)
        # Two decimals of the unit, and a byte because text is cut to whole bytes.
        assert abs(read - size) <= (Fraction(unit, 200) + 1 if unit > 1 else 0)


class TestIntegers:
    @pytest.mark.parametrize("error", [ConfigError, ArgumentError])
    def test_the_error_is_the_one_asked_for(self, error):
        with pytest.raises(error, match=r"^rows: give an integer, not str"):
            integer("3", "rows", 1, error)
        with pytest.raises(error, match=r"^rows: give 2 or more, not 1"):
            integer(1, "rows", 2, error)
        assert integer(np.int32(3), "rows", 3, error) == 3

    def test_counts_have_an_upper_end(self):
        assert count(2**62, "pages") == 2**62
        with pytest.raises(ConfigError, match=r"^pages: give 2\^62 or less"):
            count(2**62 + 1, "pages")

    def test_a_hugely_negative_number_is_still_printed(self):
        with pytest.raises(ConfigError, match=r"^pages: give 1 or more"):
            count(-(10**5_000), "pages")
