"""Slots of optimizers: the weight that each belongs to, and layouts that differ from the weight's.

A slot is a variable that an optimizer keeps for one weight: a momentum, an average, an accumulated gradient. Keras
creates it by ``add_variable_from_reference``, in the layout of its weight. To spread slots over more devices, an
optimizer instance gets a replacement for that method, which passes a copy of the weight with another layout. Classes
stay unchanged; copied and saved optimizers are plain ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.jax.core import JaxVariable

from shardload.keras_bridge import Variable
from shardload.keras_bridge.variables import copied, direct_assign, relocate, sharding_of, value_of
from shardload.sharding.devices import mesh_spec
from shardload.sharding.layout import Layout, spread
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.placement import named_sharding

_METHOD = "add_variable_from_reference"


@dataclass(frozen=True, slots=True)
class SlotSpread:
    """Which mesh axes split an optimizer's slots (momentums, …), in addition to those that split their weights."""

    axes: tuple[str, ...] | Literal["batch", "every"]
    """Names of mesh axes; or ``batch``: axes that split the batch; or ``every``: all axes, those of the batch last."""

    def on(self, mesh: MeshSpec, batch_axes: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return the axes of ``mesh`` that split slots.

        ``batch_axes`` are the axes that split batches. Without them, those are the axis which the user's distribution
        names, or the mesh's usual ones.
        """
        # The user's distribution may split the batch over another axis than the mesh's usual ones.
        used = keras.distribution.distribution()
        own: tuple[str, ...] = getattr(used, "batch_axes", (str(getattr(used, "batch_dim_name", "")),))
        batch = batch_axes if batch_axes is not None else own if set(own) <= {*mesh.axes} else mesh.batch_axes
        match self.axes:
            case "batch":
                return batch
            case "every":
                return (*(axis for axis in mesh.axes if axis not in batch), *batch)
            case names:
                return names

    def applied(self, layout: Layout, shape: tuple[int, ...], batch_axes: tuple[str, ...] | None = None) -> Layout:
        """Return the layout of a slot of this ``shape``: that of its weight, split over the axes of `on` too."""
        return spread(layout, shape, self.on(layout.mesh, batch_axes))


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, then those that it wraps (``LossScaleOptimizer`` wraps one, ``MultiOptimizer`` several)."""
    waiting = [optimizer]
    while waiting:
        if (found := waiting.pop()) is not None:
            yield found
            waiting.append(getattr(found, "inner_optimizer", None))
            waiting += [one for one in getattr(found, "optimizers", ()) if hasattr(one, "apply_gradients")]


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers (``LossScaleOptimizer``); an optimizer that wraps none itself."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How an optimizer counts batches and updates; an update may use the gradients of several batches."""

    count: Variable
    """Number of batches so far, a variable; Keras computes ``iterations``, the number of updates, from it."""
    steps: int
    """Batches per update: the optimizer's ``gradient_accumulation_steps``, or 1."""
    sums: tuple[Variable, ...]
    """Sums of the gradients since the last update, one for each weight; empty without accumulation."""
    has_schedule: bool
    """Whether the optimizer has a learning rate schedule, which computes the rate from ``count``."""


def accumulations_in(optimizer: Any) -> Iterator[Accumulation]:
    """Yield, for an optimizer and each one that it wraps, how it counts batches and updates."""
    for part in optimizers_in(optimizer):
        if isinstance(count := getattr(part, "_iterations", None), JaxVariable):
            sums = tuple(v for v in getattr(part, "_accumulated_gradients", ()) if isinstance(v, JaxVariable))
            rate = vars(part).get("_learning_rate")
            has_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
            yield Accumulation(count, part.gradient_accumulation_steps or 1, sums, has_schedule)


def described_accumulation(described: Any) -> int | None:
    """Return the batches per update (gradient accumulation) that an optimizer's configuration states, or ``None``."""
    config = described.get("config") if isinstance(described, Mapping) else None
    if not isinstance(config, Mapping):
        return None
    for argument in _WRAPPED_ARGUMENTS:
        if argument in config:
            return described_accumulation(config[argument])
    found = config.get(_ACCUMULATION, "")
    return 1 if found is None or found == 0 else batches_of_update(found)


def batches_of_update(found: Any) -> int | None:
    """Return ``found``, from an untrusted file, if it is valid as a number of batches per update, else ``None``."""
    return found if type(found) is int and 0 < found <= _LARGEST else None


def owner_of(optimizer: Any, variable: Variable) -> Any:
    """Return the optimizer that owns a variable: a part of a ``MultiOptimizer``, else the given optimizer itself."""
    several = getattr(innermost(optimizer), "optimizers", ())
    return next((one for one in several if any(v is variable for v in one.variables)), optimizer)


_BASES = ("base_optimizer", "optimizer", "multi_optimizer")


def kind_of(optimizer: Any) -> str:
    """Return the name (``Adam``) of the Keras optimizer that this one is or derives from; ``""`` if from none."""
    return kind_of_class(type(innermost(optimizer)))


def kind_of_class(found: type) -> str:
    """Return the name of the Keras optimizer that a class is or derives from; ``""`` if it derives from none."""
    modules = [(c.__name__, c.__module__.rpartition(".")) for c in found.__mro__]
    own = (name for name, (package, _, last) in modules if package == "keras.src.optimizers" and last not in _BASES)
    return next(own, "")


_ACCUMULATION = "gradient_accumulation_steps"
_LARGEST = np.iinfo(np.int32).max
"""The largest number of batches that Keras can count on JAX, where the count is an int32."""
_SLOT_OPTIONS = ("use_ema", _ACCUMULATION, "amsgrad", "momentum", "centered", "exclude_embeddings")
"""Arguments of Keras' optimizers that decide which slots there are."""
_WRAPPED_ARGUMENTS = ("inner_optimizer", "base_optimizer")


def as_described(described: Any) -> Any:
    """Build an optimizer with the same slots as the one in a configuration; ``None`` if its class is not Keras' own.

    Its variables, in order, tell what the saved arrays of that optimizer are. Takes only the class and the arguments
    that decide about slots from the configuration, which is untrusted.
    """
    config = described.get("config") if isinstance(described, Mapping) else None
    if not isinstance(config, Mapping):
        return None
    for argument in _WRAPPED_ARGUMENTS:
        if argument in config:
            inner = as_described(config[argument])
            scales = described.get("class_name") == "LossScaleOptimizer"
            return keras.optimizers.LossScaleOptimizer(inner) if scales and inner is not None else inner
    kind = getattr(keras.optimizers, str(described.get("class_name")), None)
    if not isinstance(kind, type) or kind_of_class(kind) != kind.__name__ or config.get("exclude_layers"):
        return None
    rate = 1.0
    if isinstance(config.get("learning_rate"), Mapping):
        rate = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 1.0)
    options = {name: config[name] for name in _SLOT_OPTIONS if isinstance(config.get(name), (bool, int, float))}
    try:
        return kind(learning_rate=rate, **options)
    except (TypeError, ValueError):
        return None


