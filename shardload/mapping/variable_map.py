"""What a checkpoint's tensors mean for a model's variables, and the steps that will fill them.

    Binding    variable ◄── view of one tensor            streamed: planned, read in blocks, never whole on the host
    Computed   variables ◄─ a hook's arithmetic ◄─ tensors  read whole, one layer at a time, on the host
    missing    weights nothing provides                   state        seeds, metrics, slots: to be initialised
    unused     tensors nobody asked for                   unasked      the same, of parts the model does not have
    mismatched variable and tensor disagree

Names of bindings are variable paths; where two variables share a path, the later ones get ``#2``, ``#3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shardload.manifest import View

Variable = Any
"""A ``keras.Variable``; untyped upstream."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One variable that is a view of one tensor."""

    name: str
    """Unique: the variable's path, with ``#2`` where another variable has the same one."""
    variable: Variable
    view: View
    """Its shape is the variable's."""
    dtype: np.dtype[Any]
    """What the variable stores."""
    stored: np.dtype[Any]
    """What the tensor stores; differs where the load casts."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Variables whose values a layer's or converter's own code computes."""

    owner: str
    """Whose code: ``layer 'dense' (layers/dense)``, ``converter convert_mixtral``."""
    names: tuple[str, ...]
    variables: tuple[Variable, ...]
    tensors: tuple[str, ...]
    """Read whole for it; empty where the code makes its values from nothing (LoRA's zeros)."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A variable and a tensor that disagree, or a layer whose hook refused."""

    variable: str
    tensor: str
    """Empty where the layer failed before any tensor."""
    expected: tuple[int, ...] | None
    """The variable's shape."""
    found: tuple[int, ...] | None
    """The shape offered."""
    message: str

    def __str__(self) -> str:
        return self.message


class Runtime(Protocol):
    """What a step may use while it runs."""

    def read(self, tensor: str) -> NDArray[Any]:
        """A whole tensor, real bytes, in memory of its own (writable)."""
        ...

    def take(self, name: str) -> Any:
        """The finished, sharded array of a binding, handed over."""
        ...

    def assign(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        """Assign a finished, sharded array."""
        ...

    def compute(self, variable: Variable, value: Any, assign: Callable[[Variable, Any], Any]) -> Any:
        """Assign a value that code computed: placed into the variable's layout first."""
        ...


class Step(Protocol):
    """Part of a load that runs when all it needs has arrived: one layer's hook, one variable, one converter."""

    @property
    def owner(self) -> str:
        """Whose code runs, for messages."""
        ...

    @property
    def saveable(self) -> Any:
        """The object whose attributes the code may change, or ``None``."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the bindings it assigns."""
        ...

    @property
    def computes(self) -> bool:
        """Whether it reads whole tensors; such steps run last, one at a time."""
        ...

    def run(self, runtime: Runtime) -> None:
        """Assign."""
        ...


@dataclass(frozen=True, slots=True)
class VariableMap:
    """Everything known about which tensor goes where before a byte of data is read."""

    bindings: tuple[Binding, ...]
    computed: tuple[Computed, ...]
    missing: tuple[str, ...]
    """Weights of the model nothing provides."""
    missing_variables: tuple[Variable, ...]
    """The same, as variables."""
    state: tuple[Variable, ...]
    """Seeds, metrics and optimizer variables nothing provides: to be initialised where they have no value."""
    unused: tuple[str, ...]
    """Tensors nothing took; those a layer's own ``load_own_variables`` was offered and left are in `notes` instead."""
    unasked: tuple[str, ...]
    """Tensors nothing took, of parts this model does not have: an optimizer's state, a task's head."""
    mismatched: tuple[Mismatch, ...]
    notes: tuple[str, ...]
    """What loading code printed or warned about."""
    steps: tuple[Step, ...]
    """In the order Keras would have run them."""
    refused: tuple[tuple[str, Variable], ...] = ()
    """Weights that get no value because they, or others of their layer, are mismatched; by name."""
    absent: tuple[str, ...] = ()
    """Names a converter asked for that the checkpoint does not have."""

    @property
    def provided(self) -> tuple[Variable, ...]:
        """Every variable that gets a value from the checkpoint (or from a hook), once."""
        found = [b.variable for b in self.bindings] + [v for c in self.computed for v in c.variables]
        return tuple({id(v): v for v in found}.values())

    def without_mismatched(self) -> VariableMap:
        """The same without what disagrees: layers that refused are left alone, their weights missing."""
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
    """Weights that are covered by something mismatched and provided by nothing else, by name."""
    ours, have = {id(v) for v in weights}, {id(v) for v in provided}
    return tuple((names[id(v)], v) for v in covered if id(v) in ours and id(v) not in have)


@dataclass(frozen=True, slots=True)
class DirectStep:
    """One variable, assigned as it is."""

    binding: Binding
    saveable: ClassVar[None] = None
    """No code runs, no attribute changes."""
    computes: ClassVar[bool] = False

    @property
    def owner(self) -> str:
        """The variable."""
        return f"variable {self.binding.name!r}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Its one binding."""
        return (self.binding.name,)

    def run(self, runtime: Runtime) -> None:
        """Assign the array."""
        array = runtime.take(self.binding.name)
        runtime.assign(self.binding.variable, array, lambda variable, value: variable.assign(value))


def variable_names(variables: Iterable[Variable]) -> dict[int, str]:
    """A unique name for each variable, by ``id``: its path, numbered where paths repeat."""
    names: dict[int, str] = {}
    seen: dict[str, int] = {}
    for variable in variables:
        if id(variable) not in names:
            count = seen[variable.path] = seen.get(variable.path, 0) + 1
            names[id(variable)] = variable.path if count == 1 else f"{variable.path}#{count}"
    return names


def split_missing(
    weights: Iterable[Variable], everything: Iterable[Variable], provided: Iterable[Variable], names: Mapping[int, str]
) -> tuple[tuple[str, ...], tuple[Variable, ...], tuple[Variable, ...]]:
    """Names of weights without source, the same as variables, and other state without source."""
    have = {id(v) for v in provided}
    weights = list({id(v): v for v in weights}.values())
    ours = {id(v) for v in weights}
    missing = tuple(v for v in weights if id(v) not in have)
    state = tuple(v for v in everything if id(v) not in have and id(v) not in ours)
    return tuple(names[id(v)] for v in missing), missing, state
