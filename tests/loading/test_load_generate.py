"""Loaded onto a mesh, a model says what it says unsharded: from preset folder to token ids, and from GGUF to text."""

import functools

import jax
import models
import numpy as np
import pytest

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