_OF_EVERY_CLASS = {"iteration", "learning_rate", "step_counter", "dynamic_scale", "accumulated_gradients"}
"""Names of optimizer variables that Keras' own code creates, even if a user has written the optimizer's class.

Their initial values are those that Keras gives them. Those of other variables in a user's class are not known.
"""
Start: TypeAlias = Variable | keras.initializers.Initializer | float
"""The initial value of a slot: the value of a weight, what an initializer computes, or a constant."""


def start_of(optimizer: Any, attribute: str, weight: Variable | None) -> Start | None:
    """Return the initial value of the variables in an optimizer's attribute (``momentums``); ``None`` if not known.

    ``weight`` is the weight that the variable belongs to: a moving average of weights starts with its value.
    """
    inner, kind = innermost(optimizer), kind_of(optimizer)
    if attribute == "model_variables_moving_average" or (kind, attribute) == ("ScheduleFreeAdamW", "momentums"):
        return weight
    name = attribute.rpartition("/")[2]
    if name not in _OF_EVERY_CLASS and (own := getattr(inner, "start_of_slot", None)) is not None:
        return own(name)
    match name:
        case "accumulators":
            return float(getattr(inner, "initial_accumulator_value", 0.0))
        case "u_product":
            return 1.0
        case "learning_rate":  # as the optimizer was made with
            return None
        case "dynamic_scale":
            return float(getattr(optimizer, "initial_scale", 1.0))
    return 0.0 if kind or name in _OF_EVERY_CLASS else None


