"""Trace a Keras model on shapes alone, and read its program: no value is read, no buffer is allocated."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardload.errors import LayoutError, public_name
from shardload.keras_bridge.calls import arguments_of_call, stateless
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.layer_layouts import call_of_name, marked_calls
from shardload.keras_bridge.recomputation import block_kinds
from shardload.layout_search import primitives
from shardload.layout_search.primitives import PrimitiveRule, fresh, itemsize
from shardload.layout_search.program import Factors, LayerCall, Program, Value
from shardload.layouts.model_variables import nested_layers
from shardload.units import check_kind, check_no_iterator

_DEFAULT_SEQUENCE = 512
"""Length of the dims that a model's inputs leave open, such as the sequence, if the caller gives no inputs."""

_MOST_INPUTS = 16
"""A plan or an error lists the shapes of at most so many inputs."""

_OTHER_INPUTS = "Pass inputs= that the model accepts, or another length of its open dims as sequence= (--sequence)"
_VALUES_NEEDED = (
    "Its call reads values of tensors (float(), if, NumPy), but a search has only shapes. Use keras.ops (where, cond), "
    "which jit_compile=True needs as well"
)
"""Advice in an error about a model whose call reads values of tensors: it cannot be traced on shapes alone."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A model's step as a `Program`: operations, and dims that must be split alike; and which arrays are weights."""

    program: Program
    weights: tuple[tuple[Any, Value], ...]
    """Pairs of each Keras variable of the model and its `Value` (array) in the program."""
    batch: Factors
    """The first dim of the inputs, which is the batch; ``()`` if it has length 1 in all of them."""
    training: bool
    blocks: Mapping[str, str] = field(default_factory=dict)
    """The names of the layers that the model repeats, each with the name of its class."""
    boundary: int = 0
    """When the forward pass ends."""
    sequences: tuple[Factors, ...] = ()
    """The second dims of inputs that are sequences, such as token ids: those of an encoder and a decoder may differ."""
    summed: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """By ``id`` of a weight: the bytes of each all-reduce over the batch whose results make up its gradient."""
    scores: frozenset[frozenset[int]] = frozenset()
    """The factors of each array of attention scores."""
    gradients: Mapping[int, Value] = field(default_factory=dict)
    """By ``id`` of a weight: its gradient."""


def input_specs(model: Any, *, batch: int, sequence: int | None = None) -> Any:
    """Return a shape and dtype for each input that a functional model, or a KerasHub task's backbone, declares.

    ``batch`` is the length of first dims that the model leaves open, and ``sequence`` that of all other open dims: by
    default `_DEFAULT_SEQUENCE`, or the number of positions that the model has if that is smaller.
    """
    inputs = _declared(model)
    if inputs is None:
        raise LayoutError(
            f"Cannot trace {model.name!r}: a {type(model).__name__} does not declare its inputs. Pass inputs=, a "
            "batch or jax.ShapeDtypeStruct of the same structure"
        )

    # A sequence cannot be longer than a table of positions, whose rows are `sequence_length` of a layer, and for some
    # backbones `max_sequence_length`.
    backbone = backbone_of(model)
    tables = [layer for layer, _ in nested_layers(backbone) if hasattr(layer, "position_embeddings")]
    rows = [getattr(backbone, "max_sequence_length", None), *(getattr(t, "sequence_length", None) for t in tables)]
    length = sequence or min([_DEFAULT_SEQUENCE, *(n for n in rows if isinstance(n, int) and n > 0)])

    def spec(tensor: Any) -> jax.ShapeDtypeStruct:
        first, *rest = tensor.shape
        open_dims = [length if n is None else n for n in rest]
        return _spec((first or batch, *open_dims), tensor.dtype)

    return jax.tree.map(spec, inputs, is_leaf=lambda leaf: hasattr(leaf, "shape"))


