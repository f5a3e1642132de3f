"""Arguments that can not be right are refused in the caller's own words, and first; numbers of NumPy are taken."""

import inspect
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from cli_fakes import run
from progress_calls import Counted
from safetensors.numpy import save_file

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.console.options import FormatName
from shardload.converting import ConvertReport
from shardload.errors import BackendError, SourceError, SourceNotFoundError, UsageError
from shardload.keras_bridge.hub_imports import timed
from shardload.loaders.registry import names
from shardload.reports.calls import FastReport
from shardload.resolve.opening import open_source
from shardload.synth import synth
from shardload.units import dtype_name

NOWHERE = "./there/is/nothing"
"""Opening it would raise something else."""


@pytest.mark.parametrize("call", [shardload.load, shardload.plan, shardload.inspect])
@pytest.mark.parametrize("source", [None, 3])
def test_what_is_no_source_says_what_is(call, source):
    with pytest.raises(UsageError, match="expected a path, a name or a handle") as caught:
        call(source)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("dtype", "says"),
    [("nonsense", r"dtype 'nonsense'. Choose bfloat16, float16, float32"), ("float64", "jax_enable_x64")],
)
@pytest.mark.parametrize("call", [shardload.load, shardload.plan])
def test_a_dtype_that_is_none_or_that_jax_does_not_hold_is_refused_first(call, dtype, says):
    with pytest.raises(UsageError, match=says):
        call(NOWHERE, dtype=dtype)


@pytest.mark.parametrize("amount", [-1, 0, "lots", 1.5, True])
@pytest.mark.parametrize("call", [shardload.load, shardload.plan])
def test_an_amount_of_memory_that_is_none_is_refused_first(call, amount):
    with pytest.raises(UsageError, match=r"host_memory_bytes: .*number of bytes") as caught:
        call(NOWHERE, host_memory_bytes=amount)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("memory", "says"),
    [(0, "A number of bytes must be positive"), *((n, "16 means 16 bytes. Write 16GiB") for n in (16, "16"))],
)
def test_a_device_without_memory_or_its_unit_is_refused_first(memory, says):
    with pytest.raises(UsageError, match=f"device_memory_bytes: {says}"):
        shardload.plan(NOWHERE, device_memory_bytes=memory)


@pytest.mark.parametrize("model", [None, "model.keras"])
def test_what_is_no_model_is_refused_first(model):
    with pytest.raises(UsageError, match="as model: expected a Keras model, got "):
        shardload.load_weights(model, NOWHERE)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("progress", "loud", "'bar', 'lines' or 'json' for one of them; or an object with the methods start"),
        ("progress", print, "Supported: True for a bar on a terminal"),
        ("strict", "no", "expected True or False"),
        ("task", None, "expected True or False"),
        ("devices", 8, r"expected a list of devices such as jax.devices\(\)\[:4\]"),
        ("devices", ["cpu:0"], "expected a list of devices"),
        ("devices", [], "expected a list of devices"),
        ("custom_objects", [], "expected a mapping"),
        ("axes", 3, "expected text such as 'data,model'"),
    ],
)
def test_an_argument_of_another_kind_is_refused_first(argument, value, message):
    with pytest.raises(UsageError, match=message) as caught:
        shardload.load(NOWHERE, **{argument: value})
    assert str(caught.value).startswith(f"Cannot use {argument}=")


def test_values_that_become_infinite_are_told(tmp_path):
    def model(dtype):
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="large", dtype=dtype)])

    stored = model("bfloat16")
    stored.layers[0].kernel.assign(keras.ops.full((8, 8), 1e30))
    stored.save_weights(tmp_path / "m.weights.h5")
    with pytest.warns(UserWarning, match="range of the new dtype became infinite: layers/dense/vars/0") as warned:
        report = shardload.load_weights(model("float16"), tmp_path / "m.weights.h5", mesh="1x8")
    assert warned[0].filename == __file__
    assert str(warned[0].message) in report.notes


