"""Look up models in their published sizes (``gemma2_9b``), as Hugging Face configurations, and scale these down.

One configuration is the only source of an architecture: KerasHub's converter makes the Keras model of it, and
`shardload.hub.config_forms` the Hugging Face tensor names and shapes. Values are those of the published
``config.json`` files; a test compares parameter counts with KerasHub's presets.
"""

from __future__ import annotations

import difflib
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
    small = dict(config)
    _scale_widths(small, scale)
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            small[key] = max(2, round(config[key] * scale))
    for key in ("n_positions", "max_position_embeddings", "sliding_window"):
        if config.get(key):
            small[key] = max(64, _eighths(config[key] * scale))
    # An odd vocabulary stays odd: whether a mesh divides it is what makes it interesting.
    small["vocab_size"] = max(512, _eighths(config["vocab_size"] * scale)) + config["vocab_size"] % 8
    return small


def _scale_widths(small: ArchitectureConfig, scale: float) -> None:
    heads = small.get("num_attention_heads") or small["n_head"]
    hidden_key = "hidden_size" if "hidden_size" in small else "n_embd"
    if "head_dim" in small:
        head_dim = _eighths(small["head_dim"] * scale)
        # Of most models it is head_dim, and stays so; of 27B it is hidden / heads, and stays as it is.
        if small.get("query_pre_attn_scalar") == small["head_dim"]:
            small["query_pre_attn_scalar"] = head_dim
        small["head_dim"] = head_dim
        small[hidden_key] = _eighths(small[hidden_key] * scale)
    else:  # heads divide the width, so scale the width of one head
        small[hidden_key] = heads * _eighths(small[hidden_key] / heads * scale)
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if key in small:
            small[key] = _eighths(small[key] * scale)


def _eighths(value: float) -> int:
    """Return the multiple of eight that is nearest to a scaled dim, at least eight."""
    return 8 * max(1, round(value / 8))