def begin_slot(slot: Variable, start: Start) -> None:
    """Set a slot to its initial value, on the devices and in the layout that it has now."""
    now = value_of(slot)

    def value(found: Any) -> Any:
        # A copy, as `fit` donates the buffers of weights and slots.
        return jnp.copy(found).astype(now.dtype)

    if isinstance(start, keras.initializers.Initializer):
        make = jax.jit(lambda: start(now.shape, now.dtype), out_shardings=now.sharding)
        direct_assign(slot, make())
    elif isinstance(start, JaxVariable):
        direct_assign(slot, jax.jit(value, out_shardings=now.sharding)(value_of(start)))
    else:
        direct_assign(slot, jax.jit(lambda x: jnp.full_like(x, start), out_shardings=now.sharding)(now))


def slots_in(optimizer: Any) -> Iterator[tuple[Variable, Variable]]:
    """Yield (slot, weight) for each slot of an optimizer, or of one it wraps, that has the shape of its weight."""
    for part in optimizers_in(optimizer):
        weights = getattr(part, "_trainable_variables", [])
        # Keras has no registry of slots: they are attributes with one entry per weight (Adam's ``_momentums``).
        for value in vars(part).values():
            if isinstance(value, list) and value is not weights and len(value) == len(weights):
                pairs = zip(value, weights, strict=True)
                yield from ((s, w) for s, w in pairs if isinstance(s, JaxVariable) and s.shape == w.shape)


def state_in(optimizer: Any) -> Iterator[tuple[Variable, Variable | None]]:
    """Yield (variable, its weight or ``None``) for an optimizer's variables, without scalars such as counters."""
    seen = set[int]()
    for part in optimizers_in(optimizer):
        # `_variables` lists everything; by chance it may have as many entries as there are weights.
        weights, own = getattr(part, "_trainable_variables", []), getattr(part, "_variables", None)
        for value in vars(part).values():
            if isinstance(value, list) and value is not weights and value is not own and len(value) == len(weights):
                for slot, weight in zip(value, weights, strict=True):
                    if isinstance(slot, JaxVariable) and len(slot.shape) and id(slot) not in seen:
                        seen.add(id(slot))
                        yield slot, weight
    yield from ((v, None) for v in optimizer.variables if len(v.shape) and id(v) not in seen)


def spread_of(optimizer: Any) -> SlotSpread | None:
    """Return which further mesh axes split an optimizer's slots; ``None`` if slots are split as their weights are."""
    methods = (vars(part).get(_METHOD) for part in optimizers_in(optimizer))
    return next((method.chosen for method in methods if isinstance(method, _SpreadingMethod)), None)


def set_spread(optimizer: Any, chosen: SlotSpread | None) -> None:
    """Make an optimizer split its new slots further, as ``chosen``; with ``None``, as their weights are split."""
    for part in optimizers_in(optimizer):
        # Into __dict__, because Keras tracks attributes that setattr sets.
        part.__dict__.pop(_METHOD, None)
        if chosen is not None:
            part.__dict__[_METHOD] = _SpreadingMethod(getattr(part, _METHOD), chosen)


class _SpreadingMethod:
    """Replaces ``add_variable_from_reference`` of one optimizer, so that the slots it creates are split further."""

    def __init__(self, original: Callable[..., Variable], chosen: SlotSpread) -> None:
        self.chosen, self._original = chosen, original
        functools.update_wrapper(self, original)

    def __call__(self, reference_variable: Variable, *args: Any, **kwargs: Any) -> Variable:
        """Create a slot: split over the chosen axes too if its weight is on a mesh, else as Keras does."""
        layout = variable_layout(reference_variable)
        if layout is not None:
            spread_layout = self.chosen.applied(layout, tuple(reference_variable.shape))
            devices = tuple(sharding_of(reference_variable).mesh.devices.flat)
            # Keras reads shape, dtype and layout of the reference, so a shallow copy with another layout will do.
            reference_variable = copied(reference_variable, named_sharding(spread_layout, devices))
        return self._original(reference_variable, *args, **kwargs)


def place_slot(slot: Variable, weight: Variable, layout: Layout) -> None:
    """Give a slot a layout on the mesh of its weight, and move its value there."""
    relocate(slot, named_sharding(layout, tuple(sharding_of(weight).mesh.devices.flat)))


def variable_layout(variable: Variable) -> Layout | None:
    """Return a variable's layout on the mesh that it is on; ``None`` if it is on no mesh."""
    sharding = sharding_of(variable)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return Layout.of_spec(mesh_spec(sharding.mesh), sharding.spec, len(variable.shape))
