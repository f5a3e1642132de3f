"""Put an adapter of PEFT onto a live KerasHub model: as trainable LoRA of Keras, or merged into its kernels.

    `converting.adapter_plans` finds and checks all ─► LoRA is enabled, with factors in the form of the kernels,
                                                       or kernels are merged, one at a time

A model is changed only when the whole plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardload.converting.adapter_plans import AdaptedKernel, AdapterPlan, plan_adapters, replacing_value
from shardload.errors import UninitialisedError, UnsupportedError, UsageError, suggests_arguments
from shardload.keras_bridge.binding import binding_of, forget_compiled
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.lora import (
    adapters_of,
    changes_nothing,
    enable_lora_in,
    freeze_for_lora,
    lora_layers,
    merge_matrix,
)
from shardload.keras_bridge.model_state import plain_model
from shardload.keras_bridge.variables import direct_assign, has_value, stored_dtype, value_of
from shardload.pipeline.request import check_keras_model
from shardload.reports.markup import ShownAsText
from shardload.resolve.adapters import open_adapters, weighted_folders
from shardload.typing import AdapterLike
from shardload.units import check_kind, plural


@dataclass(frozen=True, slots=True)
class AdapterReport(ShownAsText):
    """What `load_adapter` did to a model."""

    layers: int
    """Number of kernels that got LoRA factors, or were merged."""
    replaced: int
    """Number of variables that got values of the adapter's own (``modules_to_save``, ``bias``)."""
    notes: tuple[str, ...] = ()
    """Sentences for people: another base's name, ranks that differ from those of the adapter."""

    def __str__(self) -> str:
        counts = f"{plural(self.layers, 'kernel')} adapted, {plural(self.replaced, 'variable')} replaced"
        return "\n".join((counts, *self.notes))


@suggests_arguments
def load_adapter(model: Any, adapter: AdapterLike, *, merge: bool = False) -> AdapterReport:
    """Put an adapter of PEFT onto a model of KerasHub, on the mesh where it is.

    By default, LoRA is enabled in the layers that the adapter changes, with its factors, and everything else is frozen,
    as by KerasHub's ``enable_lora``: train it further, save it with ``save_trainable_only``, or write it with
    ``save_as(model, path, to="peft")``. Compile the model afterwards. Where a kernel has the heads of a weight as a dim
    of its own, Keras' factors have a rank that is larger by the number of heads; the report says so.

    Examples:
        ```python
        model = shardload.load("gemma-2-2b", mesh="1x8")
        print(shardload.load_adapter(model, "my-lora"))
        ```

    Args:
        model: A KerasHub task or backbone, with its weights. It may be quantised, unless ``merge``.
        adapter: The folder of an adapter of PEFT. With ``merge``, also several, as for `shardload.load`.
        merge: Add the products to the kernels instead, one kernel at a time: computed in float32, and rounded once to
            the dtype of the kernel.

    Raises:
        UsageError: When an argument is of the wrong kind.
        SourceNotFoundError: When there is no such folder.
        SourceError: When the adapter contradicts itself.
        MismatchError: When it was trained on another model.
        UninitialisedError: When a weight of the model has no value.
        UnsupportedError: When the adapter has an unknown setting, or the model cannot have it or has other LoRA values.
    """
    model = plain_model(model)
    check_keras_model(model)
    check_kind("merge", merge, bool, "True or False")
    folders = weighted_folders(adapter)
    if not folders:
        raise UsageError("Cannot use adapter=None: expected the folder of a PEFT adapter")
    if (without := next((v for v in model.weights if not has_value(v)), None)) is not None:
        raise UninitialisedError(
            f"Cannot put an adapter onto {model.name!r}: {without.path!r} has no value. Load the base model first",
            without.path,
        )
    plan = plan_adapters(model, open_adapters(folders), merge=merge)
    return apply_plan(plan if merge else replace(plan, notes=(*plan.notes, *_replaced_lora(plan))))


def _replaced_lora(plan: AdapterPlan) -> Iterator[str]:
    """Yield a note if LoRA with other values is replaced; raise if layers that the plan leaves alone have some."""
    taken = {id(kernel.site.twin.layer) for kernel in plan.kernels}
    trained = [one for one in lora_layers(plan.model) if any(not changes_nothing(b) for _, b in adapters_of([one]))]
    if others := [layer.path for layer in trained if id(layer) not in taken]:
        raise UnsupportedError(
            f"Cannot put an adapter onto {plan.model.name!r}: {plural(len(others), 'other layer')} ({others[0]!r} …) "
            "already have LoRA, which would stay, frozen. Load the base model again, and merge one of the adapters: "
            "shardload.load(base, adapter=FOLDER)"
        )
    if trained:
        yield f"the LoRA that {plural(len(trained), 'layer')} had before is replaced"


def apply_plan(plan: AdapterPlan) -> AdapterReport:
    """Change the model of a plan, whose weights have values."""
    if not plan.merge:
        _enable(plan)
    for site, tensor in plan.replaced:  # before products are added to some of them
        _assign(site.twin.own, replacing_value(site, tensor))
    for kernel in plan.kernels:
        (_merge if plan.merge else _fill)(kernel)
    forget_compiled(plan.model)
    return AdapterReport(len(plan.kernels), len(plan.replaced), plan.notes)


def _enable(plan: AdapterPlan) -> None:
    layers = [kernel.site.twin.layer for kernel in plan.kernels]
    freeze_for_lora(backbone_of(plan.model), layers, [site.twin.own for site, _ in plan.replaced])
    bound = binding_of(plan.model)
    with nullcontext() if bound is None else bound.scope():
        for kernel in plan.kernels:
            if not kernel.site.twin.has_lora:
                enable_lora_in(kernel.site.twin.layer, kernel.rank, kernel.changes[0].scale)


def _fill(kernel: AdaptedKernel) -> None:
    for variable, value in zip(kernel.site.twin.factors, kernel.keras_factors, strict=True):
        _assign(variable, value)


def _merge(kernel: AdaptedKernel) -> None:
    variable, (left, right) = kernel.site.twin.own, kernel.merging_factors()
    direct_assign(variable, merge_matrix(variable, left, right, along_rows=kernel.dims.along_rows))


def _assign(variable: Any, value: NDArray[Any]) -> None:
    """Give a variable a value of the host, cast to its dtype, each device its shard only."""
    host = np.ascontiguousarray(value).astype(stored_dtype(variable), copy=False)
    sharding = value_of(variable).sharding
    direct_assign(variable, jax.make_array_from_callback(host.shape, sharding, lambda index: host[index]))
