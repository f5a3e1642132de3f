"""Find the tensors in which two checkpoints differ, and by how much; a few rows at a time.

Tensors are matched by name. Bits are compared, not values: two NaNs with the same bits are equal, 0.0 and -0.0 are not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardload.loaders import open_manifest
from shardload.manifest import Tensor
from shardload.resolve import resolve
from shardload.transfer.casts import is_float
from shardload.transfer.read_tensor import read_rows, row_ranges

READ_BYTES = 8 << 20
"""Bytes read from each side at once."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs between the two checkpoints."""

    name: str
    what: Literal["values", "dtype", "shape", "only in the first", "only in the second"]
    """``dtype``: the shapes agree, and the values are compared as numbers."""
    first: str
    """Dtype and shape in the first checkpoint; empty if it is missing there."""
    second: str
    elements: int
    """Number of elements that differ; all of them if shapes differ or one side is missing."""
    largest: float | None
    """The largest absolute difference; ``None`` if it is undefined."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints, tensor by tensor."""

    first: str
    second: str
    equal: int
    """Number of tensors that are equal bit for bit."""
    differences: tuple[TensorDifference, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints of any formats.

    Args:
        first: Any source that `shardload.load` takes.
        second: Like ``first``.
        progress: Called with the number of newly compared bytes of the first.

    Raises:
        SourceNotFoundError: When one of them does not exist.
        TransferError: When one of them cannot be read completely.
    """
    one, two = (open_manifest(resolve(source).path) for source in (first, second))
    found = []
    for name, tensor in one.tensors.items():
        other = two.tensors.get(name)
        if other is None:
            found.append(TensorDifference(name, "only in the first", _title(tensor), "", tensor.size, None))
        elif (difference := _compare(tensor, other, progress or (lambda _: None))) is not None:
            found.append(difference)
    for name, tensor in two.tensors.items():
        if name not in one.tensors:
            found.append(TensorDifference(name, "only in the second", "", _title(tensor), tensor.size, None))
    equal = sum(name in two.tensors for name in one.tensors) - sum(not d.what.startswith("only") for d in found)
    return Comparison(one.source, two.source, equal, tuple(found))


def _title(tensor: Tensor) -> str:
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _compare(one: Tensor, two: Tensor, progress: Callable[[int], None]) -> TensorDifference | None:
    if one.shape != two.shape:
        return TensorDifference(one.name, "shape", _title(one), _title(two), max(one.size, two.size), None)
    elements, largest = 0, None
    for start, stop in row_ranges(one, limit_bytes=READ_BYTES):
        a, b = read_rows(one, start, stop), read_rows(two, start, stop)
        if differing := _differing(a, b):
            elements += differing
            by = _distance(a, b)
            largest = by if largest is None else max(largest, by)
        progress(a.nbytes)
    if one.dtype != two.dtype:
        return TensorDifference(one.name, "dtype", _title(one), _title(two), elements, largest)
    return TensorDifference(one.name, "values", _title(one), _title(two), elements, largest) if elements else None


def _differing(a: NDArray[Any], b: NDArray[Any]) -> int:
    if a.dtype != b.dtype:
        return int(np.count_nonzero(_numbers(a) != _numbers(b)))
    if a.dtype.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return int(np.count_nonzero(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)))
    return int(np.count_nonzero(a != b))


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    with np.errstate(all="ignore"):
        apart = np.abs(_numbers(a) - _numbers(b))
    return float(np.nanmax(apart)) if not np.all(np.isnan(apart)) else float("nan")


def _numbers(value: NDArray[Any]) -> NDArray[np.float64]:
    """Convert to float64: exact for every float and for integers up to 2**53."""
    return (
        value.astype(np.float32).astype(np.float64)
        if is_float(value.dtype) and value.dtype.itemsize < 4
        else (value.astype(np.float64))
    )
