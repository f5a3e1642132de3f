"""Build models from the descriptions in checkpoints; the only module that imports KerasHub.

Each format describes its model in its own way, and `build_model` turns any description into a Keras model
without loading its weights (inside ``shardload.abstract()``, without even allocating them)::

    keras-hub-preset   config.json, task.json  ─► keras.saving          ─► task, else backbone
    hf-safetensors     config.json             ─► KerasHub's converter  ─► CausalLM / ImageClassifier, else backbone
    gguf               header                  ─► KerasHub's converter  ─► CausalLM, else backbone
    keras-archive      config.json             ─► keras.saving          ─► the saved model, compiled as saved
    keras-legacy-h5    model_config            ─► Keras' legacy code    ─► the same
    orbax              model_config            ─► keras.saving          ─► the same, if a training run saved it

A `.weights.h5` describes no model, unless a configuration is next to it. TensorFlow is not needed:
a preprocessor that requires it is omitted, and `shardload.text` has its own tokenisation.

The dtype is the checkpoint's own unless the caller names another one: KerasHub would make it float32,
which doubles the memory of a bfloat16 checkpoint and adds no information.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shardload.errors import MissingExtraError, UnsupportedError
from shardload.families.parts.config import GENERATORS, architecture_of
from shardload.families.registry import model_type_of, model_types
from shardload.hub import config_forms, fidelity, quantised
from shardload.hub.build_errors import check_layer_count, describe_failure, not_compiled, refuse_code
from shardload.hub.config_forms import check_representable, read_config, ties_embeddings
from shardload.hub.converters import OwnConverter, converter_of
from shardload.hub.legacy_models import build_legacy, has_config
from shardload.hub.preset_path import preset_path
from shardload.hub.sidecar import config_beside
from shardload.hub.tensorflow import as_with_tensorflow, omit_preprocessor
from shardload.keras_bridge.hub_imports import timed
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.stores.local import any_home

_log = logging.getLogger(__name__)

FLOATS = ("bfloat16", "float16", "float32", "float64")


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
        ignore_config: Fields of a Hugging Face configuration that the model may differ from.
        compile: Compile the model as it was saved, if the checkpoint stores how.
        note: Called with the reason if a model was saved compiled but is not compiled now.

    Raises:
        UnsupportedError: When the checkpoint describes no model, or an unknown one.
        SourceError: When its configuration contradicts its tensors or itself.
        MissingExtraError: When it needs KerasHub, which is not installed.
    """
    manifest.require_description()
    # Cheap checks of the headers first: building a large model takes seconds.
    ignore = fidelity.check_names(ignore_config)
    quantised.check(manifest, ignore=ignore)
    check_layer_count(manifest)
    compiling = (note or (lambda _: None)) if compile else None
    with describe_failure(manifest):
        match spec_of(manifest).described_by:
            case "keras-hub":
                return _from_preset(manifest, dtype, task, custom_objects, safe_mode)
            case "hugging-face":
                return _from_transformers(manifest, dtype, task, ignore)
            case "keras-legacy" if has_config(manifest):
                return build_legacy(manifest, dtype, custom_objects, safe_mode, compiling)
            case "keras" | "keras-sidecar" as where:
                if config := manifest.config if where == "keras" else config_beside(manifest):
                    described = _with_dtype(config, dtype)
                    scope = (custom_objects, safe_mode)
                    return _deserialize(described, manifest, *scope, dtype=dtype, compiling=compiling)
    raise UnsupportedError(
        f"Cannot build the model of {manifest.source}: it contains weights ({manifest.format}), but no description of "
        "their model. Build the model yourself, then call shardload.load_weights(model, source)"
    )


