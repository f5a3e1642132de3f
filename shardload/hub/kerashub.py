"""KerasHub's classes, presets, converters, tokenizers and preprocessors; the only module that imports KerasHub.

Where KerasHub has a class, but no converter, a family may declare one; `transformers_loader` uses both kinds alike.
Some preprocessors cannot be made without TensorFlow. `lacks_tensorflow` finds them, so that models are built without.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardload.errors import MissingExtraError, UnsupportedError
from shardload.families.parts.config import GENERATORS, architecture_of
from shardload.families.registry import model_type_of, model_types
from shardload.hub.config_forms import read_config
from shardload.keras_bridge.hub_imports import backbone_of, timed
from shardload.keras_bridge.patches import Patches
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.stores.local import any_home


def keras_hub(needed_for: str = "Building this model") -> Any:
    """Import and return KerasHub. If it is not installed, the error says what it is ``needed_for``."""
    with _hub_extra(needed_for), any_home(), timed():
        import keras_hub as package
    return package


@contextlib.contextmanager
def _hub_extra(needed_for: str = "Building this model") -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingExtraError.explaining(error, needed_for=needed_for, extra="hub") from error


# ---- presets -------------------------------------------------------------------------------------


def preset_handles() -> dict[str, str]:
    """Return KerasHub's built-in presets: name → handle (``kaggle://…``). Imports KerasHub."""
    keras_hub("Listing the presets")
    from keras_hub.src.utils.preset_utils import BUILTIN_PRESETS

    return {name: str(entry["kaggle_handle"]) for name, entry in BUILTIN_PRESETS.items()}


def preset_parameters(preset: str) -> int:
    """Return the number of parameters that KerasHub states for a built-in preset. Imports KerasHub."""
    keras_hub()
    from keras_hub.src.utils.preset_utils import BUILTIN_PRESETS

    return int(BUILTIN_PRESETS[preset]["metadata"]["params"])


def preset_saver(folder: Path) -> Any:
    """Return KerasHub's object that writes a preset's configuration files to ``folder``."""
    keras_hub()
    from keras_hub.src.utils.preset_utils import KerasPresetSaver

    return KerasPresetSaver(str(folder))


def preset_tokenizer(manifest: Manifest, cls: Any = None) -> Any:
    """Load the tokenizer layer of a KerasHub preset or a Hugging Face folder; ``cls`` is its class, if known."""
    from shardload.keras_bridge.model_state import without_walking_vocabularies

    with without_walking_vocabularies():
        return _preset_loader(manifest).load_tokenizer(cls)


def _preset_loader(manifest: Manifest) -> Any:
    if spec_of(manifest).is_hugging_face:
        return transformers_loader(manifest)
    keras_hub()
    from keras_hub.src.utils.preset_utils import KerasPresetLoader

    return KerasPresetLoader(manifest.source, manifest.config)


# ---- models of Hugging Face ----------------------------------------------------------------------


def transformers_loader(manifest: Manifest) -> Any:
    """Return KerasHub's loader for a Hugging Face or GGUF checkpoint, with the family's own converter if it has one."""
    manifest.require_description()
    keras_hub()
    with _hub_extra():
        from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
    config = model_type_of(manifest.config).for_converter(read_config(manifest))
    declared = model_type_of(manifest.config).converter
    if declared is not None and declared.applies(manifest.tensors):
        # KerasHub's own converters are modules with functions of these names.
        own = SimpleNamespace(
            backbone_cls=getattr(keras_hub().models, declared.backbone),
            convert_backbone_config=declared.arguments,
            convert_weights=declared.port_weights,
            convert_tokenizer=declared.tokenizer,
        )

        class OwnLoader(TransformersPresetLoader):  # type: ignore[misc]  # KerasHub has no types
            """KerasHub's loader, given the family's own converter: by itself, it looks for one in KerasHub only."""

            def __init__(self) -> None:
                super(TransformersPresetLoader, self).__init__(preset_path(manifest), config)
                self.converter = own

        return OwnLoader()
    try:
        return TransformersPresetLoader(preset_path(manifest), config)
    except (KeyError, ValueError) as error:
        # KerasHub has no list: its model types are the string constants of the constructor's if-chain.
        known = sorted(set(re.findall(r'"([a-z][\w\-]*)"', inspect.getsource(TransformersPresetLoader.__init__))))
        added = {kind.name for kind in model_types().values() if kind.converter is not None}
        known = sorted({*known, *added} - {"model_type"})
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: there is no converter for model_type "
            f"{config.get('model_type')!r}, only for {', '.join(known)}. Build your own model, then call "
            "shardload.load_weights(model, source)"
        ) from error


def converter(manifest: Manifest) -> Any:
    """Return what converts a Hugging Face or GGUF checkpoint: KerasHub's ``convert_*`` module, or shardload's own."""
    return transformers_loader(manifest).converter


def preset_path(manifest: Manifest) -> str:
    """Return the path where KerasHub looks for files other than weights; ``os.devnull`` if there are none.

    KerasHub would take a path that does not exist for the name of a preset, and ask hubs for it.
    """
    folder = manifest.location.local_folder() if manifest.location.exists() else None
    # A file at an address, such as a GGUF file, has nothing on this machine.
    return str(folder) if folder is not None and folder.exists() else os.devnull