def test_a_bar_is_drawn_where_it_is_wanted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]).save(tmp_path / "model.keras")
    for wanted in (True, "bar"):
        shardload.load(tmp_path / "model.keras", progress=wanted)
        assert "Loading" in capsys.readouterr().err
    for silent in (None, False):
        shardload.load(tmp_path / "model.keras", progress=silent)
        assert capsys.readouterr().err == ""
    monkeypatch.delenv("FORCE_COLOR")
    shardload.load(tmp_path / "model.keras", progress=True)
    assert capsys.readouterr().err == ""  # nothing to draw on


def test_what_a_notebook_shows_is_short_or_the_table(tmp_path):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]).save(tmp_path / "model.keras")
    model = shardload.load(tmp_path / "model.keras")
    for report in (shardload.report(model), shardload.plan(tmp_path / "model.keras")):
        shown = f"(keras-archive) on {report.mesh}: 2 variables, 80 bytes; print it for the table>"
        assert repr(report).endswith(shown)
        html = report._repr_html_()
        assert html.startswith("<pre>") and "keras-archive" in html and str(tmp_path) in html
    manifest = shardload.inspect(tmp_path / "model.keras")
    assert repr(manifest) == f"<Manifest {tmp_path}/model.keras (keras-archive): 2 tensors, 20 parameters, 80 bytes>"


@pytest.mark.parametrize("call", [lambda path: shardload.report(shardload.load(path)), shardload.plan])
def test_the_stages_of_a_report_add_up_to_its_total(tmp_path, monkeypatch, call):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]).save(tmp_path / "model.keras")

    def opens_slowly(*arguments, **options):
        monkeypatch.delitem(sys.modules, "keras_hub", raising=False)
        with timed():  # as a first load imports KerasHub, in whatever stage
            time.sleep(0.02)
        monkeypatch.undo()
        return open_source(*arguments, **options)

    monkeypatch.setattr("shardload.pipeline.load.open_source", opens_slowly)
    report = call(tmp_path / "model.keras")
    *stages, total, ready = report.seconds.named().values()
    assert math.fsum(filter(None, stages)) == pytest.approx(total)
    assert ready is None
    assert report.seconds.imports >= 0.02
    assert list(report.to_json()["seconds"]) == list(report.seconds.named())
    rows = str(report)[str(report).index("Time ") :].split("total")[0]
    assert all(label in rows for label in ("imports", "build", "plan"))


def test_a_conversion_says_how_long_it_prepared(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    counted = Counted()
    done = shardload.save_as(model, tmp_path / "model.weights.h5", progress=counted)
    assert [stage[0] for stage in counted.stages] == ["Preparing model.weights.h5", "Saving model.weights.h5"]
    assert counted.ended and 0 < done.preparing_s < done.seconds == done.to_json()["seconds"]
    assert "prepare" not in str(done) or done.preparing_s >= 1
    assert ", 9.0 s, 8.0 s of them to prepare" in str(replace(done, seconds=9.0, preparing_s=8.0))


def test_a_notebook_shows_the_text_of_other_reports():
    done = ConvertReport("a", "<b>.weights.h5", "keras-h5", 2, 80, 0, 0.5, ("a & b",))
    assert done._repr_html_().startswith("<pre>&lt;b&gt;.weights.h5: keras-h5, 2 tensors") and "\n" in str(done)
    assert done._repr_html_().endswith("note: a &amp; b</pre>")
    assert FastReport()._repr_html_() == "<pre>Nothing was loaded.</pre>"


def test_a_notebook_shows_a_short_traceback(tmp_path):
    """The line of the program, not ours; and the message, once."""
    with pytest.raises(SourceNotFoundError) as caught:
        shardload.load(tmp_path / "none.weights.h5")
    shown = caught.value._render_traceback_()
    assert len(shown) <= 4 and "shardload.load(tmp_path" in shown[1]
    assert shown[-1] == f"SourceNotFoundError: {caught.value}" and str(Path(shardload.__file__).parent) not in "".join(
        shown[:-1]
    )


def test_a_spelling_of_a_dtype_is_as_good_as_its_name(tmp_path):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]).save(tmp_path / "model.keras")
    assert shardload.load(tmp_path / "model.keras", dtype="bf16").weights[0].dtype == "bfloat16"


