"""Patches of images that transformers supports and KerasHub's classes do not."""

from __future__ import annotations

from shardload.families.parts.config import Config


def no_biases(config: Config) -> str | None:
    """Refuse a model without biases of query, key and value."""
    if config.get("qkv_bias") is not False:
        return None
    return "config.json sets qkv_bias=False, but KerasHub's converter needs biases of query, key and value"


def oblong(config: Config) -> str | None:
    """Refuse images or patches that are not squares."""
    if key := next((key for key in ("image_size", "patch_size") if isinstance(config.get(key), list)), None):
        return f"config.json sets {key}={config[key]}, but KerasHub's converter takes one number"
    return None


def part_of_a_patch(config: Config, name: str) -> str | None:
    """Refuse images that are not a whole number of patches, for classes that do not cut off the rest."""
    if (sizes := patch_sizes(config)) is None or sizes[0] % sizes[1] == 0:
        return None
    return f"config.json sets image_size={sizes[0]}, but {name} needs a multiple of patch_size={sizes[1]}"


def patch_sizes(config: Config) -> tuple[int, int] | None:
    """Return the sides of an image and of a patch; ``None`` if they are not numbers."""
    image, patch = config.get("image_size"), config.get("patch_size")
    return (image, patch) if isinstance(image, int) and isinstance(patch, int) and patch > 0 else None
