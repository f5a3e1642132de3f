"""Build the models that whole-model files of Keras 2 describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.hub.build_errors import not_compiled, refuse_code
from shardload.loaders.keras_legacy import TRAINING, UNREADABLE
from shardload.manifest import Manifest


def has_config(manifest: Manifest) -> bool:
    """Whether a file of Keras 2 describes its model.

    Raises:
        UnsupportedError: When it does, but the description cannot be read.
    """
    if (why := manifest.metadata.get(UNREADABLE)) is not None:
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: its configuration cannot be read ({why}). Build the model "
            "yourself, then call shardload.load_weights(model, source)"
        )
    return bool(manifest.config)


def build_legacy(
    manifest: Manifest,
    dtype: Any,
    custom_objects: Mapping[str, Any] | None,
    safe_mode: bool,
    compiling: Callable[[str], None] | None,
) -> Any:
    """Build the model, as `shardload.hub.kerashub.build_model` does.

    Args:
        manifest: Of a file with a description.
        dtype: As for `build_model`.
        custom_objects: As for `build_model`.
        safe_mode: As for `build_model`.
        compiling: Called with the reason if the model was saved compiled but is not; ``None``: do not compile it.
    """
    from shardload.keras_bridge import legacy as legacy_models

    scope: dict[str, Any] = {"custom_objects": custom_objects, "safe_mode": safe_mode}
    model = legacy_models.build(manifest.config, dtype=dtype, **scope)
    if compiling is None or not (described := manifest.metadata.get(TRAINING)):
        return model
    try:
        legacy_models.compile_as_described(model, described, **scope)
    except Exception as error:  # of any kind: this builds custom losses, metrics and optimizers
        refuse_code(error, manifest)
        compiling(not_compiled(manifest, error, has_defaults=False))
        return legacy_models.build(manifest.config, dtype=dtype, **scope)
    return model
