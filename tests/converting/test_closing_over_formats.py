"""A model that was written and loaded again is the first one: for every family, from every format to every other."""

import hub_folders
import jax
import numpy as np
import pytest
from hub_settings import settings_of

import shardload
from shardload.errors import UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3.15, NumPy 2.4
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),
    # Of KerasHub's Swin, about its own masks.
    pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* looks like it has unbuilt state:UserWarning"),
]

FORMATS = ("preset", "m.weights.h5", "m.weights.json", "orbax", "safetensors")
FAMILIES = sorted(hub_folders.CONFIGS)
CHEAP = ("gpt2", "bert")


def convert(source, target):
    """The target, or ``None`` if this family cannot be written in its format, which an error says."""
    try:
        shardload.convert(source, target, to=None if "." in target.name else target.name)
    except UnsupportedError as error:
        assert target.name != "orbax"
        assert "Choose the format " in str(error)
        return None
    return target


def inputs_of(model):
    """Random inputs of the shapes that the model has."""
    rng = np.random.default_rng(0)
    given = model.input if isinstance(model.input, dict) else {"": model.input}
    found = {}
    for name, tensor in given.items():
        shape = tuple(size or (2 if i == 0 else 6) for i, size in enumerate(tensor.shape))
        whole = "int" in tensor.dtype or name.endswith(("ids", "mask", "token_ids"))
        made = rng.integers(2, 20, shape) if name.endswith("token_ids") else np.ones(shape, np.int32)
        found[name] = made.astype(np.int32) if whole else rng.normal(size=shape).astype(np.float32)
    if "segment_ids" in found:
        found["segment_ids"] *= 0
    return found if isinstance(model.input, dict) else found[""]


def outputs_of(model):
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(model)(inputs_of(model)))]


def assert_same(found, first):
    assert type(found) is type(first)
    assert settings_of(found) == settings_of(first)
    for one, two in zip(found.variables, first.variables, strict=True):
        if "seed" not in one.path:
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), one.path
    for one, two in zip(outputs_of(found), outputs_of(first), strict=True):
        assert one.tobytes() == two.tobytes()


def folder_of(family, path):
    path.mkdir()
    return hub_folders.write(path, family, hub_folders.build(path, family), unwanted=False)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", [f if f in CHEAP else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES])
def test_a_family_in_every_format_and_from_there_in_every_other(family, to, tmp_path, request):
    folder = folder_of(family, tmp_path / "hf")
    first = shardload.load(folder, mesh="1x1")
    if (source := convert(folder, tmp_path / to)) is None:
        return
    assert_same(shardload.load(source, mesh="1x1"), first)
    if not request.config.getoption("--every-mesh"):  # the pairs, for `make test-full`
        return
    (tmp_path / "again").mkdir()
    for other in FORMATS:
        if (target := convert(source, tmp_path / "again" / other)) is not None:
            assert_same(shardload.load(target, mesh="1x1"), first)
