"""Swin Transformer."""

from __future__ import annotations

from shardload.families.parts import images
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import NO_DROPOUT, Config
from shardload.families.parts.outside import MASK_TOKEN, VISION_HEADS
from shardload.families.record import Family, ModelType
from shardload.units import plural


def _lacking(config: Config, name: str) -> str | None:
    return images.oblong(config) or images.part_of_a_patch(config, name) or _windows(config, name)


def _windows(config: Config, name: str) -> str | None:
    """Refuse stages that need padding, which KerasHub's masks and patch counts ignore."""
    squares, window, depths = images.patch_sizes(config), config.get("window_size"), config.get("depths")
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
    lacking=_lacking,
    checks=Checks(("layer_norm_eps", 1e-5), ("hidden_act", "gelu")),
    is_image_model=True,
    attends_both_ways=True,
    prefix="swin",
    heads=VISION_HEADS,
    outside=MASK_TOKEN,
    has_pooler_outside=True,
)
FAMILY = Family(name="swin", title="Swin Transformer", model_types=(SWIN,))
