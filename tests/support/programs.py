"""Compile a model on its mesh, forward or with gradients, and count the collectives in the program."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

_COLLECTIVE = re.compile(
    r"= [^=\n]*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


_REPLICATED = PartitionSpec()


def collectives(program: str) -> dict[str, int]:
    """Instructions in the text of a compiled program, by name."""
    return dict(Counter(_COLLECTIVE.findall(program)))


def forward(model: Any, inputs: Any, *, training: bool = False) -> Any:
    """Compile a forward pass of a model whose values are on a mesh; the inputs are replicated."""
    step = jax.jit(lambda values, x: model.stateless_call(*values, x, training=training)[0])
    return step.lower(_values(model), _placed(model, inputs)).compile()


def gradients(model: Any, inputs: Any, spec: PartitionSpec = _REPLICATED) -> Any:
    """Compile the gradients of a sum of squares of all outputs, laid out like their variables."""
    trainable, rest = _values(model)

    def loss(trainable: Any, x: Any) -> Any:
        outputs = model.stateless_call(trainable, rest, x, training=False)[0]
        return sum(jnp.sum(jnp.square(y.astype("float32"))) for y in jax.tree.leaves(outputs))

    step = jax.jit(jax.grad(loss), out_shardings=[value.sharding for value in trainable])
    return step.lower(trainable, _placed(model, inputs, spec)).compile()


def gradients_of(model: Any, inputs: Any, spec: PartitionSpec = _REPLICATED) -> list[Any]:
    """Run `gradients`; ``spec`` is the layout of the inputs, if the model is on a mesh."""
    return list(gradients(model, inputs, spec)(_values(model)[0], _placed(model, inputs, spec)))


def _values(model: Any) -> tuple[list[Any], list[Any]]:
    return [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]


def _placed(model: Any, inputs: Any, spec: PartitionSpec = _REPLICATED) -> Any:
    sharding = model.variables[0].value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.device_put(inputs, sharding)
