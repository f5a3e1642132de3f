"""The meaning of each dim of each variable, derived from layer types and einsum equations, never from model names.

A *role* lists the dims of a variable to split, best first. In attention and MLP blocks, kernels are split in pairs, as
in Megatron: the first along its outputs (``column``), the second along its inputs (``row``). Then one all-reduce per
block is enough::

    btd,ndh->btnh   query    n = heads       split n        ┐ every device computes its own heads
    bskh            key      k = heads       split k        │
    btnh,nhd->btd   output   n, h contracted split n        ┘ one all-reduce
    btd,df->btf     gate     f = features    split f        ┐
    btf,fd->btd     down     f contracted    split f        ┘ one all-reduce

A variable that belongs to a kernel (bias, int8 scale, LoRA factor, optimizer slot) *follows* it: it is split alike.

In a functional model's graph, two kernels also form a pair if the second alone reads what the first computes. Layers
between the two must compute each feature from that feature alone::

    Dense ─► gelu ─► Dropout ─► Dense        Conv2D ─► BatchNormalization ─► ReLU ─► Conv2D
    column   └─ each on its own features ─┘  row     channels  └ its vectors follow ┘       input channels
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from shardload.keras_bridge.calls import sole_consumers
from shardload.keras_bridge.model_state import slots_of
from shardload.layouts import model_variables
from shardload.layouts.model_variables import is_kind, own_variables
from shardload.layouts.role_layouts import MATRICES, Dim, Follows, LayoutRole, Wants, by_shape
from shardload.layouts.rules import roles_by_layer_rules


def roles(model: Any, variables: Mapping[int, Any] | None = None, *, by_user: bool = True) -> dict[int, LayoutRole]:
    """Return how to split each variable of ``model`` best (its role), by ``id(variable)``; also slots and metrics.

    The variables may have no values. ``variables`` are all of the model's, by id, if the caller has found them already.
    ``by_user`` applies the layout rules that users registered.
    """
    every = list(model_variables.nested_layers(model))
    own = {id(layer): model_variables.own_variables(layer, children) for layer, children in every}
    kernels = {id(layer): kernels_of(layer, own[id(layer)]) for layer, _ in every}
    by_rule: dict[int, LayoutRole] = dict(roles_by_layer_rules(layer for layer, _ in every)) if by_user else {}
    # Users' rules win over everything derived below.
    by_id = dict(by_rule)
    # Outermost layers first, and the first answer stays: a block that pairs its sub-layers' kernels knows more of
    # them than each sub-layer does alone.
    for layer, children in every:
        below = roles_by_shapes(itertools.chain.from_iterable(kernels[id(child)] for child in children))
        for key, role in (below | _own_roles(layer, own[id(layer)], kernels[id(layer)])).items():
            by_id.setdefault(key, role)
    # A functional model's graph tells pairs for certain, so its answer replaces those by shape, but not users' rules.
    of_features = {id(layer): feature_kernel(layer, own[id(layer)]) for layer, _ in every}
    pairable = {key: one for key, one in of_features.items() if one is not None and id(one.kernel) not in by_rule}
    for layer, _ in every:
        by_id |= roles_by_graph(layer, pairable, by_id, by_rule)
    # Everything else, such as metrics and weights of unknown layers, goes by shape.
    for variable in (model_variables.all_variables(model) if variables is None else variables).values():
        by_id.setdefault(id(variable), by_shape(variable))
    # Last, and overwriting: to the shape rule above, a slot is a variable like any other.
    for slot, variable in slots_of(model):
        by_id[id(slot)] = Follows("slot", variable, tuple(range(len(variable.shape))))
    return by_id


def _own_roles(layer: Any, variables: Sequence[Any], kernels: Sequence[Kernel]) -> dict[int, LayoutRole]:
    """Return how a layer's own variables are best split (their roles), by ``id(variable)``; not those of sub-layers."""
    own = {v.name: v for v in variables}
    if kernels and kernels[0].variable.name == "kernel":
        return roles_by_shapes(kernels) | _followers(layer, kernels[0], own)
    if is_kind(layer, "Embedding"):
        return _embedding_roles(own)
    if is_kind(layer, "PositionEmbedding") and len(own) == 1:
        (embedding,) = own.values()
        # Replicated: split features would spread from here through the sums and norms of every block.
        return {id(embedding): Wants("positions", ())}
    if is_kind(layer, "BaseConv", "BaseConvTranspose", "BaseDepthwiseConv") and "kernel" in own:
        return _conv_roles(layer, own)
    if is_kind(layer, "BaseSeparableConv") and "pointwise_kernel" in own:
        return _separable_roles(own)
    if is_kind(layer, "LSTMCell", "GRUCell", "ConvLSTMCell"):
        # Replicated: the gates lie side by side, so each device would have one of them and not its part of all.
        return {id(v): Wants("gates", ()) for v in variables}
    if is_kind(layer, "SimpleRNNCell"):
        # Split by outputs: each device has its units, and gathers all of them for the next step.
        features = (Dim(1, "output features"), Dim(0, "input features"))
        by_id: dict[int, LayoutRole] = {id(v): Wants("column", features) for v in variables if len(v.shape) == 2}
        if "bias" in own and "kernel" in own:
            by_id[id(own["bias"])] = Follows("bias", own["kernel"], (1,))
        return by_id
    return roles_by_shapes(kernels)


