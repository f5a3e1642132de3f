"""A load that cannot be done says why and leaves the model alone; one that fails half-way says what is where."""

import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from by_hand import check_same, pointers
from checkpoints import write_gguf
from progress_calls import AfterBlocks
from safetensors.numpy import save_file

import shardload
from shardload.errors import (
    BudgetError,
    LayoutError,
    LoadInterruptedError,
    MeshError,
    MismatchError,
    TransferError,
    UninitialisedError,
    UnsupportedError,
)
from shardload.keras_bridge.binding import bind, binding_of
from shardload.keras_bridge.model_state import state_of, weights_of
from shardload.keras_bridge.recording import registered_variables
from shardload.keras_bridge.variables import current_value, has_value, sharding_of, value_of
from shardload.mapping.assign import Assigner
from shardload.parallel import choose
from shardload.pipeline import filling
from shardload.sharding.devices import resolve_devices
from shardload.synth import synth

SMALL = 1 << 20
"""A budget under which a stack's kernels are read in four blocks each."""


def stack(seed=0, *, layers=6, width=256, outputs=256):
    keras.utils.set_random_seed(seed)
    inputs = x = keras.Input((256,))
    for i in range(layers - 1):
        x = keras.layers.Dense(width, bias_initializer="uniform", name=f"dense_{i}")(x)
    model = keras.Model(inputs, keras.layers.Dense(outputs, name="last")(x))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def abstract_stack(**options):
    with shardload.abstract():
        return stack(**options)


def saved(tmp_path, **options):
    path = tmp_path / "model.weights.h5"
    stack(**{"seed": 1, **options}).save_weights(path)
    return path


def standing(model):
    """Everything a load could change: buffers, shardings, layouts, the binding."""
    held = []
    for variable in state_of(model):
        array = current_value(variable)
        values = None if array is None else (pointers(array), array.sharding)
        held.append((variable.path, values, sharding_of(variable)))
    return held, binding_of(model)


def bound():
    model = stack()
    mesh = keras.distribution.DeviceMesh((2, 4), ["data", "tensor"], devices=jax.devices())
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["dense_\\d/kernel"] = (None, "tensor")
    layouts["last/kernel"] = ("tensor", None)
    place = resolve_devices(mesh)
    bind(model, mesh=place.mesh, devices=place.devices, layouts=choose(model, place.mesh, layouts).layouts)
    return model


LIVE = pytest.mark.parametrize("make", [stack, bound])


def load_interrupted(model, path, act, *, after=8, **options):
    shardload.load_weights(model, path, host_memory_bytes=SMALL, progress=AfterBlocks(act, after), **options)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = set(threading.enumerate())  # tests of progress in the same process leave threads that end by themselves
    yield
    assert keras.distribution.distribution() is None
    assert not registered_variables()
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("shardload")]


@pytest.fixture
def between(monkeypatch):
    """Have something happen after the headers were read and before the first byte of data is."""

    def arrange(act):
        original = filling.fill_variables

        def fill(*args, **options):
            act()
            return original(*args, **options)

        monkeypatch.setattr(filling, "fill_variables", fill)

    return arrange


# ---- what the headers tell -----------------------------------------------------------------------


@LIVE
@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"layers": 5}, r"missing from the checkpoint: last/kernel"),
        ({"layers": 7}, r"not used by the model: layers/dense_6/vars/0"),
        ({"outputs": 128}, r"last/kernel.*\(256, 256\).*\(256, 128\)"),
    ],
    ids=["missing", "unused", "shape"],
)
def test_a_mismatch_is_refused_before_the_model_is_touched(make, stored, says, tmp_path):
    path = saved(tmp_path, **stored)
    model = make()
    before = standing(model)
    with pytest.raises(MismatchError, match=f"(?s)model.weights.h5.*{says}.*The model is unchanged") as caught:
        shardload.load_weights(model, path, mesh="1x8")
    assert isinstance(caught.value, ValueError)
    assert standing(model) == before
    model.predict(np.ones((4, 256), "float32"), verbose=0)


def without(path, names):
    """A bare copy of a stack's weights, by variable path, without some and with one of its own."""
    tensors = {v.path: np.asarray(v.value) for v in stack(seed=1).weights if v.path not in names}
    save_file({**tensors, "extra": np.ones(3, np.float32)}, path)
    return path, tensors


