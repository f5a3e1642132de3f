"""Build models without allocating memory; later initialise, already sharded, the variables a checkpoint lacks.

The initial values are bit for bit those that Keras would have given while building. Seeds are drawn when initialisers
are created, so in the same order. Each operation of an initialiser is compiled separately, as in eager Keras: in one
program for all, XLA would merge multiplications with additions, and so change the last bit (see `_Program`).
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardload.errors import UninitialisedError, UnsupportedError, UsageError, suggests_arguments
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.hub_imports import HUB, hub_patched
from shardload.keras_bridge.model_state import refresh_derived, state_of
from shardload.keras_bridge.patches import Patch, Patches, reading_signatures_once, replacing
from shardload.keras_bridge.recording import record_variables, registered_variables
from shardload.keras_bridge.variables import (
    HostConstant,
    direct_assign,
    forget_initializer,
    has_value,
    initialise_eagerly,
    is_abstract,
    is_built_in,
    pending_of,
    recording,
    set_layout,
    sharding_of,
    stored_dtype,
    unique,
    value_of,
)
from shardload.processes.agreement import require_agreement
from shardload.sharding.layout import Layout
from shardload.units import check_kind, plural

__all__ = ["abstract", "check_initialised", "initialise", "is_abstract", "uninitialised"]


@contextmanager
def abstract() -> Iterator[list[weakref.ref[Variable]]]:
    """Build any Keras object inside this block without allocating buffers, running initialisers or compiling.

    Constructors, ``build``, ``compile`` and ``from_preset`` (which reads configuration and assets, never
    weights) work as usual; variables know shape, dtype, path and layout. Only the current thread is
    affected; blocks nest; an exception leaves no changes behind. Afterwards, a variable without a value
    can be loaded or initialised; reading it raises `UninitialisedError`. ``quantize()`` needs values: load
    first, or build with a quantized dtype policy such as ``"int8_from_float32"``.

    Examples:
        ```python
        with shardload.abstract():
            model = build_model()  # shapes and paths, no values
        shardload.load_weights(model, "model.weights.h5", mesh="1x8")
        ```

    Yields:
        Weak references to the variables created so far.

    Raises:
        UnsupportedError: When Keras does not run on JAX.
    """
    if keras.config.backend() != "jax":
        raise UnsupportedError("shardload.abstract() needs Keras' JAX backend: set KERAS_BACKEND=jax")
    with record_variables() as created, hub_patched(_HUB_PATCHES), reading_signatures_once():
        yield created


@suggests_arguments
def initialise(
    target: Model | Iterable[Variable],
    *,
    layouts: Mapping[int, Layout] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> list[str]:
    """Initialise every variable without a value, sharded per its layout, in creation order.

    Examples:
        ```python
        with shardload.abstract():
            model = build_model()
        shardload.initialise(model)
        ```

    Args:
        target: A model (with its optimizer, metrics, sampler) or variables.
        layouts: ``id(variable)`` → layout, for variables whose layout is not set yet.
        devices: Devices in mesh-position order, needed with ``layouts``.

    Returns:
        Paths of the initialised variables, in that order.

    Raises:
        UninitialisedError: When a variable's old value was dropped and never replaced (it has no initialiser), or when
            its initial value differs between processes.
    """
    check_kind("layouts", layouts, Mapping | None, "a mapping from the id of a variable to its layout")
    found = _variables(target)
    for variable in found:
        # Keras' `fit` sets `_value` to None; a variable that still had its initialiser would look abstract there.
        forget_initializer(variable)
        if layouts and id(variable) in layouts and is_abstract(variable):
            set_layout(variable, layouts[id(variable)], jax.devices() if devices is None else devices)
    # Initialisers that share a seed generator draw from it in turn, so only this order gives Keras' own numbers.
    waiting = sorted(filter(is_abstract, found), key=lambda v: pending_of(v).order)
    for variable in waiting:
        # An earlier initialiser may have needed this variable: the state of its seed generator.
        if is_abstract(variable):
            _initialise(variable)
    if isinstance(target, keras.Layer):
        refresh_derived(target)
    return [v.path for v in waiting]


def uninitialised(target: Model | Iterable[Variable]) -> list[str]:
    """Return the paths of variables without a value: in ``target``, and others that Keras is to initialise later."""
    waiting = [v for v in registered_variables() if not has_value(v)]
    return [v.path for v in unique([*_variables(target), *waiting]) if not has_value(v)]


def check_initialised(target: Model | Iterable[Variable]) -> None:
    """Raise an `UninitialisedError` that names some variables of ``target`` without a value, if there are any."""
    if left := uninitialised(target):
        shown = ", ".join(map(repr, left[:5])) + (" …" if len(left) > 5 else "")
        raise UninitialisedError(
            f"No value for {plural(len(left), 'variable')}: {shown}. Load them, or call shardload.initialise(model)"
        )


def _variables(target: Model | Iterable[Variable]) -> list[Variable]:
    if isinstance(target, keras.Layer):
        return state_of(target)
    given = getattr(target, "variables", target)
    found = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(variable, keras.Variable) for variable in found):
        raise UsageError(f"Cannot use {target!r:.60}: expected a model, or variables of Keras")
    return unique(found)


# ---- one variable's initial value ----------------------------------------------------------------


def _initialise(variable: Variable) -> None:
    pending, sharding = pending_of(variable), sharding_of(variable)
    initializer = pending.initializer
    if initializer is None:
        raise UninitialisedError(
            f"Cannot initialise variable {variable.path!r}: a failed load released its value, so it has no "
            "initialiser. Load the model again"
        )
    for generator in _generators(initializer):
        if is_abstract(generator.state):
            _initialise(generator.state)
    if isinstance(initializer, HostConstant) and sharding is not None:
        direct_assign(variable, _place(initializer.value, variable, sharding))
    # Keras would pass its layout to such an initialiser, which then shards the value.
    elif sharding is None or "layout" in inspect.signature(initializer).parameters:
        # Every process computes its own shards from its own copy of the initialiser: different seeds would go unseen.
        if sharding is not None and not sharding.is_fully_addressable:
            require_agreement([_described(initializer)], variable.path, sharding)
        initialise_eagerly(variable, initializer)
    else:
        direct_assign(variable, _sharded_value(variable, initializer, sharding))


def _described(initializer: Any) -> str:
    """Return what decides an initialiser's numbers (attributes, seeds) as text: it must be equal in all processes."""
    states = [np.asarray(value_of(g.state)).tolist() for g in _generators(initializer)]
    plain = {k: v for k, v in getattr(initializer, "__dict__", {}).items() if isinstance(v, str | int | float)}
    return json.dumps([plain, states], sort_keys=True)


