"""Typed access to the key-values of a GGUF header, and functions that make ``config.json`` entries from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.families.parts import rope
from shardload.units import plural

_Config = dict[str, Any]
_INSTEAD = "Convert the model to GGUF again, or load its safetensors instead"


@dataclass(frozen=True, slots=True)
class GgufValues:
    """The key-values of one GGUF header, read with checks of their types; errors name the file and the key."""

    entries: Mapping[str, Any]
    """Full name of a key (``llama.block_count``) → its value."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name of a tensor → its shape, outermost dim first."""
    path: str
    rope_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Name of a tensor (``rope_freqs``) → divisors of the rotary frequencies, one for each pair of features."""

    @property
    def architecture(self) -> str:
        """Name of the architecture (``general.architecture``); empty if the file has none."""
        found = self.entries.get("general.architecture")
        return found if isinstance(found, str) else ""

    def has(self, key: str) -> bool:
        """Whether the header contains ``ARCHITECTURE.key``, such as ``llama.block_count``."""
        return f"{self.architecture}.{key}" in self.entries

    def number(self, key: str, default: Any = ...) -> Any:
        """Return the number at ``ARCHITECTURE.key``; raise if the key is missing and there is no ``default``.

        A list of the same number for every layer counts as that number.
        """
        full = f"{self.architecture}.{key}"
        found = self.entries.get(full, default)
        # Compared as text: 1 and True differ, and NaN equals itself.
        if isinstance(found, list) and found and len(set(map(repr, found))) == 1:
            found = found[0]
        # `...` marks a key without default, as `None` is a default.
        if found is ...:
            raise SourceError(f"{self.path} should contain the key {full!r}, which its model needs. {_INSTEAD}")
        if found is not default and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise UnsupportedError(
                f"{self.path}: {full!r} should be one number for all layers, but is {str(found)[:80]}. {_INSTEAD}"
            )
        return shortest(found) if isinstance(found, float) else found

    def count(self, key: str) -> int:
        """Return the positive integer at ``ARCHITECTURE.key``."""
        found = self.number(key)
        if not isinstance(found, int) or not 0 < found < 1 << 31:
            raise SourceError(
                f"{self.path}: '{self.architecture}.{key}' should be a positive integer, but is {found!r}. {_INSTEAD}"
            )
        return found

    def each(self, key: str, layers: int) -> list[int]:
        """Return one integer per layer from ``ARCHITECTURE.key``, which is a list or one integer for all layers."""
        found = self.entries.get(f"{self.architecture}.{key}")
        if not isinstance(found, list):
            return [self.count(key)] * layers
        if len(found) != layers or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in found):
            raise SourceError(
                f"{self.path}: '{self.architecture}.{key}' should have one integer for each of "
                f"{plural(layers, 'layer')}, but is {str(found)[:80]}. {_INSTEAD}"
            )
        # A pattern may be a list of booleans.
        return [int(one) for one in found]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; ``None`` if the file does not contain the tensor."""
        return self.shapes.get(name)

    def rows(self, name: str) -> int | None:
        """Return the length of a tensor's dim 0; ``None`` if the file does not contain the tensor."""
        found = self.shape(name)
        return None if found is None else found[0]


def shortest(value: float) -> float:
    """Return a float32 as a ``config.json`` has it, with the fewest digits: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


# ---- entries of configurations -------------------------------------------------------------------


def head_counts(values: GgufValues) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads."""
    heads = values.count("attention.head_count")
    return heads, values.count("attention.head_count_kv") if values.has("attention.head_count_kv") else heads


def model_entries(values: GgufValues, model_type: str, class_name: str) -> _Config:
    """Return the ``config.json`` entries of any model: its type, class, size of the vocabulary and special tokens."""
    # Rows of the embedding, not the number of tokens: an embedding may be padded beyond its vocabulary.
    vocabulary = values.rows("token_embd.weight")
    if vocabulary is None:
        raise SourceError(f"{values.path} should contain the tensor 'token_embd.weight', its embedding. {_INSTEAD}")
    special = {
        f"{short}_token_id": values.entries[f"tokenizer.ggml.{long}_token_id"]
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{long}_token_id" in values.entries
    }
    return {"model_type": model_type, "architectures": [class_name], "vocab_size": vocabulary, **special}


def decoder_entries(values: GgufValues, model_type: str, class_name: str) -> _Config:
    """Return the ``config.json`` entries of a decoder with rotary positions and RMS norms, read from a GGUF header."""
    heads, kv_heads = head_counts(values)
    hidden = values.count("embedding_length")
    return model_entries(values, model_type, class_name) | {
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        # llama.cpp's default.
        "head_dim": values.count("attention.key_length") if values.has("attention.key_length") else hidden // heads,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(values),
        "max_position_embeddings": values.number("context_length", None),
        # Without an output matrix llama.cpp uses the embedding.
        "tie_word_embeddings": values.rows("output.weight") is None,
    }


def _rope_scaling(values: GgufValues) -> _Config | None:
    kind = values.entries.get(f"{values.architecture}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    known = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = {
        name: values.number(f"rope.scaling.{key}") for key, name in known.items() if values.has(f"rope.scaling.{key}")
    }
    return {"rope_type": kind, "factor": values.number("rope.scaling.factor", 1.0), **found}


def with_llama3_scaling(values: GgufValues, base: _Config) -> _Config:
    """Return a configuration with Llama 3.1's scaling of rotary positions, if GGUF has factors; refuse other rules."""
    factors = values.rope_factors.get("rope_freqs", ())
    if not factors:
        return base
    scaling = {
        "rope_type": "llama3",
        # The slowest frequencies get the whole factor. The other three numbers are those of all Llama 3 models;
        # the comparison below shows whether they are this one's.
        "factor": shortest(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, head_dim = base["rope_theta"], base["head_dim"]
    configs = ({"rope_theta": theta}, {"rope_theta": theta, "rope_scaling": scaling})
    plain, slowed = (rope.rotation(one, rope.FULL, rope.Rotary(theta), head_dim=head_dim).angles for one in configs)
    assert plain is not None and slowed is not None
    with np.errstate(all="ignore"):  # a hostile theta gives NaN, which equals nothing
        expected = plain / slowed
    if len(expected) != len(factors) or not np.allclose(expected, factors, rtol=1e-4):
        raise UnsupportedError(
            f"{values.path}: 'rope_freqs.weight' does not follow Llama 3's rule, and its configuration cannot be "
            "recovered from GGUF. Load the safetensors of this model instead"
        )
    return base | {"rope_scaling": scaling}


def expert_entries(values: GgufValues) -> _Config:
    """Return the ``config.json`` entries about experts of a mixture, except ``norm_topk_prob``, which GGUF omits."""
    stacked = values.shape("blk.0.ffn_up_exps.weight") or (0, 0)
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.number("expert_feed_forward_length", stacked[1] if len(stacked) > 1 else 0),
        "decoder_sparse_step": 1,
    }
