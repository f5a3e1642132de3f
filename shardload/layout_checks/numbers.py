"""Check a layout by numbers: does the sharded model compute the same values as on one device?

    the same values ─► one device ───────────────────► outputs, loss, gradients, weights after some steps ─┐
                    ─► one device, weights rounded ──► how far rounding alone moves each of them ──────────┼─► compare
                    ─► sharded as planned ───────────► the same results, and where every shard is ─────────┘

`comparison` defines which differences rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from shardload.errors import DisagreementError, UsageError
from shardload.keras_bridge.abstraction import check_initialised, initialise
from shardload.keras_bridge.binding import binding_of
from shardload.keras_bridge.variables import is_abstract, numbered, value_of
from shardload.layout_checks.comparison import Compared, ComparedArray, coarsest_eps, compare_all, nudged
from shardload.layout_checks.compiled_step import batch_specs, check_batch, devices_for, split_keywords
from shardload.layout_checks.placement import Misplaced, bytes_by_device, misplaced, misplaced_by_id
from shardload.layout_checks.step_programs import State, StepProgram, program_of, training_optimizer
from shardload.layout_search.given_layouts import GivenLayouts, choice_for
from shardload.layout_search.plan_parts import ComparedNumbers
from shardload.layouts.choice import LayoutChoice
from shardload.reports.markup import preformatted
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, is_function, plural

_MOST_LINES = 5
"""The most differences that an error or a summary lists."""


def check_numbers(
    model: Any,
    choice: GivenLayouts,
    inputs: Any,
    *,
    target: Any = None,
    loss: Any = None,
    training: Any = "gradients",
    steps: int = 1,
    kwargs: Mapping[str, Any] | None = None,
    devices: Sequence[Any] | None = None,
) -> NumbersCheck:
    """Run a model sharded and on one device, and compare everything.

    The values and layouts of ``model`` stay as they are; the first device needs memory for the whole model. Outputs are
    computed as in inference. Loss, gradients and updated state are computed as in training, with equal random masks.

    If the model is already on this mesh, the shards of its own variables are compared with the plan, too.

    Examples:
        ```python
        choice = shardload.parallel.choose(model, "data=2,model=4")
        check = shardload.parallel.check_numbers(model, choice, x, target=y, loss="mse")
        print(check.summary())
        check.raise_if_wrong()
        ```

    Args:
        model: A model with values, or a function that builds one.
        choice: Layouts of its variables: a plan, what `choose` returned for this model object, or a function from the
            model to one of these, such as ``lambda model: choose(model, mesh)``.
        inputs: A sample batch, the first argument of the model's ``call``: (a nested structure of) arrays.
        target: What the loss compares the outputs with.
        loss: As for Keras' ``compile``; by default the model's own (see `compile_step`).
        training: What is compared in addition to outputs. ``None``: nothing; ``"gradients"``: loss and gradients; an
            optimizer or its name: the loss, and the variables after ``steps`` training steps.
        steps: Number of training steps, all on the same batch.
        kwargs: Further arguments of ``call``.
        devices: One device for each mesh position; by default the first of ``jax.devices()``.

    Returns:
        A report. Call `NumbersCheck.raise_if_wrong` to turn a wrong one into an error.

    Raises:
        LayoutError: When the layouts are for another model object, or the plan is for another model.
        UninitialisedError: When the model is not built, or variables have no value.
        MeshError: When there are too few devices.
        UsageError: When ``steps`` is not positive, or Keras has no optimizer ``training``.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"Cannot compare a model after steps={steps!r:.60}: expected a positive number")
    if isinstance(model, type) or not hasattr(model, "trainable_variables"):
        if not is_function(model):
            raise UsageError(f"Cannot compare {model!r:.60}: expected a model, or a function that builds one")
        model = model()
    choice = choice_for(model, choice)
    devices = devices_for(choice.mesh, devices)
    if not (training is None or (isinstance(training, str) and training == "gradients")):
        training = training_optimizer(training)  # once, so that its slots have the same names in every run
    arrays, static = split_keywords(kwargs)
    check_batch(inputs=inputs, target=target)
    batch = jax.tree.map(np.asarray, {"inputs": inputs, "kwargs": arrays, "target": target})
    program = partial(program_of, model, choice, loss=loss, static=static, devices=devices)
    trial = partial(_outcome, program, choice, devices, batch, coarsest_eps(model))
    # Outputs first: their number of elements is the number of terms that the loss adds up.
    outcomes = [trial(training=None, steps=1)]
    if training is not None:
        terms = max(array.elements for array in outcomes[0].compared.arrays)
        outcomes.append(trial(training=training, steps=steps, terms=terms))
    bound = binding_of(model)
    # On another mesh, a difference from this plan is not an error.
    live = misplaced_by_id(model, choice, bound.devices) if bound and bound.mesh == choice.mesh else {}
    placed = outcomes[-1].placed
    # A variable counts once: misplaced in the live model or in the sharded run.
    elsewhere = (live.get(each.key) or misplaced(each.path, each.array, each.layout, devices) for each in placed)
    return NumbersCheck(
        choice.mesh,
        tuple(array for outcome in outcomes for array in outcome.compared.arrays),
        tuple(found for found in elsewhere if found is not None),
        variables=len(placed),
        device_bytes=sum(each.device_bytes for each in placed),
        found_device_bytes={d.id: n for d, n in bytes_by_device(each.array for each in placed).items()},
        movements=max(outcome.compared.movements for outcome in outcomes),
    )


