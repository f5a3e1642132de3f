"""What REKLS checks and creates before its first step: its arguments, and the state of each variable."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import LayoutError, UsageError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.joint_optimizer import JointOptimizer, sharding_on_mesh
from shardload.optimizers.matrices import MatrixRules, MatrixView
from shardload.optimizers.rekls_math import DECAYS, DECOMPOSITIONS, Settings
from shardload.sharding.devices import mesh_spec
from shardload.sharding.layout import Layout
from shardload.units import dtype_name, parse_bytes, plural

FACTOR_SLOTS = {
    "left_factors": "left_factor",
    "right_factors": "right_factor",
    "left_values": "left_eigenvalues",
    "right_values": "right_eigenvalues",
    "left_vectors": "left_eigenvectors",
    "right_vectors": "right_eigenvectors",
}
SLOTS = {"momentums": "momentum", "velocities": "velocity", **FACTOR_SLOTS}
"""Attribute of the optimizer → name of the Keras variables that it lists. Each list has an entry for every trained
variable, `None` where there is no such state."""
AdamwFor = Sequence[str] | Callable[[Any], bool]
"""Which variables get AdamW: regular expressions for their paths, or a function of a variable."""
RMS = "rms"
"""Value of ``init_factor``: eigenvalues start as the root mean square of each matrix's first gradient."""
WHOLE_BYTES = 1 << 30
"""Default of ``whole_bytes``, the limit for state that is whole on a device at a time: enough for a small model, and
less than a device's share of a large model's state."""
_SMALLEST = float(np.finfo(np.float32).tiny)
"""Least number that float32 has in full precision, and least ``epsilon``: XLA counts smaller ones as 0."""
_BFLOAT16_NOISE = 2.0**-8
"""Relative rounding error of bfloat16. Eigenvalues below this share of the largest are noise in such a factor."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "weight_decay_method": DECAYS,
    "decomposition": DECOMPOSITIONS,
    "decompositions": ("dealt", "repeated"),
    "factor_dtype": ("float32", "bfloat16"),
    "uneven": ("error", "replicate"),
    "skip_first_update": (True, False),
    "limit_updates": (True, False),
}
_INTEGERS = ("precondition_frequency", "max_dimension")
_LIMITS = {
    "beta_1": 1.0,
    "beta_2": 1.0,
    "factor_beta": 1.0,
    "relative_epsilon": 1.0,
    "rank_tolerance": 1.0,
    "adamw_ratio": math.inf,
}
"""Argument that must be a number of at least 0 → the limit that it must be below."""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `shardload.optimizers.REKLS`, which explains them. They are checked when this is created."""

    beta_1: float
    beta_2: float
    factor_beta: float
    epsilon: float
    weight_decay_method: str
    precondition_frequency: int
    decomposition: str
    decompositions: str
    max_dimension: int
    factor_dtype: str
    skip_first_update: bool
    init_factor: float | str
    relative_epsilon: float
    limit_updates: bool
    rank_tolerance: float
    adamw_for: AdamwFor
    adamw_ratio: float
    row_dims: Mapping[str, Sequence[int]]
    whole_bytes: int
    uneven: str

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            # The type first: 1 equals True, and `in` compares an array element by element.
            if not isinstance(value := getattr(self, name), str | bool) or value not in choices:
                _refuse(name, value, f"one of {', '.join(map(str, choices))}")
        for name, limit in _LIMITS.items():
            check_hyperparameter(name, getattr(self, name), below=limit)
        for name in _INTEGERS:
            value = getattr(self, name)
            if not _is_integer(value) or value < 1:
                _refuse(name, value, "an integer of at least 1")
        check_hyperparameter("epsilon", self.epsilon)
        # It keeps 0 / (√0 + ε) from being NaN, for elements that never had a gradient; XLA counts subnormals as 0.
        if self.epsilon < _SMALLEST:
            _refuse("epsilon", self.epsilon, f"a number of at least {_SMALLEST:.3g}")
        if not self.starts_at_rms:
            check_hyperparameter("init_factor", self.init_factor, otherwise=f", or {RMS!r}")
        if not callable(self.adamw_for) and not (
            _is_sequence(self.adamw_for) and all(map(_is_pattern, self.adamw_for))
        ):
            _refuse("adamw_for", self.adamw_for, "a list of regular expressions, or a function of a variable")
        known = isinstance(self.row_dims, Mapping) and all(map(_is_pattern, self.row_dims))
        if not known or not all(_is_sequence(dims) and all(map(_is_integer, dims)) for dims in self.row_dims.values()):
            example = "a dict of regular expressions and lists of dims, such as {'query/kernel': (0,)}"
            _refuse("row_dims", self.row_dims, example)

    def settings(self, weight_decay: float | None) -> Settings:
        """Return those arguments that the arithmetic in `rekls_math` needs, as the constants of a compiled step."""
        return Settings(
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            factor_beta=self.factor_beta,
            epsilon=self.epsilon,
            weight_decay=weight_decay or 0.0,
            decay=self.weight_decay_method,
            skip_first_update=self.skip_first_update,
            starts_at_rms=self.starts_at_rms,
            relative_epsilon=self.relative_epsilon,
            limits_updates=self.limit_updates,
            rank_tolerance=self.least_share,
        )

    @property
    def least_share(self) -> float:
        """Least eigenvalue, as a share of the largest, along which W moves: ``rank_tolerance``, or bfloat16's noise."""
        # Smaller eigenvalues of a factor in bfloat16 are rounding noise of the factor itself.
        is_exact = self.factor_dtype == "float32" or not self.rank_tolerance
        return self.rank_tolerance if is_exact else max(self.rank_tolerance, _BFLOAT16_NOISE)

    @property
    def starts_at_rms(self) -> bool:
        """Whether the first eigenvalues of each matrix are the root mean square of its first gradient."""
        return isinstance(self.init_factor, str) and self.init_factor == RMS

    @property
    def rules(self) -> MatrixRules:
        """The rules that say which variables are matrices. If ``adamw_for`` is a function, callers ask it first."""
        patterns = () if callable(self.adamw_for) else tuple(self.adamw_for)
        dims = {pattern: tuple(found) for pattern, found in self.row_dims.items()}
        return MatrixRules(self.max_dimension, patterns, dims)