def task_class(manifest: Manifest) -> Any:
    """Return the class of the task that `build_model` builds for a checkpoint of KerasHub or Hugging Face.

    Returns:
        ``None`` if it builds something else.

    Raises:
        UnsupportedError: When KerasHub has no such model.
        MissingExtraError: When KerasHub is not installed.
    """
    match spec_of(manifest).described_by:
        case "keras-hub":
            keras_hub()
            return _registered(manifest.metadata.get("task") or {}, None)
        case "hugging-face":
            loader = _transformers_loader(manifest)
            return _task_class(manifest, loader.converter, loader.check_backbone_class())
    return None


def converter(manifest: Manifest) -> Any:
    """Return KerasHub's ``convert_*`` module for a Hugging Face or GGUF checkpoint, or one of `converters`.

    Raises:
        UnsupportedError: When KerasHub has none for the checkpoint's ``model_type``.
        MissingExtraError: When KerasHub is not installed.
    """
    return _transformers_loader(manifest).converter


def checkpoint_dtype(manifest: Manifest) -> str:
    """Return the floating-point dtype of a checkpoint.

    It is the configuration's ``torch_dtype`` or ``dtype``, else the dtype that most bytes are stored in. GGUF is
    bfloat16: its quantised blocks carry no more information.
    """
    if (known := spec_of(manifest).model_dtype) is not None:
        return known
    # A configuration of several parts states a dtype in each part, for all of them, or both: the text model's counts.
    for config in (manifest.config.get("text_config") or {}, manifest.config):
        for key in ("dtype", "torch_dtype"):
            name = str(config.get(key, "")).removeprefix("torch.")
            if name in FLOATS:
                return name
    stored: collections.Counter[str] = collections.Counter()
    for tensor in manifest.tensors.values():
        stored[tensor.dtype.name] += tensor.nbytes
    return next((name for name, _ in stored.most_common() if name in FLOATS), "float32")


def preset_saver(folder: Path) -> Any:
    """Return KerasHub's writer of configuration files, for a folder."""
    keras_hub()
    from keras_hub.src.utils.preset_utils import KerasPresetSaver

    return KerasPresetSaver(str(folder))


def keras_hub(needed_for: str = "Building this model") -> Any:
    """Import and return KerasHub.

    Args:
        needed_for: What fails without it, as the subject of the error.

    Raises:
        MissingExtraError: When it is not installed.
    """
    with _hub_extra(needed_for), any_home(), timed():
        import keras_hub as package
    return package


def preset_handles() -> dict[str, str]:
    """Return KerasHub's built-in presets, name → handle. Imports KerasHub."""
    keras_hub("Listing the presets")
    from keras_hub.src.utils.preset_utils import BUILTIN_PRESETS

    return {name: str(entry["kaggle_handle"]) for name, entry in BUILTIN_PRESETS.items()}


def preset_parameters(preset: str) -> int:
    """Return the number of parameters that KerasHub states for a built-in preset. Imports KerasHub."""
    keras_hub()
    from keras_hub.src.utils.preset_utils import BUILTIN_PRESETS

    return int(BUILTIN_PRESETS[preset]["metadata"]["params"])


def make_preprocessor(cls: Any, manifest: Manifest, *, usable: bool = True) -> Any:
    """Make a preprocessor; raises any error if its files are damaged or missing, or if it cannot run here.

    Some of KerasHub's preprocessors need TensorFlow; each is tried on one word, so that a model never fails later
    because of it.

    Args:
        cls: KerasHub's class.
        manifest: The manifest of a folder with the preprocessor's files.
        usable: Require that it runs here; a preprocessor that is only written needs no TensorFlow.
    """
    from shardload.keras_bridge.tracking import without_walking_vocabularies  # imports Keras

    with contextlib.nullcontext() if usable else as_with_tensorflow(cls), without_walking_vocabularies():
        made = _preset_loader(manifest).load_preprocessor(cls)
    made.tokenizer(["a"])
    return made


def preset_tokenizer(manifest: Manifest, cls: Any = None) -> Any:
    """Return the tokenizer layer of a KerasHub preset, or of a Hugging Face folder as ``cls``, with its vocabulary."""
    from shardload.keras_bridge.tracking import without_walking_vocabularies

    with without_walking_vocabularies():
        return _preset_loader(manifest).load_tokenizer(cls)


