"""Every format loads from s3://, gs:// and http:// as it does from this machine, bit for bit, with every command.

A server on loopback stands for the three: it sends ranges and lists, and counts; it checks no signature.
"""

import json

import gguf_pairs
import keras
import numpy as np
import orbax.checkpoint as ocp
import pytest
from by_hand import check_same
from jax.sharding import PartitionSpec as P
from object_server import served
from safetensors.numpy import load_file, save_file
from saved_steps import save_step
from test_load_from_stores import (
    compressed_h5,
    keras_archive,
    safetensors_file,
    sharded_folder,
    sharded_h5,
    small_model,
    weights_h5,
    zipped_again,
)

import shardload
from shardload.cli import main
from shardload.pipeline.source_facts import content_facts
from shardload.stores.remote import location_of
from shardload.transfer.read_tensor import read_tensor
from shardload.verifying import verify

SCHEMES = ["s3", "gs", "http"]


def plain_orbax(folder, model):
    """A step of a manager that is not ours: large arrays, B-tree nodes in the files of the data."""
    tree = {v.path.replace("/", "_"): np.asarray(v.value) for v in model.weights}
    with ocp.CheckpointManager(folder / "plain") as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
    return folder / "plain"


def orbax_without_ocdbt(folder, model):
    tree = {v.path.replace("/", "_"): np.asarray(v.value) for v in model.weights}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(folder / "zarr", tree)
    return folder / "zarr"


