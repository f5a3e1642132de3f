"""A model's forward pass, gradients or training step as one pure function, ready for `jax.jit`.

    (state, batch) ─► forward    outputs, non-trainable values
                   ─► gradients  loss, gradients, non-trainable values
                   ─► training   loss, state after one step of the optimizer

``state`` has lists of values under ``trainable``, ``non_trainable`` and ``optimizer``; ``batch`` has ``inputs``,
``kwargs`` and ``target``. The functions call what Keras' trainer calls: ``stateless_call``, `jax.value_and_grad` over
the trainable variables, ``stateless_apply``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import keras

from shardload.errors import ShardloadError, UninitialisedError, UsageError, public_name
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.binding import MeshParallel
from shardload.keras_bridge.calls import run_forward, scaled_loss, stateless
from shardload.keras_bridge.gathered_use import Use
from shardload.keras_bridge.joint_optimizer import JointOptimizer
from shardload.keras_bridge.optimizer_slots import optimizers_in
from shardload.keras_bridge.variables import sharding_of, stored_dtype
from shardload.keras_bridge.xla_faults import avoiding_xla_faults
from shardload.layout_search.optimizer_memory import built_on
from shardload.layout_search.tracing import input_summary, reason_of
from shardload.layouts.choice import LayoutChoice
from shardload.sharding.layout import Layout
from shardload.transfer.placement import named_sharding

StepKind = Literal["forward", "gradients", "training"]
State = dict[str, list[Any]]
_Run = Callable[..., tuple[Any, list[Any], Any]]
"""Function that runs a model forward: from state and inputs to outputs, non-trainable values and layers' own losses."""


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A model's step as a pure function of state (values of variables) and batch, with what compiling it needs."""

    kind: StepKind
    function: Callable[[State, Mapping[str, Any]], Any]
    variables: Mapping[str, Sequence[Any]]
    """The Keras variables whose values are the state: under the same keys, such as ``trainable``, in the same order."""
    layouts: Mapping[str, Sequence[Layout]]
    """The layout of each of ``variables``, under the same keys."""
    fixed: frozenset[int] = frozenset()
    """``id``s of variables that keep their dtype even if the model is 16-bit, such as the step counter."""
    float32_update_bytes: int = 0
    """Bytes that the optimizer needs during its update in float32 arrays, even if the model is 16-bit."""

    def specs(self, devices: Sequence[Any]) -> State:
        """Return a shape, dtype and sharding for each value of the state: a step compiles from these alone."""
        return {
            name: [
                jax.ShapeDtypeStruct(tuple(v.shape), stored_dtype(v), sharding=named_sharding(layout, devices))
                for v, layout in zip(found, self.layouts[name], strict=True)
            ]
            for name, found in self.variables.items()
        }

    def out_shardings(self, devices: Sequence[Any]) -> Any:
        """Return the results' shardings: gradients and values are split like the variable, outputs as XLA chooses."""
        state = jax.tree.map(lambda spec: spec.sharding, self.specs(devices))
        match self.kind:
            case "forward":
                # Asking for outputs on the batch axis would add a gather of split logits that the model does not need.
                return None, state["non_trainable"]
            case "gradients":
                return None, state["trainable"], state["non_trainable"]
        return None, state


@contextmanager
def program_of(
    model: Any,
    choice: LayoutChoice,
    *,
    training: Any = None,
    loss: Any = None,
    static: Mapping[str, Any],
    devices: Sequence[Any],
    on_mesh: bool = True,
) -> Iterator[StepProgram]:
    """Yield the step of a built model, with or without values, as a program that can be traced in the block only.

    ``training`` is ``None`` for inference, ``"gradients"``, or an optimizer or its name. An optimizer that is not built
    yet is built for the block only, without values. ``static`` has the arguments of ``call`` that are not arrays. If
    ``on_mesh`` is false, the program is for one device, and activations have no layouts.
    """
    if not model.built:
        raise UninitialisedError(
            f"Cannot trace {model.name!r}: it is not built, so it has no variables yet. Call it on keras.Input first"
        )
    variables = {"trainable": list(model.trainable_variables), "non_trainable": list(model.non_trainable_variables)}
    uses = {
        key: Use(
            named_sharding(layout, devices),
            named_sharding(choice.by_id[key].layout, devices),
            choice.gather_dtypes.get(key, ""),
        )
        for key, layout in (choice.uses if on_mesh else {}).items()
    }
    run = _explaining(
        partial(
            run_forward,
            model,
            uses=uses,
            remat=choice.remat if on_mesh else None,
            call_layouts=choice.call_layouts if on_mesh else (),
            **static,
        ),
        f"call {model.name!r} with inputs=",
    )

    def forward(state: State, batch: Mapping[str, Any]) -> Any:
        return run(state, batch["inputs"], training=False, **batch["kwargs"])[:2]

    losses = _explaining(loss_of(model, loss), "compute the loss of outputs and target=")
    # Without layouts by path: each variable has its own.
    distribution = MeshParallel(
        choice.mesh, devices, {}, batch_axes=choice.splits_batch, activations=choice.activations
    )
    with ExitStack() as stack:
        stack.enter_context(stateless(model, distribution if on_mesh else None))
        stack.enter_context(avoiding_xla_faults(distribution if on_mesh else None))
        kind: StepKind = "forward" if training is None else "gradients"
        optimizer, joint, fixed = None, list[JointOptimizer](), list[Any]()
        if training is not None and not (isinstance(training, str) and training == "gradients"):
            with abstract():
                given = training_optimizer(training)
            is_own = given.built and all(id(v) in choice.by_id for v in given.variables)
            # Slots that it creates take the weights' planned layouts, or those that it spreads them to.
            planned = [named_sharding(_layout(choice, v), devices) for v in variables["trainable"]]
            optimizer = stack.enter_context(built_on(given, variables["trainable"], planned, is_own=is_own))
            kind, variables["optimizer"] = "training", list(optimizer.variables)
            joint = [part for part in optimizers_in(optimizer) if isinstance(part, JointOptimizer)]
            # The step counter and the learning rate keep their dtype in a 16-bit model.
            fixed = [v for v in optimizer.variables if not v.shape] + [v for p in joint for v in p.fixed_dtype_state]
        function = forward if kind == "forward" else _differentiated(run, losses, optimizer)
        layouts = {n: [_layout(choice, v, is_slot=n == "optimizer") for v in found] for n, found in variables.items()}
        update_bytes = sum(part.update_bytes for part in joint)
        yield StepProgram(kind, function, variables, layouts, frozenset(map(id, fixed)), update_bytes)