def _place(value: np.ndarray[Any, Any], variable: Variable, sharding: Any) -> jax.Array:
    # A copy: on CPU, JAX may use a host array as the device buffer, and this one is the caller's.
    owned = np.array(value, dtype=stored_dtype(variable)).reshape(variable.shape)
    if not sharding.is_fully_addressable:  # each process places its own shards, so all must have the same array
        require_agreement([owned], variable.path, sharding)
    return jax.make_array_from_callback(owned.shape, sharding, lambda index: owned[index])


def _sharded_value(variable: Variable, initializer: Callable[..., Any], sharding: Any) -> jax.Array:
    try:
        program, seeds = _program(variable, initializer, sharding)
    except Exception:
        # Not traceable (draws from Keras' global seed, uses NumPy …): run it eagerly, which raises a real error again.
        value = keras.ops.convert_to_tensor(initializer(variable.shape, dtype=stored_dtype(variable).name))
        return _place(np.asarray(value), variable, sharding)
    if not sharding.is_fully_addressable:
        require_agreement([*program.constants, *seeds], variable.path, sharding)
    value, *states = program(*seeds)
    # Through the host: a state without a layout must not end up on this variable's mesh.
    for generator, state in zip(_generators(initializer), states, strict=True):
        generator.state.assign(np.asarray(state))
    return value


# Keras' random functions accept an integer or a SeedGenerator as seed, and a traced seed is neither.
class _FixedSeed(keras.random.SeedGenerator):  # type: ignore[misc]
    """A seed generator that returns the seed it was given: a traced one, so that one program serves all seeds."""

    def __init__(self, seed: Any) -> None:
        # Without super().__init__(), which would create a variable.
        self._drawn = seed

    def next(self, ordered: bool = True) -> Any:
        return self._drawn


def _generators(initializer: Any) -> list[keras.random.SeedGenerator]:
    return [v for v in getattr(initializer, "__dict__", {}).values() if isinstance(v, keras.random.SeedGenerator)]


_programs: dict[Any, _Program] = {}


def _program(variable: Variable, initializer: Any, sharding: Any) -> tuple[_Program, list[Any]]:
    """Return (program, seeds): ``program(*seeds)`` computes the initial value.

    Variables with equal initialisers (apart from the seed), shapes, dtypes and shardings share one program.
    """
    shape, dtype = tuple(variable.shape), stored_dtype(variable).name
    generators = _generators(initializer)
    if generators or not isinstance(initializer, keras.Initializer) or not is_built_in(initializer):
        states = [value_of(g.state) for g in generators]

        def stateful(*states: Any) -> list[Any]:
            mapping = [(g.state, s) for g, s in zip(generators, states, strict=True)]
            with keras.StatelessScope(state_mapping=mapping, initialize_variables=False) as scope:
                value = keras.ops.convert_to_tensor(initializer(shape, dtype=dtype))
            # Other changes would be lost with the scope. On this error, `_sharded_value` runs the initialiser eagerly.
            if set(scope.state_mapping) != {id(v) for v, _ in mapping}:
                raise UnsupportedError("the initialiser changes variables other than its seed generators'")
            return [value, *(scope.get_current_value(v) for v, _ in mapping)]

        return _Program(stateful, states, shape, sharding), states
    seed = getattr(initializer, "seed", None)
    # The array that Keras' `draw_seed` makes of an integer seed.
    seeds = [] if seed is None else [keras.ops.convert_to_tensor([seed, 0], dtype="uint32")]
    config = {k: v for k, v in initializer.get_config().items() if k != "seed"}
    key = (type(initializer), json.dumps(config, sort_keys=True, default=repr), shape, dtype, sharding)

    def seeded(*seeds: Any) -> list[Any]:
        fresh = copy.copy(initializer)
        if seeds:
            fresh.seed = _FixedSeed(seeds[0])
        return [keras.ops.convert_to_tensor(fresh(shape, dtype=dtype))]

    if key not in _programs:
        _programs[key] = _Program(seeded, seeds, shape, sharding)
    return _programs[key], seeds


