"""Compare the model that a checkpoint describes with the model that was built.

A Hugging Face configuration contains more than KerasHub's converters read. A dropped field changes the numbers that a
model computes, and nothing else shows it: every tensor fits. These modules check it::

    before the build     quantised   are the tensors weights, or quantisation codes and adapters?
    during the build     arguments   what does the constructor take that KerasHub's converter does not pass?
                         pooling     what follows the last layer of a model for embeddings?
    after the build      fields      what does the model lack?    set on layers, else refused, else ignored

``families`` and ``rope`` interpret the configuration, ``built`` inspects the model's layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from shardload.errors import UnsupportedError, UsageError
from shardload.families.parts.checks import FieldDifference
from shardload.hub import arguments as constructing
from shardload.hub import built, fields, pooling, quantised
from shardload.hub.sidecar import config_beside
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_records import record_of
from shardload.loaders import spec_of
from shardload.manifest import Manifest


def check_names(ignore: Sequence[str]) -> tuple[str, ...]:
    """Check the names of fields to ignore.

    Raises:
        UsageError: When a field is never checked: a misspelt name must not count as consent.
    """
    is_list = isinstance(ignore, Iterable) and not isinstance(ignore, str)
    names: tuple[Any, ...] = tuple(ignore) if is_list else (ignore,)  # first, because a generator can be read only once
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"Cannot use ignore_config={ignore!r:.60}: expected a list of fields: ['rope_scaling']")
    known = sorted({*fields.known_fields(), quantised.FIELD, quantised.ADAPTER})
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"Cannot ignore {unknown[0]!r}: it is not a checked field. Those are {', '.join(known)}")
    return names


def arguments(manifest: Manifest, backbone_cls: type) -> dict[str, Any]:
    """Return constructor arguments for a KerasHub backbone beyond those that KerasHub's converter passes.

    Raises:
        SourceError: When the configuration contradicts itself.
    """
    found = constructing.arguments(manifest.config, inspect.signature(backbone_cls).parameters)
    return found | pooling.arguments(manifest)


def reconcile(model: Any, manifest: Manifest, *, ignore: Sequence[str] = ()) -> None:
    """Make a newly built model compute what its source describes, or refuse it; `notes_of` lists the changes.

    Args:
        model: A KerasHub task or backbone, abstract or not.
        manifest: The checkpoint it was built from.
        ignore: Fields in which it may differ.

    Raises:
        UnsupportedError: When it differs in a field that is not in ``ignore``; the message says how to ignore it.
        SourceError: When the configuration contradicts itself.
    """
    backbone = backbone_of(model)
    record = record_of(backbone)
    if not spec_of(manifest).is_hugging_face:
        record.built_from, record.build_notes = manifest.source, _normalise_queries_as_configured(backbone)
        _apply_attributes(model, manifest)
        return
    notes = []
    rest = list(fields.differences(manifest.config, backbone))
    # Files that Keras writes lack what is set on layers, so `fields` offers a fix in few cases, and the note says it.
    for found in rest:
        if found.fix is not None and not set(found.names) & set(ignore):
            found.fix()
            notes.append(
                f"{found.field}: set to {found.configured} on the layers, because {type(backbone).__name__} does not "
                f"pass it on. {_kept_by_ours(found.actual)}"
            )
    if notes:  # a fix may not have worked, so compare again
        rest = list(fields.differences(manifest.config, backbone))
    if refused := [d for d in rest if not set(d.names) & set(ignore)]:
        raise UnsupportedError(_refusal(manifest, backbone, refused))
    notes += [f"{d.field} ignored: {d}" for d in rest]
    notes += [*fields.untied(manifest.config, backbone), *fields.limits(manifest.config), *pooling.notes(manifest)]
    notes += _lost_arguments(backbone)
    record.built_from, record.build_notes = manifest.source, tuple(notes)


def _lost_arguments(backbone: Any) -> list[str]:
    from shardload.keras_bridge.set_attributes import lost_arguments  # imports Keras

    return [
        f"{name}: {value}, which {type(backbone).__name__} does not serialise. {_kept_by_ours(default)}"
        for name, (value, default) in lost_arguments(backbone).items()
    ]


def _kept_by_ours(usual: Any) -> str:
    return (
        "Presets, steps and files that shardload writes store it; save_to_preset() and save() of Keras do not: what "
        f"they write has {usual} again"
    )


def notes_of(model: Any, manifest: Manifest) -> tuple[str, ...]:
    """Describe what `reconcile` changed on a model or ignored; for a model built otherwise, its differences."""
    backbone = backbone_of(model)
    record = record_of(backbone)
    if record.built_from == manifest.source:
        of_attributes = () if spec_of(manifest).is_hugging_face else _attribute_notes(model, manifest)
        return (*record.build_notes, *of_attributes)
    if not spec_of(manifest).is_hugging_face:
        return _attribute_notes(model, manifest)
    if not type(backbone).__module__.startswith("keras_hub."):
        return ()
    return tuple(f"{d.field}: {d}" for d in fields.differences(manifest.config, backbone))


def _apply_attributes(model: Any, manifest: Manifest) -> None:
    """Set on layers what was set on those of the saved model."""
    from shardload.keras_bridge.set_attributes import apply_attributes  # imports Keras

    apply_attributes(_described_part(model, manifest), _saved_attributes(manifest))


def _saved_attributes(manifest: Manifest) -> Any:
    from shardload.keras_bridge.set_attributes import ENTRY  # imports Keras

    is_beside = spec_of(manifest).described_by == "keras-sidecar"
    return ((config_beside(manifest) if is_beside else manifest.config) or {}).get(ENTRY, {})


def _described_part(model: Any, manifest: Manifest) -> Any:
    """Return the part of a model that the source's configuration describes, which is the backbone in a preset."""
    return backbone_of(model) if spec_of(manifest).described_by == "keras-hub" else model


