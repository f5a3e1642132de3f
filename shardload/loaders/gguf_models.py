"""Translate GGUF architectures to Hugging Face: tensor names, transformations to undo, and a ``config.json``.

GGUF has one name table for all models (``blk.0.attn_q.weight``); KerasHub's converters want Hugging Face's names
and configuration. shardload has small tables of its own, because the gguf package maps in the other direction and to
several names for each tensor; a test compares them with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.gguf_header import GgufHeader
from shardload.loaders.gguf_rows import Undo

Config = dict[str, Any]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma 2 and 3 have a norm before and after each half of a block."""
_DROPPED = frozenset({"rope_freqs.weight"})
"""Computed from the configuration, not learnt."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One value of ``general.architecture``."""

    block_names: Mapping[str, str]
    config: Callable[[_Values], Config]
    norms_plus_one: bool = False
    permuted: bool = False

    def hf_name(self, name: str, path: str) -> str | None:
        """Return the Hugging Face name of a tensor; ``None`` for one that is not a weight.

        Raises:
            UnsupportedError: When the architecture has no such tensor.
        """
        if name in _DROPPED:
            return None
        stem, _, suffix = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", stem)
        part = _TOP.get(stem) if block is None else self.block_names.get(block[2])
        if part is None or suffix not in {"weight", "bias"}:
            raise UnsupportedError(
                f"{path}: tensor {name!r} has no counterpart in Hugging Face's layout of this architecture "
                "(mixture-of-experts and vision tensors are not supported). Load the safetensors of this model instead"
            )
        return f"model.layers.{int(block[1])}.{part}.{suffix}" if block else f"{part}.{suffix}"

    def undo(self, name: str) -> Undo:
        """Return the transformation to undo for the GGUF tensor ``name``."""
        stem = name.rpartition(".")[0]
        if self.norms_plus_one and stem.endswith("norm"):
            return Undo.MINUS_ONE
        return Undo.UNPERMUTE if self.permuted and stem.endswith(("attn_q", "attn_k")) else Undo.NOTHING


@dataclass(frozen=True, slots=True)
class _Values:
    """Typed access to the key-values of one header."""

    header: GgufHeader
    path: str
    rope_factors: tuple[float, ...] = ()
    """Content of ``rope_freqs.weight``: the factor by which each rotary frequency is slowed down."""

    @property
    def architecture(self) -> str:
        found = self.header.values.get("general.architecture")
        return found if isinstance(found, str) else ""

    def has(self, key: str) -> bool:
        """Whether the key exists under the architecture's prefix."""
        return f"{self.architecture}.{key}" in self.header.values

    def number(self, key: str, default: Any = ...) -> Any:
        """Return a number under the architecture's prefix; per-layer arrays must be uniform."""
        full = f"{self.architecture}.{key}"
        found = self.header.values.get(full, default)
        if isinstance(found, list) and found and len(set(map(repr, found))) == 1:
            found = found[0]
        if found is ...:
            raise SourceError(f"{self.path} should contain the key {full!r}, as every {self.architecture} model does")
        if found is not default and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise UnsupportedError(
                f"{self.path}: {full!r} should be one number for all layers, but is {str(found)[:80]}"
            )
        return shortest(found) if isinstance(found, float) else found

    def count(self, key: str) -> int:
        """Return a positive integer under the architecture's prefix."""
        found = self.number(key)
        if not isinstance(found, int) or not 0 < found < 1 << 31:
            raise SourceError(
                f"{self.path}: '{self.architecture}.{key}' should be a positive integer, but is {found!r}"
            )
        return found

    def rows(self, name: str) -> int | None:
        """Return the length of a tensor's dim 0; ``None`` if the file does not contain the tensor."""
        return next((info.shape[0] for info in self.header.tensors if info.name == name), None)


def shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def architecture(header: GgufHeader, path: str) -> GgufArchitecture:
    """Return the architecture that a header names.

    Raises:
        UnsupportedError: When it is not in `ARCHITECTURES`.
    """
    name = header.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{path} has the architecture {name!r}; GGUF is supported for {', '.join(ARCHITECTURES)}. "
            "Load the safetensors of this model instead"
        )
    return ARCHITECTURES[name]


def config(header: GgufHeader, path: str, *, rope_factors: tuple[float, ...] = ()) -> Config:
    """Return a Hugging Face ``config.json`` that KerasHub's converters accept.

    Raises:
        SourceError: When a key is missing or contradicts the tensors.
        UnsupportedError: When the configuration cannot express the model.
    """
    return architecture(header, path).config(_Values(header, path, rope_factors))


