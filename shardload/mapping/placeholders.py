"""Placeholders for tensors: address ranges that show what loading code does with each tensor.

A `Reserved` array has the shape and dtype of a stored tensor and lies in untouched memory pages.
Loading code (a layer's ``load_own_variables``, a converter's hook) runs on it as on real data; the
address of the array it passes to ``Variable.assign`` shows which elements of which tensor it is::

    tensor "h.0.attn.c_attn.weight", 2304 x 768 float32, reserved at 0x7f00_0000_0000
    hook:  np.reshape(x[768:].T, (768, 12, 128))   ─►   address 0x7f00_0024_0000, strides (4, 393216, 3072)
                                                   ─►   View(offset=589824, strides=(1, 98304, 768))

An array at any other address was *computed*. Three signs tell from which tensors: the kernel reports
which pages were read (``mincore``), a placeholder that other arrays still refer to at the end
counts as used, and NumPy functions that would fill memory (casts, sums, stacks) return another
placeholder. So recording a 50 GB checkpoint takes almost no memory.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import math
import mmap
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardload.errors import LimitError, UnsupportedError
from shardload.keras_bridge.patches import casts_by_astype
from shardload.manifest import Tensor, View, c_strides
from shardload.transfer.casts import is_float
from shardload.units import exact_bytes

FloatCasts = Literal["computed", "viewed"]
"""What a cast of a placeholder from one floating dtype to another returns.

