"""Hugging Face names and shapes of an architecture's tensors, from its configuration alone.

A field that the configuration omits has transformers' default. Each family lists its own tensors
(`shardload.families.parts.tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardload.errors import SourceError, UnsupportedError
from shardload.families.parts.tensors import Spec
from shardload.families.registry import model_type_of, model_types
from shardload.hub.config_forms import completed, renamed
from shardload.units import plural

Config = Mapping[str, Any]
MAX_LAYERS, MAX_SIZE, MAX_EXPERTS = 1000, 1 << 24, 1 << 15
"""More than any model has, with the experts of all layers together.

Without a limit, the list for a damaged configuration would fill the memory."""
_LAYERS = ("num_hidden_layers", "n_layer")


def are_listed(config: Config) -> bool:
    """Whether `transformers_tensors` knows the tensors of a configuration's ``model_type``."""
    return model_type_of(config).tensors is not None


def transformers_tensors(config: Config) -> list[Spec]:
    """Return all tensors of a Hugging Face checkpoint with this configuration, in the order of the file.

    Raises:
        UnsupportedError: When the tensors of its ``model_type`` are not known; the message is a clause.
        SourceError: When a size is not a positive number, or heads cannot share keys; the message is a clause.
    """
    kind, known = config.get("model_type"), model_type_of(config)
    if known.tensors is None:
        listed = (name for name, one in model_types().items() if one.tensors is not None)
        raise UnsupportedError(
            f"the tensors of model_type {kind!r:.60} cannot be listed from a configuration, only those of "
            f"{', '.join(sorted(listed))}"
        )
    config = completed(renamed(config))
    _check(config, known.tensor_fields)
    return list(known.tensors(config))


def _check(config: Config, sizes: tuple[str, ...]) -> None:
    optional = [key for key in ("head_dim", "n_inner") if config.get(key) is not None]
    for key in (*sizes, *optional):
        # type(), not isinstance(): True is an int, but no size.
        size, most = config.get(key), MAX_LAYERS if key in _LAYERS else MAX_SIZE
        if type(size) is not int or not 0 < size <= most:
            raise SourceError(
                f"its configuration sets {key}={size!r:.60}, expected a whole number from 1 to {most}. Correct it"
            )
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    if experts * config.get("num_hidden_layers", 0) > MAX_EXPERTS:
        raise SourceError(
            f"its configuration sets {plural(experts, 'expert')} in {plural(config['num_hidden_layers'], 'layer')}, "
            f"expected at most {MAX_EXPERTS} in all layers. Correct it"
        )
    # Each key-value head serves as many query heads as any other.
    if "num_key_value_heads" in sizes and config["num_attention_heads"] % config["num_key_value_heads"]:
        raise SourceError(
            f"its configuration sets num_attention_heads={config['num_attention_heads']}, expected a multiple of "
            f"num_key_value_heads={config['num_key_value_heads']}. Correct them"
        )
    if config.get("add_cross_attention"):
        raise UnsupportedError("its configuration sets add_cross_attention, expected a model without cross-attention")
