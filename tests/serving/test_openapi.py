"""The description of the addresses says what there is, and what is answered."""

import json
import re

import pytest
from safetensors.numpy import save_file
from serving import served

from shardload.serving.application import Access, Service
from shardload.serving.openapi import document
from shardload.serving.roots.catalogue import Catalogue


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "other").mkdir()
    save_file({}, tmp_path / "models" / "model.safetensors")
    return tmp_path


def test_every_address_is_described(root):
    routes = Service(Catalogue([root]), Access(), lambda facts: None).application().router.resources()
    paths = {re.sub(r"\{(key|name)\}", "{path}", each.canonical) for each in routes}
    assert paths | {"/"} == document()["paths"].keys()


CASES = [
    *(
        (path, {})
        for path in (
            "/",
            "/healthz",
            "/readyz",
            "/metrics",
            "/openapi.json",
            "/api/v1/server",
            "/api/v1/loads",
            "/api/v1/cache",
        )
    ),
    *((path, {}) for path in ("/api/v1/checkpoints", "/models", "/models/", "/missing")),
    *(
        (f"/ui/{name}", {})
        for name in ("site.css", "site.js", "table.js", "icon.svg", "loads", "jobs", "cache", "sign-in")
    ),
    ("/", {"Accept": "application/json"}),
    ("/models/", {"Accept": "application/json"}),
    *(("/models/model.safetensors", {"Range": ranges}) for ranges in ("bytes=0-", "bytes=0-0,2-2", "bytes=1000-")),
    *(("/models/model.safetensors", {name: '"x"'}) for name in ("If-Match", "If-None-Match", "If-Range")),
    ("/models/model.safetensors", {"If-None-Match": "*"}),
    *((f"/ui/checkpoints/{name}", {}) for name in ("models", "models/missing")),
    *((f"/ui/plans/models{query}", {}) for query in ("", "?mesh=0x8")),
    *((f"/api/v1/checkpoints/models/{name}", {}) for name in ("plan?mesh=x", "missing/plan")),
    *((f"/api/v1/checkpoints/{name}/tensors", {}) for name in ("models", "models/missing")),
    *((path, {"Host": "evil.example"}) for path in ("/", "/metrics", "/models/model.safetensors")),
]


def _described(path, paths):
    """The path of the document that one with a name in it is for."""
    named = [each for each in paths if re.fullmatch(each.replace("{path}", ".+"), path)]
    return max(named, key=len)


def test_answers_are_as_described(root):
    """`make schemathesis` does this with a thousand requests that nobody thought of."""
    with served("--root", root) as server:
        told = json.loads(server.get("/openapi.json")[2])
        assert told == document()
        for path, headers in CASES:
            described = told["paths"][_described(path.partition("?")[0], told["paths"])]["get"]["responses"]
            status, found, _ = server.get(path, **headers)
            answer = described[str(status)]
            kind = found.get_content_type()
            assert kind in answer.get("content", {kind: None}), (path, headers)
