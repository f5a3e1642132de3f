"""Temporary replacements for attributes of third-party classes and modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Patch = tuple[Any, str, Callable[[Any], Any]]
"""A class (or module), the attribute to replace, and a function from the original to its replacement."""


class Patches:
    """Attributes of classes and modules, replaced while at least one block is open in any thread."""

    def __init__(self, patches: Callable[[], Iterable[Patch]]) -> None:
        # A function, called when a block opens: the modules that it patches may not be imported yet.
        self._patches = patches
        self._originals: list[tuple[Any, str, Any]] = []
        self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace on entry of the first block, restore on exit of the last."""
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
            # Not getattr, which would bind a classmethod.
            original = vars(cls)[name]
            self._originals.append((cls, name, original))
            setattr(cls, name, wrap(original))

    def _restore(self) -> None:
        while self._originals:
            setattr(*self._originals.pop())
