"""What a program with shardload computes, in Keras' NNX mode or without it: the numbers must be the same, bit for bit.

KERAS_NNX_ENABLED=true python -m nnx_child SOURCES FOLDER
"""

import gc
import hashlib
import json
import logging
import sys
import traceback
from pathlib import Path

import jax
import keras
import numpy as np
import peft_folders
import small_folders

import shardload
from shardload.callbacks import OrbaxCheckpoint

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed
MESHES = ("1x8", "2x4", "1x3")
UNEVEN = {"vocab_size": 45, "intermediate_size": 54}
"""Sizes of Gemma 2 that four devices do not divide: 45 and 54 by three, and 54 by two."""
X, Y = np.random.default_rng(0).normal(size=(2, 24, 10)).astype("float32")
TOKENS = np.random.default_rng(1).integers(1, 45, (24, 7))


def net():
    """Layers with 15 and 21 units, and state besides weights: a seed, moving averages."""
    layers = keras.layers
    inputs = keras.Input((10,))
    x = layers.Dense(15, "relu", name="first")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.25, seed=3)(x)
    x = layers.Dense(21, "relu", name="second")(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def write_sources(folder):
    """Write files that both modes read: a Hugging Face folder, an adapter, Keras' formats, a training step."""
    base = small_folders.write(folder / "gemma2", "gemma2", **UNEVEN, architectures=["Gemma2ForCausalLM"])
    peft_folders.write(folder / "adapter", base, ("gate_proj", "down_proj"))
    keras.utils.set_random_seed(5)
    model = trained(net(), OrbaxCheckpoint(folder / "run", monitor="loss"))
    model.save(folder / "net.keras")
    model.save_weights(folder / "net.weights.h5")
    return folder


def trained(model, *callbacks, epochs=1):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def facts(variables):
    """Shape, dtype, layout and bits of each variable, in order."""
    return [
        [*map(str, (v.shape, v.value.dtype, getattr(v.value.sharding, "spec", None))), bits(v.value)] for v in variables
    ]


def bits(array):
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]


def text_ids(model, rows=4):
    return {"token_ids": TOKENS[:rows], "padding_mask": np.ones_like(TOKENS[:rows])}


def load(sources, folder, mesh):
    """Load, with the default dtype and another one, and let the model compute."""
    model = shardload.load(sources / "gemma2", mesh=mesh, dtype="float32")
    read = str(shardload.report(model).bytes)
    half = shardload.load(sources / "gemma2", mesh=mesh, dtype="bfloat16")
    archive = shardload.load(sources / "net.keras", mesh=mesh)
    return [facts(model.weights), facts(half.weights), facts(archive.variables), read, bits(archive.predict(X))]


def quantise(sources, folder, mesh):
    found = []
    for mode in ("int8", "int4"):
        model = shardload.load(sources / "gemma2", mesh=mesh, dtype="float32", quantize=mode)
        found.append(facts(model.weights))
    return found


def adapt(sources, folder, mesh):
    """Merge an adapter while loading; then load it as LoRA on a quantised base, and train that one step."""
    merged = shardload.load(sources / "gemma2", mesh=mesh, dtype="float32", adapter=sources / "adapter")
    keras.utils.set_random_seed(2)
    model = shardload.load(sources / "gemma2", mesh=mesh, dtype="float32", quantize="int8")
    shardload.load_adapter(model, sources / "adapter")
    loaded = facts(model.weights)
    model.preprocessor = None
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(text_ids(model, 24), TOKENS, batch_size=8, epochs=1, verbose=0, shuffle=False)
    assert facts(model.weights) != loaded
    shardload.save_as(model, folder / f"peft-{mesh}", to="peft")
    return [facts(merged.weights), loaded]


def fill(sources, folder, mesh):
    """Build abstractly, load weights, initialise what they lack; then replace the weights of the model."""
    keras.utils.set_random_seed(4)
    with shardload.abstract():
        model = net()
        more = keras.layers.Dense(9)
        more.build((None, 15))
    shardload.initialise(more)
    shardload.load_weights(model, sources / "net.weights.h5", mesh=mesh)
    first = facts(model.variables)
    shardload.load_weights(model, sources / "run", items="weights", atomic=True)
    return [first, facts(model.variables), facts(more.variables)]


def resume(sources, folder, mesh):
    """Restore a step of two epochs, optimizer included; train on; save; restore that into a new model."""
    with shardload.abstract():
        model = net()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    shardload.restore(model, sources / "run", mesh=mesh)
    restored = facts([*model.variables, *model.optimizer.variables])
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, callbacks=[OrbaxCheckpoint(folder / mesh, monitor="loss")])
    again = shardload.load(folder / mesh, mesh=mesh)
    assert facts(again.variables) == facts(model.variables)
    assert facts(again.optimizer.variables) == facts(model.optimizer.variables)
    return [restored, facts([*again.variables, *again.optimizer.variables])]


def own_loop(sources, folder, mesh):
    with shardload.abstract():
        model = net()
    shardload.load_weights(model, sources / "net.weights.h5", mesh=mesh)
    optimizer = keras.optimizers.Adam(0.01)
    shardload.shard_optimizer(optimizer)
    optimizer.build(model.trainable_variables)
    checkpointer = shardload.Checkpointer(folder / f"loop-{mesh}")
    checkpointer.save(1, model, optimizer=optimizer)
    checkpointer.wait()
    before = facts([*model.variables, *optimizer.variables])
    for variable in (*model.variables, *optimizer.variables):
        variable.assign(keras.ops.zeros_like(variable.value))
    assert checkpointer.restore(model, optimizer=optimizer).step == 1
    after = facts([*model.variables, *optimizer.variables])
    assert [fact[-1] for fact in after] == [fact[-1] for fact in before]
    return [before, after]


