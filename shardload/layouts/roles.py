"""The meaning of each dim of each variable, derived from layer types and einsum equations, never from model names.

A *role* lists the dims of a variable to split, best first. For attention and MLP blocks
they add up to Megatron's pairing: the first kernel is split along its outputs (column-parallel), the
second along its inputs (row-parallel), and one all-reduce ends the block::

    btd,ndh->btnh   query    n = heads       split n        ┐ every device computes its own heads
    bskh            key      k = heads       split k        │
    btnh,nhd->btd   output   n, h contracted split n        ┘ one all-reduce
    btd,df->btf     gate     f = features    split f        ┐
    btf,fd->btd     down     f contracted    split f        ┘ one all-reduce

A variable that belongs to a kernel (bias, int8 scale, LoRA factor, optimizer slot) *follows* it, dim by dim.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.keras_bridge.model_state import slots_of
from shardload.layouts import model_variables
from shardload.layouts.channels import conv_roles, recurrent_roles, separable_roles
from shardload.layouts.kernel_pairs import pairs
from shardload.layouts.layer_rules import dims_by_rule
from shardload.layouts.model_variables import LARGE_BYTES, is_kind, nbytes
from shardload.layouts.role import MATRICES, Dim, Follows, Role, Wants

_CONVOLUTIONS = ("BaseConv", "BaseConvTranspose", "BaseDepthwiseConv", "BaseSeparableConv", "ConvLSTMCell")
"""Keras' classes of layers whose kernels slide over a window."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A variable that maps input features to output features; dims as indices into its shape."""

    variable: Any
    labels: str
    """One letter per dim."""
    inputs: tuple[int, ...]
    """Contracted dims, in the order of the layer's input."""
    outputs: tuple[int, ...]
    """Produced dims, in the order of the layer's output."""

    @property
    def is_matrix(self) -> bool:
        return len(self.inputs) == len(self.outputs) == 1

    def size(self, dims: tuple[int, ...]) -> int:
        """Return the product of the lengths of ``dims``."""
        return math.prod(int(self.variable.shape[d]) for d in dims)


def roles(model: Any, *, by_user: bool = True) -> dict[int, Role]:
    """Return the role of every variable of ``model`` (including optimizer slots and metrics), by ``id(variable)``.

    Reads layer objects, shapes and dtypes only: the variables may have no values. ``by_user`` applies the layout rules
    that users registered.
    """
    every = list(model_variables.layers(model))
    own = {id(layer): model_variables.own_variables(layer, children) for layer, children in every}
    kernels = {id(layer): _kernels(layer, own[id(layer)]) for layer, _ in every}
    by_rule: dict[int, Role] = dict(by_layer_rules(layer for layer, _ in every)) if by_user else {}
    # Users' rules win over everything derived below.
    found = dict(by_rule)
    # Outermost layers first, and the first answer stays: a block that pairs its sub-layers' kernels knows more of
    # them than each sub-layer does alone.
    for layer, children in every:
        below = (kernels[id(child)] for child in children)
        for role_of in (
            _own_roles(layer, own[id(layer)], kernels[id(layer)]),
            _pair(itertools.chain.from_iterable(below)),
        ):
            for key, role in role_of.items():
                found.setdefault(key, role)
    # A functional model's graph tells pairs for certain, so its answer replaces those by shape, but not users' rules.
    on_last_dim = {id(layer): found_there for layer, _ in every if (found_there := _on_last_dim(layer, own[id(layer)]))}
    on_last_dim = {key: one for key, one in on_last_dim.items() if id(one.kernel) not in by_rule}
    for layer, _ in every:
        found |= _chained(layer, on_last_dim, found, by_rule)
    # Everything else, such as metrics and weights of unknown layers, goes by shape.
    for variable in model_variables.all_variables(model).values():
        found.setdefault(id(variable), by_shape(variable))
    # Last, and overwriting: to the shape rule above, a slot is a variable like any other.
    for slot, variable in slots_of(model):
        found[id(slot)] = Follows("slot", variable, tuple(range(len(variable.shape))))
    return found


