"""Intercept the loading functions of Keras and KerasHub inside `calls_to` blocks; leave them unchanged elsewhere.

    keras.saving.load_model ──► saving_lib.load_model, …          ─┐
    model.load_weights ───────► saving_lib.load_weights_only, …    ├─► inside `calls_to(handler)`: handler(call)
    CausalLM.from_preset ─────► loader.load_task, load_backbone   ─┘   elsewhere: the original

The public functions stay Keras' own: they check their arguments and raise their errors, also where a program has
imported one by name. This module replaces the inner functions that the public ones call to load: Keras looks those up
at each call. A `ContextVar` contains the open `calls_to` blocks of a context; the original functions are restored when
the last block ends.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import keras
from keras.src.backend.common import global_state
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib

from shardload.keras_bridge.hub_imports import HUB, hub_patched
from shardload.keras_bridge.patches import Patches, replacing
from shardload.keras_bridge.recording import GLOBAL_GENERATOR, NAMES, random_states
from shardload.keras_bridge.variables import current_value, restore_value

_CallKind = Literal["model", "weights", "preset", "layer", "legacy"]


@dataclass(frozen=True, slots=True, eq=False)
class EntryCall:
    """A call of a loading function of Keras or KerasHub, which a handler of `calls_to` carries out in its place."""

    kind: _CallKind
    """What it loads: ``model``, ``weights``, ``preset``, ``layer`` (a tokenizer: no weights), ``legacy`` (Keras 2)."""
    text: str
    """The call as a program would write it: ``GemmaCausalLM.from_preset('./gemma')``."""
    original: Callable[[], Any] = field(repr=False)
    """Function that makes the call as Keras would without shardload, and returns its result."""
    arguments: dict[str, Any] = field(repr=False)
    """Arguments of the call by name, including defaults; those of ``preset`` calls also have KerasHub's ``loader``."""


_Handler = Callable[[EntryCall], Any]
"""A function that loads what an `EntryCall` asks for, and returns what the function of Keras would return."""


@dataclass(slots=True, eq=False)
class Interception:
    """A `calls_to` block: while it is open, loading functions of Keras and KerasHub call its handler."""

    handler: _Handler
    is_open: bool = True
    """False once the block has ended; a thread that was started in it may still refer to it."""


_open: ContextVar[tuple[Interception, ...]] = ContextVar("shardload_entry_points", default=())
"""The `calls_to` blocks around the current code, outermost first.

A thread or task may get a copy of this tuple and outlive a block in it: blocks whose ``is_open`` is false are ignored.
"""


@contextmanager
def calls_to(handler: _Handler) -> Iterator[None]:
    """Inside the block, loading functions of Keras and KerasHub call ``handler``; of nested blocks, the inner one."""
    block = Interception(handler)
    # Without a token: a generator that has the block open may be closed in another context, where reset() would raise.
    _open.set((*_open.get(), block))
    try:
        with _KERAS_PATCHES.applied(), hub_patched(_HUB_PATCHES):
            yield
    finally:
        # A task or thread that outlives the block still has it in its copy of the context.
        block.is_open = False
        _open.set(tuple(found for found in _open.get() if found is not block))


@contextmanager
def plain_keras() -> Iterator[None]:
    """Inside the block, loading functions run as Keras wrote them, even if a `calls_to` block is around it."""
    before = _open.get()
    _open.set(())
    try:
        yield
    finally:
        _open.set(before)


def handlers() -> list[_Handler]:
    """Return the handlers of the `calls_to` blocks around the current code, innermost first."""
    return [block.handler for block in reversed(_open.get()) if block.is_open]


def _handler() -> _Handler | None:
    return next(iter(handlers()), None)


# ---- Keras ---------------------------------------------------------------------------------------