``"computed"``: another placeholder, for values that loading code computes from the tensor. ``"viewed"``: a view of the
same placeholder, as if there were no cast, so that the tensor's values are loaded as they are stored.
"""
_MINCORE_PAGES = 1 << 20
"""Number of memory pages for one call of ``mincore``, which fills a byte per page: whether it was ever read."""


@dataclass(slots=True)
class _AddressRange:
    tensor: Tensor
    pages: mmap.mmap
    start: int

    @property
    def is_referenced(self) -> bool:
        """Whether loading code still has an array in this address range; frees the range if it has none."""
        try:
            self.pages.close()
        except BufferError:
            return True
        return False


@dataclass(slots=True)
class Reservations:
    """The placeholders that loading code got while it was recorded, and how it used them."""

    float_casts: FloatCasts = "computed"
    used: set[str] = field(default_factory=set)
    """Tensors whose values loading code needs: those in `computed`, and those that it still refers to at the end."""
    computed: set[str] = field(default_factory=set)
    """Tensors that loading code computed with: it read their memory, or called a function of NumPy with them."""
    rounding: dict[str, str] = field(default_factory=dict)
    """Tensor that loading code casts to a less precise floating dtype → that dtype, for a warning."""
    _ranges: list[_AddressRange] = field(default_factory=list)

    def make(self, tensor: Tensor) -> Reserved:
        """Return a placeholder for a tensor: a read-only array of its shape and dtype that takes no memory."""
        array, pages = _reserve(tensor.shape, tensor.dtype, name=tensor.name)
        array.tensors, array.reservations = frozenset((tensor.name,)), self
        bisect.insort(self._ranges, _AddressRange(tensor, pages, _address(array)), key=lambda r: r.start)
        return array

    def locate(self, value: Any) -> View | None:
        """Return which elements of which tensor ``value`` consists of; ``None`` if it was computed."""
        if not isinstance(value, np.ndarray):
            return None
        # The last range that starts at or before the address; a tensor without elements still has one byte.
        address = _address(value)
        after = bisect.bisect_right(self._ranges, address, key=lambda r: r.start)
        if after == 0:
            return None
        found = self._ranges[after - 1]
        if address >= found.start + max(found.tensor.nbytes, 1) or value.dtype != found.tensor.dtype:
            return None
        return _as_view(value, found)

    def close(self) -> None:
        """After loading code has run: note which tensors it read or still refers to, then free all placeholders."""
        for entry in self._ranges:
            # Before `is_referenced`, which unmaps the pages.
            if _touched(entry.start, entry.tensor.nbytes):
                self.computed.add(entry.tensor.name)
            elif entry.is_referenced:
                self.used.add(entry.tensor.name)
        self.used |= self.computed
        self._ranges.clear()

    def derive(self, shape: Sequence[int], dtype: np.dtype[Any], tensors: frozenset[str]) -> Reserved:
        """Note that ``tensors`` were computed with, and return a placeholder for the result."""
        self.computed.update(tensors)
        self.used.update(tensors)
        array, _ = _reserve(tuple(shape), dtype, name=", ".join(sorted(tensors)))
        array.tensors, array.reservations = tensors, self
        return array


class Reserved(np.ndarray[Any, np.dtype[Any]]):
    """An array that takes no memory, and stands for a stored tensor or for a value computed from stored tensors."""

    tensors: frozenset[str]
    """Name of the stored tensor that this array is a part of, or names of those that it was computed from."""
    reservations: Reservations | None

    def __array_finalize__(self, source: Any) -> None:
        self.tensors = getattr(source, "tensors", frozenset())
        self.reservations = getattr(source, "reservations", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # Reductions, matmul, `out=` and `where=` run on the zeros, which touches the pages: the tensor counts as used.
        if method != "__call__" or ufunc.signature or any(v is not None for v in kwargs.values()):
            return getattr(ufunc, method)(*_plain(inputs), **{k: _plain(v) for k, v in kwargs.items()})
        # Elementwise: broadcasting gives the shape, and NumPy itself the dtype, from one element of each input.
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        with np.errstate(all="ignore"):
            result = ufunc(*(np.ones((1,) * x.ndim, x.dtype) if isinstance(x, Reserved) else x for x in inputs))
        if isinstance(result, tuple):
            return tuple(_derived(inputs, shape, r.dtype) for r in result)
        return _derived(inputs, shape, result.dtype)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        joined = _JOINS.get(func)
        if joined is not None and set(kwargs) <= {"axis"} and len(args) in (1, 2):
            return joined(args[0], args[1] if len(args) == 2 else kwargs.get("axis", 0))
        return super().__array_function__(func, types, args, kwargs)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a placeholder for the cast values, or a view of this one if the cast has no effect (`FloatCasts`)."""
        wanted = np.dtype(dtype)
        owner = self.reservations
        if wanted == self.dtype:
            return self[...]
        if owner is not None and is_float(self.dtype) and is_float(wanted):
            if not np.can_cast(self.dtype, wanted):
                owner.rounding.update(dict.fromkeys(self.tensors, wanted.name))
            if owner.float_casts == "viewed":
                return self[...]
        return _derived((self,), self.shape, wanted)

    def copy(self, order: Any = "C") -> Any:
        """Return a view of the placeholder: its values never change, so no real copy is needed."""
        return self[...]

    def reshape(self, *shape: Any, order: Any = "C", copy: bool | None = None) -> Any:
        """Return a view if NumPy can reshape without copying, else a placeholder for the copy."""
        # Left to NumPy: where another order needs a copy, it reads the zeros, and the tensor counts as used.
        if order != "C":
            return super().reshape(*shape, order=order)
        try:
            return super().reshape(*shape, copy=False)
        except ValueError:
            # Raises the same error again if the shape itself is invalid; a zero-byte dtype costs nothing to reshape.
            empty = np.empty(self.shape, dtype="V0").reshape(*shape)
            return _derived((self,), empty.shape, self.dtype)

    def ravel(self, order: Any = "C") -> Any:
        """Return a view with one dim if NumPy can flatten without copying, else a placeholder for the copy."""
        return self.reshape(-1, order=order)

    flatten = ravel


CASTS = casts_by_astype(Reserved)
"""Patches of NumPy's and Keras' casts: while applied, they call a placeholder's `astype`, without reading memory."""


def tensors_behind(value: Any) -> frozenset[str]:
    """Return the names of the tensors that a value was computed from; empty unless it is a placeholder."""
    return value.tensors if isinstance(value, Reserved) else frozenset()


