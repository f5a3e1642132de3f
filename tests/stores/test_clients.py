"""Clients of remote stores: what they take from the environment."""

import errno
import sys

import pytest

from shardload.errors import SourceError, TransferError, UnsupportedError
from shardload.stores.answers import FailedTry, failure, write_failure
from shardload.stores.clients import Address, client


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No setting of this machine, and none of its user."""
    for name in (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
        "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE", "STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL", "AWS_NO_SIGN_REQUEST",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


def made(url):
    return client(Address.parse(url), stall_s=30)


def test_a_profile_with_a_key_is_read(bare, monkeypatch):
    (bare / "credentials").write_text("[work]\naws_access_key_id = AKID\naws_secret_access_key = secret\n")
    (bare / "config").write_text("[profile work]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    config = made("s3://bucket/a").config
    assert (config["access_key_id"], config["region"]) == ("AKID", "eu-north-1")


def test_a_profile_that_logs_in_is_renewed_by_boto3(bare, monkeypatch):
    answer = '{"Version": 1, "AccessKeyId": "FROMPROCESS", "SecretAccessKey": "s", "SessionToken": "t"}'
    program = bare / "login.py"
    program.write_text(f"print({answer!r})")
    (bare / "config").write_text(
        f"[profile work]\ncredential_process = {sys.executable} {program}\nregion = eu-north-1\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert made("s3://bucket/a").credential_provider()["access_key_id"] == "FROMPROCESS"


def test_a_profile_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(SourceError, match=r"There is no profile 'nobody' in .*Check AWS_PROFILE"):
        made("s3://bucket/a")


@pytest.mark.parametrize(
    ("program", "said"), [("/nonexistent/login", "No such file"), ("/bin/false", "custom-process")]
)
def test_a_profile_whose_program_fails_is_named(bare, monkeypatch, program, said):
    (bare / "config").write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    source = (
        rf"Cannot get credentials for S3 from the AWS profile 'default' in {bare}/config: .*{said}.*Mend the profile"
    )
    with pytest.raises(SourceError, match=source):
        made("s3://bucket/a")


def test_a_bad_key_of_a_service_account_is_named(bare, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(bare / "key.json"))
    for content in (None, "no JSON"):
        if content is not None:
            (bare / "key.json").write_text(content)
        with pytest.raises(SourceError, match="from the file that GOOGLE_APPLICATION_CREDENTIALS names: Unable to"):
            made("gs://bucket/a")


METADATA = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 2ms - "
CONNECTION = 'HTTP error: error sending request\n\nDebug source:\nreqwest::Error { message: "Connection refused" }'
REFUSED = "Server returned non-2xx status code: 403 Forbidden: no"


@pytest.mark.parametrize(
    ("text", "source", "is_passing"),
    [
        (METADATA + CONNECTION, "this machine's metadata", True),
        (METADATA + REFUSED, "this machine's metadata", False),
        ("Error performing GET http://metadata.google.internal/computeMetadata/v1/instance/x in 1ms - " + REFUSED,
         "this machine's metadata server", False),
        ("Generic S3 error: Failed to read token file '/t': No such file", "the token that AWS_WEB_IDENTITY", False),
        ("Error performing GET http://127.0.0.1:9/bucket/a in 2ms - " + REFUSED, "", False),
    ],
)  # fmt: skip
def test_a_source_of_credentials_that_fails_is_not_the_store(text, source, is_passing):
    failed = FailedTry.of(OSError(text))
    assert failed.credentials.startswith(source) and bool(failed.credentials) == bool(source)
    assert failed.is_passing == is_passing
    if source:
        begin = rf"^Cannot get credentials for s3://bucket/a from {source}.*: .*AWS_PROFILE"
        with pytest.raises(TransferError, match=begin):
            raise failure("s3://bucket", "a", failed)
        assert write_failure("s3://bucket", "a", failed, doing="written").errno == errno.EACCES


@pytest.mark.parametrize(("status", "is_passing"), [(500, True), (501, False), (503, True)])
def test_what_a_server_cannot_do_is_not_repeated(status, is_passing):
    assert FailedTry.of(OSError(f"Server returned non-2xx status code: {status} x: ")).is_passing == is_passing


def test_an_endpoint_of_another_store_is_used(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/")
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "YES")
    config = made("s3://bucket/a").config
    assert config["endpoint"] == "http://127.0.0.1:9000"
    assert config["skip_signature"] in (True, "true")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("AWS_ACCESS_KEY_ID", "key\n", "AWS_ACCESS_KEY_ID has a line break"),  # from a secret of Kubernetes
        ("AWS_SESSION_TOKEN", "a\tb", "AWS_SESSION_TOKEN has a line break or another control character"),
        ("AWS_ENDPOINT_URL", "http://host:9000\n", "AWS_ENDPOINT_URL has a line break"),
        ("AWS_ENDPOINT_URL_S3", "", "AWS_ENDPOINT_URL_S3 is empty"),
        *(("AWS_ENDPOINT_URL", t, "expected the address") for t in ("http://", "foo bar", "http://h:port", "ftp://h")),
        ("STORAGE_EMULATOR_HOST", "junk junk", "STORAGE_EMULATOR_HOST is 'junk junk', expected the address"),
    ],
)
def test_settings_with_which_no_request_can_be_sent_are_named(monkeypatch, name, text, said):
    monkeypatch.setenv(name, text)
    address = Address.parse("gs://bucket" if name.startswith("STORAGE") else "s3://bucket")
    with pytest.raises(SourceError, match=said):
        client(address, stall_s=1)


def test_certificates_that_are_missing_are_named(monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")
    with pytest.raises(SourceError, match=r"Cannot read the certificates that AWS_CA_BUNDLE names, /nowhere/ca\.pem"):
        made("https://host/a")


@pytest.mark.parametrize("url", ["http://user:word@host/a", "https://host/a/../b", "s3://bucket/a//b", "http://h/%00"])
def test_addresses_that_no_store_should_get_are_refused(url):
    with pytest.raises((UnsupportedError, SourceError)):
        made(url)


def test_what_follows_a_question_mark_is_sent_and_not_shown():
    address = Address.parse("https://host/a%20b/c?X-Signature=secret")
    assert (address.path, address.query, address.url) == ("a b/c", "X-Signature=secret", "https://host/a b/c")
