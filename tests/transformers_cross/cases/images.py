"""Encoders of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers_cross.cases.parts import IMAGES, LABELS, Case, Config

SWIN: Config = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, Config]] = {
    "vit": ("ViT", IMAGES), "deit": ("DeiT", IMAGES), "dinov2": ("Dinov2", IMAGES),
    "dinov2_with_registers": ("Dinov2WithRegisters", {**IMAGES, "num_register_tokens": 2}),
    "dinov3_vit": ("DINOv3ViT", {**IMAGES, "num_register_tokens": 2}), "swin": ("Swin", SWIN),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    for family in FAMILIES:
        yield from _writers(family)
        yield from _heads(family)
        yield from _fields(family)


def _case(family: str, variant: str, cls: str = "Model", changed: Config | None = None, **options: Any) -> Case:
    stem, config = FAMILIES[family]
    return Case(family, variant, f"{stem}{cls}", {**config, **(changed or {})}, ask="image", **options)


def _writers(family: str) -> Iterator[Case]:
    yield _case(family, "base model")
    yield _case(family, "base model, transformers 4", writer=4)
    yield _case(family, "bfloat16", dtype="bfloat16", mesh="2x2")
    yield _case(family, "sharded", sharded=True)
    yield _case(family, "defaults left out", edits=("defaults_left_out",))
    yield _case(family, "batches tracked", edits=("batches_tracked",))


def _heads(family: str) -> Iterator[Case]:
    if family == "dinov3_vit":
        return
    labelled = "ForImageClassification"
    yield _case(family, "classifier", labelled, LABELS)
    yield _case(family, "classifier, transformers 4", labelled, LABELS, writer=4)
    if family == "deit":
        yield _case(family, "classifier with teacher", f"{labelled}WithTeacher", LABELS)
    if family in ("vit", "deit", "swin"):
        stride = {} if family == "swin" else {"encoder_stride": 8}
        yield _case(family, "masked image modelling", "ForMaskedImageModeling", stride)


def _fields(family: str) -> Iterator[Case]:
    if family in ("vit", "deit", "swin"):
        yield _case(family, "no query bias", changed={"qkv_bias": False})
    if family == "dinov2":
        yield _case(family, "swiglu", changed={"use_swiglu_ffn": True})
    if family == "dinov3_vit":
        yield _case(family, "gated", changed={"use_gated_mlp": True})
    if family in ("vit", "deit", "dinov2", "swin"):
        yield _case(family, "another activation", changed={"hidden_act": "relu"})
        yield _case(family, "another epsilon", changed={"layer_norm_eps": 0.1})
    if family == "swin":
        yield _case(family, "images that are padded", changed={"image_size": 30})
        yield _case(family, "windows that are padded", changed={"image_size": 40, "depths": [2, 2]})
