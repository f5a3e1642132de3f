"""Things with names, such as tensors, as a tree: names are parted at dots and slashes, as in the formats.

model.                 290   4.6 GiB
  embed_tokens.weight
  layers.              288   …
    0.                 …
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

NamedT = TypeVar("NamedT")
_MOST_DEPTH = 24
_PARTS = re.compile(r"(?<=[./])(?=[^./])")


@dataclass(slots=True)
class Group(Generic[NamedT]):
    """Things whose names begin equally."""

    label: str
    """The part of their names that the group above does not have."""
    prefix: str
    """All that their names begin with."""
    n_items: int = 0
    n_bytes: int = 0
    groups: dict[str, Group[NamedT]] = field(default_factory=dict)
    items: list[tuple[str, NamedT]] = field(default_factory=list)
    """Things directly in the group, each with the rest of its name."""

    def add(self, name: str, item: NamedT, n_bytes: int) -> None:
        """Add a thing to the group, and to groups below it."""
        *above, last = _PARTS.split(name, maxsplit=_MOST_DEPTH)
        group = self
        group._count(n_bytes)
        for part in above:
            inner = group.groups.get(part)
            if inner is None:
                inner = group.groups[part] = Group(part, group.prefix + part)
            group = inner
            group._count(n_bytes)
        group.items.append((last, item))

    def _count(self, n_bytes: int) -> None:
        self.n_items += 1
        self.n_bytes += n_bytes

    def below(self, prefix: str) -> Group[NamedT] | None:
        """Return the group whose names begin with ``prefix``; ``None`` if there is none."""
        group = self
        while group.prefix != prefix:
            found = [each for each in group.groups.values() if prefix.startswith(each.prefix)]
            if not found:
                return None
            group = found[0]
        return group

    def joined(self) -> Group[NamedT]:
        """Return a group that has nothing but one group as one with that: ``model.`` and ``layers.`` as one."""
        label, group = self.label, self
        while not group.items and len(group.groups) == 1:
            (group,) = group.groups.values()
            label += group.label
        return Group(label, group.prefix, group.n_items, group.n_bytes, group.groups, group.items)


def name_tree(named: Iterable[tuple[str, NamedT, int]]) -> Group[NamedT]:
    """Return the tree of things, each given with its name and its bytes."""
    tree = Group[NamedT]("", "")
    for name, item, n_bytes in named:
        tree.add(name, item, n_bytes)
    return tree
