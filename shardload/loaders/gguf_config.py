"""A Hugging Face ``config.json`` from the key-values of a GGUF header, one function for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.gguf_header import GgufHeader
from shardload.loaders.gguf_values import Config, Values, shortest
from shardload.units import plural


def head_counts(header: GgufHeader, path: str) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads."""
    values = Values(header, path)
    heads = values.count("attention.head_count")
    return heads, values.count("attention.head_count_kv") if values.has("attention.head_count_kv") else heads


def _model(values: Values, model_type: str, class_name: str) -> Config:
    """Return the entries that every configuration has."""
    # Rows of the embedding, not the number of tokens: an embedding may be padded beyond its vocabulary.
    vocabulary = values.rows("token_embd.weight")
    if vocabulary is None:
        raise SourceError(f"{values.path} should contain the tensor 'token_embd.weight', as every model does")
    special = {
        f"{short}_token_id": values.header.values[f"tokenizer.ggml.{long}_token_id"]
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{long}_token_id" in values.header.values
    }
    return {"model_type": model_type, "architectures": [class_name], "vocab_size": vocabulary, **special}


def _base(values: Values, model_type: str, class_name: str) -> Config:
    """Return the entries of a decoder with rotary positions and RMS norms."""
    heads, kv_heads = head_counts(values.header, values.path)
    hidden = values.count("embedding_length")
    return _model(values, model_type, class_name) | {
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


def _rope_scaling(values: Values) -> Config | None:
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


def _gemma(values: Values) -> Config:
    return _base(values, "gemma", "GemmaForCausalLM") | {"tie_word_embeddings": True}


def _gemma2(values: Values) -> Config:
    base = _base(values, "gemma2", "Gemma2ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _attention_scalar(base, largest_layers=46),
        # Files may omit these three keys; the values are llama.cpp's defaults.
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
        "sliding_window": values.number("attention.sliding_window", 4096),
    }


def _gemma3(values: Values) -> Config:
    base = _base(values, "gemma3_text", "Gemma3ForCausalLM")
    return base | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _attention_scalar(base, largest_layers=62),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", None),
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "sliding_window": values.number("attention.sliding_window", 1024),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10000.0),
    }


def _gemma4(values: Values) -> Config:
    """Build the text model's configuration; sliding and full attention differ in heads, their size, and rotation."""
    layers = values.count("block_count")
    # Settings of each layer: Hugging Face's fields are read off the first layer of either kind.
    slides = values.each("attention.sliding_window_pattern", layers)
    inner = values.each("feed_forward_length", layers)
    shared = values.each("attention.head_count_kv", layers)
    full = next((i for i, one in enumerate(slides) if not one), layers - 1)
    sliding = next((i for i, one in enumerate(slides) if one), 0)
    width = values.count("attention.key_length")
    turned = {"rope_type": "proportional", "rope_theta": values.number("rope.freq_base", 1e6)}
    turned |= {"partial_rotary_factor": _rotated_part(values, width)}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 1e4)}
    experts = values.number("expert_count", 0)
    return _model(values, "gemma4_text", "Gemma4ForCausalLM") | {
        "hidden_size": values.count("embedding_length"),
        "intermediate_size": inner[0],
        # Only the last layers, which share keys and values, can be wider.
        "use_double_wide_mlp": inner[-1] != inner[0],
        "num_hidden_layers": layers,
        "num_attention_heads": values.count("attention.head_count"),
        "num_key_value_heads": shared[sliding],
        "num_global_key_value_heads": None if shared[full] == shared[sliding] else shared[full],
        # Where keys serve as values, layers with full attention store no matrix for values.
        "attention_k_eq_v": values.rows(f"blk.{full}.attn_v.weight") is None,
        "num_kv_shared_layers": values.number("attention.shared_kv_layers", 0),
        "head_dim": values.number("attention.key_length_swa", width),
        "global_head_dim": width,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": values.number("attention.sliding_window", 512),
        "rope_parameters": {"full_attention": turned, "sliding_attention": local},
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.number("context_length", None),
        "hidden_size_per_layer_input": values.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": values.rows("per_layer_token_embd.weight") or 0,
        "final_logit_softcapping": values.number("final_logit_softcapping", None),
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": values.number("expert_used_count", None),
        "moe_intermediate_size": values.number("expert_feed_forward_length", None),
        "tie_word_embeddings": True,
    }


