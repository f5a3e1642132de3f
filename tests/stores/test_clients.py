"""Clients of remote stores: what they take from the environment."""

import sys

import pytest

from shardload.errors import SourceError, UnsupportedError
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


def test_an_endpoint_of_another_store_is_used(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/")
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "YES")
    config = made("s3://bucket/a").config
    assert config["endpoint"] == "http://127.0.0.1:9000"
    assert config["skip_signature"] in (True, "true")


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
