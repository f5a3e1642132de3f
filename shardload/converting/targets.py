"""Make the plan for each target format: its tensors, where their values come from, and the small files next to them.

`plan_for` decides everything from headers; `ConversionPlan.make` then writes every file without the values.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shardload.converting import hugging_face_copy, keras_files, transformers
from shardload.converting.companions import KERAS, STATE, TRANSFORMERS, copy_files, hugging_face_tokenizer
from shardload.converting.computing import StoredValue
from shardload.converting.heads import notes_on_heads, without_head
from shardload.converting.hugging_face_copy import in_dtype
from shardload.converting.keras_files import ENDING, INDEX_ENDING, head_of, keras_family, model_config, state_as_json
from shardload.converting.plans import ConversionPlan, Copy, NoPlaceError, whole
from shardload.converting.same_values import require_equal
from shardload.converting.source import Source
from shardload.errors import UnsupportedError, UsageError
from shardload.families.parts.config import architecture_of
from shardload.families.registry import model_type_of
from shardload.hub import kerashub
from shardload.keras_bridge.layer_settings import with_dtype
from shardload.loaders import spec_of
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.loaders.hf_folder import SPEC as HUGGING_FACE
from shardload.loaders.orbax.loader import SPEC as ORBAX
from shardload.loaders.registry import FormatSpec, specs
from shardload.manifest import Manifest
from shardload.mapping.assets import read_assets
from shardload.mapping.state_tree import WEIGHT_ITEMS, state_tree_of
from shardload.mapping.stored_values import VALUES_ENTRY as VALUES
from shardload.mapping.stored_values import file_values_to_json, lacking_values, stored_values
from shardload.transfer.casts import is_float
from shardload.units import byte_count, check_kind

Target = Literal["h5", "safetensors", "orbax"]
TARGETS: tuple[Target, ...] = get_args(Target)
_FILES = (".json", ".zip")
"""File endings that a target folder's name must not have, besides those of formats: readers would expect a file."""


def target_of(path: Path, to: str | None) -> str:
    """Return the name of the target's format, from the argument ``to`` or the file ending; raise if they disagree."""
    check_kind("to", to, str | None, f"one of preset, {', '.join(TARGETS)}")
    if (spec := added_format(path)) is not None and to in (None, spec.name):
        return spec.name
    is_file = is_file_name(path)
    if to == "preset" and not is_file:  # as `save_as` calls it
        return "h5"
    if path.name.lower().endswith(".keras"):
        stem = path.name[: -len(".keras")] or "model"
        raise UsageError(
            f"Cannot write {path.name}: .keras files can only be read. Name it {stem}{ENDING}, or choose a folder and "
            "a format"
        )
    if to is None and not is_file:
        raise UsageError(
            f"Cannot tell the format of {path.name}. {without_ending(path)} to='preset', 'safetensors' or 'orbax' "
            f"(--to), or name it {target_stem(path)}{ENDING}"
        )
    if added := next((s for s in specs() if s.write_file is not None and s.endings and s.name == to), None):
        raise UsageError(f"Cannot write {path.name} with to={to!r}: name it {target_stem(path)}{added.endings[0]}")
    if to is not None and to not in TARGETS:
        raise UsageError(f"Cannot convert with to={to!r}: expected one of preset, {', '.join(TARGETS)}")
    if is_file and to not in (None, "h5"):
        raise UsageError(
            f"Cannot write {path.name} with to={to!r}: the name is that of a Keras file. Choose another name"
        )
    if (ending := _file_ending(path)) and not is_file:
        stem = target_stem(path)
        raise UsageError(
            f"Cannot write {path.name} with to={to!r}: it has a file extension, and the result is a folder. Remove "
            f"{ending}, or name it {stem}{ENDING} (one file for Keras) or {stem}{INDEX_ENDING} (the same in shards)"
        )
    return "h5" if to is None else to


def target_stem(path: Path) -> str:
    """Return a target's name without its file ending, to suggest names in messages; ``model`` if nothing is left."""
    return path.name[: len(path.name) - len(_file_ending(path))].removesuffix(".weights") or "model"


def without_ending(path: Path) -> str:
    """Return the first words of advice to pass ``to=``: "Pass" or, after ``model.json``, "Remove .json and pass"."""
    return f"Remove {ending} and pass" if (ending := _file_ending(path)) else "Pass"


def _file_ending(path: Path) -> str:
    endings = (*_FILES, *(ending for spec in specs() for ending in spec.endings))
    return next((ending for ending in endings if path.name.lower().endswith(ending)), "")