def _rotated_part(values: Values, width: int) -> float:
    """Return which part of a head rotates: the factor is 1 for a pair of elements that does, else 1e30."""
    factors = values.rope_factors.get("rope_freqs", ())
    if not factors:
        return 1.0
    rotated = factors.count(1.0)
    in_order = factors[:rotated] == (1.0,) * rotated and all(one > 1e29 for one in factors[rotated:])
    if 2 * len(factors) != width or not in_order:
        raise UnsupportedError(
            f"{values.path}: 'rope_freqs.weight' should have {plural(width // 2, 'number')}, 1 for the first pairs "
            f"of a head and 1e30 for the others, but has {len(factors)}: {str(factors)[:80]}. Load the safetensors "
            "of this model instead"
        )
    return 2 * rotated / width


def _attention_scalar(base: Config, *, largest_layers: int) -> int:
    """Return ``query_pre_attn_scalar``, which GGUF lacks; like llama.cpp, detect the 27B exceptions by layer count."""
    if base["num_hidden_layers"] == largest_layers:
        return int(base["hidden_size"] // base["num_attention_heads"])
    return int(base["head_dim"])


def _llama(values: Values) -> Config:
    """Build the configuration of Llama, Mistral or Mixtral; GGUF tells them apart only by keys that one of them has."""
    base = _with_llama3_scaling(values, _base(values, "llama", "LlamaForCausalLM"))
    if values.number("expert_count", 0):
        return _mixtral(values, base)
    window = values.number("attention.sliding_window", None)
    # Of the two, only Mistral has a window, or (Nemo) heads that do not add up to the hidden size.
    if window is not None or base["head_dim"] * base["num_attention_heads"] != base["hidden_size"]:
        return base | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return base


def _mixtral(values: Values, base: Config) -> Config:
    return base | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "sliding_window": values.number("attention.sliding_window", None),
    }


def _with_llama3_scaling(values: Values, base: Config) -> Config:
    """Add Llama 3's scaling to a configuration; a model whose KerasHub class has none is refused when it is built."""
    return base | {"rope_scaling": _llama3_scaling(values, base) or base["rope_scaling"]}


