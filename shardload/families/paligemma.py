"""PaliGemma: Gemma with a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardload.families.gemma import GEMMA
from shardload.families.parts.config import Config, Dims, published_decoder
from shardload.families.parts.images import TOWER_FIELDS, tower_config, tower_tensors
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, VISION_POOLER, TensorSpec, dense
from shardload.families.record import NO_GGUF, Family, ModelType, Part


def _adapt_paligemma(config: dict[str, Any]) -> None:
    if isinstance(text := config.get("text_config"), dict):
        text["num_image_tokens"] = text["head_dim"]  # KerasHub reads num_image_tokens as the head dim


def _tensors(config: Config) -> Iterator[TensorSpec]:
    assert GEMMA.tensors is not None
    text, vision = config["text_config"], config["vision_config"]
    for spec in GEMMA.tensors(text):
        yield replace(spec, name=f"language_model.{spec.name}")
    yield from tower_tensors(vision, "vision_tower.vision_model")
    yield from dense("multi_modal_projector.linear", vision["hidden_size"], text["hidden_size"])


def _published(image: int) -> dict[str, Any]:
    text = published_decoder("gemma", "GemmaForCausalLM", Dims(2048, 18, 8, 1, 16384), vocab=257216, head_dim=256)
    tokens = {"num_image_tokens": (image // 14) ** 2}
    return {
        "model_type": "paligemma",
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"} | tokens,
        "vision_config": tower_config(hidden=1152, layers=27, heads=16, width=4304, image=image, patch=14)
        | {"projection_dim": 2048},
        "hidden_size": 2048,
        "projection_dim": 2048,
        "image_token_index": 257152,
        "vocab_size": 257152,
        "tie_word_embeddings": True,
    }


PALIGEMMA = ModelType(
    name="paligemma",
    lacks=NO_GGUF | {Part.EXPORT: "KerasHub's class lacks the embeddings from the image's token on"},
    parts={"text_config": "gemma", "vision_config": "siglip_vision_model"},
    adapt=_adapt_paligemma,
    tensors=_tensors,
    tensor_fields=("image_token_index",),
    part_fields={"text_config": DECODER_FIELDS, "vision_config": TOWER_FIELDS},
    heads=DECODER_HEADS,
    outside=VISION_POOLER,
    tokenizer_class="GemmaTokenizer",
)
FAMILY = Family(
    name="paligemma",
    title="PaliGemma",
    model_types=(PALIGEMMA,),
    sizes={f"pali_gemma_3b_{image}": _published(image) for image in (224, 448, 896)},
)