@dataclass(frozen=True, slots=True)
class NumbersCheck:
    """Whether a sharded model computes the same as one device, and whether its shards are where the plan puts them."""

    mesh: MeshSpec
    comparisons: tuple[ComparedArray, ...]
    misplaced: tuple[Misplaced, ...]
    variables: int
    """Number of variables whose shards were compared with the plan."""
    device_bytes: int
    """Bytes of the compared variables on each device, as planned."""
    found_device_bytes: Mapping[int, int]
    """For the id of each device, the bytes of the compared variables' shards that were found on it."""
    movements: int = 3
    """In how many runs weights and inputs were moved by a rounding, to see how far results move: 3, or 15 if three runs
    did not explain every difference."""

    @property
    def wrong(self) -> tuple[ComparedArray, ...]:
        """Comparisons of arrays that differ by more than rounding or cannot be compared, largest difference first."""
        found = [c for c in self.comparisons if not c.agrees]
        return tuple(sorted(found, key=lambda c: -c.max_rel))

    @property
    def ok(self) -> bool:
        """Whether all results agree with one device, and all shards are where the plan puts them."""
        return not self.wrong and not self.misplaced

    def raise_if_wrong(self) -> NumbersCheck:
        """Raise if a result or a shard is wrong; otherwise return this check.

        Raises:
            DisagreementError: With the largest differences and the misplaced variables.
        """
        if self.ok:
            return self
        lines = [str(found) for found in (*self.wrong, *self.misplaced)]
        more = f"\n  and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
        raise DisagreementError(
            f"Cannot rely on this layout on {self.mesh}: {', '.join(self._problems())}:\n  "
            + "\n  ".join(lines[:_MOST_LINES])
            + more
        )

    def _problems(self) -> Iterator[str]:
        differ = sum(c.differs for c in self.wrong)
        undefined, results = len(self.wrong) - differ, plural(len(self.comparisons), "result")
        if differ:
            yield f"{differ} of {results} differ from one device by more than rounding"
        if undefined:
            yield (
                f"{undefined} of {results} cannot be compared, as they are not finite on one device either, or not "
                "after rounding (check the values of the model and the inputs)"
            )
        if self.misplaced:
            yield f"{len(self.misplaced)} of {plural(self.variables, 'variable')} are not where they were planned"

    def for_plan(self) -> ComparedNumbers:
        """Return the results as a `ComparedNumbers`, which `LayoutPlan.with_checks` stores in a plan."""
        return ComparedNumbers(
            len(self.comparisons),
            tuple(c.name for c in self.wrong),
            # JSON has no infinity, and a result that differs that much is listed in `wrong`.
            max((c.share for c in self.comparisons if math.isfinite(c.share)), default=0.0),
            self.variables,
            tuple(m.path for m in self.misplaced),
            self.device_bytes,
        )

    def _repr_html_(self) -> str:
        return preformatted(self.summary())

    def summary(self) -> str:
        """Return a few lines of text: the verdict, and for each kind of result the largest difference."""
        verdict = "NOT COMPARABLE with" if self.wrong else "equal to"
        if any(c.differs for c in self.wrong):
            verdict = "DIFFERENT from"
        lines = [
            f"{verdict} one device on {self.mesh}: {plural(len(self.comparisons), 'result')} compared, "
            f"{len(self.wrong)} wrong",
            f"{plural(self.variables, 'variable')} where planned, {format_bytes(self.device_bytes)} on each device"
            if not self.misplaced
            else f"{len(self.misplaced)} of {plural(self.variables, 'variable')} NOT where planned",
        ]
        # For each kind of result, show the one that comes closest to its tolerance: the last of its name in this order.
        kinds = {
            c.name.partition(" of ")[0].partition("/")[0]: c for c in sorted(self.comparisons, key=lambda c: c.share)
        }
        shown = self.wrong[:_MOST_LINES] or tuple(kinds.values())
        return "\n".join([*lines, *(f"  {found}" for found in (*shown, *self.misplaced[:_MOST_LINES]))])

    def to_json(self) -> dict[str, Any]:
        """Return the results of the check as an object for `json.dumps`."""
        return {
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "ok": self.ok,
            "comparisons": [
                # JSON has no infinity or NaN.
                {n: v if not isinstance(v, float) or math.isfinite(v) else None for n, v in asdict(c).items()}
                | {"agrees": c.agrees}
                for c in self.comparisons
            ],
            "misplaced": [asdict(found) for found in self.misplaced],
            "variables": self.variables,
            "device_bytes": self.device_bytes,
            "movements": self.movements,
            "found_device_bytes": {str(device): n for device, n in self.found_device_bytes.items()},
        }


