"""Which variables REKLS treats as matrices, how, and how many bytes their state takes: arithmetic on shapes.

    variable         shape                rows × columns
    Dense            (D, F)               D × F
    query            (D, H, K)            D × H·K          of three dims, the largest is one side, the other two
    query of Gemma   (H, D, K)            D × H·K          form the other side (here, D is the largest)
    attention output (H, K, D)            H·K × D
    Conv2D           (h, w, in, out)      h·w·in × out

The view follows from the shape alone, never from a layout, so state that was saved on one mesh fits any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.errors import UsageError
from shardload.units import check_kind, plural

MAX_DIMENSION = 10_000
"""Longest side that gets a factor, a square matrix of that side, as in SOAP: larger ones take minutes to decompose."""
ADAMW_FOR = ("embedding", r"(^|/)bias$")
"""Default for variables that get AdamW: regular expressions for their paths. In a step, few rows of an embedding have a
gradient; and in a bias of two dims, such as (heads, size), rows and columns have no common meaning."""
_FLOAT32_BYTES = 4
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class MatrixView:
    """How REKLS views an array of two or more dims as a matrix: which dims are merged into rows, which into columns."""

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    """The dims of the array that are merged into rows, such as (0, 1); the last one varies fastest from row to row."""
    has_left: bool = True
    """Whether the rows have a factor L. If there are too many rows, the identity takes its place."""
    has_right: bool = True

    @property
    def columns(self) -> tuple[int, ...]:
        """The dims of the array that are merged into columns: all that are not in ``rows``."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.rows)

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of rows and columns of the matrix."""
        return math.prod(self.shape[d] for d in self.rows), math.prod(self.shape[d] for d in self.columns)

    @property
    def factor_sides(self) -> tuple[int | None, int | None]:
        """Numbers of rows of the two square factors L and R; `None` where the identity takes the place of one."""
        rows, columns = self.sides
        return rows if self.has_left else None, columns if self.has_right else None

    def matrix(self, array: Any) -> Any:
        """Return an array of this shape as a matrix: dims in another order, then merged into rows and columns."""
        return array.transpose(self.rows + self.columns).reshape(self.sides)

    def array(self, matrix: Any) -> Any:
        """Turn a matrix back into an array of the original shape: the inverse of `matrix`."""
        order = self.rows + self.columns
        back = tuple(order.index(dim) for dim in range(len(order)))
        return matrix.reshape([self.shape[dim] for dim in order]).transpose(back)


@dataclass(frozen=True, slots=True)
class MatrixRules:
    """Rules that say which variables REKLS treats as matrices; the others get AdamW."""

    max_dimension: int = MAX_DIMENSION
    """Longest side of a matrix that gets a factor. If both sides are longer, the variable gets AdamW instead."""
    adamw_for: tuple[str, ...] = ADAMW_FOR
    """Regular expressions, case ignored: a variable with a match anywhere in its path gets AdamW."""
    row_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Where the rule for shapes is wrong: regular expression for paths → dims that form the rows of such variables."""

    def view(self, path: str, shape: tuple[int, ...]) -> MatrixView | None:
        """Return which dims of a variable form the rows of its matrix, or `None` if it gets AdamW."""
        if any(_matches(pattern, path) for pattern in self.adamw_for):
            return None
        # Checked before a shape is turned away: a pattern that also matches a bias is an error, not ignored.
        given = next((dims for pattern, dims in self.row_dims.items() if _matches(pattern, path)), None)
        known = set(range(len(shape)))
        if given is not None and (not given or len(set(given)) < len(given) or not set(given) < known):
            raise UsageError(
                f"Cannot form rows of {path!r} of shape {tuple(shape)} from the dims {tuple(given)}: expected some of "
                f"its dims {sorted(known)}, but not all. Change row_dims, or make its pattern match fewer variables"
            )
        if len(shape) < 2:
            return None
        plain = MatrixView(tuple(shape), _rows(shape) if given is None else tuple(given))
        sides = plain.sides
        # A side of 1 makes it a vector, which gets AdamW as biases do.
        if min(sides) < 2 or min(sides) > self.max_dimension:
            return None
        return MatrixView(plain.shape, plain.rows, *(side <= self.max_dimension for side in sides))

    def check_patterns(self, paths: Sequence[str]) -> None:
        """Raise if a pattern of the user's, not a default one, matches none of ``paths``: it may be misspelled."""
        own = [("adamw_for", pattern) for pattern in self.adamw_for if pattern not in ADAMW_FOR]
        for argument, pattern in own + [("row_dims", pattern) for pattern in self.row_dims]:
            if not any(_matches(pattern, path) for path in paths):
                raise UsageError(
                    f"Cannot build REKLS with {argument}: the pattern {pattern!r} matches none of "
                    f"{plural(len(paths), 'variable')}, expected at least one. Remove it, or correct it. Paths: "
                    f"{', '.join(paths[:_SHOWN])}{', …' if len(paths) > _SHOWN else ''}"
                )


