"""Hugging Face configurations as KerasHub's converters read them.

A converter knows the keys that one version of `transformers` wrote. Other versions omit values that equal a default
(`config_defaults`), or rename keys; `read_config` fills them in, without changing a value. `check_representable`
refuses features for which KerasHub's class has no argument, and names the field.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.hub.config_defaults import IMAGE_MODELS, completed
from shardload.manifest import Manifest, Tensor
from shardload.transfer.read_tensor import read_rows
from shardload.units import plural

_ALIASES = {
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "qwen2_moe": {"num_experts": "num_local_experts"},
    "bart": {"num_hidden_layers": "encoder_layers"},
}
"""``model_type`` → {key that a converter reads: key with the same value in other versions}."""
_PARTS = {
    "gemma3": {"text_config": "gemma3_text", "vision_config": "siglip_vision_model"},
    "paligemma": {"text_config": "gemma", "vision_config": "siglip_vision_model"},
}
"""``model_type`` → parts with their own configurations, and the default ``model_type`` of each."""
_TIES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose KerasHub class takes ``tie_word_embeddings`` and whose converter reads ``lm_head.weight``."""
_ROWS = 16
"""Rows of the output layer and the embedding that are compared before the model is built."""
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForConditionalLM")
"""Suffixes of the classes of transformers that have an output layer over the vocabulary."""
_BART_PAIRS = (
    ("encoder_layers", "decoder_layers"),
    ("encoder_attention_heads", "decoder_attention_heads"),
    ("encoder_ffn_dim", "decoder_ffn_dim"),
)


