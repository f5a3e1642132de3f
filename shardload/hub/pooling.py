"""The layers after EmbeddingGemma's last one, which sentence-transformers stores in separate folders.

KerasHub's class supports one form of pooling, projection and normalisation. A folder in another form, or with none, is
built without these layers, and the report says so; its hidden states still equal those of the source.

    modules.json   Transformer ─► Pooling (mean) ─► Dense ─► Dense (no bias, no activation) ─► Normalize
                                  1_Pooling         2_Dense  3_Dense
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardload.families.registry import model_type_of
from shardload.manifest import Manifest
from shardload.stores.json_files import read_optional
from shardload.stores.location import Location

_FORM = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
# KerasHub's converter reads these folders, whatever modules.json says.
_PATHS = ["", "1_Pooling", "2_Dense", "3_Dense"]
_DENSE = _PATHS[2:]
_WITHOUT = {"is_embedding_model": False, "pooling_intermediate_dim": None, "embedding_dim": None}


def arguments(manifest: Manifest) -> dict[str, Any]:
    """Return the arguments of KerasHub's class for a folder's pooling; empty for a model without pooling."""
    if not _is_embedder(manifest):
        return {}
    if _other_form(manifest.location) is not None:
        return _WITHOUT
    widths = [_config(manifest.location / part).get("out_features") for part in _DENSE]
    names = ("pooling_intermediate_dim", "embedding_dim")
    return {name: width for name, width in zip(names, widths, strict=True) if width is not None}


def notes(manifest: Manifest) -> tuple[str, ...]:
    """Explain why an embedding model was built without its pooling layers."""
    why = _other_form(manifest.location) if _is_embedder(manifest) else None
    if why is None:
        return ()
    return (f"Built without pooled_output, because {why}; sequence_output equals the source's",)


def _is_embedder(manifest: Manifest) -> bool:
    field = model_type_of(manifest.config).pools_if
    return field is not None and bool(manifest.config.get(field))


def _other_form(folder: Location) -> str | None:
    """Describe what in the folder KerasHub's class does not support; ``None`` if it supports everything."""
    listed = read_optional(folder / "modules.json")
    listed = listed if isinstance(listed, list) else []
    if not listed and not any((folder / part).is_folder() for part in _DENSE):
        return "the folder has neither modules.json nor 2_Dense and 3_Dense"
    modules = [str(one.get("type")).rpartition(".")[2] for one in listed if isinstance(one, Mapping)]
    if modules and modules != _FORM:
        return f"modules.json lists {' → '.join(modules)}, and KerasHub supports only {' → '.join(_FORM)}"
    paths = [str(one.get("path")) for one in listed if isinstance(one, Mapping)][: len(_PATHS)]
    if paths and paths != _PATHS:
        read = ", ".join(_PATHS[1:])
        return f"modules.json lists {', '.join(paths[1:])}, and KerasHub's converter reads {read} in this order"
    if (pooled := _pooling(_config(folder / "1_Pooling"))) != ["mean"]:
        return f"1_Pooling/config.json sets {', '.join(pooled)}, and KerasHub supports only mean"
    return next((why for part in _DENSE if (why := _active(part, _config(folder / part)))), None)


def _pooling(config: Mapping[str, Any]) -> list[str]:
    """Return how a text's tokens are pooled, from the form of sentence-transformers 6 or older versions."""
    if modes := config.get("pooling_mode"):
        return [str(one) for one in (modes if isinstance(modes, list) else [modes])]
    found = [key.removeprefix("pooling_mode_") for key, value in config.items() if "pooling_mode_" in key and value]
    return [key.removesuffix("_tokens") for key in found] or ["mean"]


def _active(part: str, config: Mapping[str, Any]) -> str | None:
    activation = str(config.get("activation_function", "Identity"))
    if config.get("bias"):
        return f"{part}/config.json sets bias, and KerasHub has none"
    if not activation.endswith("Identity"):
        return f"{part}/config.json sets {activation}, and KerasHub has no activation"
    return None


def _config(folder: Location) -> Mapping[str, Any]:
    found = read_optional(folder / "config.json")
    return found if isinstance(found, dict) else {}


__all__ = ["arguments", "notes"]
