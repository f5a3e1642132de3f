"""What a load does with a model's LoRA adapters, for checkpoints that lack adapters, and those that have little else.

Files of Keras do not store adapters: Keras merges them into kernels when it saves. When it loads, it sets both factors
to zero; then neither has a gradient, so the adapter never trains. shardload does this with a model's adapters instead:

    without values      begin as new ones      ┐ the second factor is zero, so the model computes the same
    new, not trained    keep their values      ┘ as without adapters, and the adapters can be trained
    trained             reported as missing, an error under ``strict``: they were trained with other kernels

A partial step (``save_trainable_only``) stores adapters without the weights of the base model, which must be loaded:

    step                                   model
    lora_kernel_a, lora_kernel_b     ─►    replaced
    left out: kernel, embeddings, …        keeps its own kernel, …: same shapes, and it must have values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardload.errors import MismatchError
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.layer_settings import settings_of
from shardload.keras_bridge.lora import adapters_of, changes_nothing, lora_layers
from shardload.keras_bridge.variables import has_value
from shardload.manifest import Manifest
from shardload.mapping.layer_hooks import LayerStep
from shardload.mapping.state_tree import StateLeaf, Stored
from shardload.mapping.variable_map import Mismatch, VariableMap, variable_names
from shardload.units import plural


def with_adapters_kept(found: VariableMap, model: Any, manifest: Manifest) -> VariableMap:
    """Return ``found`` without Keras' zeros for LoRA adapters, which its files never store: these keep their values."""
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
        computed=tuple(c for c in (c.without(kept) for c in found.computed) if c.variables),
        steps=tuple(step.keeping(kept) if isinstance(step, LayerStep) else step for step in found.steps),
        missing=(*found.missing, *(names[id(v)] for v in old)),
        missing_variables=(*found.missing_variables, *old),
        state=(*found.state, *new),
        notes=notes,
    )
    return with_adapter_advice(found, model, manifest)


def with_adapter_advice(found: VariableMap, model: Any, manifest: Manifest) -> VariableMap:
    """Return ``found`` with advice (enable LoRA after the load) if the checkpoint lacks the model's LoRA adapters."""
    layers = lora_layers(model)
    left = {id(v) for v in found.missing_variables} | {id(v) for _, v in found.refused}
    if found.advice or left.isdisjoint(id(v) for pair in adapters_of(layers) for v in pair):
        return found
    has = described_adapters(settings_of(model))
    advice = f" {manifest.source} has no LoRA adapters, the model has some in {has}. Load it before enable_lora"
    return replace(found, advice=f"{advice}. strict=False keeps the adapters as they are.")


def with_zeros_noted(found: VariableMap, model: Any) -> VariableMap:
    """Return ``found`` with a note on how many LoRA adapters become zero, for a load that does all as Keras does."""
    zeroed = {id(v) for c in found.computed for v in c.variables}
    n = sum(id(b) in zeroed for _, b in adapters_of(lora_layers(model)))
    note = f"as in Keras, {plural(n, 'LoRA adapter')} became zero and cannot train: load the file before enable_lora"
    return replace(found, notes=(*found.notes, note)) if n else found


def require_values(model: Any, manifest: Manifest, left_out: Sequence[tuple[Stored, StateLeaf]]) -> None:
    """Raise a `MismatchError` unless the model has values for all weights that a partial step does not store."""
    weights = [leaf for _, leaf in left_out if leaf.kind == "weight"]
    if empty := [leaf for leaf in weights if not has_value(leaf.variable)]:
        adapters = _adapters(manifest.metadata["structure"].get("form"))
        lora = f", call {_call(model, adapters)}" if adapters else ""
        raise MismatchError(
            f"Cannot load {manifest.source} alone: it is a partial step, without {plural(len(weights), 'weight')} of "
            f"its model, such as {empty[0].variable.path!r}. Load the base model first{lora}, then "
            "shardload.restore(model, directory)"
        )


