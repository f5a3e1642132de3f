"""The client of a remote store, obstore, set up for an address: endpoint, region, certificates and credentials.

Credentials come from the standard places of each cloud, never from an address or an argument::

    s3://   AWS_* variables; a web identity, container or instance role; else a profile in ~/.aws (boto3 reads it)
    gs://   GOOGLE_* variables, the key file or gcloud's default login, the instance's service account
    http    a token for each server, from the file that SHARDLOAD_TOKENS names (`shardload.stores.tokens`)

obstore repeats nothing by itself: `shardload.stores.requests` does, because it knows since when a piece is asked for.
Only the parts of a large object that is written are repeated by obstore, which alone knows them.
Redirects are followed, but never from https to http.
"""

from __future__ import annotations

import configparser
import functools
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from shardload.errors import MissingExtraError, ShardloadError, SourceError, UnsupportedError
from shardload.stores.local import home

_CERTIFICATES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables that name a file of certificates to trust, in addition to those of the system."""
_GOOGLE_KEYS = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY")
"""Variables that name the key of a service account of Google."""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
}
"""Variables with the address of a server to use as S3 or Google Cloud Storage; the first one counts."""
_SENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
"""Variables whose text is sent to S3."""
_REGION_S = 5.0
"""How long to wait for S3 to say in which region a bucket is."""
_AWS_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables by which obstore finds credentials itself, so that no profile is looked for."""


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a URL of a remote store."""

    root: str
    """Scheme with bucket or server: ``s3://bucket``, ``https://host:8080``."""
    path: str
    """Path below it, decoded, without a slash at either end."""
    query: str = ""
    """What follows ``?`` in an HTTP address: most often a signature, so no message shows it."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Split a URL into its parts; raise if it cannot be one of a store."""
        scheme, _, rest = url.partition("://")
        scheme = scheme.lower()
        place, _, path = rest.partition("/")
        query = ""
        if scheme.startswith("http"):
            try:
                parts = urlsplit(url)
            except ValueError as error:
                raise SourceError(f"Cannot read {url.partition('?')[0]}: {error}. Check the address") from error
            if parts.username is not None or parts.password is not None:
                raise UnsupportedError(f"Cannot read {url}: an HTTP address may not contain a user or a password")
            place, path, query = parts.netloc, unquote(parts.path.removeprefix("/")), parts.query
        if not place:
            raise SourceError(
                f"{url} names no {'server' if scheme.startswith('http') else 'bucket'}. Check the address"
            )
        path = path.rstrip("/")
        # HTTP clients and servers may resolve such parts, and so leave the folder.
        if "\0" in path or (path and not set(path.split("/")).isdisjoint({"", ".", ".."})):
            raise UnsupportedError(f"{url} has '.', '..' or nothing between slashes, which is not a name in a store")
        return cls(f"{scheme}://{place}", path, query)

    @property
    def scheme(self) -> str:
        """Scheme of the URL, in lower case."""
        return self.root.partition("://")[0]

    @property
    def is_http(self) -> bool:
        """Whether it is an HTTP server, which cannot list what it has."""
        return self.scheme in ("http", "https")

    @property
    def url(self) -> str:
        """The URL for messages, without what follows ``?``."""
        return f"{self.root}/{self.path}".rstrip("/")


def is_bucket(target: object) -> bool:
    """Whether a user wants to write to a bucket: to an address at s3:// or gs://."""
    scheme, separator, _ = target.partition("://") if isinstance(target, str) else ("", "", "")
    return bool(separator) and scheme.lower() in ("s3", "gs")


def directly_reached(root: str) -> tuple[str, int | None] | None:
    """Return host and port of a server at ``http://``, to which neither TLS nor a proxy leads; ``None`` for others."""
    parts, proxies = urlsplit(root), urllib.request.getproxies()
    is_direct = proxies.keys().isdisjoint({"http", "all"}) or urllib.request.proxy_bypass(parts.netloc)
    return (parts.hostname, parts.port) if parts.scheme == "http" and parts.hostname and is_direct else None


def endpoint_of(scheme: str) -> str | None:
    """Return the address of the server to use as S3 or Google Cloud Storage, if the environment sets one."""
    name = next((name for name in _ENDPOINTS.get(scheme, ()) if os.environ.get(name)), None)
    if name is None:
        return None
    # Without a scheme as the clients of Google read STORAGE_EMULATOR_HOST.
    found = os.environ[name] if "://" in os.environ[name] else f"http://{os.environ[name]}"
    try:
        parts = urlsplit(found)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or " " in found:
        raise SourceError(f"{name} is {os.environ[name]!r}, expected the address of a server, such as http://host:9000")
    return found.rstrip("/")


def _check_settings(scheme: str) -> None:
    """Raise if obstore would abort a request because of a setting that it reads from the environment."""
    endpoints = _ENDPOINTS.get(scheme, ())
    for name in (*endpoints, *(_SENT if scheme == "s3" else ())):
        found = os.environ.get(name)
        if found is not None and not found.isprintable():
            raise SourceError(f"{name} has a line break or another control character. Set it again without it")
        if found == "" and name in endpoints and scheme == "s3":
            raise SourceError(f"{name} is empty, expected the address of a server. Unset it")


