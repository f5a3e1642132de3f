"""Folders of Hugging Face's cache, and files and revisions on its Hub."""

import json

import numpy as np
import pytest
from huggingface_hub import snapshot_download
from safetensors.numpy import save_file

import shardload
from shardload.errors import SourceNotFoundError
from shardload.resolve import hubs, resolve
from shardload.resolve.hubs import HubName

COMMITS = {name: letter * 40 for name, letter in (("main", "a"), ("v1", "b"), ("refs/pr/3", "c"), ("dev/x", "d"))}
HANDLES = [
    "org/name", "org/name@v1", "org/name@" + "b" * 40, "org/name@v1/", "models/org/name@v1", "org/name@refs/pr/3",
    "org/name@refs/pr/3/sub/x.gguf", "org/name@refs/convert/parquet/x", "org/name@feature%2Ffoo/x.gguf",
    "org/name/sub/x.gguf", "org/name@v1/a@b",
]  # fmt: skip
MALFORMED = ["org/name@", "name", "org@v1/name", "org/name//x", "models/name", "org/..x/y"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as huggingface_hub has it, with a file for each of four revisions."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hubs, "reachable", lambda url: False)
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    for number, (name, commit) in enumerate(COMMITS.items()):
        ref = folder / "refs" / name
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        files = {
            "config.json": json.dumps({"model_type": "none"}).encode(),
            "sub/config.json": b'{"model_type": "none"}',
        }
        for place in ("model.safetensors", "sub/model-00001-of-00002.safetensors"):
            save_file({"w": np.full(2, number, np.float32)}, tmp_path / "one")
            files[place] = (tmp_path / "one").read_bytes()
        for place, content in files.items():
            blob = folder / "blobs" / f"{number}-{place.replace('/', '-')}"
            blob.write_bytes(content)
            link = folder / "snapshots" / commit / place
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    return folder


def value(source):
    return int(shardload.load_arrays(source, lambda *_: np.zeros(2, np.float32), strict=False)["w"][0])


@pytest.mark.parametrize("end", ["", "snapshots"])
def test_a_repository_of_the_cache_opens_what_main_names(cache, end):
    found = resolve(cache / end)
    assert found.path == str(cache / "snapshots" / COMMITS["main"]) and COMMITS["main"] in found.note
    assert value(cache / end) == 0 and "w" in shardload.inspect(cache / end).tensors
    (cache / "refs" / "main").write_text(COMMITS["v1"])
    assert value(cache / end) == 1 and value(cache / "snapshots" / COMMITS["dev/x"]) == 3


def test_without_main_one_snapshot_is_opened_and_of_several_none(cache):
    (cache / "refs" / "main").unlink()
    with pytest.raises(SourceNotFoundError, match=r"has 4 snapshots, none .* main. Open one .*a{40}, b{40} \(v1\)"):
        resolve(cache)
    (cache / "refs" / "main").write_text("e" * 40)  # fetched, but without files
    with pytest.raises(SourceNotFoundError, match="none of them of the branch main"):
        resolve(cache)
    (cache / "snapshots").rename(cache / "others")
    (cache / "snapshots").mkdir()
    with pytest.raises(SourceNotFoundError, match="has no snapshot"):
        resolve(cache)
    (cache / "others" / COMMITS["v1"]).rename(cache / "snapshots" / COMMITS["v1"])
    assert value(cache) == 1 and "the only cached revision" in resolve(cache).note


def test_other_folders_with_snapshots_are_opened_themselves(tmp_path):
    (tmp_path / "run" / "snapshots" / "a").mkdir(parents=True)
    assert resolve(tmp_path / "run").path == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("handle", "number", "place"),
    [
        ("hf://org/name", 0, ""), ("hf://org/name@v1", 1, ""), ("hf://models/org/name@" + "b" * 40, 1, ""),
        ("hf://org/name@refs/pr/3", 2, ""), ("hf://org/name@dev%2Fx", 3, ""),
        ("hf://org/name/model.safetensors", 0, "model.safetensors"),
        ("hf://org/name@v1/model.safetensors", 1, "model.safetensors"), ("hf://org/name@refs/pr/3/sub", 2, "sub"),
    ],
)  # fmt: skip
def test_a_handle_names_a_revision_and_a_file(cache, handle, number, place):
    if place == "sub":
        whole = cache / "snapshots" / list(COMMITS.values())[number] / "sub"
        (whole / "model-00001-of-00002.safetensors").rename(whole / "model.safetensors")
    assert resolve(handle).path == str(cache / "snapshots" / list(COMMITS.values())[number] / place).rstrip("/")
    assert value(handle) == number


def test_what_the_cache_lacks_is_downloaded_with_its_revision_and_parts(cache, monkeypatch):
    asked = []

    def download(repository, *, allow_patterns, local_files_only=False, **options):
        if not local_files_only:
            asked.append((repository, options.get("revision"), allow_patterns))
        return snapshot_download(repository, allow_patterns=allow_patterns, local_files_only=True, **options)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(SourceNotFoundError, match="download hf://org/name@v1/sub/model-00001-of-00002"):
        hubs.fetch("hf://org/name@v1/sub/model-00001-of-00002.safetensors")
    monkeypatch.setattr(hubs, "reachable", lambda url: True)
    hubs.fetch("hf://org/name@v1/sub/model-00001-of-00002.safetensors")  # one part is cached, the other is not
    [(repository, revision, patterns)] = asked
    assert (repository, revision) == ("org/name", "v1")
    assert {"sub/model-00001-of-00002.safetensors", "sub/model-*-of-00002.safetensors", "sub/*.json"} <= set(patterns)
    assert "sub/*.safetensors" not in patterns
    with pytest.raises(SourceNotFoundError, match=r"Cannot find hf://org/name@v1/no.gguf: org/name has no such"):
        hubs.fetch("hf://org/name@v1/no.gguf")


@pytest.mark.parametrize("text", ["datasets/org/name", "spaces/org/name@v1", "buckets/org/name"])
def test_what_is_no_model_is_refused(text):
    with pytest.raises(SourceNotFoundError, match=r"expected a model, hf://ORG/MODEL\[@REVISION\]\[/FILE\], not"):
        HubName.parse(text)


@pytest.mark.parametrize("text", [*HANDLES, *MALFORMED])
def test_names_are_parsed_as_by_huggingface_hub(text):
    parse = getattr(pytest.importorskip("huggingface_hub.utils"), "parse_hf_uri", None)
    if parse is None:
        pytest.skip("an older huggingface_hub")
    try:
        theirs = parse(f"hf://{text}")
    except ValueError:
        with pytest.raises(SourceNotFoundError, match="expected hf://"):
            HubName.parse(text)
        return
    ours = HubName.parse(text)
    assert (ours.repository, ours.revision, ours.path) == (theirs.id, theirs.revision, theirs.path_in_repo)


@pytest.mark.parametrize("text", ["org/name/../../x", "org/name@../x", "org/name/a/./b", "org/name@v1/a\\b"])
def test_no_path_leaves_the_repository(text):
    with pytest.raises(SourceNotFoundError, match="expected hf://"):
        HubName.parse(text)
