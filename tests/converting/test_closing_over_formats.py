"""A model that was written and loaded again is the first one: for every family, from every source to every format.

    the family's folder ─► first load ─► one of SOURCES ─► loaded, restored, read into another model
                                             └─► convert to each of FORMATS ─► loaded

All are the first model, bit for bit: its class, the settings of its layers, its values and its outputs. What Keras
itself writes lacks what KerasHub does not serialise, and a ``config.json`` has one field for all layers: there, a note
names each setting that differs, and with the first model's settings the outputs are the first model's.
"""

import re

import gguf_from_folder
import hub_folders
import jax
import keras_hub
import numpy as np
import pytest
from saved_steps import let_save
from transformers_cross import folders

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import UnsupportedError
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.saving import saved_objects

pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),
    # Of KerasHub's Swin, about its own masks.
    pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* looks like it has unbuilt state:UserWarning"),
]

FORMATS = ("preset", "m.weights.h5", "m.weights.json", "orbax", "safetensors")
LIVE = ("preset", "m.weights.h5", "m.weights.json", "safetensors")
SOURCES = (*FORMATS, "step", "callback", "m.keras", *(f"live {name}" for name in LIVE))
FAMILIES = sorted(hub_folders.CONFIGS)
GGUF = {
    **{"gemma": "gemma, tied", "gemma2": "gemma2, 4 KV heads", "gemma3": "gemma3_text, 7 layers"},
    **{"gemma4": "gemma4_text, experts", "llama": "llama, untied", "mistral": "mistral, tied"},
    **{"mixtral": "mixtral, no sliding window", "smollm3": "smollm3, 4 layers", "qwen2": "qwen2, untied"},
    **{"qwen2moe": "qwen2_moe, untied", "qwen3": "qwen3, tied", "qwen3moe": "qwen3_moe, norm_topk_prob"},
    **{"gpt-oss": "gpt_oss, untied", "gpt2": "gpt2, n_inner", "phi3": "phi3, untied", "bloom": "bloom, 6 heads"},
    **{"gemma-embedding": "gemma3_text, both directions", "bert": "bert, masked LM"},
    **{"distilbert": "distilbert, masked LM", "xlm-roberta": "xlm-roberta, 2 token types"},
    "roberta": "roberta, token types of zeros, masked LM",
}
"""A folder of the cross with transformers for each kind of file."""
MADE = ("pooled_dense",)
"""Layers without a tensor in the GGUF file of a BERT: each load gives them other values, and says so."""
FIELDS = {"rms_norm_eps": "epsilon", "layer_norm_eps": "epsilon", "layer_norm_epsilon": "epsilon"}
FIELDS |= {"hidden_act": "activation", "activation_function": "activation", "act_layer": "activation"}
"""What notes call a setting → the attribute of the layers, where the names differ."""
COMPILED = {"compiled", "stop_training"}
"""Of a backbone that was compiled to be saved in training."""
BY_KERAS, BY_CONFIG = r"(\w+): .+ save\(\) of Keras do not", r"(\w+): .+ in config\.json, but .+ in this model"


def write(model, folder, to, target):
    """A source written as ``to``, from the folder or from the model that was loaded from it."""
    if to == "step":
        shardload.save(model, target, step=0)
    elif to == "callback":
        if getattr(model, "optimizer", None) is None:  # KerasHub compiles its tasks
            model.compile("sgd")
        let_save(OrbaxCheckpoint(target), model)
    elif to == "m.keras":
        model.save(target)
    elif to.startswith("live "):
        return target if written(shardload.save_as, model, target) else None
    else:
        return target if written(shardload.convert, folder, target) else None
    return target


def written(write_with, source, target):
    """The report, or ``None`` if this family cannot be written in its format, which an error says."""
    try:
        return write_with(source, target, to=None if "." in target.name else target.name)
    except UnsupportedError as error:
        assert target.name != "orbax"
        assert "Choose the format " in str(error) or "Keras' model.save_weights" in str(error)
        return None


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
    found = jax.jit(model)(inputs_of(model))
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in jax.tree.leaves_with_path(found)}


def values_of(model, made=()):
    """Every value but the seeds', in order, with the last part of its path: Keras numbers layers as they are made."""
    kept = [v for v in model.variables if "seed" not in v.path and not v.path.startswith(made)]
    return [(v.name, np.asarray(v).tobytes()) for v in kept]


def assert_same(found, first, notes=(), said=BY_CONFIG, made=()):
    """Equal, but for the settings that notes of this form name; then equal with the first model's settings."""
    assert type(found) is type(first)
    named = {match[1] for note in notes if (match := re.match(said, note))}
    one, two = hub_folders.settings_of(found), hub_folders.settings_of(first)
    differ = {key[1] for key in one.keys() | two.keys() if one.get(key) != two.get(key)} - COMPILED
    assert differ <= named | {FIELDS[name] for name in named & FIELDS.keys()}
    assert values_of(found, made) == values_of(first, made)
    for path, layer in saved_objects(found) if differ else ():
        for name in differ & vars(layer).keys():
            setattr(layer, name, getattr(dict(saved_objects(first)).get(path), name))
    wanted = {name: value for name, value in outputs_of(first).items() if not (made and "pooled" in name)}
    assert {name: value for name, value in outputs_of(found).items() if name in wanted} == wanted


