"""Write a model with every writer of Keras' files and steps, and read it back with Keras and with shardload."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shardload
from shardload.keras_bridge.model_state import own_layers

SHARD_BYTES = 200
"""So few that the variables of one layer are in several files."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one model that could be written, and why others were refused."""

    paths: list[Path] = field(default_factory=list)
    refused: dict[str, shardload.errors.ShardloadError] = field(default_factory=dict)

    def write(self, path: Path, writer: Callable[..., Any], *args: Any, **named: Any) -> None:
        try:
            writer(*args, **named)
        except shardload.errors.ShardloadError as error:
            self.refused[path.name] = error
            # The root of steps stays.
            assert path.name == "step" or not path.exists()
        else:
            self.paths.append(path)


def write(model: keras.Model, folder: Path) -> Written:
    """Write it as each writer does: of the live model, and by converting the step and one of the files."""
    written = Written()
    for name in ("live.weights.h5", "parts.weights.json"):
        written.write(folder / name, shardload.save_as, model, folder / name, **_shards(name))
    written.write(folder / "step", shardload.save, model, folder / "step", step=1)
    for source, target in (
        ("step", "of_step.weights.h5"),
        ("step", "of_step_parts.weights.json"),
        ("live.weights.h5", "of_file.weights.json"),
        ("of_file.weights.json", "back"),
    ):
        if folder / source in written.paths:
            options = {"to": "orbax"} if target == "back" else _shards(target)
            written.write(folder / target, shardload.convert, folder / source, folder / target, **options)
    return written


def _shards(name: str) -> dict[str, int]:
    return {"max_shard_bytes": SHARD_BYTES} if name.endswith(".json") else {}


def check(make: Callable[[], keras.Model], folder: Path, *, without: str = "optimizer/") -> Written:
    """Assert that all files that could be written give back every bit, to Keras and to us; return what was written.

    Args:
        make: Builds the model; every time the same one.
        folder: An empty folder.
        without: Start of the names of what Keras writes and we do not.
    """
    model = make()
    randomise(model)
    model.save_weights(folder / "keras.weights.h5")
    by_keras = shardload.inspect(folder / "keras.weights.h5").tensors
    expected = {name for name in by_keras if not name.startswith(without)}
    written = write(model, folder)
    readers = ((make(), load_by_keras), (make(), shardload.load_weights))
    for path in (folder / "keras.weights.h5", *written.paths):
        is_file = path.name.endswith((".h5", ".json"))
        if is_file and path in written.paths:
            assert shardload.inspect(path).tensors.keys() == expected, path.name
        for found, read in readers if is_file else readers[1:]:
            randomise(found, seed=1)
            read(found, path)
            assert same(found, model), f"{path.name}, read by {read.__name__}"
    return written


def load_by_keras(model: keras.Model, path: Path) -> None:
    model.load_weights(path)


def same(one: keras.Model, two: keras.Model) -> bool:
    return list(state(one)) == list(state(two))


def state(model: keras.Model) -> Iterator[tuple[str, bytes]]:
    """The values that Keras saves, and what `Normalization` makes of its own."""
    for variable in _saved(model):
        value = np.asarray(variable.value)
        yield value.dtype.name, value.tobytes()
    for layer in _normalisations(model):
        yield "normalises", np.asarray(layer.mean).tobytes() + np.asarray(layer.variance).tobytes()


def randomise(model: keras.Model, *, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for variable in _saved(model):
        dtype = np.asarray(variable.value).dtype
        whole = dtype.kind in "iub"
        value = rng.integers(0, 2, variable.shape) if whole else rng.uniform(0.5, 1.5, variable.shape)
        variable.assign(np.asarray(value).astype(dtype))
    for layer in _normalisations(model):
        layer.finalize_state()


def _saved(model: keras.Model) -> list[Any]:
    return [v for v in model.variables if not v.path.endswith("seed_generator_state")]


def _normalisations(model: keras.Model) -> list[Any]:
    return [x for x in own_layers(model) if isinstance(x, keras.layers.Normalization) and x.built]
