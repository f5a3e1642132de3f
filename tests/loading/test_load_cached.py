"""Loads from stores with the cache of ranges: the second start reads this machine's disk, on any mesh."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from by_hand import check_same
from hub_server import COMMIT
from jax.sharding import PartitionSpec as P
from object_server import served
from safetensors.numpy import save_file
from saved_steps import save_step
from test_load_from_the_hub import folder, hub  # noqa: F401 - fixtures

import shardload
from shardload.cli import main
from shardload.manifest import View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.cache_choice import current_cache
from shardload.stores.range_files import FOLDER
from shardload.transfer.load_plan import Binding
from shardload.transfer.planning import plan_transfers

ROWS, COLUMNS = P("model"), P(None, "model")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A file of three matrices, 12 MiB, and a training step."""
    root, rng = tmp_path_factory.mktemp("bucket"), np.random.default_rng(0)
    tensors = {f"w{n}": rng.normal(size=(1024, 1024)).astype(np.float32) for n in range(3)}
    save_file(tensors, root / "model.safetensors")
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1024), keras.layers.Dense(8)])
    save_step(model, root / "run", 7)
    return root, tensors, model


@pytest.fixture
def server(bucket, monkeypatch):
    with served(bucket[0], monkeypatch) as found:
        yield found


@pytest.fixture
def cache(tmp_path):
    with shardload.cache(tmp_path / "cache", size="1GiB"):
        yield tmp_path / "cache"


def fill(bucket, address, **options):
    model = keras.models.clone_model(bucket[2])
    report = shardload.load_weights(model, address, **options)
    check_same(model, bucket[2])
    return report


def test_the_second_start_reads_the_disk_on_any_mesh(bucket, server, cache):
    first = fill_arrays(bucket, server.s3)
    assert first <= 1.02 * (12 << 20) + (256 << 10)
    for layout, mesh in [(ROWS, "1x8"), (COLUMNS, "1x8"), (P("model", "batch"), "2x4")]:
        server.requests.clear()
        assert fill_arrays(bucket, server.s3, layout, mesh) < 10
        assert len([asked for _, key, asked, _ in server.requests if key]) == 1


def plan(address, dims, positions=None):
    manifest, mesh = shardload.inspect(address), MeshSpec.parse("1x8")
    layout = Layout(mesh, dims)
    wanted = [Binding(name, View.whole(t), t.dtype, layout) for name, t in manifest.tensors.items()]
    return plan_transfers(manifest, wanted, host_memory_bytes=None, positions=positions)


def test_what_the_cache_has_goes_straight_to_the_shards(bucket, server, cache):
    address, rows = f"{server.s3}/model.safetensors", (("model",), ())
    assert not plan(address, rows).is_cached
    fill_arrays(bucket, server.s3)
    found = plan(address, rows)
    assert found.is_cached and found.direct_bytes == found.read_bytes == found.needed_bytes
    # Runs of 512 bytes go through scratch memory.
    assert (columns := plan(address, ((), ("model",)))).is_cached and not columns.direct_bytes
    with shardload.cache(None):
        assert not plan(address, rows).is_cached


def test_digests_need_no_memory_for_what_is_skipped(server, bucket, cache):
    wide = np.arange(16 << 16, dtype=np.float32).reshape(16, 1 << 16)
    save_file({"wide": wide}, bucket[0] / "wide.safetensors")
    address = f"{server.s3}/wide.safetensors"
    for _ in range(2):
        found = shardload.load_arrays(address, lambda name, shape: COLUMNS, mesh="1x8")
        assert np.asarray(found["wide"]).tobytes() == wide.tobytes()
        current_cache().settle()
    half = plan(address, ((), ("model",)), positions=[0, 2])
    assert half.is_cached and half.direct_bytes == half.needed_bytes == wide.nbytes // 4


@pytest.mark.parametrize("damage", ["removed", "other bytes"])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_what_the_cache_loses_meanwhile_comes_from_the_store(bucket, server, cache, damage, layout):
    fill_arrays(bucket, server.s3)
    largest = max((cache / FOLDER / "objects").glob("*/*/*-*"), key=lambda path: path.stat().st_size)
    if damage == "removed":
        largest.unlink()
    else:
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)
    # The process has listed the cache, so the plan counts on all of it.
    assert plan(f"{server.s3}/model.safetensors", (("model",), ())).is_cached
    assert 0 < fill_arrays(bucket, server.s3, layout) <= 8 << 20
    assert fill_arrays(bucket, server.s3, layout) < 10


