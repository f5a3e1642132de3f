"""Find the tensors in which two checkpoints differ, and by how much, reading a few rows at a time.

Tensors are matched by name. If the checkpoints have no name in common, the weights of their models are compared.
Bits are compared, not values: two NaNs with the same bits are equal, 0.0 and -0.0 are not. Across dtypes there are no
common bits: values are compared as numbers, and two NaNs are equal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shardload.errors import MismatchError, MissingExtraError, UnsupportedError
from shardload.loaders import open_manifest, spec_of
from shardload.manifest import Decoded, EncodedRows, Manifest
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.reports import printable
from shardload.reports.aligned import aligned
from shardload.reports.comparison_page import comparison_page
from shardload.reports.markup import ShownAsText
from shardload.resolve.opening import find_source
from shardload.transfer.casts import is_float
from shardload.transfer.read_tensor import read_rows, row_ranges, stored_chunks
from shardload.units import json_number, plural

_READ_BYTES = 8 << 20
"""Most bytes to read at once from each of the two checkpoints."""
_STATE = frozenset({"optimizer_variables", "metrics_variables", "optimizer", "metrics"})
"""A tensor whose name begins with one of these parts is state of training, not a weight; it is listed last."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor (or a weight of the model, if they are matched by weight) that differs between the two checkpoints."""

    name: str
    what: Literal["values", "dtype", "shape", "stored bytes", "not compared", "only in the first", "only in the second"]
    """What differs. ``dtype``: shapes are equal, and values were compared as numbers. ``stored bytes``: bytes in the
    files differ, and cannot be decoded. ``not compared``: encodings differ, and one of them cannot be decoded."""
    first: str
    """Dtype and shape in the first checkpoint, as text; empty if the tensor is only in the second."""
    second: str
    elements: int
    """Number of elements that differ. If values were not compared, it is the number of all elements of the tensor."""
    largest: float | None
    """The largest absolute difference between two values; ``None`` if no values differ or none were compared. It is NaN
    if one value of a pair is NaN and the other is not, and 0 if all pairs differ in bits only: 0.0 and -0.0, two NaNs.
    """
    why: str = ""
    """Why values were not compared; empty if they were."""


@dataclass(frozen=True, slots=True)
class Comparison(ShownAsText):
    """The result of comparing two checkpoints tensor by tensor."""

    first: str
    second: str
    equal: int
    """Number of tensors that are equal bit for bit."""
    differences: tuple[TensorDifference, ...]
    """The tensors that differ: weights first, then state of optimizers and metrics."""
    matched_by: Literal["tensor", "weight"] = "tensor"
    """How tensors of the two were matched: by their names or, if no name is in both, by the model's weights."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a dict for JSON; a ``largest`` of NaN or infinity is ``"nan"`` or ``"inf"``."""
        found = asdict(self)
        for difference in found["differences"]:
            if difference["largest"] is not None:
                difference["largest"] = json_number(difference["largest"])
        return found

    def to_html(self) -> str:
        """Return the comparison as a page of HTML that needs no other file and opens no connection.

        It shows what differs as bars, and a tree of the tensors that do, to sort and search.
        """
        facts = [("First", printable(self.first)), ("Second", printable(self.second)), ("Result", self._counts)]
        facts += [("Note", note) for note in self.notes]
        title = f"Differences between {self.first} and {self.second}"
        return comparison_page(title, self.differences, equal=self.equal, noun=self.matched_by, facts=facts).html()

    @property
    def _counts(self) -> str:
        by_weight = " (weights of the model: the formats name their tensors differently)" * (
            self.matched_by == "weight"
        )
        return f"{plural(self.equal, self.matched_by)} equal, {len(self.differences):,} not{by_weight}"

    def table(self, *, width: int | None = None) -> str:
        """Return the comparison as text: a line for each tensor that differs. ``width``: columns of the terminal."""
        if not self.differences:
            return f"{self._counts}\n"
        head = ("name", "what", "first", "second", "elements", "largest")
        rows = (_difference_row(difference) for difference in self.differences)
        return f"{self._counts}\n\n" + aligned((head, *rows), width=width)

    def __str__(self) -> str:
        return "\n".join((self.table().rstrip(), *(f"note: {printable(note)}" for note in self.notes)))


def _difference_row(d: TensorDifference) -> tuple[str, ...]:
    largest = "-" if d.largest is None else f"{d.largest:.4g}"
    return (printable(d.name), d.what, d.first or "-", d.second or "-", f"{d.elements:,}", largest)


def diff(first: str | os.PathLike[str], second: str | os.PathLike[str], *, progress: ProgressLike = None) -> Comparison:
    """Compare two checkpoints of any formats; ``progress`` counts the bytes of the first."""
    shown = as_progress(progress)
    shown.start(0, f"Comparing {first}")
    try:
        return _comparison(first, second, shown)
    finally:
        shown.stop()


