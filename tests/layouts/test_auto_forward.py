"""Models compute under their layouts what they compute unsharded, and never gather a weight to do so.

The reference is the same model with everything on one device. Float32 logits agree within 1e-4 (sums run in
another order); greedy tokens are equal.
"""

import functools
import re
import warnings

import jax
import models
import numpy as np
import pytest

from shardload.keras_bridge.variables import current_value, restore_value
from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec

TOLERANCE = 1e-4


@functools.cache
def reference(name):
    """A model with random values everywhere, its inputs, and what it answers unsharded."""
    model = models.randomise(models.causal_lm(name) if name in models.DECODERS else models.build(name))
    inputs = models.tokens(model)
    host = [np.asarray(v.value) for v in model.variables]
    return model, inputs, host, run(model, inputs)[0]


@functools.cache
def continuation(name):
    model, inputs, host, _ = reference(name)
    place(model, host, MeshSpec.parse("1x1"))
    return generate(model, inputs)


def place(model, host, mesh, layout="auto"):
    """Put every variable where its layout says, and return how batches are to be split."""
    choice = choose(model, mesh, layout)
    jax_mesh = jax.sharding.Mesh(np.array(jax.devices()[: mesh.size]).reshape(mesh.sizes), mesh.axes)
    for variable, value in zip(model.variables, host, strict=True):
        spec = jax.sharding.PartitionSpec(*(axes or None for axes in choice.layouts[id(variable)].spec))
        restore_value(variable, jax.device_put(value, jax.sharding.NamedSharding(jax_mesh, spec)), None)
    batch = mesh.axes[0] if 8 % mesh.sizes[0] == 0 else None
    return jax.sharding.NamedSharding(jax_mesh, jax.sharding.PartitionSpec(batch))


def run(model, inputs):
    """Outputs of one jitted forward pass as one vector, and the compiled program."""
    trainable = [current_value(v) for v in model.trainable_variables]
    rest = [current_value(v) for v in model.non_trainable_variables]
    step = jax.jit(lambda a, b, x: model.stateless_call(a, b, x, training=False)[0])
    program = step.lower(trainable, rest, inputs).compile()
    outputs = jax.tree.leaves(program(trainable, rest, inputs))
    return np.concatenate([np.asarray(x).ravel() for x in outputs]), program.as_text()


def generate(model, inputs):
    """Greedy tokens after prompts of six."""
    prompt = {"token_ids": inputs["token_ids"], "padding_mask": (np.arange(12) < 6) * np.ones((8, 1), "int32")}
    model.generate_function = None  # compiled for the previous layout
    return np.asarray(model.make_generate_function()(prompt, None)["token_ids"])


def check(name, mesh_text, layout="auto", **axes):
    model, inputs, host, expected = reference(name)
    batch = place(model, host, MeshSpec.parse(mesh_text, **axes), layout)
    found, program = run(model, jax.device_put(inputs, batch))
    assert np.abs(found - expected).max() < TOLERANCE
    return program


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x8", "1x3"])
def test_gemma2_computes_the_same(mesh):
    check("gemma2", mesh)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(models.BUILDERS.keys() - {"gemma2", "llama"}))
def test_every_family_computes_the_same(name):
    check(name, "1x8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("gemma1", "2x4"), ("gpt2", "2x4"), ("gpt2", "1x3"), ("bert", "1x3"), ("resnet", "2x4")]
)
def test_other_meshes_compute_the_same(name, mesh):
    check(name, mesh)


@pytest.mark.slow
def test_axes_in_the_middle_compute_the_same():
    check("gemma2", "2x2x2", axes="data,fsdp,model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama"])
def test_blocks_that_divide_cost_two_all_reduces_and_gather_nothing(name):
    kinds = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", check(name, "1x8"))
    assert kinds == ["all-reduce"] * 5  # the embedding's, and two for each of two blocks


@pytest.mark.parametrize("name", ["gemma3"])
def test_fallbacks_gather_activations_not_weights(name):
    model, inputs, *_ = reference(name)
    batch, length = inputs["token_ids"].shape
    shapes = re.findall(r"\[([\d,]+)\][^=]* all-gather(?:-start)?\(", check(name, "1x8"))
    gathered = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
    assert max(gathered) <= batch * length * model.backbone.hidden_dim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("gemma1", "1x8"), ("gemma2", "1x8"), ("gemma2", "2x4"), ("gemma2", "1x3"), ("gemma3", "1x8")]
)
def test_gemma_generates_the_same(name, mesh):
    expected = continuation(name)
    model, inputs, host, _ = reference(name)
    place(model, host, MeshSpec.parse(mesh))
    assert np.array_equal(generate(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_decoders_generate_the_same(name):
    expected = continuation(name)
    model, inputs, host, _ = reference(name)
    place(model, host, MeshSpec.parse("1x8"))
    assert np.array_equal(generate(model, inputs), expected) and len(np.unique(expected[:, 6:])) > 4


@pytest.mark.slow
def test_int8_kernels_with_their_scales_compute_the_same():
    model = models.randomise(models.build("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of each layer that has nothing to quantize
        model.quantize("int8")
    inputs = models.tokens(model)
    host = [np.asarray(v.value) for v in model.variables]
    expected, _ = run(model, inputs)
    found, _ = run(model, jax.device_put(inputs, place(model, host, MeshSpec.parse("1x8"))))
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.slow
def test_keras_hubs_own_map_computes_the_same():
    check("gemma2", "1x8", "keras_hub")
