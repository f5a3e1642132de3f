import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest

from shardload.errors import UsageError
from shardload.units import dtype_name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("bf16", "bfloat16"),
        ("BFLOAT16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("f32", "float32"),
        ("float", "float32"),
        (jnp.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        ("mixed_bfloat16", "mixed_bfloat16"),
        ("int8_from_float32", "int8_from_float32"),
        (None, None),
    ],
)
def test_every_spelling_has_one_name(written, name):
    assert dtype_name(written) == name


def test_policies_pass_through():
    policy = keras.DTypePolicy("mixed_bfloat16")
    assert dtype_name(policy) is policy


@pytest.mark.parametrize("written", ["nonsense", "int32", "", 3, object])
def test_anything_else_names_what_there_is(written):
    with pytest.raises(UsageError, match=r"Cannot load in the dtype .* Choose bfloat16, float16, float32"):
        dtype_name(written)
