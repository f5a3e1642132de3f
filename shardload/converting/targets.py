"""What each target format consists of: its tensors, where their values come from, and the files beside them.

`plan_for` decides it all from headers; `Plan.make` then writes every file without the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shardload import _hub, _keras
from shardload._casts import is_float
from shardload.converting import companions, transformers
from shardload.converting.companions import KERAS, STATE, TRANSFORMERS
from shardload.converting.source import Source, Value
from shardload.errors import UnsupportedError, UsageError
from shardload.manifest import View
from shardload.names.state_keys import roles_of
from shardload.names.state_tree import WEIGHTS, describe
from shardload.writers import Place, Wanted

Target = Literal["h5", "safetensors", "orbax"]
TARGETS: tuple[Target, ...] = get_args(Target)
ENDING = ".weights.h5"


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One tensor of the target and the variable whose value it gets."""

    wanted: Wanted
    value: Value
    view: View
    """Which elements of the tensor the variable is."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that a conversion will write."""

    format: str
    """As `shardload.loaders.FORMATS` calls the result."""
    copies: tuple[Copy, ...]
    make: Callable[[Path], tuple[Place, ...]]
    """Writes all files, without the values; takes the result's path, which is not there yet."""
    beside: Mapping[str, bytes]
    """Small files that go beside a target which is a single file, by name."""
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(copy.wanted.nbytes for copy in self.copies)


def target_of(path: Path, to: str | None) -> Target:
    """The format wanted, from what was said or from the name.

    Raises:
        UsageError: When neither tells, or they contradict each other.
    """
    is_file = path.name.endswith(ENDING)
    if to is None and not is_file:
        raise UsageError(
            f"Say what {path.name} shall be: to='safetensors', 'orbax' or 'h5' (--to); or name it {path.name}{ENDING}"
        )
    if to is not None and to not in TARGETS:
        raise UsageError(f"There is no target format {to!r}; there are {', '.join(TARGETS)}")
    if is_file and to not in (None, "h5"):
        raise UsageError(f"{path.name} ends like a Keras file, but to={to!r} was given. Choose another name")
    return "h5" if to is None else to


def plan_for(source: Source, target: Path, to: Target, *, dtype: str | None) -> Plan:
    """Decide what to write.

    Args:
        source: What is converted.
        target: Path of the result.
        to: Its format.
        dtype: Of floating-point tensors; each keeps its own by default.

    Raises:
        UnsupportedError: When the format cannot hold this model.
    """
    wanted = None if dtype is None else np.dtype(_dtype(dtype))
    dtypes = {
        i: wanted if wanted is not None and is_float(value.dtype) else value.dtype for i, value in source.values.items()
    }
    if to == "orbax":
        return _orbax(source, dtypes, dtype)
    _refuse_head(source)
    if to == "safetensors":
        return _safetensors(source, dtypes, dtype)
    return _file(source, dtypes, target, dtype) if target.name.endswith(ENDING) else _preset(source, dtypes, dtype)


def _dtype(name: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, name, name)


def _refuse_head(source: Source) -> None:
    """Presets and Hugging Face folders are written with a backbone's weights only."""
    own = {id(v) for v in source.backbone.variables}
    more = [v.path for v in source.model.variables if id(v) not in own and transformers.is_weight(v)]
    if more:
        raise UnsupportedError(
            f"{type(source.model).__name__} has {len(more)} weights besides its backbone's ({more[0]!r}), which only "
            "--to orbax keeps. Or load it with shardload.load and save the model: model.save_to_preset(folder)"
        )


# ---- Keras' HDF5 --------------------------------------------------------------------------------


def _h5(root: Any, source: Source, dtypes: Mapping[int, Any]) -> tuple[tuple[Copy, ...], dict[str, str]]:
    """The tensors and the named groups that Keras would write for ``root``."""
    names: dict[str, str] = {}
    copies: dict[int, Copy] = {}
    for path, saveable in _keras.saved_objects(root):
        group = f"{path}/vars" if path else "vars"
        if hasattr(saveable, "save_own_variables") and isinstance(getattr(saveable, "name", None), str):
            names[group] = saveable.name
        for key, variable in _keras.stored_by_hook(saveable).items():
            copies.setdefault(id(variable), _whole(f"{group}/{key}", source.values[id(variable)], dtypes))
    left = [v.path for v in root.variables if id(v) not in copies]
    if left:
        raise UnsupportedError(
            f"{len(left)} variables are not stored as they are by their layers ({left[0]!r}), so no HDF5 file can be "
            "written without computing. Load the source with shardload.load and save the model"
        )
    return tuple(copies.values()), names