def _llama3_scaling(values: Values, base: Config) -> Config | None:
    """Find the scaling rule of Llama 3.1 and later: GGUF stores only the factors that it produces."""
    factors = values.rope_factors.get("rope_freqs", ())
    if not factors:
        return None
    scaling = {
        "rope_type": "llama3",
        # The slowest frequencies get the whole factor. The other three numbers are those of all Llama 3 models;
        # the comparison below shows whether they are this one's.
        "factor": shortest(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if 2 * len(factors) == base["head_dim"]:
        expected = llama3_factors(scaling, theta=base["rope_theta"], head_dim=base["head_dim"])
    else:
        expected = np.empty(0)
    if len(expected) != len(factors) or not np.allclose(expected, factors, rtol=1e-4):
        raise UnsupportedError(
            f"{values.path}: 'rope_freqs.weight' does not follow Llama 3's rule, and its configuration cannot be "
            "recovered from GGUF. Load the safetensors of this model instead"
        )
    return scaling


def llama3_factors(scaling: Mapping[str, Any], *, theta: float, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the factors by which Llama 3's rule slows each of ``head_dim // 2`` rotary frequencies."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    # A hostile theta gives NaN, which equals nothing.
    with np.errstate(all="ignore"):
        wavelengths = 2 * np.pi * np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
        factors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return factors


def _qwen2(values: Values) -> Config:
    base = _base(values, "qwen2", "Qwen2ForCausalLM")
    # KerasHub's converter also reads the size of a window that is off.
    return base | {"use_sliding_window": False, "sliding_window": base["max_position_embeddings"]}


def _qwen3(values: Values) -> Config:
    return _base(values, "qwen3", "Qwen3ForCausalLM") | {"use_sliding_window": False, "sliding_window": None}


def _smollm3(values: Values) -> Config:
    """Build the configuration; that every fourth layer has no rotary positions is known to llama.cpp, not to GGUF."""
    base = _with_llama3_scaling(values, _base(values, "smollm3", "SmolLM3ForCausalLM"))
    return base | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _qwen2_moe(values: Values) -> Config:
    base = _base(values, "qwen2_moe", "Qwen2MoeForCausalLM") | _experts(values)
    shared = values.shape("blk.0.ffn_up_shexp.weight") or (0, 0)
    return base | {
        "shared_expert_intermediate_size": values.number("expert_shared_feed_forward_length", shared[0]),
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "sliding_window": base["max_position_embeddings"],
    }


def _qwen3_moe(values: Values) -> Config:
    base = _base(values, "qwen3_moe", "Qwen3MoeForCausalLM") | _experts(values)
    return base | {"norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None}


def _experts(values: Values) -> Config:
    """Return the entries of a mixture; whether the router's weights are normalised, llama.cpp knows by architecture."""
    stacked = values.shape("blk.0.ffn_up_exps.weight") or (0, 0)
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.number("expert_feed_forward_length", stacked[1] if len(stacked) > 1 else 0),
        "decoder_sparse_step": 1,
    }


def _gpt_oss(values: Values) -> Config:
    base = _base(values, "gpt_oss", "GptOssForCausalLM")
    # YaRN's defaults, which files may omit, and `truncate` as in the configuration that OpenAI released.
    turns = {"beta_fast": 32.0, "beta_slow": 1.0} | (base["rope_scaling"] or {}) | {"truncate": False}
    return base | {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "sliding_window": values.count("attention.sliding_window"),
        "rope_scaling": turns if base["rope_scaling"] else {"rope_type": "default"},
    }


def _gpt2(values: Values) -> Config:
    return _model(values, "gpt2", "GPT2LMHeadModel") | {
        "n_embd": values.count("embedding_length"),
        "n_inner": values.count("feed_forward_length"),
        "n_layer": values.count("block_count"),
        "n_head": values.count("attention.head_count"),
        "n_positions": values.count("context_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def _phi3(values: Values) -> Config:
    base = _base(values, "phi3", "Phi3ForCausalLM")
    original = values.number("rope.scaling.original_context_length", base["max_position_embeddings"])
    turned = values.number("rope.dimension_count", base["head_dim"])
    found = base | {
        # 0 means Phi-4, which has none.
        "sliding_window": values.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": turned / base["head_dim"],
    }
    return found | ({"rope_scaling": _longrope(values)} if values.rope_factors else {})


def _longrope(values: Values) -> Config:
    """Return the scaling of a Phi-3 model for long texts: one list of factors for short texts, one for long texts."""
    lists = {which: values.rope_factors.get(f"rope_factors_{which}") for which in ("short", "long")}
    found = {f"{which}_factor": list(map(shortest, factors)) for which, factors in lists.items() if factors}
    if len(found) != 2:
        raise SourceError(
            f"{values.path} should contain 'rope_factors_short.weight' and 'rope_factors_long.weight', but contains "
            "only one of them. Download the file again"
        )
    return {"rope_type": "longrope"} | found


def _bloom(values: Values) -> Config:
    return _model(values, "bloom", "BloomForCausalLM") | {
        "hidden_size": values.count("embedding_length"),
        "n_layer": values.count("block_count"),
        "n_head": values.count("attention.head_count"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": True,
    }


def _gemma_embedding(values: Values) -> Config:
    return _gemma3(values) | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


def bert_kind(values: Values) -> str:
    """Return the ``model_type`` of a file of the architecture ``bert``: the tokenizer and the tensors tell."""
    tokenizer = values.header.values.get("tokenizer.ggml.model")
    if tokenizer in ("t5", "gpt2"):
        return "xlm-roberta" if tokenizer == "t5" else "roberta"
    return "bert" if values.rows("token_types.weight") is not None else "distilbert"


def _bert(values: Values) -> Config:
    kind = bert_kind(values)
    epsilon = values.number("attention.layer_norm_epsilon")
    layers, heads = values.count("block_count"), values.count("attention.head_count")
    hidden, inner = values.count("embedding_length"), values.count("feed_forward_length")
    positions = values.rows("position_embd.weight") or values.count("context_length")
    if kind == "distilbert":
        # KerasHub's class has no argument for it.
        if epsilon != 1e-12:
            raise UnsupportedError(
                f"{values.path}: layer_norm_epsilon is {epsilon}, expected 1e-12, as in every DistilBERT"
            )
        sizes = {"dim": hidden, "hidden_dim": inner, "n_layers": layers, "n_heads": heads, "activation": "gelu"}
        return _model(values, kind, "DistilBertModel") | sizes | {"max_position_embeddings": positions}
    classes = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
    return _model(values, kind, classes[kind]) | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # GGUF leaves out RoBERTa's first two rows, which are padding.
        "max_position_embeddings": positions + (0 if kind == "bert" else 2),
        "type_vocab_size": values.rows("token_types.weight") or 1,
        "layer_norm_eps": epsilon,
        "hidden_act": "gelu",
    }


CONFIGS: Mapping[str, Callable[[Values], Config]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "phi3": _phi3,
    "bloom": _bloom,
    "gemma-embedding": _gemma_embedding,
    "bert": _bert,
}
"""By ``general.architecture``."""
