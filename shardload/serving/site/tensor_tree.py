"""The tensors of a checkpoint as a tree: names are parted at dots and slashes, as in the formats.

    model.                 290 tensors   4.6 GiB
      embed_tokens.weight  bfloat16   262144 × 640
      layers.
        0.                 …

Groups are ``<details>``, so that they open and close without a script. Of very many tensors, a page has the upper part
of the tree, and links to pages of its groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from shardload.reports import TIMES
from shardload.reports.page import escaped
from shardload.serving.site.pages import filtered
from shardload.units import format_bytes, plural

MOST_ROWS = 4000
"""Most tensors, or variables, on one page."""
_MOST_DEPTH = 24
_LABEL = 300
"""Most characters that are shown of a part of a name."""
_PARTS = re.compile(r"(?<=[./])(?=[^./])")
_OPEN = 40
"""A group with so few rows is open at first."""


@dataclass(slots=True)
class Group:
    """Tensors whose names begin equally."""

    label: str
    """The part of their names that the group above does not have."""
    prefix: str
    """All that their names begin with."""
    n_tensors: int = 0
    n_bytes: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    tensors: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Tensors directly in the group, each with the rest of its name."""

    def add(self, name: str, tensor: Mapping[str, Any]) -> None:
        """Add a tensor to the group, and to groups below it."""
        *above, last = _PARTS.split(name, maxsplit=_MOST_DEPTH)
        group = self
        group._count(tensor)
        for part in above:
            inner = group.groups.get(part)
            if inner is None:
                inner = group.groups[part] = Group(part, group.prefix + part)
            group = inner
            group._count(tensor)
        group.tensors.append((last, tensor))

    def _count(self, tensor: Mapping[str, Any]) -> None:
        self.n_tensors += 1
        self.n_bytes += tensor["bytes"]

    def below(self, prefix: str) -> Group | None:
        """Return the group whose names begin with ``prefix``; ``None`` if there is none."""
        group = self
        while group.prefix != prefix:
            found = [each for each in group.groups.values() if prefix.startswith(each.prefix)]
            if not found:
                return None
            group = found[0]
        return group


def tree_of(tensors: Iterable[Mapping[str, Any]]) -> Group:
    """Return the tree of tensors, which are as `shardload inspect --json` has them."""
    tree = Group("", "")
    for tensor in tensors:
        tree.add(tensor["name"], tensor)
    return tree


def matching(tensors: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return the tensors whose name, dtype or shape has each word of a text."""
    return filtered(tensors, text, lambda each: f"{each['name']} {each['dtype']} {_shape(each)}")


def tree_lines(
    tree: Group, *, most: int = MOST_ROWS, all_open: bool = False, kept: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the HTML of what is in a group; groups with more tensors than there is room for are links.

    ``kept`` are parts of the page's address that these links keep.
    """
    inner = _joined(tree)
    if inner.prefix != tree.prefix:
        yield f'<p class="prefix">{_name(inner.prefix[len(tree.prefix) :])}</p>'
    yield '<ul class="tree">'
    yield from _Page(most, all_open, kept or {}).lines(inner)
    yield "</ul>"


@dataclass(slots=True)
class _Page:
    """A tree while it is written."""

    left: int
    """How many tensors there is still room for."""
    all_open: bool
    kept: Mapping[str, str]

    def lines(self, group: Group) -> Iterator[str]:
        """Yield what is in a group."""
        room = max(self.left, 1)
        for label, tensor in group.tensors[:room]:
            yield _row(label, tensor)
        if (rest := len(group.tensors) - room) > 0:
            yield f'<li class="soft">and {plural(rest, "tensor")} more: filter for some of them</li>'
        self.left -= len(group.tensors)
        for inner in map(_joined, group.groups.values()):
            if inner.n_tensors == 1:
                self.left -= 1
                ((label, tensor),) = inner.tensors
                yield _row(inner.label + label, tensor)
            else:
                yield from self._group(inner, is_open=self.all_open or inner.n_tensors + len(group.groups) <= _OPEN)

    def _group(self, group: Group, *, is_open: bool) -> Iterator[str]:
        head = (
            f'<span class="name">{_name(group.label)}</span><span class="soft">{plural(group.n_tensors, "tensor")}'
            f'</span><span class="size">{format_bytes(group.n_bytes)}</span>'
        )
        if group.n_tensors > self.left:
            link = escaped("?" + urlencode({**self.kept, "group": group.prefix}))
            yield f'<li><a class="group" href="{link}">{head}</a></li>'
            return
        yield f'<li><details{" open" if is_open else ""}><summary class="group">{head}</summary><ul>'
        yield from self.lines(group)
        yield "</ul></details></li>"


def _row(label: str, tensor: Mapping[str, Any]) -> str:
    return (
        f'<li class="tensor"><span class="name" title="{escaped(_short(tensor["name"]))}">{_name(label)}</span>'
        f'<span class="dtype">{escaped(tensor["dtype"])}</span><span class="shape">{_shape(tensor)}</span>'
        f'<span class="size">{format_bytes(tensor["bytes"])}</span></li>'
    )


def _joined(group: Group) -> Group:
    """Return a group that has nothing but one group as one with that: ``model.`` and ``layers.`` as one line."""
    label = group.label
    while not group.tensors and len(group.groups) == 1:
        (group,) = group.groups.values()
        label += group.label
    return Group(label, group.prefix, group.n_tensors, group.n_bytes, group.groups, group.tensors)


def _shape(tensor: Mapping[str, Any]) -> str:
    return f" {TIMES} ".join(map(str, tensor["shape"])) or "scalar"


def _short(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[: _LABEL // 2]}…{text[-_LABEL // 2 :]}"


def _name(label: str) -> str:
    """Return part of a name, with places where a narrow screen may break it."""
    return re.sub(r"([./_])", r"\1<wbr>", escaped(_short(label)))
