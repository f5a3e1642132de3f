"""KerasHub's classes of preprocessors, and a preprocessor that is made when a task first uses it.

Keras tracks every string of a vocabulary: Gemma's 262,144 take a second, which a load should not spend if nobody
generates text. KerasHub returns a task's preprocessor as ``getattr(task, "_preprocessor", None)``. If the task has no
such attribute, Python looks it up on the class, where `_Deferred` makes it. Tasks that have one are not affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardload.hub.kerashub import classes_for, keras_hub
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_records import record_of

_ATTRIBUTE = "_preprocessor"


def defer_preprocessor(task: Any, make: Callable[[], Any]) -> None:
    """Let ``make`` return the preprocessor of a task when it is first used; setting one discards ``make``."""
    cls = keras_hub().models.Task
    if vars(cls).get(_ATTRIBUTE) is None:
        setattr(cls, _ATTRIBUTE, _Deferred())
    # The task's constructor set its own attribute to None: without it, lookups reach the class.
    record_of(task).make_preprocessor = make
    vars(task).pop(_ATTRIBUTE, None)


def text_classes(model: Any) -> tuple[Any, Any]:
    """Return KerasHub's classes of preprocessor and tokenizer for a task, or for the generating task of a backbone.

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
    """Return the class with the shortest name: variants have longer ones."""
    return min(classes, key=lambda cls: (len(cls.__name__), cls.__name__), default=None)


def reads_tokenizer(cls: Any, *, sentencepiece: bool) -> bool:
    """Whether a preprocessor's tokenizer is of this kind: SentencePiece, or byte pairs."""
    kinds = keras_hub().tokenizers
    kind = kinds.SentencePieceTokenizer if sentencepiece else kinds.BytePairTokenizer
    return issubclass(cls.tokenizer_cls, kind)


class _Deferred:
    """The attribute of a class that makes what an instance lacks."""

    def __init__(self) -> None:
        # Reentrant: what makes a preprocessor may ask the task for it, and must not wait for itself.
        self._lock = threading.RLock()

    def __get__(self, task: Any, owner: type) -> Any:
        if task is None:  # looked up on the class itself, which has none
            raise AttributeError(_ATTRIBUTE)
        with self._lock:
            if vars(task).get(_ATTRIBUTE) is None:  # another thread may have made it meanwhile
                task.preprocessor = self._made(task)
        return vars(task)[_ATTRIBUTE]

    def _made(self, task: Any) -> Any:
        record = record_of(task)
        make, record.make_preprocessor = record.make_preprocessor, None
        if make is None:
            raise AttributeError(_ATTRIBUTE)
        try:
            return make()
        except BaseException:  # Ctrl-C, mostly: the next use tries again
            record.make_preprocessor = make
            raise
