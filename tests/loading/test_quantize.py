"""Models that are quantised while they are loaded, compared with Keras' own `quantize` after a full load."""

import dataclasses
import functools
import json

import hub_folders
import keras
import ml_dtypes
import numpy as np
import pytest
import quantised_folders
from memory import watch
from safetensors.numpy import save_file
from transformers_cross import adapters, folders

import shardload
from shardload.errors import (
    BudgetError,
    LoadInterruptedError,
    MismatchError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from shardload.keras_bridge.quantising import quantise_structure
from shardload.parallel import search
from shardload.pipeline import filling
from shardload.transfer import execution

MODES = ("int8", "int4", "int4/-1", "int4/24")
"""24 does not divide the dims below."""
KERNELS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


def model(dtype="float32", *, tie_weights=False):
    """Every kind of kernel that Keras quantises: dims that divide by 8, by 3, or by nothing, and odd ones."""
    layers = keras.layers
    ids = keras.Input((None,), dtype="int32")
    embedding = layers.ReversibleEmbedding(48, 24, tie_weights=tie_weights, dtype=dtype, name="embedding")
    x = embedding(ids)
    x = x + layers.Embedding(7, 24, dtype=dtype, name="odd_embedding")(ids % 7)
    queries = layers.EinsumDense("btd,ndh->btnh", (None, 8, 3), dtype=dtype, name="queries")(x)
    keys = layers.EinsumDense("btd,dnh->btnh", (None, 8, 3), bias_axes="nh", dtype=dtype, name="keys")(x)
    x = layers.EinsumDense("btnh,nhd->btd", (None, 24), dtype=dtype, name="joined")(queries * keys)
    x = layers.EinsumDense("btd,df->btf", (None, 77), dtype=dtype, name="wide")(x)
    x = layers.Dense(35, dtype=dtype, name="odd")(x)
    x = layers.Dense(24, use_bias=False, dtype=dtype, name="narrow")(x)
    x = layers.LayerNormalization(dtype=dtype, name="norm")(x)
    return keras.Model(ids, embedding(x, reverse=True))


def filled(dtype="float32", **kwargs):
    found, rng = model(dtype, **kwargs), np.random.default_rng(7)
    for variable in found.weights:
        # Columns of different sizes, one of them zero: scales differ.
        values = rng.standard_normal(variable.shape) * np.exp(rng.standard_normal(variable.shape[-1:]))
        values[..., -1:] = 0
        variable.assign(values.astype("float32"))
    return found


def config_of(mode):
    """Keras' own configuration, made by hand."""
    if mode == "int8":
        return keras.quantizers.Int8QuantizationConfig()
    _, _, block = mode.partition("/")
    return keras.quantizers.Int4QuantizationConfig(**({"block_size": int(block)} if block else {}))


def assert_equal(found, wanted):
    """Assert equal variables, bit for bit, in the same order, and equal layers."""
    assert [v.path for v in found.weights] == [v.path for v in wanted.weights]
    for a, b in zip(found.weights, wanted.weights, strict=True):
        left, right = np.asarray(a.value), np.asarray(b.value)
        assert (left.dtype, left.shape) == (right.dtype, right.shape), a.path
        assert left.tobytes() == right.tobytes(), a.path
        assert (a.trainable, a.dtype) == (b.trainable, b.dtype), a.path
    for a, b in zip(found.layers, wanted.layers, strict=True):
        # Keras numbers other layers by the order in which it makes them.
        assert not isinstance(a, KERNELS) or json.dumps(a.get_config()) == json.dumps(b.get_config())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same values in files in which kernels are stored as they are, in chunks, transposed, and in bfloat16."""
    folder, written = tmp_path_factory.mktemp("quantize"), filled()
    written.save(folder / "model.keras")
    written.save_weights(folder / "model.weights.h5")
    tensors = {v.path: np.asarray(v.value) for v in written.weights}
    save_file(tensors, folder / "model.safetensors")
    shardload.save(written, folder / "steps", step=1)
    return folder


@functools.cache
def wanted(mode, dtype="float32", tie_weights=False):
    found = filled(tie_weights=tie_weights)
    if dtype != "float32":
        values = [np.asarray(v.value) for v in found.weights]
        found = model(dtype, tie_weights=tie_weights)
        for variable, value in zip(found.weights, values, strict=True):
            variable.assign(value)
    found.quantize(config=config_of(mode), filters=lambda layer: isinstance(layer, KERNELS))  # it warns of others
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x3", "1x1"])
def test_a_model_equals_one_that_keras_quantises_after_the_load(files, mode, mesh):
    found = shardload.load(files / "model.keras", mesh=mesh, quantize=mode)
    assert_equal(found, wanted(mode))
    report = shardload.report(found)
    assert "9 kernels quantised to int" in " ".join(report.notes)
    assert report.weight_bytes == sum(np.asarray(v.value).nbytes for v in found.weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", ["model.weights.h5", "model.safetensors", "steps"])
def test_other_files_give_the_same(files, source, mode):
    with shardload.abstract():
        found = model()
    shardload.load_weights(found, files / source, mesh="2x4", quantize=mode)
    assert_equal(found, wanted(mode))


@pytest.mark.parametrize("mode", MODES)
def test_floats_are_rounded_to_the_dtype_of_the_weights_first(files, mode):
    with shardload.abstract():
        found = model("bfloat16")
    shardload.load_weights(found, files / "model.weights.h5", mesh="1x8", quantize=mode)
    assert_equal(found, wanted(mode, "bfloat16"))


@pytest.mark.parametrize("mode", MODES)
def test_codes_are_uploaded_to_devices_with_memory_of_their_own(files, mode, monkeypatch):
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement="upload"))
    found = shardload.load(files / "model.keras", mesh="1x8", quantize=mode)
    assert_equal(found, wanted(mode))


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x3"])
def test_tied_embeddings_have_one_matrix_of_codes(tmp_path, mesh):
    filled(tie_weights=True).save(tmp_path / "tied.keras")
    found = shardload.load(tmp_path / "tied.keras", mesh=mesh, quantize="int4")
    assert_equal(found, wanted("int4", tie_weights=True))


def test_codes_and_scales_are_split_as_their_kernel(files):
    whole, found = (shardload.load(files / "model.keras", mesh="1x8", quantize=q) for q in (None, "int8"))
    floats = {v.path: v.value.sharding.spec for v in whole.weights}
    codes = {v.path: v.value.sharding.spec for v in found.weights}
    assert {path: codes[path] for path in floats} == floats
    assert tuple(codes["queries/kernel"]) == ("model", None, None)
    assert tuple(codes["queries/kernel_scale"]) == (None, None, "model", None)
    assert tuple(codes["embedding/embeddings_scale"]) == ("model",)


def test_packed_dims_are_split_where_they_divide(files):
    rules = {"keys/kernel": (None, "model", None), "joined/kernel": ("model", None, None), "odd/kernel": (None, None)}
    found = shardload.load(files / "model.keras", mesh="1x8", layout=rules, quantize="int4/3")
    specs = {v.path: tuple(v.value.sharding.spec) for v in found.weights}
    # (24, 24) is packed to (24, 12) along the heads, which eight devices cannot split.
    assert specs["keys/kernel"] == (None, None)
    assert specs["keys/kernel_scale"] == (None, "model")
    # Rows of 8 heads of 3: each device has one group of 3.
    assert specs["joined/kernel"] == ("model", None)
    assert specs["joined/kernel_scale"] == ("model", None)
    assert "its packed shape (24, 12) does not divide" in str(shardload.report(found))


def test_predictions_are_those_of_the_model_that_keras_quantised(files):
    found = shardload.load(files / "model.keras", mesh="2x4", quantize="int8")
    ids = np.arange(12).reshape(4, 3) % 7
    np.testing.assert_allclose(found.predict(ids), wanted("int8").predict(ids), rtol=2e-5, atol=2e-5)
    shardload.load(files / "model.keras", mesh="2x4", quantize="int4").predict(ids)


# ---- memory ------------------------------------------------------------------------------------------

MIB = 1 << 20


def large(*, kernel):
    """Embeddings of 16 MiB, whose elements that share a scale lie next to each other in files of Keras."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(4096, 1024, name="embedding")(ids)
    # The elements that share a scale in this kernel of 4 MiB lie furthest apart.
    x = keras.layers.Dense(1024, use_bias=False, name="dense")(x) if kernel else x
    return keras.Model(ids, x)


@pytest.fixture(scope="module", params=[False, True], ids=["embeddings", "kernel"])
def large_files(request, tmp_path_factory):
    folder, written, rng = tmp_path_factory.mktemp("large"), large(kernel=request.param), np.random.default_rng(0)
    for variable in written.weights:
        variable.assign(rng.standard_normal(variable.shape).astype("float32"))
    written.save_weights(folder / "large.weights.h5")
    written.quantize("int8", filters=lambda layer: isinstance(layer, KERNELS))
    return folder / "large.weights.h5", written, request.param


def abstract_large(kernel):
    with shardload.abstract():
        return large(kernel=kernel)


@pytest.mark.parametrize("placement", ["adopt", "upload"])
def test_devices_store_quantised_shards_only_and_the_host_keeps_its_budget(large_files, placement, monkeypatch):
    source, wanted, kernel = large_files
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement=placement))
    found, seen = abstract_large(kernel), watch(monkeypatch)
    budget = 10 * MIB if kernel else MIB
    shardload.load_weights(found, source, mesh="1x8", quantize="int8", host_memory_bytes=budget, progress=seen)
    assert_equal(found, wanted)
    report = shardload.report(found)
    assert 0 < report.host_bytes.peak_staging <= budget
    assert report.bytes.read == report.bytes.needed
    share = report.devices[0].bytes
    assert share < (21 if kernel else 17) * MIB / 4 / 8
    # Codes on their way take a fifth of what is staged: they have a quarter of the floats' bytes.
    assert seen.most() <= share + (budget // 4 if placement == "upload" else 0)


def test_a_budget_for_a_kernel_that_has_to_be_whole(large_files):
    source, _, kernel = large_files
    if not kernel:
        pytest.skip("embeddings are quantised row by row")
    found = abstract_large(kernel)
    with pytest.raises(BudgetError, match=r"Cannot quantise the weights in tensor 'layers/dense/vars/0' .*at least"):
        shardload.load_weights(found, source, mesh="1x8", quantize="int8", host_memory_bytes="6MiB")


def test_several_chunks_of_packed_codes(large_files, monkeypatch):
    source, _, kernel = large_files
    wanted = large(kernel=kernel)
    shardload.load_weights(wanted, source)
    wanted.quantize("int4", filters=lambda layer: isinstance(layer, KERNELS))
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement="upload"))
    found = abstract_large(kernel)
    shardload.load_weights(found, source, mesh="2x4", quantize="int4", host_memory_bytes=10 * MIB)
    assert_equal(found, wanted)