@pytest.mark.parametrize("call", ["load('x')", "load_weights(keras.Sequential(), 'x')", "plan('x')"])
def test_another_backend_is_said_to_be_one(call, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with pytest.raises(BackendError, match=r"Keras was imported to run on 'tensorflow'. Set .* KERAS_BACKEND=jax"):
        eval(f"shardload.{call}")


@pytest.mark.slow
def test_the_default_backend_where_it_is_not_installed_is_said_to_be_one(tmp_path):
    code = "import sys; sys.modules['tensorflow'] = None; import shardload; shardload.load('x')"
    done = run((sys.executable, "-c", code), KERAS_HOME=str(tmp_path), KERAS_BACKEND="tensorflow")
    assert done.stderr.splitlines()[-1].startswith("shardload.errors.BackendError: shardload needs Keras on JAX, but")


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "backend"), [({}, "jax"), ({"KERAS_BACKEND": "torch"}, "torch")])
def test_keras_runs_on_jax_where_nothing_else_is_set(tmp_path, settings, backend):
    code = "import os, shardload; print(os.environ['KERAS_BACKEND'])\nif os.environ['KERAS_BACKEND'] == 'jax':\n"
    code += " import keras; print(keras.config.backend())"
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')  # Keras writes this file by itself
    assert set(run((sys.executable, "-c", code), KERAS_HOME=str(tmp_path), **settings).stdout.split()) == {backend}


@pytest.mark.slow
def test_a_backend_that_keras_has_chosen_already_is_left_alone(tmp_path):
    code = "import os, sys, types; sys.modules['keras'] = types.ModuleType('keras')\nimport shardload\n"
    done = run((sys.executable, "-c", code + "print(os.environ.get('KERAS_BACKEND'))"), KERAS_HOME=str(tmp_path))
    assert done.stdout.strip() == "None"


def test_a_format_can_be_insisted_on_where_the_ending_lies(tmp_path):
    path = tmp_path / "weights.safetensors"
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]).save_weights(tmp_path / "x.weights.h5")
    (tmp_path / "x.weights.h5").rename(path)
    with pytest.raises(SourceError, match=r"insist with format='keras-h5' \(--format keras-h5\)"):
        shardload.inspect(path)
    assert shardload.inspect(path, format="keras-h5").format == "keras-h5"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    assert shardload.load_weights(model, path, format="keras-h5").format == "keras-h5"


@pytest.mark.parametrize("call", [shardload.load, shardload.plan, shardload.inspect])
def test_a_format_there_is_none_of_names_what_there_is(call):
    with pytest.raises(UsageError, match=r"Unknown format 'onnx'; supported formats: keras-h5, "):
        call(NOWHERE, format="onnx")


def test_the_command_takes_every_format():
    assert {str(f) for f in FormatName} == set(names())


def _public():
    """Functions and classes with keyword-only arguments, which a typing error turns into unknown ones."""
    for name in sorted({*shardload.__all__} - {*shardload.errors.__all__, "LoadReport", "PlanReport"}):
        found = getattr(shardload, name)
        kinds = {p.kind for p in inspect.signature(found).parameters.values()} if callable(found) else set()
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_KEYWORD not in kinds:
            yield name, found
    yield "OrbaxCheckpoint", shardload.callbacks.OrbaxCheckpoint


def test_a_misspelt_argument_is_refused_with_the_closest():
    found = dict(_public())
    assert {"load", "load_arrays", "restore", "convert", "save_as", "Checkpointer", "generate"} <= {*found}
    for name, function in found.items():
        known = next(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
        with pytest.raises(UsageError, match=rf"{name}\(\) has no argument '{known}e'\. Did you mean '{known}'"):
            function(**{f"{known}e": None})
    with pytest.raises(TypeError, match=r"has no argument 'xxxx'\.$"):
        shardload.load(NOWHERE, xxxx=1)


def test_a_misspelt_function_is_refused_with_the_closest():
    with pytest.raises(AttributeError, match=r"no attribute 'laod'\. Did you mean 'load'\?"):
        shardload.laod  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xxxx'$"):
        shardload.xxxx  # noqa: B018


DATA = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)
MIB_64 = np.int64(1 << 26)


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "run"
    shardload.save(compiled(), folder, step=np.int64(8), epoch=np.int32(1))
    return folder


