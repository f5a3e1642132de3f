"""Handle KerasHub's preprocessors that need TensorFlow where it is not installed.

Their constructors raise, although only calls need TensorFlow: a model that was saved with one could not be built.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from shardload.keras_bridge.patches import Patches


def lacks_tensorflow(cls: type) -> bool:
    """Whether a preprocessor's class needs TensorFlow, and KerasHub found none when it was imported."""
    module = sys.modules[cls.__module__]
    return hasattr(module, "assert_tf_installed") and getattr(module, "tf", None) is None


def as_with_tensorflow(cls: type) -> contextlib.AbstractContextManager[None]:
    """Let the constructor of Gemma 3's preprocessor run without TensorFlow, which only its calls use."""
    # The class' module imported the check by name, so it is replaced there.
    module, name = sys.modules[cls.__module__], "assert_tf_installed"
    return Patches(lambda: [(module, name, lambda _: lambda symbol: None)] if hasattr(module, name) else []).applied()


def omit_preprocessor(config: dict[str, Any]) -> None:
    """Remove a task's preprocessor from its serialised configuration, in place, if it cannot be made here."""
    import keras

    inner = config.get("config")
    if isinstance(inner, dict) and isinstance(described := inner.get("preprocessor"), dict):
        cls = keras.saving.get_registered_object(described.get("registered_name"))
        if cls is not None and lacks_tensorflow(cls):
            inner["preprocessor"] = None
