"""The variables of a model, its optimizers and metrics, and properties of its layers.

Keras searches containers in attributes of layers item by item for layers and variables. A tokenizer keeps its
vocabulary as a list and as a dict: Gemma 3's 262,144 strings take Keras 0.6 s to search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.jax.core import JaxVariable
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

from shardload.errors import UsageError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.optimizer_slots import innermost, optimizers_in, slots_in, spread_of
from shardload.keras_bridge.patches import Patches, replacing
from shardload.keras_bridge.saving import saved_objects
from shardload.keras_bridge.variables import has_value, numbered, unique, value_of
from shardload.sharding.layout import Layout

_LEAF_TYPES = frozenset((bool, int, float, str, bytes, FunctionType, type(None)))
"""Types of plain values: none of their instances contains a layer, a variable or an optimizer."""

_LARGE = 1_000
"""Number of items from which a container counts as large; `walking_vocabularies_once` remembers large ones."""
_VOCABULARIES: ContextVar[dict[int, Any] | None] = ContextVar("_VOCABULARIES", default=None)
"""``id`` → large container (vocabulary) of plain values, which is not searched again; ``None`` outside of
`walking_vocabularies_once`. The reference keeps it alive: no other object gets its id."""
_LEAF_TYPE_IDS = frozenset(map(id, _LEAF_TYPES))
"""Ids of `_LEAF_TYPES`, to compare types by identity: a metaclass may define another comparison of its classes."""
_PLAIN = _LEAF_TYPE_IDS.union(map(id, (list, tuple, set, dict, TrackedList, TrackedDict, TrackedSet)))
"""Ids of types (plain values, lists, dicts, …) of attributes that `state_of` skips: Keras searches these itself."""
_MISSING = object()


def plain_model(model: Model) -> Model:
    """Return the model inside a wrapper such as ``TensorParallelKeras``; any other model unchanged."""
    while getattr(type(model), "is_its_model", False):
        model = model.model
    return model


def variables_of(model: Model) -> list[Variable]:
    """Return each variable of the model once, in Keras' order: weights and states of seed generators."""
    return unique(model.variables)


def optimizer_variables_of(model: Model) -> list[Variable]:
    """Return the variables of the compiled optimizer: slots, iterations, learning rate."""
    optimizer = getattr(model, "optimizer", None)
    return unique(getattr(optimizer, "variables", ()))


def weights_of(model: Model) -> list[Variable]:
    """Return all variables that a checkpoint can contain: those of the model, then those of its optimizer."""
    return unique([*variables_of(model), *optimizer_variables_of(model)])


def trained_variables(model: Model) -> list[Variable]:
    """Return the variables that training changes: trainable weights and moving statistics.

    Moving statistics, as of ``BatchNormalization``, are the non-trainable floats of trainable layers. A quantised layer
    has non-trainable floats, too: the scales of its kernel. These are constants, so they are left out.
    """
    found = list(model.trainable_variables)
    # Only floats: the states of seed generators are integers.
    for layer in model._flatten_layers():
        if layer.trainable and getattr(layer, "quantization_mode", None) is None:
            found += [v for v in layer._non_trainable_variables if "float" in str(v.dtype)]
    return unique(found)


def state_of(model: Model) -> list[Variable]:
    """Return all variables of a model: weights, optimizers', metrics', and those in attributes (a sampler's seeds)."""
    found = weights_of(model)
    if isinstance(model, keras.Layer):
        skipped = bookkeeping_attributes()
        for layer in model._flatten_layers():
            found.extend(getattr(layer, "metrics_variables", ()))
            # Metrics passed to compile as objects have variables before the model lists them among its own.
            if (given := getattr(layer, "_compile_metrics", None)) is not None:
                names = ("_user_metrics", "_user_weighted_metrics")
                for metric in keras.tree.flatten([getattr(given, name, None) for name in names]):
                    found.extend(metric.variables if isinstance(metric, keras.Metric) else ())
            # What Keras does not track: a sampler's seeds, or a helper object that has `variables`.
            for name, attribute in list(vars(layer).items()):
                if id(type(attribute)) not in _PLAIN and name not in skipped:
                    found.extend(_variables_in(attribute))
        for optimizer in _attribute_optimizers(model):
            found.extend(optimizer.variables)
    return unique(found)


