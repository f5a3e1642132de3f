"""Checkpoints load from a server as they do from the folder that it serves, bit for bit."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from urllib.parse import quote

import gguf_pairs
import keras
import numpy as np
import pytest
from by_hand import check_same
from object_server import ObjectServer
from process_runs import told_by
from saved_steps import save_step
from serving import served

import shardload
from shardload.errors import ShardloadError
from shardload.verifying import verify

TOKEN = "a-token-of-this-server"
ODD_NAMES = ["br[ack]et", "sp ace", "pl+us{}|^~", "q?x#y", "per%20cent", "c:d", "ü"]


def small_model(seed=0):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.set_weights([np.random.default_rng(seed).normal(size=w.shape).astype("float32") for w in model.weights])
    return model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    found = tmp_path_factory.mktemp("served") / "models"
    found.mkdir()
    (found / "team").mkdir()
    gguf_pairs.write(found / "team", "llama", "Q8_0")
    for name in ODD_NAMES:
        shutil.copytree(found / "team" / "hf", found / name)
    shardload.load(found / "team" / "hf", task=False).save_to_preset(found / "preset")
    (found / "keras").mkdir()
    model = small_model()
    model.save(found / "keras" / "model.keras")
    model.save_weights(found / "keras" / "some.weights.h5")
    (found / "sharded").mkdir()
    model.save_weights(found / "sharded" / "model.weights.json", max_shard_size=2e-5)
    for step in (2, 10):
        save_step(small_model(step), found / "run", step)
    return found


@pytest.fixture(scope="module", params=["--hand-over", "--no-hand-over", "a bucket", "a bucket and a cache"])
def server(request, root, tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    with contextlib.ExitStack() as ended:
        if "bucket" in request.param:
            bucket = ended.enter_context(contextlib.closing(ObjectServer(root.parent)))
            options = ("--root", f"s3://bucket/{root.name}")
            if "cache" in request.param:
                options += ("--cache", tmp_path_factory.mktemp("cache"))
            started = served(*options, "--token-file", tokens, env=bucket.environment())
        else:
            started = served("--root", root, "--token-file", tokens, request.param)
        found = ended.enter_context(started)
        tokens.write_text(f"{found.address} {TOKEN}\n")  # now the client's
        patch = ended.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SHARDLOAD_TOKENS", str(tokens))
        yield found


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize("name", ["team/model.gguf", "team/hf", "preset"])
def test_models_of_the_hub(root, server, name, mesh):
    check_same(
        shardload.load(f"{server.address}/{name}", task=False, mesh=mesh), shardload.load(root / name, task=False)
    )


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize("name", ["keras/model.keras", "keras/some.weights.h5", "sharded", "run/10", "run"])
def test_weights_of_keras(root, server, name, mesh):
    for source in (f"{server.address}/{name}", root / name):
        model = small_model(1)
        shardload.load_weights(model, source, mesh=mesh)
        check_same(model, small_model(10 if "run" in name else 0))


def test_steps_are_listed_restored_and_verified(server):
    url = f"{server.address}/run"
    model = small_model(1)
    shardload.restore(model, url, step=2, mesh="1x8")
    check_same(model, small_model(2))
    assert {found.verdict for found in verify(f"{url}/2")} == {"verified"}


@pytest.fixture(scope="module")
def damaged(root):
    save_step(small_model(5), root / "damaged", 5)
    [data] = (path for path in (root / "damaged" / "5" / "pytree").rglob("d/*") if path.stat().st_size > 10_000)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


@pytest.mark.usefixtures("damaged")
def test_a_damaged_step_is_found(server):
    with pytest.raises(ShardloadError, match="damaged"):
        shardload.load_weights(small_model(1), f"{server.address}/damaged/5", mesh="1x8")


def test_several_processes(root, server):
    wanted = [hashlib.sha256(np.asarray(v.value).tobytes()).hexdigest() for v in small_model().layers[0].weights]
    first, second = told_by(2, 4, "2x4", "seeded", f"{server.address}/keras/some.weights.h5", module="load_child")
    assert first == second
    assert [first["values"][f"sequential/dense/{name}"] for name in ("kernel", "bias")] == wanted


def test_the_cache_serves_again_what_is_unchanged(root, server, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_CACHE", str(tmp_path))
    for _ in range(2):
        model, before = small_model(1), server.sent()
        shardload.load_weights(model, f"{server.address}/keras/some.weights.h5", mesh="1x8")
        check_same(model, small_model())
    assert server.sent() - before < 1000


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(root, server, name):
    found = shardload.inspect(f"{server.address}/{quote(name)}")
    assert found.tensors.keys() == shardload.inspect(root / name).tensors.keys()


COMMANDS = [["load", "--mesh", "1x8"], ["load", "--mesh", "2x4"], ["inspect"], ["verify"]]
MEASURED = {"bytes", "seconds", "throughput_gb_s", "host_bytes", "notes", "cache"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_line(root, server, command):
    found = []
    for place in (server.address, str(root)):
        whole = [sys.executable, "-m", "shardload", command[0], f"{place}/team/hf", *command[1:], "--json"]
        done = subprocess.run(whole, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.replace(place, "ROOT")))
    remote, local = ({key: each[key] for key in each if key not in MEASURED} for each in found)
    assert remote == local


def test_without_the_token(server, monkeypatch):
    monkeypatch.delenv("SHARDLOAD_TOKENS")
    with pytest.raises(ShardloadError, match=r"401.*No token was sent"):
        shardload.inspect(f"{server.address}/team/hf")
