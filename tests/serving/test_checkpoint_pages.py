"""Pages of the server: everything works without a script, links are those of folders, and no name becomes markup."""

import html
import json
import re
import socket
import ssl
import urllib.request
from html.parser import HTMLParser
from urllib.parse import quote

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
from saved_steps import save_step
from serving import served

from shardload.serving.site.tensor_tree import matching
from shardload.stores.web_folders import links

ODD = 'a "b" <i>&x; ü %20'
NAMES = (
    "</script><script>alert(1)</script>",
    "a\"onmouseover='x' b.\x1b[31m\u202e",
    "<img src=x onerror=alert(1)>",
    "new\nline",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    (made / ODD).mkdir()
    save_file({name: np.zeros(3, np.float32) for name in NAMES}, made / ODD / "model.safetensors")
    blocks = {f"layers.{i}.{name}.weight": np.zeros((4, 8), np.float16) for i in range(50) for name in ("up", "down")}
    save_file({"embed.weight": np.zeros((16, 8), np.float32), **blocks}, made / "blocks.safetensors")
    (made / "broken.safetensors").write_bytes((100).to_bytes(8, "little") + b"{" + b" " * 99)
    for step in (2, 10):
        save_step(keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)]), made / "run", step)
    return made


@pytest.fixture(scope="module")
def server(root):
    with served("--root", root) as found:
        yield found


