"""CLIP, as the vision part of other models, and MetaCLIP 2."""

from __future__ import annotations

from shardload.families.record import Family, ModelType

FAMILY = Family(
    name="clip",
    title="CLIP",
    model_types=(ModelType(name="metaclip_2", attends_both_ways=True),),
    gguf_refused={"clip": "it is the vision part of another file: load the model itself, without mmproj"},
)