def _derived(inputs: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Reserved:
    sources = [x for x in inputs if isinstance(x, Reserved)]
    # The result belongs to the recording of its inputs, whose `used` it fills.
    owner = next((s.reservations for s in sources if s.reservations is not None), None) or Reservations()
    return owner.derive(shape, dtype, frozenset().union(*(s.tensors for s in sources)))


def _stack(arrays: Sequence[Any], axis: int) -> Reserved:
    first = arrays[0]
    if any(np.shape(a) != np.shape(first) for a in arrays):
        raise ValueError("all input arrays must have the same shape")
    axis = axis % (np.ndim(first) + 1)
    shape = (*np.shape(first)[:axis], len(arrays), *np.shape(first)[axis:])
    return _derived(arrays, shape, np.result_type(*(np.asarray(a).dtype for a in arrays)))


def _concatenate(arrays: Sequence[Any], axis: int) -> Reserved:
    axis = axis % np.ndim(arrays[0])
    shapes = [list(np.shape(a)) for a in arrays]
    length = sum(shape[axis] for shape in shapes)
    for shape in shapes:
        shape[axis] = length
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("all the input array dimensions except for the concatenation axis must match exactly")
    return _derived(arrays, shapes[0], np.result_type(*(np.asarray(a).dtype for a in arrays)))


_JOINS: dict[Any, Callable[[Any, Any], Reserved]] = {np.stack: _stack, np.concatenate: _concatenate}


def _plain(values: Any) -> Any:
    """Convert placeholders to plain arrays: NumPy then really reads their zeros, which `mincore` detects."""
    if isinstance(values, (tuple, list)):
        return type(values)(_plain(v) for v in values)
    return values.view(np.ndarray) if isinstance(values, Reserved) else values


_ADDRESS_SPACE_BYTES = 1 << 47
"""Bytes that a process can address on x86-64 and most ARM systems: raising ``ulimit -v`` helps only up to here."""


def _reserve(shape: tuple[int, ...], dtype: np.dtype[Any], *, name: str) -> tuple[Reserved, mmap.mmap]:
    nbytes = math.prod(shape) * dtype.itemsize
    # Private and anonymous: only address space until a page is read. Read-only, as writing would give a page memory.
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        limited = LimitError.explaining(error, f"map {name} of {exact_bytes(nbytes)}")
        has_limit = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        if limited and has_limit and nbytes < _ADDRESS_SPACE_BYTES:
            raise limited from error
        raise UnsupportedError(
            f"Cannot map {name} of shape {shape}: it takes {exact_bytes(nbytes)}, more than a process can address "
            f"({error}). The file's header may be damaged: get the file again"
        ) from error
    # frombuffer exports the pages, so closing them fails while any array of them is alive (`is_referenced`).
    array = np.frombuffer(pages, np.uint8, count=nbytes).view(dtype).reshape(shape)
    return array.view(Reserved), pages


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _as_view(value: NDArray[Any], found: _AddressRange) -> View | None:
    item = found.tensor.dtype.itemsize
    offset, rest = divmod(_address(value) - found.start, item)
    strides = []
    for length, stride, canonical in zip(value.shape, value.strides, c_strides(value.shape), strict=True):
        # NumPy may give a dim of length 1 any stride, and equal views must compare equal.
        if length == 1:
            strides.append(canonical)
        # Broadcast (0), reversed (negative) or inside an element: no view that can be planned, so it is computed.
        elif value.size and (stride <= 0 or stride % item):
            return None
        else:
            strides.append(abs(stride) // item)
    return None if rest else View(found.tensor.name, offset, tuple(value.shape), tuple(strides))


def _touched(start: int, nbytes: int) -> bool:
    """Whether any memory page of a placeholder has been read: only that makes it resident, which the kernel reports."""
    pages = -(-nbytes // mmap.PAGESIZE)  # rounded up
    for first in range(0, pages, _MINCORE_PAGES):
        count = min(_MINCORE_PAGES, pages - first)
        resident = np.zeros(count, np.uint8)
        address = ctypes.c_void_p(start + first * mmap.PAGESIZE)
        answer = ctypes.c_void_p(resident.ctypes.data)
        if _libc().mincore(address, ctypes.c_size_t(count * mmap.PAGESIZE), answer):
            return True  # unknown: assume it was read, which costs time but stays correct
        if resident.any():
            return True
    return False


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
