"""What a transfer fills: variables, each with its view of a tensor and its layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.manifest import View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec

_ONE_DEVICE = MeshSpec(DEFAULT_AXES, (1, 1))


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable that is a view of one tensor, and its layout."""

    name: str
    """Unique: the variable's path, with ``#2`` where another variable has the same one."""
    view: View
    """The tensor elements of the variable; ``view.shape`` is its shape."""
    dtype: np.dtype[Any]
    """The variable's dtype; the load casts if the tensor has another."""
    layout: Layout
    variable: Any = field(default=None, compare=False, repr=False)
    """The ``keras.Variable``, which a transfer passes by."""

    @classmethod
    def unsharded(cls, name: str, view: View, dtype: np.dtype[Any], variable: Any) -> Binding:
        """Return a binding whose layout is still to be chosen: whole, on one device."""
        return cls(name, view, dtype, Layout.replicated(_ONE_DEVICE, len(view.shape)), variable)