@dataclass(frozen=True, slots=True)
class _Placed:
    """The array that a variable has after the sharded run, and the layout that it should have."""

    key: int
    """``id`` of the Keras variable. A model that is already on this mesh has shards of its own, which are compared with
    the plan in addition to those of the sharded run. The result of that comparison is found by this ``id``."""
    path: str
    array: Any
    layout: Layout

    @property
    def device_bytes(self) -> int:
        return self.layout.bounds(tuple(self.array.shape))[0].size * int(self.array.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Outcome:
    compared: Compared
    placed: list[_Placed]


@dataclass(frozen=True, slots=True)
class _Results:
    arrays: dict[str, Any]
    state: State
    """Values of all variables after the steps, as lists under ``trainable``, ``non_trainable`` and ``optimizer``."""
    losses: tuple[str, ...] = ()
    """Names of those arrays that are losses: as sums of many terms, they have a larger tolerance."""


def _outcome(
    program_for: Callable[..., AbstractContextManager[StepProgram]],
    choice: LayoutChoice,
    devices: Sequence[Any],
    batch: Any,
    eps: float,
    *,
    training: Any,
    steps: int,
    terms: int = 1,
) -> _Outcome:
    """Run a step sharded and on one device, and compare all results; a loss is a sum of ``terms`` elements."""
    with program_for(training=training) as program:
        # An optimizer that was built for this check has initial slots.
        slots = program.variables.get("optimizer", ())
        initialise([v for v in slots if is_abstract(v) and id(v) not in choice.by_id])
        check_initialised([v for found in program.variables.values() for v in found])
        values = {name: [np.asarray(value_of(v)) for v in found] for name, found in program.variables.items()}
        step = jax.jit(program.function, out_shardings=program.out_shardings(devices))
        specs = program.specs(devices), batch_specs(batch, choice, devices)
        case = jax.tree.map(lambda value, spec: jax.device_put(value, spec.sharding), (values, batch), specs)
        sharded = _run(program, step, *case, steps=steps)
        placed = [
            _Placed(id(variable), variable.path, array, layout)
            for name, found in program.variables.items()
            for variable, array, layout in zip(found, sharded.state[name], program.layouts[name], strict=True)
        ]
    # Another program: that for one device has no layouts of activations. Each can be traced in its block only.
    with program_for(training=training, on_mesh=False) as program:
        step, there = jax.jit(program.function), jax.sharding.SingleDeviceSharding(devices[0])

        def on_one_device(state: State, inputs: Any) -> Mapping[str, Any]:
            return _run(program, step, *jax.device_put((state, {**batch, "inputs": inputs}), there), steps=steps).arrays

        def moved(seeds: Sequence[int]) -> list[Mapping[str, Any]]:
            given = {"state": values, "inputs": batch["inputs"]}
            return [on_one_device(**nudged(given, eps, seed=seed)) for seed in seeds]

        expected = on_one_device(values, batch["inputs"])
        compared = compare_all(sharded.arrays, expected, moved, eps=eps, terms=dict.fromkeys(sharded.losses, terms))
    return _Outcome(compared, placed)


def _run(program: StepProgram, step: Callable[..., Any], state: State, batch: Any, *, steps: int) -> _Results:
    """Run a step ``steps`` times, and return all it computes by name, such as ``gradient of dense/kernel``."""
    paths = {name: numbered(v.path for v in found) for name, found in program.variables.items()}
    if program.kind == "forward":
        outputs: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(step(state, batch)[0]):
            keys = (str(jax.tree_util.keystr((key,), simple=True)) for key in path)
            outputs["/".join(["output", *keys])] = leaf
        return _Results(outputs, state)
    if program.kind == "gradients":
        loss, gradients, rest = step(state, batch)
        named = {f"gradient of {path}": g for path, g in zip(paths["trainable"], gradients, strict=True)}
        after = {f"{path} after a step": value for path, value in zip(paths["non_trainable"], rest, strict=True)}
        return _Results({"loss": loss, **named, **after}, {**state, "non_trainable": rest}, ("loss",))
    arrays = {}
    for number in range(1, steps + 1):
        arrays[f"loss of step {number}"], state = step(state, batch)
    losses = tuple(arrays)
    for name, found in paths.items():
        arrays |= {
            f"{path} after {plural(steps, 'step')}": value for path, value in zip(found, state[name], strict=True)
        }
    return _Results(arrays, state, losses)
