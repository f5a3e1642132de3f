"""Why no model can be built from what a checkpoint says about itself, and what to do then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from shardload.errors import MissingExtraError, SourceError, UninitialisedError, UnsupportedError
from shardload.manifest import Manifest

TRANSFORMERS = ("hf-safetensors", "gguf")
"""Formats whose models KerasHub's converters build."""
_LAYER_KEYS = ("num_layers", "num_hidden_layers", "n_layer", "num_encoder_layers", "num_decoder_layers")
SHOWN = 1000
"""Characters of an error's first paragraph: one may quote the whole value that caused it."""

_CODE = "Requested the deserialization of a"
"""How Keras begins to refuse Python code, a lambda; no place for what a configuration itself may say."""


def check_layer_count(manifest: Manifest) -> None:
    """A model has at least one tensor a layer; a configuration that says otherwise would build for ever.

    Raises:
        SourceError: When it does.
    """
    nested = [manifest.config.get(key) for key in ("config", "text_config")]
    for config in (manifest.config, *(c for c in nested if isinstance(c, Mapping))):
        for key in _LAYER_KEYS:
            layers = config.get(key)
            if isinstance(layers, int) and layers > max(len(manifest.tensors), 1):
                raise SourceError(
                    f"{manifest.source}: the configuration says {key}={layers}, but there are only "
                    f"{len(manifest.tensors)} tensors. Repair the configuration"
                )


@contextlib.contextmanager
def describe_failure(manifest: Manifest) -> Iterator[None]:
    """Whatever a configuration makes constructors raise becomes one error that names the checkpoint.

    Raises:
        UnsupportedError: With the way out.
        SourceError: When the configuration lacks an entry.
    """
    try:
        yield
    except (UnsupportedError, SourceError, MissingExtraError):
        raise
    except KeyError as error:
        raise SourceError(f"{manifest.source}: the configuration has no {error}, which this model needs") from error
    except UninitialisedError as error:
        raise UnsupportedError(
            f"{manifest.source}: the model computes with the values of its weights while it is built "
            f"({str(error).split(' has no value')[0]}), so it cannot be built without them. Build the model yourself "
            "and fill it: shardload.load_weights(model, source, mesh=…)"
        ) from error
    except Exception as error:  # of any kind: JAX's and NumPy's have trees of their own
        first = str(error).strip().split("\n\n")[0][:SHOWN].rstrip(".") or type(error).__name__
        raise UnsupportedError(
            f"{manifest.source}: no model can be built from its configuration: {first}. {_way_out(manifest, error)}"
        ) from error


def _way_out(manifest: Manifest, error: Exception) -> str:
    if manifest.format in TRANSFORMERS:
        return "Repair config.json, or build the model yourself and fill it: shardload.load_weights(model, source)"
    if str(error).startswith(_CODE):
        return "It holds Python code. Where you trust it, run that: shardload.load(source, safe_mode=False)"
    return "Pass classes of your own as custom_objects, or register them with keras.saving"
