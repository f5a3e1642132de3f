"""A model that was loaded onto a mesh can be exported, with a batch of any size."""

import os
import subprocess
import sys
from pathlib import Path

import export_child
import jax
import numpy as np
import pytest
from jax import export

import shardload


@pytest.fixture
def saved(tmp_path):
    """A folder with the weights of a model, and its outputs for eight inputs."""
    model, x = export_child.build(), np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    model.save_weights(tmp_path / "model.weights.h5")
    np.savez(tmp_path / "known.npz", x=x, y=model.predict(x, verbose=0))
    return tmp_path


def test_jax_exports_a_sharded_model_with_a_symbolic_batch(saved):
    with shardload.abstract():
        model = export_child.build()
    shardload.load_weights(model, saved / "model.weights.h5", mesh="2x4")
    (batch,) = export.symbolic_shape("batch")
    exported = export.export(jax.jit(model))(jax.ShapeDtypeStruct((batch, 16), np.float32))
    with np.load(saved / "known.npz") as known:
        for size in export_child.BATCHES:
            np.testing.assert_allclose(exported.call(known["x"][:size]), known["y"][:size], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="TensorFlow 2.21 cannot read what JAX 0.12 exports")
def test_keras_exports_a_sharded_model_as_a_saved_model(saved):
    # A process of its own: the tests' processes do without TensorFlow, whose XLA ends at flags that JAX's knows.
    flags = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, Path(export_child.__file__), saved]
    done = subprocess.run(command, env=flags, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