def read_config(manifest: Manifest) -> dict[str, Any]:
    """Return a copy of the configuration in the form that KerasHub's converters read."""
    config = copy.deepcopy(dict(manifest.config))
    # KerasHub reads the first entry unconditionally; GGUF and KerasHub's own exports have none.
    config["architectures"] = config.get("architectures") or [""]
    config = completed(renamed(config))
    # Converters call get("rope_parameters", {}).get(…), which fails on null.
    if config.get("rope_parameters", {}) is None:
        del config["rope_parameters"]
    for part, kind in _PARTS.get(_kind(config), {}).items():
        if isinstance(config.get(part), dict):
            config[part] = completed({"model_type": kind, **config[part]})
    if "ForImageClassification" in architecture_of(config):
        config.setdefault("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # the default, which transformers omits
    if _kind(config) in IMAGE_MODELS:
        config |= {key: _side(config[key]) for key in ("image_size", "patch_size") if key in config}
    if _kind(config) == "paligemma" and isinstance(text := config.get("text_config"), dict):
        text["num_image_tokens"] = text["head_dim"]  # KerasHub reads num_image_tokens as the head dim
    if _kind(config).startswith("gemma4"):
        _read_gemma_4(config)
    if _kind(config) == "t5gemma2":
        _read_t5gemma_2(config)
    return config


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the names that converters read for keys that other versions renamed.

    Before the defaults are filled in: they would fill in a key that it only has under its other name.
    """
    aliases = _ALIASES.get(_kind(config), {}).items()
    return {wanted: config[stored] for wanted, stored in aliases if stored in config} | dict(config)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the class of transformers that saved a checkpoint; empty if the configuration names none."""
    return str((config.get("architectures") or [""])[0])


def _read_gemma_4(config: dict[str, Any]) -> None:
    """Remove parts that are null, which KerasHub would build, and set the one ``global_head_dim`` that it reads."""
    for part in ("vision_config", "audio_config"):
        if part in config and config[part] is None:
            del config[part]
    text = config.get("text_config", config)
    layers = text.get("per_layer_config") if isinstance(text, dict) else None
    if isinstance(layers, dict) and text.get("global_head_dim") is None:
        widths = {layer.get("head_dim") for layer in layers.values() if isinstance(layer, dict)} - {None}
        if len(widths) == 1:
            text["global_head_dim"] = widths.pop()


def _read_t5gemma_2(config: dict[str, Any]) -> None:
    """Fill in the factor of full attention, which KerasHub divides positions by and transformers 5 omits if it is 1."""
    encoder = config.get("encoder")
    parts = (config.get("decoder"), encoder.get("text_config") if isinstance(encoder, dict) else None)
    for part in parts:
        rope = part.get("rope_parameters") if isinstance(part, dict) else None
        full = rope.get("full_attention") if isinstance(rope, dict) else None
        if isinstance(full, dict) and full.get("rope_type", "default") == "default":
            full.setdefault("factor", 1.0)


def ties_embeddings(manifest: Manifest) -> bool | None:
    """Whether to build the output layer from the embedding; KerasHub reads ``tie_word_embeddings`` at most.

    True if the configuration ties them and no different output layer is stored, as in transformers 5, or if the
    checkpoint's class has no output layer at all. ``None`` for classes without the option.

    Raises:
        TransferError: When a file no longer matches its headers.
    """
    if _kind(manifest.config) not in _TIES:
        return None
    head = next((t for n, t in manifest.tensors.items() if re.fullmatch(r"(.+\.)?lm_head\.weight", n)), None)
    if manifest.config.get("tie_word_embeddings") is True:
        return head is None or not _differs_from_embedding(head, manifest)
    architecture = architecture_of(manifest.config)
    return bool(architecture) and not architecture.endswith(GENERATORS) and head is None


def tie_as_stored(described: Any, manifest: Manifest) -> None:
    """Tie the embeddings of a Llama in a Keras configuration, in place, if no output layer is stored.

    KerasHub's class does not serialise ``tie_word_embeddings``, so files of Keras do not state it.
    """
    embedding, head = (any(re.search(pattern, name) for name in manifest.tensors) for pattern in _STORED)
    if embedding and not head:
        _tie(described)


def tie_as_described(described: Any, manifest: Manifest) -> None:
    """Tie a Llama in a Keras configuration, in place, if the Hugging Face folder that contains it is tied."""
    if ties_embeddings(manifest):
        _tie(described)


_STORED = (r"reversible_embedding/vars/0$|token_embedding/embeddings$", r"embedding/(vars/1|reverse_embeddings)$")
"""Names of the embedding and of an output layer, in files of Keras and in steps."""


def _tie(described: Any) -> None:
    if isinstance(described, list):
        for value in described:
            _tie(value)
    if not isinstance(described, dict):
        return
    for value in described.values():
        _tie(value)
    config = described.get("config")
    if described.get("class_name") in ("LlamaBackbone", "Llama3Backbone") and isinstance(config, dict):
        config.setdefault("tie_word_embeddings", True)


def _differs_from_embedding(head: Tensor, manifest: Manifest) -> bool:
    """Compare a few rows: a separately trained head differs everywhere; loading compares a copy completely."""
    embedding = next((t for n, t in manifest.tensors.items() if re.fullmatch(r"(.+\.)?embed_tokens\.weight", n)), head)
    # Not comparable row by row: build the model tied, and the complete comparison of the load will refuse the tensor.
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    rows = range(0, head.rows, max(1, head.rows // _ROWS))
    return any(read_rows(head, i, i + 1).tobytes() != read_rows(embedding, i, i + 1).tobytes() for i in rows)


def check_representable(manifest: Manifest, backbone_cls: type, arguments: Mapping[str, Any]) -> None:
    """Check that KerasHub's class can represent the model that the configuration describes.

    Args:
        manifest: The checkpoint.
        backbone_cls: KerasHub's class.
        arguments: Parameters of its constructor.

    Raises:
        UnsupportedError: When the class has no argument for a field, which the message names.
    """
    if (why := _lacking(manifest, f"KerasHub's {backbone_cls.__name__}", arguments)) is not None:
        raise UnsupportedError(
            f"Cannot build the model of {manifest.source}: {why}. Build your own model, then call "
            "shardload.load_weights(model, source)"
        )


def _lacking(manifest: Manifest, name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the first feature that KerasHub's class or converter cannot represent, or ``None``."""
    config, kind = read_config(manifest), _kind(manifest.config)
    if "head_dim" not in arguments and (width := _head_dims(config)) is not None:
        return (
            f"config.json sets head_dim={width[0]}, but {name} computes it as hidden_size / num_attention_heads = "
            f"{width[1]}"
        )
    if kind == "bart" and (pair := next((p for p in _BART_PAIRS if _differ(config, *p)), None)):
        values = " and ".join(f"{key}={config[key]}" for key in pair)
        return f"config.json sets {values}, but {name} uses one number for both"
    if kind == "esm" and (positions := config.get("position_embedding_type", "absolute")) != "rotary":
        return (
            f"config.json sets position_embedding_type={positions!r}, but {name} counts absolute positions from 0, "
            "and transformers from pad_token_id + 1; expected 'rotary'"
        )
    if kind == "gemma3" and (pooled := _pooled(config)) is not None:
        return f"config.json sets mm_tokens_per_image={pooled[0]}, but KerasHub makes {pooled[1]} for each image"
    if kind in _NEEDS_BIASES and config.get("qkv_bias") is False:
        return "config.json sets qkv_bias=False, but KerasHub's converter needs biases of query, key and value"
    if kind in _MIXED and (dense := _dense(config)) is not None:
        return f"config.json sets {dense}, but KerasHub's converter needs experts in every layer"
    return _patches(config, name) if kind in IMAGE_MODELS else None


_MIXED = ("qwen2_moe", "qwen3_moe")
"""Model types that may have layers with experts and layers without."""
_NEEDS_BIASES = ("vit", "deit", "dinov2", "dinov2_with_registers")


def _pooled(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens per image, configured and in KerasHub (one per 4x4 patches); ``None`` if they agree."""
    vision, configured = config.get("vision_config"), config.get("mm_tokens_per_image")
    if not isinstance(vision, Mapping) or not isinstance(configured, int):
        return None
    side, patch = vision.get("image_size"), vision.get("patch_size")
    if not isinstance(side, int) or not isinstance(patch, int) or patch < 1:
        return None
    made = (side // patch // 4) ** 2
    return None if made == configured else (configured, made)


def _dense(config: Mapping[str, Any]) -> str | None:
    """Return the setting that makes some layers dense (without experts), or ``None``."""
    layers, every = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
    if isinstance(layers, list) and any(i in layers for i in range(int(config["num_hidden_layers"]))):
        return f"mlp_only_layers={layers}"
    return None if every == 1 else f"decoder_sparse_step={every}"


def _side(size: Any) -> Any:
    """Return the side of a square, which transformers also writes as two equal numbers."""
    return size[0] if isinstance(size, list) and len(size) == 2 and size[0] == size[1] else size


def _patches(config: Mapping[str, Any], name: str) -> str | None:
    """Describe patches or windows that transformers supports and KerasHub's class does not; else ``None``."""
    image, patch = config.get("image_size"), config.get("patch_size")
    if oblong := next((key for key in ("image_size", "patch_size") if isinstance(config.get(key), list)), None):
        return f"config.json sets {oblong}={config[oblong]}, but KerasHub's converter takes one number"
    if not isinstance(image, int) or not isinstance(patch, int) or patch < 1:
        return None
    # DINO's classes cut off the rest of an image, as transformers does.
    if image % patch and not _kind(config).startswith("dino"):
        return f"config.json sets image_size={image}, but {name} needs a multiple of patch_size={patch}"
    return _windows(config, image // patch, name) if _kind(config) == "swin" else None


def _windows(config: Mapping[str, Any], side: int, name: str) -> str | None:
    """Describe Swin stages that need padding, which KerasHub's masks and patch counts ignore; else ``None``."""
    window, depths = config.get("window_size"), config.get("depths")
    if not isinstance(window, int) or window < 1 or not isinstance(depths, list):
        return None
    sizes = f"config.json sets image_size={config['image_size']} and patch_size={config['patch_size']}"
    for stage, depth in enumerate(depths):
        if side % window and (depth != 1 or side < window):  # the first block of a stage has no mask
            needs = f"a multiple of window_size={window}"
            return f"{sizes}: {side} x {plural(side, 'patch')} in stage {stage}, but {name} needs {needs}"
        if side % 2 and stage + 1 < len(depths):
            return f"{sizes}: {side} x {plural(side, 'patch')} in stage {stage}, but {name} needs an even number"
        side //= 2
    return None


def _differ(config: Mapping[str, Any], one: str, two: str) -> bool:
    return one in config and two in config and config[one] != config[two]


def _head_dims(config: Mapping[str, Any]) -> tuple[Any, str] | None:
    head_dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if not all(isinstance(n, int) and n > 0 for n in (head_dim, hidden, heads)):
        return None
    assert isinstance(hidden, int) and isinstance(heads, int)
    return None if head_dim == hidden / heads else (head_dim, f"{hidden} / {heads} = {hidden / heads:g}")


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))
