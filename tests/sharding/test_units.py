import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.units import (
    format_bytes,
    format_bytes_down,
    format_bytes_up,
    format_count,
    format_parameters,
    format_rate,
    format_seconds,
    json_number,
    parse_bytes,
    plural,
    spare_bytes,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096B", 4096), ("1048576", 1 << 20), ("512B", 512), ("16GiB", 16 << 30), ("16 GiB", 16 << 30),
        ("16gib", 16 << 30), ("16Gi", 16 << 30), ("2G", 2 << 30), ("2GB", 2_000_000_000), ("1.5MiB", 3 << 19),
        (" 1TB ", 10**12), (7, 7),
    ],
)  # fmt: skip
def test_sizes_people_write(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1GiB", "1e9", "1..5G", "nan", "5iB", "1 GiB 2", "٣GiB"])
def test_what_is_no_size_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="Write it like 16GiB, 512MiB or 2GB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1B", "99999999PiB", 0, -1])
def test_sizes_out_of_range(text):
    with pytest.raises(ValueError, match="must be positive and below 8 EiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["16", "1.5", "1048575"])
def test_a_small_number_as_text_needs_a_unit(text):
    with pytest.raises(ValueError, match=f"{text} means {text} bytes. Write {text}GiB, or {text}B if you mean bytes"):
        parse_bytes(text)


def test_a_small_int_is_bytes_unless_a_least_one_is_given():
    assert parse_bytes(16) == 16 and parse_bytes("16B", least=1 << 20) == 16
    with pytest.raises(ValueError, match="16 means 16 bytes"):
        parse_bytes(16, least=1 << 20)


@given(st.integers(1, 1 << 50), st.integers(1, 1 << 20))
def test_a_limit_rounded_up_is_enough_and_never_looks_like_a_smaller_one_rounded_down(n, more):
    assert parse_bytes(format_bytes_up(n)) >= n
    assert format_bytes_down(n) != format_bytes_up(n + more)
    assert (format_bytes_down(3 << 19), format_bytes_up(3 << 19)) == ("1.5 MiB", "1.5 MiB")


@given(st.integers(1, 1 << 50))
def test_what_is_printed_reads_back_within_its_precision(n):
    assert math.isclose(parse_bytes(format_bytes(n)), n, rel_tol=0.06)


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (536_196_352, "511.4 MiB"), (1 << 62, "4,096.0 PiB")],
)
def test_bytes(n, text):
    assert format_bytes(n) == text


def test_bytes_never_show_four_digits_before_the_point():
    assert format_bytes(1023 << 20) == "1.0 GiB"


@pytest.mark.parametrize(
    ("shown", "numbers", "expected"),
    [
        (format_count, (999, 268_098_176, 9_241_705_984, 10**13), ["999", "268.1 M", "9.2 B", "10.0 T"]),
        (format_parameters, (0, 1, 268_098_176), ["0 parameters", "1 parameter", "268.1 M parameters"]),
        (json_number, (0.5, math.nan, math.inf, -math.inf), [0.5, "nan", "inf", "-inf"]),
        (format_seconds, (0, 0.0449, 1.286, 185.0), ["0 ms", "45 ms", "1.29 s", "3 min 05 s"]),
        (format_rate, (1.286, 0.0451), ["1.29 GB/s", "45.1 MB/s"]),
        (lambda n: plural(n, "tensor"), (0, 1, 1234), ["0 tensors", "1 tensor", "1,234 tensors"]),
        (spare_bytes, (638 << 10, 80 << 20, 1 << 40), [1 << 20, 10 << 20, 64 << 20]),
    ],
    ids=[
        "counts",
        "parameters",
        "JSON",
        "seconds",
        "slow rates are still numbers",
        "plural",
        "space to spare grows with what is written",
    ],
)
def test_numbers_for_people(shown, numbers, expected):
    assert [shown(n) for n in numbers] == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_was_not_measured_is_a_dash(value):
    assert format_seconds(value) == format_rate(value) == "-"
