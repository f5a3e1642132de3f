"""SAM 3: the detector of a model that segments images and videos; KerasHub has no class for its tracker."""

from __future__ import annotations

from collections.abc import Iterator

from shardload.families.parts.checks import FieldDifference
from shardload.families.parts.config import Config
from shardload.families.record import NO_GGUF, Family, ModelType, Part

_BOTH_WAYS = "in KerasHub's class, texts attend both ways"

_AT = r"(detector_model\.)?"
_OUTSIDE = {
    r"tracker_(model|neck)\..+": "the tracker, which follows in a video what the detector finds",
    rf"{_AT}text_encoder\.text_projection\.weight": "CLIP's own projection, never called",
    rf"{_AT}mask_decoder\.pixel_decoder\.(conv_layers|norms)\.\d+\.(weight|bias)": (
        "a stage of the mask decoder that has no level of features, never called"
    ),
}


def _text_attends_both_ways(config: Config) -> Iterator[FieldDifference]:
    """Yield, to refuse the model, that transformers' text encoder has a causal mask, and KerasHub's class has none."""
    yield FieldDifference("is_causal", "true (of the text encoder)", "false", ("is_causal",))


FAMILY = Family(
    name="sam3",
    title="SAM 3",
    model_types=(
        ModelType(
            name="sam3_video",
            lacks=NO_GGUF | dict.fromkeys((Part.EXPORT, Part.ADAPTERS, Part.SIZE), _BOTH_WAYS),
            attends_both_ways=True,
            differences=_text_attends_both_ways,
            outside=_OUTSIDE,
        ),
    ),
)
