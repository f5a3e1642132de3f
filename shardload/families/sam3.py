"""SAM 3."""

from __future__ import annotations

from shardload.families.record import Family, ModelType

FAMILY = Family(name="sam3", title="SAM 3", model_types=(ModelType(name="sam3_video", attends_both_ways=True),))
