"""Refuse to write two variables to one tensor if training has given them different values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from shardload.converting.adapters import whole_value
from shardload.converting.computing import StoredValue
from shardload.converting.plans import NoPlaceError
from shardload.converting.source import ModelValues, Source


def require_equal(source: Source, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raise if the variables of a pair differ in ``source``; ``pairs`` are those that one tensor of the target has.

    All processes of a `jax.distributed` run must call it together, as it compares arrays that they share.
    """
    for first, second in pairs:
        if not _are_equal(source, source.values[id(first)], source.values[id(second)]):
            raise NoPlaceError(
                f"Cannot write {type(source.backbone).__name__} for Hugging Face: {first.path!r} and {second.path!r} "
                "have different values, expected equal ones, because they are one tensor there"
            )


def _are_equal(source: Source, one: StoredValue, other: StoredValue) -> bool:
    if one.view is not None and one.tensor is other.tensor and one.view == other.view:
        return True
    if one.live is not None and other.live is not None:
        return bool(jax.jit(lambda a, b: (a == b).all())(one.live(), other.live()))
    if None in (one.view or one.step, other.view or other.step):
        return np.array_equal(whole_value(source, one.variable), whole_value(source, other.variable))
    rows = ModelValues(source, {"one": one, "other": other})
    return all(np.array_equal(rows.rows("one", *ends), rows.rows("other", *ends)) for ends in rows.ranges("one"))