class _Program:
    """A traced initialiser, run as eager Keras would run it: each of its operations is a compiled program of its own.

    Inputs are run-time arguments; results with the variable's shape are sharded, others replicated. So a device stores
    its shard of the operation's inputs, result and scratch (four shards at most for Keras' random initialisers on CPU),
    never the whole tensor.
    """

    def __init__(self, run: Callable[..., list[Any]], seeds: list[Any], shape: tuple[int, ...], sharding: Any) -> None:
        # seeds ─► operation 0 ─► … ─► operation n ─► value, states; `_stages` has one compiled program per operation.
        closed = jax.make_jaxpr(run)(*seeds)
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        self._everywhere = everywhere
        self._final = sharding
        self._stages = [
            jax.jit(_bound(eqn), out_shardings=[sharding if v.aval.shape == shape else everywhere for v in eqn.outvars])
            for eqn in self._jaxpr.eqns
        ]
        # The last operation that reads each value; what the whole program returns is kept to the end.
        self._last_use = {id(v): i for i, eqn in enumerate(self._jaxpr.eqns) for v in eqn.invars}
        self._last_use |= {id(v): len(self._stages) for v in self._jaxpr.outvars}

    def __call__(self, *seeds: Any) -> list[Any]:
        """Run all operations; return the initial value, then the new states of the seed generators."""
        known = zip([*self._jaxpr.constvars, *self._jaxpr.invars], [*self._consts, *seeds], strict=True)
        # As host arrays, which JAX places where a stage runs; a seed's state may be committed to another device.
        env: dict[int, Any] = {id(v): np.asarray(x) for v, x in known}

        def read(v: Any) -> Any:
            return np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[id(v)]

        for i, (eqn, stage) in enumerate(zip(self._jaxpr.eqns, self._stages, strict=True)):
            results = stage(*map(read, eqn.invars))
            env = {key: x for key, x in env.items() if self._last_use.get(key, -1) > i}  # release used inputs
            env |= {id(v): x for v, x in zip(eqn.outvars, results, strict=True)}
        first, *rest = (read(v) for v in self._jaxpr.outvars)
        # A constant: no operation has put it on a device. Copied, as in `_place`.
        if isinstance(first, np.ndarray):
            owned = np.array(first, self._jaxpr.outvars[0].aval.dtype)
            return [jax.make_array_from_callback(owned.shape, self._final, lambda index: owned[index]), *rest]
        return [jax.device_put(first, self._final), *rest]

    @property
    def constants(self) -> list[Any]:
        """All that decides the initial value besides the seeds: operations and constants. Processes compare it."""
        return [*self._consts, *_ingredients(self._jaxpr)]


def _ingredients(jaxpr: Any) -> Iterator[Any]:
    """Yield what a traced program and those nested in it consist of: names of operations, literals, constants."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from (v.val for v in eqn.invars if isinstance(v, Literal))
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr):
                yield from inner.consts
                yield from _ingredients(inner.jaxpr)
            elif isinstance(inner, Jaxpr):
                yield from _ingredients(inner)
    yield from (v.val for v in jaxpr.outvars if isinstance(v, Literal))


def _bound(eqn: Any) -> Callable[..., list[Any]]:
    def run(*args: Any) -> list[Any]:
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    return run


# ---- from_preset inside the block ----------------------------------------------------------------


def _hub_patches() -> list[Patch]:
    loader = importlib.import_module(f"{HUB}.src.utils.transformers.safetensor_utils").SafetensorLoader
    return [
        (sys.modules[f"{HUB}.src.models.backbone"].Backbone, "from_preset", _without_weights),
        (sys.modules[f"{HUB}.src.models.task"].Task, "from_preset", _without_weights),
        # KerasHub converts the heads of image classifiers even with load_weights=False.
        (loader, "port_weight", _nothing_ported),
    ]


_HUB_PATCHES = Patches(_hub_patches)


def _without_weights(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def from_preset(cls: Any, preset: str, load_weights: bool = True, **kwargs: Any) -> Any:
        return function(cls, preset, load_weights=load_weights and not recording(), **kwargs)

    return classmethod(from_preset)  # type: ignore[arg-type]  # wraps() keeps the type loose


@replacing
def _nothing_ported(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return None if recording() else original(self, *args, **kwargs)
