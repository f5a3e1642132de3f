"""A live model as the source of a conversion: its values are on devices, and the files around them are made from it.

model ─► value of every variable: an array on devices; of a kernel with LoRA, the merged one
      ─► KerasHub's configuration, and tokenizer files: of its preprocessor, else of the source it was loaded from
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardload.converting import live_values, preprocessing, transformers
from shardload.converting.adapters import merge_note
from shardload.converting.computing import StoredValue
from shardload.converting.preprocessing import Preprocessing, preprocessing_of
from shardload.converting.sidecar_files import Companions, companions_of
from shardload.converting.source import SHOWN, Source
from shardload.errors import ShardloadError, UninitialisedError
from shardload.hub import kerashub
from shardload.hub.preprocessors import text_classes
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.lora import LoraKernel
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.variables import has_value, stored_dtype, unique, value_of
from shardload.loaders import spec_of
from shardload.loaders.hub_preset import CONFIG, METADATA, TASK, describe_folder
from shardload.loaders.hub_preset import SPEC as PRESET
from shardload.manifest import Manifest
from shardload.stores.local import located
from shardload.units import plural

_DESCRIPTIONS = (CONFIG, TASK, METADATA)


def live_source(model: Any, kernels: Sequence[LoraKernel], folder: Path, *, files: bool) -> Source:
    """Return a model as a source. Its layers with LoRA must be hidden (`keras_bridge.lora.hidden`) while it is used.

    Args:
        model: A built Keras model.
        kernels: The kernels with factors of LoRA to be merged: all that the model has.
        folder: An empty folder for KerasHub's files of the model, needed as long as the source.
        files: Whether the target has them.

    Raises:
        UninitialisedError: When a variable has no value.
    """
    merged = {id(found.kernel): found for found in kernels}
    factors = frozenset(id(v) for found in kernels for v in (found.a, found.b))
    values = {id(v): _value(v, merged.get(id(v))) for v in unique(model.variables) if id(v) not in factors}
    found = Source(
        Manifest(located(folder), PRESET.name, {}, {}),
        model,
        values,
        Companions(),
        Preprocessing(),
        (merge_note(kernels),) if kernels else (),
        is_live=True,
        merged=factors,
    )
    return _with_files(found, folder) if files and found.is_hub else found


def _value(variable: Any, kernel: LoraKernel | None) -> StoredValue:
    if not has_value(variable):
        raise UninitialisedError(
            f"Cannot save variable {variable.path!r}: it has no value. Load a checkpoint into the model, or call "
            "shardload.initialise(model), first; in a callback of fit, save self.model, not a part of it"
        )
    if value_of(variable).is_deleted():
        raise UninitialisedError(
            f"Cannot save variable {variable.path!r}: its array was donated to a computation. Assign the current "
            "values to the model's variables first"
        )
    dtype = stored_dtype(variable)
    if kernel is not None:
        return StoredValue(variable, dtype, live=kernel.merged)
    # Small state goes to JSON files, which are made from arrays on the host.
    if transformers.is_weight(variable) or not _is_readable(value_of(variable)):
        return StoredValue(variable, dtype, live=partial(value_of, variable))
    return StoredValue(variable, dtype, array=live_values.host_value(value_of(variable)))


def _is_readable(array: Any) -> bool:
    """Whether this process has all of an array."""
    return bool(array.is_fully_addressable or array.is_fully_replicated)


def _with_files(source: Source, folder: Path) -> Source:
    """Write KerasHub's files, and find the tokenizer's."""
    # `origin` is the source that the model was loaded from, if it still describes the model.
    model, loaded = source.model, record_of(source.model).text_source
    kept, notes = Companions(), list(source.notes)
    origin = loaded if loaded is not None and _describes(loaded, source.backbone) else None
    layer = Preprocessing(getattr(model, "preprocessor", None))
    if loaded is not None and Path(loaded.source).exists() and (origin is not None or layer.layer is None):
        kept = companions_of(loaded)
        layer = preprocessing_of(model, loaded, kept)
        notes += [*kept.notes, *layer.notes]
    if origin is not None and kept.transformers:
        notes.append(f"{', '.join(_shown(kept.transformers))} for Hugging Face come from {origin.source}")
    elif layer.layer is None and not kept.transformers and text_classes(model)[1] is not None:
        notes.append("no tokenizer was written: the model has no preprocessor, and was not loaded with a tokenizer")
    # KerasHub's files are made from the model; of those from its source, all but old descriptions are kept.
    preprocessing.write(model, layer, folder)
    made = companions_of(source.manifest).keras
    others = {name: found for name, found in kept.transformers.items() if origin is not None or name != CONFIG}
    keras = {name: path for name, path in kept.keras.items() if name not in _DESCRIPTIONS}
    with abstraction.abstract():
        fresh = kerashub.build_model(describe_folder(located(folder))) if TASK in made else None
    return replace(
        source,
        companions=Companions({**keras, **made}, others),
        preprocessing=layer,
        notes=tuple(notes),
        origin=origin,
        fresh=fresh,
    )


def _shown(names: Iterable[str]) -> list[str]:
    """Return a few file names, the configuration first."""
    found = sorted(names, key=lambda name: (name != CONFIG, name))
    return found if len(found) < SHOWN else [*found[: SHOWN - 1], f"{plural(len(found) - SHOWN + 1, 'other file')}"]


def _describes(loaded: Manifest, backbone: Any) -> bool:
    """Whether KerasHub builds this backbone from the configuration of a Hugging Face folder."""
    # The tensors of a quantised folder are codes, and no template. A part's configuration may say so too.
    has_folder = spec_of(loaded).tokenizer == "hugging-face"  # a GGUF file has its tokenizer in the header
    if not has_folder or "quantization_config" in str(loaded.config):
        return False
    try:
        with abstraction.abstract():
            again = kerashub.build_model(loaded, task=False)
    except ShardloadError:  # loaded with ignore_config, or into a model of the user's
        return False
    return type(again) is type(backbone) and transformers.differing(backbone, again) is None
