"""Which tensor each target of `load_arrays` names.

path of a leaf                      tensor
params, dense, kernel               params.dense.kernel, or params/dense/kernel (Orbax, Keras)
params, dense, kernel, value        the same: ``value`` is the box of Flax around an array (`nn.Partitioned`)
params, dense, kernel               params/dense/kernel/value, if that is all there is below params/dense/kernel
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardload.errors import MismatchError, UsageError
from shardload.manifest import Manifest
from shardload.units import plural

BOXED = "value"
"""The attribute in which boxes of Flax have their array."""
SHOWN = 8
"""Names that an error lists before it counts the rest."""


# Entries of a path have different fields: `DictKey.key`, `SequenceKey.idx`, `GetAttrKey.name`.
def _key(entry: Any) -> str:
    return str(next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)))


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names in a checkpoint, and the caller's map to them."""

    manifest: Manifest
    names: Mapping[str, str] | Callable[[str], str] | None
    _boxes: dict[str, str] = field(init=False, compare=False)
    """Tensors in boxes, by the name of the box."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_boxes", _boxes(self.manifest.tensors))

    def of_leaf(self, path: Sequence[Any]) -> str:
        """Return a leaf's name: its path joined by dots or, where tensors are called so, by slashes."""
        keys = [_key(entry) for entry in path]
        named = self.names if isinstance(self.names, Mapping) else {}
        boxed = len(path) > 1 and keys[-1] == BOXED
        texts = [join.join(part) for part in ((keys[:-1], keys) if boxed else (keys,)) for join in (".", "/")]
        known = (named, self.manifest.tensors, self._boxes)
        return next((text for names in known for text in texts if text in names), texts[0])

    def of_box(self, path: Sequence[Any]) -> str:
        """Return the name of the leaf in a box."""
        return self.of_leaf((*path, jax.tree_util.GetAttrKey(BOXED)))

    def tensor(self, target: str) -> str:
        """Return the name of the tensor for a target, whether it exists or not.

        Raises:
            UsageError: When the caller's map gives no name.
        """
        found = target if self.names is None else self._mapped(target)
        if not isinstance(found, str):
            raise UsageError(
                f"Cannot use names: for target {target!r}, it gives {found!r:.60}, expected a tensor's name"
            )
        return found if found in self.manifest.tensors else self._boxes.get(found, found)

    def _mapped(self, target: str) -> Any:
        return self.names(target) if callable(self.names) else (self.names or {}).get(target, target)

    def check(self, tensors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...] | None]) -> None:
        """Raise if a target has no tensor.

        Args:
            tensors: Name of the tensor by target.
            shapes: That targets state.

        Raises:
            MismatchError: Names the tensors that could be meant.
        """
        missing = [target for target, tensor in tensors.items() if tensor not in self.manifest.tensors]
        if not missing:
            return
        taken = set(tensors.values())
        free = [name for name in self.manifest.tensors if name not in taken]

        def line(target: str) -> str:
            tensor, shape = tensors[target], shapes[target]
            fits = [n for n in free if shape is None or sorted(self.manifest.tensors[n].shape) == sorted(shape)]
            close = _closest(tensor, fits)
            own = target or "the target itself"
            return own + (f" ({tensor})" if tensor != target else "") + (f", did you mean {close!r}?" if close else "")

        raise MismatchError(
            f"Cannot load from {self.manifest.source}: it has no tensor for {plural(len(missing), 'target')}:\n  "
            + "\n  ".join([*map(line, missing[:SHOWN]), *shown(missing)[SHOWN:]])
            + "\nPass names= to map targets to tensors; shardload.inspect lists the tensors."
            + (f" They have the names of the file: {why}" if (why := self.manifest.undescribed) else "")
        )


def _boxes(names: Iterable[str]) -> dict[str, str]:
    """Return the tensors called ``value`` that are alone in their place, by the name of that place."""
    every = set(names)
    inside = {name[: -len(BOXED) - 1]: name for name in every if name.endswith((f"/{BOXED}", f".{BOXED}"))}
    if not inside:
        return {}
    # A layer may have a parameter of that name among others.
    below = Counter(name[: at.start()] for name in every for at in re.finditer(r"[./]", name))
    return {place: name for place, name in inside.items() if below[place] == 1 and place not in every}


def _closest(wanted: str, names: Iterable[str]) -> str | None:
    """Return the name that is most likely meant: never one of another layer, which has the same parameters."""
    parts = _parts(wanted)
    likely = (name for name in names if _is_like(parts, _parts(name)))
    return next(iter(difflib.get_close_matches(wanted, likely, n=1)), None)


def _is_like(wanted: list[str], found: list[str]) -> bool:
    """Whether names differ in the spelling of one part, but not in its numbers, or by parts at one end."""
    if len(wanted) != len(found):
        short, long = sorted((wanted, found), key=len)
        return long[: len(short)] == short or long[-len(short) :] == short
    differing = [(a, b) for a, b in zip(wanted, found, strict=True) if a != b]
    return (
        all(re.findall(r"\d+", a) == re.findall(r"\d+", b) and difflib.get_close_matches(a, [b]) for a, b in differing)
        and len(differing) <= 1
    )


def _parts(name: str) -> list[str]:
    return re.split(r"[./]", name)


def shown(names: Iterable[str]) -> list[str]:
    """Return the first names, and how many more there are."""
    found = list(names)
    return found[:SHOWN] + ([f"… and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])
