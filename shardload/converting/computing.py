"""Compute tensors that are not views of stored tensors, with the same steps as a load.

    step ──compute(variable, value)──► cast ──► written, then released

A step is code that computes values of variables from tensors: a KerasHub converter, run once more, or a layer's loading
hook. If a step reads the value of another variable, as converters of position embeddings do, that variable gets its
value temporarily and the step runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardload.errors import MismatchError, UninitialisedError, UnsupportedError
from shardload.keras_bridge.variables import has_value, pending_of, restore_value, stored_dtype
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.assign import as_keras_casts
from shardload.mapping.converters import ConverterStep
from shardload.mapping.layer_hooks import AttributeSnapshot, LayerStep
from shardload.mapping.variable_map import VariableMap
from shardload.transfer.read_tensor import read_rows, read_tensor

_Array = NDArray[Any]
Computing = ConverterStep | LayerStep
"""Code that computes values of variables from tensors: a KerasHub converter, or a layer's loading hook
(``load_own_variables``)."""
Lend = Callable[[Any, _Array], None]
"""Function that gives a variable a temporary value, because a converter or hook computes other values from it."""


def computed_by(mapping: VariableMap) -> Iterator[tuple[Computing, Any]]:
    """Yield (code, variable) for each variable that code computes, with the last if several do: its value stays."""
    found: dict[int, tuple[Computing, Any]] = {}
    for step in mapping.steps:
        if isinstance(step, ConverterStep | LayerStep):
            found |= {id(variable): (step, variable) for variable in step.variables}
    yield from found.values()


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """Where a variable's value comes from: a view of a tensor, an array, a live model, or code that computes it."""

    variable: Any
    dtype: np.dtype[Any]
    """Dtype of the value: the stored tensor's or, if the value is decoded or computed, the variable's."""
    tensor: Tensor | None = None
    view: View | None = None
    array: _Array | None = None
    live: Callable[[], jax.Array] | None = None
    """Function that returns the value from a live model; a kernel with LoRA is merged by this call."""
    step: Computing | None = None
    """KerasHub's converter, or a layer's loading hook, that computes the value."""


def compute(
    step: Computing,
    manifest: Manifest,
    dtypes: Mapping[int, np.dtype[Any]],
    *,
    values: Iterable[StoredValue],
    write: Callable[[Any, _Array], None],
    done: Callable[[Any], None],
) -> None:
    """Run a KerasHub converter or a layer's loading hook (``step``), and pass each value it computes to ``write``.

    ``dtypes``: ``id`` of each requested variable → dtype to write it in. ``write`` writes a variable's value to the
    target, and may be called again for the same variable; ``done`` is called once it has its final value.
    """
    variables = [v for v in step.variables if id(v) in dtypes]
    # A layer's hook may assign any variable again until it returns.
    later: Set[int] = {id(v) for v in variables} if isinstance(step, LayerStep) else step.reassigned
    wanted = replace(step, variables=tuple(variables)) if isinstance(step, ConverterStep) else step
    # Each failed run is lent one more value, so this ends.
    with _lending() as lend:
        runtime = _Runtime(manifest, dtypes, write, done, later, lend)
        while not _runs(wanted, runtime, values):
            pass
    if absent := [v.path for v in variables if id(v) not in runtime.written]:
        raise MismatchError(
            f"Cannot convert {manifest.source}: {step.owner} computed {absent[0]!r} in its first run, on placeholders, "
            "but not in its second run, on the tensors' values. Its code must assign the same variables in every run"
        )
    for variable in variables:
        if id(variable) in later:
            done(variable)


def _runs(step: Computing, runtime: _Runtime, values: Iterable[StoredValue]) -> bool:
    """Run code that computes values; if it reads a variable without a value, lend it one and return ``False``."""
    # A hook may also set attributes of its layer: undo that, so that a second run finds what the first one found.
    snapshot = None if step.saveable is None else AttributeSnapshot.of(step.saveable)
    try:
        step.run(runtime)
        return True
    except UninitialisedError as error:
        for value in values:
            variable = value.variable
            if value.tensor is None or value.view is None or has_value(variable):
                continue
            if error.variable == variable.path:
                flat = read_rows(value.tensor, 0, value.tensor.rows).reshape(-1)[value.view.offset :]
                strides = [stride * flat.itemsize for stride in value.view.strides]
                whole = np.lib.stride_tricks.as_strided(flat, value.view.shape, strides, writeable=False)
                runtime.lend(variable, whole)
                return False
        raise UnsupportedError(
            f"Cannot convert {runtime.manifest.source}: {step.owner} computes with a value that is not stored "
            f"({str(error)[:120]}). Load it with shardload.load, then write it with shardload.save_as(model, path)"
        ) from error
    finally:
        if snapshot is not None:
            snapshot.restore()


@contextmanager
def _lending() -> Iterator[Lend]:
    """Yield a function that gives variables temporary values; after the block, they have no values again."""
    before: dict[int, tuple[Any, Any]] = {}

    def lend(variable: Any, value: _Array) -> None:
        before.setdefault(id(variable), (variable, pending_of(variable)))
        # Not assign(): while a step runs, it is intercepted.
        restore_value(variable, jax.numpy.asarray(as_keras_casts(value, stored_dtype(variable))), None)

    try:
        yield lend
    finally:
        for variable, initializer in before.values():
            restore_value(variable, None, initializer)


@dataclass(slots=True)
class _Runtime:
    """What converters and hooks call to read tensors and set variables; here, the values go to the target's files."""

    manifest: Manifest
    dtypes: Mapping[int, np.dtype[Any]]
    write: Callable[[Any, _Array], None]
    done: Callable[[Any], None]
    later: Set[int]
    lend: Lend
    written: set[int] = field(default_factory=set)

    def read(self, tensor: str) -> _Array:
        """Read a whole tensor into an array that the converter or hook may write to."""
        value = read_tensor(self.manifest, tensor)
        return value if value.flags.writeable else value.copy()

    def take(self, name: str) -> None:
        """Return ``None``, where a load would return an array: other code copies stored tensors to the target."""

    def assign(self, variable: Any, value: Any, assign: Callable[[Any, Any], Any]) -> Any:
        """Return ``value``, which is stored, without assigning it: other code copies it to the target."""
        return value

    def compute(self, variable: Any, value: Any, assign: Callable[[Any, Any], Any]) -> Any:
        """Write a value that the converter or hook has computed to the target, cast as a load would cast it."""
        if (dtype := self.dtypes.get(id(variable))) is None:
            return value
        host = np.asarray(value)
        if host.shape != tuple(variable.shape):
            raise MismatchError(
                f"Cannot convert {self.manifest.source}: variable {variable.path!r} has shape {tuple(variable.shape)}, "
                f"but its computed value has shape {host.shape}"
            )
        self.write(variable, as_keras_casts(host, dtype))
        self.written.add(id(variable))
        if id(variable) in self.later:
            self.lend(variable, host)  # the next value may be computed from this one
        else:
            self.done(variable)
        return value