@pytest.mark.slow
def test_not_strict_loads_what_fits_and_initialises_the_rest(tmp_path):
    path, tensors = without(tmp_path / "some.safetensors", {"last/kernel", "last/bias"})
    model = abstract_stack(seed=7)
    eager = stack(seed=7)
    report = shardload.load_weights(model, path, strict=False, mesh="1x8")
    for variable, fresh in zip(model.weights, eager.weights, strict=True):
        np.testing.assert_array_equal(variable.value, tensors.get(variable.path, np.asarray(fresh.value)))
        assert value_of(variable).sharding.device_set == set(jax.devices())
    assert (report.missing, report.unused) == (("last/kernel", "last/bias"), ("extra",))
    assert report.initialised == ("last/kernel", "last/bias")
    model.fit(np.ones((8, 256)), np.ones((8, 256)), verbose=0)


@LIVE
def test_not_strict_leaves_a_live_model_what_it_had(make, tmp_path):
    path, tensors = without(tmp_path / "some.safetensors", {"last/kernel", "last/bias"})
    model = make()
    old = {v.path: np.asarray(v.value) for v in model.weights}
    report = shardload.load_weights(model, path, strict=False, mesh="1x4")
    for variable in model.weights:
        np.testing.assert_array_equal(variable.value, tensors.get(variable.path, old[variable.path]))
    for variable in state_of(model):
        assert value_of(variable).sharding.device_set == set(jax.devices()[:4]), variable.path
    assert (report.missing, report.initialised) == (("last/kernel", "last/bias"), ())
    model(np.ones((4, 256), "float32"))


@LIVE
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mesh": "4x4"}, MeshError, "needs 16 devices, but this process has 8"),
        ({"mesh": "1y8"}, MeshError, "1y8"),
        ({"mesh": "1x4", "devices": jax.devices()[:3]}, MeshError, "3 devices"),
        ({"mesh": "1x4", "host_memory_bytes": 1000}, BudgetError, "budget of 1000 bytes.* at least 64KiB"),
        ({"mesh": "1x4", "host_memory_bytes": "1 foo"}, ValueError, "foo"),
        ({"mesh": "1x4", "layout": "no_such_mode"}, LayoutError, "no_such_mode"),
        ({"mesh": "1x4", "names": {"nothing": "nowhere"}}, MismatchError, "nothing"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_model_is_touched(make, options, error, says, tmp_path):
    path = saved(tmp_path)
    model = make()
    before = standing(model)
    with pytest.raises(error, match=says):
        shardload.load_weights(model, path, **options)
    assert standing(model) == before


def test_a_layout_that_matches_nothing_or_does_not_divide_is_refused(tmp_path):
    path = saved(tmp_path)
    mesh = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], devices=jax.devices())
    for key, axes, says in [("nowhere", ("model", None), "nowhere"), ("last/bias", ("model", None), "last/bias")]:
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[key] = axes
        model = abstract_stack()
        with pytest.raises(LayoutError, match=says):
            shardload.load_weights(model, path, mesh="1x8", layout=layouts)
        assert not any(map(has_value, model.weights))


def test_a_model_that_is_not_built_is_refused_with_the_way_out(tmp_path):
    model = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(UnsupportedError, match=r"or model\.build"):
        shardload.load_weights(model, saved(tmp_path))


# ---- a file that changes between headers and data ------------------------------------------------


def shrink(path):
    os.truncate(path, path.stat().st_size // 2)


def replace(path):
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.rename(path)


def overwrite(path):
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


CHANGES = pytest.mark.parametrize("change", [shrink, Path.unlink, replace, overwrite])


@LIVE
@CHANGES
def test_a_file_that_changes_after_its_headers_were_read_is_not_read(make, change, between, tmp_path):
    path = saved(tmp_path)
    model = make()
    before = standing(model)
    between(lambda: change(path))
    with pytest.raises(TransferError, match=r"model\.weights\.h5 (changed since|although its headers were read)"):
        shardload.load_weights(model, path, mesh="1x8")
    assert standing(model) == before


def accounted(model, old, new):
    """How many variables hold old and new values and none; fails for one that holds anything else."""
    counts = {"new": 0, "old": 0, "none": 0}
    for variable in weights_of(model):
        if not has_value(variable):
            with pytest.raises(UninitialisedError):
                variable.numpy()
            counts["none"] += 1
            continue
        found = np.asarray(value_of(variable)).tobytes()
        if np.array_equal(old[variable.path], new[variable.path]):
            continue  # learning rate, zeros
        assert found in (old[variable.path].tobytes(), new[variable.path].tobytes()), variable.path
        counts["new" if found == new[variable.path].tobytes() else "old"] += 1
    return counts


def contents(model):
    return {v.path: np.asarray(value_of(v)) for v in weights_of(model)}


@LIVE
@pytest.mark.parametrize("change", [shrink, overwrite])
@pytest.mark.parametrize("mesh", [None, "1x8"])
def test_a_file_that_changes_while_it_is_read_is_said_with_what_the_model_holds(make, change, mesh, tmp_path):
    path = saved(tmp_path)
    kept = path.read_bytes()
    model = make()
    home = binding_of(model)
    told = r"(?s)model\.weights\.h5 .*have new values.*Load it again"
    with pytest.raises(LoadInterruptedError, match=told) as caught:
        load_interrupted(model, path, lambda: change(path), mesh=mesh)
    assert isinstance(caught.value.__cause__, TransferError)
    path.write_bytes(kept)
    shardload.load_weights(model, path)  # as the message says, and without saying where again
    check_same(model, stack(seed=1))
    if mesh is None:
        assert binding_of(model) is home
    else:
        assert binding_of(model).mesh.sizes == (1, 8)


def test_a_plain_model_that_lost_every_value_is_loaded_again_where_it_was(tmp_path):
    device, path = jax.devices()[3], tmp_path / "model.weights.h5"
    with jax.default_device(device):
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512, use_bias=False)])
    model.save_weights(path)
    kept = path.read_bytes()
    with pytest.raises(LoadInterruptedError, match="0 variables have new values, 0 their old ones, 1 none"):
        load_interrupted(model, path, lambda: shrink(path), after=1)
    path.write_bytes(kept)
    assert [d.id for d in shardload.load_weights(model, path).devices] == [3]
    assert model.weights[0].value.sharding.device_set == {device}
    assert binding_of(model) is None


