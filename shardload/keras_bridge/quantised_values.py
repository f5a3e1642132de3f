"""The values that ``quantize("int8")`` and ``quantize("int4")`` of Keras compute, for a box of a kernel at a time.

A kernel (a matrix of embeddings, too) is reduced along some dims: its elements along them share a scale. For int4,
Keras divides them into groups, of which each has a scale and a zero point, and packs two codes into a byte::

    int8, (in, out)                 codes (in, out) int8            scale (out,)
    int4 in blocks of 128           codes (in, ⌈out/2⌉) int8        scale, zero (⌈in/128⌉, out)

The operations are those of ``keras.src.quantizers.quantizers`` with ``to_numpy=True``, in the same order and dtypes, so
the results are equal bit for bit. NumPy computes with bfloat16 and a number in float32; only the difference of two
bfloat16 is rounded to bfloat16.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shardload.errors import TransferError
from shardload.sharding.layout import Bounds
from shardload.transfer.encoding import Output

_BLOCK_ELEMENTS = 1 << 20
"""Elements that are quantised at a time: 4 MiB in float32. Smaller blocks would stay in a core's L2 cache, but two
threads, which exchange the GIL between NumPy's operations, take up to twice as long with a quarter of that."""
_EPSILON = 1e-7
"""``keras.backend.epsilon()`` when Keras is imported: the default argument of its functions keeps it."""
_INT4 = (-8, 7)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SIGN = 0x8000