def signed(shape, axis, *, spread):
    """Values in bfloat16, more than the parts in which they are quantised have: along ``axis``, of one sign or of both.

    Some lie between -2.5 - ``spread`` and -2.5.
    """
    rng = np.random.default_rng(3)
    values = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    along = np.moveaxis(values, axis, -1)
    along[0::5], along[1::5] = np.abs(along[0::5]), -np.abs(along[1::5])
    along[2::5] = np.where(along[2::5] < 0, ml_dtypes.bfloat16(-0.0), ml_dtypes.bfloat16(0.0))
    along[3::5, 7:] = (-2.5 - spread * rng.random(along[3::5, 7:].shape)).astype(ml_dtypes.bfloat16)
    return values


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["kernel", "embeddings"])
@pytest.mark.parametrize("spread", [0, 0.5])
def test_signs_and_zeros_in_bfloat16(tmp_path, mode, name, spread):
    def build():
        if name == "kernel":
            return keras.Sequential([keras.Input((1031,)), keras.layers.Dense(1056, dtype="bfloat16")])
        return keras.Sequential([keras.Input((None,)), keras.layers.Embedding(1056, 1031, dtype="bfloat16")])

    reference = build()
    values = signed(*(((1031, 1056), 0) if name == "kernel" else ((1056, 1031), 1)), spread=spread)
    reference.layers[0].set_weights([values, *reference.layers[0].get_weights()[1:]])
    reference.save_weights(tmp_path / "model.weights.h5")
    reference.quantize(config=config_of(mode), filters=lambda layer: isinstance(layer, KERNELS))
    for mesh in ("1x8", "1x3"):
        with shardload.abstract():
            found = build()
        shardload.load_weights(found, tmp_path / "model.weights.h5", mesh=mesh, quantize=mode)
        for a, b in zip(found.weights, reference.weights, strict=True):
            assert np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes(), a.path