def _comparison(first: str | os.PathLike[str], second: str | os.PathLike[str], shown: Progress) -> Comparison:
    one, two = (open_manifest(find_source(source).location) for source in (first, second))
    notes: tuple[str, ...] = ()
    # Formats that share no name, such as GGUF and Keras' own, are compared by what they would load into a model.
    if one.tensors and two.tensors and one.tensors.keys().isdisjoint(two.tensors):
        from shardload.converting.source import of_models  # imports Keras

        try:
            by_weight = of_models(one.location, two.location)
        except (UnsupportedError, MismatchError, MissingExtraError) as error:
            notes = (f"they have no tensor name in common, and cannot be compared by their models' weights: {error}",)
        else:
            equal, differences = _compared(*by_weight, shown)
            notes = _without_values(differences, "weight")
            return Comparison(one.source, two.source, equal, differences, "weight", notes)
    # Decoders yield more digits than the model has, so nearly every value would differ: round them as a load would.
    decoded = [spec_of(side).model_dtype is not None for side in (one, two)]
    sides = (
        _Tensors(one, two if decoded == [True, False] else None),
        _Tensors(two, one if decoded == [False, True] else None),
    )
    notes += tuple(
        f"the values of {side.manifest.source} are quantised: compared after decoding, in the other's dtype"
        for side in sides
        if side.like is not None
    )
    equal, differences = _compared(*sides, shown)
    notes += _without_values(differences, "tensor")
    return Comparison(one.source, two.source, equal, differences, notes=notes)


def _without_values(differences: Iterable[TensorDifference], matched_by: str) -> tuple[str, ...]:
    """Return one note for each reason why values were not compared, with the number of tensors (or weights)."""
    reasons: dict[str, list[str]] = {}
    for found in differences:
        if found.why:
            reasons.setdefault(found.why, []).append(found.name)
    listed = {why: repr(names[0]) + " …" * (len(names) > 1) for why, names in reasons.items()}
    return tuple(
        f"{plural(len(names), matched_by)} could not be compared by value ({listed[why]}): {why}"
        for why, names in reasons.items()
    )


class _Values(Protocol):
    """What a comparison reads of one of two checkpoints, a few rows at a time; a tensor has the same key in both."""

    @property
    def keys(self) -> Iterable[str]: ...
    def name(self, key: str) -> str: ...
    def dtype(self, key: str) -> np.dtype[Any]: ...
    def shape(self, key: str) -> tuple[int, ...]: ...
    def ranges(self, key: str) -> Iterable[tuple[int, int]]: ...
    def rows(self, key: str, start: int, stop: int) -> NDArray[Any]: ...
    def encoded(self, key: str) -> EncodedRows | None: ...


@dataclass(frozen=True, slots=True)
class _Tensors:
    """One of two compared checkpoints, read tensor by tensor: a key is the name of a tensor."""

    manifest: Manifest
    like: Manifest | None
    """The other checkpoint, if only this one is quantised: its decoded values are rounded to the other's dtypes."""

    @property
    def keys(self) -> Iterable[str]:
        return self.manifest.tensors

    def name(self, key: str) -> str:
        return key

    def dtype(self, key: str) -> np.dtype[Any]:
        own = self.manifest.tensors[key].dtype
        other = None if self.like is None else self.like.tensors.get(key)
        return own if other is None or not (is_float(own) and is_float(other.dtype)) else other.dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return self.manifest.tensors[key].shape

    def ranges(self, key: str) -> Iterable[tuple[int, int]]:
        return row_ranges(self.manifest.tensors[key], limit_bytes=_READ_BYTES)

    def rows(self, key: str, start: int, stop: int) -> NDArray[Any]:
        return read_rows(self.manifest.tensors[key], start, stop).astype(self.dtype(key), copy=False)

    def encoded(self, key: str) -> EncodedRows | None:
        storage = self.manifest.tensors[key].storage
        return storage.reader if isinstance(storage, Decoded) and isinstance(storage.reader, EncodedRows) else None


def _compared(one: _Values, two: _Values, shown: Progress) -> tuple[int, tuple[TensorDifference, ...]]:
    """Return how many tensors are equal in both checkpoints, and how all other tensors differ."""
    first, others, equal, found = set(one.keys), set(two.keys), 0, []
    both = [key for key in one.keys if key in others and one.shape(key) == two.shape(key)]
    shown.start(sum(_size(one, key) * one.dtype(key).itemsize for key in both), "Comparing")
    for key in one.keys:
        if key not in others:
            title, size = _title(one, key), _size(one, key)
            found.append(TensorDifference(one.name(key), "only in the first", title, "", size, None))
        elif (difference := _compare(one, two, key, shown)) is not None:
            found.append(difference)
        else:
            equal += 1
    for key in two.keys:
        if key not in first:
            title, size = _title(two, key), _size(two, key)
            found.append(TensorDifference(two.name(key), "only in the second", "", title, size, None))
    # The sort is stable: within weights, and within state, tensors keep the order of the file.
    return equal, tuple(sorted(found, key=lambda difference: difference.name.partition("/")[0] in _STATE))


def _title(values: _Values, key: str) -> str:
    return f"{values.dtype(key)} {'x'.join(map(str, values.shape(key))) or 'scalar'}"


