"""Map a file of Keras 2 to an existing model: by the order of layers and weights, never by names, as Keras does.

    file    dense [kernel:0, bias:0]   dropout []   dense_1 [kernel:0, bias:0]   top_level_model_weights [scale:0]
              │                                       │                            │
    model   embed [kernel, bias]  (input_layer)     head [kernel, bias]          its own variables [scale]

Layers without weights are left out on both sides. Counts that differ are an error, also without ``strict``: everything
after the first difference would go to the wrong layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardload.errors import MismatchError
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.legacy import legacy_weights, own_weights
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import unique
from shardload.loaders.keras_legacy import LAYERS, OPTIMIZER, TOP_LEVEL
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.variable_map import (
    Mismatch,
    Runtime,
    VariableMap,
    bind,
    refused_among,
    split_missing,
    variable_names,
)
from shardload.transfer.planning import Binding
from shardload.units import plural

_NO_STATE = (
    "the optimizer's state in the file was left out: its order is that of the library that wrote it, and Keras 3 does "
    "not load its slots either; training goes on with a new optimizer, at its configured learning rate"
)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedStep:
    """Assignment of one layer's weights, and what Keras computes from them (`Normalization`)."""

    saveable: Any
    bindings: tuple[Binding, ...]
    computes: ClassVar[bool] = False

    @property
    def owner(self) -> str:
        """The layer."""
        return f"layer {self.saveable.name!r}"

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of its bindings."""
        return tuple(binding.name for binding in self.bindings)

    def run(self, runtime: Runtime) -> None:
        """Assign the arrays, then finish the layer as Keras does."""
        for binding in self.bindings:
            array = runtime.take(binding.name)
            runtime.assign(binding.variable, array, lambda variable, value: variable.assign(value))
        if hasattr(self.saveable, "finalize_state"):
            self.saveable.finalize_state()


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    owner: Any
    variable: Variable
    tensor: Tensor

    @property
    def fits(self) -> bool:
        return self.tensor.shape == tuple(self.variable.shape)


def map_by_order(model: Any, manifest: Manifest) -> VariableMap:
    """Map tensors to variables by their order.

    Args:
        model: A built Keras model, abstract or not; it is not changed.
        manifest: Of a file of Keras 2.

    Raises:
        MismatchError: When the numbers of layers with weights, or of the weights of a layer, differ.
    """
    pairs = _pairs(model, manifest)
    weights = list(model.weights)
    everything = unique([*weights, *state_of(model)])
    names = variable_names(everything)
    # A variable that two layers own keeps the last value, as in Keras.
    last = list({id(pair.variable): pair for pair in pairs if pair.fits}.values())
    wrong = [pair for pair in pairs if not pair.fits]
    steps = _steps(last, names)
    missing, missing_variables, state = split_missing(weights, everything, [pair.variable for pair in pairs], names)
    used = {pair.tensor.name for pair in pairs}
    left = [name for name in manifest.tensors if name not in used]
    skipped = tuple(name for name in left if name.startswith(OPTIMIZER))
    return VariableMap(
        bindings=tuple(binding for step in steps for binding in step.bindings),
        computed=(),
        missing=missing,
        missing_variables=missing_variables,
        state=state,
        unused=tuple(name for name in left if not name.startswith(OPTIMIZER)),
        skipped=skipped,
        mismatched=tuple(Mismatch.of_shapes(pair.variable, pair.tensor.name, pair.tensor.shape) for pair in wrong),
        notes=(_NO_STATE,) if skipped and getattr(model, "optimizer", None) is not None else (),
        steps=steps,
        refused=refused_among(weights, [p.variable for p in wrong], [p.variable for p in last], names),
    )


def _steps(pairs: Sequence[_Pair], names: dict[int, str]) -> tuple[OrderedStep, ...]:
    owners = {id(pair.owner): pair.owner for pair in pairs}
    bindings: dict[int, list[Binding]] = {owner: [] for owner in owners}
    for pair in pairs:
        bindings[id(pair.owner)].append(bind(pair.variable, View.whole(pair.tensor), names))
    return tuple(OrderedStep(owner, tuple(bindings[number])) for number, owner in owners.items())


def _pairs(model: Any, manifest: Manifest) -> list[_Pair]:
    stored = list(manifest.metadata[LAYERS].items())
    layers = [(layer, found) for layer in model.layers if (found := legacy_weights(layer))]
    if len(stored) != len(layers):
        raise MismatchError(
            f"Cannot load {manifest.source} into {model.name!r} by order: the file has "
            f"{plural(len(stored), 'layer')} with weights ({_some([name for name, _ in stored])}), the model "
            f"{len(layers)} ({_some([layer.name for layer, _ in layers])}). Build the model that was saved"
        )
    pairs: list[_Pair] = []
    for (name, tensors), (layer, variables) in zip(stored, layers, strict=True):
        pairs += _paired(manifest, layer, variables, tensors, f"{name!r} of the file and {layer.name!r} of the model")
    if (own := manifest.metadata.get(TOP_LEVEL)) is not None:
        pairs += _paired(manifest, model, own_weights(model), own, "the weights that belong to the model itself")
    return pairs


def _paired(
    manifest: Manifest, owner: Any, variables: Sequence[Variable], tensors: Sequence[str], what: str
) -> list[_Pair]:
    if len(variables) != len(tensors):
        raise MismatchError(
            f"Cannot load {manifest.source} by order: {what} differ in their number, {len(tensors)} in the file and "
            f"{len(variables)} in the model. Build the model that was saved"
        )
    return [_Pair(owner, v, manifest.tensors[name]) for v, name in zip(variables, tensors, strict=True)]


def _some(names: Sequence[str], *, limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (" …" if len(names) > limit else "") or "none"