@pytest.mark.parametrize("bad", ["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_one_number_that_is_not_finite(tmp_path, bad, dtype, mode):
    values = np.full((1, 48, 64), -1.0, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    values[0, 5, 6] = np.copysign(float(bad.removeprefix("-")), -1.0 if bad.startswith("-") else 1.0)
    with shardload.abstract():
        found = keras.Sequential([keras.Input((48,)), keras.layers.EinsumDense("bd,ndh->bnh", (1, 64), dtype=dtype)])
    save_file({found.weights[0].path: values}, tmp_path / "bad.safetensors")
    with pytest.raises((TransferError, LoadInterruptedError), match="contains a NaN or an infinity"):
        shardload.load_weights(found, tmp_path / "bad.safetensors", quantize=mode)


@pytest.mark.parametrize("mode", ["int4", "int4/-1"])
def test_no_kernel_is_unpacked_on_the_way(files, tmp_path, mode, monkeypatch):
    unpacked, original = [], keras.quantizers.unpack_int4
    for module in (keras.quantizers, keras.src.quantizers):
        monkeypatch.setattr(
            module, "unpack_int4", lambda *args, **kwargs: unpacked.append(1) or original(*args, **kwargs)
        )
    found = shardload.load(files / "model.keras", mesh="1x8", quantize=mode)
    shardload.save(found, tmp_path / "steps", step=1)
    shardload.save_as(found, tmp_path / "saved.weights.h5")
    assert not unpacked
    assert found.get_layer("wide").kernel.shape == (24, 77) and unpacked


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ("int2", UsageError, "Cannot use quantize='int2': expected 'int8', 'int4' or 'int4/BLOCK'"),
        ("int8/128", UsageError, "Cannot use quantize='int8/128'"),
        ("int4/0", UsageError, "Cannot use quantize='int4/0'"),
        (8, UsageError, "Cannot use quantize=8"),
        ("float8", UnsupportedError, "Cannot quantise to float8 while loading: Keras keeps float kernels"),
        ("gptq", UnsupportedError, "Cannot quantise with GPTQ while loading: it needs samples of data"),
        (
            keras.quantizers.Int8QuantizationConfig(weight_quantizer=keras.quantizers.AbsMaxQuantizer(axis=0)),
            UnsupportedError,
            "Cannot quantise while loading with the weight quantizer AbsMaxQuantizer",
        ),
    ],
)
def test_modes_that_are_refused(files, wanted, error, message):
    for call in (shardload.load, shardload.plan):
        with pytest.raises(error, match=message):
            call(files / "model.keras", quantize=wanted)


def test_a_configuration_of_keras_is_a_mode(files):
    config = keras.quantizers.Int4QuantizationConfig(block_size=24)
    assert_equal(shardload.load(files / "model.keras", quantize=config), wanted("int4/24"))


def test_a_model_with_values_is_left_to_keras(files):
    found = model()
    with pytest.raises(UnsupportedError, match=r"it has a value already\. Build the model inside shardload.abstract"):
        shardload.load_weights(found, files / "model.weights.h5", quantize="int8")


def test_weights_that_are_no_numbers(tmp_path):
    written = filled()
    written.get_layer("wide").kernel.assign(np.full((24, 77), np.nan))
    written.save(tmp_path / "bad.keras")
    with pytest.raises(TransferError, match="Cannot quantise 'wide/kernel': it contains a NaN or an infinity"):
        shardload.load(tmp_path / "bad.keras", mesh="1x8", quantize="int4")


def test_a_kernel_that_the_checkpoint_lacks(files, tmp_path):
    tensors = {v.path: np.asarray(v.value) for v in filled().weights if v.path != "wide/kernel"}
    save_file(tensors, tmp_path / "part.safetensors")
    with shardload.abstract():
        found = model()
    with pytest.raises(
        MismatchError, match="Cannot quantise 'wide/kernel' while loading: the checkpoint has no tensor"
    ):
        shardload.load_weights(found, tmp_path / "part.safetensors", quantize="int8", strict=False)


def test_after_a_refusal_the_model_is_quantised_and_the_error_says_so(files, tmp_path):
    tensors = {v.path: np.asarray(v.value) for v in filled().weights} | {"more": np.zeros(3, "float32")}
    save_file(tensors, tmp_path / "more.safetensors")
    with shardload.abstract():
        found = model()
    with pytest.raises(
        MismatchError, match=r"not used by the model: more\nThe model is quantised, without values\. Build"
    ):
        shardload.load_weights(found, tmp_path / "more.safetensors", quantize="int8")


def test_a_layer_that_computes_in_float16(tmp_path):
    half = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="float16", name="half")])
    half.save(tmp_path / "half.keras")
    with pytest.raises(UnsupportedError, match=r"Cannot quantise the layer .*half': .*float16"):
        shardload.load(tmp_path / "half.keras", quantize="int8")


