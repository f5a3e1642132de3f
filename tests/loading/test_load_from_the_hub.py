"""hf:// addresses that are not in the local cache are read by ranges, at one commit, from a hub on loopback."""

import contextlib
import shutil

import gguf_pairs
import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.hf_api
import keras
import pytest
from by_hand import check_same
from hub_server import COMMIT, TOKEN, HubServer
from saved_steps import save_step
from test_load_from_stores import sharded_folder, small_model

import shardload
from shardload.cli import main
from shardload.errors import DamagedError, SourceNotFoundError
from shardload.transfer.read_tensor import read_tensor
from shardload.verifying import verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    _, folder = gguf_pairs.write(root, "llama", "Q8_0")
    return sharded_folder(folder)


@pytest.fixture
def hub(folder, monkeypatch, tmp_path):
    with contextlib.closing(HubServer(folder)) as server:
        for module in (huggingface_hub.constants, huggingface_hub.hf_api, huggingface_hub.file_download):
            if hasattr(module, "ENDPOINT"):
                monkeypatch.setattr(module, "ENDPOINT", server.root)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "5")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HTTPS_PROXY", raising=False)
        yield server


def test_a_model_loads_without_a_download(hub, folder, tmp_path):
    expected = shardload.load(folder, task=False, mesh="2x4")
    check_same(shardload.load("hf://org/model", task=False, mesh="2x4"), expected)
    check_same(shardload.load("hf://org/model@main", task=False, mesh="1x8"), expected)
    assert not (tmp_path / "cache").exists()
    report = shardload.report(shardload.load("hf://org/model", task=False, mesh="1x8"))
    assert report.source == f"hf://org/model@{COMMIT}"


def test_large_reads_go_where_the_hub_redirects_to(hub):
    model = shardload.load("hf://org/model", task=False, mesh="1x8")
    assert model is not None
    data = [path for method, path, _ in hub.requests if method == "GET" and path.startswith("lfs/")]
    by_hub = [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]
    assert len(by_hub) <= 2 * 2 and len(data) >= len(by_hub)


def test_an_address_that_expires_is_asked_for_again(hub, folder):
    manifest = shardload.inspect("hf://org/model")
    names = list(manifest.tensors)
    first = [read_tensor(manifest, name) for name in names]
    hub.expire()
    again = [read_tensor(manifest, name) for name in names]
    local = shardload.inspect(folder)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in again]
    assert [a.tobytes() for a in again] == [read_tensor(local, name).tobytes() for name in names]


def test_a_gated_repository_needs_a_token(hub, monkeypatch):
    hub.is_gated = True
    with pytest.raises(SourceNotFoundError, match=r"Cannot .* hf://org/model: .*401"):
        shardload.inspect("hf://org/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(shardload.inspect("hf://org/model").tensors) > 10
    assert TOKEN not in str(shardload.plan("hf://org/model", mesh="1x8"))


def test_a_small_file_is_compared_with_its_digest(hub, folder):
    (folder / "tokenizer.json").write_text('{"model": {}}')
    try:
        manifest = shardload.inspect("hf://org/model")  # the copies are removed with it
        assert (manifest.location.local_folder() / "tokenizer.json").read_text() == '{"model": {}}'
        hub.tampered.add("tokenizer.json")
        with pytest.raises(DamagedError, match=r"hf://org/model@.*/tokenizer.json is damaged: its SHA-256 is"):
            shardload.inspect("hf://org/model").location.local_folder()
    finally:
        (folder / "tokenizer.json").unlink()


def test_what_is_not_there(hub):
    with pytest.raises(SourceNotFoundError, match=r"Cannot find hf://org/model/none\.gguf: org/model has no such file"):
        shardload.inspect("hf://org/model/none.gguf")
    with pytest.raises(SourceNotFoundError, match="hf://org/other"):
        shardload.inspect("hf://org/other")


def test_files_are_compared_with_the_digests_of_the_hub(hub, folder):
    [found] = verify("hf://org/model")
    assert (found.verdict, found.problems) == ("verified", ())
    name = sorted(folder.glob("*.safetensors"))[-1].name
    hub.flipped.add(name)
    [found] = verify("hf://org/model")
    assert found.verdict == "damaged" and len(found.problems) == 1
    assert f"{name} is " in found.problems[0] and found.problems[0].endswith(f"expected {hub.sha256(name)}")


def test_a_step_in_a_repository_is_verified(hub, folder):
    model = small_model()
    step = save_step(model, folder / "run", 7)
    try:
        for url in ("hf://org/model/run/7", "hf://org/model/run"):
            filled = keras.models.clone_model(model)
            shardload.load_weights(filled, url, mesh="1x8")
            check_same(filled, model)
            assert [found.verdict for found in verify(url)] == ["verified"]
        hub.tampered |= {f"run/7/{path.relative_to(step).as_posix()}" for path in step.rglob("d/*")}
        with pytest.raises(DamagedError):
            shardload.load_weights(keras.models.clone_model(model), "hf://org/model/run/7", mesh="1x8")
    finally:
        shutil.rmtree(folder / "run")


def test_a_hub_that_does_not_say_where_a_file_is(hub, folder, monkeypatch):
    def fails(url, **options):
        raise OSError("no")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fails)
    manifest = shardload.inspect("hf://org/model")
    local = shardload.inspect(folder)
    for name in list(manifest.tensors)[:4] * 2:
        assert read_tensor(manifest, name).tobytes() == read_tensor(local, name).tobytes()


@pytest.mark.parametrize("scheme", ["hf", "HF"])
def test_the_branch_is_looked_up_once_in_a_call(hub, capfd, scheme):
    for command in ("plan", "load"):
        hub.requests.clear()
        assert main([command, f"{scheme}://org/model", "--mesh", "1x8", "--json"]) == 0
        asked = [path for _, path, _ in hub.requests]
        assert asked.count("api/models/org/model") == 1
        # The hub's list of files has no digests, so nothing asks for them.
        assert not [path for path in asked if path.endswith("digests.json")]
    capfd.readouterr()
