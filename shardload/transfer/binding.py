"""What a transfer fills: variables, each with its view of a tensor and its layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.manifest import View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec

# A binding has a layout from the start, never None: one that nobody chose is then an error about meshes
# (`planning` refuses several), not a variable that is silently replicated.
ONE_DEVICE = MeshSpec(DEFAULT_AXES, (1, 1))
"""The mesh of an array that is whole on one device."""


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
    # Not compared: `==` on Keras variables compares their values and returns an array.
    variable: Any = field(default=None, compare=False, repr=False)
    """The ``keras.Variable``; a transfer never touches it."""

    @classmethod
    def unsharded(cls, name: str, view: View, dtype: np.dtype[Any], variable: Any) -> Binding:
        """Return a binding whose layout is still to be chosen: whole, on one device."""
        return cls(name, view, dtype, Layout.replicated(ONE_DEVICE, len(view.shape)), variable)
