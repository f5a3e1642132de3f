"""What aiohttp says in Python's log, as lines of the server's own log.

It writes many lines for each client that leaves, and for all bytes that are no request: anyone could fill a disk.
"""

from __future__ import annotations

import logging
import traceback

from aiohttp.http_exceptions import HttpProcessingError

from shardload.errors import public_name
from shardload.serving.application import Service

_LEFT = (ConnectionError, TimeoutError)
"""Errors of a client that leaves or stalls: the line of its request says it."""


class _Lines(logging.Handler):
    def __init__(self, service: Service) -> None:
        super().__init__(logging.ERROR)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, if it says more than the lines of requests do."""
        error = record.exc_info[1] if record.exc_info else None
        client = str(record.args[0]) if isinstance(record.args, tuple) and record.args else "-"
        match error:
            case HttpProcessingError():
                # Its text quotes what was sent, and with that perhaps a token.
                self._service.note_error("bad request", client, public_name(error))
            case None:  # the end of a request that stalled
                pass
            case _ if isinstance(error, _LEFT):
                pass
            case _:
                where = traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:])
                self._service.note_error("server", client, f"{public_name(error)}: {error}\n{''.join(where)}")


def server_log(service: Service) -> logging.Logger:
    """Return a logger for aiohttp's server, whose records become lines of the service's log."""
    found = logging.Logger("shardload.serving")  # none that a program could have set up
    found.addHandler(_Lines(service))
    return found
