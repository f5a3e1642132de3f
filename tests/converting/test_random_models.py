"""Random models by every writer, read by Keras and by us: every bit comes back, or the refusal is true."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

import h5py
import keras
import pytest
from hypothesis import HealthCheck, assume, given, settings
from random_models import make, recipes
from same_models import zero_new_adapters
from written_everywhere import SHARD_BYTES, load_by_keras, randomise, same, state

import shardload
from shardload.errors import ShardloadError
from shardload.keras_bridge.model_state import own_layers

# Keras warns of what it leaves out, of its own files as well; the test is about values.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FEW = 8
CASES = int(os.environ.get("SHARDLOAD_MODELS", FEW))
"""The few are the same every time."""
SAME = {"derandomize": CASES == FEW, "database": None, "print_blob": True}


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), **SAME)
@given(recipe=recipes)
def test_a_random_model_comes_back_from_every_file(recipe):
    try:
        model = make(recipe)
    except Exception:  # Keras cannot make it
        assume(False)
    assume(model.weights)
    with tempfile.TemporaryDirectory() as folder:
        Case(recipe, model, Path(folder)).check()


class Case:
    """One model, its files, and what was refused."""

    def __init__(self, recipe, model, folder):
        self.recipe, self.model, self.folder = recipe, model, folder
        self.paths, self.refused = [], {}
        self.twin = make(recipe)
        randomise(model)

    def check(self):
        self.by_keras()
        for name in ("live.weights.h5", "parts.weights.json"):
            self.write(name, shardload.save_as, self.model, self.folder / name, **shards(name))
        self.write("step", shardload.save, self.model, self.folder / "step", step=1)
        for source, target in map(str.split, self.recipe["conversions"]):
            self.convert(source, f"{source.split('.')[0]}-{target}")
        self.read_weights()
        self.read_models()
        for name, error in self.refused.items():
            reason = next((holds for said, holds in REASONS.items() if re.search(said, str(error), re.DOTALL)), None)
            assert reason is not None and reason(self), f"{name}: {error}"

    def by_keras(self):
        """Let Keras write its files, and find out whether it reads them itself."""
        self.keras_reads, self.rebuilt = False, None
        for name, write in (("keras.weights.h5", "save_weights"), ("keras.keras", "save")):
            try:
                getattr(self.model, write)(self.folder / name)
            except Exception:
                (self.folder / name).unlink(missing_ok=True)
        if (self.folder / "keras.weights.h5").exists():
            self.keras_reads = self.comes_back(load_by_keras, "keras.weights.h5")
        if (self.folder / "keras.keras").exists():
            with contextlib.suppress(Exception):
                self.rebuilt = keras.saving.load_model(self.folder / "keras.keras")

    def write(self, name, writer, *args, **named):
        try:
            report = writer(*args, **named)
        except ShardloadError as error:
            self.refused[name] = error
            assert name == "step" or not (self.folder / name).exists()
        else:
            self.paths.append(name)
            return report

    def convert(self, source, target):
        whole = self.keras_reads and not self.has_lora() and (self.folder / "keras.keras").exists()
        if source in self.paths or (source == "keras.keras" and whole):
            options = {"to": "orbax"} if target.endswith("orbax") else shards(target)
            self.write(target, shardload.convert, self.folder / source, self.folder / target, **options)

    def comes_back(self, read, name):
        randomise(self.twin, seed=1)
        try:
            read(self.twin, self.folder / name)
        except Exception as error:
            self.last = error
            return False
        self.last = "other values"
        return same(self.twin, self.model)

    def read_weights(self):
        """Read everything into a model of the same recipe."""
        own = [name for name in ("keras.weights.h5",) if (self.folder / name).exists()]
        for name in (*self.paths, *own):
            assert self.comes_back(shardload.load_weights, name) or not self.keras_reads, f"{name}: {self.last}"
            if name.endswith((".h5", ".json")) and self.keras_reads:
                assert self.comes_back(load_by_keras, name), f"{name}, by Keras: {self.last}"
        if "step" in self.paths:
            assert self.comes_back(shardload.restore, "step"), self.last
        if "live.weights.h5" in self.paths and own:
            one, two = (datasets(self.folder / name) for name in ("live.weights.h5", own[0]))
            assert one.items() <= two.items()
            assert all("optimizer" in name or "second" in name for name in two.keys() - one.keys())

    def read_models(self):
        """Let each description build the model again."""
        for name in (*self.paths, "keras.keras"):
            if not (self.folder / name).exists():
                continue
            try:
                found = shardload.load(self.folder / name)
            except ShardloadError as error:
                self.refused[f"load {name}"] = error
            else:
                zero_new_adapters(found)
                # Keras merges LoRA and sets both factors to zero, leaves out what hooks leave out, and describes no
                # policy of a custom class.
                as_keras = self.rebuilt is not None and equal(found, self.rebuilt)
                assert as_keras or equal(found, self.model), f"loaded from {name}"

    def computes(self):
        """Whether a layer saves other values than variables."""
        stores = []
        for layer in own_layers(self.model):
            stores.append({})
            layer.save_own_variables(stores[-1])
        return any(not isinstance(value, keras.Variable) for store in stores for value in store.values())

    def forgets(self):
        """Whether Keras' own file lacks a weight."""
        kept = shardload.inspect(self.folder / "keras.weights.h5").tensors if self.keras_reads else ()
        return len(kept) < len(self.model.weights)

    def cannot_be_rebuilt(self):
        """Whether Keras, too, fails to build the model from its description, or to give it its weights."""
        return self.rebuilt is None or not equal(self.rebuilt, self.model)

    def has_lora(self):
        return any(getattr(layer, "lora_enabled", False) for layer in own_layers(self.model))


def datasets(path):
    """The bytes, shape and dtype of every dataset."""
    found = {}

    def visit(name, each):
        if isinstance(each, h5py.Dataset):
            found[name] = each[()].tobytes(), each.shape, str(each.dtype), each.attrs.get("dtype")

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def shards(name):
    return {"max_shard_bytes": SHARD_BYTES} if name.endswith(".json") else {}


def equal(one, two):
    """Whether two models have the same values, in any order."""
    return sorted(state(one)) == sorted(state(two))


REASONS = {
    r"save_own_variables of \w+ at .* saves arrays or numbers": Case.computes,
    r"no layer saves \d+ variable": Case.forgets,
    r"LoRA is enabled in \d+ of its layers": Case.has_lora,
    r"contains weights .* but no description of their model": Case.cannot_be_rebuilt,
    r"(missing from|not used by|does not match).*The model is unchanged": Case.cannot_be_rebuilt,
    r"its tensors do not match its model|tensors would be lost": Case.cannot_be_rebuilt,
    r"Cannot build the model of .* from its configuration": Case.cannot_be_rebuilt,
    r"Cannot rebuild the layer .*: it had the dtype policy": Case.cannot_be_rebuilt,
}
