"""What Prometheus is told of the state of a server: its version, process, cache, jobs, peers, roots and certificate."""

import contextlib
import json
import re
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from object_server import ObjectServer
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file
from serving import eventually, served

import shardload
from shardload.errors import SourceError
from shardload.serving.certificates import expiry_s, server_context

FILE = "/m/model.safetensors"
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "monitor-a-server.md"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "bucket" / "models"
    (made / "m").mkdir(parents=True)
    save_file({"x": np.arange(9 << 20, dtype=np.uint8)}, made / "m" / "model.safetensors")
    return made


@pytest.fixture
def bucket(folder):
    with contextlib.closing(ObjectServer(folder.parent)) as server:
        yield server


def samples(text):
    """Name and labels → value of all samples."""
    found = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in found for each in family.samples}


def told(server, **headers):
    return samples(server.get("/metrics", **headers)[2].decode())


def test_a_server_of_an_address(bucket, folder, tmp_path):
    n_bytes = (folder / FILE[1:]).stat().st_size
    options = ("--cache", tmp_path / "cache", "--cache-size", "1GiB", "--peer", "http://127.0.0.1:1")
    with served("--root", "s3://bucket/models", *options, env=bucket.environment()) as server:
        server.get(FILE)
        assert server.get(FILE, Range=f"bytes=0-{(8 << 20) - 1}", Shardload_Peer="look")[0] == 206
        found = told(server)
        assert found["shardload_build_info", shardload.__version__] == 1
        assert found["process_resident_memory_bytes",] > 1 << 20 and found["process_open_fds",] > 3
        assert found["shardload_cache_limit_bytes",] == 1 << 30 and found["shardload_cache_up",] == 1
        assert found["shardload_sent_bytes_total", "address", "client"] == n_bytes
        assert found["shardload_sent_bytes_total", "address", "peer"] == 8 << 20
        assert found["shardload_root_up", "s3://bucket/models"] == 1
        assert found["shardload_peers", "left out"] == 1 and found["shardload_peers", "reachable"] == 0
        assert ("shardload_certificate_expiry_timestamp_seconds",) not in found
        assert not any("127.0.0.1" in label or "model.safetensors" in label for labels in found for label in labels)
        eventually(lambda: told(server)["shardload_cache_bytes",] >= n_bytes)
        helped = set(re.findall(r"^# HELP (shardload_\w+)", server.get("/metrics")[2].decode(), re.MULTILINE))
        documented = set(re.findall(r"`(shardload_\w+)", HOW_TO.read_text()))
        helped = {name for name in helped if not name.endswith("_created")}
        assert documented == helped | {"shardload_certificate_expiry_timestamp_seconds"}


def test_an_address_that_is_not_reached(bucket):
    bucket.status["models"] = 403
    environment = bucket.environment() | {"SHARDLOAD_REMOTE_TIMEOUT": "1"}
    bucket.close()
    with served("--root", "s3://bucket/models", env=environment) as server:
        assert told(server)["shardload_root_up", "s3://bucket/models"] == 0


def test_jobs_and_damage(folder):
    with served("--root", folder.parent) as server:
        assert told(server)["shardload_jobs", "done"] == told(server)["shardload_damaged_checkpoints",] == 0
        [name] = [each["name"] for each in json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"]]
        path = folder / FILE[1:]
        path.write_bytes(path.read_bytes()[:-1])  # the header tells of more
        body = json.dumps({"kind": "verify", "checkpoint": name})
        assert server.get("/api/v1/jobs", method="POST", body=body, Content_Type="application/json")[0] == 201
        eventually(lambda: told(server)["shardload_jobs", "done"] == 1)
        assert told(server)["shardload_damaged_checkpoints",] == 1


def test_when_the_certificate_expires(folder, certificate):
    path = Path(certificate.options[1])
    shown = subprocess.run(
        ["openssl", "x509", "-in", path, "-noout", "-enddate"], check=True, capture_output=True, text=True
    )
    expected = ssl.cert_time_to_seconds(shown.stdout.strip().partition("=")[2])
    context = ssl.create_default_context(cafile=certificate.path)
    with (
        served("--root", folder, *certificate.options) as server,
        urllib.request.urlopen(f"{server.address}/metrics", context=context, timeout=30) as answer,
    ):
        assert samples(answer.read().decode())["shardload_certificate_expiry_timestamp_seconds",] == expected


def signed_for(days, folder):
    """A certificate that signs itself, and its key."""
    asked, made = folder / "own.csr", (folder / "own.pem", folder / "own.key")
    for command in (
        ["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", made[1], "-out", asked],
        ["x509", "-req", "-in", asked, "-signkey", made[1], "-days", str(days), "-out", made[0]],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return made


def test_an_expired_certificate_still_tells_its_end(certificate, tmp_path):
    path, key = signed_for(0, tmp_path)
    assert expiry_s(server_context(path, key), path) <= time.time()


def test_a_certificate_that_cannot_be_used_is_told_in_words(certificate, tmp_path):
    own, key = signed_for(2, tmp_path)
    other_key = Path(certificate.options[3])
    (tmp_path / "none.pem").write_text("no certificate")
    (tmp_path / "damaged.pem").write_text(own.read_text().replace("MII", "AAA") + key.read_text())
    for given, given_key, said in [
        (tmp_path / "missing.pem", None, "missing.pem cannot be read: No such file"),
        (tmp_path / "none.pem", None, "contains no certificate in PEM form"),
        (own, None, "it contains no key, and --tls-key names no file"),
        (own, tmp_path / "none.pem", "none.pem contains no key"),
        (own, other_key, "the key belongs to another certificate"),
        (tmp_path / "damaged.pem", None, "is damaged"),
    ]:
        with pytest.raises(SourceError, match=said) as refused:
            server_context(given, given_key)
        assert "PEM lib" not in str(refused.value) and "--tls-cert takes" in str(refused.value)
