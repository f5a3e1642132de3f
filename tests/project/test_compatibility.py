"""The tables of "What fits where" are made from pyproject.toml, the registries and runs of every operation.

``python tests/project/test_compatibility.py`` writes them.
"""

import re
import sys
import tomllib
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
import pytest
from gguf_tokenizers import add_pieces, gguf_with_tokenizer
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

import shardload
from shardload.comparing import diff
from shardload.converting import SAVE_TARGETS, TARGETS
from shardload.errors import ShardloadError, UnsupportedError
from shardload.families.registry import families, gguf_architectures
from shardload.hub import kerashub
from shardload.loaders import registry
from shardload.resolve.opening import open_source
from shardload.synth import synth
from shardload.verifying import verify

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
YES, NO = "yes", "-"


# ---- packages ------------------------------------------------------------------------------------

SHOWN = {
    "jax": "JAX",
    "keras": "Keras",
    "keras-hub": "KerasHub",
    "orbax-checkpoint": "Orbax",
    "numpy": "NumPy",
    "tensorstore": "TensorStore",
    "obstore": "obstore",
    "h5py": "h5py",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "grain": "Grain",
    "aiohttp": "aiohttp",
}


def packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"": project["dependencies"], **project["optional-dependencies"]}
    yield "Python", project["requires-python"], "3.11"
    for package, title in SHOWN.items():
        extra, bounds = next(
            (extra, found[1]) for extra, all_of in needed.items() for one in all_of if (found := split(one, package))
        )
        pinned = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
        yield f"{title} (`[{extra}]`)" if extra else title, bounds, pinned


def split(requirement, package):
    return re.fullmatch(rf"{package}((?:>=|==).*)", requirement)


def packages_table():
    rows = "".join(f"| {title} | {bounds.replace(',', ', ')} | {pinned} |\n" for title, bounds, pinned in packages())
    return "| package | needed | CI |\n|---|---|---|\n" + rows


# ---- families ------------------------------------------------------------------------------------

OTHER_INPUTS = ("paligemma", "gemma4_assistant")
"""Models whose class is a `CausalLM` that text alone does not run: it also takes images, or another model."""


def model_types():
    return [(family, one) for family in families() for one in family.model_types if not one.is_part]


def size_of(family, model_type):
    return next((name for name, config in family.sizes.items() if config["model_type"] == model_type.name), None)


def generates(family, model_type):
    """Whether `shardload.generate` continues text with what `shardload.load` makes of such a folder."""
    if (size := size_of(family, model_type)) is None or model_type.name in OTHER_INPUTS:
        return False
    task = kerashub.task_class(open_source(size, None, described=True, weights=False).manifest)
    return (
        task is not None
        and issubclass(task, keras_hub.models.CausalLM)
        and not issubclass(task, keras_hub.models.Seq2SeqLM)
    )


def families_table():
    in_gguf = {name for kinds in gguf_architectures().values() for kind in kinds for name in kind.model_types}
    rows = ""
    for family, one in model_types():
        exported = any(one.name in export.model_types for export in family.exports.values())
        cells = (one.name in in_gguf, exported, generates(family, one))
        rows += f"| {family.title} `{one.name}` | {' | '.join(YES if cell else NO for cell in cells)} |\n"
    return "| family and `model_type` | GGUF | export | text |\n|---|---|---|---|\n" + rows


# ---- formats -------------------------------------------------------------------------------------


def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="zz")])


def write_samples(folder):
    """Format → a small checkpoint; those of KerasHub's models are of the same one, where the format allows it."""
    presets = {"keras-hub-preset": "preset", "hf-safetensors": "safetensors", "keras-h5": "h5"}
    found = {
        name: Path(synth("gemma2_2b", format=written, scale=0.02, directory=folder / name))
        for name, written in presets.items()
    }
    hub = shardload.load(found["keras-hub-preset"], mesh="1x1")
    arrays = {v.path: np.asarray(v).astype("float32") for v in hub.weights}
    shardload.save_as(hub, folder / "sharded.weights.json", max_shard_bytes="1MiB")
    hub.save(folder / "archive.keras")
    shardload.save(hub, folder / "steps", step=1)
    with pytest.MonkeyPatch.context() as patch:
        found["gguf"] = gguf_with_tokenizer(folder, patch, "gemma3_text", add_pieces, vocab_size=1024)
    save_file(arrays, folder / "bare.safetensors")
    np.savez(folder / "arrays.npz", **arrays)
    model().save(folder / "old.h5")
    return hub, found | {
        "keras-sharded-h5": folder / "sharded.weights.json",
        "keras-archive": folder / "archive.keras",
        "orbax": folder / "steps",
        "safetensors": folder / "bare.safetensors",
        "numpy": folder / "arrays.npz",
        "keras-legacy-h5": folder / "old.h5",
        "flax-msgpack": ROOT / "tests" / "support" / "flax_state.msgpack",
    }


