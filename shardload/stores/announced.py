"""Ask `shardload serve` for the steps of a training run, and be told of new ones at once."""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote

from shardload.stores.answers import opened
from shardload.stores.requests import Requests

RUNS_PATH = "api/v1/runs"
"""Where a server tells the steps of a run, below its address."""
RESERVED = ("api", "healthz", "readyz", "metrics", "openapi.json", "ui")
"""Names directly below a server's address that are its own: what has one of them is not served."""
_MORE_S = 10.0
"""Seconds that an answer may take besides the time that it is to wait."""


def steps_tag(requests: Requests, key: str, *, known: str | None = None, wait_s: int = 0) -> str | None:
    """Return text that changes with the steps of a run; ``None`` if no `shardload serve` answers there, or has no run.

    If it is ``known``, the answer comes once it changes, or after ``wait_s`` seconds.
    """
    if not requests.address.is_http or not key:
        return None
    headers: Mapping[str, str] = {} if requests.token is None else requests.token.headers
    if known is not None:
        headers = {**headers, "If-None-Match": known, "Prefer": f"wait={wait_s}"}
    address = f"{requests.address.root}/{RUNS_PATH}/{quote(key)}"
    with suppress(OSError, ValueError, http.client.HTTPException):
        try:
            with opened(address, headers=headers, timeout_s=wait_s + _MORE_S) as answer:
                is_list = answer.headers.get_content_type() == "application/json"
                return str(answer.headers.get("ETag") or "") or None if is_list else None
        except urllib.error.HTTPError as error:
            with error:
                return known if error.code == 304 else None
    return None
