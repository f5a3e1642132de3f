"""Slots for an optimizer that never trained, where the checkpoint holds their values.

``compile`` makes an optimizer without slots; Keras makes them in the first step of training, or when it restores a
whole model. A load that fills a compiled model restores it as well: the slots are built, without values, before
names are mapped, and taken away again when nothing is loaded after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardload import _keras
from shardload.manifest import Manifest

_STORED = ("optimizer/vars/", "optimizer_variables/")
"""Where Keras puts the variables of a model's optimizer: in every format of its own, and in a training step."""


@contextmanager
def slots_as_stored(model: Any, manifest: Manifest) -> Iterator[None]:
    """While open, ``model``'s optimizer has its slots if the checkpoint has them; they stay unless the block raises.

    Nothing happens where the optimizer has slots already, or is of another kind than the one that was saved: by its
    class where an archive says it, by the number of its variables otherwise, which is what Keras goes by.

    Args:
        model: A built model, compiled or not, abstract or not.
        manifest: Any format.
    """
    stored = sum(name.startswith(_STORED) for name in manifest.tensors)
    optimizer = getattr(model, "optimizer", None)
    if not stored or optimizer is None or optimizer.built or _other_kind(optimizer, manifest):
        yield
        return
    before = _keras.OptimizerState.of(optimizer)
    try:
        with _keras.record_variables():
            optimizer.build(model.trainable_variables)
        if len(optimizer.variables) != stored:
            before.restore()
        yield
    except BaseException:
        before.restore()
        raise


def _other_kind(optimizer: Any, manifest: Manifest) -> bool:
    """Whether an archive says that its optimizer is of another class: SGD's momentum would fit RMSprop's velocity."""
    compiled = manifest.config.get("compile_config")
    saved = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    name, inner = _class_name(saved), getattr(optimizer, "inner_optimizer", optimizer)
    if name == "LossScaleOptimizer":  # `compile` puts it around others for half precision, and the archive is silent
        config = saved.get("config") if isinstance(saved, Mapping) else None
        name = _class_name(config.get("inner_optimizer") if isinstance(config, Mapping) else None)
    return name is not None and name != type(inner).__name__


def _class_name(described: object) -> str | None:
    name = described.get("class_name") if isinstance(described, Mapping) else None
    return name if isinstance(name, str) else None
