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
import weakref
from collections.abc import Sequence
from typing import Any

from shardload.errors import UnsupportedError, UsageError
from shardload.hub import arguments as constructing
from shardload.hub import built, families, fields, pooling, quantised
from shardload.loaders import spec_of
from shardload.manifest import Manifest

_notes: weakref.WeakKeyDictionary[Any, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def check_names(ignore: Sequence[str]) -> tuple[str, ...]:
    """Check the names of fields to ignore.

    Raises:
        UsageError: When a field is never checked: a misspelt name must not count as consent.
    """
    names = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    known = sorted({*families.KNOWN, quantised.FIELD, quantised.ADAPTER})
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"Cannot ignore {unknown[0]!r}: it is not a field that is checked. Those are {', '.join(known)}"
        )
    return names


def arguments(manifest: Manifest, backbone_cls: type) -> dict[str, Any]:
    """Return constructor arguments for a KerasHub backbone beyond those that KerasHub's converter passes.

    Raises:
        SourceError: When the configuration contradicts itself.
    """
    found = constructing.arguments(manifest.config, inspect.signature(backbone_cls).parameters)
    return found | pooling.arguments(manifest)


def settle(model: Any, manifest: Manifest, *, ignore: Sequence[str] = ()) -> None:
    """Make a newly built model compute what its source describes, or refuse it; `notes_of` lists the changes.

    Args:
        model: A KerasHub task or backbone, abstract or not.
        manifest: The checkpoint it was built from.
        ignore: Fields in which it may differ.

    Raises:
        UnsupportedError: When it differs in a field that is not in ``ignore``; the message says how to ignore it.
        SourceError: When the configuration contradicts itself.
    """
    backbone = getattr(model, "backbone", model)
    if not spec_of(manifest).is_hugging_face:
        _notes[backbone] = manifest.source, _keep_promise(backbone)
        return
    told = []
    rest = list(fields.differences(manifest.config, backbone))
    for found in rest:
        if found.mend is not None and not set(found.names) & set(ignore):
            found.mend()
            told.append(
                f"{found.field}: set to {found.says} on the layers, as {type(backbone).__name__} does not pass it on; "
                f"saved and loaded again by Keras, the model has {found.has}"
            )
    if told:
        rest = list(fields.differences(manifest.config, backbone))
    if refused := [d for d in rest if not set(d.names) & set(ignore)]:
        raise UnsupportedError(_refusal(manifest, backbone, refused))
    told += [f"{d.field} ignored: the source says {d.says}, the model has {d.has}" for d in rest]
    _notes[backbone] = (
        manifest.source,
        (*told, *fields.untied(manifest.config, backbone), *fields.limits(manifest.config), *pooling.notes(manifest)),
    )


def notes_of(model: Any, manifest: Manifest) -> tuple[str, ...]:
    """Describe what `settle` changed on a model or ignored; for a model built otherwise, describe its differences."""
    backbone = getattr(model, "backbone", model)
    source, told = _notes.get(backbone, (None, ()))
    if source == manifest.source:
        return told
    if not spec_of(manifest).is_hugging_face or not type(backbone).__module__.startswith("keras_hub."):
        return ()
    found = fields.differences(manifest.config, backbone)
    return tuple(f"{d.field}: the source says {d.says}, the model has {d.has}" for d in found)


def _refusal(manifest: Manifest, backbone: Any, refused: list[fields.FieldDifference]) -> str:
    each = "; ".join(f"{d.field} says {d.says}, the model has {d.has}" for d in refused)
    names = ", ".join(repr(name) for name in dict.fromkeys(d.field for d in refused))
    flags = " ".join(f"--ignore-config {name}" for name in dict.fromkeys(d.field for d in refused))
    return (
        f"Cannot load {manifest.source}: KerasHub's {type(backbone).__name__} does not compute what its configuration "
        f"says, and results would differ: {each}. To load it all the same, pass ignore_config=({names},) ({flags})"
    )


def _keep_promise(backbone: Any) -> tuple[str, ...]:
    """Set ``query_head_dim_normalize`` on the attention layers, to which KerasHub's Gemma does not pass it."""
    if getattr(backbone, "query_head_dim_normalize", True):
        return ()
    found = [built.attention_of(block, "query_head_dim_normalize") for block in built.blocks(backbone)]
    other = [layer for layer in found if layer is not None and layer.query_head_dim_normalize]
    for layer in other:
        layer.query_head_dim_normalize = False
    return ("query_head_dim_normalize: set on the layers, to which KerasHub does not pass it",) if other else ()


__all__ = ["arguments", "check_names", "notes_of", "settle"]
