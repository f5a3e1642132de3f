"""The argument ``warm_up``: which of a model's first steps to compile during a load, for which batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import jax

from shardload.errors import UsageError
from shardload.keras_bridge.compiled_steps import StepName
from shardload.units import check_kind

_EXPECTED = "expected a mapping such as {'predict': batch}, {'train': (x, y)} or {'generate': 'a prompt'}"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The part of a request that says which steps to compile during the load, and for which arguments."""

    steps: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, *, more: tuple[str, ...] = ()) -> WarmUp:
        """Return the argument ``warm_up``, checked; ``more``: names of steps besides ``predict`` and ``train``."""
        check_kind("warm_up", given, Mapping | None, _EXPECTED.removeprefix("expected "))
        names = (*get_args(StepName), *more)
        if isinstance(prompts := (given or {}).get("generate"), Mapping):
            _check_generation(prompts)
        for name, example in (given or {}).items():
            if name not in names:
                raise UsageError(f"Cannot use warm_up={{{name!r}: …}}: expected {' or '.join(map(repr, names))} as key")
            if name in get_args(StepName):
                _check_batch(name, example)
        return cls(dict(given or {}))

    def __str__(self) -> str:
        """Return the steps and the shapes of their batches as text, which processes that load together compare."""

        def shown(leaf: Any) -> str:
            if hasattr(leaf, "dtype"):
                return f"{leaf.dtype}{list(leaf.shape)}"
            return repr(leaf) if isinstance(leaf, str | int | float | None) else type(leaf).__name__

        return ", ".join(f"{name}: {jax.tree.map(shown, example)}" for name, example in self.steps.items())


def _check_generation(given: Mapping[str, Any]) -> None:
    """Raise unless a mapping has arguments of `shardload.generate` only, and prompts among them."""
    if "prompts" not in given or (unknown := given.keys() - {"prompts", "max_new_tokens", "tokenizer"}):
        found = "no prompts" if "prompts" not in given else repr(min(map(str, unknown)))
        raise UsageError(
            f"Cannot use warm_up={{'generate': …}}: found {found}, expected 'prompts' and perhaps 'max_new_tokens' and "
            "'tokenizer'"
        )


def _check_batch(name: str, example: Any) -> None:
    """Raise unless an example batch has arrays, or shapes, with one number of rows; ``train`` takes ``(x, y)``."""
    if name == "train" and not (isinstance(example, tuple) and len(example) in (2, 3)):
        raise UsageError("Cannot use warm_up={'train': …}: expected a tuple (x, y) or (x, y, sample_weight)")
    leaves = jax.tree.leaves(example)
    if not leaves or not all(hasattr(leaf, "dtype") and len(getattr(leaf, "shape", ())) for leaf in leaves):
        raise UsageError(
            f"Cannot use warm_up={{{name!r}: …}}: expected a batch of arrays, or of jax.ShapeDtypeStruct, whose first "
            "dim is the batch"
        )
    if len(rows := {leaf.shape[0] for leaf in leaves}) > 1:
        shown = " and ".join(map(str, sorted(rows)))
        raise UsageError(
            f"Cannot use warm_up={{{name!r}: …}}: its arrays differ in their first dim, {shown}, "
            "expected one number of rows. Pass one batch"
        )