# ---- classes -------------------------------------------------------------------------------------


def task_class(manifest: Manifest) -> Any:
    """Return KerasHub's task class for a checkpoint (``GemmaCausalLM``); ``None`` if it has only a backbone."""
    match spec_of(manifest).described_by:
        case "keras-hub":
            keras_hub()
            return registered_class(manifest.metadata.get("task") or {}, None)
        case "hugging-face":
            loader = transformers_loader(manifest)
            return task_class_of(manifest, loader.converter, loader.check_backbone_class())
    return None


def task_class_of(manifest: Manifest, convert: Any, backbone_cls: type) -> Any:
    """Return KerasHub's task class for a Hugging Face checkpoint; ``None`` if it has only a backbone's weights."""
    if model_type_of(manifest.config).without_task:
        return None
    models = keras_hub().models
    architecture = architecture_of(manifest.config)
    if "ForImageClassification" in architecture and hasattr(convert, "convert_head"):
        base = models.ImageClassifier
    elif not architecture or architecture.endswith(GENERATORS):
        base = models.CausalLM
    else:
        return None
    found = classes_for(backbone_cls, base)
    # An assistant shares its backbone's class with the model it assists, and BLIP-2 with OPT that with T5.
    exact = model_type_of(manifest.config).task(manifest.config) or architecture.replace("For", "", 1)
    return min(found, key=lambda cls: (cls.__name__ != exact, len(cls.__name__), cls.__name__), default=None)


def registered_class(described: Mapping[str, Any], custom_objects: Mapping[str, Any] | None) -> Any:
    """Return the class that a serialised configuration names; ``None`` if it is unknown."""
    import keras

    return keras.saving.get_registered_object(described.get("registered_name"), custom_objects)


def parameters(cls: Any) -> Mapping[str, Any]:
    """Return the parameters of a constructor by name."""
    # Not of the class: in Keras' NNX mode, its metaclass takes any arguments.
    return inspect.signature(cls.__init__).parameters


def classes_for(backbone_cls: type, base: Any) -> list[Any]:
    """Return the subclasses of ``base`` (KerasHub's task or tokenizer) that belong to a backbone class."""
    from keras_hub.src.utils.preset_utils import list_subclasses

    return [cls for cls in list_subclasses(base) if cls.backbone_cls is backbone_cls]


def text_classes(model: Any) -> tuple[Any, Any]:
    """Return KerasHub's preprocessor and tokenizer classes for a task; for a bare backbone, those of its ``CausalLM``.

    Either is ``None`` if KerasHub has none.
    """
    preprocessor = getattr(type(model), "preprocessor_cls", None)
    backbone_cls = type(backbone_of(model))
    if preprocessor is None:
        tasks = classes_for(backbone_cls, keras_hub().models.CausalLM)
        preprocessor = _shortest([cls.preprocessor_cls for cls in tasks if cls.preprocessor_cls is not None])
    tokenizer = getattr(preprocessor, "tokenizer_cls", None)
    return preprocessor, tokenizer or _shortest(classes_for(backbone_cls, keras_hub().tokenizers.Tokenizer))


def _shortest(classes: list[Any]) -> Any:
    """Return the class with the shortest name, the plain one: variants have longer names. ``None`` if there is none."""
    return min(classes, key=lambda cls: (len(cls.__name__), cls.__name__), default=None)


def reads_tokenizer(cls: Any, *, sentencepiece: bool) -> bool:
    """Whether a preprocessor class reads SentencePiece (with ``sentencepiece``) or byte-pair tokenizers (without)."""
    kinds = keras_hub().tokenizers
    kind = kinds.SentencePieceTokenizer if sentencepiece else kinds.BytePairTokenizer
    return issubclass(cls.tokenizer_cls, kind)


def greedy_sampler() -> Any:
    """Return KerasHub's sampler that always takes the most probable token."""
    return keras_hub().samplers.GreedySampler()


# ---- preprocessors -------------------------------------------------------------------------------


def make_preprocessor(cls: Any, manifest: Manifest, *, usable: bool = True) -> Any:
    """Make a preprocessor of class ``cls`` for a checkpoint; raises errors of any type if that is not possible.

    The tokenizer is tried on one word, so that it fails now and not when the model is used. With ``usable=False``, the
    preprocessor is only for writing files, which needs no TensorFlow.
    """
    from shardload.keras_bridge.model_state import without_walking_vocabularies  # imports Keras

    with contextlib.nullcontext() if usable else as_with_tensorflow(cls), without_walking_vocabularies():
        made = _preset_loader(manifest).load_preprocessor(cls)
    made.tokenizer(["a"])
    return made


def lacks_tensorflow(cls: type) -> bool:
    """Whether a preprocessor's class needs TensorFlow, and KerasHub found none when it was imported."""
    module = sys.modules[cls.__module__]
    return hasattr(module, "assert_tf_installed") and getattr(module, "tf", None) is None


def as_with_tensorflow(cls: type) -> contextlib.AbstractContextManager[None]:
    """Return a context that lets Gemma 3's preprocessor be made without TensorFlow, which it needs only when called."""
    # The class' module imported the check by name, so it is replaced there.
    module, name = sys.modules[cls.__module__], "assert_tf_installed"
    return Patches(lambda: [(module, name, lambda _: lambda symbol: None)] if hasattr(module, name) else []).applied()
