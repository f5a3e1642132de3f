"""Make a built model compute what its checkpoint describes, or refuse the checkpoint.

A Hugging Face configuration contains more than KerasHub's converters read. A field that a converter drops may change
what a model computes, although every tensor fits. So each load takes three steps::

    before the build   `quantised.check`   refuses tensors that are not plain weights
    during the build   `arguments`         gives the constructor settings that KerasHub's converter does not pass
    after the build    `reconcile`         sets other settings on layers; refuses the rest, unless the user ignores them
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from shardload.errors import UnsupportedError, UsageError
from shardload.families.parts import rope
from shardload.families.parts.checks import Checks, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.registry import model_type_of
from shardload.hub import built, fields, kerashub, quantised
from shardload.hub.config_forms import config_beside
from shardload.hub.fields import text_of
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.layer_settings import (
    ATTRIBUTES_ENTRY,
    apply_attributes,
    differing_attributes,
    lost_arguments,
)
from shardload.keras_bridge.model_records import record_of
from shardload.loaders import spec_of
from shardload.loaders.quantised.parts import FIELD
from shardload.manifest import Manifest
from shardload.stores.json_files import read_optional
from shardload.stores.location import Location


def checked_fields(ignore: Sequence[str]) -> tuple[str, ...]:
    """Return ``ignore`` as a tuple; raise if it names a field that is never checked, such as a misspelt one."""
    is_list = isinstance(ignore, Iterable) and not isinstance(ignore, str)
    names: tuple[Any, ...] = tuple(ignore) if is_list else (ignore,)  # first, because a generator can be read only once
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"Cannot use ignore_config={ignore!r:.60}: expected a list of fields: ['rope_scaling']")
    known = sorted({*fields.known_fields(), FIELD, quantised.ADAPTER})
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"Cannot ignore {unknown[0]!r}: it is not a checked field. Those are {', '.join(known)}")
    return names


def arguments(manifest: Manifest, backbone_cls: type) -> dict[str, Any]:
    """Return the arguments of a KerasHub backbone that a configuration sets, but KerasHub's converter does not pass."""
    found = _configured_arguments(manifest.config, kerashub.parameters(backbone_cls))
    return found | _pooling_arguments(manifest)


def reconcile(model: Any, manifest: Manifest, *, ignore: Sequence[str] = ()) -> None:
    """Make a new model's layers compute what its source describes, or raise; fields in ``ignore`` may differ."""
    backbone = backbone_of(model)
    record = record_of(backbone)
    if not spec_of(manifest).is_hugging_face:
        record.built_from, record.build_notes = manifest.source, _normalise_queries_as_configured(backbone)
        apply_attributes(_described_part(model, manifest), _saved_attributes(manifest))
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
    notes += [*fields.untied(manifest.config, backbone), *fields.limits(manifest.config)]
    if _is_embedder(manifest) and (why := _other_form(manifest.location)) is not None:
        notes.append(f"Built without pooled_output, because {why}; sequence_output equals the source's")
    notes += [
        f"{name}: {value}, which {type(backbone).__name__} does not serialise. {_kept_by_ours(default)}"
        for name, (value, default) in lost_arguments(backbone).items()
    ]
    record.built_from, record.build_notes = manifest.source, tuple(notes)


def _kept_by_ours(usual: Any) -> str:
    return (
        "Presets, steps and files that shardload writes store it; save_to_preset() and save() of Keras do not: what "
        f"they write has {usual} again"
    )


def notes_of(model: Any, manifest: Manifest) -> tuple[str, ...]:
    """Return notes on what `reconcile` changed or ignored; for a user's own model, on what differs from the source."""
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


def _saved_attributes(manifest: Manifest) -> Any:
    is_beside = spec_of(manifest).described_by == "keras-sidecar"
    return ((config_beside(manifest) if is_beside else manifest.config) or {}).get(ATTRIBUTES_ENTRY, {})


def _described_part(model: Any, manifest: Manifest) -> Any:
    """Return the part of a model that its source's ``config.json`` describes: a preset's backbone, else all of it."""
    return backbone_of(model) if spec_of(manifest).described_by == "keras-hub" else model


def _attribute_notes(model: Any, manifest: Manifest) -> tuple[str, ...]:
    """Return a note that names the attributes of layers in which a model differs from the saved one, if it does."""
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
    """Set ``query_head_dim_normalize`` on attention layers, as KerasHub's Gemma does not; return a note if needed."""
    # The block passes a constant True to its attention instead of the backbone's argument.
    if getattr(backbone, "query_head_dim_normalize", True):
        return ()
    found = [built.attention_of(block, "query_head_dim_normalize") for block in built.transformer_layers_of(backbone)]
    wrong = [layer for layer in found if layer is not None and layer.query_head_dim_normalize]
    for layer in wrong:
        layer.query_head_dim_normalize = False
    return ("query_head_dim_normalize: set on the layers, because KerasHub does not pass it on",) if wrong else ()


def _configured_arguments(config: Config, parameters: Collection[str]) -> dict[str, Any]:
    """Return the arguments that a configuration sets, of those that a constructor takes (``parameters``)."""
    # Passed when the model is built, a setting is part of what Keras saves; set on layers later, it would be lost.
    checks, text = model_type_of(config).checks, text_of(config)
    if checks is None:
        return {}
    found: dict[str, Any] = {}
    if checks.epsilon is not None and (epsilon := text.get(checks.epsilon[0])) is not None:
        found |= dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps"), epsilon)
    if checks.rotary is not None:
        rotation = rope.rotation(text, rope.FULL, checks.rotary, head_dim=None)
        found |= _rotary_arguments(rotation, stretched=checks.rotary.stretched)
    if checks.windows is not None:
        found |= _window_arguments(text, checks)
    if checks.caps is not None and not checks.caps.has_scores:
        found["attention_logit_soft_cap"] = None  # the class applies it, transformers does not
    found |= {name: text[field] for field, name in checks.arguments.items() if text.get(field) is not None}
    # Classes name the same setting differently, so each spelling is offered.
    return {name: value for name, value in found.items() if name in parameters}


