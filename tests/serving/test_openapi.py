"""The description of the addresses says what there is, and what is answered."""

import json
import re

import pytest
from safetensors.numpy import save_file
from serving import served

from shardload.serving.application import Access, Service
from shardload.serving.catalogue import Catalogue
from shardload.serving.openapi import document


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "other").mkdir()
    save_file({}, tmp_path / "models" / "model.safetensors")
    return tmp_path


def test_every_address_is_described(root):
    routes = Service(Catalogue([root]), Access(), lambda facts: None).application().router.resources()
    paths = {re.sub(r"\{key.*\}", "{path}", each.canonical) for each in routes}
    assert paths | {"/"} == document()["paths"].keys()


CASES = [
    *((path, {}) for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/api/v1/server")),
    *((path, {}) for path in ("/api/v1/checkpoints", "/api/v1/style.css", "/models", "/models/", "/missing")),
    ("/", {"Accept": "application/json"}),
    ("/models/", {"Accept": "application/json"}),
    *(("/models/model.safetensors", {"Range": ranges}) for ranges in ("bytes=0-", "bytes=0-0,2-2", "bytes=1000-")),
    *(("/models/model.safetensors", {name: '"x"'}) for name in ("If-Match", "If-None-Match", "If-Range")),
    ("/models/model.safetensors", {"If-None-Match": "*"}),
    *((path, {"Host": "evil.example"}) for path in ("/", "/metrics", "/models/model.safetensors")),
]


def test_answers_are_as_described(root):
    """`make schemathesis` does this with a thousand requests that nobody thought of."""
    with served("--root", root) as server:
        told = json.loads(server.get("/openapi.json")[2])
        assert told == document()
        for path, headers in CASES:
            described = told["paths"].get(path, told["paths"]["/{path}"])["get"]["responses"]
            status, found, _ = server.get(path, **headers)
            answer = described[str(status)]
            kind = found.get_content_type()
            assert kind in answer.get("content", {kind: None}), (path, headers)