def test_kernels_that_a_plan_gathers_for_use_stay_split(files):
    with shardload.abstract():
        plan = search(model(), "fsdp=4,model=2", batch=8)
    at = next(i for i, one in enumerate(plan.variables) if one.path == "narrow/kernel")
    stored = dataclasses.replace(plan.variables[at], shape=(35, 24), spec=((), ("fsdp",)), stored=("fsdp",))
    plan = dataclasses.replace(plan, variables=(*plan.variables[:at], stored, *plan.variables[at + 1 :]))
    found = shardload.load(files / "model.keras", layout=plan, quantize="int8")
    assert bits(found) == bits(wanted("int8"))
    assert tuple(found.get_layer("narrow").kernel.value.sharding.spec) == (None, "fsdp")
    assert "1 quantised kernel stays split as stored" in " ".join(shardload.report(found).notes)


def test_a_model_that_is_quantised_already(files, tmp_path):
    found = shardload.load(files / "model.keras", quantize="int8")
    found.save(tmp_path / "int8.keras")
    with pytest.raises(UnsupportedError, match="it is quantised already"):
        shardload.load(tmp_path / "int8.keras", quantize="int8")


@keras.saving.register_keras_serializable("test_quantize")
class OwnDense(keras.layers.Dense):
    def quantize(self, mode=None, type_check=True, config=None):
        super().quantize(mode, type_check=False, config=config)