def fill_arrays(bucket, root, layout=ROWS, mesh="1x8"):
    """Load the arrays, and return how many bytes came from the server."""
    before = current_cache().traffic
    found = shardload.load_arrays(f"{root}/model.safetensors", lambda name, shape: layout, mesh=mesh)
    assert all(np.asarray(found[name]).tobytes() == bucket[1][name].tobytes() for name in bucket[1])
    current_cache().settle()
    return current_cache().traffic.since(before).fetched


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_step_is_restored_from_the_cache(bucket, server, cache, scheme):
    address = f"{getattr(server, scheme)}/run/7"
    first = fill(bucket, address, mesh="1x8")
    assert first.cache.read == 0 and first.cache.stored == first.cache.fetched > 4 << 20
    server.requests.clear()
    second = fill(bucket, address, mesh="2x4")
    # One byte of each file; some are asked for by several requests at once before the first answer.
    assert second.cache.fetched == 0 and second.cache.read >= first.bytes.needed
    assert server.bytes_sent < 1000
    assert "from the cache, 0 B from the network" in str(second)
    assert second.to_json()["cache"] == {"read": second.cache.read, "fetched": 0, "stored": 0, "left_out": 0}
    with shardload.cache(None):
        assert fill(bucket, address).cache is None


def test_a_damaged_cache_is_mended_and_reported(bucket, server, cache):
    fill(bucket, f"{server.s3}/run/7")
    for path in (cache / FOLDER / "objects").glob("*/*/*-*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    report = fill(bucket, f"{server.s3}/run/7")
    assert any(note.startswith(f"the cache {cache} had damaged files of s3://bucket/run/7/") for note in report.notes)
    assert fill(bucket, f"{server.s3}/run/7").cache.fetched == 0


def test_a_hub_is_asked_for_no_data_at_a_second_start(hub, folder, cache):  # noqa: F811
    expected = shardload.load(folder, task=False, mesh="2x4")
    check_same(shardload.load("hf://org/model", task=False, mesh="1x8"), expected)
    hub.requests.clear()
    model = shardload.load("hf://org/model", task=False, mesh="2x4")
    check_same(model, expected)
    assert not [path for method, path, _ in hub.requests if method == "GET" and not path.startswith("api/")]
    found = shardload.report(model)
    assert found.cache.fetched == 0 and found.source == f"hf://org/model@{COMMIT}"
    described = [json.loads(path.read_text()) for path in (cache / FOLDER / "objects").glob("*/*/object.json")]
    assert all(each["address"].startswith(f"hf://org/model@{COMMIT}/") for each in described)


def test_processes_that_start_together_fill_one_cache(bucket, server, tmp_path):
    command = [sys.executable, "-m", "shardload", "verify", f"{server.s3}/run/7", "--cache", str(tmp_path / "cache")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all("verified" in child.communicate(timeout=120)[0] for child in children)
    assert not list((tmp_path / "cache" / FOLDER / "new").iterdir())
    with shardload.cache(tmp_path / "cache"):
        assert fill(bucket, f"{server.s3}/run/7").cache.fetched == 0


def test_the_commands(bucket, server, tmp_path, capsys, monkeypatch):
    address, place = f"{server.s3}/model.safetensors", str(tmp_path / "cache")
    assert main(["diff", address, str(bucket[0] / "model.safetensors"), "--cache", place, "--cache-size", "1GiB"]) == 0
    capsys.readouterr()
    with shardload.cache(place, size="1GiB"):
        current_cache().settle(60)  # the command's own cache, whose threads may still be writing
    assert main(["cache", "--cache", place, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [one] = found["objects"]
    assert (found["directory"], one["address"]) == (place, address)
    assert one["cached_bytes"] > one["size"] == (bucket[0] / "model.safetensors").stat().st_size
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "cache").glob(f"{FOLDER}/objects/*/*/*-*"))
    monkeypatch.setenv("SHARDLOAD_CACHE", place)
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["address", "size", "cached", "last", "use"] and lines[1].startswith(address)
    assert main(["cache", "clear", "--older-than", "1h"]) == 0
    assert capsys.readouterr().out == f"removed 0 objects, 0 B, from {place}\n"
    assert main(["cache", "clear", "s3://bucket", "--json"]) == 0
    assert [each["address"] for each in json.loads(capsys.readouterr().out)["objects"]] == [address]
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{place} contains no ranges of remote objects\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cache"], "Cannot find the cache: no folder was given, expected --cache DIR or the variable SHARDLOAD_CACHE"),
        (["cache", "clear", "--cache", "x", "--older-than", "soon"], "'soon' is not a time like 30d, 12h or 90min"),
        (["verify", "x", "--cache-size", "1GiB"], "It is only for a cache: add --cache DIR, or set SHARDLOAD_CACHE."),
        (["verify", "x", "--cache", "s3://bucket"], "it is a URL (s3), expected a path on this machine"),
        (["cache", "--json", "clear"], "Give options after clear."),
    ],
)
def test_commands_say_what_is_wrong(capsys, arguments, said):
    assert main(arguments) in (1, 2)
    assert said in capsys.readouterr().err.replace("\n", " ")
