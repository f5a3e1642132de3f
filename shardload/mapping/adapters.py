"""LoRA adapters of a model, which files of Keras do not store: its hooks merge them into kernels, and load zeros.

With both factors zero, neither has a gradient, so such an adapter never trains. Instead:

    no values yet       begin as new ones      ┐ the second factor is zero: the model computes what the file
    new, not trained    keep their values      ┘ has, and trains
    trained             missing: an error under ``strict``, as they belong to other kernels
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardload.keras_bridge.layer_settings import settings_of
from shardload.keras_bridge.lora import adapters_of, changes_nothing, lora_layers
from shardload.keras_bridge.variables import has_value
from shardload.manifest import Manifest
from shardload.mapping.layer_step import LayerStep
from shardload.mapping.partial_steps import described_adapters
from shardload.mapping.variable_map import Computed, VariableMap, variable_names
from shardload.units import plural


def with_adapters_kept(found: VariableMap, model: Any, manifest: Manifest) -> VariableMap:
    """Return the mapping of a file of Keras without the zeros that Keras' hooks assign to adapters."""
    pairs = adapters_of(lora_layers(model))
    zeroed = {id(v) for c in found.computed for v in c.variables}
    pairs = [pair for pair in pairs if zeroed.issuperset(map(id, pair))]
    if not pairs:
        return with_adapter_advice(found, model, manifest)
    trained = [(a, b) for a, b in pairs if has_value(b) and not changes_nothing(b)]
    own = {id(v) for pair in trained for v in pair}
    new = [v for pair in pairs for v in pair if id(v) not in own]
    old, names = [v for pair in trained for v in pair], variable_names(model.weights)
    notes = found.notes
    if old:
        notes += (
            f"{plural(len(trained), 'trained LoRA adapter')} kept: if the file was saved with adapters, they are in "
            "its kernels already",
        )
    if new:
        notes += (f"{plural(len(new) // 2, 'LoRA adapter')} of the model kept as new: they change nothing yet",)
    kept = {id(v): v for pair in pairs for v in pair}
    found = replace(
        found,
        computed=tuple(c for c in (_without(c, kept) for c in found.computed) if c.variables),
        steps=tuple(_keeping(step, kept) if isinstance(step, LayerStep) else step for step in found.steps),
        missing=(*found.missing, *(names[id(v)] for v in old)),
        missing_variables=(*found.missing_variables, *old),
        state=(*found.state, *new),
        notes=notes,
    )
    return with_adapter_advice(found, model, manifest)


def with_adapter_advice(found: VariableMap, model: Any, manifest: Manifest) -> VariableMap:
    """Return a mapping with the way out if the adapters of the model are not in the checkpoint."""
    layers = lora_layers(model)
    left = {id(v) for v in found.missing_variables} | {id(v) for _, v in found.refused}
    if found.advice or left.isdisjoint(id(v) for pair in adapters_of(layers) for v in pair):
        return found
    has = described_adapters(settings_of(model))
    advice = f" {manifest.source} has no LoRA adapters, the model has some in {has}. Load it before enable_lora"
    return replace(found, advice=f"{advice}. strict=False keeps the adapters as they are.")


def with_zeros_noted(found: VariableMap, model: Any) -> VariableMap:
    """Return a mapping that says which adapters become zero, as in Keras."""
    zeroed = {id(v) for c in found.computed for v in c.variables}
    n = sum(id(b) in zeroed for _, b in adapters_of(lora_layers(model)))
    note = f"as in Keras, {plural(n, 'LoRA adapter')} became zero and cannot train: load the file before enable_lora"
    return replace(found, notes=(*found.notes, note)) if n else found


def _without(computed: Computed, adapters: dict[int, Any]) -> Computed:
    left = [i for i, v in enumerate(computed.variables) if id(v) not in adapters]
    return replace(
        computed,
        names=tuple(computed.names[i] for i in left),
        variables=tuple(computed.variables[i] for i in left),
    )


def _keeping(step: LayerStep, adapters: dict[int, Any]) -> LayerStep:
    return replace(
        step,
        variables=tuple(v for v in step.variables if id(v) not in adapters),
        kept=tuple(v for v in step.variables if id(v) in adapters),
    )
