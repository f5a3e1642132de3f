"""Look up classes of KerasHub, patch it and time its import, but never import it: that takes seconds."""

from __future__ import annotations

import importlib.abc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardload.keras_bridge.patches import Patches

HUB = "keras_hub"


def backbone_of(model: Any) -> Any:
    """Return the backbone of a KerasHub task; any other model itself, even if it has an attribute ``backbone``."""
    task = getattr(sys.modules.get(f"{HUB}.src.models.task"), "Task", None)
    found = model
    while getattr(type(found), "is_its_model", False):  # what `plain_model` unwraps
        found = found.model
    return getattr(found, "backbone", model) if task is not None and isinstance(found, task) else model


def held_backbone(model: Any) -> str | None:
    """Return the name of the attribute in which a user's model has a KerasHub backbone; ``None`` if in none."""
    backbone = getattr(sys.modules.get(f"{HUB}.src.models.backbone"), "Backbone", None)
    if backbone is None or backbone_of(model) is not model:
        return None
    return next((name for name, value in vars(model).items() if isinstance(value, backbone)), None)


_imports_s: list[float] = []


@contextmanager
def timed() -> Iterator[None]:
    """Count the seconds of the block as spent on importing KerasHub, unless it was imported before."""
    if HUB in sys.modules:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        _imports_s.append(time.perf_counter() - began)


def imports_s() -> float:
    """Return the seconds that this process has spent importing KerasHub, and TensorFlow with it."""
    return sum(_imports_s)


@contextmanager
def hub_patched(patches: Patches) -> Iterator[None]:
    """Inside the block, replace attributes of KerasHub by ``patches``: at once, or as soon as KerasHub is imported."""
    with ExitStack() as stack:
        watcher = _HubWatcher(stack, patches)
        # First in the list, because the search ends at the first finder that finds the module.
        if not watcher.patched():
            sys.meta_path.insert(0, watcher)
            stack.callback(sys.meta_path.remove, watcher)
        yield


class _HubWatcher(importlib.abc.MetaPathFinder):
    """An import hook that finds no module itself; it only checks on each import whether KerasHub can be patched now."""

    def __init__(self, stack: ExitStack, patches: Patches) -> None:
        self._stack, self._patches, self._done = stack, patches, False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Patch KerasHub if it is imported by now; return ``None``, so that another finder does the import."""
        if fullname.startswith(f"{HUB}.") and not self._done:
            self.patched()

    def patched(self) -> bool:
        """Patch KerasHub if it is imported; return whether it is patched now."""
        # A module is in sys.modules before its code has run, so ask for the class that it defines.
        modules = [sys.modules.get(f"{HUB}.src.models.{name}") for name in ("backbone", "task")]
        if all(hasattr(module, cls) for module, cls in zip(modules, ("Backbone", "Task"), strict=True)):
            self._done = True
            self._stack.enter_context(self._patches.applied())
        return self._done
