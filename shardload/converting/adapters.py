"""Convert checkpoints with LoRA: combine a partial step with its base, and merge LoRA factors into kernels.

A partial step stores only the trained weights, for example LoRA factors. The base is the checkpoint with all others.

    base ─────────┐
                  ├─► source with LoRA ─► if requested, merged: kernel + alpha / rank · a @ b
    partial step ─┘   (the step's weights replace those of the base)

Merging has one kernel and its factors in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from shardload.converting.adapter_plans import AdaptedKernel, plan_adapters, replacing_value
from shardload.converting.computing import StoredValue
from shardload.converting.hub_sites import Site
from shardload.converting.source import ModelValues, Source, viewed
from shardload.errors import MismatchError, UnsupportedError, UsageError
from shardload.hub import quantised
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.layer_settings import enable_saved_lora
from shardload.keras_bridge.lora import LoraKernel, lora_kernels, merge, merged_array
from shardload.loaders import open_manifest
from shardload.loaders.peft import Weighted
from shardload.manifest import Manifest, Tensor
from shardload.mapping.stored_state import map_state
from shardload.stores.location import Location
from shardload.units import plural


def check_base(manifest: Manifest, base: Any) -> None:
    """Raise `UsageError` if a partial step has no ``base`` (source of the other weights), or another source has one."""
    left_out = manifest.n_left_out
    if left_out and base is None:
        raise UsageError(
            f"Cannot convert {manifest.source} alone: it is a partial step, without {plural(left_out, 'weight')} of "
            "its model. Pass the checkpoint that has them: base=SOURCE (--base SOURCE)"
        )
    if base is not None and not left_out:
        quantised.check(manifest)  # "has all weights" would be wrong of an adapter
        raise UsageError(f"Cannot use base={str(base)!r}: {manifest.source} has all weights. Omit base")


def on_base(base: Source, path: Location) -> Source:
    """Return a source with the weights in the partial step at ``path`` (LoRA factors too), the others from ``base``."""
    step = open_manifest(path)
    structure = step.metadata["structure"]
    # The base was built without LoRA: create the factors' variables before the step's tensors are mapped to them.
    with abstraction.abstract():
        enable_saved_lora(base.model, structure.get("form", {}))
    mapping = map_state(base.model, step, items="weights", has_base=True)
    problems = [str(found) for found in mapping.mismatched]
    problems += [f"the step has no tensor for {name!r}" for name in mapping.missing]
    problems += [f"the model has no variable for {name!r}" for name in mapping.unused]
    if problems:
        raise MismatchError(
            f"Cannot convert {path} with {base.manifest.source} as its base: {problems[0]}. Pass the checkpoint that "
            "its model was loaded from"
        )
    values = base.values | {id(b.variable): viewed(b, step) for b in mapping.bindings}
    note = f"{plural(len(mapping.bindings), 'weight')} from {path}, the others from {base.manifest.source}"
    return replace(base, values=values, adapters=step, notes=(*base.notes, note))


def refuse_adapters(source: Source, layers: Sequence[Any], to: str, *, merge_lora: bool) -> None:
    """Raise if the target cannot store the source's LoRA factors as requested, either merged into kernels or not."""
    name = str((source.adapters or source.manifest).source)
    if merge_lora and not layers:
        raise UsageError(f"Cannot merge LoRA (merge_lora, --merge-lora): {name} has no LoRA adapters")
    if merge_lora and to == "orbax":
        raise UnsupportedError(
            f"Cannot merge LoRA into an Orbax checkpoint: it describes {name} with its adapters. Convert with --to h5 "
            "or --to safetensors, or omit --merge-lora"
        )
    if layers and not merge_lora and to != "orbax":
        factor = next(v for v in layers[0].variables if "lora_" in v.name)
        raise UnsupportedError(
            f"Cannot convert {name} to {to}: LoRA is enabled in {len(layers)} of its layers ({factor.path!r} …), and "
            "the target has no place for the factors. Pass merge_lora=True (--merge-lora) to write merged weights, or "
            "convert to the format orbax (--to orbax)"
        )


def with_merged_lora(source: Source, layers: Sequence[Any]) -> Source:
    """Return a source in which kernels of ``layers`` include their LoRA factors; each is merged when it is read.

    While this source is used, `keras_bridge.lora.hidden` must make these layers look like layers without LoRA.
    """
    kernels = lora_kernels(layers)
    values = dict(source.values)

    def merged(found: LoraKernel) -> jax.Array:
        kernel, a, b = (whole_value(source, variable) for variable in (found.kernel, found.a, found.b))
        return merge(kernel, a, b, scale=found.scale)

    for found in kernels:
        stored = values[id(found.kernel)]
        # A function, not an array: each kernel is merged when it is written, and released.
        values[id(found.kernel)] = StoredValue(stored.variable, stored.dtype, live=partial(merged, found))
    factors = frozenset(id(v) for found in kernels for v in (found.a, found.b))
    values = {i: value for i, value in values.items() if i not in factors}
    return replace(source, values=values, merged=factors, notes=(*source.notes, merge_note(kernels)))


def with_peft(source: Source, adapters: Sequence[Weighted]) -> Source:
    """Return a source whose tensors have no names of Hugging Face, with adapters of PEFT merged as it is read."""
    plan = plan_adapters(source.model, adapters, merge=True)
    values = dict(source.values)
    for site, tensor in plan.replaced:
        own = values[id(site.twin.own)]
        values[id(site.twin.own)] = StoredValue(own.variable, own.dtype, live=partial(_replaced, site, tensor, own))
    before = replace(source, values=dict(values))
    for kernel in plan.kernels:
        own = values[id(kernel.site.twin.own)]
        values[id(own.variable)] = StoredValue(own.variable, own.dtype, live=partial(_merged, before, kernel))
    names = ", ".join(str(one.adapter.location) for one in adapters)
    note = f"{names} merged into {plural(len(plan.kernels), 'kernel')}: computed in float32 and rounded once"
    return replace(source, values=values, notes=(*source.notes, note, *plan.notes))


def _replaced(site: Site, tensor: Tensor, own: StoredValue) -> jax.Array:
    return jax.numpy.asarray(replacing_value(site, tensor), own.dtype)


def _merged(source: Source, kernel: AdaptedKernel) -> jax.Array:
    value = whole_value(source, kernel.site.twin.own)
    return merged_array(value, *kernel.merging_factors(), along_rows=kernel.dims.along_rows)


def whole_value(source: Source, variable: Any) -> Any:
    """Read the value of a variable of a source's model as a whole."""
    value = source.values[id(variable)]
    if value.live is not None:
        return value.live()
    # `ModelValues` reads a view, or runs the step that computes the value; here it is given one weight only.
    return ModelValues(source, {"": value}).rows("", 0, int(variable.shape[0])) if value.array is None else value.array


def merge_note(kernels: Sequence[LoraKernel]) -> str:
    """Return a sentence for a conversion's report: into how many kernels LoRA was merged, and how that was rounded."""
    return (
        f"LoRA was merged into {plural(len(kernels), 'kernel')} ({kernels[0].kernel.path!r} …): computed in float32 "
        "and rounded once to the dtype of each kernel"
    )
