"""Families of models (Gemma, BERT, …): each module declares all that shardload knows about one family or a few.

    BUILT_IN, entry points, register()  ─►  registry  ─►  Family  ─►  ModelType
                                                                        names, defaults, checks, …

Other packages ask `shardload.families.registry` and never compare a ``model_type`` or the name of a class, so that
adding a family takes one file.
"""

from __future__ import annotations

from shardload.families.record import Family, ModelType, Part
from shardload.families.registry import register, unregister

__all__ = ["Family", "ModelType", "Part", "register", "unregister"]
