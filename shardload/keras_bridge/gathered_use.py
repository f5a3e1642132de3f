"""Store weights split and gather them for use, as in fully sharded data parallelism.

Left to itself, XLA often moves the activations instead of the weights, which transfers far more bytes. So if weights
are stored split over more mesh axes than the model computes with, the model's ``stateless_call`` runs on gathered
values, which are not kept for the backward pass::

    value, split as stored ─► gathered for use ─► the model            forward; gathered again for the backward pass
    gradient, split as stored ◄─────────────────── its gradient

On CPU and GPU, a barrier keeps XLA from merging the two gathers into one. It also keeps XLA from fusing operations
across it, so everything that the backward pass reads is written to memory. On TPU there is no barrier: XLA gathers
twice even so, and needs at most a seventh of the temporary memory that a barrier would take (design note 0022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from keras.src import backend

from shardload.keras_bridge import Model, Variable

_REARRANGING = frozenset({"convert_element_type", "copy", "expand_dims", "name", "reshape", "squeeze", "transpose"})
"""Primitives of JAX whose results have the elements of their operand."""


class Use(NamedTuple):
    """The two shardings of one variable: ``used`` when the model computes with it, ``stored`` at other times."""

    used: jax.sharding.NamedSharding
    stored: jax.sharding.NamedSharding
    dtype: str = ""
    """The dtype in which it is gathered, if the model only reads it in that one; empty for its own."""


def gathering(model: Model, uses: Mapping[int, Use], call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``call``, a model's ``stateless_call``, so that it first gathers the weights whose ``id`` is in ``uses``."""

    def stateless_call(trainable: Sequence[Any], other: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        # `jax.checkpoint` takes arrays only, so flags and None go around it and are put back inside.
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

        def run(trainable: list[Any], other: list[Any], arrays: dict[int, Any]) -> Any:
            filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, filled)
            trainable = gathered(model.trainable_variables, trainable, uses)
            other = gathered(model.non_trainable_variables, other, uses)
            found = call(trainable, other, *args, **kwargs)
            return found, jax.tree.map(backend.get_keras_mask, found[0])

        # prevent_cse is the barrier that the docstring of this module describes.
        platform = next((str(use.used.mesh.devices.flat[0].platform) for use in uses.values()), None)
        step = jax.checkpoint(run, policy=keep_all_but_gathers(uses, model.variables), prevent_cse=platform != "tpu")
        found, masks = step(list(trainable), list(other), arrays)
        return _masked(found[0], masks), *found[1:]

    return stateless_call


def _masked(outputs: Any, masks: Any) -> Any:
    """Attach Keras' ``masks`` (which time steps are padding) to the outputs, which lose them by tracing."""
    found = jax.tree.leaves(masks, is_leaf=lambda leaf: leaf is None)
    for output, mask in zip(jax.tree.leaves(outputs), found, strict=True):
        if mask is not None:
            backend.set_keras_mask(output, mask)
    return outputs


def gathered(variables: Sequence[Variable], values: Sequence[Any], uses: Mapping[int, Use]) -> list[Any]:
    """Return the values of variables, those in ``uses`` (by ``id``) as the model computes with them."""
    return [
        _gather(value, uses[id(variable)]) if id(variable) in uses else value
        for variable, value in zip(variables, values, strict=True)
    ]


def keep_all_but_gathers(uses: Mapping[int, Use], variables: Iterable[Variable]) -> Callable[..., bool]:
    """Return a policy of `jax.checkpoint`: the backward pass gathers weights again, and finds all else kept.

    Nor is it to find weights in another dtype or order. A policy knows primitives and shapes, not what they are for, so
    weights are told by their number of elements; of an activation with as many, its value before the cast is kept.
    """
    used = {use.used for use in uses.values()}
    sizes = {math.prod(variable.shape) for variable in variables if id(variable) in uses}

    # A gather is a constraint. A name for its result would not do: JAX would keep what it gives the name to.
    def policy(primitive: Any, *operands: Any, **params: Any) -> bool:
        if primitive.name == "sharding_constraint":
            return params["sharding"] not in used
        return not (primitive.name in _REARRANGING and math.prod(operands[0].shape) in sizes)

    return policy


def _gather(value: Any, use: Use) -> Any:
    # A gradient rule of its own: JAX's would lay out the gradient like the gathered value, whole on every device.
    def forward(value: Any) -> tuple[Any, None]:
        # A cast before the gather gives the same values as one after it, and half of the bytes.
        return jax.lax.with_sharding_constraint(value.astype(use.dtype or value.dtype), use.used), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        # First where the value is used: a split by the storage would be carried into the backward pass, in a loop for
        # every step of it.
        gradient = jax.lax.with_sharding_constraint(gradient, use.used)
        return (jax.lax.with_sharding_constraint(gradient, use.stored).astype(value.dtype),)

    gather = jax.custom_vjp(lambda value: forward(value)[0])
    gather.defvjp(forward, backward)
    return gather(value)