def _spec(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return a shape with the dtype that JAX stores: ``int32`` for ``int64``, for example, unless x64 is enabled."""
    return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))


def rows_of(inputs: Any) -> set[int]:
    """Return the numbers of rows (lengths of the first dim) that the inputs have, each number once."""
    return {leaf.shape[0] for leaf in jax.tree.leaves(inputs) if getattr(leaf, "shape", ())}


def check_rows(model: Any, inputs: Any, batch: int | None, sequence: int | None = None) -> None:
    """Raise unless at least one input has as many rows as the requested batch, and one a dim of the length requested.

    ``sequence`` is the length of the dims that a model leaves open.
    """
    check_no_iterator("inputs", inputs)
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(inputs) if is_array(leaf)]
    if sequence is not None and not any(sequence in shape[1:] for shape in shapes):
        raise LayoutError(
            f"Cannot plan {model.name!r} with sequence={sequence}: its inputs are {input_summary(inputs)}, given or "
            "fixed by the model. Leave out sequence= (--sequence), or change the inputs"
        )
    rows = rows_of(inputs)
    if batch is not None and rows and batch not in rows:
        raise LayoutError(
            f"Cannot plan {model.name!r} with batch={batch}: its inputs are {input_summary(inputs)}, given or fixed by "
            "the model. Leave out batch= (--batch), or change the inputs"
        )


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
    """Replace each array in the inputs by its shape and dtype; flags and numbers stay, as JAX does not trace them."""
    return jax.tree.map(lambda leaf: _spec(leaf.shape, leaf.dtype) if is_array(leaf) else leaf, inputs)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of inputs is an array or its shape, not a flag or a number."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A model's step as JAX records it (a jaxpr). It depends on no mesh, and neither does what `trace` reads in it."""

    variables: tuple[Any, ...]
    """The Keras variables that are the first arguments of the program, trainable ones first."""
    trainable: int
    """How many of ``variables`` are trainable: the first ones."""
    closed: ClosedJaxpr
    training: bool
    blocks: Mapping[str, str] = field(default_factory=dict)
    """The names of the layers that the model repeats (`block_kinds`), each with the name of its class."""


def record_program(model: Any, inputs: Any, *, training: bool, arguments: Mapping[str, Any] | None = None) -> Recorded:
    """Record a model's forward pass, and for training its gradients with respect to the trainable variables.

    The mean square of all floating-point outputs is taken as the loss. The model's own loss would do other work on the
    outputs, but the same on the weights.
    """
    trainable, other = list(model.trainable_variables), list(model.non_trainable_variables)
    # Shapes in the place of values: a model of any size traces in seconds, without memory.
    state = tuple([_spec(v.shape, v.dtype) for v in group] for group in (trainable, other))
    check_kind("arguments", arguments, Mapping | None, "a mapping of arguments of call by name")
    arguments = dict(arguments or {})
    taken = arguments_of_call(model)
    # Names that a functional model would ignore.
    if taken is not None and (unknown := sorted(set(arguments) - taken)):
        raise LayoutError(
            f"Cannot trace {model.name!r} with arguments {unknown}: its call does not use them. Inputs of a "
            "functional model belong in inputs="
        )
    specs = as_specs((inputs, arguments))
    leaves, structure = jax.tree.flatten(specs)
    if any(0 in getattr(leaf, "shape", ()) for leaf in leaves):
        raise LayoutError(
            f"Cannot trace {model.name!r} on inputs {input_summary(specs[0])}: a dim has length 0, expected at least 1"
        )
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    step = _step(model, leaves, structure, training=training)
    try:
        # A model on a mesh may recompute, or lay out calls of its layers: a new plan does not know of that.
        with stateless(model), marked_calls(model):
            closed = jax.make_jaxpr(jax.value_and_grad(step) if training and trainable else step)(*state, arrays)
    # Of any kind: the trace runs the user's own call.
    except Exception as error:
        raise LayoutError(
            f"Cannot trace {model.name!r} on inputs {input_summary(specs[0])}: {public_name(error)}: "
            f"{reason_of(error)}. {_VALUES_NEEDED if isinstance(error, jax.errors.JAXTypeError) else _OTHER_INPUTS}"
        ) from error
    blocks = {layer.name: kind for kind, layers in block_kinds(model).items() for layer in layers}
    return Recorded((*trainable, *other), len(trainable), closed, training, blocks)


def input_summary(inputs: Any) -> str:
    """Return the shapes and dtypes of inputs for people: ``int32[8, 512], int32[8, 512]``."""
    leaves = jax.tree.leaves(as_specs(inputs))
    shown = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else str(leaf) for leaf in leaves]
    return ", ".join(shown[:_MOST_INPUTS]) + (
        f" and {len(shown) - _MOST_INPUTS} more" if len(shown) > _MOST_INPUTS else ""
    )