def _size(values: _Values, key: str) -> int:
    return math.prod(values.shape(key))


def _compare(one: _Values, two: _Values, key: str, shown: Progress) -> TensorDifference | None:
    name, titles = one.name(key), (_title(one, key), _title(two, key))
    if one.shape(key) != two.shape(key):
        return TensorDifference(name, "shape", *titles, max(_size(one, key), _size(two, key)), None)
    # Without decoding: equal bytes are equal values.
    if titles[0] == titles[1] and _is_same_bytes(one.encoded(key), two.encoded(key)):
        shown.advance(_size(one, key) * one.dtype(key).itemsize)
        return None
    try:
        elements, largest = _compare_values(one, two, key, shown)
    except (MissingExtraError, UnsupportedError) as error:  # report all the others nevertheless
        encodings = {rows and rows.encoding for rows in (one.encoded(key), two.encoded(key))}
        what: Literal["stored bytes", "not compared"] = "stored bytes" if len(encodings) == 1 else "not compared"
        return TensorDifference(name, what, *titles, _size(one, key), None, str(error))
    if one.dtype(key) != two.dtype(key):
        return TensorDifference(name, "dtype", *titles, elements, largest)
    return TensorDifference(name, "values", *titles, elements, largest) if elements else None


def _compare_values(one: _Values, two: _Values, key: str, shown: Progress) -> tuple[int, float | None]:
    """Return how many elements of a tensor differ and the largest absolute difference, or 0 and ``None`` if none do."""
    for side in (one, two):
        if (rows := side.encoded(key)) is not None:
            rows.require_decoder()
    elements, largest = 0, None
    for start, stop in one.ranges(key):
        a, b = one.rows(key, start, stop).reshape(-1), two.rows(key, start, stop).reshape(-1)
        differs = _differs(a, b)
        if differing := int(np.count_nonzero(differs)):
            elements += differing
            by = _largest_difference(a[differs], b[differs])
            largest = by if largest is None else float(np.maximum(largest, by))  # max() may drop a NaN
        shown.advance(a.nbytes)
    return elements, largest


def _is_same_bytes(one: EncodedRows | None, two: EncodedRows | None) -> bool:
    if one is None or two is None or one.encoding != two.encoding:
        return False
    sizes, others = ([n_bytes for _, _, n_bytes in rows.ranges] for rows in (one, two))
    if sizes != others:  # of types whose size is unknown
        return False
    both = (stored_chunks(rows, limit_bytes=_READ_BYTES) for rows in (one, two))
    return all(np.array_equal(a, b) for a, b in zip(*both, strict=True))


def _differs(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each element of two arrays of one dim whether it differs."""
    if a.dtype == b.dtype:
        differs = _bits(a) != _bits(b)  # NaN != NaN, and 0.0 == -0.0
    elif _are_integers(a, b):
        differs = (a != b)[:, None]  # exact, also beyond 2**53
    else:
        one, two = _numbers(a, b)
        differs = (one != two) & ~(np.isnan(one) & np.isnan(two))
    found: NDArray[np.bool_] = np.any(differs, axis=1)
    return found


def _largest_difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest absolute difference: NaN if one of a pair is NaN and the other is not; of two NaNs it is 0."""
    if _are_integers(a, b):
        # int64 and uint64 have no common integer dtype: use Python's integers.
        common = np.result_type(a, b)
        one, two = (value.astype(common if common.kind in "iu" else object) for value in (a, b))
        high, low = np.maximum(one, two), np.minimum(one, two)
        if one.dtype.kind in "iu":  # modulo 2**64, so that the difference of two int64 does not overflow
            high, low = high.astype(np.uint64), low.astype(np.uint64)
        return float(np.max(high - low))
    one, two = _numbers(a, b)
    with np.errstate(all="ignore"):  # inf - inf is NaN and warns
        apart = np.abs(one - two)
        if np.isnan(apart).any():
            apart[(one == two) | (np.isnan(one) & np.isnan(two))] = 0
        # The modulus of complex numbers. hypot(inf, nan) is inf, but maximum is NaN.
        sizes = apart if apart.shape[1] == 1 else np.maximum(np.hypot(*apart.T), np.max(apart, axis=1))
    return float(np.max(sizes))


def _are_integers(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype.kind in "iu" and b.dtype.kind in "iu"


def _bits(value: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of an array of one dim as unsigned integers: a row for each element."""
    size = min(value.dtype.itemsize, 8)
    return np.ascontiguousarray(value).view(f"u{size}").reshape(-1, value.dtype.itemsize // size)


def _numbers(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values as float64 to subtract them: exact for floats, and for integers up to 2**53.

    Each element is a row: the number, or the real and the imaginary part if one of the arrays is complex.
    """
    dtype = np.dtype(np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64)
    with np.errstate(all="ignore"):  # a signalling NaN warns when it is converted
        one, two = (value.astype(dtype).view(np.float64).reshape(-1, dtype.itemsize // 8) for value in (a, b))
    return one, two