# ---- variables that belong to a kernel, and embeddings ------------------------------------------------


def _followers(layer: Any, kernel: Kernel, own: dict[str, Any]) -> dict[int, LayoutRole]:
    """Return how to split bias, scale and LoRA factors of a Dense or EinsumDense (their roles): like its kernel."""
    _, labels, output = equation_of(layer) or ("", "", "")
    aligned = {"bias": output, "kernel_scale": output}  # both are broadcast against the output
    # LoRA adds a @ b to the kernel: a has its leading dims, b its last one; "?" is the rank, too short to split.
    exact = {"lora_kernel_a": labels[:-1] + "?", "lora_kernel_b": "?" + labels[-1:]}
    by_id: dict[int, LayoutRole] = {}
    for name in own.keys() & (aligned.keys() | exact.keys()):
        variable = own[name]
        rank = len(variable.shape)
        # Align a bias of fewer dims with the output's last ones, as broadcasting does.
        spelt = exact.get(name) or aligned[name].rjust(rank, "?")[-rank:] if rank else ""
        if len(spelt) == rank:
            by_id[id(variable)] = _along(name, variable, spelt, leader=kernel.variable, labels=labels)
    return by_id


def _along(rule: str, variable: Any, spelt: str, *, leader: Any, labels: str) -> Follows:
    dims = (
        # A dim whose length differs from the leader's (1, or packed) cannot be split like it.
        labels.index(c) if c in labels and size == leader.shape[labels.index(c)] else None
        for c, size in zip(spelt, variable.shape, strict=True)
    )
    return Follows(rule, leader, tuple(dims))


def _embedding_roles(own: dict[str, Any]) -> dict[int, LayoutRole]:
    """Return how to split an Embedding's variables best (their roles): by the vocabulary or, if short, by features."""
    if (embedding := own.get("embeddings")) is None:
        return {}
    rows, features = Dim(0, "vocabulary entries"), Dim(1, "features")
    # An embedding that is wider than tall has too few rows to split (token types, segments).
    tall = embedding.shape[0] >= embedding.shape[1]
    by_id: dict[int, LayoutRole] = {id(embedding): Wants("vocabulary", (rows, features) if tall else (features, rows))}
    if (reverse := own.get("reverse_embeddings")) is not None:
        by_id[id(reverse)] = Wants("vocabulary", (Dim(1, rows.what), Dim(0, features.what)))
    for name, leader, spelt, labels in (
        ("embeddings_scale", embedding, "v??", "vf"),
        ("embeddings_zero", embedding, "v??", "vf"),
        ("lora_embeddings_a", embedding, "v?", "vf"),
        ("lora_embeddings_b", embedding, "?f", "vf"),
        ("reverse_embeddings_scale", reverse, "v" if reverse is None else "??v", "fv"),
    ):
        variable = own.get(name)
        if variable is not None and leader is not None:
            rank = len(variable.shape)
            # A scale has one dim (rows) or more (groups within a row): take as many letters as it has dims.
            part = spelt[-rank:] if spelt.endswith("v") else spelt[:rank]
            by_id[id(variable)] = _along(name, variable, part, leader=leader, labels=labels)
    return by_id


