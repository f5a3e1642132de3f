"""Look up models in their published sizes (``gemma2_9b``), as Hugging Face configurations, and scale these down.

One configuration is the only source of an architecture: KerasHub's converter makes the Keras model of it, and
`shardload.hub.config_forms` the Hugging Face tensor names and shapes. Values are those of the published
``config.json`` files; a test compares parameter counts with KerasHub's presets.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

from shardload.errors import SourceNotFoundError
from shardload.families.registry import families

ArchitectureConfig = dict[str, Any]


def architectures() -> dict[str, ArchitectureConfig]:
    """Return the ``config.json`` of each published size, by the size's name (``gemma2_9b``)."""
    return {name: config for family in families() for name, config in family.sizes.items()}


def aliases() -> dict[str, str]:
    """Return the aliases of published sizes: alias → the size's own name."""
    return {alias: name for family in families() for alias, name in family.aliases.items()}


def alias_note(asked: str, found: str) -> str | None:
    """Return a note that ``asked`` is an alias of the size ``found``; ``None`` if both are the same name."""
    if asked == found:
        return None
    notes = {alias: note for family in families() for alias, note in family.alias_notes.items()}
    return f"{notes.get(asked, f'{asked} is an alias')}: using {found}"


def lookup(name: str) -> tuple[str, ArchitectureConfig]:
    """Return an architecture's own name and configuration; ``name`` may be an alias, or end in KerasHub's ``_en``."""
    known = architectures()
    for candidate in (name, name.removesuffix("_en")):
        found = aliases().get(candidate, candidate)
        if found in known:
            return found, known[found]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise SourceNotFoundError(f"Unknown architecture {name!r}.{hint} Available: {', '.join(known)}")


def scaled(config: ArchitectureConfig, scale: float) -> ArchitectureConfig:
    """Return the architecture with smaller dims: the same heads, ``scale`` times the layers, widths and vocabulary."""
    if scale == 1.0:
        return dict(config)
    small = {
        key: scaled(value, scale) if isinstance(value, dict) and _has_model(value) else value
        for key, value in config.items()
    }
    if _is_model(config):
        _scale_widths(small, scale)
    _join_parts(small)
    for key in _LAYERS & config.keys():
        small[key] = max(2, round(config[key] * scale))
    _shorten_layer_types(small, config)
    if "depths" in config:
        small["depths"] = [max(2, round(depth * scale)) for depth in config["depths"]]
    for key in ("n_positions", "max_position_embeddings", "sliding_window"):
        if config.get(key):
            small[key] = max(64, _eighths(config[key] * scale))
    # An odd vocabulary stays odd: whether a mesh divides it is what makes it interesting.
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if config.get(key):
            small[key] = min(config[key], max(512, _eighths(config[key] * scale)) + config[key] % 8)
    return small


_HIDDEN = ("hidden_size", "n_embd", "dim", "d_model", "embed_dim")
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "num_heads", "conf_num_attention_heads"),
)
_LAYERS = {
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers"),
    "conf_num_hidden_layers",
}
_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "embedding_size"),
    *("global_head_dim", "hidden_size_per_layer_input", "output_proj_dims"),
)
"""Fields that published configurations have for sizes: of hidden states, heads, layers, and other widths."""


def _is_model(config: ArchitectureConfig) -> bool:
    """Whether a configuration has sizes itself, and not only in its parts (``text_config``)."""
    return not config.keys().isdisjoint(_HIDDEN) and not config.keys().isdisjoint(_HEADS)


def _has_model(config: ArchitectureConfig) -> bool:
    """Whether a configuration has sizes, itself or in its parts."""
    return _is_model(config) or any(isinstance(value, dict) and _has_model(value) for value in config.values())


def _scale_widths(small: ArchitectureConfig, scale: float) -> None:
    heads = next(small[key] for key in _HEADS if key in small)
    heads = heads[0] if isinstance(heads, list) else heads  # Swin's first stage, which has the hidden size
    hidden_key = next(key for key in _HIDDEN if key in small)
    if "head_dim" in small:
        head_dim = _eighths(small["head_dim"] * scale)
        # Of most models it is head_dim, and stays so; of 27B it is hidden / heads, and stays as it is.
        if small.get("query_pre_attn_scalar") == small["head_dim"]:
            small["query_pre_attn_scalar"] = head_dim
        small["head_dim"] = head_dim
        small[hidden_key] = _eighths(small[hidden_key] * scale)
    else:  # heads divide the width, so scale the width of one head
        small[hidden_key] = heads * _eighths(small[hidden_key] / heads * scale)
    for key in _WIDTHS:
        if small.get(key):
            small[key] = _eighths(small[key] * scale)


def _shorten_layer_types(small: ArchitectureConfig, config: ArchitectureConfig) -> None:
    """Keep the kinds of the last layers: of those that share keys and values, and of those before, two at least."""
    if "layer_types" not in config:
        return
    types, layers, sharing = config["layer_types"], small["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    first = len(types) - sharing
    shared = min(round(sharing * layers / len(types)), layers - 2) if first else layers  # an assistant's all share
    small["layer_types"] = types[first - (layers - shared) : first] + types[len(types) - shared :]
    if sharing:
        small["num_kv_shared_layers"] = shared
    if "activation_sparsity_pattern" in config:
        small["activation_sparsity_pattern"] = config["activation_sparsity_pattern"][:layers]


def _join_parts(small: ArchitectureConfig) -> None:
    """Set the widths, in a model's parts, that must be those of another part."""
    for part, key, other in (("vision_config", "out_hidden_size", "text_config"),):
        if key in small.get(part, {}):
            small[part][key] = small[other]["hidden_size"]
    if "head_dim" in (vision := small.get("vision_config") or {}):  # KerasHub's Gemma 4 puts heads side by side
        vision["hidden_size"] = vision["num_attention_heads"] * vision["head_dim"]
    if "projection_dim" in vision and "image_token_index" in small:  # KerasHub has the embeddings before that token
        text = small["text_config"]
        small["hidden_size"] = small["projection_dim"] = vision["projection_dim"] = text["hidden_size"]
        small["image_token_index"] = text["vocab_size"] - 64
    for part, rows in (("vision_config", 256), ("audio_config", 128)):  # Gemma 3n: the last rows of the vocabulary
        if "vocab_offset" in small.get(part, {}):
            small[part]["vocab_offset"] = small["text_config"]["vocab_size"] - rows
    if "num_centroids" in small:  # each stands for as many tokens
        small["num_centroids"] = math.gcd(small["num_centroids"], small["text_config"]["vocab_size"])
        small["centroid_intermediate_top_k"] = min(small["centroid_intermediate_top_k"], small["num_centroids"])


def _eighths(value: float) -> int:
    """Return the multiple of eight that is nearest to a scaled dim, at least eight."""
    return 8 * max(1, round(value / 8))
