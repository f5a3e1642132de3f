"""The architectures `shardload synth` can write, as Hugging Face configurations: plain data, nothing imported.

One configuration is the only source of an architecture: KerasHub's converter makes the Keras model of it, and
`shardload.hub.tensors` the Hugging Face tensor names and shapes. Values are those of the published
``config.json`` files; a test compares parameter counts with KerasHub's presets.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

from shardload.errors import SourceNotFoundError

Config = dict[str, Any]


class Dims(NamedTuple):
    """The dims that differ most between the sizes of a family."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


def _decoder(model_type: str, class_name: str, dims: Dims, *, vocab: int, tied: bool = True, **rest: Any) -> Config:
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": vocab,
        "hidden_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "intermediate_size": dims.inner,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        **rest,
    }


def _gemma1(dims: Dims) -> Config:
    return _decoder("gemma", "GemmaForCausalLM", dims, vocab=256000, head_dim=256)


def _gemma2(dims: Dims, *, head_dim: int = 256, scalar: int = 256) -> Config:
    caps: Config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    heads: Config = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    return _decoder("gemma2", "Gemma2ForCausalLM", dims, vocab=256000, **heads, **caps, sliding_window=4096)


def _gemma3(dims: Dims, *, window: int, head_dim: int = 256, scalar: int = 256, factor: float | None = 8.0) -> Config:
    scaling = {"rope_type": "linear", "factor": factor} if factor else None
    heads: Config = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    rest: Config = {**heads, "sliding_window": window, "rope_scaling": scaling}
    return _decoder("gemma3_text", "Gemma3ForCausalLM", dims, vocab=262144, **rest)


def _llama(dims: Dims, *, tied: bool = False, factor: float | None = None) -> Config:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rest: Config = {"rope_theta": 500000.0, "rope_scaling": scaling if factor else None, "rms_norm_eps": 1e-5}
    return _decoder("llama", "LlamaForCausalLM", dims, vocab=128256, tied=tied, **rest)


def _mistral(dims: Dims) -> Config:
    rest: Config = {"rope_theta": 10000.0, "sliding_window": 4096, "rms_norm_eps": 1e-5}
    return _decoder("mistral", "MistralForCausalLM", dims, vocab=32000, tied=False, **rest)


def _qwen2(dims: Dims, *, vocab: int, tied: bool) -> Config:
    rest: Config = {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768}
    return _decoder("qwen2", "Qwen2ForCausalLM", dims, vocab=vocab, tied=tied, **rest)


def _qwen3(dims: Dims, *, tied: bool) -> Config:
    rest: Config = {"head_dim": 128, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": None}
    return _decoder("qwen3", "Qwen3ForCausalLM", dims, vocab=151936, tied=tied, **rest)


def _gpt2(*, hidden: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
    }


def _bert(*, hidden: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }


# Gemma 2 and 3 of 27B scale queries by hidden / heads instead of head_dim. Gemma 3 of 4B and more stretches RoPE by 8,
# to a context of 128 K tokens.
ARCHITECTURES: dict[str, Config] = {
    "gemma_2b": _gemma1(Dims(2048, 18, 8, 1, 16384)),
    "gemma_7b": _gemma1(Dims(3072, 28, 16, 16, 24576)),
    "gemma2_2b": _gemma2(Dims(2304, 26, 8, 4, 9216)),
    "gemma2_9b": _gemma2(Dims(3584, 42, 16, 8, 14336)),
    "gemma2_27b": _gemma2(Dims(4608, 46, 32, 16, 36864), head_dim=128, scalar=144),
    "gemma3_270m": _gemma3(Dims(640, 18, 4, 1, 2048), window=512, factor=None),
    "gemma3_1b": _gemma3(Dims(1152, 26, 4, 1, 6912), window=512, factor=None),
    "gemma3_4b": _gemma3(Dims(2560, 34, 8, 4, 10240), window=1024),
    "gemma3_12b": _gemma3(Dims(3840, 48, 16, 8, 15360), window=1024),
    "gemma3_27b": _gemma3(Dims(5376, 62, 32, 16, 21504), window=1024, head_dim=128, scalar=168),
    "llama3_8b": _llama(Dims(4096, 32, 32, 8, 14336)),
    "llama3_70b": _llama(Dims(8192, 80, 64, 8, 28672)),
    "llama3.1_8b": _llama(Dims(4096, 32, 32, 8, 14336), factor=8.0),
    "llama3.1_70b": _llama(Dims(8192, 80, 64, 8, 28672), factor=8.0),
    "llama3.1_405b": _llama(Dims(16384, 126, 128, 8, 53248), factor=8.0),
    "llama3.2_1b": _llama(Dims(2048, 16, 32, 8, 8192), tied=True, factor=32.0),
    "llama3.2_3b": _llama(Dims(3072, 28, 24, 8, 8192), tied=True, factor=32.0),
    "mistral_7b": _mistral(Dims(4096, 32, 32, 8, 14336)),
    "qwen2.5_0.5b": _qwen2(Dims(896, 24, 14, 2, 4864), vocab=151936, tied=True),
    "qwen2.5_7b": _qwen2(Dims(3584, 28, 28, 4, 18944), vocab=152064, tied=False),
    "qwen2.5_32b": _qwen2(Dims(5120, 64, 40, 8, 27648), vocab=152064, tied=False),
    "qwen2.5_72b": _qwen2(Dims(8192, 80, 64, 8, 29568), vocab=152064, tied=False),
    "qwen3_0.6b": _qwen3(Dims(1024, 28, 16, 8, 3072), tied=True),
    "qwen3_8b": _qwen3(Dims(4096, 36, 32, 8, 12288), tied=False),
    "qwen3_14b": _qwen3(Dims(5120, 40, 40, 8, 17408), tied=False),
    "qwen3_32b": _qwen3(Dims(5120, 64, 64, 8, 25600), tied=False),
    "gpt2_base": _gpt2(hidden=768, layers=12, heads=12),
    "gpt2_extra_large": _gpt2(hidden=1600, layers=48, heads=25),
    "bert_base": _bert(hidden=768, layers=12, heads=12),
    "bert_large": _bert(hidden=1024, layers=24, heads=16),
}

ALIASES = {"gemma2_7b": "gemma2_9b", "gpt2": "gpt2_base", "llama3_405b": "llama3.1_405b"}
"""Other names for an architecture. Gemma 2 was released at 2B, 9B and 27B, and Llama 3 has 405B as 3.1 only."""


def lookup(name: str) -> tuple[str, Config]:
    """Return an architecture's canonical name and configuration; KerasHub's ``_en`` ending is optional.

    Raises:
        SourceNotFoundError: When the name is unknown; the message lists the known names.
    """
    for candidate in (name, name.removesuffix("_en")):
        found = ALIASES.get(candidate, candidate)
        if found in ARCHITECTURES:
            return found, ARCHITECTURES[found]
    close = difflib.get_close_matches(name, ARCHITECTURES, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise SourceNotFoundError(f"Unknown architecture {name!r}.{hint} Available: {', '.join(ARCHITECTURES)}")


def scaled(config: Config, scale: float) -> Config:
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


def _scale_widths(small: Config, scale: float) -> None:
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
    if "intermediate_size" in small:
        small["intermediate_size"] = _eighths(small["intermediate_size"] * scale)


def _eighths(value: float) -> int:
    """Return the nearest multiple of eight, at least eight."""
    return 8 * max(1, round(value / 8))