def _whole(name: str, value: Value, dtypes: Mapping[int, Any]) -> Copy:
    shape = tuple(value.variable.shape)
    strides = tuple(int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(shape)))
    return Copy(Wanted(name, shape, dtypes[id(value.variable)]), value, View(name, 0, shape, strides))


def _file(source: Source, dtypes: Mapping[int, Any], target: Path, dtype: str | None) -> Plan:
    from shardload.writers import h5

    root = source.backbone if source.is_hub else source.model
    copies, names = _h5(root, source, dtypes)
    described = json.dumps(_hub.with_dtype(_described(root), dtype), indent=2)
    beside = {f"{target.name.removesuffix(ENDING)}.json": described.encode()}
    kept = [*source.companions.keras, *source.companions.transformers]
    notes = (f"{len(kept)} files beside the weights were left out: {kept[0]} …",) if kept else ()
    tensors = [c.wanted for c in copies]
    return Plan("keras-h5", copies, lambda path: h5.write_skeleton(path, tensors, names=names), beside, notes)


def _preset(source: Source, dtypes: Mapping[int, Any], dtype: str | None) -> Plan:
    from shardload.writers import h5

    if not source.is_hub:
        raise UnsupportedError(
            f"{type(source.model).__name__} is no model of KerasHub, so there is no preset of it. Name the target "
            f"something{ENDING}"
        )
    copies, names = _h5(source.backbone, source, dtypes)
    tensors = [c.wanted for c in copies]

    def make(folder: Path) -> tuple[Place, ...]:
        folder.mkdir()
        _keras_family(source, folder, dtype)
        companions.copy(source.companions.transformers, folder / TRANSFORMERS)
        places = h5.write_skeleton(folder / "model.weights.h5", tensors, names=names)
        return tuple(Place(p.name, tuple(replace(x, path="model.weights.h5") for x in p.pieces)) for p in places)

    return Plan("keras-hub-preset", copies, make, {})


def _keras_family(source: Source, folder: Path, dtype: str | None) -> None:
    """What KerasHub has beside weights: as it was, or as KerasHub writes it now."""
    folder.mkdir(exist_ok=True)
    kept = {name: path for name, path in source.companions.keras.items() if name != STATE}
    if "config.json" not in kept:
        _hub.save_description(source.model, folder, extra={})
    companions.copy(kept, folder)
    if dtype is not None:
        for name in ("config.json", "task.json"):
            if (path := folder / name).is_file():
                found = json.loads(path.read_text(encoding="utf-8"))
                path.write_text(json.dumps(_hub.with_dtype(found, dtype), indent=4), encoding="utf-8")


# ---- Hugging Face -------------------------------------------------------------------------------


