"""The second run of a KerasHub converter, which reads bytes only where it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.saving import assignments_to
from shardload.mapping.converter_run import Assign, Loader, Run
from shardload.mapping.placeholders import Reservations
from shardload.mapping.variable_map import Runtime


class ReplayLoader(Loader):
    """A loader that returns real bytes where the first run computed, reservations elsewhere."""

    def __init__(self, step: ConverterStep, runtime: Runtime) -> None:
        super().__init__(step.run_of)
        self._step = step
        self._runtime = runtime
        self._reservations = Reservations()
        self._wanted = {id(v) for v in step.variables}

    def get_tensor(self, hf_weight_key: str) -> Any:
        """Return real bytes, or a reservation where the converter only probes or views."""
        tensor = self.find(hf_weight_key)
        if tensor.name in self._step.computing:
            return self._runtime.read(tensor.name)
        return self._reservations.make(tensor)

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Port only computed variables; the others already have their values."""
        if id(keras_variable) not in self._wanted:
            return
        value: Any = self._runtime.read(self.find(hf_weight_key).name)
        if hook_fn:
            value = hook_fn(value, list(keras_variable.shape))
        keras_variable.assign(value)

    def assign(self, variable: Variable, value: Any, assign: Assign) -> Any:
        """Assign a computed value; skip views, which are already assigned."""
        # A variable that is a view already has its sharded array; `value` is a reservation without data.
        if id(variable) not in self._wanted:
            return value
        return self._runtime.compute(variable, value, assign)


@dataclass(frozen=True, slots=True, eq=False)
class ConverterStep:
    """The second run of a converter."""

    run_of: Run
    variables: tuple[Variable, ...]
    computing: frozenset[str]
    reassigned: frozenset[int] = frozenset()
    """``id`` of the variables it assigns more than once; only the last value counts."""
    saveable: ClassVar[None] = None
    """None: converters only assign and change no attributes."""
    needs: ClassVar[tuple[str, ...]] = ()
    """No bindings by name; the step runs after all bindings."""
    computes: ClassVar[bool] = True

    @property
    def owner(self) -> str:
        """The converter, for messages."""
        return f"converter {self.run_of.function.__module__.rpartition('.')[2]}"

    def run(self, runtime: Runtime) -> None:
        """Run the converter again."""
        loader = ReplayLoader(self, runtime)
        with assignments_to(loader.assign):
            self.run_of(loader)
