"""Layouts: which dim of which variable is split over which mesh axis. Pure arithmetic over layer objects.

Roles say what each dim means and which one would best be split (`roles`); rules say what somebody wrote
(`rules`); `auto` turns either into layouts that divide, and into fallbacks to report where they did not.
"""

from __future__ import annotations

from shardload.parallel.choose import choose
from shardload.parallel.memory_fit import MeshFit, fit, smallest_mesh
from shardload.parallel.result import LayoutChoice, VariableLayout

__all__ = ["LayoutChoice", "MeshFit", "VariableLayout", "choose", "fit", "smallest_mesh"]
