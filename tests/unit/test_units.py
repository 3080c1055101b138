from __future__ import annotations

import pytest
from huggingface_hub.serialization import _base

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.units import format_count, format_duration, format_rate, format_size, parse_size

SIZES = {
    "1": 1,
    "1000B": 1000,
    "5GB": 5 * 10**9,
    "5gb": 5 * 10**9,
    " 5 GB ": 5 * 10**9,
    "200MB": 200 * 10**6,
    "1KB": 10**3,
    "1k": 10**3,
    "4GiB": 4 * 2**30,
    "4 gib": 4 * 2**30,
    "2KiB": 2048,
    "3MiB": 3 * 2**20,
    "1TiB": 2**40,
    "1TB": 10**12,
    "1PB": 10**15,
    "1.5GB": 1_500_000_000,
    "0.5KiB": 512,
    "1e9": 10**9,
    "2.5E3": 2500,
    "1e+6": 10**6,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str) -> None:
    assert parse_size(text) == SIZES[text]


def test_an_int_is_bytes() -> None:
    assert parse_size(123456789012) == 123456789012


def test_large_whole_numbers_are_exact() -> None:
    assert parse_size("9007199254740993B") == 2**53 + 1  # a float cannot hold it
    assert parse_size("9007199254740993KB") == (2**53 + 1) * 1000


@pytest.mark.parametrize("text", ["5GB", "200MB", "1KB", "1TB"])
def test_decimal_units_mean_what_huggingface_hub_means(text: str) -> None:
    assert parse_size(text) == _base.parse_size_to_int(text)


@pytest.mark.parametrize(
    "text", ["", "GB", "5 XB", "-5GB", "5GB5", "five", "1e", "0x10", "5,5GB", "1 000", "nan", "inf"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.0001KB", 0, -1])
def test_less_than_a_byte_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match="at least one byte"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (488, "488 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (99_949, "99.9 kB"),
        (123_456, "123 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2_310_000_000, "2.31 GB"),
        (5_290_000_000_000, "5.29 TB"),
        (18 * 10**15, "18 PB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1 K"),
        (1_240_000, "1.24 M"),
        (8_030_261_248, "8.03 B"),
        (10**12, "1 T"),
    ],
)
def test_counts_for_people(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.44, "0.4 s"), (9.94, "9.9 s"), (9.96, "10 s"), (12.2, "12 s"), (59.4, "59 s"), (59.6, "60 s"),
     (60, "1:00"), (185, "3:05"), (3599.6, "1:00:00"), (3723, "1:02:03"), (90_061, "25:01:01")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rates_for_people() -> None:
    assert format_rate(1_940_000_000, 1.0) == "1.94 GB/s"
    assert format_rate(1_940_000_000, 0.5) == "3.88 GB/s"
    assert format_rate(100, 0.0) == "-"
