"""Build models from the descriptions in checkpoints.

`build_model` turns the description in any format into a Keras model, without loading weights (inside
``shardload.abstract()``, without even allocating them)::

    format             description             read by                  result
    keras-hub-preset   config.json, task.json  keras.saving             task, else backbone
    hf-safetensors     config.json             KerasHub's converter     CausalLM / ImageClassifier, else backbone
    gguf               header                  KerasHub's converter     CausalLM, else backbone
    keras-archive      config.json             keras.saving             the saved model, compiled as saved
    keras-legacy-h5    model_config            Keras' legacy code       the saved model, compiled as saved
    orbax              model_config            keras.saving             the saved model, compiled as saved

Of Orbax checkpoints, those of training runs describe their model; a ``.weights.h5`` needs a configuration next to it.
A preprocessor that needs TensorFlow is left out. Variables have the checkpoint's own dtype; KerasHub takes float32.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from shardload.errors import (
    LimitError,
    MissingExtraError,
    SourceError,
    TransferError,
    UninitialisedError,
    UnsupportedError,
    import_failure,
    public_name,
)
from shardload.families.registry import model_type_of
from shardload.hub import config_forms, fidelity, kerashub, quantised
from shardload.hub.config_forms import MAX_LAYERS
from shardload.keras_bridge.layer_settings import apply_settings, with_dtype, with_saved_policy
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.saving import model_of
from shardload.keras_bridge.training import compile_as_described
from shardload.keras_bridge.weights_files import build_legacy_model, compile_legacy_model
from shardload.loaders import spec_of
from shardload.loaders.keras_legacy import TRAINING, UNREADABLE
from shardload.manifest import Manifest
from shardload.units import plural

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def build_model(
    manifest: Manifest,
    *,
    dtype: Any = None,
    task: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    ignore_config: Sequence[str] = (),
    compile: bool = True,
    note: Callable[[str], None] | None = None,
) -> Any:
    """Build the model that a checkpoint describes, without its weights and without KerasHub's preprocessor.

    Args:
        manifest: An opened checkpoint.
        dtype: Dtype or dtype policy of the variables; `checkpoint_dtype` by default.
        task: Build the task (a ``CausalLM``, a classifier) if the checkpoint is one; the backbone otherwise.
        custom_objects: Classes in the configuration that Keras does not know.
        safe_mode: Refuse configurations that contain Python code, as ``keras.saving.load_model`` does.
        ignore_config: Fields of a Hugging Face configuration in which the model may differ from it.
        compile: Compile the model as it was saved, if the checkpoint stores how.
        note: Called with the reason if a model was saved compiled but is not compiled now.
    """
    manifest.require_description()
    # Cheap checks of the headers first: building a large model takes seconds.
    ignore = fidelity.checked_fields(ignore_config)
    quantised.check(manifest, ignore=ignore)
    _check_layer_count(manifest)
    compiling = (note or (lambda _: None)) if compile else None
    scope = {"custom_objects": custom_objects, "safe_mode": safe_mode}
    with describe_failure(manifest):
        match spec_of(manifest).described_by:
            case "keras-hub":
                return _from_preset(manifest, dtype, task, scope)
            case "hugging-face":
                return _from_transformers(manifest, dtype, task, ignore)
            case "keras-legacy" if (why := manifest.metadata.get(UNREADABLE)) is not None:
                raise UnsupportedError(
                    f"Cannot build the model of {manifest.source}: its configuration cannot be read ({why}). Build the "
                    "model yourself, then call shardload.load_weights(model, source)"
                )
            case "keras-legacy" if manifest.config:
                return _from_keras_2(manifest, dtype, scope, compiling)
            case "keras" | "keras-sidecar" as where:
                if config := manifest.config if where == "keras" else config_forms.config_beside(manifest):
                    return _deserialize(with_dtype(config, dtype), manifest, scope, dtype=dtype, compiling=compiling)
    raise UnsupportedError(
        f"Cannot build the model of {manifest.source}: it contains weights ({manifest.format}), but no description of "
        "their model. Build the model yourself, then call shardload.load_weights(model, source)"
    )


def checkpoint_dtype(manifest: Manifest) -> str:
    """Return the configured dtype, else that of most bytes; bfloat16 for GGUF, whose blocks carry no more precision."""
    if (known := spec_of(manifest).model_dtype) is not None:
        return known
    # A configuration of several parts states a dtype in each part, for all of them, or both: the text model's counts.
    for config in (manifest.config.get("text_config") or {}, manifest.config):
        for key in ("dtype", "torch_dtype"):
            name = str(config.get(key, "")).removeprefix("torch.")
            if name in _FLOATS:
                return name
    stored: collections.Counter[str] = collections.Counter()
    for tensor in manifest.tensors.values():
        stored[tensor.dtype.name] += tensor.nbytes
    return next((name for name, _ in stored.most_common() if name in _FLOATS), "float32")


def _from_preset(manifest: Manifest, dtype: Any, task: bool, scope: Mapping[str, Any]) -> Any:
    config = with_dtype(manifest.config, dtype)
    if config.get("config", {}).get("dtype") is None:  # neither named nor the backbone's own: the stored one
        config["config"] = {**config.get("config", {}), "dtype": dtype or checkpoint_dtype(manifest)}
    backbone = _deserialize(config, manifest, scope)
    described = manifest.metadata.get("task")
    if not task or not described:
        return backbone
    cls = kerashub.registered_class(described, scope["custom_objects"])
    if cls is None:
        raise UnsupportedError(
            f"Cannot build the task of {manifest.source}: task.json names the unknown class "
            f"{described.get('class_name')!r}. Pass it in custom_objects"
        )
    # The backbone is built already; the preprocessor may need TensorFlow, and is attached later.
    config = {k: v for k, v in described["config"].items() if k not in ("backbone", "preprocessor")}
    if dtype is not None:
        config = with_dtype(config, dtype)
    return cls.from_config({**config, "backbone": backbone, "preprocessor": None})


def _from_transformers(manifest: Manifest, dtype: Any, task: bool, ignore: Sequence[str]) -> Any:
    loader = kerashub.transformers_loader(manifest)
    backbone_cls = loader.check_backbone_class()
    config_forms.check_representable(manifest, backbone_cls, kerashub.parameters(backbone_cls))
    settings = fidelity.arguments(manifest, backbone_cls)
    if (ties := config_forms.ties_embeddings(manifest)) is not None:
        settings["tie_word_embeddings"] = ties
    # load_weights=False: KerasHub would read every weight to the default device.
    backbone = loader.load_backbone(backbone_cls, False, dtype=dtype or checkpoint_dtype(manifest), **settings)
    fidelity.reconcile(backbone, manifest, ignore=ignore)
    cls = kerashub.task_class_of(manifest, loader.converter, backbone_cls) if task else None
    if task and (why := model_type_of(manifest.config).without_task):
        record_of(backbone).build_notes += (f"Built as a backbone, without a head, because {why}",)
    if cls is None:
        return backbone
    # num_classes keeps KerasHub from opening the weights for the head: `mapping` maps them like all others.
    labels = {"num_classes": len(loader.config["id2label"])} if "num_classes" in kerashub.parameters(cls) else {}
    return loader.load_task(cls, False, False, backbone=backbone, preprocessor=None, **labels)


def _from_keras_2(
    manifest: Manifest, dtype: Any, scope: Mapping[str, Any], compiling: Callable[[str], None] | None
) -> Any:
    model = build_legacy_model(manifest.config, dtype=dtype, **scope)
    if compiling is None or not (described := manifest.metadata.get(TRAINING)):
        return model
    try:
        compile_legacy_model(model, described, **scope)
    except Exception as error:  # of any kind: this builds custom losses, metrics and optimizers
        _refuse_code(error, manifest)
        compiling(_not_compiled(manifest, error, has_defaults=False))
        return build_legacy_model(manifest.config, dtype=dtype, **scope)
    return model


def _deserialize(
    config: Mapping[str, Any],
    manifest: Manifest,
    scope: Mapping[str, Any],
    *,
    dtype: Any = None,
    compiling: Callable[[str], None] | None = None,
) -> Any:
    """Build the model of a Keras configuration, and compile it if ``compiling`` is a function.

    If the model cannot be compiled as it was saved, ``compiling`` is called with the reason, for a warning.
    """
    if "keras_hub" in json.dumps(config):
        kerashub.keras_hub()  # registers its classes
    settings = (manifest.metadata.get("structure") or {}).get("form")

    # A function, because a failed compile() leaves a half-compiled model, and then another one is built.
    def build() -> Any:
        model = _uncompiled(config, manifest, scope)
        if settings is not None:
            apply_settings(model, settings, any_policy=dtype is not None)
        return model

    def build_compiled() -> Any:
        model, described = build(), config.get("compile_config")
        if compiling is None or not described:
            return model
        why: Exception | str = "its class overrides compile()"
        try:
            if compile_as_described(model, described, **scope):
                return model
        except Exception as error:  # of any kind: this builds custom losses, metrics and optimizers
            _refuse_code(error, manifest)
            model, why = build(), error
        compiling(_not_compiled(manifest, why, has_defaults=model.compiled))
        return model

    if settings is None:
        return build_compiled()
    has_dtype = isinstance(config.get("config"), Mapping) and "dtype" in config["config"]
    return with_saved_policy(build_compiled, settings, dtype, has_dtype=has_dtype)


def _uncompiled(config: Mapping[str, Any], manifest: Manifest, scope: Mapping[str, Any]) -> Any:
    # Keras modifies the configuration while it reads it.
    rest = copy.deepcopy({key: value for key, value in config.items() if key != "compile_config"})
    # A task's preprocessor that cannot be made here is left out.
    inner = rest.get("config")
    if isinstance(inner, dict) and isinstance(described := inner.get("preprocessor"), dict):
        cls = kerashub.registered_class(described, None)
        if cls is not None and kerashub.lacks_tensorflow(cls):
            inner["preprocessor"] = None
    config_forms.tie_as_stored(rest, manifest)
    model = model_of(rest, **scope)
    if not isinstance(model, keras.Model):
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: it describes a {type(model).__name__}, expected a "
            "Keras model. Save the whole model instead"
        )
    fidelity.reconcile(model, manifest)
    return model


# ---- errors for configurations that no model can be built from ------------------------------------

_LAYER_KEYS = (
    *("num_layers", "num_hidden_layers", "n_layer", "n_layers", "depths"),
    *("num_encoder_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
)
_PARTS = ("config", "text_config", "vision_config", "audio_config", "encoder", "decoder")
_SHOWN = 1000
"""How many characters of another library's error are quoted at most: it may contain a value of any length."""