def _matches(pattern: str, path: str) -> bool:
    return re.search(pattern, path, re.IGNORECASE) is not None


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) != 3:
        # Kernels of Dense and convolutions have their outputs in the last dim.
        return tuple(range(len(shape) - 1))
    # An attention kernel has heads, their width, and the model's width, mostly the largest, as a side of its own.
    return {0: (0,), 1: (1,), 2: (0, 1)}[list(shape).index(max(shape))]


def _positive(name: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple | list) or not all(isinstance(n, int | np.integer) and n > 0 for n in numbers):
        raise UsageError(f"Cannot count state with {name}={numbers!r}: expected positive integers, such as (64, 32)")
    return tuple(int(n) for n in numbers)


def state_bytes(
    shape: Sequence[int],
    parts: Sequence[int] | None = None,
    *,
    path: str = "",
    max_dimension: int = MAX_DIMENSION,
    factor_bytes: int = _FLOAT32_BYTES,
    rules: MatrixRules | None = None,
) -> int:
    """Return the bytes of REKLS' state per device for a variable; if m x n, (8mn + 8m² + 8n² + 4m + 4n) / k in float32.

    Examples:
        ```python
        print(shardload.optimizers.state_bytes((4096, 16384), parts=(1, 8)))
        ```

    Args:
        shape: Shape of the variable.
        parts: The number of parts into which its layout splits each dim, as `Layout.parts`; their product is k. By
            default, the variable is whole.
        path: Path of the variable, by which embeddings and biases get AdamW.
        max_dimension: Longest side that has a factor, as for `REKLS`; for a longer one, no factor is counted.
        factor_bytes: Bytes per element of the factors L and R: 4, or 2 with ``factor_dtype="bfloat16"``.
        rules: Replaces ``max_dimension`` and the default patterns.

    Returns:
        Bytes of both moments, factors, eigenvectors and eigenvalues. A factor whose length k does not divide counts
        whole, as ``uneven="replicate"`` stores it.

    Raises:
        UsageError: When shape or parts are not tuples of positive integers, or the parts do not divide the shape.
    """
    check_kind("path", path, str, "the path of a variable")
    for argument, value in (("max_dimension", max_dimension), ("factor_bytes", factor_bytes)):
        check_kind(argument, value, int | float, "a number")
    check_kind("rules", rules, MatrixRules | None, "MatrixRules")
    shape, parts = _positive("shape", shape), _positive("parts", (1,) if parts is None else parts)
    if parts != (1,) and (len(parts) != len(shape) or any(n % k for n, k in zip(shape, parts, strict=True))):
        raise UsageError(f"Cannot split the shape {shape} into the parts {parts}: expected a divisor of each dim")
    # Factors are split along their first dim over all axes that split the variable, so by k, not by dim.
    devices = math.prod(parts)
    view = (rules or MatrixRules(max_dimension)).view(path, shape)
    total = 2 * _FLOAT32_BYTES * math.prod(shape) // devices
    for side in view.factor_sides if view else ():
        if side is not None:
            whole = (factor_bytes + _FLOAT32_BYTES) * side * side + _FLOAT32_BYTES * side
            total += whole // devices if side % devices == 0 else whole
    return total