def added_format(path: Path) -> FormatSpec | None:
    """Return the format of this file's ending if another package adds it to shardload and can write it, or ``None``."""
    return next((s for s in specs() if s.write_file is not None and path.name.lower().endswith(s.endings)), None)


def is_file_name(path: Path) -> bool:
    """Whether a target of this name is a file (or an index file with shards), not a folder."""
    return path.name.endswith((ENDING, INDEX_ENDING)) or added_format(path) is not None


def shard_bytes_for(path: Path, to: str, wanted: int | str | None) -> int | None:
    """Return ``max_shard_bytes`` as a number of bytes; raise if the target's format has no shards of a limited size."""
    if wanted is None:
        return None
    if added_format(path) is not None:
        raise UsageError(f"Cannot use max_shard_bytes (--max-shard-bytes) for {path.name}: it is one file")
    if to == "orbax" or path.name.endswith(ENDING):
        one_file = f"it is one file. For shards, name it {path.name.removesuffix(ENDING)}{INDEX_ENDING}"
        why = "Orbax has separate files for each tensor" if to == "orbax" else one_file
        raise UsageError(f"Cannot use max_shard_bytes (--max-shard-bytes) for {path.name}: {why}")
    return byte_count("max_shard_bytes", wanted)


CONVERT_HOST_MEMORY = 512 << 20
"""Most bytes of tensors in host memory at once, by default: enough to copy most tensors of a 9B model in one read."""
_COPIES = 4
"""Most copies in memory of a block, the elements that are copied at a time: as read, joined from chunks, cast, and in
the target's order."""
_LEAST_HOST_MEMORY = 256 << 10


def block_bytes_of(host_memory_bytes: int | str) -> int:
    """Return how many bytes to copy at once, so that all copies of them fit ``host_memory_bytes``; raise if none do."""
    found = byte_count("host_memory_bytes", host_memory_bytes)
    if found < _LEAST_HOST_MEMORY:
        raise UsageError(
            f"host_memory_bytes={host_memory_bytes} is too small: give at least {_LEAST_HOST_MEMORY >> 10}KiB"
        )
    return found // _COPIES


def plan_for(source: Source, target: Path, to: str, *, dtype: str | None, shard_bytes: int | None) -> ConversionPlan:
    """Decide what a conversion writes; raise `UnsupportedError` if the format cannot represent this model."""
    if source.model is None:
        return hugging_face_copy.plan_of(source, dtype=dtype, shard_bytes=shard_bytes)
    # Seeds, counters and quantised codes are integers: a dtype for weights does not apply to them.
    wanted = None if dtype is None else np.dtype(dtype)
    dtypes = {
        i: wanted if wanted is not None and is_float(value.dtype) else value.dtype for i, value in source.values.items()
    }
    try:
        if (spec := added_format(target)) is not None:
            return _added(source, dtypes, spec, dtype)
        if to == "orbax":
            return _orbax(source, dtypes, dtype)
        if to == "safetensors":
            plan = _safetensors(source, dtypes, dtype, shard_bytes)
        elif is_file_name(target):
            plan = keras_files.file(source, dtypes, target, dtype, shard_bytes)
        else:
            plan = keras_files.preset(source, dtypes, dtype, shard_bytes)
        return replace(plan, shard_bytes=shard_bytes)
    except NoPlaceError as error:
        raise UnsupportedError(f"{error.why}. {_instead(source, target, error.instead)}") from error


def _instead(source: Source, target: Path, formats: Sequence[str]) -> str:
    """Return advice for a model that a format cannot represent: a name, format or call that can save this source."""
    ways = []
    if "h5" in formats and source.is_hub:
        ways.append("the format preset" if source.is_live else "the format h5")
    if "h5" in formats:
        ways.append(f"the name {target_stem(target)}{ENDING}")
    if "orbax" in formats and not source.is_live:
        ways.append("the format orbax" + (" and the name of a folder" if is_file_name(target) else ""))
    saved = "save a step: shardload.save(model, directory, step=0)" if "orbax" in formats and source.is_live else ""
    if "keras" in formats:
        loaded = "" if source.is_live else "model = shardload.load(source), then "
        saved = f"call {loaded}Keras' model.save_weights(path)"
    chosen = f"choose {' or '.join(ways)}" if ways else ""
    text = ", or ".join(filter(None, (chosen, saved)))
    return text[:1].upper() + text[1:]


# ---- Hugging Face -------------------------------------------------------------------------------