def reason_of(error: Exception) -> str:
    """Return the line of an error that names the cause, which follows Keras' line about the layer that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Exception encountered when calling") and len(lines) > 1:
        del lines[0]
    return re.sub(r"\x1b\[[\d;]*m", "", lines[0]).rstrip(".") if lines else ""


def trace(recorded: Recorded) -> Traced:
    """Find the operations of a program, and which dims must be split alike."""
    program = Program()
    values = arguments_of(program, recorded.closed)
    weights = tuple(zip(recorded.variables, values, strict=False))
    for _, value in weights:
        value.from_weights = True
        program.read_as[id(value)] = set()
    program.store(*values)
    # The first dim of every input is the batch: token ids and masks are split alike. One row stays whole.
    batch: Factors = ()
    for value in values[len(weights) :]:
        batch = program.unite(batch, value.dims[0]) if value.dims else batch
    sequences = _sequences(program, recorded.closed, values, len(weights))
    results = read_program(program, recorded.closed, values, frozenset(recorded.blocks))
    program.use(*results)
    if recorded.training and recorded.trainable:
        # The loss is born where the forward pass ends: what is read after that is kept for the backward pass.
        program.keep_for_later(results[0].born)
        for value, gradient in zip(values, results[-recorded.trainable :], strict=False):
            program.unite_dims(value, gradient)  # a gradient is kept as its variable is
            gradient.root.stored = False  # and counted with the variable
    program.source = None
    if recorded.training and recorded.trainable:
        # A weight may have the dim of a sequence, as a table of positions: it is not split as activations are.
        program.from_weights, program.minor = True, ()
        for gradient in results[-recorded.trainable :]:
            for at, dim in enumerate(gradient.dims):
                if {*program.factors(dim)} & {*itertools.chain(*sequences)}:
                    program.need_whole(gradient, at, why="gradient")
    # The other dims come whole. XLA gathers a weight that is split along one instead of splitting the input.
    for value in values[len(weights) :]:
        for dim in value.dims[1:]:
            program.mark_sliced(dim)
    found = results[-recorded.trainable :] if recorded.training and recorded.trainable else []
    gradients = {id(v): gradient for v, gradient in zip(values, found, strict=False)}
    return Traced(
        program,
        weights,
        batch,
        recorded.training,
        recorded.blocks,
        results[0].born,
        sequences,
        {key: program.summed(gradient, batch) for key, gradient in gradients.items()},
        program.scores(),
        gradients,
    )


def _sequences(program: Program, closed: ClosedJaxpr, values: Sequence[Value], weights: int) -> tuple[Factors, ...]:
    """Return the dims of inputs that are sequences: the second of token ids, or of vectors for each position.

    Those of one length are split alike, as token ids and their mask.
    """
    found: dict[int, Factors] = {}
    for var, value in zip(closed.jaxpr.invars[weights:], values[weights:], strict=True):
        is_ids = len(value.shape) == 2 and not jnp.issubdtype(var.aval.dtype, jnp.inexact)
        if is_ids or len(value.shape) == 3:
            dim = value.dims[1]
            found[value.shape[1]] = program.unite(found[value.shape[1]], dim) if value.shape[1] in found else dim
    return tuple(dim for dim in found.values() if dim)


def _step(model: Any, leaves: list[Any], structure: Any, *, training: bool) -> Any:
    takes_training = "training" in inspect.signature(model.call).parameters

    def step(trainable: list[Any], other: list[Any], arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = [next(given) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
        inputs, arguments = jax.tree.unflatten(structure, filled)
        if takes_training:
            arguments = {"training": training, **arguments}
        outputs, _ = model.stateless_call(trainable, other, inputs, **arguments)
        if not training:
            return outputs
        floating = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.mean(jnp.square(y.astype("float32"))) for y in floating) / max(len(floating), 1)

    return step


# ---- reading a program -------------------------------------------------------------------------------

# Where calls (jit, custom_jvp_call, remat, …) keep their program: the parameter differs by primitive.
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def read_program(
    program: Program, jaxpr: ClosedJaxpr | Jaxpr, arguments: Sequence[Value], blocks: frozenset[str] | None = None
) -> list[Value]:
    """Add the equations of a recorded program to ``program``, by the rules of their primitives; return the results.

    ``blocks`` has the names of the layers whose equations are recorded one by one; ``None`` for a program inside of an
    equation, which belongs where the equation does.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        arguments = [*(program.value(c.shape, getattr(c.dtype, "itemsize", 8)) for c in jaxpr.consts), *arguments]
        jaxpr = jaxpr.jaxpr
    known: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

    def value(var: Any) -> Value:
        if isinstance(var, Literal):
            return program.value(getattr(var.aval, "shape", ()), itemsize(var.aval))
        return known[var]

    outside = program.block, program.in_backward
    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        # Operands are used at the moment the results are born, so both are counted as alive then.
        program.clock += 1
        # Equations of JAX's own functions are where the model calls these.
        program.source = eqn.source_info.traceback or program.source
        if blocks is not None:
            # Programs inside an equation have names of their own, if any: they belong where the equation does.
            program.block, program.in_backward = _block_of(str(eqn.source_info.name_stack), blocks)
        first = len(program.operations)
        program.from_weights = any(v.from_weights for v in operands)
        program.minor = tuple(itertools.chain(*(dim[1:] for v in operands for dim in v.dims)))
        results = _equation(program, eqn, operands)
        for made in results:
            made.from_weights |= any(v.from_weights for v in operands)
        if eqn.primitive.name == "name":
            _record_call(program, str(eqn.params["name"]), results[0])
        program.use(*operands)
        program.record(eqn.primitive.name, operands, results, range(first, len(program.operations)))
        known.update(zip(eqn.outvars, results, strict=True))
    program.block, program.in_backward = outside
    return [value(v) for v in jaxpr.outvars]


