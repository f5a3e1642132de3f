"""Trace a Keras model on shapes alone: no value is read, no buffer is allocated."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from shardload.errors import LayoutError, UsageError
from shardload.keras_bridge.functional_graph import arguments_of_call
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.layout_search.jaxpr_reader import arguments_of, read_program
from shardload.layout_search.program import UNSPLIT, Exchange, Program, Value
from shardload.units import check_kind, check_no_iterator

DEFAULT_SEQUENCE = 512
"""Length of dims that a model leaves open, where the caller does not give inputs."""

_MOST_INPUTS = 16
"""Inputs that a plan or an error lists."""

OTHER_INPUTS = "Pass inputs= that the model accepts, or another length of its open dims as sequence= (--sequence)"
VALUES_NEEDED = (
    "Its call reads values of tensors (float(), if, NumPy), but a search has only shapes. Use keras.ops (where, cond), "
    "which jit_compile=True needs as well"
)
"""The ways out where a model cannot be traced."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A model's program, and its arguments."""

    program: Program
    weights: tuple[tuple[Any, Value], ...]
    """Every variable of the model with its value in the program."""
    batch: tuple[int, ...]
    """Nodes of the first dims of the inputs, without those of one row."""
    training: bool


def input_specs(model: Any, *, batch: int, sequence: int | None = None) -> Any:
    """Return a shape and dtype for each input of a functional model, or of a task's backbone.

    Args:
        model: A Keras model.
        batch: Length of the first dim, where the model does not fix it.
        sequence: Length of every other dim that the model leaves open; `DEFAULT_SEQUENCE` by default, or the number
            of positions that the model has if that is smaller.

    Raises:
        LayoutError: When the model does not declare its inputs, such as a subclassed model.
    """
    inputs = _declared(model)
    if inputs is None:
        raise LayoutError(
            f"Cannot trace {model.name!r}: a {type(model).__name__} does not declare its inputs. Pass inputs=, a "
            "batch or jax.ShapeDtypeStruct of the same structure"
        )

    # A longer sequence than the table of positions has rows cannot be traced.
    length = sequence or min([DEFAULT_SEQUENCE, *positions_of(model)])

    def spec(tensor: Any) -> jax.ShapeDtypeStruct:
        first, *rest = tensor.shape
        open_dims = [length if n is None else n for n in rest]
        return _spec((first or batch, *open_dims), tensor.dtype)

    return jax.tree.map(spec, inputs, is_leaf=lambda leaf: hasattr(leaf, "shape"))


def _spec(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return a shape and a dtype as JAX would store it: from 0.12 on, it warns of 64 bits unless x64 is enabled."""
    return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))


def rows_of(inputs: Any) -> set[int]:
    """Return the lengths of the first dims of inputs."""
    return {leaf.shape[0] for leaf in jax.tree.leaves(inputs) if getattr(leaf, "shape", ())}


def check_rows(model: Any, inputs: Any, batch: int | None) -> None:
    """Check that a requested batch is the number of rows of at least one input."""
    check_no_iterator("inputs", inputs)
    rows = rows_of(inputs)
    if batch is not None and rows and batch not in rows:
        raise LayoutError(
            f"Cannot plan {model.name!r} with batch={batch}: its inputs are {input_summary(inputs)}, given or fixed by "
            "the model. Leave out batch= (--batch), or change the inputs"
        )


def positions_of(model: Any) -> list[int]:
    """Return the number of positions of each position embedding in a model, or in its backbone.

    Layers call it ``sequence_length``, and some backbones ``max_sequence_length``.
    """
    backbone = backbone_of(model)
    own = [getattr(backbone, "max_sequence_length", None)]
    own += [
        getattr(layer, "sequence_length", None)
        for layer in _nested_layers(backbone)
        if hasattr(layer, "position_embeddings")
    ]
    return [n for n in own if isinstance(n, int) and n > 0]


def _nested_layers(model: Any) -> Iterator[Any]:
    """Yield the layers of a model, and the layers in those."""
    for layer in getattr(model, "layers", ()) or ():
        yield layer
        yield from _nested_layers(layer)
        # A layer with tokens and positions keeps its table of positions as an attribute, not in `layers`.
        yield from (found for found in vars(layer).values() if hasattr(found, "position_embeddings"))


def _declared(model: Any) -> Any:
    try:
        return model.input
    except (AttributeError, ValueError):
        declared = getattr(model, "inputs", None)  # what a Sequential has
        if declared:
            return declared[0] if len(declared) == 1 else declared
        backbone = backbone_of(model)
        return None if backbone is model else _declared(backbone)


def as_specs(inputs: Any) -> Any:
    """Return inputs with shapes and dtypes in the place of arrays."""

    def spec(leaf: Any) -> Any:
        # A flag or a number is not traced: the call gets it unchanged.
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        return _spec(leaf.shape, leaf.dtype)

    return jax.tree.map(spec, inputs)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A model's program as JAX records it; it depends on no mesh."""

    variables: tuple[Any, ...]
    """Trainable variables, then the others: the first arguments of the program."""
    trainable: int
    """How many are trainable."""
    closed: ClosedJaxpr
    training: bool


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which spent a quarter of a search on objects that are all still in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record_program(model: Any, inputs: Any, *, training: bool, arguments: Mapping[str, Any] | None = None) -> Recorded:
    """Record a model's forward pass, and for training its gradients with respect to the trainable variables.

    The loss is the mean square of all floating-point outputs: what it does with the last activation differs from the
    model's own, what the weights see does not.
    """
    trainable, other = list(model.trainable_variables), list(model.non_trainable_variables)
    # Shapes in the place of values: a model of any size traces in seconds, without memory.
    state = tuple([_spec(v.shape, v.dtype) for v in group] for group in (trainable, other))
    check_kind("arguments", arguments, Mapping | None, "a mapping of arguments of call by name")
    _check_arguments(model, arguments or {})
    specs = as_specs((inputs, dict(arguments or {})))
    leaves, structure = jax.tree.flatten(specs)
    if any(0 in getattr(leaf, "shape", ()) for leaf in leaves):
        raise LayoutError(
            f"Cannot trace {model.name!r} on inputs {input_summary(specs[0])}: a dim is 0, expected examples"
        )
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    step = _step(model, leaves, structure, training=training)
    try:
        closed = jax.make_jaxpr(jax.value_and_grad(step) if training and trainable else step)(*state, arrays)
    # Of any kind: the trace runs the user's own call.
    except Exception as error:
        raise LayoutError(
            f"Cannot trace {model.name!r} on inputs {input_summary(specs[0])}: {type(error).__name__}: "
            f"{reason_of(error)}. {VALUES_NEEDED if isinstance(error, jax.errors.JAXTypeError) else OTHER_INPUTS}"
        ) from error
    return Recorded((*trainable, *other), len(trainable), closed, training)


def input_summary(inputs: Any) -> str:
    """Return the shapes and dtypes of inputs for people: ``int32[8, 512], int32[8, 512]``."""
    leaves = jax.tree.leaves(as_specs(inputs))
    shown = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else str(leaf) for leaf in leaves]
    return ", ".join(shown[:_MOST_INPUTS]) + (
        f" and {len(shown) - _MOST_INPUTS} more" if len(shown) > _MOST_INPUTS else ""
    )


