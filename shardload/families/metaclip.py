"""MetaCLIP 2."""

from __future__ import annotations

from shardload.families.record import Family, ModelType

FAMILY = Family(
    name="metaclip",
    title="MetaCLIP 2",
    model_types=(ModelType(name="metaclip_2", attends_both_ways=True),),
)