# ---- convolutions and recurrent cells ---------------------------------------------------------------


def _conv_roles(layer: Any, own: dict[str, Any]) -> dict[int, LayoutRole]:
    """Return how to split a convolution's variables best (their roles): by output channels, else by input channels."""
    kernel = own["kernel"]
    last = len(kernel.shape) - 1
    # A depthwise kernel ends in (channels, multiplier), a transposed one in (outputs, inputs): there the next to last
    # is the one to split.
    first, second = ("output channels", "input channels") if is_kind(layer, "BaseConv") else ("channels",) * 2
    order = (last, last - 1) if is_kind(layer, "BaseConv") else (last - 1, last)
    by_id: dict[int, LayoutRole] = {id(kernel): Wants("channels", (Dim(order[0], first), Dim(order[1], second)))}
    # A depthwise bias has channels x multiplier entries: it follows only if the multiplier is 1.
    if (bias := own.get("bias")) is not None and bias.shape[0] == kernel.shape[order[0]]:
        by_id[id(bias)] = Follows("bias", kernel, (order[0],))
    return by_id


def _separable_roles(own: dict[str, Any]) -> dict[int, LayoutRole]:
    """Return how to split a separable convolution (the roles): depthwise kernel and bias like the pointwise kernel."""
    pointwise, depthwise = own["pointwise_kernel"], own["depthwise_kernel"]
    inputs, outputs = len(pointwise.shape) - 2, len(pointwise.shape) - 1
    by_id: dict[int, LayoutRole] = {
        id(pointwise): Wants("column", (Dim(outputs, "output channels"), Dim(inputs, "input channels"))),
        id(depthwise): Follows("depthwise", pointwise, (*(None,) * inputs, inputs, None)),
    }
    if "bias" in own:
        by_id[id(own["bias"])] = Follows("bias", pointwise, (outputs,))
    return by_id


# ---- kernels, and pairs by their shapes ---------------------------------------------------------------

_CONVOLUTIONS = ("BaseConv", "BaseConvTranspose", "BaseDepthwiseConv", "BaseSeparableConv", "ConvLSTMCell")
"""Keras' base classes of convolution layers, by name: none of their kernels are stacked matrices of experts."""
_BY_FEATURE = """
Activation ActivityRegularization AlphaDropout BaseGlobalPooling BasePooling BatchNormalization Dropout ELU
GaussianDropout GaussianNoise Identity LeakyReLU ReLU BaseSpatialDropout UpSampling1D UpSampling2D UpSampling3D
ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
"""Names of Keras layers that compute each feature, an element of the last dim, from that feature alone.

Two kernels may be split as a pair, the first along its outputs and the second along its inputs, if only such layers are
between them: each device then computes its own features through both kernels."""
_OVER_FEATURES = ("softmax", "log_softmax", "sparsemax", "glu")
"""Names of activations that compute each feature from all features.

Two kernels with one between them are not split as a pair, the first along its outputs and the second along its inputs:
no device would have all features that the activation needs."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A variable that maps input features to output features, and which of its dims belong to which."""

    variable: Any
    labels: str
    """One letter per dim of the variable, as in an einsum equation."""
    inputs: tuple[int, ...]
    """Indices of the dims that are contracted (summed over), in the order of the layer's input."""
    outputs: tuple[int, ...]
    """Indices of the dims that the output has, in the order of the layer's output."""

    @property
    def is_matrix(self) -> bool:
        """Whether the kernel has one input dim and one output dim."""
        return len(self.inputs) == len(self.outputs) == 1

    def size(self, dims: tuple[int, ...]) -> int:
        """Return the product of the lengths of ``dims``, which are indices into the kernel's shape."""
        return math.prod(int(self.variable.shape[d]) for d in dims)