def check_hyperparameter(name: str, value: Any, *, below: float = math.inf, otherwise: str = "") -> None:
    """Raise unless an argument is a number of at least 0 and below a limit; ``otherwise`` says what else is allowed."""
    # To Python, a bool is a Real. NaN fails every comparison.
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # As the arithmetic sees it: 0.99999999 is 1.
    with np.errstate(over="ignore"):
        is_in_range = is_real and 0 <= float(value) < below and float(np.float32(value)) < below
    if not is_in_range:
        limit = "a finite number of at least 0" if below == math.inf else f"a number of at least 0 and below {below:g}"
        _refuse(name, value, limit + otherwise)


def canonical_dtype(wanted: Any) -> Any:
    """Return the name of a dtype, such as ``"float32"``; return anything else as it is, to be refused by a check."""
    try:
        return dtype_name(wanted)
    except UsageError:
        return wanted


def check_bytes(name: str, value: Any) -> int:
    """Return a number of bytes that a user gives as an integer or as text (``4GiB``); raise for anything else."""
    try:
        return parse_bytes(value)
    except ValueError:
        _refuse(name, value, "a number of bytes, or text like '4GiB'")


def check_rate(learning_rate: Any) -> Any:
    """Return a learning rate in a form that Keras accepts: numbers as ``float``, schedules and functions as given."""
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule) or _needs_nothing(learning_rate):
        return learning_rate
    otherwise = ", a LearningRateSchedule, or a function without arguments"
    # Keras refuses ints and NumPy's float32, which are not subclasses of float.
    check_hyperparameter("learning_rate", learning_rate, otherwise=otherwise)
    return float(learning_rate)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _needs_nothing(value: Any) -> bool:
    """Whether a value is a function that Keras can call without arguments."""
    # A schedule's class is callable too, but calling it gives a schedule, not a number.
    if not callable(value) or isinstance(value, type):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise UsageError(f"Cannot create REKLS with {name}={value!r:.60}: expected {expected}")


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A variable of the optimizer's state that is about to be created."""

    slot: str
    """The attribute of the optimizer that will list it, such as ``left_factors``: a key of `SLOTS`."""
    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding | None


def check_variable(variable: Variable) -> None:
    """Raise unless REKLS can optimize a variable: a `keras.Variable` of floats that is not empty."""
    if not isinstance(variable, keras.Variable):
        raise UsageError(
            f"Cannot optimize an object of type {type(variable).__name__}: expected a keras.Variable, as in "
            "model.trainable_variables"
        )
    # By name, because NumPy does not count bfloat16 and float8 as floating. Complex dtypes have other names.
    dtype = str(variable.dtype)
    if "float" not in dtype:
        raise UsageError(
            f"Cannot optimize {variable.path!r} of dtype {dtype}: expected a floating-point dtype. Set trainable=False "
            "on its layer, or give it another optimizer with keras.optimizers.MultiOptimizer"
        )
    if 0 in variable.shape:
        raise UsageError(
            f"Cannot optimize {variable.path!r} of shape {tuple(variable.shape)}: expected dims of at least 1. Set "
            "trainable=False on its layer"
        )


