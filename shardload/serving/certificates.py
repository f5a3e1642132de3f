"""The certificate of a server, and when it expires."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

from shardload.errors import SourceError

_NO_CHECK_TIME = 0x200000
"""OpenSSL's ``X509_V_FLAG_NO_CHECK_TIME``, which Python has no name for: also of an expired certificate, the end is
told."""
_MOST_STEPS = 8
"""More than a handshake takes."""
_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return what TLS needs; ``key`` is ``None`` if the certificate's file has it.

    Raises:
        SourceError: When the files cannot be read, or do not belong together.
    """
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        found.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise SourceError(
            f"Cannot use the certificate {certificate}: {_what_is_wrong(certificate, key, error)}. --tls-cert takes a "
            "PEM file with the certificates, --tls-key one with the key, without a password"
        ) from error
    return found


def expiry_s(context: ssl.SSLContext, certificate: Path | None) -> float | None:
    """Return when a server's certificate expires, in seconds since 1970; ``None`` if that cannot be told.

    Python reads a certificate that it was shown in a handshake only: there is one here, in memory, with a client that
    trusts this very certificate.
    """
    if certificate is None:
        return None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    with suppress(OSError, ValueError):
        client.load_verify_locations(certificate)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(to_client, to_server)
        answering = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(_MOST_STEPS):
            for side in (asking, answering):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        shown = (asking.getpeercert() or {}).get("notAfter")
        return None if shown is None else float(ssl.cert_time_to_seconds(str(shown)))
    return None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _what_is_wrong(certificate: Path, key: Path | None, error: Exception) -> str:
    """Return why OpenSSL refuses the files, in words: its own are those of a programmer."""
    contents = {}
    for path in filter(None, (certificate, key)):
        try:
            contents[path] = path.read_bytes()
        except OSError as unread:
            return f"{path} cannot be read: {unread.strerror}"
    if _CERTIFICATE not in contents[certificate]:
        return "it contains no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
    if _KEY not in contents[key or certificate]:
        return "it contains no key, and --tls-key names no file" if key is None else f"{key} contains no key"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key belongs to another certificate"
    return "a part of it, or of its key, is damaged" if isinstance(error, ssl.SSLError) else str(error)