def kernels_of(layer: Any, own: Sequence[Any]) -> list[Kernel]:
    """Return the kernels of a layer: the one of a Dense or EinsumDense, or the stacked matrices of experts."""
    named = {v.name: v for v in own}
    if equation := equation_of(layer):
        kernel = named.get("kernel")
        if kernel is None or len(kernel.shape) != len(equation[1]):
            return []  # packed to fewer dims (int4, GPTQ): the equation no longer describes it
        return [_einsum_kernel(kernel, *equation)]
    if is_kind(layer, *_CONVOLUTIONS):
        return []  # over one dim, a kernel has three dims as well: window, inputs, outputs
    # Experts of a mixture, as every KerasHub model stacks them: (expert, input, output).
    return [Kernel(v, "eio", (1,), (2,)) for v in own if len(v.shape) == 3]


def equation_of(layer: Any) -> tuple[str, str, str] | None:
    """Return the einsum labels of a layer's input, kernel and output (Dense: ``i``, ``io``, ``o``); else ``None``."""
    if is_kind(layer, "EinsumDense"):
        left, _, output = re.sub(r"[\s.]", "", layer.equation).partition("->")
        data, _, kernel = left.partition(",")
        return data, kernel, output
    if is_kind(layer, "Dense"):
        return "i", "io", "o"
    return None


def _einsum_kernel(variable: Any, data: str, kernel: str, output: str) -> Kernel:
    # Letters in both the input and the output (a stack's own dim) are neither contracted nor produced.
    contracted = sorted((c for c in kernel if c in data and c not in output), key=data.index)
    produced = sorted((c for c in kernel if c in output and c not in data), key=output.index)
    return Kernel(variable, kernel, tuple(map(kernel.index, contracted)), tuple(map(kernel.index, produced)))


def roles_by_shapes(kernels: Iterable[Kernel]) -> dict[int, LayoutRole]:
    """Return the roles of a block's kernels, by ``id(variable)``; shapes tell which two of them form a pair."""
    by_id: dict[int, LayoutRole] = {}
    before: list[Kernel] = []
    for kernel in kernels:
        if kernel.is_matrix:
            rule = "row" if any(_feeds(earlier, kernel) for earlier in before) else "column"
            outputs, inputs = Dim(kernel.outputs[0], "output features"), Dim(kernel.inputs[0], "input features")
            # A stack of experts comes last: an expert axis takes that dim first, others only if nothing else divides.
            rest = [Dim(d, MATRICES) for d in range(len(kernel.labels)) if d not in (outputs.index, inputs.index)]
            role = Wants(rule, (*((inputs, outputs) if rule == "row" else (outputs, inputs)), *rest))
        else:
            role = _projection(kernel)
        # A row-parallel kernel ends its pair: what comes after it reads the block's width again.
        if role.rule != "row":
            before.append(kernel)
        by_id.setdefault(id(kernel.variable), role)
    return by_id


def _feeds(first: Kernel, second: Kernel) -> bool:
    """Whether ``second`` maps the outputs of ``first`` back to the block's width, as the shapes of both kernels tell.

    The outputs of ``first`` may be twice as many as the inputs of ``second`` (with a gate) or three times (query, key
    and value in one kernel). Two square matrices count as no pair, because their shapes do not tell.
    """
    made, width = first.size(first.outputs), first.size(first.inputs)
    intermediate = second.size(second.inputs)
    # Only a kernel that restores the width can close a pair: the residual connection adds its output to the input.
    if second.size(second.outputs) != width or len(first.inputs) != 1:
        return False
    if first.is_matrix:
        return width != intermediate and made in (intermediate, 2 * intermediate)
    return made in (intermediate, 3 * intermediate)