def client(
    address: Address, *, stall_s: float, headers: dict[str, str] | None = None, repeating_s: float | None = None
) -> Any:
    """Return obstore's client for a bucket or a server; paths given to it begin there.

    Args:
        address: Of anything in the bucket or on the server.
        stall_s: Seconds after which a connection that sends nothing counts as failed.
        headers: Sent with each request to an HTTP server, but not to where it redirects.
        repeating_s: For how many seconds obstore itself repeats a failed request, as for a part of an object that is
            uploaded in parts; by default it repeats none.
    """
    from obstore.store import GCSStore, HTTPStore, S3Store

    _check_settings(address.scheme)
    endpoint = endpoint_of(address.scheme) or address.root
    options: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": f"{max(1, min(10, int(stall_s)))}s",
        "read_timeout": f"{max(1, int(stall_s * 1000))}ms",
        "timeout": "1h",
        "pool_max_idle_per_host": "64",
        "default_headers": dict(headers or {}),
        "user_agent": "shardload",
    }
    if certificates := next((name for name in _CERTIFICATES if os.environ.get(name)), None):
        options["root_certificate"] = _certificates(certificates)
    common: dict[str, Any] = {"client_options": options, "retry_config": _repeating(repeating_s)}
    bucket = address.root.partition("://")[2]
    try:
        match address.scheme:
            case "s3":
                return S3Store(bucket, **_s3(bucket), **common)
            case "gs":
                return GCSStore(bucket, **_gs(), **common)
        return HTTPStore(address.root + (f"?{address.query}" if address.query else ""), **common)
    except ShardloadError:
        raise
    except Exception as error:  # obstore's own kinds, and ValueError
        [said, *_] = str(error).splitlines() or [""]
        named = next((name for name in _GOOGLE_KEYS if os.environ.get(name)), None)
        if address.scheme == "gs" and named is not None:
            said = said.removeprefix("Generic GCS error: ")
            raise SourceError(
                f"Cannot get credentials for {address.url} from the file that {named} names: {said}. Give the JSON "
                "file of a service account, or run: gcloud auth application-default login"
            ) from error
        raise SourceError(f"Cannot read from {address.url}: {said}. Check the address and the credentials") from error


def _repeating(repeating_s: float | None) -> dict[str, Any]:
    if repeating_s is None:
        return {"max_retries": 0}
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=4), "base": 2}
    return {"max_retries": 1000, "retry_timeout": timedelta(seconds=repeating_s), "backoff": backoff}


def _s3(bucket: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    endpoint = endpoint_of("s3")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint is not None:
        config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    if is_anonymous():
        config["skip_signature"] = True
    elif not any(os.environ.get(name) for name in _AWS_KEYS):
        profile = _profile()
        region = region or profile.pop("region", None)
        config |= profile
    config["region"] = region or (_region_of(bucket) if endpoint is None else None) or "us-east-1"
    return config


def is_anonymous() -> bool:
    """Whether requests to S3 are to be sent without a signature, as for a public bucket."""
    return os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true")


def _profile() -> dict[str, Any]:
    """Return the settings for S3 of the profile in ~/.aws: a provider that renews credentials, or a fixed key.

    Empty if there is no such profile: obstore then asks the instance it runs on.
    """
    name = os.environ.get("AWS_PROFILE") or "default"
    folder = (home() or Path(os.devnull)) / ".aws"
    credentials = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials")
    config = Path(os.environ.get("AWS_CONFIG_FILE") or folder / "config")
    settings = configparser.RawConfigParser()
    settings.read([config, credentials])
    sections = [section for section in (name, f"profile {name}") if settings.has_section(section)]
    found: dict[str, str] = {}
    for section in sections:
        found |= dict(settings.items(section))
    if not found:
        if os.environ.get("AWS_PROFILE"):
            raise SourceError(f"There is no profile {name!r} in {credentials} or {config}. Check AWS_PROFILE")
        return {}
    region = {"region": found["region"]} if found.get("region") else {}
    if found.get("aws_access_key_id") and found.get("aws_secret_access_key"):
        token = found.get("aws_session_token")
        keys = {"access_key_id": found["aws_access_key_id"], "secret_access_key": found["aws_secret_access_key"]}
        return region | keys | ({"session_token": token} if token else {})
    if not any(key in found for key in ("sso_session", "sso_start_url", "role_arn", "credential_process")):
        return region
    # Logins that expire: only boto3 knows how to renew them.
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for=f"the AWS profile {name}", extra="s3") from error
    try:
        return region | {"credential_provider": Boto3CredentialProvider(Session(profile_name=name))}
    except Exception as error:  # of botocore, and of the system for a program that cannot be started
        [said, *_] = str(error).splitlines() or [""]
        raise SourceError(
            f"Cannot get credentials for S3 from the AWS profile {name!r} in {config}: {said}. Mend the profile "
            f"(try it: aws sts get-caller-identity --profile {name}), or set AWS_PROFILE to another one"
        ) from error


@functools.cache
def _region_of(bucket: str) -> str | None:
    """Ask S3 for the region of a bucket, which it says to everyone; ``None`` if it cannot be asked."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_REGION_S) as answer:
            found: str | None = answer.headers.get("x-amz-bucket-region")
            return found
    except urllib.error.HTTPError as error:  # 301 and 403 say it, too
        return error.headers.get("x-amz-bucket-region")
    except (OSError, ValueError):
        return None


def _gs() -> dict[str, Any]:
    endpoint = endpoint_of("gs")
    found: dict[str, Any] = {} if endpoint is None else {"base_url": endpoint}
    has_key = any(os.environ.get(name) for name in _GOOGLE_KEYS)
    if endpoint is not None and not has_key:
        # An emulator, which needs no signature. obstore omits it from reads only: with writes, it sends what it gets.
        found |= {"skip_signature": True, "credential_provider": _no_credentials}
    return found


def _no_credentials() -> dict[str, Any]:
    return {"token": "none", "expires_at": None}


def certificates_file() -> str | None:
    """Return the file of certificates that the environment names, if it names one."""
    return next((path for name in _CERTIFICATES if (path := os.environ.get(name))), None)


def _certificates(variable: str) -> bytes:
    path = os.environ[variable]
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError(f"Cannot read the certificates that {variable} names, {path}: {error.strerror}") from error