def test_a_layer_with_its_own_quantize(tmp_path):
    keras.Sequential([keras.Input((4,)), OwnDense(3, name="own")]).save(tmp_path / "own.keras")
    with pytest.raises(UnsupportedError, match=r"Cannot quantise the layer .*own.*: OwnDense has a quantize method of"):
        shardload.load(tmp_path / "own.keras", quantize="int8")


def test_a_layer_around_a_kernel_that_uses_its_floats():
    with shardload.abstract():
        inner = keras.layers.Dense(3, name="inner")
        found = keras.Sequential([keras.Input((4,)), keras.layers.SpectralNormalization(inner)])
    with pytest.raises(UnsupportedError, match="a layer around its own layer uses the floats, too"):
        quantise_structure(found, config_of("int8"))


def test_a_model_without_kernels(tmp_path):
    keras.Sequential([keras.Input((4,)), keras.layers.LayerNormalization()]).save(tmp_path / "norm.keras")
    with pytest.raises(UnsupportedError, match="it has no layer that Keras quantises"):
        shardload.load(tmp_path / "norm.keras", quantize="int8")


def test_an_optimizer_that_was_built_for_floats(files):
    with shardload.abstract():
        found = model()
        found.compile("adam", "mse")
        found.optimizer.build(found.trainable_variables)
    with pytest.raises(UnsupportedError, match="its optimizer was built for float kernels"):
        shardload.load_weights(found, files / "model.weights.h5", quantize="int8")


# ---- plans, steps, files -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_plan_counts_quantised_bytes(files, mode):
    found = shardload.load(files / "model.keras", mesh="1x8", quantize=mode)
    plan = shardload.plan(files / "model.keras", mesh="1x8", quantize=mode, device_memory_bytes="1MiB", hosts=2)
    report = shardload.report(found)
    assert plan.weight_bytes == report.weight_bytes
    assert [d.bytes for d in plan.devices] == [d.bytes for d in report.devices]
    assert plan.fits.per_device_max == plan.devices[0].bytes
    whole = shardload.plan(files / "model.keras", mesh="1x8")
    assert plan.devices[0].bytes < whole.devices[0].bytes / 2


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_restored_on_another_mesh(files, tmp_path, mode):
    found = shardload.load(files / "model.keras", mesh="1x8", quantize=mode)
    shardload.save(found, tmp_path / "steps", step=3)
    assert_equal(shardload.load(tmp_path / "steps", mesh="2x4"), wanted(mode))
    other = shardload.load(files / "model.keras", mesh="1x3", quantize=mode)
    shardload.restore(other, tmp_path / "steps", mesh="2x2")
    assert_equal(other, wanted(mode))


