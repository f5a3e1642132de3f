"""Warn at a line of the user's program: the line that called shardload, directly or through Keras.

train.py:12           model.fit(…)                 ◄── the warning names this line
keras/…               fit, CallbackList
shardload/callbacks   OrbaxCheckpoint
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_INSIDE = frozenset({"shardload", "keras", "keras_hub", "contextlib", "functools"})
"""Packages whose code a warning never points to: shardload, Keras, and helper modules of Python."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the file and line of the innermost caller that is neither shardload nor Keras."""
    # For `warnings.warn`, level 1 is this function and level 2 its caller, which is frame 1 of the stack.
    level, frame = 2, sys._getframe(1)
    while _is_inside(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INSIDE