class Doubled(keras.layers.Dense):
    """Stores half of its kernel: what it loads has to be computed, after everything else."""

    def save_own_variables(self, store):
        store["half"] = np.asarray(self.kernel.value) / 2
        store["bias"] = np.asarray(self.bias.value)

    def load_own_variables(self, store):
        self.kernel.assign(np.asarray(store["half"]) * 2)
        self.bias.assign(store["bias"])


@pytest.mark.parametrize("change", [shrink, overwrite])
def test_what_is_read_last_is_watched_too(change, monkeypatch, tmp_path):
    path = tmp_path / "model.weights.h5"
    model = keras.Sequential([keras.Input((64,)), Doubled(64)])
    model.save_weights(path)
    finish = Assigner.finish
    monkeypatch.setattr(Assigner, "finish", lambda *args: change(path) or finish(*args))
    before = standing(model)
    with pytest.raises(TransferError, match=r"model\.weights\.h5"):
        shardload.load_weights(model, path, mesh="1x8", atomic=True)
    assert standing(model) == before


def interrupt():
    raise KeyboardInterrupt


@LIVE
@pytest.mark.parametrize("after", [1, 8, 20])
def test_ctrl_c_leaves_every_variable_old_new_or_without_value(make, after, tmp_path):
    path = saved(tmp_path)
    model, new = make(), contents(stack(seed=1))
    old = contents(model)
    new = dict(zip(old, new.values(), strict=True))
    with pytest.raises(KeyboardInterrupt) as caught:
        load_interrupted(model, path, interrupt, after=after, mesh="1x8")
    counts = accounted(model, old, new)
    (note,) = caught.value.__notes__
    assert "interrupted" in note
    assert f" {counts['none']} none" in note
    assert counts["none"] + counts["old"] > 0
    shardload.load_weights(model, path)
    assert accounted(model, old, new)["old"] == 0


@LIVE
@pytest.mark.parametrize("act", [interrupt, "shrink"])
@pytest.mark.parametrize("mesh", [None, "2x2"])
def test_atomic_puts_every_buffer_back(make, act, mesh, tmp_path):
    path = saved(tmp_path)
    model = make()
    x = np.random.default_rng(0).normal(size=(8, 256)).astype("float32")
    before, expected = standing(model), model.predict(x, verbose=0)
    act = act if callable(act) else lambda: shrink(path)
    with pytest.raises((KeyboardInterrupt, TransferError)):
        load_interrupted(model, path, act, after=20, mesh=mesh, atomic=True)
    assert standing(model) == before
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)


def test_atomic_on_an_abstract_model_leaves_it_abstract(tmp_path):
    path = saved(tmp_path)
    model = abstract_stack(seed=3)
    with pytest.raises(KeyboardInterrupt):
        load_interrupted(model, path, interrupt, after=20, mesh="1x8", atomic=True)
    assert not any(map(has_value, model.weights))
    assert binding_of(model) is None
    shardload.load_weights(model, path, mesh="1x2")
    np.testing.assert_array_equal(model.weights[-1].value, stack(seed=1).weights[-1].value)


@LIVE
def test_atomic_that_succeeds_replaces_everything(make, tmp_path):
    model, path = make(), saved(tmp_path)
    shardload.load_weights(model, path, mesh="1x4", atomic=True)
    check_same(model, stack(seed=1))
    assert binding_of(model).mesh.sizes == (1, 4)