_CODE = "Requested the deserialization of a"
"""How Keras' message begins when it refuses Python code (a lambda) in a configuration. No other message does."""
_INNER = "Exception encountered: "
"""Text in a message of Keras after which it quotes the message of the error that was the cause."""


def _check_layer_count(manifest: Manifest) -> None:
    """Raise if a configuration sets more layers than the checkpoint has tensors: to build them could take forever."""
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
                shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}…"
                raise SourceError(
                    f"Cannot build the model of {manifest.source}: its configuration sets {key}={shown}, "
                    f"but {found}. Correct the configuration"
                )


def _number(value: Any) -> float:
    """Return a configured number of layers; 0 if it is not a number, because the build then fails at once anyway."""
    try:
        return value if isinstance(value, (int, float)) else int(value)
    except (TypeError, ValueError):
        return 0


@contextlib.contextmanager
def describe_failure(manifest: Manifest) -> Iterator[None]:
    """Context in which an error of a model's constructor becomes an error of shardload that names the checkpoint."""
    try:
        yield
    # These name the checkpoint already, or the store that does not respond.
    except (UnsupportedError, SourceError, TransferError, MissingExtraError, LimitError):
        raise
    except KeyError as error:
        raise SourceError(
            f"Cannot build the model of {manifest.source}: its configuration lacks {error}, which it needs. Add it"
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


def _refuse_code(error: Exception, manifest: Manifest) -> None:
    """Raise, with advice, if ``error`` says that Keras refused Python code in the arguments of ``compile``."""
    if str(error).startswith(_CODE):
        raise UnsupportedError(
            f"Cannot compile the model of {manifest.source}: {_first(error)}. If you trust the checkpoint, run the "
            "code with shardload.load(source, safe_mode=False); otherwise pass compile=False (--no-compile)"
        ) from error


def _not_compiled(manifest: Manifest, why: Exception | str, *, has_defaults: bool) -> str:
    """Return a warning: the model is not compiled as saved, or only with its class's defaults (``has_defaults``)."""
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
    """Return the first paragraph of an error's message or, if Keras quotes another error in it, of that error's."""
    message = str(error).strip().rpartition(_INNER)[2]
    first, *rest = message.split("\n\n")
    if rest and first.endswith(":"):  # Keras announces the cause, which is the next paragraph
        first = f"{first} {rest[0]}"
    first = first.partition(" Full object config: ")[0]
    return first[:_SHOWN].rstrip(".") or public_name(error)


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
    return "In Python, pass your own classes as custom_objects, or register them with keras.saving"