def learning_rates_of(model: Model) -> dict[str, float]:
    """Return optimizer name → learning rate, to report if a load changes it; leave out optimizers with a schedule."""
    found = {}
    for path, optimizer in optimizers_by_path(model).items():
        # Wrappers have a rate too, which Keras does not use.
        wraps = ("inner_optimizer", "optimizers")
        parts = [one for one in optimizers_in(optimizer) if not any(hasattr(one, name) for name in wraps)]
        for number, rate in enumerate(vars(one).get("_learning_rate") for one in parts):
            name = f"the optimizer{f' {path}' if path else ''}{f' {number}' if len(parts) > 1 else ''}"
            if isinstance(rate, JaxVariable) and has_value(rate) and value_of(rate).is_fully_replicated:
                found[name] = float(np.asarray(value_of(rate)))
    return found


@contextmanager
def with_optimizer(model: Model, optimizer: Any) -> Iterator[None]:
    """Give a model an optimizer inside the block, as if it were compiled with it; ``None`` changes nothing."""
    own = getattr(model, "optimizer", None)
    if optimizer is None or optimizer is own:
        yield
        return
    if isinstance(optimizer, type) or not hasattr(optimizer, "variables"):
        raise UsageError(f"Cannot use optimizer={optimizer!r:.60}: expected an object such as keras.optimizers.Adam()")
    if own is not None:
        raise UsageError(
            f"Cannot use optimizer={optimizer.name!r}: the model {model.name!r} is compiled with {own.name!r}. Leave "
            "out optimizer=, or use a model that is not compiled"
        )
    # Into __dict__: Keras would track what setattr sets, and its variables would become the model's.
    before = model.__dict__.pop("optimizer", _MISSING)
    model.__dict__["optimizer"] = optimizer
    try:
        yield
    finally:
        model.__dict__.pop("optimizer", None)
        if before is not _MISSING:
            model.__dict__["optimizer"] = before


def other_optimizers(model: Model) -> list[tuple[str, Any]]:
    """Return (path in ``.weights.h5``, optimizer) for each optimizer besides the compiled one, as a GAN has."""
    ids = set(map(id, _attribute_optimizers(model)))
    return [(path, found) for path, found in saved_objects(model) if id(found) in ids] if ids else []


def optimizers_by_path(model: Model) -> dict[str | None, Any]:
    """Return path → optimizer for all optimizers of a model; the compiled one has the path ``None``."""
    own = getattr(model, "optimizer", None)
    return ({} if own is None else {None: own}) | dict(other_optimizers(model))


def _attribute_optimizers(model: Model) -> list[Any]:
    """Return the optimizers that layers keep in attributes, but not the compiled one or those inside another one."""
    found: dict[int, Any] = {}
    without, skipped = set(_LEAF_TYPE_IDS), bookkeeping_attributes()
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
        attributes = [one for name, one in vars(layer).items() if id(type(one)) not in without and name not in skipped]
        for optimizer in _optimizers_in(attributes, without):
            found[id(optimizer)] = optimizer
    own = optimizers_in(getattr(model, "optimizer", None))
    # An optimizer that another one wraps, for loss scaling, is saved with its wrapper.
    wrapped = {id(part) for one in found.values() for part in optimizers_in(one) if part is not one}
    return [one for i, one in found.items() if i not in wrapped.union(map(id, own))]


def _optimizers_in(attributes: Iterable[Any], without: set[int]) -> Iterator[Any]:
    """Yield the optimizers in ``attributes``, also those inside lists, tuples and dicts, at any depth.

    ``without`` has the ids of types that are neither optimizer nor container. Such attributes are skipped, and each
    further type that is found is added: a model's thousands of attributes are of a few dozen types.
    """
    waiting, seen = [one for one in attributes if id(type(one)) not in without][::-1], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, keras.optimizers.Optimizer):
            yield one
        elif not isinstance(one, (dict, list, tuple)):
            without.add(id(type(one)))  # the model keeps `one`, and with it the type, as long as this walk takes
        elif one and id(one) not in seen:  # a list may contain itself
            seen.add(id(one))
            waiting.extend(member for member in members_of(one) if id(type(member)) not in without)


