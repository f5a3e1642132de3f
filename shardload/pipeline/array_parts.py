"""From a rule (`StoredAs`) to geometry: which boxes of an array consist of which elements of which tensors.

    rule ─► length of every named dim, from the shapes of tensors (to load) or of the array (to save)
         ─► `ArrayPart`: box of the array ◄─► view of one tensor, in the indices of the array

A dim of the array that consists of several named dims is one run of a tensor only if these follow each other there as
well. Otherwise each index of the slower ones is a part of its own. To load, the array is then seen with more dims
(`FinerArray`), if its layout allows that::

    "out in -> (out pair) in" along pair       array rows 0 2 4 … are tensor 0, rows 1 3 5 … are tensor 1:
                                               one part for each row, but two of (out, pair, in)
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardload.errors import MismatchError, UnsupportedError, UsageError
from shardload.manifest import Tensor, View, c_strides
from shardload.pipeline.stored_as import Groups, StoredAs
from shardload.sharding.layout import Bounds, Layout
from shardload.units import plural

_MOST_PARTS = 1 << 20
"""Most parts of one array. Each takes some microseconds and a kilobyte to plan."""


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """A box of an array, and the elements of one tensor that are in it."""

    view: View
    """The elements of the tensor by index of the whole array; it is valid for indices in ``box`` only."""
    box: Bounds


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor that a rule names: its shape, and the parts of the array that are in it."""

    name: str
    shape: tuple[int, ...]
    lengths: tuple[tuple[str, int], ...]
    """Name and length of each named dim that the tensor consists of."""
    taken: Bounds
    """The box of the named dims that the array gets: all of them, unless the rule takes a part (``take``)."""
    parts: tuple[ArrayPart, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], view: View) -> StoredTensor:
        """Return a tensor that is an array of its own; ``view`` has the array's order of dims."""
        lengths = tuple((f"dim {d}", n) for d, n in enumerate(shape))
        return cls(name, shape, lengths, Bounds.whole(shape), (ArrayPart(view, Bounds.whole(view.shape)),))


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as a rule describes it: its shape, and the tensors that it consists of."""

    shape: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]
    finer: FinerArray | None = field(default=None, compare=False)
    """The same array with more dims, if it then has fewer parts; else ``None``."""

    @property
    def parts(self) -> tuple[ArrayPart, ...]:
        """The boxes of the array that tensors fill; they do not overlap, and padding is in none of them."""
        return tuple(part for tensor in self.tensors for part in tensor.parts)

    @property
    def is_padded(self) -> bool:
        """Whether a part of the array is in no tensor, and so must be zero."""
        return sum(part.box.size for part in self.parts) < math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FinerArray:
    """An array some of whose dims are split into the named dims that they consist of; in memory, it is the same.

    An array of two interleaved tensors, (out * 2, in), has a part for each row; as (out, 2, in), it has two.
    """

    stored: StoredArray
    dims: tuple[int, ...]
    """For each dim of the array, how many dims it is split into."""

    def layout(self, layout: Layout) -> Layout | None:
        """Return the layout of the finer array by that of the array; ``None`` if shards would end within a row of it.

        Shards must have the same elements in the same order: only the slowest of the dims that a dim consists of may be
        split.
        """
        spec: list[tuple[str, ...]] = []
        for axes, count in zip(layout.spec, self.dims, strict=True):
            spec += [axes, *[()] * (count - 1)]
        found = Layout(layout.mesh, tuple(spec))
        return found if found.divides(self.stored.shape) else None


@dataclass(frozen=True, slots=True)
class _Dim:
    """Where one named dim lies in a tensor and in the array: lengths of both, and the range of each that is in both."""

    length: int
    stored: int = 1
    stored_start: int = 0
    array: int = 1
    array_start: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """A range of a dim of the array whose elements are equally spaced in a tensor."""

    start: int
    length: int
    source: int
    """Elements of the tensor before the first element of the run, counted from where the part begins."""
    stride: int


def whole_array(tensor: Tensor, order: Sequence[int] | None) -> StoredArray:
    """Return the array that is one whole tensor, with the tensor's dims in this order."""
    order, strides = order or range(len(tensor.shape)), c_strides(tensor.shape)
    shape = tuple(tensor.shape[d] for d in order)
    view = View(tensor.name, 0, shape, tuple(strides[d] for d in order))
    return StoredArray(shape, (StoredTensor.whole(tensor.name, tensor.shape, view),))