def by_layer_rules(layers: Iterable[Any]) -> dict[int, Wants]:
    """Return the roles that users' layer rules give to the variables of layers, by ``id(variable)``."""
    found = {}
    for layer in layers:
        rule = f"rule for {type(layer).__name__}"
        for key, dims in dims_by_rule(layer).items():
            found[key] = Wants(rule, tuple(Dim(d, f"elements of dim {d}") for d in dims), even_small=True)
    return found


def by_shape(variable: Any) -> Wants:
    """Return the role of an unknown variable: its largest dim, the last one among equals."""
    shape = tuple(variable.shape)
    if len(shape) < 2 and nbytes(variable) < LARGE_BYTES:
        return Wants("vector", ())
    # The last among equals: in a square kernel these are, as a rule, the outputs.
    order = sorted(range(len(shape)), key=lambda d: (-shape[d], -d))
    return Wants("shape", tuple(Dim(d, f"elements of dim {d}") for d in order), exact=False)


def _own_roles(layer: Any, variables: Sequence[Any], kernels: Sequence[_Kernel]) -> dict[int, Role]:
    """Return the roles of a layer's own variables."""
    own = {v.name: v for v in variables}
    if kernels and kernels[0].variable.name == "kernel":
        return _pair(kernels) | _followers(layer, kernels[0], own)
    if is_kind(layer, "Embedding"):
        return _embedding_roles(own)
    if is_kind(layer, "PositionEmbedding") and len(own) == 1:
        (table,) = own.values()
        # Replicated: split features would spread from here through the sums and norms of every block.
        return {id(table): Wants("positions", ())}
    if is_kind(layer, "BaseConv", "BaseConvTranspose", "BaseDepthwiseConv") and "kernel" in own:
        return conv_roles(layer, own)
    if is_kind(layer, "BaseSeparableConv") and "pointwise_kernel" in own:
        return separable_roles(own)
    if is_kind(layer, "LSTMCell", "GRUCell", "ConvLSTMCell"):
        # Replicated: the gates lie side by side, so each device would have one of them and not its part of all.
        return {id(v): Wants("gates", ()) for v in variables}
    if is_kind(layer, "SimpleRNNCell"):
        return recurrent_roles(own)
    return _pair(kernels)


# --- kernels -------------------------------------------------------------------------------------------


def _kernels(layer: Any, own: Sequence[Any]) -> list[_Kernel]:
    """Return a layer's own kernels: that of a Dense or EinsumDense, or stacked matrices of experts."""
    named = {v.name: v for v in own}
    if equation := _equation(layer):
        kernel = named.get("kernel")
        if kernel is None or len(kernel.shape) != len(equation[1]):
            return []  # packed to fewer dims (int4, GPTQ): the equation no longer describes it
        return [_einsum_kernel(kernel, *equation)]
    if is_kind(layer, *_CONVOLUTIONS):
        return []  # over one dim, a kernel has three dims as well: window, inputs, outputs
    # Experts of a mixture, as every KerasHub model stacks them: (expert, input, output).
    return [_Kernel(v, "eio", (1,), (2,)) for v in own if len(v.shape) == 3]


def _equation(layer: Any) -> tuple[str, str, str] | None:
    """Return the labels of input, kernel and output of a layer that is one einsum, without a leading ellipsis."""
    if is_kind(layer, "EinsumDense"):
        left, _, output = re.sub(r"[\s.]", "", layer.equation).partition("->")
        data, _, kernel = left.partition(",")
        return data, kernel, output
    if is_kind(layer, "Dense"):
        return "i", "io", "o"
    return None


def _einsum_kernel(variable: Any, data: str, kernel: str, output: str) -> _Kernel:
    # Letters in both the input and the output (a stack's own dim) are neither contracted nor produced.
    contracted = sorted((c for c in kernel if c in data and c not in output), key=data.index)
    produced = sorted((c for c in kernel if c in output and c not in data), key=output.index)
    return _Kernel(variable, kernel, tuple(map(kernel.index, contracted)), tuple(map(kernel.index, produced)))


def _pair(kernels: Iterable[_Kernel]) -> dict[int, Role]:
    """Return the roles of one block's kernels, given in order of creation: which one feeds which decides."""
    found: dict[int, Role] = {}
    before: list[_Kernel] = []
    for kernel in kernels:
        if not kernel.is_matrix:
            role = _projection(kernel)
        elif any(_feeds(earlier, kernel) for earlier in before):
            role = _matrix(kernel, "row")
        else:
            role = _matrix(kernel, "column")
        # A row-parallel kernel ends its pair: what comes after it reads the block's width again.
        if role.rule != "row":
            before.append(kernel)
        found.setdefault(id(kernel.variable), role)
    return found