def _safetensors(
    source: Source, dtypes: Mapping[int, Any], dtype: str | None, shard_bytes: int | None
) -> ConversionPlan:
    from shardload.loaders import safetensors

    backbone = source.backbone
    transformers.require_floats(backbone)
    config, manifest, places = _layout(source, dtypes, dtype)
    tensors = transformers.wanted(places, manifest.tensors, dtypes)
    if whole_numbers := [t for t in tensors.values() if not is_float(t.dtype)]:
        raise NoPlaceError(
            f"Cannot write {whole_numbers[0].name!r} for Hugging Face: it is quantised ({whole_numbers[0].dtype}), "
            "expected the model before it was quantised"
        )
    copies = tuple(_copy(source, tensors[p.view.tensor], p) for p in places)
    pairs = transformers.same_in(backbone)
    require_equal(source, pairs)
    # Variables without a tensor are small state (seeds), which goes to keras/state.json; a weight must not be lost.
    placed = {id(p.variable) for p in places} | transformers.derived_from_others(backbone)
    placed |= {id(second) for _, second in pairs}
    state = [v for v in source.variables_of(backbone) if id(v) not in placed]
    if more := [v.path for v in state if transformers.is_weight(v)]:
        raise NoPlaceError(f"Cannot write {more[0]!r} for Hugging Face, which has no tensor for it")

    kind, model_type = type(backbone).__name__, config["model_type"]
    tokenizer, notes = hugging_face_tokenizer(source.companions, source.manifest, backbone=kind, model_type=model_type)

    def make(folder: Path) -> tuple[TensorPlace, ...]:
        folder.mkdir()
        copy_files(source.companions.transformers, folder)
        copy_files(tokenizer, folder)
        # Replaces the source's own config.json, just copied, which may state another dtype.
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        keras_family(source, folder / KERAS, dtype)
        (folder / KERAS / STATE).write_text(json.dumps(state_as_json(source, state)), encoding="utf-8")
        return safetensors.write_skeleton(
            folder, [*tensors.values()], shard_bytes=shard_bytes or safetensors.SHARD_BYTES
        )

    rounded = model_type_of(config).rounded_to
    note = f"KerasHub rounds these tensors to {rounded} when it reads them; they were written unrounded"
    notes += (*_left_out_fields(source, config), *transformers.unlike(config, backbone))
    notes += notes_on_heads(source, config) if source.origin is not manifest else ()
    notes += (
        transformers.lacking(places, backbone)
        if source.origin is not manifest and transformers.is_written(backbone)
        else ()
    )
    # A load of the result may build another class: a task from a backbone, as KerasHub's have output layers.
    wanted, built = type(source.model), kerashub.task_class(manifest) or type(backbone)
    if wanted is not built:
        names = f"config.json names {architecture_of(manifest.config)}, so the folder loads as {built.__name__}"
        notes += (f"{names}; this is a {wanted.__name__}",)
    return ConversionPlan(HUGGING_FACE.name, copies, make, {}, notes=(*notes, note) if rounded else notes)


def _copy(source: Source, wanted: Wanted, place: transformers.FilledElements) -> Copy:
    if place.variable is not None:
        return Copy(wanted, source.values[id(place.variable)], place.view, place.box)
    zeros = np.full(place.view.shape, -0.0, wanted.dtype)
    return Copy(wanted, StoredValue(None, wanted.dtype, array=zeros), place.view)


def _layout(
    source: Source, dtypes: Mapping[int, Any], dtype: str | None
) -> tuple[dict[str, Any], Manifest, tuple[transformers.FilledElements, ...]]:
    """Return what to write for Hugging Face: ``config.json``, the tensors, and which elements each variable fills."""
    # A live model's folder is the template: inverting the views that loading records works for every family whose
    # converter only views. If it fails, a family in `transformers` is described from the backbone alone.
    if source.origin is not None:
        try:
            places = transformers.views_of(source.model, source.origin, leave_out=source.merged)
            return in_dtype(source.origin.config, _most(source, dtypes)), source.origin, places
        except UnsupportedError:
            if not transformers.is_written(source.backbone):
                raise
    # Hugging Face folders get only a backbone's weights.
    if more := head_of(source):
        raise NoPlaceError(
            f"Cannot write {type(source.model).__name__} for Hugging Face: {len(more)} of its weights "
            f"({more[0].path!r}) do not belong to its backbone"
        )
    config = without_head(_transformers_config(source, dtypes, dtype))
    manifest = transformers.stand_in(config)
    return config, manifest, transformers.views_of(source.backbone, manifest, leave_out=source.merged)


def _most(source: Source, dtypes: Mapping[int, Any]) -> str:
    """Return the name of the dtype that most floating-point elements will have; config.json states it."""
    sizes: Counter[str] = Counter()
    for i, value in source.values.items():
        if is_float(dtypes[i]):
            sizes[dtypes[i].name] += math.prod(value.variable.shape)
    if not sizes:
        raise NoPlaceError(
            f"Cannot write {type(source.model).__name__} for Hugging Face: it has no floating-point values"
        )
    return max(sizes, key=sizes.__getitem__)


