"""Read JSON from untrusted files: bounded in size, without duplicate keys; every error names the file.

Python's parser raises `RecursionError` for deep nesting and `ValueError` for 5000-digit numbers, and keeps the last
of two equal keys; this module raises a `SourceError` for each of these.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from typing import Any

from shardload.errors import ShardloadError, SourceError, TransferError, UnsafeSourceError
from shardload.stores.local import located
from shardload.stores.location import Location
from shardload.stores.store import File, read_bytes
from shardload.units import exact_bytes

MAX_JSON_BYTES = 1 << 25
"""Limit on a JSON file, 32 MiB. The largest known index (hundreds of shards, 90k tensors) has 9 MB, a config 5 MB."""
_MIN_BYTES_PER_CONTAINER = 16
"""JSON text with fewer bytes than this per list or object is refused, as it would take much memory: Python needs 200
bytes for each. Real files have 50 bytes of text for each."""
_FREE_CONTAINERS = 1024
"""How many lists and objects a short JSON text may contain in any case; a longer text may contain more."""
_SMALL_BYTES = 4096
"""JSON objects up to this size in bytes are read at once. Of a larger one, the last bytes are read first: they
must end with the object's closing brace. If not, the file is damaged or contains no JSON, and the rest is not read."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
"""Matches a JSON string with its quotes, whose brackets begin no list or object."""


def read_object(path: str | os.PathLike[str] | Location) -> dict[str, Any]:
    """Read the JSON object in a file; raise a `SourceError` if the file contains anything else."""
    where = located(path)
    name = str(where)
    with closing(where.open()) as file:
        size = file.n_bytes
        if size > MAX_JSON_BYTES:
            raise UnsafeSourceError(
                f"{name} has {exact_bytes(size)}, but a JSON description has at most {exact_bytes(MAX_JSON_BYTES)}. "
                "It is probably another kind of file; download it again"
            )
        require_brace(file, size, path=name, what="the JSON text")
        raw = read_bytes(file, size, offset=0, path=name, what="the JSON text")
    return parse_object(raw, path=name)


def read_optional(path: str | os.PathLike[str] | Location) -> Any:
    """Return the JSON value of a file that may be anything; ``None`` if it is missing, damaged, too big or not JSON."""
    where = located(path)
    try:
        with closing(where.open()) as file:
            # A longer file is cut, and so does not parse.
            size = min(file.n_bytes, MAX_JSON_BYTES)
            return json.loads(read_bytes(file, size, offset=0, path=str(where), what="the JSON text"))
    except (ShardloadError, ValueError, RecursionError) as error:
        if isinstance(error, TransferError):
            raise
        return None


def require_brace(file: File, stop: int, *, path: str, what: str) -> None:
    """Raise unless the JSON object before byte ``stop`` ends with a brace; only a large object is checked.

    This way, a wrong length in a header is found before tensors are read as if they were text.
    """
    if stop <= _SMALL_BYTES:
        return
    end = read_bytes(file, _SMALL_BYTES, offset=stop - _SMALL_BYTES, path=path, what=what).rstrip(b" \t\r\n")
    if end and not end.endswith(b"}"):
        raise SourceError(
            f"{path}: {what} should end with a closing brace, but ends with {end[-8:]!r} before byte {stop}. "
            "It is damaged or another kind of file; download it again"
        )


def parse_object(raw: bytes, *, path: str) -> dict[str, Any]:
    """Parse a JSON object from bytes; messages name ``path`` as their source."""
    allowed = _FREE_CONTAINERS + len(raw) // _MIN_BYTES_PER_CONTAINER
    containers = _containers(raw)
    # Braces in strings cost nothing, and a chat template is full of them. Finding strings is slow, so it comes second.
    if containers > allowed:
        containers -= sum(_containers(text[0]) for text in _TEXT.finditer(raw))
    if containers > allowed:
        raise UnsafeSourceError(
            f"Cannot parse {path}: it contains {containers} brackets and braces in {exact_bytes(len(raw))} of JSON, "
            f"expected at most {allowed}; parsed, they would take many times that memory. Download it again"
        )
    try:
        # Like `json.loads` on bytes, accept a byte order mark.
        text = raw.decode("utf-8-sig")
        del raw
        found = json.loads(text, object_pairs_hook=unique_pairs)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} should contain JSON in UTF-8, but byte {error.start} is not UTF-8. Download it again"
        ) from error
    except RecursionError as error:
        raise UnsafeSourceError(f"Cannot parse {path}: its JSON is nested too deeply. Download it again") from error
    except ValueError as error:
        raise SourceError(f"{path} should contain JSON, but does not parse: {error}. Download it again") from error
    if not isinstance(found, dict):
        raise SourceError(
            f"{path} should contain a JSON object, but contains a {type(found).__name__}. Download it again"
        )
    return found


def _containers(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[")


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; refuse duplicate keys. An `object_pairs_hook` for `json.loads`."""
    found = dict(pairs)
    # Which key it is, is looked up for the message only.
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} appears twice")
    return found