@dataclass(frozen=True, slots=True)
class KernelCodes:
    """How Keras quantises one kernel: an `shardload.transfer.encoding.Encoding`."""

    name: str
    """The kernel's name, for errors."""
    outputs: tuple[Output, ...]
    """Codes, scale, and for groups the zero points and the number of the group of each row."""
    shape: tuple[int, ...]
    """Shape of the kernel that is quantised; its matrix if Keras flattens it."""
    reduced: tuple[int, ...]
    """Dims along which elements share a scale."""
    scale_dims: tuple[int | None, ...]
    """For each dim of the scale, the dim of the kernel that it is along; ``None`` for a dim of length 1."""
    value_range: tuple[int, int] = (-127, 127)
    packed: int | None = None
    """The dim along which two codes are packed into a byte."""
    group: int | None = None
    """Elements along the reduced dim that share a scale; ``None`` if all do."""
    unflattened: tuple[int, ...] | None = None
    """Shape of the kernel, if Keras flattens it to ``shape``: then it is quantised as a whole."""

    @property
    def whole_dims(self) -> frozenset[int]:
        """Dims of the kernel that a box must have completely."""
        return frozenset(self.reduced if self.unflattened is None else range(len(self.unflattened)))

    @property
    def multiples(self) -> tuple[int, ...]:
        """What a box must begin at a multiple of: two codes of a byte are computed together."""
        if self.unflattened is not None:
            return (1,) * len(self.unflattened)
        return tuple(2 if d == self.packed else 1 for d in range(len(self.shape)))

    def needed(self, number: int, box: Bounds) -> Bounds:
        """Return the box of the kernel from which a box of codes, scales or zero points is computed."""
        if self.unflattened is not None:
            return Bounds.whole(self.unflattened)
        start, stop = [0] * len(self.shape), list(self.shape)
        for own, dim in enumerate(range(len(self.shape)) if number == 0 else self.scale_dims):
            if dim is None or dim in self.reduced:
                continue
            times = 2 if number == 0 and dim == self.packed else 1
            start[dim], stop[dim] = times * box.start[own], min(self.shape[dim], times * box.stop[own])
            # Both codes of a byte.
            if dim == self.packed:
                start[dim], stop[dim] = start[dim] // 2 * 2, min(self.shape[dim], -(-stop[dim] // 2) * 2)
        return Bounds(tuple(start), tuple(stop))

    def encode(self, values: NDArray[Any], box: Bounds) -> Iterator[tuple[int, Bounds, NDArray[Any]]]:
        """Yield codes, scales and zero points of a box of the kernel, with their places; the next one reuses memory."""
        if self.unflattened is not None:
            values, box = values.reshape(self.shape), Bounds.whole(self.shape)
        dim = _slowest_dim(values)
        with np.errstate(all="ignore"):
            if self.group is not None:
                for part, own in self._parts(values, box, dim):
                    yield from self._grouped(own, part)
            elif dim not in self.reduced:
                for part, own in self._parts(values, box, dim):
                    yield from self._scaled(own, part, [(part, own)])
            else:
                yield from self._scaled(values, box, self._parts(values, box, dim))

    def _parts(self, values: NDArray[Any], box: Bounds, dim: int) -> Iterator[tuple[Bounds, NDArray[Any]]]:
        """Divide a box along ``dim``, between bytes of two codes and between groups."""
        if not box.size:
            yield box, values
            return
        multiple = math.lcm(2 if dim == self.packed else 1, self.group if self.group and dim in self.reduced else 1)
        step = max(1, _BLOCK_ELEMENTS * box.shape[dim] // box.size // multiple) * multiple
        for at in range(box.start[dim], box.stop[dim], step):
            start, stop = list(box.start), list(box.stop)
            start[dim], stop[dim] = at, min(at + step, box.stop[dim])
            part = Bounds(tuple(start), tuple(stop))
            yield part, values[part.relative_to(box.start).slices]

    def _scaled(
        self, values: NDArray[Any], box: Bounds, parts: Iterable[tuple[Bounds, NDArray[Any]]]
    ) -> Iterator[tuple[int, Bounds, NDArray[Any]]]:
        """Yield the scales of a box, and the codes of its parts."""
        scale = channel_scales(values, axes=self.reduced, most=self.value_range[1], name=self.name)
        yield 1, *self._scale(1, scale, box)
        for part, own in parts:
            yield 0, *self._codes(channel_codes(own, scale, value_range=self.value_range), part)

    def _grouped(self, values: NDArray[Any], box: Bounds) -> Iterator[tuple[int, Bounds, NDArray[Any]]]:
        """Yield the codes, scales and zero points of a box that has whole groups."""
        assert self.group is not None
        codes, scale, zero = by_group(values, axis=self.reduced[0], group=self.group, name=self.name)
        yield 0, *self._codes(codes, box)
        yield 1, *self._scale(1, scale, box)
        yield 2, *self._scale(2, zero, box)

    def _codes(self, codes: NDArray[Any], box: Bounds) -> tuple[Bounds, NDArray[Any]]:
        if self.packed is None:
            return box, codes
        start, stop = list(box.start), list(box.stop)
        start[self.packed], stop[self.packed] = start[self.packed] // 2, -(-stop[self.packed] // 2)
        return Bounds(tuple(start), tuple(stop)), pack(_as_codes(codes), axis=self.packed)

    def _scale(self, number: int, scale: NDArray[Any], box: Bounds) -> tuple[Bounds, NDArray[Any]]:
        ranges = [self._scale_range(box, d) for d in self.scale_dims]
        place = Bounds(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
        kept = [d for d in self.scale_dims if d is not None]
        order = [*kept, *(d for d in range(len(self.shape)) if d not in kept)]
        return place, scale.transpose(order).reshape(place.shape).astype(self.outputs[number].dtype)

    def _scale_range(self, box: Bounds, dim: int | None) -> tuple[int, int]:
        if dim is None:
            return 0, 1
        if dim not in self.reduced:
            return box.start[dim], box.stop[dim]
        return (0, 1) if self.group is None else (box.start[dim] // self.group, -(-box.stop[dim] // self.group))


def _slowest_dim(values: NDArray[Any]) -> int:
    """Return the dim along which neighbours are farthest apart in memory: parts along it are in one piece."""
    dims = [d for d, n in enumerate(values.shape) if n > 1]
    return max(dims, key=lambda d: abs(values.strides[d]), default=0)


def channel_scales(values: NDArray[Any], *, axes: Sequence[int], most: int, name: str) -> NDArray[Any]:
    """Return the scales of ``keras.quantizers.abs_max_quantize``, with ``axes`` of length 1, where the range is ±most.

    Raises a `TransferError` if ``values`` has a NaN or an infinity; ``name`` is the kernel's.
    """
    low, high = _ends(values, tuple(axes))
    largest = np.maximum(high, -low).astype(_wide(values.dtype))
    _require_finite(largest, name)
    scale: NDArray[Any] = np.divide(most, np.add(largest, _EPSILON))
    return scale


def channel_codes(values: NDArray[Any], scale: NDArray[Any], *, value_range: tuple[int, int]) -> NDArray[Any]:
    """Return the codes of ``keras.quantizers.abs_max_quantize``: whole numbers in the dtype in which Keras computes."""
    wide = _working_copy(values)
    np.multiply(wide, scale, out=wide)
    np.rint(wide, out=wide)
    if wide.dtype == np.float16:  # elsewhere, rounding leaves less than half a code beyond the range
        np.clip(wide, *value_range, out=wide)
    return wide


def by_group(
    values: NDArray[Any], *, axis: int, group: int, name: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int8]]:
    """Quantise a matrix as ``keras.quantizers.abs_max_quantize_grouped_with_zero_point``, in groups along ``axis``.

    Returns codes from -8 to 7 in the shape of ``values``, as floats or int8, and scales and zero points with a row for
    each group. Zeros complete the last group. Raises a `TransferError` if ``values`` has a NaN or an infinity.
    """
    n, groups = values.shape[axis], math.ceil(values.shape[axis] / group)
    wide = _working_copy(values)
    if n % group:
        wide = np.concatenate([wide, np.zeros_like(wide, shape=_replaced(wide.shape, axis, groups * group - n))], axis)
    grouped = wide.reshape((*wide.shape[:axis], groups, group, *wide.shape[axis + 1 :]))
    if n % group:
        values = wide.astype(values.dtype)
    low, high = _ends(values.reshape(grouped.shape), (axis + 1,))
    largest = np.maximum(high, -low)
    _require_finite(largest, name)
    scale = np.divide(np.subtract(high, low) + _EPSILON, _INT4[1] - _INT4[0])
    zero = np.clip(np.round(np.divide(-low, scale)) + _INT4[0], *_INT4)
    np.divide(grouped, scale, out=grouped)
    np.rint(grouped, out=grouped)
    # Where a group has both signs, these are at most 15, and eight bits are several times as fast.
    numbers = _as_codes(grouped) if (largest <= 100 * scale).all() else grouped
    np.add(numbers, zero.astype(numbers.dtype), out=numbers)
    codes = np.clip(numbers, *_INT4, out=numbers).reshape(wide.shape)
    codes = codes.take(range(n), axis) if n % group else codes
    return codes, scale.squeeze(axis + 1), zero.squeeze(axis + 1).astype(np.int8)


def _ends(values: NDArray[Any], axis: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the smallest and the largest value along ``axis``, which get length 1, in the dtype of ``values``.

    If there are a NaN or an infinity, one of the two is not finite.
    """
    if values.dtype != _BFLOAT16:
        return values.min(axis=axis, keepdims=True), values.max(axis=axis, keepdims=True)
    # NumPy has no fast code for bfloat16. Its bits are a sign and a magnitude, of which a NaN has the largest: among
    # signed integers, positive values come last and in order; among unsigned ones, negative values, by magnitude.
    signed, unsigned = values.view(np.int16), values.view(np.uint16)
    high, low = signed.max(axis=axis, keepdims=True), unsigned.max(axis=axis, keepdims=True)
    if (high < 0).any() or (low < _SIGN).any():  # where all have the same sign, the other end is nearest to zero
        nearest = unsigned.min(axis=axis, keepdims=True)
        high = np.where(high < 0, nearest.view(np.int16), high)
        low = np.where(low < _SIGN, nearest, low)
    return low.view(_BFLOAT16), high.view(_BFLOAT16)


_own = threading.local()


def _scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return memory of this thread for an array; the next call with this ``name`` reuses it."""
    # Fresh memory for each block takes several times as long as the arithmetic.
    n_bytes = math.prod(shape) * dtype.itemsize
    memory: NDArray[np.uint8] | None = getattr(_own, name, None)
    if memory is None or memory.nbytes < n_bytes:
        memory = np.empty(n_bytes, np.uint8)
        setattr(_own, name, memory)
    return memory[:n_bytes].view(dtype).reshape(shape)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which NumPy, and so Keras, computes with values of ``dtype``."""
    return np.dtype(np.float32) if dtype == _BFLOAT16 else dtype


def _working_copy(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy to compute in, bfloat16 as float32, in scratch memory."""
    copied = _scratch("floats", values.shape, _wide(values.dtype))
    np.copyto(copied, values)
    return copied


def _as_codes(numbers: NDArray[Any]) -> NDArray[np.int8]:
    """Return whole numbers as int8, in scratch memory unless they are that already."""
    if numbers.dtype == np.int8:
        return numbers
    codes = _scratch("codes", numbers.shape, np.dtype(np.int8))
    np.copyto(codes, numbers, casting="unsafe")
    return codes


def _replaced(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def pack(codes: NDArray[np.int8], *, axis: int) -> NDArray[np.int8]:
    """Pack codes from -8 to 7 into half as many bytes along ``axis``, the first one in the low half of its byte."""
    if axis == codes.ndim - 1 and codes.shape[axis] % 2 == 0 and codes.flags.c_contiguous and sys.byteorder == "little":
        pairs = codes.view(np.uint16) & 0x0F0F  # the second code is in the high byte
        pairs |= pairs >> 4
        return pairs.astype(np.uint8).view(np.int8)
    moved = np.moveaxis(codes, axis, 0).view(np.uint8)
    packed = moved[::2] & 0x0F
    packed[: len(moved) // 2] |= moved[1::2] * np.uint8(16)  # NumPy shifts bytes at a seventh of this speed
    return np.moveaxis(packed.view(np.int8), 0, axis)


def _require_finite(most: NDArray[Any], name: str) -> None:
    if not np.isfinite(most).all():
        raise TransferError(
            f"Cannot quantise {name!r}: it contains a NaN or an infinity. Load it without quantize=, or repair the "
            "checkpoint"
        )