def classes_for(backbone_cls: type, base: Any) -> list[Any]:
    """Return KerasHub's subclasses of ``base`` (a task, a tokenizer) for a backbone's class."""
    from keras_hub.src.utils.preset_utils import list_subclasses

    return [cls for cls in list_subclasses(base) if cls.backbone_cls is backbone_cls]


def greedy_sampler() -> Any:
    """Return KerasHub's sampler that always takes the most probable token."""
    return keras_hub().samplers.GreedySampler()


def _from_preset(
    manifest: Manifest, dtype: Any, task: bool, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> Any:
    backbone = _deserialize(_preset_dtype(manifest, dtype), manifest, custom_objects, safe_mode)
    described = manifest.metadata.get("task")
    if not task or not described:
        return backbone
    cls = _registered(described, custom_objects)
    if cls is None:
        raise UnsupportedError(
            f"Cannot build the task of {manifest.source}: task.json names the unknown class "
            f"{described.get('class_name')!r}. Pass it in custom_objects"
        )
    # The backbone is built already; the preprocessor may need TensorFlow, and is attached later.
    config = {k: v for k, v in described["config"].items() if k not in ("backbone", "preprocessor")}
    if dtype is not None:
        config = _with_dtype(config, dtype)
    return cls.from_config({**config, "backbone": backbone, "preprocessor": None})


def _registered(described: Mapping[str, Any], custom_objects: Mapping[str, Any] | None) -> Any:
    import keras

    return keras.saving.get_registered_object(described.get("registered_name"), custom_objects)


def _with_dtype(config: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    from shardload.keras_bridge.layer_settings import with_dtype  # imports Keras

    return with_dtype(config, dtype)


def _preset_dtype(manifest: Manifest, dtype: Any) -> dict[str, Any]:
    """Return the backbone's configuration in ``dtype``; by default its own dtype, or the stored dtype."""
    config = _with_dtype(manifest.config, dtype)
    if config.get("config", {}).get("dtype") is None:
        config["config"] = {**config.get("config", {}), "dtype": dtype or checkpoint_dtype(manifest)}
    return config


def _from_transformers(manifest: Manifest, dtype: Any, task: bool, ignore: Sequence[str]) -> Any:
    loader = _transformers_loader(manifest)
    backbone_cls = loader.check_backbone_class()
    check_representable(manifest, backbone_cls, _parameters(backbone_cls))
    settings = fidelity.arguments(manifest, backbone_cls)
    if (ties := ties_embeddings(manifest)) is not None:
        settings["tie_word_embeddings"] = ties
    # load_weights=False: KerasHub would read every weight to the default device.
    backbone = loader.load_backbone(backbone_cls, False, dtype=dtype or checkpoint_dtype(manifest), **settings)
    fidelity.reconcile(backbone, manifest, ignore=ignore)
    cls = _task_class(manifest, loader.converter, backbone_cls) if task else None
    if cls is None:
        return backbone
    # num_classes keeps KerasHub from opening the weights for the head: `mapping` maps them like all others.
    labels = {"num_classes": len(loader.config["id2label"])} if "num_classes" in _parameters(cls) else {}
    return loader.load_task(cls, False, False, backbone=backbone, preprocessor=None, **labels)


def _task_class(manifest: Manifest, convert: ModuleType | OwnConverter, backbone_cls: type) -> Any:
    """Return KerasHub's task class for the checkpoint; ``None`` if it has only a backbone's weights."""
    models = keras_hub().models
    architecture = architecture_of(manifest.config)
    if "ForImageClassification" in architecture and hasattr(convert, "convert_head"):
        base = models.ImageClassifier
    elif not architecture or architecture.endswith(GENERATORS):
        base = models.CausalLM
    else:
        return None
    found = classes_for(backbone_cls, base)
    exact = architecture.replace("For", "", 1)  # an assistant shares its backbone's class with the model it assists
    return min(found, key=lambda cls: (cls.__name__ != exact, len(cls.__name__), cls.__name__), default=None)


def _parameters(cls: Any) -> Mapping[str, Any]:
    return inspect.signature(cls.__init__).parameters


def _deserialize(
    config: Mapping[str, Any],
    manifest: Manifest,
    custom_objects: Mapping[str, Any] | None,
    safe_mode: bool,
    *,
    dtype: Any = None,
    compiling: Callable[[str], None] | None = None,
) -> Any:
    """Build a Keras configuration's model; with ``compiling``, compile it, or call ``compiling`` with the reason."""
    from shardload.keras_bridge import layer_settings
    from shardload.keras_bridge.training import compile_as_described

    if "keras_hub" in json.dumps(config):
        keras_hub()  # registers its classes
    settings = (manifest.metadata.get("structure") or {}).get("form")
    scope: dict[str, Any] = {"custom_objects": custom_objects, "safe_mode": safe_mode}

    # A function, because a failed compile() leaves a half-compiled model, and then another one is built.
    def build() -> Any:
        model = _uncompiled(config, manifest, scope)
        if settings is not None:
            layer_settings.apply_settings(model, settings, any_policy=dtype is not None)
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
            refuse_code(error, manifest)
            model, why = build(), error
        compiling(not_compiled(manifest, why, has_defaults=model.compiled))
        return model

    if settings is None:
        return build_compiled()
    has_dtype = isinstance(config.get("config"), Mapping) and "dtype" in config["config"]
    return layer_settings.with_saved_policy(build_compiled, settings, dtype, has_dtype=has_dtype)


def _uncompiled(config: Mapping[str, Any], manifest: Manifest, scope: Mapping[str, Any]) -> Any:
    import keras

    from shardload.keras_bridge.saving import model_of

    # Keras modifies the configuration while it reads it.
    rest = copy.deepcopy({key: value for key, value in config.items() if key != "compile_config"})
    omit_preprocessor(rest)
    config_forms.tie_as_stored(rest, manifest)
    model = model_of(rest, **scope)
    if not isinstance(model, keras.Model):
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: it describes a {type(model).__name__}, expected a "
            "Keras model"
        )
    fidelity.reconcile(model, manifest)
    return model


def _preset_loader(manifest: Manifest) -> Any:
    if spec_of(manifest).is_hugging_face:
        return _transformers_loader(manifest)
    keras_hub()
    from keras_hub.src.utils.preset_utils import KerasPresetLoader

    return KerasPresetLoader(manifest.source, manifest.config)


def _transformers_loader(manifest: Manifest) -> Any:
    manifest.require_description()
    keras_hub()
    with _hub_extra():
        from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
    config = model_type_of(manifest.config).for_converter(read_config(manifest))
    if (own := converter_of(manifest, keras_hub().models)) is not None:

        class OwnLoader(TransformersPresetLoader):  # type: ignore[misc]  # KerasHub has no types
            """KerasHub's loader, whose constructor knows KerasHub's converters only."""

            def __init__(self) -> None:
                super(TransformersPresetLoader, self).__init__(preset_path(manifest), config)
                self.converter = own

        return OwnLoader()
    try:
        return TransformersPresetLoader(preset_path(manifest), config)
    except (KeyError, ValueError) as error:
        # KerasHub has no list: its model types are the string constants of the constructor's if-chain.
        known = sorted(set(re.findall(r'"([a-z][\w\-]*)"', inspect.getsource(TransformersPresetLoader.__init__))))
        declared = {kind.name for kind in model_types().values() if kind.converter is not None}
        known = sorted({*known, *declared} - {"model_type"})
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: there is no converter for model_type "
            f"{config.get('model_type')!r}, only for {', '.join(known)}. Build your own model, then call "
            "shardload.load_weights(model, source)"
        ) from error


@contextlib.contextmanager
def _hub_extra(needed_for: str = "Building this model") -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for=needed_for, extra="hub") from error
