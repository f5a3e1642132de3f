"""Which weights a step stores: all, those that training changes, or those that the user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from shardload.errors import UsageError, require_callable_with
from shardload.keras_bridge.model_state import trained_variables, variables_of
from shardload.mapping.state_tree import StateTree
from shardload.units import check_kind, is_function

Variables = Sequence[str] | Callable[[Any], bool] | None
"""Patterns of variable paths (``"*lora*"``), or a function of a ``keras.Variable``."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The weights that the steps of one callback store.

    Raises:
        UsageError: If both arguments are given, or one is of the wrong kind.
    """

    trainable_only: bool = False
    variables: Variables = None

    def __post_init__(self) -> None:
        chosen: Any = self.variables
        check_kind("save_trainable_only", self.trainable_only, bool, "True or False")
        if self.trainable_only and chosen is not None:
            raise UsageError("Cannot use save_trainable_only and variables together: pass one of them")
        if chosen is None or is_function(chosen):
            return
        is_list = isinstance(chosen, Iterable) and not isinstance(chosen, str | np.ndarray | type | Iterator)
        if not is_list or not chosen or not all(isinstance(pattern, str) for pattern in chosen):
            raise UsageError(
                f"Cannot use variables={chosen!r:.60}: expected patterns of variable paths such as ['*lora*'], or a "
                "function of a variable"
            )

    @property
    def is_partial(self) -> bool:
        """Whether weights may be left out."""
        return self.trainable_only or self.variables is not None

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The patterns, for ``step.json``."""
        return None if self.variables is None or callable(self.variables) else tuple(self.variables)

    def of(self, state: StateTree, model: Any) -> StateTree:
        """Return the part of a model's state that a step stores.

        Raises:
            UsageError: If no weight is selected, or a pattern matches none.
        """
        if not self.is_partial:
            return state
        # By identity: == of Keras variables compares their values.
        chosen = {id(v) for v in self._chosen(model)}
        found = state.only(lambda variable: id(variable) in chosen)
        if not any(leaf.kind == "weight" for leaf in found.leaves):
            why = "it has no trainable variable" if self.trainable_only else "variables selects none of its weights"
            raise UsageError(f"Cannot save the model {model.name!r}: {why}, so the step would be empty")
        return found

    def _chosen(self, model: Any) -> list[Any]:
        if self.trainable_only:
            return trained_variables(model)
        weights = variables_of(model)
        if callable(self.variables):
            require_callable_with(self.variables, None, name="variables")
            return list(filter(self.variables, weights))
        patterns = self.patterns or ()
        for pattern in patterns:
            if not any(fnmatchcase(v.path, pattern) for v in weights):
                known = ", ".join(repr(v.path) for v in weights[:3])
                raise UsageError(
                    f"Cannot select variables by {pattern!r}: it matches no path in the model {model.name!r}. Paths "
                    f"are like {known}"
                )
        return [v for v in weights if any(fnmatchcase(v.path, pattern) for pattern in patterns)]


ALL = Selection()
