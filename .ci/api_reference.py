"""What the Python API of the site shows otherwise than the source: mkdocs.yml names it as an extension of griffe.

* Names in single backticks in docstrings are links.
* A class that only the package makes, such as a report, has no constructor.
* An alias that the reference does not explain, such as ``Which``, and a constant are replaced by their values.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import griffe

PAGES = sorted((Path(__file__).parents[1] / "docs/reference/api").glob("*.md"))
SHOWN = set(re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in PAGES), re.MULTILINE))
BY_END = {name.rpartition(".")[2]: name for name in sorted(SHOWN)}
CALLED = {"StoredAs", "Hardware"}
"""Dataclasses that users make."""
_NAME = re.compile(r"(?<![`\[])`((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)`(?![`\]])")


def linked(text: str) -> str:
    """Return a docstring with links for the names that the reference explains."""
    return _NAME.sub(lambda found: _link(found[1]) or found[0], text)


def _link(name: str) -> str | None:
    first, _, member = name.removeprefix("shardload.").partition(".")
    for whole in (f"shardload.{name}", name):
        if whole in SHOWN:
            return f"[`{name}`][{whole}]"
    if name.rpartition(".")[2] in BY_END and (not member or name.startswith("shardload.")):
        return f"[`{name}`][{BY_END[name.rpartition('.')[2]]}]"
    return f"[`{name}`][{BY_END[first]}.{member}]" if first in BY_END and first[0].isupper() else None


def _forget_fields(found: griffe.Class) -> None:
    """Leave out the constructor that griffe makes from the fields of a dataclass."""
    others = [one for one in found.decorators if not str(one.value).startswith("dataclass")]
    if len(others) < len(found.decorators):
        found.decorators = others
        found.members.pop("__init__", None)


def _know_errors(member: griffe.Object) -> None:
    """Let the module know the errors under ``Raises``, so that each is a link, imported or not."""
    raises = member.docstring.value.partition("\nRaises:\n")[2]
    for name in re.findall(r"^ {4}(\w+):", raises, re.MULTILINE):
        if name in BY_END and name not in member.module.members:
            member.module.set_member(name, griffe.Alias(name, BY_END[name], parent=member.module))


class ApiReference(griffe.Extension):
    """See the module."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Change docstrings and signatures, once all modules are known."""
        self._modules = loader.modules_collection
        self._walk(pkg)

    def _walk(self, parent: griffe.Module | griffe.Class) -> None:
        for member in list(parent.members.values()):
            if member.is_alias:
                continue
            if member.docstring is not None:
                _know_errors(member)
                member.docstring.value = linked(member.docstring.value)
            if member.is_function:
                for parameter in member.parameters:
                    parameter.annotation = self._meant(parameter.annotation)
                    parameter.default = self._meant(parameter.default)
            elif member.is_module or member.is_class:
                if member.is_class and member.name not in CALLED:
                    _forget_fields(member)
                self._walk(member)

    def _meant(self, value: Any) -> Any:
        if isinstance(value, griffe.ExprName):
            return self._value_of(value)
        if isinstance(value, griffe.Expr):
            for field in dataclasses.fields(value):
                found = getattr(value, field.name)
                is_list = isinstance(found, list)
                setattr(value, field.name, [self._meant(one) for one in found] if is_list else self._meant(found))
        return value

    def _value_of(self, name: griffe.ExprName) -> Any:
        path = name.canonical_path
        if not path.startswith("shardload.") or path in SHOWN:
            return name
        try:
            found = self._modules[path]
        except (KeyError, griffe.AliasResolutionError):
            return name
        return found.value if found.is_attribute and found.value is not None else name