def export(sources, folder, mesh):
    model = shardload.load(sources / "gemma2", mesh=mesh, dtype="float32")
    found = {}
    for to in ("preset", "safetensors"):
        shardload.save_as(model, folder / f"{to}-{mesh}", to=to)
        tensors = shardload.load_arrays(folder / f"{to}-{mesh}", jax.devices()[0])
        found[to] = {name: bits(array) for name, array in tensors.items()}
    return found


def fast(sources, folder, mesh):
    """Keras' own calls, made by shardload, on a mesh that Keras has."""
    sizes = tuple(map(int, mesh.split("x")))
    devices = jax.devices()[: sizes[0] * sizes[1]]
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(sizes, ["batch", "model"], devices))
    if mesh == "1x3":
        layouts["(first|second)/kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope(), shardload.fast() as told:
        model = keras.saving.load_model(sources / "net.keras")
        model.load_weights(sources / "net.weights.h5")
    assert [call.by for call in told.calls] == ["shardload", "shardload"], str(told)
    return facts(model.variables)


def warm(sources, folder, mesh):
    """Compile steps while the weights load; Keras runs them without compiling."""
    model = shardload.load(sources / "net.keras", mesh=mesh, warm_up={"predict": X[:8], "train": (X[:8], Y[:8])})
    assert not shardload.report(model).notes, shardload.report(model).notes
    result, names = compiled_in(lambda: bits(model.predict(X[:8], verbose=0)))
    _, more = compiled_in(lambda: model.fit(X[:8], Y[:8], batch_size=8, verbose=0))
    assert not {"jit(predict_step)", "jit(train_step)", "jit(<lambda>)"} & {*names, *more}, (names, more)
    return result


def compiled_in(call):
    """The result of a call, and the programs that JAX compiled for it."""
    logger, found = logging.getLogger("jax._src.interpreters.pxla"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        result = call()
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    return result, [message.split()[1] for message in found if message.startswith("Compiling")]


def split(sources, folder, mesh):
    """Take models apart as programs of Flax NNX do: the arrays are those that were loaded, and compute the same."""
    from flax import nnx

    model = shardload.load(sources / "gemma2", mesh=mesh, dtype="float32")
    batch, backbone = text_ids(model, 8), model.backbone
    expected = np.asarray(backbone(batch))
    graph, state = nnx.split(backbone)
    held, loaded = jax.tree.leaves(state), [v.value for v in backbone.weights]
    assert {id(array) for array in held} == {id(array) for array in loaded} and len(held) == len(loaded)
    assert not any(isinstance(entry, jax.Array) for v in model.variables for entry in v.get_metadata().values())
    assert {array.sharding.mesh.shape_tuple for array in held} == {array.sharding.mesh.shape_tuple for array in loaded}
    results = [nnx.jit(lambda model, batch: model(batch))(backbone, batch), nnx.merge(graph, state)(batch)]
    for found in map(np.asarray, results):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    with shardload.abstract():
        whole = type(model)(backbone=backbone, preprocessor=None, compile=False)
    trained = nnx.DiffState(0, lambda path, found: getattr(found, "trainable", False))
    grads = nnx.jit(nnx.grad(lambda model, batch: model(batch).sum(), argnums=trained))(whole, batch)
    assert len(jax.tree.leaves(grads)) == len(whole.trainable_variables)
    saved = nnx.to_pure_dict(state)
    shardload.save_arrays(saved, folder / f"state-{mesh}.safetensors")
    again = shardload.load_arrays(folder / f"state-{mesh}.safetensors", saved)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(saved), strict=True))


def memory(sources, folder, mesh):
    """Building takes no memory, and a load into a live model frees what it replaces."""
    gc.collect()
    before = live_bytes()
    with shardload.abstract():
        model = net()
        model.compile("adam", "mse")
    assert live_bytes() - before < 256, live_bytes() - before  # learning rate, seeds
    shardload.load_weights(model, sources / "net.weights.h5", mesh=mesh)
    filled = live_bytes()
    shardload.load_weights(model, sources / "net.weights.h5")
    assert live_bytes() <= filled, (live_bytes(), filled)


def live_bytes():
    """Bytes on all devices; not by shards, which would then be arrays that live."""
    sizes = ((a.sharding.shard_shape(a.shape), a.dtype.itemsize, len(a.devices())) for a in jax.live_arrays())
    return sum(int(np.prod(shape)) * itemsize * devices for shape, itemsize, devices in sizes)


CASES = (load, quantise, adapt, fill, resume, own_loop, export, fast, warm)


NNX_CASES = (split, memory)


def outcomes(cases, sources, folder):
    """What each case gives, by case and mesh; an error as text."""
    found = {}
    for case in cases:
        for mesh in MESHES:
            try:
                found[f"{case.__name__}-{mesh}"] = case(sources, folder, mesh)
            except Exception:
                found[f"{case.__name__}-{mesh}"] = traceback.format_exc()
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    assert keras.config.is_nnx_enabled()
    json.dump(outcomes((*CASES, *NNX_CASES), Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