def _explaining(function: Callable[..., Any], doing: str) -> Callable[..., Any]:
    """Wrap a function that runs the user's own code, so that its errors name the task and the shapes of the inputs."""

    def called(first: Any, given: Any, **kwargs: Any) -> Any:
        try:
            return function(first, given, **kwargs)
        except ShardloadError:
            raise
        except Exception as error:
            shapes = input_summary(given) or "None"
            raise UsageError(f"Cannot {doing}{shapes}: {public_name(error)}: {reason_of(error)}") from error

    return called


def loss_of(model: Any, loss: Any = None) -> Callable[[Any, Any], Any]:
    """Return a function of outputs and target that gives one number: a ``loss`` as Keras' ``compile`` takes it.

    By default, the loss is the model's own. With several outputs, losses are added. If there is no loss at all, or no
    target, the mean of all squared outputs stands in: every output then has a gradient.
    """
    given = getattr(model, "loss", None) if loss is None else loss

    def mean(loss: Any, target: Any, output: Any) -> Any:
        return jnp.mean(keras.losses.get(loss)(target, output))

    def total(outputs: Any, target: Any) -> Any:
        if given is None or target is None:
            if loss is not None:
                raise UsageError(f"Cannot compute loss={loss!r:.60} without a target. Pass target=")
            if target is not None:
                outputs = jax.tree.map(lambda y, wanted: y - wanted.astype(y.dtype), outputs, target)
            floats = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
            return sum(jnp.mean(jnp.square(y.astype(jnp.float32))) for y in floats)
        if isinstance(given, dict):
            return sum(mean(each, target[name], outputs[name]) for name, each in given.items())
        if isinstance(given, list | tuple):
            return sum(mean(each, y, found) for each, y, found in zip(given, target, outputs, strict=True))
        pairs = zip(jax.tree.leaves(target), jax.tree.leaves(outputs), strict=True)
        return sum(mean(given, y, found) for y, found in pairs)

    return total


def _differentiated(run: _Run, losses: Callable[[Any, Any], Any], optimizer: Any = None) -> Callable[..., Any]:
    """Return a function of state and batch: a training step or, without an optimizer, the loss and its gradients."""

    def of(trainable: list[Any], state: State, batch: Mapping[str, Any]) -> Any:
        # `value_and_grad` differentiates its first argument, so the trainable values come apart from the state.
        state = {**state, "trainable": trainable}
        outputs, rest, added = run(state, batch["inputs"], training=True, **batch["kwargs"])
        # `added`: what layers pass to add_loss, such as regularisers, which Keras' trainer adds as well.
        loss = losses(outputs, batch["target"]) + sum(jnp.sum(each) for each in added or ())
        return loss if optimizer is None else scaled_loss(optimizer, state["optimizer"], loss), (loss, rest)

    def step(state: State, batch: Mapping[str, Any]) -> Any:
        (_, (loss, rest)), gradients = jax.value_and_grad(of, has_aux=True)(state["trainable"], state, batch)
        if optimizer is None:
            return loss, gradients, rest
        trainable, slots = optimizer.stateless_apply(state["optimizer"], gradients, state["trainable"])
        return loss, {"trainable": trainable, "non_trainable": rest, "optimizer": slots}

    # JAX puts the name into the source of each instruction, which `Collective.source` shows.
    step.__name__ = "gradients" if optimizer is None else "training"
    return step


def training_optimizer(training: Any) -> Any:
    """Return an optimizer, given as an object or by its name in Keras; raise if Keras has none of that name."""
    try:
        return keras.optimizers.get(training)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"Cannot make a step with training={training!r:.60}: expected None, 'gradients', an optimizer, or the "
            "name of one that Keras has, such as 'adamw'"
        ) from error


def _layout(choice: LayoutChoice, variable: Any, *, is_slot: bool = False) -> Layout:
    """Return the layout chosen for a variable. If none was, slots keep their sharding, and others are replicated."""
    if (planned := choice.by_id.get(id(variable))) is not None:
        return planned.layout
    sharding = sharding_of(variable) if is_slot else None
    return Layout.of_spec(choice.mesh, () if sharding is None else sharding.spec, len(variable.shape))