# ---- a new model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [interrupt, "shrink", "overwrite"])
def test_a_failed_load_of_a_new_model_leaves_nothing_in_memory(act, tmp_path):
    path = tmp_path / "model.keras"
    stack(seed=1).save(path)
    act = {"shrink": lambda: shrink(path), "overwrite": lambda: overwrite(path)}.get(act, act)
    keras.backend.clear_session()
    gc.collect()
    before = {id(a) for a in jax.live_arrays()}
    with pytest.raises((KeyboardInterrupt, TransferError)) as caught:
        shardload.load(path, mesh="1x8", host_memory_bytes=SMALL, progress=AfterBlocks(act, 20))
    traceback.clear_frames(caught.tb)
    del caught
    gc.collect()
    assert [a for a in jax.live_arrays() if id(a) not in before] == []
    assert keras.config.dtype_policy().name == "float32"


@CHANGES
def test_a_new_model_is_refused_when_its_file_changes_before_it_is_read(change, between, tmp_path):
    path = tmp_path / "model.keras"
    stack(seed=1).save(path)
    between(lambda: change(path))
    with pytest.raises(TransferError, match=r"model\.keras (changed since|although its headers were read)"):
        shardload.load(path, mesh="1x8")


def test_weights_alone_do_not_make_a_model(tmp_path):
    with pytest.raises(UnsupportedError, match="load_weights"):
        shardload.load(saved(tmp_path))


# ---- other processes: extras and permissions -----------------------------------------------------

_START = """
import os, sys
os.environ["KERAS_BACKEND"] = "jax"
sys.modules["tensorflow"] = None
"""


def run(program, *arguments):
    command = [sys.executable, "-c", _START + textwrap.dedent(program), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path):
    import gguf

    folder = synth("gemma3_270m", format="safetensors", scale=0.02, directory=tmp_path / "gemma")
    quantised = (np.zeros((32, 34), np.uint8), gguf.GGMLQuantizationType.Q8_0)
    file = write_gguf(tmp_path / "model.gguf", {"blk.0.attn_q.weight": quantised})
    out = run(
        """
        sys.modules["keras_hub"] = sys.modules["gguf"] = None
        import shardload
        from shardload.cli import main
        from jax.sharding import PartitionSpec
        load_arrays = lambda source: shardload.load_arrays(source, lambda *_: PartitionSpec(), mesh="1x1")
        for call, source in ((shardload.load, sys.argv[1]), (load_arrays, sys.argv[2])):
            try:
                call(source)
            except shardload.errors.MissingExtraError as error:
                print(error.extra, "|", error)
        for command in ("inspect", "verify", "diff"):
            assert main([command, *sys.argv[2:3] * (1 + (command == "diff"))]) == 0, command
        """,
        folder,
        file,
    )
    hub, decoder, *rest = out.splitlines()
    assert "self_attn.q_proj.weight" in "".join(rest) and "no digests" in "".join(rest)
    assert hub.startswith("hub | ") and "pip install 'shardload[hub]'" in hub
    assert decoder.startswith("gguf | ") and "pip install 'shardload[gguf]'" in decoder


@pytest.mark.slow
def test_files_without_permission_are_refused_also_when_it_is_taken_away_later():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        stack(seed=1).save(folder / "later.keras")
        for copy, mode in [("good", 0o644), ("secret", 0o000)]:
            (folder / f"{copy}.keras").write_bytes((folder / "later.keras").read_bytes())
            (folder / f"{copy}.keras").chmod(mode)
        closed = folder / "closed"
        closed.mkdir()
        (closed / "inside.keras").write_bytes(b"")
        closed.chmod(0o000)
        if os.getuid() == 0:
            os.chown(folder / "later.keras", 65534, 65534)
        out = run(
            """
            import shardload
            from shardload.pipeline import filling
            folder, fill = sys.argv[1], filling.fill_variables
            shardload.load(folder + "/good.keras")  # imports what it needs while it may
            if os.getuid() == 0:  # to whom everything is permitted
                os.setuid(65534)
            def taken_away(*args, **options):
                os.chmod(folder + "/later.keras", 0)
                return fill(*args, **options)
            for source in ("secret.keras", "closed/inside.keras", "later.keras"):
                filling.fill_variables = taken_away
                try:
                    shardload.load(os.path.join(folder, source))
                except shardload.ShardloadError as error:
                    print(type(error).__name__, error)
            """,
            folder,
        )
        closed.chmod(0o755)
    secret, inside, later = out.splitlines()
    assert secret.startswith("SourceError") and "secret.keras may not be read by this user" in secret
    assert inside.startswith(("SourceError", "SourceNotFoundError")) and "inside.keras" in inside
    assert "ermission" in inside or "may not be read" in inside
    assert later.startswith("TransferError") and "later.keras" in later and "ermission" in later