def _transformers_config(source: Source, dtypes: Mapping[int, Any], dtype: str | None) -> dict[str, Any]:
    """Return config.json as a dict: the source's own if it has one, else one made from the source's backbone."""
    original = source.companions.config(TRANSFORMERS)
    if original is not None and original.get("model_type"):
        wanted = _most(source, dtypes) if source.is_live else dtype  # a live model may have another dtype now
        return original if wanted is None else in_dtype(original, wanted)
    if not source.is_hub:
        raise NoPlaceError(
            f"Cannot write {type(source.model).__name__} for Hugging Face, which has no names for its tensors: it is "
            "not a KerasHub model"
        )
    most = _most(source, dtypes)
    # A GGUF file's configuration is made from its header in Hugging Face's form: enough for the other families.
    if spec_of(source.manifest).is_hugging_face and not transformers.is_written(source.backbone):
        return {**source.manifest.config, "torch_dtype": most}
    known = source.manifest.config if spec_of(source.manifest).is_hugging_face else {}
    return transformers.config_of(source.backbone, most, known=known)


def _left_out_fields(source: Source, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on fields that ``config.json`` lacks, because neither backbone nor source tells their values."""
    if source.origin is not None or source.companions.config(TRANSFORMERS) is not None:
        return ()
    longest = "n_positions" in config
    known = transformers.UNKNOWN + (transformers.UNKNOWN_OF_IMAGES if "vision_config" in config else ())
    missing = [n for n in known if n not in config and not (longest and n == transformers.UNKNOWN[0])]
    lacks = (
        f"config.json lacks {', '.join(missing)}, which the source does not have: transformers uses its own defaults"
    )
    return (f"{lacks}. Add them if you know them",) if missing else ()


# ---- formats of other packages ------------------------------------------------------------------


def _added(source: Source, dtypes: Mapping[int, Any], spec: FormatSpec, dtype: str | None) -> ConversionPlan:
    """Plan a file in a format that another package adds; its tensors have the names that they have in Keras' files."""
    found, notes = keras_files.whole_model(source, dtypes, target=spec.description)
    described = with_dtype(model_config(source.model), dtype)
    write = spec.write_file
    assert write is not None
    return ConversionPlan(spec.name, found.copies, lambda path: write(path, found.tensors, described), {}, notes=notes)


# ---- Orbax --------------------------------------------------------------------------------------


def _orbax(source: Source, dtypes: Mapping[int, Any], dtype: str | None) -> ConversionPlan:
    from shardload.loaders.orbax import saving as orbax

    tree = state_tree_of(source.model).weights_only()
    copies = tuple(whole("/".join(leaf.path), source.values[id(leaf.variable)], dtypes) for leaf in tree.leaves)
    tensors = [c.wanted for c in copies]
    structure = tree.to_json()
    # The tree has the dtypes of the model's variables, and the files may have others.
    for leaf, tensor in zip(structure["leaves"], tensors, strict=True):
        leaf["dtype"] = tensor.dtype.name
    described = json.dumps(with_dtype(model_config(source.model), dtype))
    # What layers saved besides variables goes to ``structure.json``, and notes say what is lost of it.
    notes: tuple[str, ...] = ()
    if not source.is_hub:
        if spec_of(source.manifest).tensor_names == "keras":
            variables = {value.view.tensor for value in source.values.values() if value.view is not None}
            values, notes = file_values_to_json(source.model, source.manifest, variables=variables)
            structure |= values
        else:
            stored = stored_values(source.manifest)
            structure |= {VALUES: source.manifest.metadata["structure"][VALUES]} if stored else {}
            notes = lacking_values(source.model, stored, where="the source")
    # KerasHub's tokenizers are among the files of `keras_family`.
    assets = {} if source.is_hub else read_assets(source.manifest)

    def make(folder: Path) -> tuple[TensorPlace, ...]:
        places = orbax.write_skeleton(folder, tensors, groups=WEIGHT_ITEMS, model_config=described, assets=assets)
        # Orbax wrote this folder as a tiny checkpointable, so plain Orbax reads the step with more files in it too.
        own = folder / "shardload"
        (own / "structure.json").write_text(json.dumps(structure), encoding="utf-8")
        if source.is_hub:
            keras_family(source, own / KERAS, dtype)
        copy_files(source.companions.transformers, own / TRANSFORMERS)
        return places

    return ConversionPlan(ORBAX.name, copies, make, {}, notes=notes)