@pytest.mark.parametrize("mode", MODES)
def test_files_of_keras(files, tmp_path, mode):
    found = shardload.load(files / "model.keras", mesh="1x8", quantize=mode)
    found.save(tmp_path / "saved.keras")
    assert_equal(keras.saving.load_model(tmp_path / "saved.keras"), wanted(mode))
    assert_equal(shardload.load(tmp_path / "saved.keras", mesh="2x4"), wanted(mode))


@pytest.mark.parametrize("source", ["trained.keras", "steps"])
def test_a_compiled_model_trains_what_is_left(tmp_path, source):
    trained = filled()
    trained.compile("adam", "sparse_categorical_crossentropy")
    ids = np.arange(24).reshape(8, 3) % 7
    trained.fit(ids, ids, verbose=0)
    trained.save(tmp_path / "trained.keras")
    shardload.save(trained, tmp_path / "steps", step=1)
    found = shardload.load(tmp_path / source, mesh="2x4", quantize="int8")
    trained.quantize("int8", filters=lambda layer: isinstance(layer, KERNELS))
    assert_equal(found, trained)
    before = {v.path: np.asarray(v.value).tobytes() for v in found.weights}
    found.fit(ids, ids, verbose=0)
    changed = {v.path for v in found.weights if before[v.path] != np.asarray(v.value).tobytes()}
    assert changed == {"keys/bias", "odd/bias", "norm/gamma", "norm/beta"}
    shardload.save(found, tmp_path / "later", step=2)
    assert_equal(shardload.load(tmp_path / "later", mesh="1x3"), found)


# ---- other sources -----------------------------------------------------------------------------------


def quantised_by_keras(source, mode, **options):
    found = shardload.load(source, **options)
    found.quantize(config=config_of(mode), filters=lambda layer: isinstance(layer, KERNELS))
    return found


def bits(found):
    return [(v.name, np.asarray(v.value).tobytes()) for v in found.weights]


@pytest.mark.parametrize("mode", ["int8", "int4/24"])
@pytest.mark.parametrize("family", sorted({"gemma2", "gpt2", "llama", "mixtral", "bert"}))
def test_models_of_hugging_face(tmp_path, family, mode):
    built = hub_folders.build(tmp_path / "folder", family)
    folder = hub_folders.write(tmp_path / "folder", family, built, unwanted=False)
    wanted = quantised_by_keras(folder, mode, mesh="1x8")
    for mesh in ("1x8", "2x4", "1x3"):
        found = shardload.load(folder, mesh=mesh, quantize=mode)
        assert bits(found) == bits(wanted)
    with pytest.raises(UnsupportedError, match=r"is quantised \(int\d\)\. Choose the format preset"):
        shardload.save_as(found, tmp_path / "out", to="safetensors")
    left = [note for note in shardload.report(found).notes if "Keras cannot quantise their layers" in note]
    assert ("expert" in left[0]) if family == "mixtral" else not left or "position" in left[0]


def test_an_adapter_is_merged_before(tmp_path):
    fixtures = folders.read_family(adapters.FAMILY, adapters.FIXTURES)
    base, [adapter] = adapters.build(fixtures["llama, every linear"], tmp_path)
    wanted = quantised_by_keras(base, "int4", mesh="1x8", adapter=adapter)
    found = shardload.load(base, mesh="2x4", adapter=adapter, quantize="int4")
    assert bits(found) == bits(wanted) != bits(quantised_by_keras(base, "int4", mesh="1x8"))


@pytest.mark.parametrize("method", ["gptq 4", "nf4 nested", "fp8 blocks"])
def test_codes_of_another_method_are_dequantised_before(tmp_path, method):
    folder, plain = quantised_folders.write(tmp_path, method, intermediate_size=96)
    found = shardload.load(folder, mesh="2x4", dtype="bfloat16", quantize="int8")
    assert bits(found) == bits(quantised_by_keras(plain, "int8", mesh="1x8", dtype="bfloat16"))