def _attribute_notes(model: Any, manifest: Manifest) -> tuple[str, ...]:
    """Say which attributes of a model's layers differ from what the source stores for them."""
    from shardload.keras_bridge.set_attributes import differing_attributes  # imports Keras

    if not (names := differing_attributes(_described_part(model, manifest), _saved_attributes(manifest))):
        return ()
    return (
        f"layers of this model have another {', '.join(names)} than the saved model, so its results differ; "
        "shardload.load(source) gives the saved one",
    )


def _refusal(manifest: Manifest, backbone: Any, refused: list[FieldDifference]) -> str:
    each = "; ".join(f"{d.field} is {d}" for d in refused)
    names = list(dict.fromkeys(d.field for d in refused))
    flags = " ".join(f"--ignore-config {name}" for name in names)
    return (
        f"Cannot load {manifest.source}: results would differ, because KerasHub's {type(backbone).__name__} does not "
        f"match the configuration: {each}. To load it anyway, pass ignore_config=({', '.join(map(repr, names))},) "
        f"({flags})"
    )


def _normalise_queries_as_configured(backbone: Any) -> tuple[str, ...]:
    """Set ``query_head_dim_normalize`` on the attention layers, to which KerasHub's Gemma does not pass it."""
    # The block passes a constant True to its attention instead of the backbone's argument.
    if getattr(backbone, "query_head_dim_normalize", True):
        return ()
    found = [built.attention_of(block, "query_head_dim_normalize") for block in built.blocks(backbone)]
    wrong = [layer for layer in found if layer is not None and layer.query_head_dim_normalize]
    for layer in wrong:
        layer.query_head_dim_normalize = False
    return ("query_head_dim_normalize: set on the layers, because KerasHub does not pass it on",) if wrong else ()


__all__ = ["arguments", "check_names", "notes_of", "reconcile"]
