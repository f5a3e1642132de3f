"""Errors for configurations that no model can be built from, and what to do about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from shardload.errors import (
    LimitError,
    MissingExtraError,
    SourceError,
    UninitialisedError,
    UnsupportedError,
    import_failure,
)
from shardload.hub.tensors import MAX_LAYERS
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.units import plural

_LAYER_KEYS = (
    *("num_layers", "num_hidden_layers", "n_layer", "n_layers", "depths"),
    *("num_encoder_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
)
_PARTS = ("config", "text_config", "vision_config", "audio_config", "encoder", "decoder")
SHOWN = 1000
"""Characters kept of an error's first paragraph, which may quote the whole value that caused it."""

_CODE = "Requested the deserialization of a"
"""Start of Keras' refusal of Python code (a lambda); a configuration cannot insert text here."""
_INNER = "Exception encountered: "
"""Text before the cause, at the end of Keras' message that something "could not be deserialized properly"."""


def check_layer_count(manifest: Manifest) -> None:
    """Refuse a configuration with more layers than the checkpoint has tensors: building it would never end.

    Raises:
        SourceError: When there are more layers than tensors, or than `MAX_LAYERS` if there are no files with tensors.
    """
    # A layer has at least one tensor, so a larger number is damage or an attack. Without files, use a fixed limit.
    n_tensors = len(manifest.tensors) if manifest.files else MAX_LAYERS
    found = f"it has only {plural(n_tensors, 'tensor')}" if manifest.files else f"expected at most {MAX_LAYERS}"
    parts = [manifest.config.get(key) for key in _PARTS]
    for config in (manifest.config, *(part for part in parts if isinstance(part, Mapping))):
        for key in _LAYER_KEYS:
            value = config.get(key)
            # Constructors convert floats and texts with int(). "not <=" instead of ">" also refuses NaN.
            if any(
                not _number(layers) <= max(n_tensors, 1) for layers in (value if isinstance(value, list) else [value])
            ):
                raise SourceError(
                    f"Cannot build the model of {manifest.source}: its configuration sets {key}={_shortened(value)}, "
                    f"but {found}. Correct the configuration"
                )


def _number(value: Any) -> float:
    """Return a number of layers as `int` reads it; 0 if it cannot: then the build fails at once anyway."""
    try:
        return value if isinstance(value, (int, float)) else int(value)
    except (TypeError, ValueError):
        return 0


def _shortened(value: Any) -> str:
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}…"


@contextlib.contextmanager
def describe_failure(manifest: Manifest) -> Iterator[None]:
    """Translate errors that a configuration causes in constructors into errors that name the checkpoint.

    Raises:
        MissingExtraError: When it needs a package that cannot be imported.
        LimitError: When a limit of this process was reached.
        UnsupportedError: When a constructor fails; the message says what to do.
        SourceError: When the configuration lacks an entry.
    """
    try:
        yield
    # These name the checkpoint already.
    except (UnsupportedError, SourceError, MissingExtraError, LimitError):
        raise
    except KeyError as error:
        raise SourceError(
            f"Cannot build the model of {manifest.source}: its configuration has no {error}, which this model needs"
        ) from error
    except UninitialisedError as error:
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source} without its weights: it uses their values while it is "
            f"built (variable {error.variable!r}). Build the model yourself, then call "
            "shardload.load_weights(model, source, mesh=…)"
        ) from error
    except Exception as error:  # of any kind: JAX and NumPy have their own exception trees
        # Keras wraps the errors of constructors in its own.
        if (missing := import_failure(error)) is not None:
            raise MissingExtraError.explaining(
                missing, needed_for=f"Building the model of {manifest.source}"
            ) from error
        if limit := LimitError.explaining(error, f"build the model of {manifest.source}"):
            raise limit from error
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source} from its configuration: {_first(error)}. "
            f"{_advice(manifest, error)}"
        ) from error


def refuse_code(error: Exception, manifest: Manifest) -> None:
    """Raise if Keras refused Python code in the arguments of ``compile``.

    Raises:
        UnsupportedError: If so; the message says how to load the model anyway.
    """
    if str(error).startswith(_CODE):
        raise UnsupportedError(
            f"Cannot compile the model of {manifest.source}: {_first(error)}. If you trust the checkpoint, run the "
            "code with shardload.load(source, safe_mode=False); otherwise pass compile=False (--no-compile)"
        ) from error


def not_compiled(manifest: Manifest, why: Exception | str, *, has_defaults: bool) -> str:
    """Explain why a model is not compiled as it was saved, and what to do about it.

    Args:
        manifest: The checkpoint's manifest.
        why: The error from ``compile``, or another reason.
        has_defaults: Whether the model's class compiles it anyway, as KerasHub's tasks do.
    """
    stored = ("optimizer/", "optimizer_variables/")
    state = "compiled with the defaults of its class" if has_defaults else "not compiled"
    reason = why if isinstance(why, str) else _first(why)
    then = ""
    if any(name.startswith(stored) for name in manifest.tensors):
        then = ", then shardload.load_weights(model, source) to load its optimizer state"
    return (
        f"The model is {state}: its saved configuration does not fit compile() ({reason}). Call model.compile(...) "
        f"yourself{then}. Pass compile=False (--no-compile) to load it without this warning."
    )


def _first(error: Exception) -> str:
    """Return the first paragraph of an error's message; the innermost if Keras wrapped several errors."""
    message = str(error).strip().rpartition(_INNER)[2]
    first, *rest = message.split("\n\n")
    if rest and first.endswith(":"):  # Keras announces the cause, which is the next paragraph
        first = f"{first} {rest[0]}"
    return first[:SHOWN].rstrip(".") or type(error).__name__


def _advice(manifest: Manifest, error: Exception) -> str:
    if spec_of(manifest).is_hugging_face:
        return "Correct config.json, or build the model yourself and call shardload.load_weights(model, source)"
    if str(error).startswith(_CODE):
        return "It contains Python code. If you trust it, run it: shardload.load(source, safe_mode=False)"
    if str(error).startswith("Cannot convert ") and "to a mixed precision DTypePolicy" in str(error):
        return (
            "A quantised dtype is for a model that was saved quantised. Load this one with dtype='float32', then call "
            "model.quantize('int8')"
        )
    return "Pass your own classes as custom_objects, or register them with keras.saving"
