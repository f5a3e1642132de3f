"""`AutoShardDistribution`: any model, chosen layouts, under Keras' own interface."""

import contextlib

import jax
import keras
import models
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import collectives, forward, gradients_of

import shardload
from shardload.errors import DoesNotFitError, LayoutError, MeshError, UsageError
from shardload.keras_bridge.binding import binding_of
from shardload.keras_bridge.model_state import slots_of
from shardload.sharding.mesh import MeshSpec

UP, DOWN = {"kernel": (None, "model"), "bias": ("model",)}, {"kernel": ("model", None), "bias": (None,)}


def pair(seed=0, *, compiled=True):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    up = keras.layers.Dense(64, activation="gelu", name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(8, name="down")(keras.layers.Dropout(0.2)(up)), name="pair")
    if compiled:
        model.compile("adam", "mse")
    return model


def batch(rows=16):
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    return x, x[:, ::-1].copy()


def specs(layer):
    return {v.name: tuple(v.value.sharding.spec) for v in layer.variables}


def assert_sharded(model):
    assert specs(model.get_layer("up")) == UP and specs(model.get_layer("down")) == DOWN


def device_mesh(shape=(2, 4)):
    return keras.distribution.DeviceMesh(shape, ["batch", "model"], devices=np.array(jax.devices()))


@pytest.mark.parametrize(
    "mesh",
    [
        "2x4", (2, 4), MeshSpec(("batch", "model"), (2, 4)), device_mesh,
        lambda: jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model")),
    ],
)  # fmt: skip
def test_every_form_of_mesh(mesh):
    distribution = shardload.AutoShardDistribution(mesh() if callable(mesh) else mesh)
    assert isinstance(distribution, keras.distribution.ModelParallel)
    assert (distribution.mesh, distribution.num_model_replicas) == (MeshSpec(("batch", "model"), (2, 4)), 2)
    assert distribution.get_data_layout((16, 3)).axes == ("batch", None)
    assert distribution.get_data_layout((3, 3)).axes == (None, None)
    assert distribution.get_tensor_layout("up/output") is None
    assert distribution.distribute_dataset([1]) == [1]


def test_shard_moves_a_model_and_computes_the_same():
    model, (x, _) = pair(), batch()
    expected = model.predict(x, verbose=0)
    distribution = shardload.AutoShardDistribution("2x4")
    assert distribution.shard(model, x) is model
    assert_sharded(model)
    up = model.get_layer("up")
    assert specs(up) == {v.name: tuple(distribution.get_variable_layout(v).spec) for v in up.variables}
    assert distribution.choice(model).rules["up/kernel"] == "column"
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    assert collectives(forward(model, x).as_text()) == {"all-reduce": 1}


