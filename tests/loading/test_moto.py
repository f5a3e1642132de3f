"""Moto, an S3 server that others wrote, in place of our own: every format, and a run that is saved there and goes on.

Under ``--moto``, the path of ``moto_server``: ``make moto`` installs it. It checks neither signatures nor rights, and
answers without delay.
"""

import os
import shutil
import socket
import subprocess
import time
import urllib.request

import keras
import numpy as np
import obstore
import pytest
from by_hand import check_same
from test_load_from_urls import FILES, filled, hugging_face, objects, rows  # noqa: F401 - fixtures

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.runs.listing import list_steps
from shardload.verifying import verify


@pytest.fixture(scope="module")
def moto(request):
    program = request.config.getoption("--moto")
    if not program:
        pytest.skip("needs --moto: run make moto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not in this environment: AWS variables of a test would be moto's own.
    with subprocess.Popen(
        [program, "-p", str(port)], stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"]}
    ) as server:
        address = f"http://127.0.0.1:{port}"
        for _ in range(200):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield address
        server.terminate()


@pytest.fixture(scope="module")
def copied(moto):
    """A function that copies a folder to a bucket of its own, by obstore alone, once, and returns its address."""
    done = {}

    def copy(folder):
        if folder not in done:
            name = f"bucket-{len(done)}"
            store = store_of(moto, name)
            urllib.request.urlopen(urllib.request.Request(f"{moto}/{name}", method="PUT")).close()
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    obstore.put(store, path.relative_to(folder).as_posix(), path.read_bytes())
            done[folder] = f"s3://{name}"
        return done[folder]

    return copy


def store_of(address, bucket):
    return obstore.store.S3Store(
        bucket, endpoint=address, region="us-east-1", access_key_id="key", secret_access_key="secret",
        client_options={"allow_http": True},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def environment(moto, monkeypatch, tmp_path):
    (tmp_path / "staging").mkdir()
    for name, value in {
        "AWS_ENDPOINT_URL": moto, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret", "SHARDLOAD_STAGING": str(tmp_path / "staging"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize("name", FILES)
def test_files(objects, copied, name, mesh):  # noqa: F811
    root, original, places = objects
    model, report = filled(f"{copied(root)}/{places[name].relative_to(root).as_posix()}", mesh=mesh)
    check_same(model, original)
    assert (report.missing, report.unused) == ((), ())


@pytest.mark.parametrize("name", ["plain_orbax", "orbax_without_ocdbt", "step"])
def test_steps(objects, copied, name):  # noqa: F811
    root, _, places = objects
    url = f"{copied(root)}/{places[name].relative_to(root).as_posix()}"
    local, found = (shardload.load_arrays(source, rows, mesh="1x8") for source in (places[name], url))
    assert list(found) == list(local) and local
    assert all(np.asarray(found[key]).tobytes() == np.asarray(local[key]).tobytes() for key in local)
    assert [one.verdict for one in verify(url)] == ["verified" if name == "step" else "readable"]


@pytest.mark.parametrize("kind", ["gguf", "gemma", "folder", "sharded", "preset"])
def test_models(hugging_face, copied, kind):  # noqa: F811
    root, places = hugging_face
    options = {"task": kind == "gemma", "mesh": "2x4"}
    url = f"{copied(root)}/{places[kind].relative_to(root)}"
    check_same(shardload.load(url, **options), shardload.load(places[kind], **options))


def trained(place, epochs):
    keras.utils.clear_session()  # names of variables are numbered
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    callback = OrbaxCheckpoint(place, resume=True, max_to_keep=2)
    model.fit(x, x[:, :8], epochs=epochs, batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
    return model


def test_a_run_is_saved_and_goes_on(moto, copied, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "local").mkdir()
    place = f"{copied(tmp_path / 'empty')}/run"
    expected = trained(tmp_path / "local", 4)
    trained(place, 2)
    steps = [info.step for info in list_steps(place)]
    check_same(trained(place, 4), expected)
    assert [info.step for info in list_steps(place)] == [info.step for info in list_steps(tmp_path / "local")] != steps
    assert {one.verdict for one in verify(place)} == {"verified"}
    # Nothing is left of uploads in several parts; the last step equals that of the disk, file by file for its arrays.
    name = place.removeprefix("s3://").partition("/")[0]
    store = store_of(moto, name)
    fetched = tmp_path / "fetched"
    for batch in obstore.list(store, "run"):
        for found in batch:
            path = fetched / found["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(obstore.get(store, found["path"]).bytes()))
    last = max(info.step for info in list_steps(place))
    shutil.rmtree(fetched / "run" / ".staging", ignore_errors=True)
    arrays = [
        shardload.load_arrays(root / str(last), rows, mesh="1x8") for root in (fetched / "run", tmp_path / "local")
    ]
    assert {k: np.asarray(v).tobytes() for k, v in arrays[0].items()} == {
        k: np.asarray(v).tobytes() for k, v in arrays[1].items()
    }
