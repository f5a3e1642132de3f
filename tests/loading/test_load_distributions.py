"""Distributions of Keras: the one that is set, and one given as mesh or layout; and scripts of several processes."""

import hashlib

import jax
import keras
import numpy as np
import pytest
from process_runs import Run

import shardload
from shardload.errors import LayoutError, MeshError
from shardload.keras_bridge.binding import binding_of

MESH = (2, 4)


def classifier():
    layers = [keras.layers.Dense(32, activation="relu", name="hidden"), keras.layers.Dense(8, name="out")]
    return keras.Sequential([keras.Input((16,)), *layers], name="classifier")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    keras.utils.set_random_seed(1)
    path = tmp_path_factory.mktemp("classifier") / "model.keras"
    classifier().save(path)
    return path


def layout_map():
    found = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(MESH, ["rows", "columns"], jax.devices()))
    found[".*hidden/kernel"] = ("rows", "columns")
    found["nothing/kernel"] = ("rows", None)  # a map for more models than this one
    return found


def model_parallel(**options):
    return keras.distribution.ModelParallel(layout_map=layout_map(), batch_dim_name="columns", **options)


def data_parallel():
    return keras.distribution.DataParallel(devices=jax.devices())


def shardings(model):
    return {v.path: v.value.sharding for v in model.weights}


