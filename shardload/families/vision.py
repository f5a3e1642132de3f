"""Models of images: ViT and DeiT, Swin, DINO, and the vision parts SigLIP, CLIP and SAM 3.

Transformers supports more sizes of images and patches than KerasHub's classes, so some sizes are refused here. DINOv2,
with and without registers, and DINOv3 need no whole number of patches: they cut off the rest of an image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, NO_DROPOUT, SIZES, SQUARES, Config
from shardload.families.parts.tensors import MASK_TOKEN, VISION_HEADS
from shardload.families.record import Family, ModelType
from shardload.units import plural


def _no_biases(config: Config) -> str | None:
    """Return an error's text if query, key and value lack biases, which KerasHub's converter reads; else ``None``."""
    if config.get("qkv_bias") is not False:
        return None
    return "config.json sets qkv_bias=False, but KerasHub's converter needs biases of query, key and value"


def _oblong(config: Config) -> str | None:
    """Return an error's text if images or patches are no squares, which KerasHub cannot build; else ``None``."""
    if key := next((key for key in ("image_size", "patch_size") if isinstance(config.get(key), list)), None):
        return f"config.json sets {key}={config[key]}, but KerasHub's converter takes one number"
    return None


def _part_of_a_patch(config: Config, name: str) -> str | None:
    """Return an error's text if ``image_size`` is no multiple of ``patch_size``, as KerasHub needs; else ``None``."""
    if (sizes := _patch_sizes(config)) is None or sizes[0] % sizes[1] == 0:
        return None
    return f"config.json sets image_size={sizes[0]}, but {name} needs a multiple of patch_size={sizes[1]}"


def _patch_sizes(config: Config) -> tuple[int, int] | None:
    """Return the sides of an image and of a patch in pixels; ``None`` if either is not a number."""
    image, patch = config.get("image_size"), config.get("patch_size")
    return (image, patch) if isinstance(image, int) and isinstance(patch, int) and patch > 0 else None


_IMAGE_MODEL: dict[str, Any] = {
    "is_image_model": True,
    "attends_both_ways": True,
    "outside": MASK_TOKEN,
    "has_pooler_outside": True,
}
VIT = ModelType(
    name="vit",
    defaults=BASE | NO_DROPOUT | SQUARES | {"qkv_bias": True, "layer_norm_eps": 1e-12},
    lacking=lambda config, name: _no_biases(config) or _oblong(config) or _part_of_a_patch(config, name),
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu")),
    prefix="vit",
    heads=VISION_HEADS,
    **_IMAGE_MODEL,
)
DEIT = replace(VIT, name="deit", prefix="deit", heads=VISION_HEADS + r"|(cls|distillation)_classifier\.")
VIT_FAMILY = Family(name="vit", title="ViT", model_types=(VIT, DEIT))


def _padded_windows(config: Config, name: str) -> str | None:
    """Return an error's text if Swin's windows do not cover a stage evenly, as KerasHub needs; else ``None``."""
    squares, window, depths = _patch_sizes(config), config.get("window_size"), config.get("depths")
    if squares is None or not isinstance(window, int) or window < 1 or not isinstance(depths, list):
        return None
    side = squares[0] // squares[1]
    sizes = f"config.json sets image_size={config['image_size']} and patch_size={config['patch_size']}"
    for stage, depth in enumerate(depths):
        if side % window and (depth != 1 or side < window):  # the first block of a stage has no mask
            needs = f"a multiple of window_size={window}"
            return f"{sizes}: {side} x {plural(side, 'patch')} in stage {stage}, but {name} needs {needs}"
        if side % 2 and stage + 1 < len(depths):
            return f"{sizes}: {side} x {plural(side, 'patch')} in stage {stage}, but {name} needs an even number"
        side //= 2
    return None


SWIN = ModelType(
    name="swin",
    defaults={"image_size": 224, "patch_size": 4, "window_size": 7, "embed_dim": 96, "mlp_ratio": 4.0, "qkv_bias": True}
    | {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "drop_path_rate": 0.1}
    | NO_DROPOUT,
    lacking=lambda config, name: _oblong(config) or _part_of_a_patch(config, name) or _padded_windows(config, name),
    checks=Checks(("layer_norm_eps", 1e-5), ("hidden_act", "gelu")),
    prefix="swin",
    heads=VISION_HEADS,
    **_IMAGE_MODEL,
)
SWIN_FAMILY = Family(name="swin", title="Swin Transformer", model_types=(SWIN,))


_DINO_DEFAULTS = BASE | NO_DROPOUT | SQUARES | {"mlp_ratio": 4, "layerscale_value": 1.0, "drop_path_rate": 0.0}
_DINO_DEFAULTS |= {"use_swiglu_ffn": False}


DINO_2 = ModelType(
    name="dinov2",
    defaults=_DINO_DEFAULTS | {"patch_size": 14},
    lacking=lambda config, name: _no_biases(config) or _oblong(config),
    checks=Checks(("layer_norm_eps", 1e-6), ("hidden_act", "gelu")),
    heads=VISION_HEADS,
    **_IMAGE_MODEL,
)
WITH_REGISTERS = replace(DINO_2, name="dinov2_with_registers", defaults=_DINO_DEFAULTS | {"num_register_tokens": 4})
DINO_3 = ModelType(
    name="dinov3_vit",
    defaults=dict(zip(SIZES[1:], (384, 1536, 12, 6), strict=True))
    | SQUARES
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "layerscale_value": 1.0, "rope_theta": 100.0}
    | {"num_register_tokens": 0, "use_gated_mlp": False, "attention_dropout": 0.0, "drop_path_rate": 0.0}
    | {f"{part}_bias": part != "key" for part in ("query", "key", "value", "proj", "mlp")},
    lacking=lambda config, name: _oblong(config),
    **_IMAGE_MODEL,
)
DINO_FAMILY = Family(name="dino", title="DINO", model_types=(DINO_2, WITH_REGISTERS, DINO_3))


VISION = ModelType(name="siglip_vision_model", defaults=BASE | SQUARES)
SIGLIP_FAMILY = Family(name="siglip", title="SigLIP", model_types=(VISION,))


CLIP_FAMILY = Family(
    name="clip",
    title="CLIP",
    model_types=(ModelType(name="metaclip_2", attends_both_ways=True),),
    gguf_refused={"clip": "it is the vision part of another file: load the model itself, without mmproj"},
)


SAM_3_FAMILY = Family(name="sam3", title="SAM 3", model_types=(ModelType(name="sam3_video", attends_both_ways=True),))
