"""Which bytes of a file a request asks for: the header ``Range`` of HTTP (RFC 9110, section 14)."""

from __future__ import annotations

import itertools
import re

MOST_RANGES = 256
"""Most ranges of one request."""
_RANGE = re.compile(r"(\d{1,19})-(\d{0,19})|-(\d{1,19})", re.ASCII)


class UnsatisfiableError(ValueError):
    """Raised when a file has none of the bytes that are asked for, or a header asks for too many ranges."""


def parse_ranges(header: str | None, n_bytes: int) -> list[tuple[int, int]] | None:
    """Return the half-open ranges that a header asks for; ``None`` for the whole file.

    Ranges past the end are cut there. A header of another form is passed over, as HTTP wants it.

    Raises:
        UnsatisfiableError: When all ranges are past the end, or they are too many, overlap or go backwards: such
            requests make a server send far more than the file has.
    """
    unit, separator, value = (header or "").partition("=")
    if not separator or unit.strip().lower() != "bytes":
        return None
    texts = [text.strip() for text in value.split(",")]
    if len(texts) > MOST_RANGES:
        raise UnsatisfiableError(f"expected at most {MOST_RANGES} ranges")
    found: list[tuple[int, int]] = []
    for text in texts:
        if (match := _RANGE.fullmatch(text, 0)) is None:
            return None
        first, last, suffix = match.groups()
        if suffix is not None:
            start, stop = max(0, n_bytes - int(suffix)), n_bytes
        else:
            start, stop = int(first), int(last) + 1 if last else n_bytes
            if last and stop <= start:
                return None
        if start < min(stop, n_bytes):
            found.append((start, min(stop, n_bytes)))
    if not found:
        raise UnsatisfiableError("the file is shorter")
    if any(after[0] < before[1] for before, after in itertools.pairwise(found)):
        raise UnsatisfiableError("expected ranges in ascending order, without overlap")
    return found