def assert_as_in_keras(found, source, distribution):
    """Compare values and layouts with what Keras gets from the same file under the same distribution."""
    with distribution.scope():
        expected = keras.saving.load_model(source)
    for one, two in zip(expected.weights, found.weights, strict=True):
        assert one.path == two.path and np.asarray(one.value).tobytes() == np.asarray(two.value).tobytes()
        assert two.value.sharding.is_equivalent_to(one.value.sharding, len(one.shape))
    batch = np.ones((8, 16), np.float32)
    with distribution.scope():
        np.testing.assert_allclose(expected.predict(batch, verbose=0), found.predict(batch, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("make", [model_parallel, data_parallel])
def test_the_distribution_that_is_set_is_used(source, make):
    distribution = make()
    with distribution.scope():
        model = shardload.load(source)
        assert keras.distribution.distribution() is distribution
    assert_as_in_keras(model, source, distribution)
    assert binding_of(model).distribution.batch_dim_name == distribution.batch_dim_name
    assert shardload.report(model).mesh == ("rows=2,columns=4" if make is model_parallel else "batch=8")
    assert not [text for text in shardload.report(model).notes if "'nothing/kernel'" not in text]


def test_a_rule_of_a_distribution_that_matches_nothing_is_noted(source):
    with model_parallel().scope():
        report = shardload.report(shardload.load(source))
        plan = shardload.plan(source)
    note = "The rule 'nothing/kernel' of the distribution's LayoutMap matches none of the model's 4 variables"
    assert [text for text in report.notes if text.startswith(note)]
    assert [text for text in plan.notes if text.startswith(note)]


def test_a_layout_map_given_as_mesh_is_the_layout_too(source):
    found = layout_map()
    del found["nothing/kernel"]
    model = shardload.load(source, mesh=found)
    assert shardings(model)["hidden/kernel"].spec == jax.sharding.PartitionSpec("rows", "columns")


@pytest.mark.parametrize("argument", ["mesh", "layout"])
@pytest.mark.parametrize("make", [model_parallel, data_parallel])
def test_a_distribution_is_a_mesh_and_a_layout(source, make, argument):
    distribution = make()
    model = shardload.load(source, **{argument: distribution})
    assert_as_in_keras(model, source, distribution)
    filled = classifier()
    report = shardload.load_weights(filled, source, **{argument: distribution})
    assert [*shardings(filled).values()] == [*shardings(model).values()]
    assert (len({str(s.spec) for s in shardings(model).values()}) > 2) == (make is model_parallel)
    assert report.mesh == shardload.report(model).mesh


def test_variables_that_a_subclass_lays_out_itself(source):
    class Rows(keras.distribution.ModelParallel):
        def get_variable_layout(self, variable):
            axes = ["rows" if len(variable.shape) == 2 else None] + [None] * (len(variable.shape) - 1)
            return keras.distribution.TensorLayout(axes, self.device_mesh)

    with Rows(layout_map=layout_map()).scope():
        model = shardload.load(source)
    kernel, bias = ("rows", None), (None,)
    wanted = {"hidden/kernel": kernel, "hidden/bias": bias, "out/kernel": kernel, "out/bias": bias}
    assert {path: tuple(s.spec) for path, s in shardings(model).items()} == wanted


def test_a_mesh_that_is_given_wins_and_the_report_says_so(source):
    with model_parallel().scope():
        model = shardload.load(source, mesh="1x8")
        assert [n for n in shardload.report(model).notes if "set_distribution" in n] == [
            "the ModelParallel set with keras.distribution.set_distribution is not used: mesh= was given"
        ]
        chosen = shardload.load(source, layout="auto")
        assert shardload.report(chosen).mesh == "rows=2,columns=4"
    assert shardload.report(model).mesh == "batch=1,model=8"
    assert shardings(chosen)["hidden/kernel"].spec == jax.sharding.PartitionSpec(None, "columns")
    assert shardings(chosen)["out/kernel"].spec == jax.sharding.PartitionSpec("columns", None)  # paired


def test_a_plan_uses_the_distribution_that_is_set(source):
    with model_parallel().scope():
        assert shardload.plan(source).mesh == "rows=2,columns=4"
    assert shardload.plan(source).mesh == "batch=1,model=1"
    fit = shardload.plan(source, layout=model_parallel(), device_memory_bytes="1MiB").fits
    assert (fit.fits, fit.smallest_mesh) == (True, None)


def test_a_load_inside_a_method_of_a_bound_model_is_not_laid_out_like_it(source):
    model = shardload.load(source, mesh="2x4")

    class Load(keras.callbacks.Callback):
        def on_predict_end(self, logs=None):
            self.found = shardload.report(shardload.load(source)).mesh

    callback = Load()
    model.predict(np.ones((8, 16), np.float32), verbose=0, callbacks=[callback])
    assert callback.found == "batch=1,model=8"


def test_an_axis_that_splits_no_weight_is_a_warning(tmp_path):
    keras.Sequential([keras.Input((509,)), keras.layers.Dense(521)]).save(tmp_path / "primes.keras")
    with pytest.warns(UserWarning, match="axis 'model' of the mesh batch=2,model=4 splits no weight") as caught:
        model = shardload.load(tmp_path / "primes.keras", mesh="2x4")
    assert caught[0].filename == __file__
    assert sum("splits no weight" in note for note in shardload.report(model).notes) == 1


def test_sizes_and_rules_by_name(source):
    model = shardload.load(source, mesh={"data": 2, "model": 4}, layout={"hidden/kernel": ("model", None)})
    report, found = shardload.report(model), shardings(model)
    assert report.mesh == "data=2,model=4"
    assert found["hidden/kernel"].spec == jax.sharding.PartitionSpec("model", None)
    assert found["out/kernel"].spec == jax.sharding.PartitionSpec("model", None)  # the rest is left to auto
    both = shardload.load(source, mesh={"data": 2, "model": 4}, layout={"hidden/kernel": (None, ("data", "model"))})
    assert shardings(both)["hidden/kernel"].spec == jax.sharding.PartitionSpec(None, ("data", "model"))


@pytest.mark.parametrize(
    ("where", "applies"), [("out/output", True), (".*out/output", True), ("classifier/out/output", False)]
)
def test_rules_for_outputs_are_applied_as_keras_does(source, where, applies):
    rules = layout_map()
    del rules["nothing/kernel"]
    rules[where] = (None, "columns")
    distribution = keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="rows")
    model = shardload.load(source, mesh=rules.device_mesh, layout=rules)
    set_model = shardload.load(source, layout=distribution)
    batch = np.ones((8, 16), np.float32)
    with distribution.scope():
        expected = keras.saving.load_model(source)(batch)
    assert (expected.sharding.spec == jax.sharding.PartitionSpec(None, "columns")) == applies
    for found in (model(batch), set_model(batch)):
        assert found.sharding.is_equivalent_to(expected.sharding, 2), where


PATH = "expected the path of a variable"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": {"hidden/kernel": "model"}}, LayoutError, f"{PATH} and a mesh axis or None"),
        ({"layout": {"hidden/kernel": (1, None)}}, LayoutError, PATH),
        ({"layout": {"hidden/kernel": ("tp", None)}}, LayoutError, "does not fit the mesh"),
        ({"layout": {"nothing": ("model", None)}}, LayoutError, "matches none of the model's 4 variables"),
        ({"mesh": {"data": 2.5}}, MeshError, "Cannot read the mesh"),
        ({"mesh": {}}, MeshError, "Cannot read the mesh"),
        ({"mesh": {"data": 2, "model": 4}, "axes": "a,b"}, MeshError, "names its axes already"),
        ({"layout": keras.distribution.ModelParallel}, LayoutError, "Cannot use <class .*ModelParallel'> as layout"),
        ({"mesh": keras.distribution.ModelParallel}, MeshError, "Cannot read a mesh from <class"),
        ({"mesh": "1x8", "layout": "distribution"}, LayoutError, "on the mesh batch=1,model=8: its own is rows=2"),
        ({"mesh": "1x8", "layout": "map"}, LayoutError, "it was made for rows=2,columns=4"),
    ],
)
def test_what_does_not_fit_is_refused(source, arguments, error, message):
    if arguments.get("layout") in ("distribution", "map"):
        arguments = arguments | {"layout": model_parallel() if arguments["layout"] == "distribution" else layout_map()}
    with pytest.raises(error, match=message):
        shardload.load(source, **{"mesh": "1x8"} | arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The weights of a model without the seed of its dropout layer."""
    file = tmp_path_factory.mktemp("saved") / "some.weights.h5"
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.save_weights(file)
    return file, model


@pytest.mark.slow
def test_each_gets_its_part_of_the_same_values(saved):
    file, model = saved
    with Run(2, 4, "2x4", "seeded", file, module="load_child") as run:
        first, second = run.finish()
    assert first == second
    wanted = [hashlib.sha256(np.asarray(v.value).tobytes()).hexdigest() for v in model.layers[0].weights]
    assert [first["values"][f"sequential/dense/{name}"] for name in ("kernel", "bias")] == wanted
    assert any("seed" in path for path in first["initialised"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "what"),
    [
        ("unseeded", "seed_generator_state"),
        ("unseeded-head", "head/kernel"),
        ("zeros-or-not", "head/kernel"),
        ("in-a-program", "head/kernel"),
    ],
)
def test_what_would_differ_is_told_with_the_way_out_and_all_end(saved, do, what):
    with Run(2, 4, "2x4", do, saved[0], module="load_child") as run:
        for told in run.finish():
            assert what in told["error"] and "set_random_seed(n)" in told["error"]
