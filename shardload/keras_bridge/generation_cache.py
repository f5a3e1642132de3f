"""The KV cache that KerasHub's models keep while they generate, found by letting them build it on shapes.

A model builds its cache in ``_build_cache(token_ids, …)`` and fills it in ``call_with_cache(token_ids, cache, …)``.
Here the second is replaced by a function that notes what it is given, so no weight is used, and nothing is allocated::

    _build_cache(2 x 512 token ids) ─► zeros(2, layers, 2, 512, heads, head_dim) ─► call_with_cache: noted, and over
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from shardload.errors import UnsupportedError, public_name

_FILL = "call_with_cache"


@dataclass(frozen=True, slots=True)
class CachedArray:
    """One array of a KV cache, and which of its dims are which."""

    shape: tuple[int, ...]
    itemsize: int
    rows: int | None
    """The dim of the sequences that are generated together."""
    heads: int | None
    """The dim of the key-value heads; ``None`` for an array that does not grow with the tokens, such as a state."""


def cached_arrays(model: Any, *, rows: int, tokens: int) -> tuple[CachedArray, ...]:
    """Return the arrays of a model's KV cache for ``rows`` sequences of ``tokens`` tokens; the model needs no values.

    Raises:
        UnsupportedError: When the cache of the model's class cannot be told; the message is a clause, the reason.
    """
    name = type(model).__name__
    if not hasattr(model, "_build_cache"):
        raise UnsupportedError(f"{name} does not generate text from a KV cache")
    if not hasattr(model, _FILL) or next(iter(inspect.signature(model._build_cache).parameters)) != "token_ids":
        raise UnsupportedError(f"the cache of {name} also has keys and values of an encoder")
    try:
        # What grows with the rows is their dim; likewise for the tokens.
        found, wider, longer = (_built(model, *of) for of in ((rows, tokens), (rows + 1, tokens), (rows, tokens + 1)))
    # Any exception: this is KerasHub's code, and may need inputs that are not here.
    except Exception as error:
        raise UnsupportedError(f"{name} builds its cache from more than token ids ({public_name(error)})") from error
    return tuple(
        CachedArray(one.shape, one.dtype.itemsize, _changed(one, other), _heads(one, _changed(one, long)))
        for one, other, long in zip(found, wider, longer, strict=True)
    )


def _built(model: Any, rows: int, tokens: int) -> list[Any]:
    others = dict.fromkeys(list(inspect.signature(model._build_cache).parameters)[1:])
    seen: list[Any] = []

    def build(token_ids: Any) -> list[Any]:
        with _noting(model, seen), _stopped():
            model._build_cache(token_ids, **others)
        leaves: list[Any] = jax.tree.leaves(seen)
        return leaves

    return list(jax.eval_shape(build, jax.ShapeDtypeStruct((rows, tokens), "int32")))


class _Noted(Exception):  # noqa: N818 - no error
    """Ends ``_build_cache`` once it has made the cache."""


@contextmanager
def _stopped() -> Iterator[None]:
    try:
        yield
    except _Noted:
        return
    raise UnsupportedError("call_with_cache was not called")


@contextmanager
def _noting(model: Any, seen: list[Any]) -> Iterator[None]:
    signature = inspect.signature(getattr(model, _FILL))

    def noted(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        seen.extend(value for name, value in given.items() if "cache" in name and "index" not in name)
        raise _Noted

    # In its dict: Keras would track an attribute that is set.
    vars(model)[_FILL] = noted
    try:
        yield
    finally:
        del vars(model)[_FILL]


def _changed(one: Any, other: Any) -> int | None:
    return next((d for d, (n, m) in enumerate(zip(one.shape, other.shape, strict=True)) if n != m), None)


def _heads(array: Any, tokens: int | None) -> int | None:
    """Return the dim of the heads: the cache ends in (tokens, heads, head_dim), or in (heads, tokens, head_dim)."""
    last = len(array.shape) - 1
    return {last - 2: last - 1, last - 1: last - 2}.get(-1 if tokens is None else tokens)