def load_weights(hub, name, path):
    match name:
        case "keras-legacy-h5":
            shardload.load_weights(model(), path)
        case "flax-msgpack":
            dense = keras.Sequential([keras.Input((24,)), keras.layers.Dense(8)])
            kernel, bias = (v.path for v in dense.weights)
            names = {"params/dense/kernel": kernel, "params/dense/bias": bias}
            shardload.load_weights(dense, path, names=names, strict=False)
        case "gguf" | "keras-h5":  # of other values and dtypes than the model of the others
            shardload.load_weights(shardload.load(path, mesh="1x1"), path)
        case _:
            shardload.load_weights(hub, path)


def load_an_array(path):
    tensors = shardload.inspect(path).tensors
    name = next(name for name, tensor in tensors.items() if len(tensor.shape) == 2)
    shardload.load_arrays(path, {name: SingleDeviceSharding(jax.devices()[0])}, strict=False)


def works(operation):
    """Whether an operation works, or is refused with a reason."""
    try:
        operation()
    except UnsupportedError:
        return False
    return True


def operations(hub, name, path, folder):
    def convert(to):
        out = folder / f"{name}-to-{to}"
        shardload.convert(path, out.with_suffix(".weights.h5") if to == "h5" else out, to=None if to == "h5" else to)

    return {
        "build": lambda: shardload.load(path, mesh="1x1"),
        "fill": lambda: load_weights(hub, name, path),
        "arrays": lambda: load_an_array(path),
        "preset": lambda: convert("preset"),
        **{to: lambda to=to: convert(to) for to in TARGETS},
        "look": lambda: (shardload.inspect(path), list(verify(path)), diff(path, path)),
        "plan": lambda: shardload.plan(path, mesh="1x1"),
        "quantise": lambda: shardload.load(path, mesh="1x1", quantize="int8"),
    }


def cells_of(found):
    """One cell for operations that agree in every format, which this checks."""
    assert found["look"] and found["build"] == found["plan"] == found["quantise"]
    targets = [to for to in ("h5", "preset", "safetensors", "orbax") if found[to]]
    every = "every target" if len(targets) == 4 else ", ".join(f"`{to}`" for to in targets) or NO
    return [*(YES if found[key] else NO for key in ("build", "fill", "arrays")), every]


def formats_table(folder):
    hub, samples = write_samples(folder)
    assert samples.keys() == registry.BUILT_IN.keys()
    rows = ""
    for name in registry.BUILT_IN:
        assert shardload.inspect(samples[name]).format == name
        found = {key: works(one) for key, one in operations(hub, name, samples[name], folder).items()}
        rows += f"| `{name}` | {' | '.join(cells_of(found))} |\n"
    return "| format | `load`, `plan` | `load_weights` | `load_arrays` | `convert` to |\n|---|---|---|---|---|\n" + rows


# ---- the page ------------------------------------------------------------------------------------


def marked(name, table):
    return f"<!-- {name} -->\n{table}<!-- end of {name} -->\n"


def test_packages():
    assert marked("packages", packages_table()) in PAGE.read_text(), f"run python {Path(__file__).name}"


def test_families():
    assert marked("families", families_table()) in PAGE.read_text(), f"run python {Path(__file__).name}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_formats(tmp_path):
    assert marked("formats", formats_table(tmp_path)) in PAGE.read_text(), f"run python {Path(__file__).name}"


@pytest.mark.parametrize("size", ["pali_gemma_3b_224", "gemma4_2b_assistant", "bart_base", "gemma3n_e2b"])
@pytest.mark.slow
def test_models_without_text_are_refused_by_generate(size, tmp_path):
    loaded = shardload.load(synth(size, format="safetensors", scale=0.02, directory=tmp_path), mesh="1x1")
    with pytest.raises(ShardloadError, match="Cannot generate text"):
        shardload.generate(loaded, "ab", max_new_tokens=1)


def test_the_targets_of_save_as_are_those_of_the_page():
    named = re.search(r"`save_as` writes a model as ([^.]+)\.", PAGE.read_text())[1]
    assert set(re.findall(r"`([\w-]+)`", named)) == {*SAVE_TARGETS}


if __name__ == "__main__":
    import tempfile

    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as made:
        tables = {"packages": packages_table(), "families": families_table(), "formats": formats_table(Path(made))}
    for name, table in tables.items():
        begin, end = marked(name, "@").split("@")
        text = re.sub(f"{begin}.*?{end}", lambda _, table=table, name=name: marked(name, table), text, flags=re.DOTALL)
        sys.stdout.write(table)
    PAGE.write_text(text)