def _record_call(program: Program, name: str, value: Value) -> None:
    """Record a value that `marked_calls` has named as the input or the output of a layer's call."""
    if (found := call_of_name(name)) is None or program.in_backward:
        return
    (layer, is_output), done = found, len(program.operations)
    if not is_output:
        program.calls.append(LayerCall(layer, inputs=value, operations=range(done, done)))
        return
    # Layers with weights of their own may be in each other: the last call that has not ended is the innermost.
    call = next((c for c in reversed(program.calls) if c.layer == layer and c.outputs is None), None)
    if call is None:
        call = LayerCall(layer, operations=range(done, done))
        program.calls.append(call)
    call.outputs, call.operations = value, range(call.operations.start, done)


def line_of(source: Any) -> str | None:
    """Return the line of a model's code where an equation was made (``mamba.py:41``); ``None`` if it is not known."""
    for frame in getattr(source, "frames", ()):
        if not re.search(
            r"[/\\](jax|keras|shardload)[/\\](_src|src|layout_search|keras_bridge|.*\.py$)", frame.file_name
        ):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return None


@functools.lru_cache(maxsize=1 << 12)
def _block_of(names: str, blocks: frozenset[str]) -> tuple[str, bool]:
    """Return the block to which an equation of this name stack belongs, and whether it is of the backward pass.

    ``transpose(jvp(tower))/layer_3/attention`` ─► (``tower/layer_3``, True); without a block: ``""``.
    """
    path = [name for name in re.split(r"[/()]", names) if name not in ("", "jvp", "transpose", "vmap")]
    at = next((i for i, name in enumerate(path) if name in blocks), None)
    return "" if at is None else "/".join(path[: at + 1]), names.startswith("transpose(")


def arguments_of(program: Program, closed: ClosedJaxpr) -> list[Value]:
    """Add an array to ``program`` for each argument of a program that JAX recorded; return these `Value`s."""
    return [program.value(v.aval.shape, itemsize(v.aval)) for v in closed.jaxpr.invars]


