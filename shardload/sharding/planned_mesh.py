"""The mesh that a layout plan is for.

It is read without JAX: a command simulates the devices of the mesh, and JAX fixes their number when it starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardload.sharding.mesh import MeshSpec


def planned_mesh(layout: Any) -> MeshSpec | None:
    """Return the mesh of a `shardload.parallel.LayoutPlan`, or of the JSON file of one; ``None`` for other layouts.

    A file that cannot be read has no mesh; the code that reads its layouts raises the error.
    """
    if isinstance(layout, str | os.PathLike):
        return _saved_mesh(Path(layout))
    # By attribute: `shardload.parallel`, which defines LayoutPlan, imports JAX and is above this package.
    found = getattr(layout, "mesh", None)
    return found if isinstance(found, MeshSpec) else None


def _saved_mesh(path: Path) -> MeshSpec | None:
    if path.suffix != ".json":
        return None
    try:
        mesh = json.loads(path.read_text())["mesh"]
        return MeshSpec(tuple(mesh["axes"]), tuple(mesh["sizes"]))
    # A MeshError is a ValueError.
    except (OSError, ValueError, KeyError, TypeError):
        return None