def slots_of(model: Model) -> list[tuple[Variable, Variable]]:
    """Return (slot, weight) for each variable of an optimizer that belongs to a weight and has the same shape."""
    return [pair for optimizer in _optimizers_of(model) for pair in slots_in(optimizer)]


def slot_layouts(
    model: Model, layout_of: Callable[[Variable], Layout | None], *, batch_axes: tuple[str, ...] | None = None
) -> dict[int, Layout]:
    """Return ``id(slot)`` → layout for slots of optimizers that have another layout than their weight.

    Such slots are split over more devices than their weight, or a `JointOptimizer` chooses their layouts. ``layout_of``
    returns the layout of a weight.
    """
    found = {}
    for optimizer in _optimizers_of(model):
        if (chosen := spread_of(optimizer)) is not None:
            for slot, weight in slots_in(optimizer):
                if (layout := layout_of(weight)) is not None:
                    found[id(slot)] = chosen.applied(layout, tuple(slot.shape), batch_axes)
        for part in optimizers_in(optimizer):
            if (state_layouts := getattr(part, "state_layouts", None)) is not None:
                found |= state_layouts(layout_of)
    return found


def _optimizers_of(model: Model) -> list[Any]:
    own = getattr(model, "optimizer", None)
    return [*([] if own is None else [own]), *_attribute_optimizers(model)]


def models_in(model: Model) -> list[Model]:
    """Return the model and the models among its layers (a task's backbone), itself first."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def refresh_derived(model: Model) -> None:
    """Make ``Normalization`` layers recompute their constants (mean, variance) from variables that have changed."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization) and layer.built and all(map(has_value, layer.variables)):
            layer.finalize_state()


def _variables_in(attribute: Any) -> Iterable[Variable]:
    if isinstance(attribute, JaxVariable):
        return (attribute,)
    if isinstance(attribute, keras.random.SeedGenerator):
        return (attribute.state,)
    if isinstance(attribute, (keras.Layer, list, tuple, dict, set)):
        return ()
    value = getattr(attribute, "variables", ()) if hasattr(type(attribute), "variables") else ()
    return [v for v in value if isinstance(v, JaxVariable)] if isinstance(value, (list, tuple)) else ()


def policy_name(layer: Any) -> str | None:
    """Return the name of a layer's own dtype policy, even if a ``DTypePolicyMap`` sets it; ``None`` if not a layer."""
    policy = layer._dtype_policy if isinstance(layer, keras.Layer) else None
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path] if layer.path and not isinstance(layer, keras.Model) else policy.default_policy
    # Some quantised policies are named "int8_from_None", so build the name from what the policy does.
    if isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy):
        compute, storage = policy.compute_dtype, policy.variable_dtype
        return f"{policy.quantization_mode}_from_{storage if compute == storage else f'mixed_{compute}'}"
    return None if policy is None else str(policy.name)


def named_weights(layer: Any) -> list[tuple[str, Variable]]:
    """Return (name, weight) for a layer's own weights, to record which are frozen; repeats are numbered: ``bias#2``."""
    weights = layer._trainable_variables if isinstance(layer, keras.Layer) else []
    return list(zip(numbered(v.name for v in weights), weights, strict=True))


def seeds_of(saveable: Any) -> list[Variable]:
    """Return the states (variables) of the seed generators that a layer tracks, in order of creation."""
    return [generator.state for generator in getattr(saveable, "_seed_generators", ())]