def reason_of(error: Exception) -> str:
    """Return the line of an error that names the cause. Keras puts a line about the place before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Exception encountered when calling") and len(lines) > 1:
        del lines[0]
    return re.sub(r"\x1b\[[\d;]*m", "", lines[0]).rstrip(".") if lines else ""


def trace(recorded: Recorded, *, divisors: tuple[int, ...]) -> Traced:
    """Read a recorded program into groups of dims and operations."""
    program = Program(divisors)
    values = arguments_of(program, recorded.closed)
    weights = tuple(zip(recorded.variables, values, strict=False))
    program.store(*values)
    results = read_program(program, recorded.closed, values)
    program.use(*results)
    if recorded.training and recorded.trainable:
        # The loss is born where the forward pass ends: what is read after that is kept for the backward pass.
        program.keep_for_later(results[0].born)
        for value, gradient in zip(values, results[-recorded.trainable :], strict=False):
            program.unite_dims(value, gradient)  # a gradient is kept as its variable is
            gradient.root.stored = False  # and counted with the variable
        _gather_gradients_of_groups(program, values[: recorded.trainable])
    # The first dim of every input is the batch: token ids and masks are split alike. One row stays whole.
    batch = tuple(v.dims[0] for v in values[len(weights) :] if v.dims and v.dims[0] != UNSPLIT)
    for node in batch[1:]:
        program.unite(batch[0], node)
    # The other dims come whole. XLA gathers a weight that is split along one instead of splitting the input.
    for value in values[len(weights) :]:
        for node in value.dims[1:]:
            program.mark_sliced(node)
    return Traced(program, weights, batch, recorded.training)


def _gather_gradients_of_groups(program: Program, weights: Sequence[Value]) -> None:
    """Record that devices which share groups of heads gather the gradients of keys and values: each has its group's."""
    for value in weights:
        for n in value.dims:
            heads = program.heads_of(n)
            if heads is not None:
                gather = Exchange("all-gather", heads, value.nbytes, value.dims)
                program.work("gradients of groups", value.dims, exchanges=[gather])


def _check_arguments(model: Any, arguments: Mapping[str, Any]) -> None:
    """Check names that a functional model would ignore."""
    if not isinstance(arguments, Mapping):
        raise UsageError(
            f"Cannot trace {model.name!r} with arguments={arguments!r:.60}: expected a mapping of names to values"
        )
    taken = arguments_of_call(model)
    if taken is not None and (unknown := sorted(set(arguments) - taken)):
        raise LayoutError(
            f"Cannot trace {model.name!r} with arguments {unknown}: its call does not use them. Inputs of a "
            "functional model belong in inputs="
        )


def _step(model: Any, leaves: list[Any], structure: Any, *, training: bool) -> Any:
    takes_training = "training" in inspect.signature(model.call).parameters

    def step(trainable: list[Any], other: list[Any], arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = [next(given) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
        inputs, arguments = jax.tree.unflatten(structure, filled)
        if takes_training:
            arguments = {"training": training, **arguments}
        outputs, _ = model.stateless_call(trainable, other, inputs, **arguments)
        return _loss(outputs) if training else outputs

    return step


def _loss(outputs: Any) -> Any:
    floating = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)]
    return sum(jnp.mean(jnp.square(y.astype("float32"))) for y in floating) / max(len(floating), 1)