def _feeds(first: _Kernel, second: _Kernel) -> bool:
    """Whether ``second`` maps the outputs of ``first`` back to the block's width.

    A gate fused into a first matrix doubles its outputs; key and value fused into heads triple them.
    For two square matrices this is undecidable.
    """
    made, width = first.size(first.outputs), first.size(first.inputs)
    inner = second.size(second.inputs)
    # Only a kernel that restores the width can close a pair: the residual connection adds its output to the input.
    if second.size(second.outputs) != width or len(first.inputs) != 1:
        return False
    if first.is_matrix:
        return width != inner and made in (inner, 2 * inner)
    return made in (inner, 3 * inner)


def _matrix(kernel: _Kernel, rule: str) -> Wants:
    outputs, inputs = Dim(kernel.outputs[0], "output features"), Dim(kernel.inputs[0], "input features")
    wanted = (outputs, inputs) if rule == "column" else (inputs, outputs)
    # A stack of experts comes last: an expert axis takes that dim first, other axes only if nothing else divides.
    rest = tuple(Dim(d, MATRICES) for d in range(len(kernel.labels)) if d not in (outputs.index, inputs.index))
    return Wants(rule, wanted + rest)


def _projection(kernel: _Kernel) -> Wants:
    """Return the role of a kernel with several dims on one side: heads, and dims within a head.

    If the number of heads is not divisible, the model's width is next: it costs one small all-reduce of the
    kernel's output. A split inside a head would cut through the halves of rotary embeddings, the cache and
    the logits: XLA turns that into some forty permutes and all-to-alls per two Gemma layers, instead of eight
    all-reduces.
    """
    if len(kernel.outputs) > 1:
        heads, within, width, rule = kernel.outputs[:-1], kernel.outputs[-1:], kernel.inputs, "heads out"
    elif len(kernel.inputs) > 1:
        heads, within, width, rule = kernel.inputs[:-1], kernel.inputs[-1:], kernel.outputs, "heads in"
    else:
        return by_shape(kernel.variable)
    side = "input features" if rule == "heads out" else "output features"
    shape = kernel.variable.shape
    by_size = sorted(heads, key=lambda d: -int(shape[d]))
    dims = [Dim(d, "heads") for d in by_size] + [Dim(d, side) for d in width] + [Dim(d, "head dims") for d in within]
    return Wants(rule, tuple(dims))


# --- pairs in the graph of a functional model ------------------------------------------------------------


def _chained(
    model: Any, on_last_dim: dict[int, _LastDim], found: dict[int, Role], by_rule: dict[int, Role]
) -> dict[int, Role]:
    """Return the roles of kernels that follow each other in a model's graph, and of what is between them."""
    changed: dict[int, Role] = {}
    # What ends a pair by its shape ends one that the graph does not show: a gate, a block of layers.
    ends = {key for key, one in on_last_dim.items() if getattr(found.get(id(one.kernel)), "rule", "") == "row"}
    for pair in pairs(model, on_last_dim, never_first=ends):
        first, second = on_last_dim[id(pair.first)], on_last_dim[id(pair.second)]
        changed[id(first.kernel)] = Wants("column", (first.outputs, first.inputs))
        changed[id(second.kernel)] = Wants("row", (second.inputs, second.outputs))
        for layer in pair.between:
            for v in model_variables.own_variables(layer):
                # A depthwise kernel ends in (features, multiplier), a vector in features.
                features = len(v.shape) - (2 if len(v.shape) > 1 else 1)
                dims = tuple(first.outputs.index if d == features else None for d in range(len(v.shape)))
                changed[id(v)] = Follows("features", first.kernel, dims)
    return {key: role for key, role in changed.items() if key not in by_rule}


@dataclass(frozen=True, slots=True)
class _LastDim:
    """A kernel from the last dim of its layer's input to the last dim of its output."""

    kernel: Any
    inputs: Dim
    outputs: Dim