TAKES = {
    "restore(step)": lambda run, _: shardload.restore(compiled(), run, step=np.int64(8)),
    "load(step)": lambda run, _: shardload.load(run, step=np.int32(8)),
    "load_weights(step)": lambda run, _: shardload.load_weights(compiled(), run, step=np.uint8(8)),
    "Checkpointer.restore(step)": lambda run, _: shardload.Checkpointer(run).restore(compiled(), step=np.int64(8)),
    "load(host_memory_bytes)": lambda run, _: shardload.load(run, host_memory_bytes=MIB_64),
    "load(strict)": lambda run, _: shardload.load(run, strict=np.True_),
    "load(mesh)": lambda run, _: shardload.load(run, mesh=(np.int64(1), np.int64(2))),
    "plan(device_memory_bytes)": lambda run, _: shardload.plan(run, device_memory_bytes=np.int64(1 << 30)),
    "convert(max_shard_bytes)": lambda run, out: shardload.convert(run, out / "m.weights.json", max_shard_bytes=MIB_64),
    "TensorParallelKeras(device_count)": lambda *_: shardload.TensorParallelKeras(compiled(), device_count=np.int64(2)),
    "get_best_devices(count)": lambda run, _: shardload.parallel.get_best_devices(np.int64(1)),
    "synth": lambda run, out: synth("gpt2_base", directory=out, seed=np.int64(1), scale=np.float32(0.02)),
}


@pytest.mark.parametrize("takes", TAKES)
def test_arguments_may_be_numbers_of_numpy(takes, saved_run, tmp_path):
    assert TAKES[takes](saved_run, tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"save_freq": np.int64(1), "max_to_keep": np.int64(2), "keep_every_steps": np.int32(2)},
        {"monitor": "loss", "keep_best": np.int64(1), "initial_value_threshold": np.float32(9)},
        {"monitor": "loss", "keep_best": np.int64(1), "initial_value_threshold": np.float32(-1)},  # is the best
        {"keep_every_hours": np.float32(1), "max_to_keep": 1, "async_timeout_s": np.float32(60)},
        {"initial_epoch": np.int64(0), "save_best_only": np.True_, "monitor": "loss", "verbose": np.int64(0)},
    ],
)
def test_the_callback_takes_numbers_of_numpy(given, tmp_path):
    compiled().fit(*DATA, batch_size=4, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, **given)])
    model = compiled()
    last = shardload.runs.listing.list_steps(tmp_path)[-1].step
    model.fit(*DATA, batch_size=4, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=np.int64(last))])
    assert int(model.optimizer.iterations) == 4


@pytest.mark.parametrize("value", [np.int32(7), np.int64(7), np.float32(0.5), np.float16(0.5), np.True_])
def test_a_scalar_of_numpy_is_a_target(value, tmp_path):
    save_file({"value": np.asarray(value)}, tmp_path / "m.safetensors")
    for target in ({"value": type(value)(0)}, type(value)(0)):
        found = shardload.load_arrays(tmp_path / "m.safetensors", target)["value"]
        assert type(found) is type(value) and found == value


def test_a_scalar_of_numpy_for_an_array_is_refused(tmp_path):
    save_file({"value": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(shardload.errors.MismatchError, match=r"its target has shape \(\), but"):
        shardload.load_arrays(tmp_path / "m.safetensors", {"value": np.float32(0)})


SPELLINGS = {
    "bfloat16": ("bf16", "BFLOAT16", jnp.bfloat16, ml_dtypes.bfloat16),
    "float16": ("fp16", "half", np.float16),
    "float32": ("f32", "float", np.dtype("float32")),
    **{name: (name,) for name in ("mixed_bfloat16", "int8_from_float32", None)},
}


@pytest.mark.parametrize(("written", "name"), [(each, name) for name, found in SPELLINGS.items() for each in found])
def test_every_spelling_has_one_name(written, name):
    assert dtype_name(written) == name


def test_policies_pass_through():
    policy = keras.DTypePolicy("mixed_bfloat16")
    assert dtype_name(policy) is policy


@pytest.mark.parametrize("written", ["nonsense", "int32", "", 3, object])
def test_anything_else_names_what_there_is(written):
    with pytest.raises(UsageError, match=r"Cannot load in the dtype .* Choose bfloat16, float16, float32"):
        dtype_name(written)
