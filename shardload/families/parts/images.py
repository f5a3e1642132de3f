"""Building blocks for models of images.

Transformers supports more sizes of images and patches than KerasHub's classes, so some sizes are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.config import Config
from shardload.families.parts.tensors import MASK_TOKEN, TensorSpec, dense, norm


def no_biases(config: Config) -> str | None:
    """Return an error's text if query, key and value lack biases, which KerasHub's converter reads; else ``None``."""
    if config.get("qkv_bias") is not False:
        return None
    return "config.json sets qkv_bias=False, but KerasHub's converter needs biases of query, key and value"


def oblong(config: Config) -> str | None:
    """Return an error's text if images or patches are no squares, which KerasHub cannot build; else ``None``."""
    if key := next((key for key in ("image_size", "patch_size") if isinstance(config.get(key), list)), None):
        return f"config.json sets {key}={config[key]}, but KerasHub's converter takes one number"
    return None


def part_of_a_patch(config: Config, name: str) -> str | None:
    """Return an error's text if ``image_size`` is no multiple of ``patch_size``, as KerasHub needs; else ``None``."""
    if (sizes := patch_sizes(config)) is None or sizes[0] % sizes[1] == 0:
        return None
    return f"config.json sets image_size={sizes[0]}, but {name} needs a multiple of patch_size={sizes[1]}"


def patch_sizes(config: Config) -> tuple[int, int] | None:
    """Return the sides of an image and of a patch in pixels; ``None`` if either is not a number."""
    image, patch = config.get("image_size"), config.get("patch_size")
    return (image, patch) if isinstance(image, int) and isinstance(patch, int) and patch > 0 else None


IMAGE_MODEL: dict[str, Any] = {
    "is_image_model": True,
    "attends_both_ways": True,
    "outside": MASK_TOKEN,
    "has_pooler_outside": True,
}


def patch_embedding(config: Config, at: str) -> Iterator[TensorSpec]:
    """Yield the tensors of the convolution that makes a vector of each patch of an image with three channels."""
    patch, hidden = config["patch_size"], config["hidden_size"]
    yield TensorSpec(f"{at}.weight", (hidden, 3, patch, patch))
    yield TensorSpec(f"{at}.bias", (hidden,))


def attention(config: Config, at: str) -> Iterator[TensorSpec]:
    """Yield the tensors of the attention of a ViT's block."""
    hidden = config["hidden_size"]
    for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
        yield from dense(f"{at}.{part}", hidden, hidden)


def exported_images(backbone: Any) -> dict[str, Any]:
    """Return the ``config.json`` entries about images and sizes that exported models of images have in common."""
    height, width, channels = backbone.image_shape
    if height != width or channels != 3:
        found = f"{height} x {width} pixels and {channels} channels"
        raise UnsupportedError(
            f"Cannot write {type(backbone).__name__} for images of {found} for Hugging Face, expected squares of three"
        )
    patch = backbone.patch_size
    return {
        "image_size": height,
        "patch_size": patch if isinstance(patch, int) else patch[0],
        "num_channels": 3,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
    }


def published_images(model_type: str, class_name: str, *, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the ``config.json`` entries of a published model of images that others in its family have too."""
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_channels": 3,
    }


IMAGE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")


# ---- the vision tower of other models -----------------------------------------------------------

TOWER_FIELDS = (*IMAGE_FIELDS, "intermediate_size")


def tower_tensors(config: Config, at: str) -> Iterator[TensorSpec]:
    """Yield the tensors of a SigLIP, the vision tower of Gemma's models, without a head."""
    yield from patch_embedding(config, f"{at}.embeddings.patch_embedding")
    patches = (config["image_size"] // config["patch_size"]) ** 2
    yield TensorSpec(f"{at}.embeddings.position_embedding.weight", (patches, config["hidden_size"]))
    yield from clip_layers(config, f"{at}.encoder.layers")
    yield from norm(f"{at}.post_layernorm", config["hidden_size"])


def clip_layers(config: Config, at: str) -> Iterator[TensorSpec]:
    """Yield the tensors of the layers of an encoder of CLIP or SigLIP, for images or texts."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    for i in range(config["num_hidden_layers"]):
        layer = f"{at}.{i}"
        yield from norm(f"{layer}.layer_norm1", hidden)
        for part in ("k", "v", "q", "out"):
            yield from dense(f"{layer}.self_attn.{part}_proj", hidden, hidden)
        yield from norm(f"{layer}.layer_norm2", hidden)
        yield from dense(f"{layer}.mlp.fc1", hidden, width)
        yield from dense(f"{layer}.mlp.fc2", width, hidden)


def tower_config(*, hidden: int, layers: int, heads: int, width: int, image: int, patch: int) -> dict[str, Any]:
    """Return the ``vision_config`` of such a tower."""
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": width,
        "image_size": image,
        "patch_size": patch,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": False,
    }


def exported_tower(tower: Any) -> dict[str, Any]:
    """Return the ``vision_config`` of KerasHub's encoder of images for Gemma 3."""
    sizes = {"hidden": tower.hidden_dim, "layers": tower.num_layers, "heads": tower.num_heads}
    sides = {"image": tower.image_size, "patch": tower.patch_size}
    return tower_config(**sizes, width=tower.intermediate_dim, **sides) | {"layer_norm_eps": tower.layer_norm_epsilon}


def tokens_per_image(tower: Any) -> int:
    """Return how many embeddings that encoder makes of an image: one of each square of ``pool_size`` patches."""
    return int((tower.image_size // tower.patch_size // tower.pool_size) ** 2)
