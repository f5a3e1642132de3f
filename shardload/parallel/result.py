"""The answer: a layout for every variable, who decided it, and what did not go as wanted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardload.parallel.roles import LARGE_BYTES
from shardload.sharding.layout import Fallback, Layout
from shardload.sharding.mesh import MeshSpec


@dataclass(frozen=True, slots=True)
class VariableLayout:
    """One variable and its layout."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole value."""
    layout: Layout
    rule: str
    """What decided: a role (``heads out``), the text of a rule, or ``default``."""

    @property
    def device_bytes(self) -> int:
        """Bytes one device holds of it."""
        return self.nbytes // math.prod(self.layout.parts)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """Layouts of all variables of one model on one mesh."""

    mesh: MeshSpec
    mode: str
    """``auto``, ``keras_hub``, ``layout_map``, ``replicated``, or the path of a rules file."""
    variables: tuple[VariableLayout, ...]
    """In the order of ``model.variables``; compiled metrics and optimizer slots after them."""
    layouts: Mapping[int, Layout]
    """The same by ``id(variable)``."""
    fallbacks: tuple[Fallback, ...]
    """Every variable that did not get the layout its rule wanted."""

    @property
    def sharded(self) -> int:
        """How many variables are split."""
        return sum(not v.layout.is_replicated for v in self.variables)

    @property
    def replicated(self) -> int:
        """How many variables every device holds whole."""
        return len(self.variables) - self.sharded

    @property
    def replicated_large(self) -> tuple[str, ...]:
        """Paths of variables of at least 1 MiB replicated by default although the mesh could split them."""
        if self.mode == "replicated" or not splits_weights(self.mesh):
            return ()
        return tuple(v.path for v in self.variables if v.layout.is_replicated and v.nbytes >= LARGE_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of all variables, each counted once."""
        return sum(v.nbytes for v in self.variables)

    @property
    def device_bytes(self) -> int:
        """Bytes each device holds; the same on all, as every split is even."""
        return sum(v.device_bytes for v in self.variables)

    @property
    def rules(self) -> Mapping[str, str]:
        """What decided, by path."""
        return {v.path: v.rule for v in self.variables}

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"layout {self.mode} on {self.mesh}: {self.sharded} variables split, {self.replicated} replicated; "
            f"{self.device_bytes:,} of {self.nbytes:,} bytes on each device"
        ]
        if not splits_weights(self.mesh) and self.mode != "replicated":
            lines.append(f"axis {self.mesh.axes[0]!r} splits the batch: this mesh has no axis to split weights over")
        for why, count in Counter(f.why for f in self.fallbacks).items():
            first = next(f.variable for f in self.fallbacks if f.why == why)
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"fallback: {first}{others}: {why}")
        lines += [f"replicated though large: {path}" for path in self.replicated_large]
        return "\n".join(lines)


def splits_weights(mesh: MeshSpec) -> bool:
    """Whether the mesh has an axis of more than one position besides the batch's."""
    return math.prod(mesh.sizes[1:]) > 1 if len(mesh.sizes) > 1 else mesh.size > 1