def _safetensors(source: Source, dtypes: Mapping[int, Any], dtype: str | None) -> Plan:
    from shardload.writers import safetensors

    backbone = source.backbone
    config = _transformers_config(source, dtypes, dtype)
    bindings = transformers.views_of(backbone, config)
    shapes = transformers.stand_in(config).tensors
    tensors = transformers.wanted(bindings, shapes, dtypes)
    copies = tuple(Copy(w, source.values[id(b.variable)], b.view) for w, b in zip(tensors, bindings, strict=True))
    placed = {id(b.variable) for b in bindings}
    state = [v for v in backbone.variables if id(v) not in placed]
    if more := [v.path for v in state if transformers.is_weight(v)]:
        raise UnsupportedError(f"Hugging Face has no tensor for {more[0]!r}. Convert with --to orbax or --to h5")

    def make(folder: Path) -> tuple[Place, ...]:
        folder.mkdir()
        companions.copy(source.companions.transformers, folder)
        if "tokenizer.model" not in source.companions.transformers:
            _sentencepiece(source, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _keras_family(source, folder / KERAS, dtype)
        (folder / KERAS / STATE).write_text(json.dumps(_state(source, state)), encoding="utf-8")
        return safetensors.write_skeleton(folder, tensors)

    return Plan("hf-safetensors", copies, make, {})


def _transformers_config(source: Source, dtypes: Mapping[int, Any], dtype: str | None) -> dict[str, Any]:
    """The original one where it was kept, else made from the backbone."""
    kept = source.companions.config(TRANSFORMERS)
    if kept is not None and kept.get("model_type"):
        return (
            kept if dtype is None else {**kept, "torch_dtype": dtype, **({"dtype": dtype} if "dtype" in kept else {})}
        )
    if not source.is_hub:
        raise UnsupportedError(
            f"{type(source.model).__name__} is no model of KerasHub, so Hugging Face has no names for its tensors. "
            "Convert it with --to orbax or --to h5"
        )
    sizes: dict[str, int] = {}
    for i, value in source.values.items():
        if is_float(dtypes[i]):
            sizes[dtypes[i].name] = sizes.get(dtypes[i].name, 0) + int(np.prod(value.variable.shape))
    return transformers.config_of(source.backbone, max(sizes, key=lambda name: sizes[name]))


def _sentencepiece(source: Source, folder: Path) -> None:
    """KerasHub's vocabulary of a SentencePiece tokenizer is the file Hugging Face calls ``tokenizer.model``."""
    path = source.companions.keras.get("assets/tokenizer/vocabulary.spm")
    if path is not None:
        companions.copy({"tokenizer.model": path}, folder)
        kind = "LlamaTokenizer" if "Llama" in type(source.backbone).__name__ else "GemmaTokenizer"
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), encoding="utf-8")


def _state(source: Source, variables: list[Any]) -> dict[str, Any]:
    """Values of small variables by structural key, for `Source` to find again."""
    from shardload._whole import read_rows

    roles = roles_of(source.backbone)
    found = {}
    for variable in variables:
        value = source.values[id(variable)]
        array = value.array
        if value.tensor is not None:  # small and never rearranged
            array = read_rows(value.tensor, 0, value.tensor.rows).reshape(variable.shape)
        array = np.asarray(array)
        found[roles[id(variable)].key] = {"dtype": array.dtype.name, "values": array.tolist()}
    return found


# ---- Orbax --------------------------------------------------------------------------------------


def _orbax(source: Source, dtypes: Mapping[int, Any], dtype: str | None) -> Plan:
    from shardload.writers import orbax

    tree = describe(source.model).weights_only()
    copies = tuple(_whole("/".join(leaf.path), source.values[id(leaf.variable)], dtypes) for leaf in tree.leaves)
    tensors = [c.wanted for c in copies]
    structure = tree.to_json()
    for leaf, tensor in zip(structure["leaves"], tensors, strict=True):
        leaf["dtype"] = tensor.dtype.name
    model_config = json.dumps(_hub.with_dtype(_described(source.model), dtype))

    def make(folder: Path) -> tuple[Place, ...]:
        places = orbax.write_skeleton(folder, tensors, groups=WEIGHTS, model_config=model_config)
        own = folder / "shardload"
        (own / "structure.json").write_text(json.dumps(structure), encoding="utf-8")
        if source.is_hub:
            _keras_family(source, own / KERAS, dtype)
        companions.copy(source.companions.transformers, own / TRANSFORMERS)
        return places

    return Plan("orbax", copies, make, {})


def _described(model: Any) -> dict[str, Any]:
    """A model's configuration as Keras serialises it; how it was compiled belongs to training."""
    found: dict[str, Any] = json.loads(_keras.serialised_model(model))
    found.pop("compile_config", None)
    backbone = getattr(model, "backbone", model)
    inner = found["config"] if backbone is model else found["config"]["backbone"]["config"]
    # KerasHub's Llama forgets this one, and would build an output layer that the weights do not have.
    if (tied := getattr(backbone, "tie_word_embeddings", None)) is not None:
        inner.setdefault("tie_word_embeddings", tied)
    return found