def _projection(kernel: Kernel) -> Wants:
    """Return the role of an attention kernel, whose inputs or outputs have several dims: heads, and features of a head.

    Best is a split by heads, then one by the model's width, which costs one small all-reduce. Splitting the features of
    a head comes last: it cuts rotary embeddings and caches in parts, for which XLA adds dozens of transfers.
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


# ---- pairs in the graph of a functional model ---------------------------------------------------------


def roles_by_graph(
    model: Any, kernels: dict[int, FeatureKernel], known: dict[int, LayoutRole], by_rule: dict[int, LayoutRole]
) -> dict[int, LayoutRole]:
    """Return the roles of pairs of kernels in a functional model's graph, and of variables in layers between them.

    In a pair, the second kernel alone reads what the first computes. ``kernels`` has those that may form pairs, by the
    ``id`` of their layer; ``known`` has the roles found by shapes, and ``by_rule`` those of users' rules, which stay.
    """
    changed: dict[int, LayoutRole] = {}
    if not (links := list(sole_consumers(model))):
        return changed  # most layers have no graph: do not go through all kernels for each
    # What ends a pair by its shape ends one that the graph does not show: a gate, a block of layers.
    ends = {key for key, one in kernels.items() if getattr(known.get(id(one.kernel)), "rule", "") == "row"}
    reader = {id(one): other for one, other in links}
    for layer, _ in links:
        # The output of a pair is whole again after the all-reduce: its second kernel begins no pair, or two pairs would
        # share a kernel.
        if id(layer) not in kernels or id(layer) in ends or not _by_feature(layer):
            continue
        between, following = list[Any](), reader[id(layer)]
        while id(following) in reader and id(following) not in kernels and _passes(following):
            between.append(following)
            following = reader[id(following)]
        if id(following) not in kernels:
            continue
        ends.add(id(following))
        first, second = kernels[id(layer)], kernels[id(following)]
        changed[id(first.kernel)] = Wants("column", (first.outputs, first.inputs))
        changed[id(second.kernel)] = Wants("row", (second.inputs, second.outputs))
        for v in (v for one in between for v in own_variables(one)):
            # A depthwise kernel ends in (features, multiplier), a vector in features.
            features = len(v.shape) - (2 if len(v.shape) > 1 else 1)
            dims = tuple(first.outputs.index if d == features else None for d in range(len(v.shape)))
            changed[id(v)] = Follows("features", first.kernel, dims)
    return {key: role for key, role in changed.items() if key not in by_rule}


@dataclass(frozen=True, slots=True)
class FeatureKernel:
    """A kernel that maps the last dim of its layer's input to that of the output, as in a Dense; it may form a pair."""

    kernel: Any
    """The Keras variable."""
    inputs: Dim
    """The dim of the kernel that belongs to the features of the input."""
    outputs: Dim
    """The dim of the kernel that belongs to the features of the output."""


def feature_kernel(layer: Any, own: Sequence[Any]) -> FeatureKernel | None:
    """Return a layer's kernel if it maps the last dim of the input to the last dim of the output; ``None`` if not."""
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
        return FeatureKernel(kernel, Dim(inputs, "input channels"), Dim(outputs, "output channels"))
    equation = equation_of(layer)
    if equation is None or rank != len(equation[1]):
        return None
    data, labels, output = equation
    matrix = _einsum_kernel(kernel, data, labels, output)
    if not matrix.is_matrix or data[-1] != labels[matrix.inputs[0]] or output[-1] != labels[matrix.outputs[0]]:
        return None
    return FeatureKernel(kernel, Dim(matrix.inputs[0], "input features"), Dim(matrix.outputs[0], "output features"))


def _passes(layer: Any) -> bool:
    # By name, and Keras' own classes only: its base classes (BasePooling) are not exported, and a user's class may
    # share a name.
    names = {cls.__name__ for cls in type(layer).__mro__ if cls.__module__.startswith("keras.")}
    last = getattr(layer, "data_format", None) in (None, "channels_last")
    if "BatchNormalization" in names:
        # Batch norm says its feature dim by axis; it has no data_format.
        last = layer.axis in (-1, len(layer.input.shape) - 1)
    # With a multiplier, outputs of one input channel are neighbours, and vectors behind it have another length.
    if "BaseDepthwiseConv" in names:
        return last and layer.depth_multiplier == 1 and _by_feature(layer)
    return isinstance(layer, keras.Layer) and last and not names.isdisjoint(_BY_FEATURE.split()) and _by_feature(layer)


def _by_feature(layer: Any) -> bool:
    """Whether a layer has no activation, or one that computes each feature from the same feature alone."""
    return getattr(getattr(layer, "activation", None), "__name__", "") not in _OVER_FEATURES