def array_to_load(
    rule: StoredAs, target: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...] | None
) -> StoredArray:
    """Return the array that a rule makes from the tensors of a checkpoint; ``shape``: that of its target, if stated.

    Raises:
        MismatchError: When a tensor is missing, or shapes do not fit the rule.
    """
    indices = _indices(rule, target, tensors)
    first = {name: numbers[0] for name, numbers in indices.items() if numbers}
    if len(first) < len(indices):
        raise MismatchError(f"Cannot load {target!r}: its rule names no tensor, because a list in indices= is empty")
    shapes = []
    for pattern in rule.patterns:
        shapes.append(_tensor(rule, target, rule.named(pattern, first), tensors).shape)
    if rule.dims is None:
        return whole_array(_tensor(rule, target, rule.patterns[0], tensors), None)
    sizes = _Sizes(rule, target, indices)
    found = sizes.of_tensors(shapes, shape)
    for pattern, expected in zip(rule.patterns, shapes, strict=True):
        for numbers in _combinations(indices):
            tensor = _tensor(rule, target, rule.named(pattern, numbers), tensors)
            if tensor.shape != expected:
                raise MismatchError(
                    f"Cannot load {target!r}: tensor {tensor.name!r} has shape {tensor.shape}, expected {expected} as "
                    f"{rule.named(pattern, first)!r} has"
                )
    return _array_and_finer(rule, target, indices, found, sizes.of_array(found))


def array_to_save(rule: StoredAs, target: str, shape: tuple[int, ...], full: Mapping[str, int]) -> StoredArray:
    """Return the tensors in which a rule stores an array of this shape.

    ``full``: lengths of the stored dims of which this rule and those of other arrays take parts.

    Raises:
        MismatchError: When the shape does not fit the rule.
        UsageError: When ``sizes`` lacks a length that does not follow from the shape.
    """
    if rule.dims is None:
        view = View(rule.patterns[0], 0, shape, c_strides(shape))
        return StoredArray(shape, (StoredTensor.whole(rule.patterns[0], shape, view),))
    sizes = _Sizes(rule, target, {name: rule.indices.get(name, ()) for name in rule.placeholders})
    found, array = sizes.of_saved(shape, full)
    indices = {name: rule.indices.get(name, range(array[name])) for name in rule.placeholders}
    return _array_and_finer(rule, target, indices, found, array)


def _indices(rule: StoredAs, target: str, tensors: Mapping[str, Tensor]) -> dict[str, Sequence[int]]:
    """Return the numbers of each placeholder: those that the rule states, else those of the checkpoint's tensors."""
    if all(name in rule.indices for name in rule.placeholders):
        return {name: rule.indices[name] for name in rule.placeholders}
    found = rule.numbers_in(list(tensors))
    for name, numbers in rule.indices.items():
        found = [one for one in found if one[name] in numbers]
    if not found:
        raise _missing(target, rule.patterns[0], tensors, like=rule.named(rule.patterns[0], _FirstNumbers()))
    indices: dict[str, Sequence[int]] = {}
    for name in rule.placeholders:
        indices[name] = rule.indices[name] if name in rule.indices else sorted({one[name] for one in found})
        if name not in rule.indices and list(indices[name]) != list(range(len(indices[name]))):
            shown = ", ".join(map(str, indices[name][:6])) + (", …" if len(indices[name]) > 6 else "")
            raise MismatchError(
                f"Cannot load {target!r}: {rule.patterns[0]!r} has tensors for {name} {shown}, expected 0, 1, 2, … "
                f"State the numbers, such as indices={{{name!r}: range(0, 26, 2)}}"
            )
    return indices


