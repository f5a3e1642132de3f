"""Bearer tokens for HTTP servers, from the file that the environment variable SHARDLOAD_TOKENS names.

    # one line per server: its address, a space, its token
    https://host:8600 EXAMPLE-k3v9Zt0sWq7LmB2x

A token is sent to the server of its line alone: to the same scheme, host and port, not to others to which it redirects.
Only the user, and the file's group, may be able to read the file. An error names file and line, but shows nothing of
the line: what is in the place of an address may be a token.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
from dataclasses import dataclass, field

from shardload.errors import SourceError, SourceNotFoundError
from shardload.stores.local import expanded, open_readonly
from shardload.units import exact_bytes, plural

TOKENS_VARIABLE = "SHARDLOAD_TOKENS"
_MAX_FILE_BYTES = 1 << 20
"""Longest file that is read: the variable may name a checkpoint by mistake."""
_MODES_REFUSED = 0o027
_ORIGIN = re.compile(r"(https?)://(\[[\da-f:.]+\]|[^\s/?#@:\\\[\]%]+)(?::(\d{0,5}))?/?", re.ASCII | re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
_FORM = "https://host:8600 TOKEN"


@dataclass(frozen=True, slots=True)
class BearerToken:
    """The token for one HTTP server."""

    origin: str
    """Scheme, host and port of the server."""
    text: str = field(repr=False)
    """The token itself, which no message shows."""

    @property
    def headers(self) -> dict[str, str]:
        """The header that gives the token to its server."""
        return {"authorization": f"Bearer {self.text}"}


def origin_of(address: str) -> str | None:
    """Return scheme, host and port of an HTTP server in one form; ``None`` if the address has more, or is another."""
    if (parts := _ORIGIN.fullmatch(address)) is None:
        return None
    scheme, host = parts[1].lower(), parts[2].lower()
    port = int(parts[3] or _PORTS[scheme])
    if not 0 < port < 1 << 16:
        return None
    return f"{scheme}://{host}" if port == _PORTS[scheme] else f"{scheme}://{host}:{port}"


def token_for(root: str) -> BearerToken | None:
    """Return the token for the HTTP server at an address, if the file that the environment names has one.

    Raises:
        SourceError: When the file cannot be read, others may read it, or a line cannot be parsed.
    """
    path = os.environ.get(TOKENS_VARIABLE)
    if not path:
        return None
    found: dict[str, BearerToken] = {}
    lines: dict[str, int] = {}
    # No variable here has the text of a line: tools that report errors show the variables of a function that raises.
    content = private_content(path, named_by=TOKENS_VARIABLE)
    for number, parsed in enumerate(map(_parsed, content.split(b"\n")), 1):
        match parsed:
            case BearerToken() if parsed.origin not in found:
                found[parsed.origin], lines[parsed.origin] = parsed, number
            case BearerToken():
                raise _line_error(path, number, f"line {lines[parsed.origin]} is for this server, too. Remove one")
            case str():
                raise _line_error(path, number, parsed)
    origin = origin_of(root)
    return None if origin is None else found.get(origin)


def token_advice(root: str, *, was_sent: bool) -> str:
    """Return what to do about a server that refuses access, in words; ``root`` is its address without a path."""
    origin, path = origin_of(root) or root, os.environ.get(TOKENS_VARIABLE)
    if was_sent:
        return (
            f"The server refused the token for {origin} in {path}: correct it there. (If the server redirects to "
            "another one, that one gets no token)"
        )
    line = f"No token was sent: if the server takes one, write the line '{origin} TOKEN'"
    where = (
        f"to {path}, which {TOKENS_VARIABLE} names"
        if path
        else f"to a file that only you may read (chmod 600), and set {TOKENS_VARIABLE} to its path"
    )
    return f"{line} {where}. Otherwise copy it to this machine first"


def _parsed(line: bytes) -> BearerToken | str | None:
    """Return the token in a line, what is wrong with the line, or ``None`` if it is blank or a comment."""
    words = line.split()
    if not words or words[0].startswith(b"#"):
        return None
    if len(words) != 2:
        return f"found {plural(len(words), 'word')}, expected two: {_FORM}"
    if (origin := origin_of(words[0].decode("utf-8", errors="replace"))) is None:
        return (
            "its first word is not the address of an HTTP server: expected http:// or https://, the host and perhaps "
            f"a port, but no path, user or query: {_FORM}"
        )
    if not all(0x21 <= byte <= 0x7E for byte in words[1]):
        return "its token has a character that is not printable ASCII. Correct the token"
    return BearerToken(origin, words[1].decode("ascii"))


def private_content(path: str, *, named_by: str) -> bytes:
    """Return the content of a file of tokens; ``named_by`` is the variable or option that names it, for messages.

    Raises:
        SourceError: When the file cannot be read, is too long for tokens, or users outside of its group may read it.
            The group may: so are secrets mounted for a program that is not root.
    """
    try:
        descriptor = open_readonly(expanded(path))
    except SourceNotFoundError as error:
        raise SourceError(
            f"Cannot read the tokens that {named_by} names: There is no file {path}. Check the path, or create it"
        ) from error
    except SourceError as error:
        raise SourceError(f"Cannot read the tokens that {named_by} names: {error}") from error
    with os.fdopen(descriptor, "rb") as file:
        # Of the open file, not of its name, which may be given to another file meanwhile.
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & _MODES_REFUSED:
            raise SourceError(
                f"Cannot use the tokens in {path}, which {named_by} names: its mode is {mode:03o}, so that "
                f"others may read or change it, expected 600. Run: chmod 600 {shlex.quote(str(expanded(path)))}"
            )
        try:
            found = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise SourceError(f"Cannot read the tokens in {path}, which {named_by} names: {error.strerror}") from error
    if len(found) > _MAX_FILE_BYTES:
        raise SourceError(
            f"Cannot use {path}, which {named_by} names, as a file of tokens: it has more than "
            f"{exact_bytes(_MAX_FILE_BYTES)}. Name a file with a token in each line"
        )
    return found.removeprefix(codecs.BOM_UTF8)


def _line_error(path: str, number: int, said: str) -> SourceError:
    return SourceError(f"Cannot use line {number} of {path}, which {TOKENS_VARIABLE} names: {said}")
