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
from collections.abc import Sequence
from typing import Any

from shardload.keras_bridge.model_state import slots_of
from shardload.layouts import model_variables
from shardload.layouts.kernels import (
    Kernel,
    equation_of,
    feature_kernel,
    kernels_of,
    roles_by_graph,
    roles_by_shapes,
)
from shardload.layouts.layer_rules import roles_by_layer_rules
from shardload.layouts.model_variables import is_kind
from shardload.layouts.role_layouts import Dim, Follows, Role, Wants, by_shape


def roles(model: Any, *, by_user: bool = True) -> dict[int, Role]:
    """Return the role of every variable of ``model`` (including optimizer slots and metrics), by ``id(variable)``.

    Reads layer objects, shapes and dtypes only: the variables may have no values. ``by_user`` applies the layout rules
    that users registered.
    """
    every = list(model_variables.nested_layers(model))
    own = {id(layer): model_variables.own_variables(layer, children) for layer, children in every}
    kernels = {id(layer): kernels_of(layer, own[id(layer)]) for layer, _ in every}
    by_rule: dict[int, Role] = dict(roles_by_layer_rules(layer for layer, _ in every)) if by_user else {}
    # Users' rules win over everything derived below.
    by_id = dict(by_rule)
    # Outermost layers first, and the first answer stays: a block that pairs its sub-layers' kernels knows more of
    # them than each sub-layer does alone.
    for layer, children in every:
        below = (kernels[id(child)] for child in children)
        for role_of in (
            _own_roles(layer, own[id(layer)], kernels[id(layer)]),
            roles_by_shapes(itertools.chain.from_iterable(below)),
        ):
            for key, role in role_of.items():
                by_id.setdefault(key, role)
    # A functional model's graph tells pairs for certain, so its answer replaces those by shape, but not users' rules.
    of_features = {id(layer): feature_kernel(layer, own[id(layer)]) for layer, _ in every}
    pairable = {key: one for key, one in of_features.items() if one is not None and id(one.kernel) not in by_rule}
    for layer, _ in every:
        by_id |= roles_by_graph(layer, pairable, by_id, by_rule)
    # Everything else, such as metrics and weights of unknown layers, goes by shape.
    for variable in model_variables.all_variables(model).values():
        by_id.setdefault(id(variable), by_shape(variable))
    # Last, and overwriting: to the shape rule above, a slot is a variable like any other.
    for slot, variable in slots_of(model):
        by_id[id(slot)] = Follows("slot", variable, tuple(range(len(variable.shape))))
    return by_id


def _own_roles(layer: Any, variables: Sequence[Any], kernels: Sequence[Kernel]) -> dict[int, Role]:
    """Return the roles of a layer's own variables."""
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
        return _recurrent_roles(own)
    return roles_by_shapes(kernels)


# ---- variables that belong to a kernel, and embeddings ------------------------------------------------


def _followers(layer: Any, kernel: Kernel, own: dict[str, Any]) -> dict[int, Role]:
    """Return the roles of bias, scale and LoRA factors of a Dense or EinsumDense, dim by dim along its kernel."""
    _, labels, output = equation_of(layer) or ("", "", "")
    aligned = {"bias": output, "kernel_scale": output}  # both are broadcast against the output
    # LoRA adds a @ b to the kernel: a has its leading dims, b its last one; "?" is the rank, too short to split.
    exact = {"lora_kernel_a": labels[:-1] + "?", "lora_kernel_b": "?" + labels[-1:]}
    by_id: dict[int, Role] = {}
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


def _embedding_roles(own: dict[str, Any]) -> dict[int, Role]:
    """Split an embedding by rows (the vocabulary) if it is tall, by features if it is wide."""
    by_id: dict[int, Role] = {}
    embedding = own.get("embeddings")
    if embedding is None:
        return by_id
    rows, features = Dim(0, "vocabulary entries"), Dim(1, "features")
    # An embedding that is wider than tall has too few rows to split (token types, segments).
    tall = embedding.shape[0] >= embedding.shape[1]
    by_id[id(embedding)] = Wants("vocabulary", (rows, features) if tall else (features, rows))
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


def _conv_roles(layer: Any, own: dict[str, Any]) -> dict[int, Role]:
    """Split a convolution by its output channels, else by its input channels; its bias follows."""
    kernel = own["kernel"]
    last = len(kernel.shape) - 1
    # A depthwise kernel ends in (channels, multiplier), a transposed one in (outputs, inputs): there the next to last
    # is the one to split.
    first, second = ("output channels", "input channels") if is_kind(layer, "BaseConv") else ("channels",) * 2
    order = (last, last - 1) if is_kind(layer, "BaseConv") else (last - 1, last)
    by_id: dict[int, Role] = {
        id(kernel): Wants("channels", (Dim(order[0], first), Dim(order[1], second))),
    }
    # A depthwise bias has channels x multiplier entries: it follows only if the multiplier is 1.
    if (bias := own.get("bias")) is not None and bias.shape[0] == kernel.shape[order[0]]:
        by_id[id(bias)] = Follows("bias", kernel, (order[0],))
    return by_id


def _separable_roles(own: dict[str, Any]) -> dict[int, Role]:
    """Split the second kernel by its output channels; where a pair splits it by its inputs, the first one follows."""
    pointwise, depthwise = own["pointwise_kernel"], own["depthwise_kernel"]
    inputs, outputs = len(pointwise.shape) - 2, len(pointwise.shape) - 1
    by_id: dict[int, Role] = {
        id(pointwise): Wants("column", (Dim(outputs, "output channels"), Dim(inputs, "input channels"))),
        id(depthwise): Follows("depthwise", pointwise, (*(None,) * inputs, inputs, None)),
    }
    if "bias" in own:
        by_id[id(own["bias"])] = Follows("bias", pointwise, (outputs,))
    return by_id


def _recurrent_roles(own: dict[str, Any]) -> dict[int, Role]:
    """Split both kernels by their outputs: each device has its units, and gathers all of them for the next step."""
    features = (Dim(1, "output features"), Dim(0, "input features"))
    by_id: dict[int, Role] = {id(v): Wants("column", features) for v in own.values() if len(v.shape) == 2}
    if "bias" in own and "kernel" in own:
        by_id[id(own["bias"])] = Follows("bias", own["kernel"], (1,))
    return by_id