class Seen(HTMLParser):
    """Collects the tags of a page with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def found(self, tag, name):
        return [attrs.get(name) for each, attrs in self.tags if each == tag and name in attrs]


def seen(server, path, *, status=200):
    found, headers, body = server.get(path)
    assert (found, headers["Content-Type"]) == (status, "text/html; charset=utf-8"), body[:300]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "form-action 'self'" in policy
    page = Seen(body.decode())
    assert all(not name.startswith("on") and name != "style" for _, attrs in page.tags for name in attrs)
    assert "style" not in [tag for tag, _ in page.tags]
    assert set(page.found("script", "src")) <= {"/ui/site.js", "/ui/table.js"}
    assert len(page.found("script", "src")) == [tag for tag, _ in page.tags].count("script")
    return page


def test_the_catalogue_has_every_checkpoint_and_the_links_of_a_folder(server, root):
    page = seen(server, "/")
    for name in (ODD, "blocks.safetensors", "run"):
        assert name in page.text and f"/ui/checkpoints/{quote(name)}" in page.found("a", "href")
    assert "2 steps, the last 10" in page.text
    found = links(server.get("/")[2], server.address)
    assert found == {each.name: each.is_dir() for each in root.iterdir()}


def test_the_catalogue_filters_without_a_script(server):
    page = seen(server, "/?match=SAFE%20blocks")
    assert "blocks.safetensors" in page.text and ODD not in page.text and "1 of 4 checkpoints" in page.text
    assert page.found("input", "value") == ["SAFE blocks"]
    assert 'value="&quot;&gt;&lt;b&gt;"' in server.get("/?match=%22%3E%3Cb%3E")[2].decode()


def test_the_tree_has_every_tensor_with_its_dtype_and_shape(server):
    page = seen(server, "/ui/checkpoints/blocks.safetensors")
    assert [tag for tag, _ in page.tags].count("details") == 51  # layers, and each of them
    assert page.found("span", "class").count("shape") == 101
    assert "embed.weight" in page.text and "16 × 8" in page.text and "float16" in page.text  # noqa: RUF001
    assert "/blocks.safetensors" in page.found("a", "href")


def test_the_tree_filters_and_opens_without_a_script(server):
    page = seen(server, "/ui/checkpoints/blocks.safetensors?match=layers.49%20up")
    assert "1 of 101 tensors" in page.text and page.found("span", "class").count("shape") == 1
    page = seen(server, "/ui/checkpoints/blocks.safetensors?group=layers.7.")
    assert page.found("span", "class").count("shape") == 2 and "Show all tensors" in page.text
    for query in ("group=nothing", "match=nothing", "group=%00&match=%22"):
        assert "0 of 101 tensors" in seen(server, f"/ui/checkpoints/blocks.safetensors?{query}").text


class CountingTensor(dict):
    """A tensor that counts how often its name is read."""

    n_read = 0

    def __getitem__(self, name):
        self.n_read += name == "name"
        return super().__getitem__(name)


def test_a_filter_reads_each_tensor_once_however_many_words_it_has():
    tensors = [CountingTensor(name=f"layer.{i}", dtype="float32", shape=(2, i), bytes=8 * i) for i in (4, 5)]
    assert matching(tensors, "LAYER " + "a " * 100 + "float32 2") == tensors
    assert [tensor.n_read for tensor in tensors] == [1, 1]
    assert matching(tensors, "layer 5") == tensors[1:]


def test_names_from_files_never_become_markup(server):
    page = seen(server, f"/ui/checkpoints/{quote(ODD)}")
    assert not page.found("img", "src")
    assert "\x1b" not in page.text and "\u202e" not in page.text and r"\x1b[31m\u202e" in page.text
    assert "</script><script>alert(1)</" in page.text and r"new\nline" in page.text
    assert f"/{quote(ODD)}/model.safetensors" in page.found("a", "href")


def test_tensors_as_json_are_what_the_command_says(server, root):
    path = f"/api/v1/checkpoints/{quote(ODD)}/tensors"
    _, headers, body = server.get(path)
    found = json.loads(body)
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["Content-Length"] == server.get(path, method="HEAD")[1]["Content-Length"] == str(len(body))
    assert [tensor["name"] for tensor in found["tensors"]] == sorted(NAMES)
    assert found["source"] == ODD and list(found["files"]) == [f"{ODD}/model.safetensors"]
    assert "127.0.0.1" not in json.dumps(found) and str(root) not in json.dumps(found)


def test_each_step_of_a_run_has_a_page(server):
    page = seen(server, "/ui/checkpoints/run?step=2")
    assert "/run/2/" in " ".join(page.found("a", "href"))
    assert server.get("/ui/checkpoints/run?step=2")[2] == server.get("/ui/checkpoints/run/2")[2]
    assert "/run/10/" in " ".join(seen(server, "/ui/checkpoints/run").found("a", "href"))
    for step in ("3", "-2", "x", "2.0", "٢", "9" * 40):
        assert server.get(f"/ui/checkpoints/run?step={quote(step)}")[0] == 404
        assert server.get(f"/api/v1/checkpoints/run/tensors?step={quote(step)}")[0] == 404


@pytest.mark.parametrize(
    "name", ["missing", "..", "%2e%2e/etc/passwd", "run/3", "run/02", "run/2/x", "blocks.safetensors/x", "%00"]
)
def test_what_is_no_checkpoint_has_no_page(server, name):
    assert server.get(f"/ui/checkpoints/{name}")[0] == 404
    assert server.get(f"/api/v1/checkpoints/{name}/tensors")[0] == 404


def test_a_checkpoint_that_cannot_be_read_says_why(server):
    page = seen(server, "/ui/checkpoints/broken.safetensors", status=422)
    assert "broken.safetensors" in page.text and "127.0.0.1" not in page.text
    status, _, body = server.get("/api/v1/checkpoints/broken.safetensors/tensors")
    assert status == 422 and html.unescape(json.loads(body)["error"]) in page.text
    assert server.get("/healthz")[0] == 200


def test_a_changed_file_has_another_tree(tmp_path):
    (tmp_path / "other").mkdir()
    path = tmp_path / "one.safetensors"
    save_file({"old": np.zeros(3)}, path)
    with served("--root", tmp_path) as server:
        assert "old" in seen(server, "/ui/checkpoints/one.safetensors").text
        save_file({"newer": np.zeros(4)}, tmp_path / "next")
        (tmp_path / "next").replace(path)
        server.get("/one.safetensors", Range="bytes=0-0")  # a file that is opened is looked at
        assert "newer" in seen(server, "/ui/checkpoints/one.safetensors").text


def test_very_many_tensors_are_shown_by_group(tmp_path):
    (tmp_path / "other").mkdir()
    save_file({f"a.{i // 100}.{i % 100}": np.zeros(1, np.int8) for i in range(4200)}, tmp_path / "m.safetensors")
    save_file({f"flat{i}": np.zeros(1, np.int8) for i in range(4001)}, tmp_path / "flat.safetensors")
    with served("--root", tmp_path) as server:
        page = seen(server, "/ui/checkpoints/m.safetensors")
        (more, *rest) = [link for link in page.found("a", "href") if link.startswith("?")]
        assert page.found("span", "class").count("shape") == 4000 and len(rest) == 1
        assert seen(server, f"/ui/checkpoints/m.safetensors{more}").found("span", "class").count("shape") == 100
        assert "and 1 tensor more" in seen(server, "/ui/checkpoints/flat.safetensors").text


def test_pages_of_a_server_with_tokens_and_tls(tmp_path, certificate, root):
    """The process that reads headers has a token of its own, and an address without TLS that nobody else knows."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-this-server\n")
    tokens.chmod(0o600)
    with served("--root", root, "--token-file", tokens) as server:
        given = {"Authorization": "Bearer a-token-of-this-server"}
        assert server.get("/api/v1/checkpoints/run/tensors")[0] == 401
        assert server.get("/api/v1/checkpoints/run/tensors", **given)[0] == 200
    with served("--root", root, "--token-file", tokens, *certificate.options) as server:
        asked = urllib.request.Request(f"{server.address}/api/v1/checkpoints/run/tensors", headers=given)
        context = ssl.create_default_context(cafile=certificate.path)
        with urllib.request.urlopen(asked, context=context) as found:
            assert json.loads(found.read())["format"] == "orbax"


def test_the_process_that_reads_headers_uses_no_proxy_and_no_cache(root, tmp_path):
    """The server's own token must not go anywhere else, whatever the server's environment says."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        named = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), address)
        named |= {"no_proxy": "example.com", "SHARDLOAD_CACHE": str(tmp_path / "cache")}
        with served("--root", root, env=named) as server:
            assert server.get("/api/v1/checkpoints/blocks.safetensors/tensors")[0] == 200
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert not (tmp_path / "cache").exists()


def test_what_pages_refer_to(server):
    for path, kind in (("/ui/site.css", "text/css"), ("/ui/site.js", "text/javascript")):
        status, headers, body = server.get(path)
        assert status == 200 and headers["Content-Type"].startswith(kind) and len(body) > 500
    assert not re.search(rb"https?://|url\(|@import", server.get("/ui/site.css")[2])