def head_counts(header: GgufHeader, path: str) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads."""
    values = _Values(header, path)
    heads = values.count("attention.head_count")
    return heads, values.count("attention.head_count_kv") if values.has("attention.head_count_kv") else heads


def _base(values: _Values, model_type: str, class_name: str) -> Config:
    heads, kv_heads = head_counts(values.header, values.path)
    hidden = values.count("embedding_length")
    vocabulary = values.rows("token_embd.weight")
    if vocabulary is None:
        raise SourceError(f"{values.path} should contain the tensor 'token_embd.weight', as every model does")
    special = {
        f"{short}_token_id": values.header.values[f"tokenizer.ggml.{long}_token_id"]
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{long}_token_id" in values.header.values
    }
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": values.count("attention.key_length") if values.has("attention.key_length") else hidden // heads,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(values),
        "max_position_embeddings": values.number("context_length", None),
        "tie_word_embeddings": values.rows("output.weight") is None,
        **special,
    }


def _rope_scaling(values: _Values) -> Config | None:
    kind = values.header.values.get(f"{values.architecture}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    found = {"rope_type": kind, "factor": values.number("rope.scaling.factor", 1.0)}
    for key, name in _YARN.items():
        if values.has(f"rope.scaling.{key}"):
            found[name] = values.number(f"rope.scaling.{key}")
    return found


_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""GGUF's names for the parameters of each kind of rotary scaling."""


def _gemma(values: _Values) -> Config:
    return _base(values, "gemma", "GemmaForCausalLM") | {"tie_word_embeddings": True}


def _gemma2(values: _Values) -> Config:
    base = _base(values, "gemma2", "Gemma2ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _attention_scalar(base, largest_layers=46),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
        "sliding_window": values.number("attention.sliding_window", 4096),
    }


def _gemma3(values: _Values) -> Config:
    base = _base(values, "gemma3_text", "Gemma3ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _attention_scalar(base, largest_layers=62),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", None),
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "sliding_window": values.number("attention.sliding_window", 1024),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10000.0),
    }


def _attention_scalar(base: Config, *, largest_layers: int) -> int:
    """Return ``query_pre_attn_scalar``, which GGUF lacks; like llama.cpp, detect the 27B exceptions by layer count."""
    if base["num_hidden_layers"] == largest_layers:
        return int(base["hidden_size"] // base["num_attention_heads"])
    return int(base["head_dim"])


def _llama(values: _Values) -> Config:
    """Build the configuration of Llama or Mistral; GGUF distinguishes them only by keys that only Mistral has."""
    base = _base(values, "llama", "LlamaForCausalLM")
    window = values.number("attention.sliding_window", None)
    if window is not None or base["head_dim"] * base["num_attention_heads"] != base["hidden_size"]:
        return base | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return base | {"rope_scaling": _llama3_scaling(values, base) or base["rope_scaling"]}


def _llama3_scaling(values: _Values, base: Config) -> Config | None:
    """Find the scaling rule of Llama 3.1 and later: GGUF stores only the factors that it produces."""
    if not values.rope_factors:
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": shortest(max(values.rope_factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if 2 * len(values.rope_factors) == base["head_dim"]:
        expected = llama3_factors(scaling, theta=base["rope_theta"], head_dim=base["head_dim"])
    else:
        expected = np.empty(0)
    if len(expected) != len(values.rope_factors) or not np.allclose(expected, values.rope_factors, rtol=1e-4):
        raise UnsupportedError(
            f"{values.path}: 'rope_freqs.weight' does not follow Llama 3's rule, and its configuration cannot be "
            "recovered from GGUF. Load the safetensors of this model instead"
        )
    return scaling


def llama3_factors(scaling: Mapping[str, Any], *, theta: float, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the factors by which Llama 3's rule slows each of ``head_dim // 2`` rotary frequencies."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    with np.errstate(all="ignore"):  # a hostile theta gives NaN, which equals nothing
        wavelengths = 2 * np.pi * np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
        factors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return factors


def _qwen2(values: _Values) -> Config:
    base = _base(values, "qwen2", "Qwen2ForCausalLM")
    return base | {"use_sliding_window": False, "sliding_window": base["max_position_embeddings"]}


def _qwen3(values: _Values) -> Config:
    return _base(values, "qwen3", "Qwen3ForCausalLM") | {"use_sliding_window": False, "sliding_window": None}


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "gemma": GgufArchitecture(_BLOCK, _gemma, norms_plus_one=True),
    "gemma2": GgufArchitecture(_SANDWICH, _gemma2, norms_plus_one=True),
    "gemma3": GgufArchitecture(_SANDWICH, _gemma3, norms_plus_one=True),
    "llama": GgufArchitecture(_BLOCK, _llama, permuted=True),
    "qwen2": GgufArchitecture(_BLOCK, _qwen2),
    "qwen3": GgufArchitecture(_BLOCK, _qwen3),
}