def new_slots(variable: Variable, view: MatrixView | None, options: Options) -> Iterator[NewSlot]:
    """Yield the state to create for a variable: moments of its shape; for a matrix, also factors and eigenpairs."""
    own = sharding_on_mesh(variable)
    for slot in ("momentums", "velocities"):
        yield NewSlot(slot, tuple(variable.shape), "float32", own)
    for name, side in zip(("left", "right"), view.factor_sides if view else (), strict=False):
        if side is not None:
            split = _split_state(variable, own, side, options)
            yield NewSlot(f"{name}_factors", (side, side), options.factor_dtype, split)
            yield NewSlot(f"{name}_values", (side,), "float32", split)
            yield NewSlot(f"{name}_vectors", (side, side), "float32", split)


def start_of_slot(slot: str, options: Options) -> Any:
    """Return the Keras initializer of REKLS' attribute ``slot``. Factors of 0 mean that there was no gradient yet."""
    if slot.endswith("_vectors"):
        return keras.initializers.Identity()
    starts_at_zero = options.starts_at_rms or not slot.endswith("_values")
    return keras.initializers.Constant(0.0 if starts_at_zero else options.init_factor)


def _split_state(variable: Variable, own: NamedSharding | None, side: int, options: Options) -> NamedSharding | None:
    """Return how a factor with ``side`` rows is split: along dim 0, over the mesh axes that split ``variable``.

    If the rows do not divide evenly, it is not split at all, or with ``uneven="error"``, this raises. ``own`` is the
    sharding of the variable; without a mesh, it is ``None``, and so is the result.
    """
    if own is None:
        return None
    layout = Layout.of_spec(mesh_spec(own.mesh), own.spec, len(variable.shape))
    parts = math.prod(layout.parts)
    if side % parts and options.uneven == "error":
        raise LayoutError(
            f"Cannot shard the factors of {variable.path!r} of shape {tuple(variable.shape)}: a factor of length "
            f"{side} does not divide into {plural(parts, 'part')}, as {own.spec} splits the variable. Replicate such "
            "factors with uneven='replicate', leave the variable to AdamW with adamw_for=, or choose another layout"
        )
    axes = along_first(layout, (side,)).spec[0]
    return NamedSharding(own.mesh, PartitionSpec(axes) if axes else PartitionSpec())


def along_first(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return a factor's layout: dim 0 split over all axes that split its weight, or whole if that is uneven."""
    # Along one dim, whatever dims of the variable the axes split: a factor's rows mix several of those.
    axes = tuple(axis for split in layout.spec for axis in split)
    found = Layout(layout.mesh, (axes, *((),) * (len(shape) - 1)))
    return found if found.divides(shape) else Layout.replicated(layout.mesh, len(shape))


def partition_spec_of(variable: Variable) -> PartitionSpec:
    """Return how a variable is split over its mesh; a variable on no mesh counts as replicated."""
    found = sharding_on_mesh(variable)
    return PartitionSpec() if found is None else found.spec


def common_mesh(optimizer: JointOptimizer, variables: Sequence[Variable]) -> Mesh | None:
    """Return the one mesh that all of ``variables`` are on, or `None` on one device; raise if there are several."""
    meshes: dict[Mesh, str] = {}
    for variable in variables:
        if (found := sharding_on_mesh(variable)) is not None:
            meshes.setdefault(found.mesh, variable.path)
    if len(meshes) > 1:
        (one, first), (other, second), *_ = meshes.items()
        raise LayoutError(
            f"Cannot update with {optimizer.name!r}: {first!r} is on the mesh {_mesh_text(one)}, but {second!r} on "
            f"{_mesh_text(other)}. Restore a step with shardload.restore(model, ..., mesh=...), which moves both, or "
            "compile the model with a new optimizer"
        )
    mesh = next(iter(meshes), None)
    # On one device there is nothing to gather, so the update needs no shard_map.
    return None if mesh is None or mesh.size == 1 else mesh


def _mesh_text(mesh: Mesh) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{sizes} of devices {mesh.devices.flat[0].id} to {mesh.devices.flat[-1].id}"
