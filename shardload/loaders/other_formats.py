"""Formats of other libraries, recognised to say which call converts them to a format that shardload reads.

Recognition asks here last, after every `FormatSpec`: a package may add a format that reads such files.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from shardload.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class _OtherFormat:
    noun: str
    """With its article."""
    way_out: str
    """How to convert it."""
    names: re.Pattern[str]
    """Names of its files, in lower case."""
    head: bytes = b""
    """The first bytes of its files, if it has a signature."""

    def error(self, path: object) -> UnsupportedError:
        """Return the refusal of a file or a folder."""
        return UnsupportedError(
            f"Cannot read {path}: it is {self.noun}, expected a format that shardload reads. {self.way_out}"
        )


_FILE = '"new.safetensors")'
_ARRAYS = f"reader.get_tensor(name) returns each array, and safetensors.numpy.save_file(arrays, {_FILE} writes them"
_NPZ = _OtherFormat(
    "a NumPy archive (.npz)",
    f"Convert it: safetensors.numpy.save_file(dict(numpy.load(path)), {_FILE}",
    re.compile(r".*\.npz"),
)
_PYTORCH = _OtherFormat(
    "a PyTorch checkpoint, a pickle that can run code when opened",
    'Convert it to safetensors: safetensors.torch.save_file(torch.load(path, map_location="cpu", weights_only=True), '
    f"{_FILE}",
    re.compile(r".*\.(bin|pt|pth|ckpt)"),
)
_FORMATS = (
    _NPZ,
    _OtherFormat(
        "a NumPy array (.npy)",
        f'Convert it: safetensors.numpy.save_file({{"name": numpy.load(path)}}, {_FILE}',
        re.compile(r".*\.npy"),
        b"\x93NUMPY",
    ),
    _OtherFormat(
        "Flax's msgpack",
        'Convert it: tree = flax.serialization.msgpack_restore(open(path, "rb").read()); '
        f'safetensors.flax.save_file(flax.traverse_util.flatten_dict(tree, sep="/"), {_FILE}',
        re.compile(r".*\.msgpack|checkpoint_\d+"),
    ),
    _OtherFormat(
        "a TensorFlow SavedModel",
        'Convert it with Keras 2: tf_keras.models.load_model(folder).save_weights("new.weights.h5"). Or without its '
        f'program: reader = tf.train.load_checkpoint(folder + "/variables/variables"); {_ARRAYS}',
        re.compile(r"saved_model\.pb(txt)?"),
    ),
    _OtherFormat(
        "a TensorFlow checkpoint",
        'Convert it with the model in Keras 2: model.load_weights(prefix); model.save_weights("new.weights.h5"). Or '
        f"without the model: reader = tf.train.load_checkpoint(prefix); {_ARRAYS}. prefix is the path without .index",
        re.compile(r".*\.index|.*\.data-\d{5}-of-\d{5}|.*\.ckpt\.meta"),
        b"model_checkpoint_path:",
    ),
    _OtherFormat(
        "an ONNX model",
        "Convert its weights: safetensors.numpy.save_file({i.name: onnx.numpy_helper.to_array(i) for i in "
        f"onnx.load(path).graph.initializer}}, {_FILE}",
        re.compile(r".*\.onnx"),
    ),
)


def refused_file(path: object, *, name: str, head: bytes) -> UnsupportedError | None:
    """Return the refusal of a file of another library, or ``None``; its first bytes decide before its name."""
    by_head = (found for found in _FORMATS if found.head and head.startswith(found.head))
    by_name = (found for found in _FORMATS if found.names.fullmatch(name.lower()))
    found = next(by_head, None) or next(by_name, None)
    return None if found is None else found.error(path)


def refused_folder(path: object, *, names: Collection[str]) -> UnsupportedError | None:
    """Return the refusal of a folder with files of another library, or ``None``."""
    # Files of PyTorch are recognised by their content: any data may be called .bin.
    asked = (*_FORMATS, _PYTORCH)
    found = next((each for each in asked if any(each.names.fullmatch(name.lower()) for name in names)), None)
    return None if found is None else found.error(path)


def refused_zip(path: object, *, members: Collection[str]) -> UnsupportedError | None:
    """Return the refusal of a zip that another library wrote, or ``None``."""
    if any(name.endswith("data.pkl") for name in members):
        return _PYTORCH.error(path)
    return _NPZ.error(path) if members and all(name.endswith(".npy") for name in members) else None
