"""Temporary replacements for attributes of third-party classes and modules; some of them make building models faster.

Keras reads the signature of a layer's constructor and methods four times for each layer that it makes, which takes
0.05 ms each: Gemma 3 270M has 330 layers of a dozen classes.

This module imports Keras only when a replacement begins, because code that runs without a model imports it too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Patch = tuple[Any, str, Callable[[Any], Any]]
"""A class (module, object), the attribute to replace, and a function from the original to its replacement."""

_INHERITED = object()


class Patches:
    """Attributes of classes and modules that are replaced while at least one `applied` block is open in any thread."""

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        # A function, called when a block opens: the modules that it patches may not be imported yet.
        self._patches = patches
        self._originals: list[tuple[Any, str, Any]] = []
        self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the attributes when the first block opens, restore them when the last open block ends."""
        with self._lock:
            if self._open == 0:
                self._replace()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                # Blocks of several threads may overlap, so the last one to close restores the originals.
                self._open -= 1
                if self._open == 0:
                    self._restore()

    def _replace(self) -> None:
        for cls, name, wrap in self._patches():
            # Not getattr, which would bind a classmethod; an object may have the attribute from its class alone.
            original = vars(cls).get(name, _INHERITED)
            self._originals.append((cls, name, original))
            setattr(cls, name, wrap(getattr(cls, name) if original is _INHERITED else original))

    def _restore(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def replacing(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Turn ``function(original, *args)`` into what a `Patch` needs: a function from the original to its replacement."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            return function(original, *args, **named)

        return call

    return wrap


def casts_by_astype(kind: type[NDArray[Any]]) -> Patches:
    """Return patches that make functions of NumPy and Keras cast arrays of this class by ``array.astype(dtype)``.

    The functions are ``numpy.asarray(array, dtype)``, ``numpy.array(array, dtype)`` and ``keras.ops.cast``. NumPy
    itself would read the array's memory, and JAX would copy it.
    """

    @replacing
    def cast(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        dtype = args[1] if len(args) > 1 else named.get("dtype")
        if dtype is not None and args and isinstance(args[0], kind):
            return args[0].astype(dtype)
        return original(*args, **named)

    def replaced() -> list[Patch]:
        from keras.src.backend.jax import core

        return [(np, "asarray", cast), (np, "array", cast), (core, "cast", cast)]

    return Patches(replaced)


def reading_signatures_once() -> AbstractContextManager[None]:
    """Inside the block, Keras reads the signature of each function only once, which makes building models faster."""
    return _REMEMBERED.applied()


class _RememberingInspect:
    """A stand-in for the module `inspect` that reads the signature of each function only once, and remembers it."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.signature = _remembered(inspect.signature)
        self.getfullargspec = _remembered(inspect.getfullargspec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _remembered(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[tuple[type, Any], Any] = {}

    def read_once(subject: Any) -> Any:
        # Other callables may have a signature of their own for each instance.
        if type(subject) not in (FunctionType, MethodType):
            return read(subject)
        # A bound method's signature lacks `self`, so it is another one than that of its function.
        key = (type(subject), getattr(subject, "__func__", subject))
        if key not in known:
            known[key] = read(subject)
        return known[key]

    return read_once


_MODULES = ("keras.src.ops.operation", "keras.src.layers.layer")
_REMEMBERED = Patches(lambda: [(importlib.import_module(name), "inspect", _RememberingInspect) for name in _MODULES])
