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
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from shardload.reports import TIMES
from shardload.reports.markup import escaped
from shardload.reports.name_table import MOST_ROWS
from shardload.reports.name_tree import Group, name_tree
from shardload.serving.site.pages import filtered
from shardload.units import format_bytes, plural

_LABEL = 300
"""Most characters that are shown of a part of a name."""
_OPEN = 40
"""A group with so few rows is open at first."""


Tensors = Group[Mapping[str, Any]]
"""Tensors whose names begin equally, as `shardload inspect --json` has them."""


def tree_of(tensors: Iterable[Mapping[str, Any]]) -> Tensors:
    """Return the tree of tensors."""
    return name_tree((tensor["name"], tensor, tensor["bytes"]) for tensor in tensors)


def matching(tensors: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return the tensors whose name, dtype or shape has each word of a text."""
    return filtered(tensors, text, lambda each: f"{each['name']} {each['dtype']} {_shape(each)}")


def tree_lines(
    tree: Tensors, *, most: int = MOST_ROWS, all_open: bool = False, kept: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the HTML of what is in a group; groups with more tensors than there is room for are links.

    ``kept`` are parts of the page's address that these links keep.
    """
    inner = tree.joined()
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

    def lines(self, group: Tensors) -> Iterator[str]:
        """Yield what is in a group."""
        room = max(self.left, 1)
        for label, tensor in group.items[:room]:
            yield _row(label, tensor)
        if (rest := len(group.items) - room) > 0:
            yield f'<li class="soft">and {plural(rest, "tensor")} more: filter for some of them</li>'
        self.left -= len(group.items)
        for inner in (each.joined() for each in group.groups.values()):
            if inner.n_items == 1:
                self.left -= 1
                ((label, tensor),) = inner.items
                yield _row(inner.label + label, tensor)
            else:
                yield from self._group(inner, is_open=self.all_open or inner.n_items + len(group.groups) <= _OPEN)

    def _group(self, group: Tensors, *, is_open: bool) -> Iterator[str]:
        head = (
            f'<span class="name">{_name(group.label)}</span><span class="soft">{plural(group.n_items, "tensor")}'
            f'</span><span class="size">{format_bytes(group.n_bytes)}</span>'
        )
        if group.n_items > self.left:
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


def _shape(tensor: Mapping[str, Any]) -> str:
    return f" {TIMES} ".join(map(str, tensor["shape"])) or "scalar"


def _short(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[: _LABEL // 2]}…{text[-_LABEL // 2 :]}"


def _name(label: str) -> str:
    """Return part of a name, with places where a narrow screen may break it."""
    return re.sub(r"([./_])", r"\1<wbr>", escaped(_short(label)))
