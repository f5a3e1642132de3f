"""Recompute activations in the backward pass, instead of keeping them, in the layers of a model that say so.

The call of such a layer runs under `jax.checkpoint`, as a pure function of the values of its variables::

    arguments, masks, values of variables ─► gather what is stored split ─► call ─► outputs, updates, losses
                                             └───── once more in the backward pass ─────┘

Keras' own `RematScope` acts while a layer is created, knows no policy, and traces every argument, so that layers with a
``training`` flag fail under it (Keras 3.15: those of Llama, Mistral, GPT-2 and BERT in KerasHub). Updates of variables,
as by seeds of dropout, and losses that layers add leave its trace as tracers. Here, both are results.

`jax.checkpoint` may not be nested with `gathered_use.gathering`, whose policy would keep what a layer recomputes. So a
layer that recomputes gathers its own weights, and so does every other layer then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import jax
import keras
from keras.src import backend

from shardload.keras_bridge import Model
from shardload.keras_bridge.gathered_use import Use, gathered, keep_all_but_gathers
from shardload.keras_bridge.variables import value_of

Recompute = Literal["matmuls", "full"]
"""What a layer recomputes: ``full``: all that it computes; ``matmuls``: all but products with weights."""

_POLICIES: Mapping[str, Callable[..., Any] | None] = {
    "full": None,
    # Products of activations with each other, as in attention, have batch dims.
    "matmuls": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
_ATTRIBUTE = "_shardload_recomputes"


def block_kinds(model: Model) -> dict[str, list[keras.layers.Layer]]:
    """Return the layers of a model that it repeats and that have layers in them, by the name of their class.

    Usually these are the blocks of a transformer. Of layers within each other, the outermost count.
    """
    found: dict[str, list[keras.layers.Layer]] = {}
    for layer in _layers_below(model):
        found.setdefault(type(layer).__name__, []).append(layer)
    repeated = {kind: layers for kind, layers in found.items() if len(layers) > 1 and any(map(_inner, layers))}
    inside = {id(one) for layers in repeated.values() for layer in layers for one in _layers_below(layer)}
    outer = {kind: [layer for layer in layers if id(layer) not in inside] for kind, layers in repeated.items()}
    return {kind: layers for kind, layers in outer.items() if len(layers) > 1}


def _layers_below(layer: Any) -> Iterator[keras.layers.Layer]:
    return (one for one in layer._flatten_layers(include_self=False) if not isinstance(one, keras.Model))


def _inner(layer: keras.layers.Layer) -> bool:
    return any(True for _ in _layers_below(layer))


def install(model: Model, recompute: Mapping[str, Recompute], uses: Mapping[int, Use]) -> None:
    """Let the kinds of layers in ``recompute`` recompute what they say, and gather weights stored split in ``uses``."""
    kinds = block_kinds(model)
    blocks = [(layer, mode) for kind, mode in recompute.items() for layer in kinds.get(kind, ())]
    own = {id(v) for layer, _ in blocks for v in layer.variables}
    owners = [layer for layer in _layers_below(model) if any(id(v) in uses and id(v) not in own for v in _owned(layer))]
    for layer, mode in (*blocks, *((layer, "gathers") for layer in owners)):
        # Into __dict__, because Keras tracks attributes that setattr sets.
        policy = keep_all_but_gathers(uses, layer.variables) if mode == "gathers" else _POLICIES[mode]
        layer.__dict__["call"] = _recomputing(layer, layer.call, policy, uses)
        layer.__dict__[_ATTRIBUTE] = mode


def remove(model: Model) -> None:
    """Undo `install`."""
    for layer in model._flatten_layers():
        if layer.__dict__.pop(_ATTRIBUTE, None) is not None:
            layer.__dict__.pop("call", None)


@contextmanager
def recomputing(model: Model, recompute: Mapping[str, Recompute], uses: Mapping[int, Use]) -> Iterator[None]:
    """Inside the block, layers recompute and gather as after `install`."""
    install(model, recompute, uses)
    try:
        yield
    finally:
        remove(model)


def _owned(layer: keras.layers.Layer) -> list[Any]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _recomputing(
    layer: keras.layers.Layer, call: Callable[..., Any], policy: Callable[..., Any] | None, uses: Mapping[int, Use]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        scope = backend.get_stateless_scope()
        # Without a scope, nothing is differentiated: the model is called on values.
        if scope is None:
            return call(*args, **kwargs)
        # `jax.checkpoint` takes arrays only, so flags and None go around it and are put back inside.
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}
        masks = {i: mask for i, leaf in arrays.items() if (mask := backend.get_keras_mask(leaf)) is not None}
        variables, changed = list(layer.variables), list[Any]()

        def run(values: list[Any], arrays: dict[int, Any], masks: dict[int, Any]) -> Any:
            for i, mask in masks.items():
                backend.set_keras_mask(arrays[i], mask)
            inner_args, inner_kwargs = jax.tree.unflatten(
                structure, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            )
            mapping = list(zip(variables, gathered(variables, values, uses), strict=True))
            with keras.StatelessScope(mapping, collect_losses=scope.collect_losses, initialize_variables=False) as own:
                before = {id(v): own.get_current_value(v) for v in variables}
                outputs = call(*inner_args, **inner_kwargs)
            changed[:] = [v for v in variables if own.get_current_value(v) is not before[id(v)]]
            updates = [own.get_current_value(v) for v in changed]
            return outputs, jax.tree.map(backend.get_keras_mask, outputs), updates, own.losses

        values = [_current(scope, v) for v in variables]
        outputs, output_masks, updates, losses = jax.checkpoint(run, policy=policy)(values, arrays, masks)
        for variable, value in zip(changed, updates, strict=True):
            scope.add_update((variable, value))
        # Through the layer, which knows its losses by their `id`.
        for loss in losses:
            layer.add_loss(loss)
        # Masks are attributes of arrays, which those inside the trace do not pass on.
        for output, mask in zip(
            jax.tree.leaves(outputs), jax.tree.leaves(output_masks, is_leaf=lambda x: x is None), strict=True
        ):
            if mask is not None:
                backend.set_keras_mask(output, mask)
        return outputs

    return recomputed


def _current(scope: Any, variable: Any) -> Any:
    # Not `variable.value`, which is cast to the compute dtype where Keras' mixed precision is in effect.
    found = scope.get_current_value(variable)
    return value_of(variable) if found is None else found