def step(folder, model):
    return save_step(model, folder / "run", 7).parent


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A bucket with each format in a folder of its own; the model; where each is."""
    root, model = tmp_path_factory.mktemp("bucket"), small_model()
    writers = [safetensors_file, weights_h5, compressed_h5, sharded_h5, keras_archive, zipped_again]
    places = {}
    for write in (*writers, plain_orbax, orbax_without_ocdbt, step):
        (root / write.__name__).mkdir()
        places[write.__name__] = write(root / write.__name__, model)
    return root, model, places


@pytest.fixture
def store(objects, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "5")
    with served(objects[0], monkeypatch) as server:
        yield server


def address(store, scheme, objects, name):
    return f"{getattr(store, scheme)}/{objects[2][name].relative_to(objects[0]).as_posix()}"


def filled(source, **options):
    model = keras.models.clone_model(small_model())
    return model, shardload.load_weights(model, source, **options)


FILES = ["safetensors_file", "weights_h5", "compressed_h5", "sharded_h5", "keras_archive", "zipped_again"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", FILES)
def test_keras_models(objects, store, scheme, name):
    for mesh in ("1x8", "2x4"):
        model, report = filled(address(store, scheme, objects, name), mesh=mesh)
        check_same(model, objects[1])
        assert (report.missing, report.unused) == ((), ())
        assert report.source.startswith(getattr(store, scheme))


def rows(name, shape):
    return P("model") if shape and shape[0] % 8 == 0 else P()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["plain_orbax", "orbax_without_ocdbt", "step"])
def test_steps(objects, store, scheme, name):
    store.has_index = scheme == "http"
    url = address(store, scheme, objects, name)
    local = shardload.load_arrays(objects[2][name], lambda name, shape: P(), mesh="1x8")
    found = shardload.load_arrays(url, rows, mesh="1x8")
    assert list(found) == list(local) and local
    assert all(np.asarray(found[key]).tobytes() == np.asarray(local[key]).tobytes() for key in local)
    [verdict] = verify(url)
    assert verdict.verdict == ("verified" if name == "step" else "readable")


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """A bucket with a Llama as Hugging Face folder, in shards, in GGUF, and as preset."""
    root = tmp_path_factory.mktemp("llama")
    file, folder = gguf_pairs.write(root, "llama", "Q8_0")
    plain = root / "sharded"
    plain.mkdir()
    for path in folder.iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    sharded_folder(plain)
    shardload.load(folder, task=False).save_to_preset(root / "preset")
    # KerasHub looks for other files of a Gemma 3 than of a Llama.
    (root / "gemma").mkdir()
    gemma, _ = gguf_pairs.write(root / "gemma", "gemma3_text", "Q8_0")
    return root, {"gemma": gemma, "gguf": file, "folder": folder, "sharded": plain, "preset": root / "preset"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["gguf", "gemma", "folder", "sharded", "preset"])
def test_models_are_built_from_an_address(hugging_face, monkeypatch, scheme, kind):
    root, places = hugging_face
    with served(root, monkeypatch) as server:
        url = f"{getattr(server, scheme)}/{places[kind].relative_to(root)}"
        options = {"task": kind == "gemma", "mesh": "2x4"}
        expected, found = shardload.load(places[kind], **options), shardload.load(url, **options)
        check_same(found, expected)
        assert shardload.plan(url, mesh="2x4").bytes.needed == shardload.plan(places[kind], mesh="2x4").bytes.needed
        if kind == "folder":
            # A file in it stands for the folder, whose configuration describes the model.
            check_same(shardload.load(f"{url}/model.safetensors", task=False, mesh="1x8"), expected)


def test_commands(hugging_face, monkeypatch, tmp_path, capfd):
    root, places = hugging_face
    with served(root, monkeypatch) as server:
        url = f"{server.s3}/{places['folder'].relative_to(root)}"
        assert main(["inspect", url, "--json"]) == 0
        assert len(json.loads(capfd.readouterr().out)["tensors"]) == len(
            load_file(places["folder"] / "model.safetensors")
        )
        assert main(["verify", url, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["checkpoints"][0]["verdict"] == "readable"
        assert main(["diff", url, str(places["folder"]), "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["differences"] == []
        assert main(["convert", url, str(tmp_path / "new.weights.h5"), "--json"]) == 0
        capfd.readouterr()
        assert main(["convert", url, str(tmp_path / "copy"), "--to", "safetensors", "--json"]) == 0
        copied, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "copy", places["folder"]))
        assert {k: v.tobytes() for k, v in copied.items()} == {k: v.tobytes() for k, v in original.items()}
    shardload.convert(places["folder"], tmp_path / "local.weights.h5")
    assert main(["diff", str(tmp_path / "new.weights.h5"), str(tmp_path / "local.weights.h5"), "--json"]) == 0


def test_an_existing_program_reads_from_an_address(objects, store):
    model = keras.models.clone_model(objects[1])
    with shardload.fast():
        model.load_weights(f"{store.s3}/weights_h5/model.weights.h5")
    check_same(model, objects[1])


def test_a_presigned_address_reads_the_file_alone(objects, store):
    """Nothing else may be read with its signature; no message shows it."""
    url = f"{store.http}/safetensors_file/model.safetensors?X-Amz-Signature=secret"
    store.status["safetensors_file/config.json"] = 403
    model, report = filled(url, mesh="1x8")
    check_same(model, objects[1])
    assert "secret" not in str(report) and "secret" not in report.to_json()
    data = [key for _, key, *_ in store.requests if key == "safetensors_file/model.safetensors"]
    assert data


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_follows_a_question_mark_goes_with_each_request(store, is_chunked):
    """With that for an index page, too, also if it is made as it is sent."""
    store.has_index, store.is_chunked, refused = True, is_chunked, []

    def asks_for_a_key(handler, key):
        if is_refused := not handler.path.endswith("?key=secret"):
            refused.append(handler.path)
            handler.refuse(403, "AccessDenied", {})
        return is_refused

    store.fault = asks_for_a_key
    assert "model.weights.h5" in location_of(f"{store.http}/weights_h5?key=secret").names()
    assert refused == []


def test_an_object_replaced_between_two_reads_is_an_error(objects, store, tmp_path):
    values = {"a": np.arange(1 << 20, dtype="float32"), "b": np.ones(1 << 20, dtype="float32")}
    path = objects[0] / "changing.safetensors"
    save_file(values, path)
    url = f"{store.s3}/changing.safetensors"
    manifest = shardload.inspect(url)
    save_file({name: value + 1 for name, value in values.items()}, path)

    with pytest.raises(shardload.errors.TransferError, match="changed while it was read: another version"):
        read_tensor(manifest, "a")


def test_processes_compare_versions_in_place_of_bytes_where_the_store_tells_them(objects, store):
    path = objects[0] / "compared.safetensors"
    found = {}
    for number in range(2):
        save_file({"a": np.full((1024, 1024), number, "float32")}, path)
        for scheme in SCHEMES:
            manifest = shardload.inspect(f"{getattr(store, scheme)}/compared.safetensors")
            before = store.bytes_sent
            found[scheme, number] = content_facts(manifest, None)
            sent = store.bytes_sent - before
            assert sent == 0 if scheme != "http" else 0 < sent <= 256 * 256
    assert all(found[scheme, 0] != found[scheme, 1] for scheme in SCHEMES)


def test_a_listed_object_that_may_not_be_read_is_not_called_missing(objects, store):
    """S3 refuses access to objects that are not there, too: what it has listed is there."""
    name = "orbax_without_ocdbt/zarr/one_kernel/.zarray"
    assert (objects[0] / name).exists()
    store.status[name] = 403
    with pytest.raises(shardload.errors.TransferError, match="may not be read: HTTP status 403"):
        verify(f"{store.s3}/orbax_without_ocdbt/zarr")


def test_an_object_that_is_deleted_while_it_is_read(objects, store):
    save_file({"a": np.ones((256, 1024), "float32")}, objects[0] / "deleted.safetensors")
    manifest = shardload.inspect(f"{store.s3}/deleted.safetensors")
    (objects[0] / "deleted.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(shardload.errors.TransferError, match="changed while it was read: there is no such object"):
            read_tensor(manifest, "a")


def test_a_server_that_answers_everything_with_a_web_page_has_no_checkpoint(objects, store):
    store.paged.add("*")
    with pytest.raises(shardload.errors.ShardloadError, match=r"page to log in|no checkpoint|nothing at"):
        verify(f"{store.http}/orbax_without_ocdbt/zarr")
    assert len(store.requests) < 200
