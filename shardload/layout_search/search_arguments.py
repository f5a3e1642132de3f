"""Arguments of searches for layouts, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypedDict, cast

from shardload.errors import LayoutError, UsageError, did_you_mean
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layouts.model_variables import check_model
from shardload.sharding.mesh import MeshSpec
from shardload.typing import LayoutMap

REMATS = ("auto", "none", "matmuls", "full")
"""What blocks may recompute: what is fastest within the limit; nothing; all but products with weights; everything."""
Remat = Literal["auto", "none", "matmuls", "full"] | Mapping[str, Literal["none", "matmuls", "full"]]
SequenceParallel = Literal["auto"] | bool
"""Whether activations are split along their sequence over the axes for weights; ``auto``: if it is needed to fit."""


class StepOptions(TypedDict, total=False):
    """Keyword arguments that describe the step to plan for, such as ``inputs``; `search` documents them."""

    inputs: Any
    arguments: Mapping[str, Any] | None
    batch: int | None
    sequence: int | None
    optimizer: Any
    hardware: Hardware | None
    kv_cache: tuple[int, int] | str | None


class SearchOptions(StepOptions, total=False):
    """Keyword arguments of a search on one mesh, such as ``pins``; `search` documents them."""

    device_memory_bytes: int | None
    pins: LayoutMap | Mapping[str, Any] | LayoutPlan | None
    batch_axis: str | Sequence[str] | None
    remat: Remat
    sequence_parallel: SequenceParallel


@dataclass(frozen=True, slots=True)
class Saving:
    """What a search may do so that activations need less memory."""

    remat: Remat = "auto"
    sequence_parallel: SequenceParallel = "auto"


EVERYTHING = Saving()
"""A search may do all that it can to save memory."""


def check_options(caller: str, options: Mapping[str, Any], known: type[StepOptions]) -> None:
    """Raise if ``options`` has a name that the public function ``caller`` does not take."""
    names = known.__annotations__
    if unknown := [name for name in options if name not in names]:
        raise UsageError(f"{caller}() has no argument {unknown[0]!r}.{did_you_mean(unknown[0], names)}")


def batch_axes_of(mesh: MeshSpec, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes that split the batch: those that the caller gives, else `MeshSpec.batch_axes`."""
    axes = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    for axis in axes:
        if not (isinstance(axis, str) and axis in mesh.axes):
            raise LayoutError(
                f"Cannot split the batch over {axis!r}: the mesh {mesh} has no such axis. Use one of its axes"
            )
    return mesh.batch_axes if given is None else tuple(axis for axis in mesh.axes if axis in axes)


def checked_saving(remat: Any, sequence_parallel: Any) -> Saving:
    """Return what a search may do to save memory; raise if one of the arguments is not among the known values."""
    if not (
        isinstance(sequence_parallel, bool) or (isinstance(sequence_parallel, str) and sequence_parallel == "auto")
    ):
        raise UsageError(
            f"Cannot plan with sequence_parallel={sequence_parallel!r:.60}: expected 'auto', True or False"
        )
    return Saving(_checked_remat(remat), cast("SequenceParallel", sequence_parallel))


def _checked_remat(remat: Any) -> Remat:
    given = list(remat.values()) if isinstance(remat, Mapping) else [remat]
    allowed = REMATS[1:] if isinstance(remat, Mapping) else REMATS
    for mode in given:
        if not isinstance(mode, str) or mode not in allowed:
            raise UsageError(f"Cannot plan with remat={mode!r:.60}: expected {', '.join(allowed)}")
    return cast("Remat", remat)


def check_positive(**numbers: Any) -> None:
    """Raise unless every keyword argument is a positive integer or ``None``; the message names the argument."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral) or number < 1):
            raise LayoutError(f"Cannot plan with {name}={number!r}: expected a positive integer")


def check_built(model: Any) -> None:
    """Raise unless a model is built, so that it has variables to plan for."""
    check_model(model, to="plan")
    # Keras counts a subclassed model as built after build(), even if its layers have to be called first.
    is_empty = not model.variables and any(not layer.built for layer in getattr(model, "layers", ()))
    if is_empty or not getattr(model, "built", True):
        raise LayoutError(
            f"Cannot plan {model.name!r}: it has no variables yet. Call it on a keras.Input or a batch once to build it"
        )