@pytest.mark.parametrize("inside", [True, False])
def test_training_equals_one_device_inside_and_outside_the_scope(inside):
    plain, model, (x, y) = pair(), pair(), batch()
    distribution = shardload.AutoShardDistribution("1x4", devices=jax.devices()[:4])
    distribution.shard(model)
    options = {"epochs": 3, "batch_size": 8, "shuffle": False, "verbose": 0}
    losses = [plain.fit(x, y, **options).history["loss"]]
    with distribution.scope() if inside else contextlib.nullcontext():
        losses.append(model.fit(x, y, **options).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(plain.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-5)
    pairs = slots_of(model)
    assert len(pairs) == 2 * len(model.trainable_variables)
    assert all(slot.value.sharding.is_equivalent_to(w.value.sharding, slot.ndim) for slot, w in pairs)


def test_slots_that_exist_follow_their_variables():
    model, (x, y) = pair(), batch()
    model.fit(x, y, verbose=0)
    shardload.AutoShardDistribution("2x4").shard(model)
    for slot, weight in slots_of(model):
        assert slot.value.sharding.is_equivalent_to(weight.value.sharding, slot.ndim)


def test_variables_made_inside_the_scope_are_split_before_their_model_is_known():
    distribution, expected, (x, _) = shardload.AutoShardDistribution("1x8"), pair(), batch()
    outputs = expected.predict(x, verbose=0)
    with distribution.scope():
        model = pair()
        assert specs(model.get_layer("up"))["kernel"] == (None, "model")  # provisional: the largest dim
        np.testing.assert_allclose(model.predict(x, verbose=0), outputs, atol=1e-6)
        distribution.shard(model)
    assert_sharded(model)
    for one, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(one.value, other.value)


def test_large_variables_made_inside_the_scope_are_never_whole_on_one_device(monkeypatch):
    monkeypatch.setattr("keras.src.backend.jax.core.should_shard_at_init", lambda layout, shape: True)  # as if large
    whole = []
    monkeypatch.setattr(jax, "device_put", lambda *a, **k: whole.append(a))
    with shardload.AutoShardDistribution("1x8").scope():
        layer = keras.layers.Dense(64)
        layer.build((None, 32))
    assert whole == []
    assert {shard.data.shape for shard in layer.kernel.value.addressable_shards} == {(32, 8)}


def test_build_initialises_each_shard_on_its_device():
    model, expected, (x, y) = shardload.AutoShardDistribution("1x8").build(pair), pair(), batch()
    assert_sharded(model)
    for one, other in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
    losses = [m.fit(x, y, shuffle=False, verbose=0).history["loss"] for m in (model, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_build_refuses_to_drop_weights(tmp_path):
    pair().save_weights(tmp_path / "m.weights.h5")

    def loads():
        model = pair()
        model.load_weights(tmp_path / "m.weights.h5")
        return model

    with pytest.raises(UsageError, match=r"inside build\(\): it loads weights.*shardload.load"):
        shardload.AutoShardDistribution("1x8").build(loads)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.up, self.down = keras.layers.Dense(64, name="up"), keras.layers.Dense(8, name="down")

    def call(self, x, scale=None, training=None):
        y = self.down(self.up(x["a"]))
        return {"y": y if scale is None else y * scale}


def test_an_unbuilt_model_is_built_from_samples_already_sharded():
    x, _ = batch()
    distribution = shardload.AutoShardDistribution("1x8")
    keras.utils.set_random_seed(3)
    expected = Subclassed()({"a": x}, scale=2.0)["y"]
    keras.utils.set_random_seed(3)
    model = distribution.shard(Subclassed(), {"a": jax.ShapeDtypeStruct(x.shape, x.dtype)}, scale=2.0)
    assert (specs(model.up), specs(model.down)) == (UP, DOWN)
    np.testing.assert_allclose(model({"a": x}, scale=2.0)["y"], expected, atol=1e-6)


def test_an_unbuilt_model_without_samples_is_refused():
    with pytest.raises(UsageError, match=r"is not built.*shard\(model, x\)"):
        shardload.AutoShardDistribution("1x8").shard(Subclassed())
    with pytest.raises(UsageError, match=r"expected a keras\.Model"):
        shardload.AutoShardDistribution("1x8").shard(keras.layers.Dense(2))
    with pytest.raises(UsageError, match="has not sharded it"):
        shardload.AutoShardDistribution("1x8").choice(pair())


def test_a_layout_map_is_honoured_with_its_rules_for_activations():
    layout_map = keras.distribution.LayoutMap(device_mesh())
    layout_map["up/kernel"], layout_map["up/output"] = ("model", None), ("batch", "model")
    model, (x, _) = pair(), batch()
    expected = model.predict(x, verbose=0)
    distribution = shardload.AutoShardDistribution(layout=layout_map)
    with distribution.scope():
        assert specs(pair().get_layer("up")) == {"kernel": ("model", None), "bias": (None,)}
    distribution.shard(model)
    assert specs(model.get_layer("up"))["kernel"] == ("model", None)
    assert distribution.get_tensor_layout("up/output").axes == ("batch", "model")
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    program = collectives(forward(model, x).as_text())
    assert program != collectives(forward(shardload.AutoShardDistribution("2x4").shard(pair()), x).as_text())


@pytest.mark.parametrize("rule", [("batch", None, None), (None, "model", None)])
@pytest.mark.parametrize("rows", [8, 3])
def test_the_gradient_of_an_embedding_has_none_of_the_padding_of_a_smaller_batch(rows, rule):
    def lookup():
        keras.utils.set_random_seed(0)
        tokens = keras.Input((5,), dtype="int32")
        y = keras.layers.Embedding(16, 8, name="lookup")(tokens)
        model = keras.Model(tokens, keras.ops.exp(y))
        model.compile(keras.optimizers.SGD(1.0), "mse")
        return model

    device_mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], jax.devices())
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map["lookup/output"] = rule
    tokens = np.random.default_rng(0).integers(1, 16, (rows, 5)).astype("int32")
    target = np.ones((rows, 5, 8), "float32")
    expected, sharded = lookup(), lookup()
    shardload.AutoShardDistribution(layout=layout_map).shard(sharded)
    for model in (expected, sharded):
        model.fit(tokens, target, batch_size=rows, verbose=0)
    # XLA's padding consists of token 0, which the batch does not have.
    np.testing.assert_allclose(sharded.get_weights()[0], expected.get_weights()[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", ["sequence=4,model=2", "data=2,sequence=2,model=2", "data=2,fsdp=4"])
@pytest.mark.parametrize("change", ["slice", "pad"])
def test_tokens_that_a_model_slices_or_pads_have_the_gradients_of_one_device(mesh, change):
    def changed():
        keras.utils.set_random_seed(1)
        tokens = keras.Input((8,), dtype="int32")
        others = tokens[:, :-1] if change == "slice" else keras.ops.pad(tokens, ((0, 0), (1, 0)))
        y = keras.layers.LayerNormalization()(keras.layers.Embedding(16, 8)(others))
        model = keras.Model(tokens, keras.layers.Dense(4)(y))
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    tokens = np.random.default_rng(0).integers(1, 16, (8, 8)).astype("int32")
    expected, sharded = changed(), shardload.AutoShardDistribution(mesh).shard(changed())
    target = np.random.default_rng(1).normal(size=expected.compute_output_shape((8, 8))).astype("float32")
    for model in (expected, sharded):
        model.fit(tokens, target, batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(sharded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


class LookUp(keras.layers.Layer):
    """Looks up or adds up rows of a table of 16 with all tokens but the last of each row, or all rows but the last."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.table = self.add_weight(shape=(16, 8), name="table")

    def call(self, tokens):
        fewer, rows = tokens[:, :-1], keras.ops.take(self.table, tokens, axis=0)[:, :-1]
        if self.kind == "take":
            return keras.ops.take(self.table, fewer, axis=0)
        if self.kind == "time_major":
            columns = keras.ops.take(self.table, keras.ops.transpose(tokens)[:, :-2], axis=0)
            return rows + keras.ops.sum(columns, axis=(0, 1))
        if self.kind == "take_along_axis":
            chosen = keras.ops.take_along_axis(rows, keras.ops.expand_dims(fewer // 2, -1), axis=-1)
            return keras.ops.concatenate([chosen, chosen], axis=-1)
        if self.kind == "segment_sum":
            return keras.ops.segment_sum(rows[0], fewer[0], num_segments=16) + rows[:, :1]
        if self.kind == "segment_max":
            found = keras.ops.segment_max(rows[0], fewer[0], num_segments=16)
            return keras.ops.where(found < -1e30, 0.0, found) + rows[:, :1]
        if self.kind == "bincount":
            counted = jax.numpy.bincount(keras.ops.convert_to_tensor(fewer[0]), length=16)
            return rows * keras.ops.cast(counted, "float32")[:7, None]
        return keras.ops.scatter(fewer[0][:, None], rows[0], (16, 8)) + rows[:, :1]


def looking_up(kind):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((8,), dtype="int32")
    model = keras.Model(tokens, keras.layers.Dense(4)(keras.ops.tanh(LookUp(kind)(tokens))))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def tokens_without_zero(rows):
    # XLA's padding consists of token 0, which then changes row 0 of the table.
    return np.random.default_rng(0).integers(1, 16, (rows, 8)).astype("int32")


KINDS = ["take", "time_major", "take_along_axis", "segment_sum", "segment_max", "bincount", "scatter"]


@pytest.mark.parametrize("mesh", ["sequence=4,model=2", "data=2,sequence=2,model=2", "4x2"])
@pytest.mark.parametrize("kind", KINDS)
def test_lookups_and_sums_of_sliced_tokens_are_those_of_one_device(mesh, kind):
    tokens = tokens_without_zero(8)
    # In this order: what JAX has traced for one device is not taken for the mesh.
    expected, sharded = looking_up(kind), shardload.AutoShardDistribution(mesh).shard(looking_up(kind))
    outputs = [model.predict(tokens, batch_size=4, verbose=0) for model in (expected, sharded)]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)
    for model in (expected, sharded):
        model.fit(tokens, np.ones_like(outputs[0]), batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(sharded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_of_ones_own_has_the_gradients_of_one_device(kind):
    tokens = tokens_without_zero(4)
    sharded = shardload.AutoShardDistribution("sequence=4,model=2").shard(looking_up(kind))
    expected, found = gradients_of(looking_up(kind), tokens), gradients_of(sharded, tokens, P(None, "sequence"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_lookups_inside_of_shard_map_stay_as_they_are():
    distribution = shardload.AutoShardDistribution("sequence=4,model=2")

    class Parts(LookUp):
        def call(self, tokens):
            if not isinstance(tokens, jax.core.Tracer):
                return super().call(tokens)
            mesh, split = distribution.device_mesh.backend_mesh, P(None, "sequence")
            look_up = jax.shard_map(lambda t, i: t[i[:, :-1]], mesh=mesh, in_specs=(P(), split), out_specs=split)
            return look_up(keras.ops.convert_to_tensor(self.table), tokens)

    tokens = keras.Input((8,), batch_size=4, dtype="int32")
    model = keras.Model(tokens, keras.layers.Dense(4)(Parts("take")(tokens)))
    model.compile("sgd", "mse")
    distribution.shard(model)
    assert model.predict(tokens_without_zero(4), verbose=0).shape == (4, 4, 4)
    model.fit(tokens_without_zero(4), np.ones((4, 4, 4)), batch_size=4, verbose=0)


def test_a_model_that_is_not_sharded_trains_in_the_scope_with_a_smaller_last_batch():
    tokens, target = tokens_without_zero(7), np.ones((7, 7, 4), "float32")
    expected = looking_up("take")
    with shardload.AutoShardDistribution("data=4,model=2").scope():
        sharded = looking_up("take")
        sharded.set_weights(expected.get_weights())
        sharded.fit(tokens, target, batch_size=4, shuffle=False, verbose=0)
    expected.fit(tokens, target, batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(sharded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_rules_that_match_nothing_are_refused():
    layout_map = keras.distribution.LayoutMap(device_mesh())
    layout_map["dense/kernel"] = ("model", None)
    with pytest.raises(LayoutError, match="'dense/kernel' of the LayoutMap matches none of the model's 5 variables"):
        shardload.AutoShardDistribution(layout=layout_map).shard(pair())
    layout_map = keras.distribution.LayoutMap(device_mesh())
    layout_map["dense/output"] = ("batch", "model")
    model = pair()
    with pytest.raises(LayoutError, match=r"'dense/output'.* none of the model's 4 outputs.*down/output"):
        shardload.AutoShardDistribution(layout=layout_map).shard(model)
    assert binding_of(model) is None


def test_too_few_devices_are_refused():
    with pytest.raises(MeshError, match="needs 16 devices, but this process has 8"):
        shardload.AutoShardDistribution("2x8")


def test_an_empty_layout_is_refused():
    with pytest.raises(LayoutError, match="Cannot use layout='': expected auto, keras_hub, replicated, search, or the"):
        shardload.AutoShardDistribution("2x4", "")


@pytest.mark.parametrize("argument", ["device_memory_bytes", "batch"])
def test_arguments_of_a_search_need_a_search(argument):
    with pytest.raises(UsageError, match=f"Cannot plan with {argument}=1024 and layout='auto': only a search"):
        shardload.AutoShardDistribution("2x4", **{argument: 1024})
    assert getattr(shardload.AutoShardDistribution("2x4", "search", **{argument: 1024}), argument) == 1024


def test_a_search_plans_for_the_batch_that_it_is_told():
    with pytest.raises(DoesNotFitError, match="least found"):
        shardload.AutoShardDistribution("2x4", "search", device_memory_bytes=1 << 16, batch=1 << 14).shard(pair())
    shardload.AutoShardDistribution("2x4", "search", device_memory_bytes=1 << 16).shard(pair())


def test_layouts_that_do_not_exist_are_refused_at_once(tmp_path):
    broken = tmp_path / "plan.json"
    broken.write_text('{"format": "shardload layout plan, version 1", "modl": "m"}')
    with pytest.raises(LayoutError, match=r"Unknown layout 'missing\.json', and no file has that name"):
        shardload.AutoShardDistribution(layout="missing.json")
    with pytest.raises(LayoutError, match=r"Cannot read the plan: it has no 'mesh'\. Use a file as LayoutPlan\.save"):
        shardload.AutoShardDistribution(layout=broken)


def test_load_uses_the_distribution(tmp_path):
    source, (x, _) = pair(5, compiled=False), batch()
    source.save(tmp_path / "m.keras")
    with shardload.AutoShardDistribution("2x4").scope():
        model = shardload.load(tmp_path / "m.keras")
    assert_sharded(model)
    np.testing.assert_allclose(model.predict(x, verbose=0), source.predict(x, verbose=0), atol=1e-6)
    other = shardload.AutoShardDistribution("1x8").shard(pair(6, compiled=False))
    shardload.load_weights(other, tmp_path / "m.keras")
    assert_sharded(other)
    np.testing.assert_array_equal(other.weights[0].value, source.weights[0].value)
    with pytest.raises(LayoutError, match="its own is batch=2,model=4"):
        shardload.load(tmp_path / "m.keras", mesh="1x8", layout=shardload.AutoShardDistribution("2x4"))


def test_steps_saved_under_it_are_restored_on_another_mesh(tmp_path):
    model, (x, y) = shardload.AutoShardDistribution("2x4").shard(pair()), batch()
    model.fit(x, y, epochs=2, verbose=0, callbacks=[shardload.callbacks.OrbaxCheckpoint(tmp_path)])
    other = shardload.AutoShardDistribution("1x8").build(lambda: pair(9))
    shardload.restore(other, tmp_path)
    for one, two in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.value, two.value)
    assert_sharded(other)
    np.testing.assert_allclose(model.predict(x, verbose=0), other.predict(x, verbose=0), atol=1e-6)


@pytest.mark.slow
def test_generate_and_presets_under_the_scope(tmp_path):
    plain = models.causal_lm("llama")
    plain.backbone.save_to_preset(tmp_path)
    import keras_hub

    distribution = shardload.AutoShardDistribution("2x4")
    with distribution.scope(), shardload.fast() as report:
        backbone = keras_hub.models.Llama3Backbone.from_preset(str(tmp_path))
    assert [call.by for call in report.calls] == ["shardload"]
    lm = keras_hub.models.Llama3CausalLM(backbone=distribution.shard(backbone), preprocessor=None)
    lm.compile(sampler="greedy")
    distribution.shard(lm)
    prompt = models.tokens(plain, batch=1, length=8)
    prompt["padding_mask"][:, 4:] = 0
    expected = plain.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(lm.generate(prompt, stop_token_ids=None)["token_ids"], expected)
    assert any(not v.value.sharding.is_fully_replicated for v in lm.weights)


@pytest.mark.parametrize("layout", ["search", {"up/kernel": (None, "model")}, "replicated"])
def test_every_way_to_choose_layouts_computes_the_same(layout):
    model, (x, y) = pair(), batch()
    expected = [pair().predict(x, verbose=0), pair().fit(x, y, shuffle=False, verbose=0).history["loss"]]
    distribution = shardload.AutoShardDistribution("2x4", layout)
    distribution.shard(model)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected[0], atol=1e-6)
    np.testing.assert_allclose(model.fit(x, y, shuffle=False, verbose=0).history["loss"], expected[1], rtol=1e-5)
    choice = distribution.choice(model)
    assert (choice.mode, choice.sharded > 0) == ({dict: "rules"}.get(type(layout), layout), layout != "replicated")


def test_a_batch_is_split_over_data_and_fsdp_as_far_as_they_divide_it():
    distribution = shardload.AutoShardDistribution("data=2,fsdp=2,model=2")
    spec = {rows: distribution.get_data_layout((rows, 3)).backend_layout.spec for rows in (8, 6, 3)}
    assert spec == {8: P(("data", "fsdp"), None), 6: P("data", None), 3: P(None, None)}
    assert (distribution.batch_axes, distribution.num_model_replicas) == (("data", "fsdp"), 4)

    def losses(distribution):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
        if distribution is not None:
            distribution.shard(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).normal(size=(22, 16)).astype("float32")  # the last batch has 6 rows
        return model.fit(x, x[:, :8], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(distribution), losses(None), rtol=1e-5)