def _through(
    kind: _CallKind, text: Callable[[dict[str, Any]], str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a loading function of Keras: its calls inside a `calls_to` block go to the handler.

    The handler gets an `EntryCall` of this ``kind``. ``text`` is a function from the arguments of the call, by name, to
    the code that messages show for it: ``keras.saving.load_model('a.keras')``. Outside of blocks, Keras' function runs.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            handler = _handler()
            if handler is None:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            found = dict(bound.arguments)
            return handler(EntryCall(kind, text(found), lambda: original(*args, **kwargs), found))

        return call

    return wrap


def _weights_of_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Keras' ``load_weights``: inside `calls_to`, a call for an Orbax checkpoint (a folder) goes to the handler.

    Calls for files reach inner functions of Keras, such as ``load_weights_only``, which are wrapped themselves.
    """
    intercepted = _through("weights", _weights_text)(original)

    @functools.wraps(original)
    def load_weights(model: Any, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
        # Files of these formats reach a function that is intercepted itself; other arguments are Keras' to refuse.
        has_own = str(filepath).endswith((".keras", ".weights.json", ".h5", ".hdf5"))
        function = original if has_own or kwargs or not saving_api.is_orbax_checkpoint(filepath) else intercepted
        return function(model, filepath, skip_mismatch=skip_mismatch, **kwargs)

    return load_weights


def _model_text(arguments: dict[str, Any]) -> str:
    return f"keras.saving.load_model({_path_text(arguments['filepath'])})"


def _weights_text(arguments: dict[str, Any]) -> str:
    return f"{type(arguments['model']).__name__}.load_weights({_path_text(arguments['filepath'])})"


def _legacy_text(arguments: dict[str, Any]) -> str:
    return f"{type(arguments['model']).__name__}.load_weights({getattr(arguments['group'].file, 'filename', '')!r})"


def _path_text(path: Any) -> str:
    return repr(os.fspath(path)) if isinstance(path, str | os.PathLike) else f"<{type(path).__name__}>"


_KERAS_PATCHES = Patches(
    lambda: [
        (saving_lib, "load_model", _through("model", _model_text)),
        (saving_api, "_load_model_from_orbax_checkpoint", _through("model", _model_text)),
        (saving_lib, "load_weights_only", _through("weights", _weights_text)),
        # `keras.Model.load_weights` looks it up in saving_api, programs in keras.saving.
        (saving_api, "load_weights", _weights_of_step),
        (keras.saving, "load_weights", _weights_of_step),
        (legacy_h5_format, "load_model_from_hdf5", _through("legacy", _model_text)),
        (legacy_h5_format, "load_weights_from_hdf5_group", _through("legacy", _legacy_text)),
        (legacy_h5_format, "load_weights_from_hdf5_group_by_name", _through("legacy", _legacy_text)),
    ]
)


def model_from_config(config_json: str, arguments: dict[str, Any]) -> Any:
    """Build a model from the JSON text of its configuration, as Keras' ``load_model`` with these ``arguments`` does."""
    options = {name: arguments[name] for name in ("custom_objects", "compile", "safe_mode")}
    return saving_lib._model_from_config(config_json, **options)


def saved_config(path: Path) -> str | None:
    """Return the JSON text of the model's configuration in an archive or a folder; ``None`` for Orbax checkpoints."""
    name = saving_lib._CONFIG_FILENAME
    if path.is_dir():
        return (path / name).read_text(encoding="utf-8") if (path / name).is_file() else None
    with zipfile.ZipFile(path) as archive:
        saving_lib._reject_zip_extract_bomb(archive)
        return str(saving_lib._safe_zip_read(archive, name), "utf-8")


def step_of(path: Path) -> Path | None:
    """Return the folder of the step that Keras would load from ``path``; ``None`` if that is no Orbax checkpoint."""
    if not path.is_dir() or not saving_api.is_orbax_checkpoint(path):
        return None
    # Keras accepts the folder of one step, or the root that contains steps by number.
    has_steps = any(entry.name.isdigit() and entry.is_dir() for entry in path.iterdir())
    return Path(saving_api.find_latest_orbax_checkpoint(path)) if has_steps else path


# ---- KerasHub ------------------------------------------------------------------------------------


_MODULES = ("models.backbone", "models.task", "models.preprocessor", "tokenizers.tokenizer")
_CONVERTERS = ("image_converter", "audio_converter", "video_converter")
_LOADS: dict[str, _CallKind] = {"load_task": "preset", "load_backbone": "preset"}
_LOADS |= dict.fromkeys(("load_preprocessor", "load_tokenizer", *(f"load_{name}" for name in _CONVERTERS)), "layer")


@replacing
def _loaders(original: Any, preset: Any) -> Any:
    loader = original(preset)
    if _handler() is not None:
        # On the instance, so that loaders of other contexts stay as they are.
        for name, kind in _LOADS.items():
            setattr(loader, name, _of_preset(loader, kind, getattr(loader, name)))
    return loader


# Each of these modules has imported the function by name, so each has its own reference to replace.
_HUB_PATCHES = Patches(
    lambda: [
        (module, "get_preset_loader", _loaders)
        for name in (*_MODULES, *(f"layers.preprocessing.{name}" for name in _CONVERTERS))
        if hasattr(module := sys.modules.get(f"{HUB}.src.{name}"), "get_preset_loader")
    ]
)


def _of_preset(loader: Any, kind: _CallKind, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        handler = _handler()
        if handler is None:
            return method(cls, *args, **kwargs)
        text = f"{cls.__name__}.from_preset({loader.preset!r})"
        found = {"loader": loader, "cls": cls, "load_weights": True, "kwargs": kwargs}
        if kind == "preset":
            found["load_weights"] = kwargs.get("load_weights", args[0] if args else True)
        return handler(EntryCall(kind, text, lambda: method(cls, *args, **kwargs), found))

    return load


@dataclass(frozen=True, slots=True, eq=False)
class _Converter:
    """Replaces KerasHub's ``convert_*`` module: passes the model to ``collect``, instead of copying weights."""

    module: Any
    """The module of KerasHub; everything but the copying of weights is still done by it."""
    collect: Callable[[str, Any], None]
    """Function that gets ``"backbone"`` or ``"head"``, and the model that the module would have filled with weights."""

    def convert_weights(self, backbone: Any, loader: Any, config: Any) -> None:
        """Pass the backbone to ``collect``, which notes it for shardload to fill; copy no weights, unlike KerasHub."""
        self.collect("backbone", backbone)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return (lambda task, loader, config: self.collect("head", task)) if name == "convert_head" else found


@contextmanager
def conversions_to(loader: Any, collect: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside the block, a preset loader fills no weights, but calls ``collect``, so that shardload can fill them.

    The arguments of ``collect`` are ``"backbone"`` or ``"head"``, and the model that the loader would have filled.
    """
    before = getattr(loader, "converter", None)
    if before is not None:
        loader.converter = _Converter(before, collect)
    try:
        yield
    finally:
        if before is not None:
            loader.converter = before


# ---- what a failed attempt leaves behind ---------------------------------------------------------


@contextmanager
def rewound_on_error() -> Iterator[None]:
    """If the block fails, restore Keras' name counters and all random states, so that a retry builds an equal model."""
    # Auto-generated names count on: in a second attempt, a first Dense layer would be called dense_1.
    names = copy.copy(global_state.get_global_attribute(NAMES))
    generator = global_state.get_global_attribute(GLOBAL_GENERATOR)
    drawn = None if generator is None else current_value(generator.state)
    # Layers without a seed draw one from Python's generator; what users define may draw from NumPy's.
    restore = random_states()
    try:
        yield
    except BaseException:
        global_state.set_global_attribute(NAMES, names)
        restore()
        if generator is not None:
            restore_value(generator.state, drawn, None)
        raise
