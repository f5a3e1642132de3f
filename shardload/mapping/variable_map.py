"""The mapping from a checkpoint's tensors to a model's variables, and the steps that fill the variables.

    Binding      a variable gets elements of one tensor, which are read in blocks, never all at once on the host
    Computed     variables get values that a hook computes from tensors, which are read whole, one layer at a time
    missing      weights of the model for which the checkpoint has no value
    state        seeds, metrics and optimizer variables for which it has none: they are initialised
    unused       tensors that no loading code read
    skipped      tensors of parts that the model lacks
    mismatched   a variable and a tensor of different shapes, or a layer whose hook failed

Names of bindings are variable paths; where two variables share a path, the later ones get ``#2``, ``#3``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from shardload.errors import MismatchError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.optimizer_slots import Start
from shardload.keras_bridge.variables import numbered, stored_dtype, unique
from shardload.manifest import Manifest, View
from shardload.transfer.planning import Binding


def unsharded_binding(variable: Variable, view: View, names: Mapping[int, str]) -> Binding:
    """Return the binding of a variable (which elements of which tensor it gets); layouts are added to it later."""
    return Binding.unsharded(names[id(variable)], view, stored_dtype(variable), variable)


@dataclass(frozen=True, slots=True)
class Computed:
    """Variables whose values are computed by a layer's or converter's code, instead of copied from a tensor."""

    owner: str
    """Name of the code that computes the values, for messages: ``converter convert_mixtral``."""
    names: tuple[str, ...]
    variables: tuple[Variable, ...]
    tensors: tuple[str, ...]
    """Names of the tensors that the code needs whole; empty if it needs none (LoRA's zeros)."""

    def without(self, others: Mapping[int, Variable]) -> Computed:
        """Return a copy without the variables whose ``id`` is in ``others``, because they keep their values."""
        left = [(name, v) for name, v in zip(self.names, self.variables, strict=True) if id(v) not in others]
        return replace(self, names=tuple(name for name, _ in left), variables=tuple(v for _, v in left))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An error of the mapping: a variable and a tensor disagree, or a layer's ``load_own_variables`` failed."""

    variable: str
    tensor: str
    """Name of the tensor; empty if the layer's hook failed before it read one."""
    expected: tuple[int, ...] | None
    """Shape of the variable; ``None`` if shapes are not what differs."""
    found: tuple[int, ...] | None
    """Shape of the tensor; ``None`` if shapes are not what differs."""
    message: str

    @classmethod
    def of_shapes(cls, variable: Variable, tensor: str, found: tuple[int, ...]) -> Mismatch:
        """Return the mismatch of a variable and a value of another shape; ``tensor`` is empty for a computed value."""
        expected, source = tuple(variable.shape), f"tensor {tensor!r}" if tensor else "the computed value"
        text = f"Variable {variable.path!r} has shape {expected}, but {source} has shape {found}"
        return cls(variable.path, tensor, expected, found, text)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Begun:
    """An optimizer's variable that the checkpoint lacks, while others are restored: it gets its initial value."""

    variable: Variable
    attribute: str
    """The attribute of the optimizer that contains the variable: ``momentums``."""
    start: Start | None
    """The variable's value in a new optimizer: a number, an initializer, or that of a weight; ``None`` if not known."""


class Runtime(Protocol):
    """What a part of a load (a `MappingStep`) may do while it runs: read tensors, assign values."""

    def read(self, tensor: str) -> NDArray[Any]:
        """Read a whole tensor into a separate, writable array."""

    def take(self, name: str) -> Any:
        """Return the finished, sharded array for the variable called ``name``."""

    def assign(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        """Assign an array from `take` to a variable by ``assign``, Keras' own method, without a copy."""

    def compute(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        """Copy a computed value to the devices, in the layout of ``variable``, then assign it by ``assign``."""


class MappingStep(Protocol):
    """A part of a load that runs once all its arrays were read: the hook of a layer, one variable, or a converter."""

    @property
    def owner(self) -> str:
        """Name of the layer, variable or converter whose code runs, for messages."""

    @property
    def saveable(self) -> Any:
        """The layer or other object whose attributes the code may change, so that a failed load can undo it."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the variables whose arrays must have been read before `run`, which assigns them."""

    @property
    def computes(self) -> bool:
        """Whether this part computes values from whole tensors; such parts run last, one at a time."""

    def run(self, runtime: Runtime) -> None:
        """Run this part of the load, which assigns values to its variables."""


@dataclass(frozen=True, slots=True)
class VariableMap:
    """What a load will do with each tensor and each variable, decided before tensors are read into variables."""

    bindings: tuple[Binding, ...]
    steps: tuple[MappingStep, ...]
    """The parts of the load (a layer's hook, one variable, a converter), in the order in which Keras would run them."""
    missing: tuple[str, ...]
    """Names of weights for which the checkpoint has no value: an error under ``strict``."""
    missing_variables: tuple[Variable, ...]
    state: tuple[Variable, ...]
    """Variables that the checkpoint may lack (seeds, metrics, optimizers'): they keep their values, or get new ones."""
    unused: tuple[str, ...]
    """Tensors that no loading code read: an error under ``strict``. Not those that a custom hook declined to read."""
    computed: tuple[Computed, ...] = ()
    skipped: tuple[str, ...] = ()
    """Unused tensors of parts that this model lacks: an optimizer's state, a task's head."""
    mismatched: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for reports: warnings and output of loading code, and what the mapping leaves out."""
    refused: tuple[tuple[str, Variable], ...] = ()
    """(name, variable) of weights that get no value, because a tensor for them, or for their layer, does not fit."""
    absent: tuple[str, ...] = ()
    """Names of tensors that KerasHub's converter requested, but that the checkpoint lacks."""
    kept: tuple[str, ...] = ()
    """Weights that a partial step leaves out: they keep the values that they have in the model."""
    kept_variables: tuple[Variable, ...] = ()
    begun: tuple[Begun, ...] = ()
    """Optimizer variables that begin as in a new optimizer, while others of the same optimizer are restored."""
    advice: str = ""
    """How to fix the mismatches, missing weights or unused tensors, if that is known: the end of an error message."""
    only_optimizer_differs: bool = False
    """Whether all that is missing, unused or mismatched is state of optimizers: then ``items="weights"`` can help."""

    @property
    def provided(self) -> tuple[Variable, ...]:
        """Every variable that gets a value, from a tensor or computed by loading code; each is listed once."""
        found = [o.variable for b in self.bindings for o in b.outputs]
        found += [v for c in self.computed for v in c.variables]
        return tuple(unique(found))

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the tensors whose values the load must read; each is listed once."""
        found = (*(b.view.tensor for b in self.bindings), *(name for c in self.computed for name in c.tensors))
        return tuple(dict.fromkeys(found))

    def without_mismatched(self) -> VariableMap:
        """Return a copy for a load that is not ``strict``: mismatches are left out, and their weights are missing."""
        return replace(
            self,
            mismatched=(),
            refused=(),
            missing=(*self.missing, *(name for name, _ in self.refused)),
            missing_variables=(*self.missing_variables, *(variable for _, variable in self.refused)),
        )


def refused_among(
    weights: Iterable[Variable], covered: Iterable[Variable], provided: Iterable[Variable], names: Mapping[int, str]
) -> tuple[tuple[str, Variable], ...]:
    """Return (name, variable) of the weights that get no value, because a tensor or layer for them does not fit.

    Those are the ``weights`` in ``covered`` (variables of what does not fit) that are not in ``provided``.
    """
    weight_ids, provided_ids = {id(v) for v in weights}, {id(v) for v in provided}
    return tuple((names[id(v)], v) for v in covered if id(v) in weight_ids - provided_ids)


@dataclass(frozen=True, slots=True, eq=False)
class AssignStep:
    """Assigns arrays to one variable or to those of one layer, without the layer's ``load_own_variables``."""

    bindings: tuple[Binding, ...]
    saveable: Any = None
    """The layer, whose ``finalize_state`` is called afterwards (`Normalization`); ``None`` for a single variable."""
    computes: ClassVar[bool] = False

    @property
    def owner(self) -> str:
        """Name of the layer or variable, for messages."""
        return f"variable {self.bindings[0].name!r}" if self.saveable is None else f"layer {self.saveable.name!r}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the variables whose arrays must have been read before `run`, which assigns them."""
        return tuple(output.name for binding in self.bindings for output in binding.outputs)

    def run(self, runtime: Runtime) -> None:
        """Assign the arrays, then let the layer compute what it derives from them, as Keras does."""
        # Keras' `assign` keeps an array that has the variable's dtype and layout, so nothing is copied.
        for output in (output for binding in self.bindings for output in binding.outputs):
            array = runtime.take(output.name)
            runtime.assign(output.variable, array, lambda variable, value: variable.assign(value))
        if hasattr(self.saveable, "finalize_state"):
            self.saveable.finalize_state()


def variable_names(variables: Iterable[Variable]) -> dict[int, str]:
    """Return ``id(variable)`` → a unique name: its path, with ``#2``, ``#3`` for later variables of the same path."""
    distinct = unique(variables)
    return dict(zip(map(id, distinct), numbered(v.path for v in distinct), strict=True))


def split_missing(
    weights: Iterable[Variable], everything: Iterable[Variable], provided: Iterable[Variable], names: Mapping[int, str]
) -> tuple[tuple[str, ...], tuple[Variable, ...], tuple[Variable, ...]]:
    """Return the variables that get no value (are not in ``provided``): names of weights, weights, other variables."""
    provided_ids = {id(v) for v in provided}
    weights = unique(weights)
    weight_ids = {id(v) for v in weights}
    missing = tuple(v for v in weights if id(v) not in provided_ids)
    known = provided_ids | weight_ids
    state = tuple(v for v in everything if id(v) not in known)
    return tuple(names[id(v)] for v in missing), missing, state


_SHOWN = 4


def unknown_tensor(name: str, manifest: Manifest) -> MismatchError:
    """Build the error for a tensor in a caller's ``names`` that the checkpoint lacks."""
    return MismatchError(
        f"Cannot map tensor {name!r}: {manifest.source} does not contain it" + suggestion(name, manifest.tensors)
    )


def suggestion(wanted: str, known: Iterable[str]) -> str:
    """Return the end of an error about a wrong name: ``". Did you mean 'a/b'?"``, or the first few known names."""
    names = sorted(set(known))
    # A box of Flax (`kernel/value`): the tensors of other layers, whose names are like it, are others.
    if inside := [n for n in names if n.startswith((f"{wanted}/", f"{wanted}."))]:
        return f". Did you mean {' or '.join(map(repr, inside[:_SHOWN]))}?"
    # The last two parts: the variable's name alone ("kernel") would match every layer.
    ending = wanted.rsplit("/", 2)[-2:]
    close = [n for n in names if n.split("/")[-len(ending) :] == ending]
    close += [n for n in difflib.get_close_matches(wanted, names, n=_SHOWN, cutoff=0.5) if n not in close]
    if close:
        return f". Did you mean {' or '.join(map(repr, close[:_SHOWN]))}?"
    more = ", …" if len(names) > _SHOWN else ""
    return f". Available: {', '.join(map(repr, names[:_SHOWN]))}{more}" if names else ""