def zero(model):
    for variable in model.trainable_weights:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    return model


def check(source, reference, other, ends, *, notes=(), said=BY_CONFIG, made=()):
    """A source is the reference: loaded, in another model, and converted to every end."""
    found = shardload.load(source, mesh="1x1")
    assert_same(found, reference, notes, said, made)
    read = shardload.restore if source.name in ("step", "callback") else shardload.load_weights
    # A file of a BERT may lack a pooler, and have more tensors than the model: `load` knows them.
    read(zero(other), source, strict=source.suffix != ".gguf")
    assert values_of(other, made) == values_of(reference, made)
    if said == BY_KERAS:  # `found` has the first model's settings now
        found = shardload.load(source, mesh="1x1")
    for end in ends:
        target = source.with_name("ends") / end.replace(".", "-") / end  # one m.json each
        target.parent.mkdir(parents=True)
        if (report := written(shardload.convert, source, target)) is not None:
            assert_same(shardload.load(target, mesh="1x1"), found, report.notes, made=made)


class Family:
    """The folder of a family, loaded twice."""

    def __init__(self, name, path):
        path.mkdir()
        self.folder = hub_folders.write(path, name, hub_folders.build(path, name), unwanted=False)
        self.first, self.other = (shardload.load(self.folder, mesh="1x1") for _ in range(2))
        self.notes = shardload.report(self.first).notes

    def check(self, to, ends, path):
        path.mkdir(exist_ok=True)
        model = shardload.load(self.folder, mesh="1x1") if to == "callback" else self.first
        if (source := write(model, self.folder, to, path / to.removeprefix("live "))) is None:
            return
        said = BY_KERAS if to == "m.keras" else BY_CONFIG
        check(source, self.first, self.other, ends, notes=self.notes, said=said)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """One at a time, as the tests come by family."""
    made = {}

    def of(name):
        if name not in made:
            made.clear()
            made[name] = Family(name, tmp_path_factory.mktemp("family") / "hf")
        return made[name]

    return of


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", range(len(FAMILIES)), ids=FAMILIES)
def test_a_family_in_one_format_and_from_there_in_another(place, families, tmp_path):
    """Each family once, and with the families all sources and all formats."""
    end = FORMATS[(place + place // len(SOURCES)) % len(FORMATS)]
    families(FAMILIES[place]).check(SOURCES[place % len(SOURCES)], [end], tmp_path / "of")


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_every_format_and_from_there_in_every_other(family, source, families, tmp_path):
    families(family).check(source, FORMATS, tmp_path / "of")


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("bert", ["preset"]),
        ("qwen3", ["safetensors"]),
        *(pytest.param(kind, FORMATS, marks=pytest.mark.full) for kind in GGUF),
    ],
)
def test_a_gguf_file_in_every_format(kind, ends, tmp_path):
    name = GGUF[kind]
    folder = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "hf")
    file = gguf_from_folder.write(folder, tmp_path / "m.gguf")
    first, other = (shardload.load(file, mesh="1x1") for _ in range(2))
    made = MADE if [note for note in shardload.report(first).notes if "keep their initial values" in note] else ()
    check(file, first, other, ends, made=made)


SIZES = {"vocabulary_size": 20, "num_layers": 2, "num_query_heads": 2, "num_key_value_heads": 1}
SIZES |= {"hidden_dim": 8, "intermediate_dim": 16}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("as_task", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family", ["Llama3", *(pytest.param(name, marks=pytest.mark.full) for name in ("Qwen", "Qwen3"))]
)
def test_a_preset_of_keras_hub_keeps_its_tie_in_every_format(family, as_task, tied, tmp_path):
    more = {"head_dim": 4} if family == "Qwen3" else {}
    first = getattr(keras_hub.models, f"{family}Backbone")(**SIZES, **more, tie_word_embeddings=tied)
    model = getattr(keras_hub.models, f"{family}CausalLM")(first, preprocessor=None) if as_task else first
    model.save_to_preset(tmp_path / "preset")
    for to in FORMATS:
        source = tmp_path / "preset"
        for place, step in enumerate((to, "safetensors", "orbax", "safetensors")):
            target = tmp_path / f"{to} {place}" / step
            target.parent.mkdir()
            shardload.convert(source, target, to=None if "." in step else step)
            found = backbone_of(shardload.load(target, mesh="1x1"))
            assert found.token_embedding.tie_weights is tied
            assert values_of(found) == values_of(first)
            source = target
