"""What the adapter writes, Orbax and Keras read; what goes wrong in Orbax is told as what it was."""

import errno
import json
import os
import shutil
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from callback_models import compiled, fit
from keras.src.saving import saving_lib
from orbax.checkpoint import v1 as ocp
from small_disk import small_disk

from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SaveError, SourceError, UsageError
from shardload.loaders import open_manifest
from shardload.loaders.orbax import saving
from shardload.loaders.orbax.saving import PendingSave, save_error, start_save, write_plain_arrays
from shardload.runs.digests import Digests, find_damage
from shardload.runs.listing import list_steps
from shardload.runs.publish import Root, Staging

# Orbax warns whenever it restores without being told shardings, which is what a plain load does.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def arrays(n_bytes=1 << 16):
    return {"a": jnp.arange(n_bytes // 4, dtype=jnp.float32), "b": {"c": jnp.bfloat16(3), "n": jnp.int32(7)}}


def save(root, step, items, **options):
    staging = Staging.begin(root, step)
    start_save(staging.path, items, step=step, **options).result()
    (staging.path / "shardload" / "step.json").write_text("{}")
    Digests.compute(staging.path).write(staging.path)
    return staging.publish()


def trained():
    """A functional model: Keras' own loader leaves Sequential and subclassed ones at random weights."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="b")(keras.layers.Dense(3, name="a")(inputs)), name="m")
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    return model


def as_keras_saves(model):
    """The items that Keras' own callback hands to Orbax."""
    config, _ = saving_lib._serialize_model_as_json(model)
    return {"pytree": model.get_state_tree(), "model_config": {"config": config}}


def test_orbax_reads_what_was_published(tmp_path):
    tree = arrays()
    step = save(tmp_path, 3, {"pytree": tree, "model_config": {"config": "{}"}})
    found = ocp.load_checkpointables(step)
    assert found["model_config"] == {"config": "{}"} and found["shardload"] == {"format": "1"}
    jax.tree.map(np.testing.assert_array_equal, found["pytree"], tree)
    assert find_damage(step) == []


@pytest.mark.parametrize("name", ["run[lr=0.1]", "a[b", "what?", "a*b"])
def test_a_folder_whose_name_is_a_pattern_is_saved_to(name, tmp_path, monkeypatch):
    """Orbax lists files by glob, and found none."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(links))
    tree, run = arrays(), tmp_path / name / "run"
    run.mkdir(parents=True)
    step = save(run, 3, {"pytree": tree})
    assert find_damage(step) == []
    shutil.copytree(step, tmp_path / "plain")  # Orbax reads by patterns, too
    jax.tree.map(np.testing.assert_array_equal, ocp.load_checkpointables(tmp_path / "plain")["pytree"], tree)
    write_plain_arrays(run / "plain", {"pytree": tree})
    assert (run / "plain" / "pytree" / "a" / "zarr.json").exists()
    assert not list(links.iterdir())


def test_a_backslash_in_a_folder_is_refused(tmp_path):
    (tmp_path / "a\\b").mkdir()
    (tmp_path / "plain").mkdir()
    with pytest.raises(SaveError, match=r"takes the backslash in its path for a slash\. Choose another name"):
        save(tmp_path / "a\\b", 3, {"pytree": arrays()})
    step = save(tmp_path / "plain", 3, {"pytree": arrays()})
    shutil.move(step, tmp_path / "a\\b")
    with pytest.raises(SourceError, match=r"takes the backslash in its path for a slash\. Rename the folder"):
        open_manifest(tmp_path / "a\\b" / step.name)


def test_the_older_orbax_interface_reads_it_too(tmp_path):
    import orbax.checkpoint as v0

    tree = arrays()
    for number in (3, 12):
        step = save(tmp_path, number, {"pytree": tree})
    assert v0.CheckpointManager(tmp_path).all_steps() == [3, 12]
    jax.tree.map(np.testing.assert_array_equal, v0.StandardCheckpointer().restore(step / "pytree"), tree)


def test_sharded_arrays_are_saved(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), jax.NamedSharding(mesh, jax.P(None, "x")))
    step = save(tmp_path, 0, {"pytree": {"w": array}})
    np.testing.assert_array_equal(ocp.load_checkpointables(step)["pytree"]["w"], array)


@pytest.mark.slow
def test_keras_loads_a_published_step(tmp_path):
    model = trained()
    save(tmp_path, 5, as_keras_saves(model))
    again = keras.saving.load_model(tmp_path)  # Keras takes the folder of all steps here, for its own ones too
    for a, b in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(model.predict(np.ones((1, 4)), verbose=0), again.predict(np.ones((1, 4)), verbose=0))


@pytest.mark.parametrize("which", ["5", "."], ids=["step", "root"])
def test_keras_loads_the_weights_of_a_published_step(tmp_path, which):
    model = trained()
    save(tmp_path, 5, as_keras_saves(model))
    other = trained()
    for weight in other.weights:
        weight.assign(weight + 1)
    other.load_weights(str((tmp_path / which).resolve()))
    for a, b in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def codecs(step):
    """The codecs of every array, from Orbax's store, as zarr3 records them."""
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/pytree/"}).result()
    found = [json.loads(store[key]) for key in store.list().result() if key.endswith(b"zarr.json")]
    return {json.dumps(entry["codecs"]) for entry in found}


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_compression_is_a_choice(tmp_path, compression):
    step = save(tmp_path, 0, {"pytree": {"z": jnp.zeros(1 << 18, jnp.float32)}}, compression=compression)
    callback = OrbaxCheckpoint(tmp_path / "run")
    callback.compression = compression  # an attribute that is changed after the callback was made counts, too
    fit(compiled(), callback)
    for path in (step, tmp_path / "run" / "4"):
        assert all(("zstd" in text) == (compression == "zstd") for text in codecs(path))
    n_bytes = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
    assert (n_bytes > 1 << 20) == (compression == "none")


def test_what_changes_afterwards_is_not_saved(tmp_path):
    """The call returns once it has copies: donating or overwriting the arrays later does no harm."""
    host = np.arange(1 << 20, dtype=np.float32)
    tree = {"a": jnp.array(host)}
    staging = Staging.begin(tmp_path, 0)
    pending = start_save(staging.path, {"pytree": tree}, step=0)
    jax.jit(lambda a: a * 0, donate_argnums=0)(tree["a"]).block_until_ready()
    pending.result()
    np.testing.assert_array_equal(ocp.load_checkpointables(staging.path)["pytree"]["a"], host)


def test_waiting_can_be_given_up_and_taken_up_again(tmp_path):
    gate = threading.Event()
    saving.save_began()  # as start_save does; the end of the save is counted
    pending = PendingSave(SimpleNamespace(result=gate.wait), path=tmp_path, step=3, parent=tmp_path.parent.stat())
    with pytest.raises(TimeoutError, match="Step 3 is still being written"):
        pending.result(0.01)
    assert not pending.done()
    gate.set()
    pending.result()
    assert pending.done()


def test_paths_are_absolute_and_their_folder_is_there(tmp_path):
    for said, path, item, options in (
        ("absolute", "relative/step", "pytree", {}),
        ("compression", tmp_path / "x", "pytree", {"compression": "gzip"}),
        ("checkpointable 'shardload'", tmp_path / "x", "shardload", {}),
    ):
        with pytest.raises(UsageError, match=said):
            start_save(path, {item: arrays()}, **options)
    with pytest.raises(SaveError, match=r"there is no folder .*Create it first") as caught:
        start_save(tmp_path / "gone" / "x", {"pytree": arrays()}, step=4)
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "gone").exists()


def test_a_folder_removed_while_saving_is_the_cause_that_is_told(tmp_path):
    root = tmp_path / "run"
    staging = Staging.begin(Root(root, create=True), 4)
    pending = start_save(staging.path, {"pytree": arrays(1 << 24)}, step=4)
    while root.exists():  # Orbax may be making files while we remove
        shutil.rmtree(root, ignore_errors=True)
    with pytest.raises(SaveError, match=r"Cannot save step 4 to .*(removed|gone|No such file)"):
        pending.result()


def test_a_full_disk_is_told_and_older_steps_stay(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        save(disk, 1, {"pytree": arrays()})
        with pytest.raises(SaveError, match=r"step 2 .*No space left on device.*Free some room") as caught:
            save(disk, 2, {"pytree": arrays(1 << 23)})
        assert caught.value.errno == errno.ENOSPC
        assert [info.step for info in list_steps(disk)] == [1] and find_damage(disk / "1") == []


@pytest.mark.parametrize(
    ("cause", "number"),
    [
        (ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [os_error_code='28']"), errno.ENOSPC),
        (ValueError("PERMISSION_DENIED: Failed to open [os_error_code='13']"), errno.EACCES),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
        (ValueError("No ArrayMetadata found for process_index=0"), errno.ENOENT),
        (ValueError("something else"), None),
    ],
)
def test_the_real_cause_is_found(tmp_path, cause, number):
    for error in (cause, wrapped(cause)):
        made = save_error(error, step=9, folder=tmp_path / "x")
        assert made.errno == number and "Cannot save step 9" in str(made)
        assert (os.strerror(number) if number else type(error).__name__) in str(made)


def wrapped(cause):
    outer = RuntimeError("background thread failed")
    outer.__cause__ = cause
    return outer


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(SaveError, match="Cannot save step 1"):
        start_save(tmp_path / "x", {"pytree": arrays()}, step=1).result()