def _tensor(rule: StoredAs, target: str, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise _missing(target, name, tensors)
    return tensors[name]


class _FirstNumbers(dict[str, int]):
    """The number 0 for every placeholder: a name to compare with those in a checkpoint."""

    def __missing__(self, key: str) -> int:
        return 0


def _missing(target: str, name: str, tensors: Mapping[str, Tensor], *, like: str | None = None) -> MismatchError:
    close = next(iter(difflib.get_close_matches(like or name, list(tensors), n=1)), None)
    hint = f" Did you mean {close!r}?" if close else " shardload.inspect lists the tensors."
    return MismatchError(f"Cannot load {target!r}: the checkpoint has no tensor {name!r}.{hint}")


def _combinations(indices: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    for numbers in itertools.product(*indices.values()):
        yield dict(zip(indices, numbers, strict=True))


class _Sizes:
    """Finds the length of every named dim of a rule, from the shapes of its tensors or from the array's shape."""

    def __init__(self, rule: StoredAs, target: str, indices: Mapping[str, Sequence[int]]) -> None:
        self.rule, self.target, self.indices = rule, target, indices
        self.stored, self.array = rule.groups
        self.stated = {name: size for name, size in rule.sizes.items() if isinstance(size, int)}
        joined = rule.sizes.get(rule.along or "", ())
        self.joined = joined if isinstance(joined, Sequence) else ()
        self.names = tuple(itertools.chain(*self.stored))

    def of_tensors(self, shapes: Sequence[tuple[int, ...]], array: tuple[int, ...] | None) -> list[dict[str, int]]:
        """Return the stored length of every dim, for each of the tensors that are joined."""
        for name, numbers in self.indices.items():
            if self.stated.get(name, len(numbers)) != len(numbers):
                raise MismatchError(
                    f"Cannot load {self.target!r}: its rule has tensors for {len(numbers)} of {name}, expected "
                    f"{self.stated[name]} by sizes="
                )
        found = []
        for number, shape in enumerate(shapes):
            known = dict(self.stated)
            if self.rule.along is not None and self.joined:
                known[self.rule.along] = self.joined[number]
            if len(shape) != len(self.stored):
                raise self._unlike(shape, self.stored, "the tensor has")
            self._solve(known, self.stored, shape, "the tensor has")
            found.append(known)
        if array is not None and any(set(self.names) - set(known) for known in found):
            self._from_array(found, shapes, array)
        for known in found:
            if lacking := next((name for name in self.names if name not in known), None):
                raise self._unknown(lacking)
            known.setdefault(self.rule.along or "", 1)
            for name, size in found[0].items():
                if name != self.rule.along and known[name] != size:
                    raise MismatchError(
                        f"Cannot join tensors for {self.target!r}: {name} is {size} in the first and {known[name]} in "
                        f"another, expected the same. Only {self.rule.along}, along which they are joined, may differ"
                    )
        return found

    def _from_array(
        self, found: list[dict[str, int]], shapes: Sequence[tuple[int, ...]], array: tuple[int, ...]
    ) -> None:
        """Find lengths that tensors alone do not tell, from the shape of the target."""
        special = {self.rule.along, *self.rule.pad, *self.rule.take}
        if len(array) != len(self.array):
            raise self._unlike(array, self.array, "the target has")
        known = {name: size for name, size in found[0].items() if name not in special}
        known |= {name: len(numbers) for name, numbers in self.indices.items()}
        simple = [(group, n) for group, n in zip(self.array, array, strict=True) if not special & set(group)]
        self._solve(known, tuple(group for group, _ in simple), tuple(n for _, n in simple), "the target has")
        for each, shape in zip(found, shapes, strict=True):
            each.update((name, size) for name, size in known.items() if name in self.names)
            self._solve(each, self.stored, shape, "the tensor has")

    def of_array(self, stored: Sequence[dict[str, int]]) -> dict[str, int]:
        """Return the length of every dim in the array, by the stored lengths."""
        found = {name: self.taken(name, size)[1] - self.taken(name, size)[0] for name, size in stored[0].items()}
        found |= {name: len(numbers) for name, numbers in self.indices.items()}
        if self.rule.along is not None:
            found[self.rule.along] = sum(known[self.rule.along] for known in stored)
        return found | {name: _padded(found[name], multiple) for name, multiple in self.rule.pad.items()}

    def of_saved(self, shape: tuple[int, ...], full: Mapping[str, int]) -> tuple[list[dict[str, int]], dict[str, int]]:
        """Return the stored lengths of every dim for each of the tensors that are joined, and those in the array."""
        rule, known = self.rule, {name: n for name, n in self.stated.items() if name not in self.rule.take}
        if lacking := next((name for name in rule.pad if name not in known), None):
            raise self._unknown(lacking, why=" It is padded in the array.")
        array = known | {name: len(numbers) for name, numbers in rule.indices.items()}
        array |= {name: _padded(known[name], multiple) for name, multiple in rule.pad.items()}
        joined = list(self.joined) if self.joined else [1] * len(rule.patterns)
        if rule.along is not None:
            if rule.along in self.names and not self.joined:
                raise self._unknown(rule.along, why=" Tensors are joined along it: state one length for each.")
            array[rule.along] = sum(joined)
        for name, part in rule.take.items():
            if isinstance(part, slice):
                array[name] = part.stop - part.start
        if len(shape) != len(self.array):
            raise self._unlike(shape, self.array, "the array has")
        self._solve(array, self.array, shape, "the array has")
        if unknown := next((name for name in itertools.chain(*self.array) if name not in array), None):
            raise self._unknown(unknown)
        stored = {name: known.get(name, array.get(name, 1)) for name in self.names} | dict(full)
        return [stored | ({rule.along: n} if rule.along is not None else {}) for n in joined], array

    def taken(self, name: str, size: int) -> tuple[int, int]:
        """Return the range of a stored dim of this length that belongs to the array."""
        part = self.rule.take.get(name, slice(0, size))
        start, stop = (part.start, part.stop) if isinstance(part, slice) else (part, part + 1)
        if not start <= stop <= size:
            raise MismatchError(f"Cannot take {start}:{stop} of {name} for {self.target!r}: it has length {size}")
        return start, stop

    def _solve(self, known: dict[str, int], groups: Groups, shape: tuple[int, ...], whose: str) -> None:
        for group, n in zip(groups, shape, strict=True):
            unknown = [name for name in group if name not in known]
            rest = math.prod(known[name] for name in group if name in known)
            if (not unknown and rest != n) or (unknown and (not rest or n % rest)):
                raise self._unlike(shape, groups, whose, known)
            if len(unknown) == 1:
                known[unknown[0]] = n // rest

    def _unlike(
        self, shape: tuple[int, ...], groups: Groups, whose: str, known: Mapping[str, int] | None = None
    ) -> MismatchError:
        dims = " ".join(f"({' '.join(group)})" if len(group) != 1 else group[0] for group in groups)
        names = [name for name in itertools.chain(*groups) if name in (known or {})]
        sizes = ", ".join(f"{name}={known[name]}" for name in names) if known else ""
        return MismatchError(
            f"Cannot use the rule {self.rule.dims!r} for {self.target!r}: {whose} shape {shape}, expected "
            f'"{dims}"{f" with {sizes}" if sizes else ""}'
        )

    def _unknown(self, name: str, why: str = "") -> UsageError:
        return UsageError(
            f"Cannot use the rule {self.rule.dims!r} for {self.target!r}: the length of {name!r} does not follow from "
            f"the shapes.{why} Pass sizes={{{name!r}: …}} to StoredAs"
        )


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _array_and_finer(
    rule: StoredAs,
    target: str,
    indices: Mapping[str, Sequence[int]],
    stored: Sequence[dict[str, int]],
    array: Mapping[str, int],
) -> StoredArray:
    made, (_, groups) = _array(rule, target, indices, stored, array), rule.groups
    # A dim of length 1 without a name has none in the finer array; it would have to be put back.
    if len(made.parts) <= len(made.tensors) or not all(groups):
        return made
    finer = _array(rule, target, indices, stored, array, split=tuple((name,) for group in groups for name in group))
    return replace(made, finer=FinerArray(finer, tuple(map(len, groups))))


def _array(
    rule: StoredAs,
    target: str,
    indices: Mapping[str, Sequence[int]],
    stored: Sequence[dict[str, int]],
    array: Mapping[str, int],
    *,
    split: Groups | None = None,
) -> StoredArray:
    left, right = rule.groups
    right = split or right
    sizes = _Sizes(rule, target, indices)
    shape = tuple(math.prod(array[name] for name in group) for group in right)
    made, count, first = list[StoredTensor](), 0, 0
    for pattern, known in zip(rule.patterns, stored, strict=True):
        dims: dict[str, _Dim] = {}
        for name in dict.fromkeys((*sizes.names, *((rule.along,) if rule.along else ()))):
            start, stop = sizes.taken(name, known[name])
            begin = first if name == rule.along else 0
            dims[name] = _Dim(stop - start, known[name], start, array.get(name, 1), begin)
        lengths = tuple((name, known[name]) for name in sizes.names)
        starts = tuple(dims[name].stored_start for name in sizes.names)
        taken = Bounds(starts, tuple(dims[name].stored_start + dims[name].length for name in sizes.names))
        own = tuple(math.prod(known[name] for name in group) for group in left)
        for positions in itertools.product(*(range(len(numbers)) for numbers in indices.values())):
            at = dict(zip(indices, positions, strict=True))
            dims |= {name: _Dim(1, array=array[name], array_start=i) for name, i in at.items()}
            name = rule.named(pattern, {key: indices[key][i] for key, i in at.items()})
            strides = _strides(left, dims)
            runs = [_runs([(dims[key], strides.get(key, 0)) for key in group]) for group in right]
            if (count := count + math.prod(map(len, runs))) > _MOST_PARTS:
                raise UnsupportedError(
                    f"Cannot load or save {target!r} by its rule: it takes more than {_MOST_PARTS} separate runs. Keep "
                    "dims that are not next to each other in the tensor as dims of their own, and reshape afterwards"
                )
            base = sum(dims[key].stored_start * stride for key, stride in strides.items())
            made.append(StoredTensor(name, own, lengths, taken, tuple(_parts(name, base, runs, shape))))
        first += dims[rule.along].length if rule.along is not None else 0
    if twice := len(made) - len({tensor.name for tensor in made}):
        raise UsageError(f"Cannot use the rule of {target!r}: it names {plural(twice, 'tensor')} more than once")
    return StoredArray(shape, tuple(made))


def _strides(stored: Groups, dims: Mapping[str, _Dim]) -> dict[str, int]:
    """Return how many elements of a tensor lie between two indices of each of its named dims."""
    strides, step = dict[str, int](), 1
    for name in reversed([*itertools.chain(*stored)]):
        strides[name] = step
        step *= dims[name].stored
    return strides


def _parts(tensor: str, base: int, runs: Sequence[Sequence[_Run]], shape: tuple[int, ...]) -> Iterator[ArrayPart]:
    """Yield the parts of an array that one tensor fills, whose first element in the array is element ``base``."""
    for chosen in itertools.product(*runs):
        start = tuple(run.start for run in chosen)
        along = tuple(run.stride if run.length > 1 else 0 for run in chosen)
        offset = base + sum(run.source for run in chosen) - sum(a * t for a, t in zip(start, along, strict=True))
        box = Bounds(start, tuple(run.start + run.length for run in chosen))
        if box.size:
            yield ArrayPart(View(tensor, offset, shape, along), box)


def _runs(dims: Sequence[tuple[_Dim, int]]) -> list[_Run]:
    """Return the runs of one dim of the array, which consists of these named dims with their strides in the tensor."""
    runs, inner = [_Run(0, 1, 0, 0)], 1
    for dim, stride in reversed(dims):
        only = runs[0]
        # One longer run, if all of the faster dims are in it and the tensor goes on with the next row.
        whole = len(runs) == 1 and only.length == inner
        if whole and (dim.length == 1 or inner == 1 or stride == only.stride * only.length):
            step = stride if inner == 1 else only.stride
            runs = [_Run(dim.array_start * inner, dim.length * inner, only.source, step)]
        else:
            runs = [
                _Run((dim.array_start + i) * inner + run.start, run.length, run.source + i * stride, run.stride)
                for i in range(dim.length)
                for run in runs
            ]
        inner *= dim.array
    return runs
