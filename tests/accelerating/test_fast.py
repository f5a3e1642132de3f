"""`shardload.fast`: who is inside, what a call returns and raises, and what the report says."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import jax
import keras
import numpy as np
import pytest
from keras.models import load_model  # by name, as programs do before the block
from keras.src.saving import saving_api, saving_lib
from same_models import compare, variable_differences

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import BackendError, DamagedError, UninitialisedError

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax, asked by Keras

X, Y = np.random.default_rng(0).random((16, 4), "float32"), np.zeros((16, 3), "float32")


def build(units=5, compiled=True):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(units)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    if compiled:
        model.compile("rmsprop", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained model in each of Keras' formats."""
    folder = tmp_path_factory.mktemp("saved")
    keras.backend.clear_session()  # steps are stored by names
    model = build()
    model.fit(X, Y, verbose=0)
    model.save(folder / "m.keras")
    model.save(folder / "old.h5")
    keras.saving.save_model(model, folder / "unzipped", zipped=False)
    model.save_weights(folder / "m.weights.h5")
    model.save_weights(folder / "m.weights.json", max_shard_size=1e-7)
    model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(str(folder / "steps"))])
    return folder


def by(report):
    return [call.by for call in report]


# ---- what calls do -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m.keras", {}), ("m.keras", {"compile": False}), ("unzipped", {}), ("unzipped", {"compile": False}),
        ("steps", {}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # Keras saves no optimizer in a folder
def test_load_model(saved, name, options):
    report = compare(lambda: load_model(saved / name, **options))
    assert by(report) == ["shardload"]
    (call,) = report
    assert call.call == f"keras.saving.load_model({str(saved / name)!r})"
    assert call.read_bytes == call.load.bytes.read and call.why is None and call.load.variables >= 4


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.weights.json", "steps"])
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_load_weights(saved, name):
    def load():
        model = build()
        if name == "steps":
            model.optimizer.build(model.trainable_variables)
        assert model.load_weights(saved / name) is None
        assert keras.saving.load_weights(model, saved / name) is None
        return model

    assert by(compare(load)) == ["shardload"] * 2


def test_a_model_that_trained_goes_on_as_outside(saved):
    def load():
        model = load_model(saved / "m.keras")
        model.load_weights(saved / "m.weights.h5")
        model.fit(X, Y, verbose=0)
        return model

    assert by(compare(load)) == ["shardload"] * 2


def test_an_optimizer_that_is_not_built_warns_as_in_keras(saved):
    with shardload.fast(), pytest.warns(UserWarning, match="Skipping variable loading for optimizer") as inside:
        build().load_weights(saved / "m.weights.h5")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer") as outside:
        build().load_weights(saved / "m.weights.h5")
    assert len(inside) == len(outside) and inside[0].filename == __file__


@pytest.mark.parametrize("kind", ["DataParallel", "ModelParallel"])
def test_under_the_distribution_that_is_set(saved, kind):
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ["batch", "model"]))
    layouts[".*dense/kernel"] = ("model", None)

    def load():
        found = (
            keras.distribution.DataParallel(device_mesh=keras.distribution.DeviceMesh((8,), ["batch"]))
            if kind == "DataParallel"
            else keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        )
        with found.scope():
            model = load_model(saved / "m.keras")
            model.load_weights(saved / "m.weights.h5")
            model.fit(X, Y, verbose=0)
        return model

    assert by(compare(load)) == ["shardload"] * 2


def test_on_the_default_device_of_jax(saved):
    def load():
        with keras.device("cpu:3"):
            return load_model(saved / "m.keras")

    assert by(compare(load)) == ["shardload"]


def test_a_model_of_shardload_stays_on_its_mesh(saved):
    model = shardload.load(saved / "m.keras", mesh="1x8", layout="replicated")
    before = [v.value.sharding for v in model.weights]
    with shardload.fast() as report:
        model.load_weights(saved / "m.weights.h5")
    assert by(report) == ["shardload"] and [v.value.sharding for v in model.weights] == before


class Doubled(keras.layers.Dense):
    """A layer that Keras does not know."""


def test_custom_objects(saved, tmp_path):
    keras.Sequential([keras.Input((4,)), Doubled(3)]).save(tmp_path / "own.keras")
    assert by(compare(lambda: load_model(tmp_path / "own.keras", {"Doubled": Doubled}))) == ["shardload"]
    assert by(compare(lambda: load_model(tmp_path / "own.keras"))) == ["keras"]


def test_safe_mode(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Lambda(lambda x: x)])
    model.save(tmp_path / "lambda.keras")
    assert by(compare(lambda: load_model(tmp_path / "lambda.keras"))) == ["keras"]


