"""Lay out the inputs and outputs of single layers of a model, where XLA would choose another layout by itself.

Between products with weights, activations can be split along their sequence (Megatron's sequence parallelism). XLA
splits them so if it is told the layouts at both ends of each layer that has weights of its own::

    split along the sequence ─► whole ─► kernel, split by columns ─► split by features
    split by features ─► kernel, split by rows ─► added up: whole ─► split along the sequence

A distribution of Keras has layouts for the outputs of layers only (``get_tensor_layout``), and one for each layer, so
the calls of these layers are wrapped. The same wraps mark calls in a traced program, where a search finds their arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import keras
from jax.ad_checkpoint import checkpoint_name

from shardload.keras_bridge import Model
from shardload.keras_bridge.variables import numbered

_INPUT, _OUTPUT = "shardload input of ", "shardload output of "
_ATTRIBUTE = "_shardload_layouts"


class CallLayouts(NamedTuple):
    """The layouts of arrays of one rank at one end of a layer's calls, one after the other."""

    layer: str
    """The path of the layer; if several layers share a path, the second has ``#2`` appended, and so on."""
    is_output: bool
    """Whether the arrays are results of the layer, or its first arguments."""
    specs: tuple[tuple[tuple[str, ...], ...], ...]
    """For each layout, the mesh axes that split each dim. Partial sums are added up for the first of two layouts."""

    @classmethod
    def from_json(cls, data: Any) -> CallLayouts:
        """Return the layouts from their JSON list in a saved plan."""
        layer, is_output, specs = data
        return cls(str(layer), bool(is_output), tuple(tuple(map(tuple, spec)) for spec in specs))

    @property
    def rank(self) -> int:
        """The number of dims of the arrays."""
        return len(self.specs[0])


def named_layers(model: Model) -> dict[str, keras.layers.Layer]:
    """Return the layers of a model that have weights of their own, by path."""
    found = [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not isinstance(layer, keras.Model) and (layer._trainable_variables or layer._non_trainable_variables)
    ]
    return dict(zip(numbered(layer.path or layer.name for layer in found), found, strict=True))


def lay_out_calls(
    model: Model,
    layouts: Sequence[CallLayouts],
    sharding: Callable[[Any], jax.sharding.Sharding],
    *,
    products_kept: bool = False,
) -> None:
    """Let the calls of layers lay out their inputs and outputs; ``sharding`` makes a JAX sharding of a layout.

    ``products_kept`` says whether blocks keep products with weights for the backward pass, and recompute the rest.
    """
    layers = named_layers(model)
    by_layer: dict[str, dict[tuple[bool, int], list[Any]]] = {}
    for one in layouts:
        by_layer.setdefault(one.layer, {})[one.is_output, one.rank] = [sharding(spec) for spec in one.specs]
    for name, shardings in by_layer.items():
        if (layer := layers.get(name)) is not None:
            _wrap(layer, functools.partial(_laid_out, shardings, products_kept))


def undo_layouts(model: Model) -> None:
    """Undo `lay_out_calls`."""
    for layer in model._flatten_layers():
        if layer.__dict__.pop(_ATTRIBUTE, None) is not None:
            layer.__dict__.pop("call", None)


@contextmanager
def laid_out(
    model: Model,
    layouts: Sequence[CallLayouts],
    sharding: Callable[[Any], jax.sharding.Sharding],
    *,
    products_kept: bool = False,
) -> Iterator[None]:
    """Inside the block, calls of layers lay out their inputs and outputs as after `lay_out_calls`."""
    lay_out_calls(model, layouts, sharding, products_kept=products_kept)
    try:
        yield
    finally:
        undo_layouts(model)


@contextmanager
def marked_calls(model: Model) -> Iterator[None]:
    """Inside the block, a traced program has a name for the first argument and the result of each layer's call."""
    layers = named_layers(model)
    before = {name: layer.__dict__.get("call") for name, layer in layers.items()}
    for name, layer in layers.items():
        _wrap(layer, functools.partial(_marked, name))
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.__dict__.pop("call", None)
            layer.__dict__.pop(_ATTRIBUTE, None)
            if before[name] is not None:
                layer.__dict__["call"] = before[name]


def call_of_name(name: str) -> tuple[str, bool] | None:
    """Return the layer that a name of `marked_calls` stands for, and whether it is the layer's output."""
    for prefix in (_INPUT, _OUTPUT):
        if name.startswith(prefix):
            return name.removeprefix(prefix), prefix == _OUTPUT
    return None


def _wrap(layer: keras.layers.Layer, change: Callable[[Any, bool], Any]) -> None:
    """Let ``change`` have the first argument and the result of each call of a layer."""
    call = layer.call

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_changed(args[0], change, is_output=False), *args[1:])
        return _changed(call(*args, **kwargs), change, is_output=True)

    # Into __dict__, because Keras tracks attributes that setattr sets.
    layer.__dict__["call"] = wrapped
    layer.__dict__[_ATTRIBUTE] = True


def _changed(value: Any, change: Callable[[Any, bool], Any], *, is_output: bool) -> Any:
    # Values outside of a trace stay where they are.
    if not isinstance(value, jax.core.Tracer):
        return value
    made, mask = change(value, is_output), keras.src.backend.get_keras_mask(value)
    if mask is not None and made is not value:
        keras.src.backend.set_keras_mask(made, mask)
    return made


def _marked(name: str, value: Any, is_output: bool) -> Any:
    return checkpoint_name(value, (_OUTPUT if is_output else _INPUT) + name)


def _laid_out(
    shardings: Mapping[tuple[bool, int], Sequence[Any]], products_kept: bool, value: Any, is_output: bool
) -> Any:
    on_cpu = False
    for sharding in shardings.get((is_output, value.ndim), ()):
        # The last batch of an epoch, or a prompt, may have another size: XLA chooses where a layout does not divide it.
        if not _divides(sharding, value.shape):
            return value
        value = jax.lax.with_sharding_constraint(value, sharding)
        on_cpu = next(iter(sharding.device_set)).platform == "cpu"
    # XLA for CPU would cut the sum of a product where it is read, and so keep the whole sum for the backward pass.
    return jax.lax.optimization_barrier(value) if products_kept and is_output and on_cpu else value


def _divides(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
    """Whether the parts of an array of this shape are all equal under a sharding."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
