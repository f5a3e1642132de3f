"""Rules for arrays that a checkpoint stores in another form: several tensors, other dims, fused, or without padding.

A rule names every dim once, on the side of the tensors and on that of the array. It covers all layers, and works in
both directions: `shardload.load_arrays` makes the array from the tensors, `shardload.save_arrays` the tensors from it::

    StoredAs("model.layers.{layer}.self_attn.q_proj.weight", "(heads head) in -> in layer heads head")

    model.layers.0.self_attn.q_proj.weight   (heads * head, in) ┐
    model.layers.1.self_attn.q_proj.weight   (heads * head, in) ┴─►  one array (in, layer=2, heads, head)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardload.errors import UsageError
from shardload.units import check_kind, plural

Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dim of a tensor or an array, the named dims that it consists of, the slowest first: ``(heads head)``."""
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a checkpoint stores an array: the tensors that make it up, and how their dims correspond.

    Examples:
        ```python
        from jax.sharding import PartitionSpec as P

        up = shardload.StoredAs("model.layers.{layer}.mlp.up_proj.weight", "out in -> layer in out")
        targets = {"up": P(None, None, "model")}  # one array for all layers
        params = shardload.load_arrays("gemma-2-2b", targets, mesh="1x8", names={"up": up}, strict=False)
        ```

    Args:
        tensors: The tensor's name. Each ``{placeholder}`` in it means a number, and is a dim of the array: one
            rule covers all layers (``"model.layers.{layer}.mlp.up_proj.weight"``) or all experts of all layers.
            Several names are tensors that are joined along the dim ``along``.
        dims: Names of a tensor's dims, ``->``, names of the array's dims: ``"out in -> in layer out"``. A dim in
            parentheses consists of several, the slowest first: ``"(heads head) in -> in layer heads head"``. ``1`` is a
            dim of length 1. May be left out for a tensor that is stored as it is.
        along: The dim along which several tensors are joined, one after the other. If a tensor does not have this dim,
            each adds 1 to it, so that ``"out in -> in (out pair)"`` along ``pair`` interleaves two tensors.
        sizes: Lengths of named dims, where they do not follow from shapes. For the dim ``along``, the lengths in the
            tensors, in order, as saving requires.
        indices: The numbers that a placeholder means, in the order of the array: ``{"layer": range(0, 26, 2)}``
            for every second layer. By default, those in the checkpoint, which must be 0, 1, 2, …
        take: The part of a stored dim that belongs to this array: a number (the array then lacks the dim) or a slice
            with a start and a stop. Rules for other arrays may take the other parts.
        pad: Dims that are longer in the array than stored: multiples to which their lengths are rounded up. The rest
            of the array is zero.

    Raises:
        UsageError: When the rule contradicts itself.
    """

    tensors: str | Sequence[str]
    dims: str | None = None
    along: str | None = None
    sizes: Mapping[str, int | Sequence[int]] = field(default_factory=dict)
    indices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    take: Mapping[str, int | slice] = field(default_factory=dict)
    pad: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kind("tensors", self.tensors, str | Sequence, "the name of a tensor, or several")
        check_kind("dims", self.dims, str | None, 'names of dims, such as "out in -> in layer out"')
        check_kind("along", self.along, str | None, "the name of a dim")
        for argument in ("sizes", "indices", "take", "pad"):
            check_kind(argument, getattr(self, argument), Mapping, "a mapping by names of dims")
        if not self.patterns or not all(isinstance(name, str) and name for name in self.patterns):
            raise UsageError(f"Cannot use StoredAs({self.tensors!r}): expected the name of a tensor, or several")
        if any(set(_PLACEHOLDER.findall(name)) != set(self.placeholders) for name in self.patterns):
            raise self.error("the names have different placeholders")
        if "" in self.placeholders:
            raise self.error("a placeholder has no name. Write {layer}")
        if self.dims is None:
            if self.placeholders or len(self.patterns) > 1 or self.along or self.take or self.pad:
                raise self.error('there are no dims. Write them, such as "out in -> layer out in"')
            return
        self._check(*self.groups)

    def _check(self, stored: Groups, array: Groups) -> None:
        left, right = [*itertools.chain(*stored)], [*itertools.chain(*array)]
        for side, names in (("left", left), ("right", right)):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise self.error(f"{twice!r} is on the {side} of -> twice")
        if both := next((name for name in self.placeholders if name in left), None):
            raise self.error(f"{both!r} is a placeholder and a dim of the tensor. Rename one")
        if (self.along is None) != (len(self.patterns) == 1):
            raise self.error("along= is the dim along which several tensors are joined: give both or none of them")
        numbers = {name for name, part in self.take.items() if not isinstance(part, slice)}
        expected = (set(left) - numbers) | set(self.placeholders) | ({self.along} if self.along else set())
        if lacking := sorted(expected - set(right)):
            raise self.error(f"{lacking[0]!r} is not on the right of ->")
        if unknown := sorted(set(right) - expected):
            raise self.error(f"{unknown[0]!r} on the right of -> is neither a dim of the tensor nor a placeholder")
        self._check_lengths(set(left), set(right))

    def _check_lengths(self, left: set[str], right: set[str]) -> None:
        known = {
            "sizes": left | right,
            "indices": set(self.placeholders),
            "take": left - {self.along},
            "pad": right - {self.along, *self.placeholders, *self.take},
        }
        for argument, names in known.items():
            if unknown := sorted(set(getattr(self, argument)) - names):
                raise self.error(f"{argument}= names {unknown[0]!r}, expected one of {', '.join(sorted(names))}")
        for name, numbers in self.indices.items():
            if not isinstance(numbers, Sequence) or not all(map(_is_count, numbers)):
                raise self.error(f"indices= has {numbers!r} for {name!r}, expected numbers, such as range(0, 26, 2)")
        for name, part in self.take.items():
            ends = (part.start, part.stop) if isinstance(part, slice) else (part, part)
            if not all(_is_count(end) for end in ends) or (isinstance(part, slice) and part.step not in (None, 1)):
                raise self.error(f"take= has {part!r} for {name!r}, expected a number or slice(start, stop), none < 0")
        for name, multiple in self.pad.items():
            if not _is_count(multiple) or not multiple:
                raise self.error(f"pad= has {multiple!r} for {name!r}, expected a multiple to pad to, such as 128")
        for name, size in self.sizes.items():
            every = [size] if _is_count(size) else size
            is_joined, count = name == self.along, len(self.patterns) if name == self.along else 1
            is_list = isinstance(every, Sequence) and len(every) == count and all(map(_is_count, every))
            if not is_list or is_joined is _is_count(size):
                wanted = f"{plural(count, 'number')}, one for each tensor" if is_joined else "a number"
                raise self.error(f"sizes= has {size!r} for {name!r}, expected {wanted}")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of the tensors that are joined, with placeholders; one if none are joined."""
        return (self.tensors,) if isinstance(self.tensors, str) else tuple(self.tensors)

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The placeholders in the names, each once."""
        return tuple(dict.fromkeys(_PLACEHOLDER.findall(self.patterns[0])))

    @property
    def groups(self) -> tuple[Groups, Groups]:
        """The named dims of each dim of a tensor, and of each dim of the array."""
        sides = (self.dims or "").split("->")
        if len(sides) != 2:
            raise self.error(f'its dims are {self.dims!r}, expected one arrow: "out in -> in layer out"')
        return self._groups(sides[0]), self._groups(sides[1])

    def _groups(self, text: str) -> Groups:
        found: list[tuple[str, ...]] = []
        if re.sub(r"\([^()]*\)|\w+|\s+", "", text):
            raise self.error(f"{text.strip()!r} is no list of dims, expected names and (names in parentheses)")
        for inside, name in re.findall(r"\(([^()]*)\)|(\w+)", text):
            names = tuple(one for one in (inside.split() if not name else [name]) if one != "1")
            if bad := next((one for one in names if not one.isidentifier()), None):
                raise self.error(f"{bad!r} is no name of a dim, expected a word or 1")
            found.append(names)
        return tuple(found)

    def named(self, pattern: str, numbers: Mapping[str, int]) -> str:
        """Return the name of one tensor: a name with placeholders, with ``numbers`` in their place."""
        return _PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), pattern)

    def numbers_in(self, names: Sequence[str]) -> list[dict[str, int]]:
        """Return the numbers that the placeholders stand for in ``names``, one dict for each tensor of this rule."""
        pieces = _PLACEHOLDER.split(self.patterns[0])
        seen: set[str] = set()
        regex = ""
        for i, piece in enumerate(pieces):
            if i % 2 == 0:
                regex += re.escape(piece)
            else:
                regex += f"(?P={piece})" if piece in seen else f"(?P<{piece}>0|[1-9][0-9]{{0,8}})"
                seen.add(piece)
        found = (re.fullmatch(regex, name) for name in names)
        return [{key: int(text) for key, text in match.groupdict().items()} for match in found if match]

    def error(self, why: str) -> UsageError:
        """Return the error for a rule that cannot be used, because of ``why``."""
        dims = "" if self.dims is None else f", {self.dims!r}"
        tensors = self.tensors if isinstance(self.tensors, str) else list(self.tensors)
        return UsageError(f"Cannot use StoredAs({tensors!r}{dims}): {why}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