def different_base(left_out: Sequence[tuple[Stored, StateLeaf]]) -> tuple[Mismatch, ...]:
    """Return a mismatch for each weight that a partial step leaves out and that has another shape in this model."""
    return tuple(
        Mismatch(
            leaf.variable.path,
            "",
            leaf.shape,
            stored.shape,
            f"Variable {leaf.variable.path!r} has shape {leaf.shape}, but {stored.shape} in the model that this "
            "partial step was saved from: it belongs to another base model, which must be loaded first",
        )
        for stored, leaf in left_out
        if stored.shape != leaf.shape
    )


def lora_differences(model: Any, form: Any) -> tuple[Mismatch, ...]:
    """Return a mismatch for each layer with other LoRA rank or alpha than in ``form``, a step's settings of layers."""
    own, stored = _adapters(settings_of(model)), _adapters(form)
    found = []
    for path in own.keys() & stored.keys():
        for name in ("rank", "alpha"):
            has, was = own[path].get(name), stored[path].get(name)
            if has != was:
                message = f"LoRA of the layer {path!r} has {name} {has:g}, but {was:g} in the step"
                # By default, alpha equals the rank, so both differ together: one message per layer is enough.
                found.append(Mismatch(path, "", None, None, message))
                break
    return tuple(sorted(found, key=str))


def lora_advice(model: Any, form: Any) -> str:
    """Return advice on getting a model with a step's LoRA adapters (``form``); ``""`` if the model has the same."""
    own, stored = _adapters(settings_of(model)), _adapters(form)
    if own == stored:
        return ""
    if not stored:
        return f" The step has no LoRA adapters, the model has some in {_layers(own)}. Restore before enable_lora."
    has = f" The step has LoRA adapters in {_layers(stored)}"
    if own.keys() - stored.keys():
        return f"{has}, the model in {_layers(own)}. Enable the same ones: {_call(model, stored)}."
    if not own:
        return f"{has}, the model has none: call {_call(model, stored)} first."
    again = "LoRA cannot be enabled twice: load the base model again, then call"
    return f"{has}, the model in {_layers(own)}. {again} {_call(model, stored)}."


def described_adapters(form: Any) -> str:
    """Return a text about the LoRA adapters in ``form``, a step's settings of layers: ``2 layers (rank 4)``."""
    return _layers(_adapters(form))


def _layers(adapters: Mapping[str, Mapping[str, Any]]) -> str:
    forms = sorted({(found["rank"], found["alpha"]) for found in adapters.values()})
    texts = [f"rank {rank}" + (f", alpha {alpha:g}" if alpha != rank else "") for rank, alpha in forms]
    return f"{plural(len(adapters), 'layer')} ({' and '.join(texts)})"


def _call(model: Any, adapters: Mapping[str, Mapping[str, Any]]) -> str:
    forms = {(found["rank"], found["alpha"]) for found in adapters.values()}
    if len(forms) == 1:
        [(rank, alpha)] = forms
        # The method of KerasHub's backbones covers all layers, but takes no alpha.
        if alpha == rank:
            backbone = backbone_of(model)
            for name, owner in (("model" if backbone is model else "model.backbone", backbone), ("model", model)):
                if hasattr(owner, "enable_lora"):
                    return f"{name}.enable_lora(rank={rank})"
    path, first = next(iter(adapters.items()))
    more = " and so on for the others" if len(adapters) > 1 else ""
    return f"enable_lora(rank={first['rank']}, lora_alpha={first['alpha']:g}) of the layer {path!r}{more}"


def _adapters(form: Any) -> dict[str, dict[str, Any]]:
    """Return path of a layer → rank and alpha of its LoRA adapter, from settings of layers, which are untrusted."""
    found = {}
    for path, settings in form.items() if isinstance(form, Mapping) else ():
        lora = settings.get("lora") if isinstance(settings, Mapping) else None
        if isinstance(lora, Mapping) and all(isinstance(lora.get(n), (int, float)) for n in ("rank", "alpha")):
            found[path] = {"rank": lora["rank"], "alpha": float(lora["alpha"])}
    return found
