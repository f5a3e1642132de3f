"""Roles: a variable is placed by its own dims, best first, or along another variable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MATRICES = "matrices"
"""Noun for a dim that stacks matrices, one for each expert."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim that may be split, with the plural noun for its elements in reports (``heads``)."""

    index: int
    what: str


@dataclass(frozen=True, slots=True)
class Wants:
    """A variable placed by its own dims."""

    rule: str
    """The rule's name, for reports."""
    dims: tuple[Dim, ...]
    """Dims to split, best first; none for variables that stay replicated on purpose."""
    exact: bool = True
    """Whether any choice but the first dim is a fallback to report; ``False`` for the shape rule."""
    even_small: bool = False
    """Whether to split it even if it is small, because a user's rule says so."""


@dataclass(frozen=True, slots=True)
class Follows:
    """A variable placed like its leader."""

    rule: str
    leader: Any
    """The variable to follow."""
    dims: tuple[int | None, ...]
    """For each own dim the matching dim of the leader, or ``None``."""


Role = Wants | Follows