def weights_optimized(optimizer: Any) -> list[Variable]:
    """Return the weights an optimizer was built for, in the order of its slots; empty before it was built."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def are_averages(model: Model) -> bool | None:
    """Whether the weights equal their moving averages (``use_ema``), as after ``fit``; ``None`` without averages."""
    optimizer = innermost(getattr(model, "optimizer", None))
    if not getattr(optimizer, "use_ema", False) or not optimizer.built or not int(optimizer.iterations):
        return None
    # Equal bits: `fit` ends by copying the averages into the weights (`finalize_variable_values`).
    pairs = zip(weights_optimized(optimizer), optimizer._model_variables_moving_average, strict=True)
    known = [(weight, average) for weight, average in pairs if average is not None]
    return all(bool(jnp.array_equal(value_of(weight), value_of(average))) for weight, average in known)


def own_layers(model: Model) -> list[Any]:
    """Return the model and every layer in it, at any depth."""
    return list(model._flatten_layers())


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A copy of the attributes of an optimizer that is not built yet, from which `restore` makes it unbuilt again.

    It is taken before an optimizer is built only to look at it (to count its slots, say), or for a load that may fail.
    """

    parts: tuple[tuple[Any, dict[str, Any], tuple[tuple[Any, Any], ...]], ...]
    """(object, its attributes, (container, copy of its items), …): for the optimizer, those that it wraps, and the
    trackers in which Keras registers their variables."""

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerState:
        """Record the attributes of an optimizer that is not built yet, and of those that it wraps."""
        parts = []
        for part in optimizers_in(optimizer):
            # `build` adds slots to attributes, and their ids to sets in the tracker.
            tracker = part._tracker
            for target, value in ((part, vars(part)), (tracker, tracker.stored_ids)):
                # Tracked containers are copied to the plain type.
                plain = ((v, kind(v)) for v in value.values() for kind in (list, dict, set) if isinstance(v, kind))
                parts.append((target, dict(vars(target)), tuple(plain)))
        return cls(tuple(parts))

    def restore(self) -> None:
        """Undo a build: give the optimizers their recorded attributes, and their lists, dicts and sets the old items.

        Attributes are set in ``__dict__``, and items by methods of the plain containers: Keras' own setters and
        containers would register the variables a second time.
        """
        for target, attributes, containers in self.parts:
            vars(target).clear()
            vars(target).update(attributes)
            for container, content in containers:
                # list.clear(container), as the methods of tracked containers would also change the tracker.
                kind = type(content)
                kind.clear(container)
                kind.extend(container, content) if kind is list else kind.update(container, content)


def members_of(container: Any) -> Iterable[Any]:
    """Return a container's items (a dict's values) that a search must look at; none if all are plain values."""
    known = _VOCABULARIES.get()
    if known is not None and id(container) in known:
        return ()
    items = container.values() if isinstance(container, dict) else container
    if not _are_leaves(items):
        return items
    if known is not None and len(container) >= _LARGE:
        known[id(container)] = container
    return ()


@contextmanager
def walking_vocabularies_once() -> Iterator[None]:
    """Inside the block, searches of a model for variables and the like look through a large container only once.

    A load asks some fifteen times what a model consists of, which takes 12 ms each time for Gemma 3's vocabulary.
    Use it only where no other code changes the model.
    """
    token = _VOCABULARIES.set({})
    try:
        yield
    finally:
        _VOCABULARIES.reset(token)


@cache
def bookkeeping_attributes() -> frozenset[str]:
    """Return the names of the attributes that Keras itself sets on every layer: a search for users' objects skips them.

    They are half of all attributes, and nearly all containers. ``_layers`` is left out, as it lists the sub-layers.
    """
    own = vars(keras.layers.Layer(name="bookkeeping"))  # with a name, so as not to use up "layer"
    return frozenset(name for name in own if name.startswith("_")) - {"_layers"}


def without_walking_vocabularies() -> AbstractContextManager[None]:
    """Inside the block, Keras does not search attributes that contain only strings, numbers and the like for layers."""
    return _UNWALKED.applied()


def _are_leaves(items: Iterable[Any]) -> bool:
    try:
        return _LEAF_TYPES.issuperset(map(type, items))
    except Exception:
        # A metaclass may define how its classes are hashed and compared, and so raise anything.
        return False


@replacing
def _unwalked(original: Any, self: Any, values: Any = None, tracker: Any = None) -> None:
    if type(values) not in (list, dict) or not _are_leaves(values.values() if type(values) is dict else values):
        original(self, values, tracker)
        return
    # Without a tracker, Keras copies the items and asks none; items added later are tracked as usual.
    original(self, values)
    self.tracker = tracker


_UNWALKED = Patches(lambda: [(cls, "__init__", _unwalked) for cls in (TrackedList, TrackedDict)])
