"""The header ``Range``: what is asked for, cut at the end of the file, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.serving.ranges import MOST_RANGES, UnsatisfiableError, parse_ranges


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", [(0, 10)]),
        ("bytes=90-", [(90, 100)]),
        ("bytes=-10", [(90, 100)]),
        ("bytes=-1000", [(0, 100)]),
        ("bytes=99-1000000000000", [(99, 100)]),
        ("Bytes = 5-5", [(5, 6)]),
        ("bytes=0-9, 20-29,90-", [(0, 10), (20, 30), (90, 100)]),
        ("bytes=0-9,200-300", [(0, 10)]),
    ],
)
def test_ranges(header, expected):
    assert parse_ranges(header, 100) == expected


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "items=0-9",
        "bytes=",
        "bytes=9-0",
        "bytes=a-b",
        "bytes=--5",
        "bytes=0-9;20-29",
        "bytes=1.5-2",
        "bytes=\u0660-\u0661",
    ],
)
def test_other_headers_mean_the_whole_file(header):
    assert parse_ranges(header, 100) is None


@pytest.mark.parametrize(
    "header",
    [
        "bytes=100-",
        "bytes=200-300,400-500",
        "bytes=-0",
        "bytes=0-9,5-20",
        "bytes=50-60,0-9",
        "bytes=" + ",".join(["0-"] * 2),
        "bytes=" + ",".join(f"{2 * n}-{2 * n}" for n in range(MOST_RANGES + 1)),
    ],
)
def test_what_no_client_needs_is_refused(header):
    with pytest.raises(UnsatisfiableError):
        parse_ranges(header, 100)


@given(st.text(alphabet="bytes=-, 0123456789x", max_size=60), st.integers(0, 200))
def test_nothing_outside_of_the_file_is_ever_sent(text, n_bytes):
    try:
        found = parse_ranges(f"bytes={text}", n_bytes)
    except UnsatisfiableError:
        return
    at = 0
    for start, stop in found or ():
        assert at <= start < stop <= n_bytes
        at = stop