class Words(keras.layers.Layer):
    """A layer with a file of its own."""

    words = None

    def call(self, x):
        return x

    def save_assets(self, folder):
        (Path(folder) / "words").write_text(" ".join(self.words))

    def load_assets(self, folder):
        self.words = (Path(folder) / "words").read_text().split()


def test_a_vocabulary_in_a_folder(tmp_path):
    words = Words()
    words.words = ["a", "b"]
    model = keras.Sequential([keras.Input((4,)), words, keras.layers.Dense(3)])
    keras.saving.save_model(model, tmp_path / "words", zipped=False)
    with shardload.fast() as report:
        found = load_model(tmp_path / "words", {"Words": Words})
    assert by(report) == ["shardload"]
    assert found.layers[0].words == ["a", "b"]


# ---- what goes to Keras --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "load",
    [
        lambda saved: load_model(saved / "nothing.keras"),
        lambda saved: load_model(saved / "nothing"),
        lambda saved: load_model(saved / "m.weights.h5"),
        lambda saved: load_model(saved / "."),
        lambda saved: load_model(None),
        lambda saved: load_model(saved / "m.keras", nonsense=1),
        lambda saved: build().load_weights(saved / "nothing.weights.h5"),
        lambda saved: build().load_weights(saved / "nothing.keras"),
        lambda saved: build().load_weights(saved / "nothing"),
        lambda saved: build(units=7).load_weights(saved / "m.weights.h5"),
        lambda saved: build(units=7).load_weights(saved / "m.weights.json"),
        lambda saved: build().load_weights(saved / "m.weights.h5", by_name=True),
        lambda saved: build().load_weights(saved / "m.weights.h5", nonsense=1),
        lambda saved: build().load_weights(),
        lambda saved: keras.Sequential([keras.layers.Dense(3)]).load_weights(saved / "m.weights.h5"),
    ],
)
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_an_error_is_that_of_keras(saved, load):
    report = compare(lambda: load(saved))
    assert set(by(report)) <= {"keras"} and all(call.error for call in report)


@pytest.mark.filterwarnings("ignore:.*objects could not be loaded")
def test_what_does_not_fit_is_skipped_by_keras(saved):
    def load():
        model = build(units=7, compiled=False)
        model.load_weights(saved / "m.weights.h5", skip_mismatch=True)
        return model

    (call,) = compare(load)
    assert call.by == "keras" and "(4, 5)" in call.why


def test_objects_to_skip(saved):
    def load():
        model = build(compiled=False)
        keras.saving.load_weights(model, saved / "m.weights.h5", objects_to_skip=[model.layers[0]])
        return model

    (call,) = compare(load)
    assert call.why == "objects_to_skip is given"


def test_hdf5_of_keras_2(saved):
    def load():
        model = load_model(saved / "old.h5", compile=False)
        model.load_weights(saved / "old.h5")
        return model

    report = compare(load)
    assert [call.why for call in report] == ["it is an HDF5 file of Keras 2 (.h5)"] * 2
    assert [call.call.partition("(")[0] for call in report] == ["keras.saving.load_model", "Functional.load_weights"]


def test_a_failed_attempt_uses_up_no_name_and_no_seed(saved, monkeypatch):
    monkeypatch.setattr("shardload.accelerating.fill_model", Mock(side_effect=RuntimeError("out of luck")))
    (call,) = compare(lambda: (load_model(saved / "m.keras"), build())[1])
    assert call.why == "RuntimeError: out of luck"


def test_damage_is_not_handed_to_keras(tmp_path):
    build().fit(X, Y, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run")])
    largest = max((p for p in tmp_path.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    with shardload.fast() as report, pytest.raises(DamagedError):
        load_model(tmp_path / "run")
    (call,) = report
    assert call.error is not None and call.by == "shardload"


class Failing(keras.layers.Dense):
    """A layer that fails after some calls: shardload's first one is before any variable has a new value."""

    calls_left = 0

    def load_own_variables(self, store):
        if Failing.calls_left == 0:
            raise ValueError("out of luck")
        Failing.calls_left -= 1
        super().load_own_variables(store)


def test_a_failure_half_way_is_that_of_keras(tmp_path, monkeypatch):
    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, name="a"), Failing(3, name="b")], name="m")

    saved = model()
    saved.layers[0].kernel.assign(saved.layers[0].kernel * 2)
    saved.save_weights(tmp_path / "m.weights.h5")
    outside, inside = model(), model()
    with pytest.raises(ValueError, match="out of luck"):
        outside.load_weights(tmp_path / "m.weights.h5")
    monkeypatch.setattr(Failing, "calls_left", 1)
    with shardload.fast() as report, pytest.raises(ValueError, match="out of luck"):
        inside.load_weights(tmp_path / "m.weights.h5")
    (call,) = report
    assert call.by == "keras" and "variables have new values" in call.why
    for a, b in zip(inside.layers[0].weights, outside.layers[0].weights, strict=True):
        assert variable_differences(a, b) == []
    with pytest.raises(UninitialisedError, match="m/b/bias"):  # shardload had let go of it; Keras leaves the old value
        _ = inside.layers[1].bias.value