def _equation(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    name = eqn.primitive.name
    if (rule := _RULES.get(name)) is not None:
        for value in operands:
            if (found := program.read_as.get(id(value))) is not None:
                found.add(str(eqn.params["new_dtype"]) if name == "convert_element_type" else "")
        return rule(program, eqn, operands)
    inner = next((eqn.params[key] for key in _INNER if key in eqn.params), None)
    # The program inside a shard_map has the shapes of one device's shards: its dims cannot be compared with these.
    jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    if jaxpr is None or name == "shard_map" or len(jaxpr.invars) != len(operands):
        program.unknown[name] += 1
        for value in operands:
            program.need_all(value, why=name)
        results = [fresh(program, var) for var in eqn.outvars]
        program.store(*results)
        return results
    return read_program(program, inner, operands)


def _scan(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``scan``: read its body once. All iterations split the carry alike; the scanned dim is whole."""
    params = eqn.params
    if "num_consts" in params:
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    else:
        # JAX 0.11 groups operands in a tree instead.
        n_consts, n_carry = map(len, params["ft_in"].unpack()[:2])
    consts, carry, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
    # Iterations run one after the other and each needs its step on every device.
    for x in xs:
        program.need_whole(x, 0, why="scan")
    with program.repeated(params["length"]):
        steps = [program.value(x.shape[1:], x.itemsize, x.dims[1:]) for x in xs]
        results = read_program(program, params["jaxpr"], [*consts, *carry, *steps])
    # The carry of one iteration is that of the next: a layout that changed inside would be exchanged each time.
    for before, after in zip(carry, results[:n_carry], strict=True):
        program.unite_dims(before, after)
    # What an iteration returns gets a new first dim, and a buffer for all iterations.
    stacked = []
    for var, made in zip(eqn.outvars[n_carry:], results[n_carry:], strict=True):
        stacked.append(fresh(program, var, [None, *made.dims]))
        program.store(stacked[-1])
    return [*results[:n_carry], *stacked]


def _while(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``while``: the operations of its body count once, as it is not known how often it will run."""
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    carry = operands[n_cond + n_body :]
    read_program(program, params["cond_jaxpr"], [*operands[:n_cond], *carry])
    results = read_program(program, params["body_jaxpr"], [*operands[n_cond : n_cond + n_body], *carry])
    for before, after in zip(carry, results, strict=True):
        program.unite_dims(before, after)
    program.unknown["while: counted as one iteration"] += 1
    return results


def _cond(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``cond``: the operations of every branch count, and all branches' results are split alike."""
    # The first operand chooses the branch. All branches count, as if they all ran.
    per_branch = [read_program(program, branch, operands[1:]) for branch in eqn.params["branches"]]
    for results in per_branch[1:]:
        for a, b in zip(per_branch[0], results, strict=True):
            program.unite_dims(a, b)
    return per_branch[0]


# Primitives whose rule has their name.
_NAMED = """
broadcast_in_dim concatenate dot_general dynamic_update_slice expand_dims gather reshape rev select_and_scatter_add
squeeze stack top_k transpose unstack
"""
_RULES: dict[str, PrimitiveRule] = {
    **{name: getattr(primitives, name) for name in _NAMED.split()},
    **dict.fromkeys(primitives.ELEMENTWISE, primitives.elementwise),
    **dict.fromkeys(primitives.SOURCES, primitives.source),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), primitives.same_length),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "cumred_reduce_window_impl"),
        primitives.windowed,
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "approx_top_k", "split"),
        primitives.along_one_dim,
    ),
    **dict.fromkeys(
        ("argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
         "reduce_sum", "reduce_xor"),
        primitives.reduce,
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub", "scatter_add",
         "scatter_max", "scatter_min", "scatter_mul"),
        primitives.scatter,
    ),
    "cond": _cond,
    "conv_general_dilated": primitives.convolution,
    "scan": _scan,
    "tile": primitives.windowed,
    "while": _while,
}  # fmt: skip
"""The rule of each primitive of JAX, by name: it maps the dims of operands to those of results.

A primitive without a rule needs its operands whole, and the dims of its results form new groups. `Program.unknown`
counts it, so that the plan can name it."""