def _on_last_dim(layer: Any, own: Sequence[Any]) -> _LastDim | None:
    """Return the kernel of a layer that maps the last dim of its input to the last dim of its output, if it has one."""
    kernel = next((v for v in own if v.name in ("kernel", "pointwise_kernel")), None)
    if kernel is None:
        return None
    rank = len(kernel.shape)
    if is_kind(layer, "BaseConv", "BaseConvTranspose", "BaseSeparableConv"):
        # With channels first or groups, a pair's split would not be one of the last dim.
        if layer.data_format != "channels_last" or getattr(layer, "groups", 1) != 1:
            return None
        # Keras stores a transposed convolution's kernel as (…, outputs, inputs).
        inputs, outputs = (rank - 1, rank - 2) if is_kind(layer, "BaseConvTranspose") else (rank - 2, rank - 1)
        return _LastDim(kernel, Dim(inputs, "input channels"), Dim(outputs, "output channels"))
    equation = _equation(layer)
    if equation is None or rank != len(equation[1]):
        return None
    data, labels, output = equation
    found = _einsum_kernel(kernel, data, labels, output)
    if not found.is_matrix or data[-1] != labels[found.inputs[0]] or output[-1] != labels[found.outputs[0]]:
        return None
    return _LastDim(kernel, Dim(found.inputs[0], "input features"), Dim(found.outputs[0], "output features"))


# --- variables that belong to a kernel, and tables -----------------------------------------------------


def _followers(layer: Any, kernel: _Kernel, own: dict[str, Any]) -> dict[int, Role]:
    """Return the roles of bias, scale and LoRA factors of a Dense or EinsumDense, dim by dim along its kernel."""
    _, labels, output = _equation(layer) or ("", "", "")
    aligned = {"bias": output, "kernel_scale": output}  # both are broadcast against the output
    # LoRA adds a @ b to the kernel: a has its leading dims, b its last one; "?" is the rank, too short to split.
    exact = {"lora_kernel_a": labels[:-1] + "?", "lora_kernel_b": "?" + labels[-1:]}
    found: dict[int, Role] = {}
    for name in own.keys() & (aligned.keys() | exact.keys()):
        variable = own[name]
        rank = len(variable.shape)
        # Align a bias of fewer dims with the output's last ones, as broadcasting does.
        spelt = exact.get(name) or aligned[name].rjust(rank, "?")[-rank:] if rank else ""
        if len(spelt) == rank:
            found[id(variable)] = _along(name, variable, spelt, leader=kernel.variable, labels=labels)
    return found


def _along(rule: str, variable: Any, spelt: str, *, leader: Any, labels: str) -> Follows:
    dims = (
        # A dim whose length differs from the leader's (1, or packed) cannot be split like it.
        labels.index(c) if c in labels and size == leader.shape[labels.index(c)] else None
        for c, size in zip(spelt, variable.shape, strict=True)
    )
    return Follows(rule, leader, tuple(dims))


def _embedding_roles(own: dict[str, Any]) -> dict[int, Role]:
    """Split a table by rows (the vocabulary) if it is tall, by features if it is wide."""
    found: dict[int, Role] = {}
    table = own.get("embeddings")
    if table is None:
        return found
    rows, features = Dim(0, "vocabulary entries"), Dim(1, "features")
    # A table that is wider than tall has too few rows to split (token types, segments).
    tall = table.shape[0] >= table.shape[1]
    found[id(table)] = Wants("vocabulary", (rows, features) if tall else (features, rows))
    if (reverse := own.get("reverse_embeddings")) is not None:
        found[id(reverse)] = Wants("vocabulary", (Dim(1, rows.what), Dim(0, features.what)))
    for name, leader, spelt, labels in (
        ("embeddings_scale", table, "v??", "vf"),
        ("embeddings_zero", table, "v??", "vf"),
        ("lora_embeddings_a", table, "v?", "vf"),
        ("lora_embeddings_b", table, "?f", "vf"),
        ("reverse_embeddings_scale", reverse, "v" if reverse is None else "??v", "fv"),
    ):
        variable = own.get(name)
        if variable is not None and leader is not None:
            rank = len(variable.shape)
            # A scale has one dim (rows) or more (groups within a row): take as many letters as it has dims.
            part = spelt[-rank:] if spelt.endswith("v") else spelt[:rank]
            found[id(variable)] = _along(name, variable, part, leader=leader, labels=labels)
    return found