class Interrupts(keras.layers.Dense):
    """Ctrl-C while its weights are loaded."""

    def load_own_variables(self, store):
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_call(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Interrupts(3)])
    model.save_weights(tmp_path / "m.weights.h5")
    with shardload.fast() as report, pytest.raises(KeyboardInterrupt):
        model.load_weights(tmp_path / "m.weights.h5")
    assert [call.error for call in report] == ["KeyboardInterrupt"]


# ---- who is inside -------------------------------------------------------------------------------


def test_nothing_is_left_behind(saved):
    names = [(saving_lib, "load_model"), (saving_lib, "load_weights_only"), (saving_api, "load_weights")]
    names += [(keras.saving, "load_weights")]
    before = [getattr(module, name) for module, name in names]
    with pytest.raises(ZeroDivisionError), shardload.fast():
        assert [getattr(module, name) for module, name in names] != before
        raise ZeroDivisionError
    assert [getattr(module, name) for module, name in names] == before
    assert keras.models.load_model is load_model


def test_another_thread_sees_plain_keras(saved):
    with shardload.fast() as report:
        thread = threading.Thread(target=load_model, args=(saved / "m.keras",))
        thread.start()
        thread.join()
        assert len(report) == 0
        load_model(saved / "m.keras")
    assert len(report) == 1


def test_threads_have_reports_of_their_own(saved):
    inside, found = threading.Barrier(2), {}

    def run(n_calls):
        with shardload.fast() as report:
            inside.wait()
            for _ in range(n_calls):
                load_model(saved / "m.keras")
            inside.wait()
        found[n_calls] = by(report)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (1, 2)))
    assert found == {1: ["shardload"], 2: ["shardload"] * 2}


def test_a_task_that_outlives_the_block_sees_plain_keras(saved):
    async def main():
        leave = asyncio.Event()

        async def work():
            load_model(saved / "m.keras")
            await leave.wait()
            load_model(saved / "m.keras")

        with shardload.fast() as report:
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            await asyncio.to_thread(load_model, saved / "m.keras")
        with shardload.fast() as other:
            leave.set()
            await asyncio.sleep(0)
        await task
        return report, other

    report, other = asyncio.run(main())
    assert (len(report), len(other)) == (2, 0)


def test_blocks_nest(saved):
    with shardload.fast() as outer:
        load_model(saved / "m.keras")
        with shardload.fast() as inner:
            load_model(saved / "m.keras")
        load_model(saved / "m.keras")
    load_model(saved / "m.keras")
    assert (len(outer), len(inner)) == (3, 1)


def test_a_generator_may_be_closed_elsewhere(saved):
    def numbers():
        with shardload.fast() as report:
            yield report
            yield report

    running = numbers()
    next(running)
    thread = threading.Thread(target=running.close)
    thread.start()
    thread.join()
    load_model(saved / "m.keras")
    assert saving_lib.load_model.__module__ == "keras.src.saving.saving_lib"
    assert not hasattr(saving_lib.load_model, "__wrapped__")


def test_a_class_that_overrides_load_weights(saved):
    class Own(keras.Sequential):
        def load_weights(self, *args, **kwargs):
            super().load_weights(*args, **kwargs)
            return "done"

    def load():
        model = Own([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(3)])
        return model.load_weights(saved / "m.weights.h5")

    assert by(compare(load)) == ["shardload"]


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(BackendError), shardload.fast():
        pass


# ---- the report ----------------------------------------------------------------------------------


def test_the_report(saved):
    with shardload.fast() as report:
        assert str(report) == "Nothing was loaded." and report
        model = load_model(saved / "m.keras")
        load_model(saved / "old.h5", compile=False)
        with pytest.raises(ValueError, match="not yet been built"):
            keras.Sequential([keras.layers.Dense(3)]).load_weights(saved / "m.weights.h5")
    lines = str(report).splitlines()
    assert lines[0].startswith(f"keras.saving.load_model('{saved}/m.keras'): shardload, ")
    assert "  because it is an HDF5 file of Keras 2 (.h5)" in lines
    assert any(line.startswith("  raised ValueError: You are loading weights") for line in lines)
    assert repr(report) == "<FastReport: 3 calls, 1 by shardload; print it for all>"
    facts = json.loads(json.dumps(report.to_json()))
    assert [call["by"] for call in facts] == ["shardload", "keras", "keras"]
    assert facts[0]["load"]["bytes"]["read"] == facts[0]["read_bytes"]
    assert shardload.report(model).variables == facts[0]["load"]["variables"]
    assert jax.tree.leaves(facts[1]["load"]) == []
