"""Loaded onto a mesh, a model says what it says unsharded: to token ids, from GGUF to text, and once exported."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import export_child
import jax
import models
import numpy as np
import pytest
from jax import export

import shardload
from shardload.text.generation import generate_ids

FAMILIES = ("gemma1", "gemma2", "gemma3", "llama")
MESHES = ("1x8", "2x4", "8x1", "1x3")
NEW_TOKENS = 6
PROMPTS = np.random.default_rng(7).integers(1, 256, size=(8, 5)).tolist()


@pytest.mark.full  # for every change, the example of the README does
def test_real_gemma_3_continues_the_prompt_in_float32():
    model = shardload.load("gemma3_270m", mesh="1x8", dtype="float32")
    text = shardload.generate(model, "The capital of France is", max_new_tokens=11)
    assert text.startswith(" the capital of the country of France. It is the")


@pytest.fixture(scope="module")
def quick_compiler():
    """Compile without optimisations: compiling is nearly all of the small models' time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, quick_compiler):
    """Of a family: a preset folder Keras wrote, and what the unsharded Keras model says to one prompt and to eight."""

    @functools.cache
    def made(family):
        lm = models.randomise(models.causal_lm(family))
        folder = tmp_path_factory.mktemp(family)
        lm.save_to_preset(str(folder))
        return folder, keras_tokens(lm, PROMPTS[:1]), keras_tokens(lm, PROMPTS)

    return made


def keras_tokens(lm, prompts):
    """What KerasHub's own compiled loop adds to each prompt, without a mesh."""
    tokens = np.zeros((len(prompts), len(prompts[0]) + NEW_TOKENS), np.int32)
    tokens[:, : len(prompts[0])] = prompts
    mask = tokens > 0
    made = lm.make_generate_function()({"token_ids": jax.numpy.array(tokens), "padding_mask": jax.numpy.array(mask)})
    return np.asarray(made["token_ids"])[:, len(prompts[0]) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=[] if (i - j) % 4 == 0 else pytest.mark.full)
        for i, family in enumerate(FAMILIES)
        for j, mesh in enumerate(MESHES)
    ],
)
def test_generates_what_the_unsharded_keras_model_does(saved, family, mesh):
    """A family on each mesh; `test_parallel_forward` computes with every family on others."""
    folder, one, eight = saved(family)
    model = shardload.load(str(folder), mesh=mesh)
    assert generate_ids(model, PROMPTS[:1], max_new_tokens=NEW_TOKENS) == one
    assert generate_ids(model, PROMPTS, max_new_tokens=NEW_TOKENS) == eight


@pytest.fixture
def folder(tmp_path):
    """A folder with the weights of a model, and its outputs for eight inputs."""
    model, x = export_child.build(), np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    model.save_weights(tmp_path / "model.weights.h5")
    np.savez(tmp_path / "known.npz", x=x, y=model.predict(x, verbose=0))
    return tmp_path


def test_jax_exports_a_sharded_model_with_a_symbolic_batch(folder):
    with shardload.abstract():
        model = export_child.build()
    shardload.load_weights(model, folder / "model.weights.h5", mesh="2x4")
    (batch,) = export.symbolic_shape("batch")
    exported = export.export(jax.jit(model))(jax.ShapeDtypeStruct((batch, 16), np.float32))
    with np.load(folder / "known.npz") as known:
        for size in export_child.BATCHES:
            np.testing.assert_allclose(exported.call(known["x"][:size]), known["y"][:size], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="TensorFlow 2.21 cannot read what JAX 0.12 exports")
def test_keras_exports_a_sharded_model_as_a_saved_model(folder):
    # A process of its own: the tests' processes do without TensorFlow, whose XLA ends at flags that JAX's knows.
    flags = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, Path(export_child.__file__), folder]
    done = subprocess.run(command, env=flags, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