def _rotary_arguments(rotation: rope.Rotation, *, stretched: str) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("rope_max_wavelength", "rope_theta"), rotation.theta)
    if rotation.kind == "llama3":
        found |= {
            "rope_frequency_adjustment_factor": rotation.parameters["factor"],
            "rope_low_freq_factor": rotation.parameters["low_freq_factor"],
            "rope_high_freq_factor": rotation.parameters["high_freq_factor"],
            "rope_pretraining_sequence_length": rotation.parameters["original_max_position_embeddings"],
        }
    if rotation.kind == stretched:
        names = ("rope_scaling_factor", "rope_position_scaling_factor", "global_rope_scaling_factor")
        found |= dict.fromkeys(names, rotation.parameters["factor"])
    return found


def _window_arguments(config: Config, checks: Checks) -> dict[str, Any]:
    """Return constructor arguments for the size of sliding windows; which layers have one is checked later."""
    assert checks.windows is not None
    windows = checks.windows(config, int(config["num_hidden_layers"]))
    sizes = {size for size in windows if size}
    if len(sizes) > 1:  # the constructors take one size; `fields` refuses the model
        return {}
    size = next(iter(sizes), None)
    if size is None:
        no_size = {"sliding_window_size": None} if checks.has_unsized_windows else {}
        return {"use_sliding_window_attention": False, "sliding_window": None, **no_size}
    return {"use_sliding_window_attention": True, "sliding_window_size": size, "sliding_window": size}


# ---- the layers after EmbeddingGemma's last one ---------------------------------------------------
#
# sentence-transformers stores them in separate folders. KerasHub's class supports one form of pooling, projection and
# normalisation. A folder in another form, or with none, is built without these layers, and the report says so; its
# hidden states still equal those of the source.
#
#     modules.json   Transformer ─► Pooling (mean) ─► Dense ─► Dense (no bias, no activation) ─► Normalize
#                                   1_Pooling         2_Dense  3_Dense

_POOLING_FORM = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
# KerasHub's converter reads these folders, whatever modules.json says.
_POOLING_PATHS = ["", "1_Pooling", "2_Dense", "3_Dense"]
_DENSE = _POOLING_PATHS[2:]
_WITHOUT_POOLING = {"is_embedding_model": False, "pooling_intermediate_dim": None, "embedding_dim": None}


def _pooling_arguments(manifest: Manifest) -> dict[str, Any]:
    """Return constructor arguments for the pooling layers after an EmbeddingGemma; empty for all other models."""
    if not _is_embedder(manifest):
        return {}
    if _other_form(manifest.location) is not None:
        return _WITHOUT_POOLING
    widths = [_module_config(manifest.location / part).get("out_features") for part in _DENSE]
    names = ("pooling_intermediate_dim", "embedding_dim")
    return {name: width for name, width in zip(names, widths, strict=True) if width is not None}


def _is_embedder(manifest: Manifest) -> bool:
    field = model_type_of(manifest.config).pools_if
    return field is not None and bool(manifest.config.get(field))


def _other_form(folder: Location) -> str | None:
    """Return why KerasHub cannot build the pooling layers that a folder describes; ``None`` if it can."""
    listed = read_optional(folder / "modules.json")
    listed = listed if isinstance(listed, list) else []
    if not listed and not any((folder / part).is_folder() for part in _DENSE):
        return "the folder has neither modules.json nor 2_Dense and 3_Dense"
    modules = [str(one.get("type")).rpartition(".")[2] for one in listed if isinstance(one, Mapping)]
    if modules and modules != _POOLING_FORM:
        return f"modules.json lists {' → '.join(modules)}, and KerasHub supports only {' → '.join(_POOLING_FORM)}"
    paths = [str(one.get("path")) for one in listed if isinstance(one, Mapping)][: len(_POOLING_PATHS)]
    if paths and paths != _POOLING_PATHS:
        read = ", ".join(_POOLING_PATHS[1:])
        return f"modules.json lists {', '.join(paths[1:])}, and KerasHub's converter reads {read} in this order"
    # How a text's tokens are pooled, in the form of sentence-transformers 6 or of older versions.
    config = _module_config(folder / "1_Pooling")
    modes = config.get("pooling_mode") or [
        key.removeprefix("pooling_mode_").removesuffix("_tokens")
        for key, value in config.items()
        if "pooling_mode_" in key and value
    ]
    pooled = [str(one) for one in (modes if isinstance(modes, list) else [modes])] or ["mean"]
    if pooled != ["mean"]:
        return f"1_Pooling/config.json sets {', '.join(pooled)}, and KerasHub supports only mean"
    return next((why for part in _DENSE if (why := _active(part, _module_config(folder / part)))), None)


def _active(part: str, config: Mapping[str, Any]) -> str | None:
    activation = str(config.get("activation_function", "Identity"))
    if config.get("bias"):
        return f"{part}/config.json sets bias, and KerasHub has none"
    if not activation.endswith("Identity"):
        return f"{part}/config.json sets {activation}, and KerasHub has no activation"
    return None


def _module_config(folder: Location) -> Mapping[str, Any]:
    found = read_optional(folder / "config.json")
    return found if isinstance(found, dict) else {}


__all__ = ["arguments", "checked_fields", "notes_of", "reconcile"]
