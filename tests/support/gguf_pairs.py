"""The same tiny model twice: as a GGUF file, and as the Hugging Face folder that file must load like.

The folder is the reference. What llama.cpp's converter does to a model (names, Gemma's norms + 1, Llama's
interleaved query and key rows) is done here with the gguf package's own name map and by code of the test's own;
the folder holds ``gguf.dequantize`` of the very bytes in the file, put back in Hugging Face's order.
"""

from __future__ import annotations

import json
import math
import struct

import gguf
import ml_dtypes
import numpy as np
from checkpoints import finish_gguf
from safetensors.numpy import save_file

HIDDEN, INNER, VOCABULARY, LAYERS = 256, 512, 96, 2
"""K-quants come in blocks of 256 elements of a row."""
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K_M")
"""How matrices are stored; vectors are F32, as in all files. Q4_K_M is a mix: Q4_K, and Q6_K where it matters most."""

COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SOFT_CAPS = {"attn_logit_softcapping": 45.0, "final_logit_softcapping": 25.0, "sliding_window": 16}
MODELS = {
    "gemma": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    "gemma2": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "query_pre_attn_scalar": 32},
        **SOFT_CAPS,
    },
    "gemma3_text": {
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "query_pre_attn_scalar": 128},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 16},
    },
    "llama": {
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "tie_word_embeddings": False},
        **{"rope_theta": 500000.0},
    },
    "mistral": {
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
        **{"sliding_window": 16},
    },
    "qwen2": {
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
        **{"use_sliding_window": False, "sliding_window": 64},
    },
    "qwen3": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": None},
        **{"use_sliding_window": False, "attention_bias": False},
    },
}
"""By Hugging Face's ``model_type``: what differs from `COMMON`."""
BACKBONES = {
    "gemma": "GemmaBackbone", "gemma2": "GemmaBackbone", "gemma3_text": "Gemma3Backbone", "llama": "Llama3Backbone",
    "mistral": "MistralBackbone", "qwen2": "QwenBackbone", "qwen3": "Qwen3Backbone",
}  # fmt: skip
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
"""What GGUF calls a ``model_type``, where that differs."""


def config_of(model_type):
    return {**COMMON, **MODELS[model_type], "model_type": model_type, "architectures": [""]}


def shapes(config):
    """Every tensor of a model under Hugging Face's name."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    query, pairs = (config[f"num_{k}_heads"] * config["head_dim"] for k in ("attention", "key_value"))
    block = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (pairs, hidden),
        "self_attn.v_proj.weight": (pairs, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if kind in {"gemma2", "gemma3_text"}:
        block |= {f"{when}_feedforward_layernorm.weight": (hidden,) for when in ("pre", "post")}
    if kind in {"gemma3_text", "qwen3"}:
        block |= {f"self_attn.{which}_norm.weight": (config["head_dim"],) for which in "qk"}
    if kind == "qwen2":
        block |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", query), ("k", pairs), ("v", pairs))}
    vocabulary = (config["vocab_size"], hidden)
    found = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": (hidden,)}
    blocks = range(config["num_hidden_layers"])
    found |= {f"model.layers.{i}.{name}": shape for i in blocks for name, shape in block.items()}
    return found if config["tie_word_embeddings"] else {**found, "lm_head.weight": vocabulary}


def write(directory, model_type, kind, **options):
    """A pair of ``model.gguf`` and the folder ``hf``, in ``directory``."""
    rng = np.random.default_rng(len(model_type) * 100 + KINDS.index(kind))
    architecture = ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(str(directory / "model.gguf"), architecture, **options)
    describe(writer, config_of(model_type))
    tensors = {}
    for name, shape in shapes(config_of(model_type)).items():
        stored, qtype, tensors[name] = stored_and_reference(rng, model_type, kind, name, shape)
        writer.add_tensor(gguf_name(architecture, name), stored, raw_dtype=qtype)
    finish_gguf(writer)
    folder = directory / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(model_type)))
    save_file(tensors, folder / "model.safetensors")
    return directory / "model.gguf", folder


def describe(writer, config):
    """The keys llama.cpp's converter writes for these architectures."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def gguf_name(architecture, name):
    arch = next(a for a, label in gguf.MODEL_ARCH_NAMES.items() if label == architecture)
    found = gguf.get_tensor_name_map(arch, 18).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return found


def stored_and_reference(rng, model_type, kind, name, shape):
    """An array as the file keeps it, its type where it is raw bytes, and what it means in the folder."""
    if len(shape) == 1:
        value = determined(rng.normal(size=shape) / 3)
        plus_one = model_type.startswith("gemma") and name.endswith("norm.weight")
        stored = value + np.float32(1) if plus_one else value
        return permuted(model_type, name, stored), None, value
    qtype = gguf.GGMLQuantizationType[mixed(name) if kind == "Q4_K_M" else kind]
    stored = k_quants(rng, shape, qtype) if kind == "Q4_K_M" else quantised(rng, model_type, name, shape, qtype)
    return stored, qtype, restored(model_type, name, gguf.dequantize(stored, qtype).reshape(shape))


def determined(value):
    """bfloat16 values that float32(w + 1) still determines: smaller ones share their sum with a neighbour."""
    return np.where(np.abs(value) < 2.0**-15, 0, value).astype(ml_dtypes.bfloat16).astype(np.float32)


def mixed(name):
    return "Q6_K" if any(part in name for part in ("embed_tokens", "v_proj", "down_proj")) else "Q4_K"


def quantised(rng, model_type, name, shape, qtype):
    value = (rng.normal(size=shape) / 8).astype(np.float32)
    return gguf.quantize(permuted(model_type, name, value), qtype)


def k_quants(rng, shape, qtype):
    """The gguf package decodes K-quants and cannot make them: any bytes will do, with scales that are finite."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng.integers(0, 256, (shape[0], shape[1] // elements, nbytes), np.uint8)
    scales = slice(0, 4) if qtype == gguf.GGMLQuantizationType.Q4_K else slice(nbytes - 2, nbytes)
    count = scales.stop - scales.start
    finite = (rng.normal(size=(*raw.shape[:2], count // 2)) / 1000).astype(np.float16)
    raw[..., scales] = finite.view(np.uint8).reshape(*raw.shape[:2], count)
    return raw.reshape(shape[0], -1)


def heads_of(model_type, name):
    """Heads whose rows llama.cpp interleaves in this tensor, or none."""
    if ARCHITECTURES.get(model_type, model_type) != "llama":
        return None
    config = config_of(model_type)
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])


def permuted(model_type, name, value):
    """As llama.cpp's converter does it."""
    if (heads := heads_of(model_type, name)) is None:
        return value
    split = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(value.shape))


def restored(model_type, name, value):
    """Row by row: the two rows of a rotary pair go back to the two halves of their head."""
    if (heads := heads_of(model_type, name)) is None:
        return value
    size = value.shape[0] // heads
    found = np.empty_like(value)
    for head in range(heads):
        for i in range(size // 2):
            found[head * size + i] = value[head * size + 2 * i]
            found[head * size + size // 2 + i] = value[head * size + 2 * i + 1]
    return found


REAL = {
    **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True},
    **{"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
    **{"sliding_window": 512, "attn_logit_softcapping": None, "final_logit_softcapping": None},
}
"""What Google's ``config.json`` of Gemma 3 270M says."""


def dequantised(file, folder):
    """The Hugging Face folder, in float32, of the real Gemma 3 270M; as the gguf package reads and decodes it."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = {hf: gguf_name("gemma3", hf) for hf in shapes(REAL)}
    assert set(names.values()) == set(tensors)
    header, end = {}, 0
    for hf, shape in shapes(REAL).items():
        start, end = end, end + 4 * math.prod(shape)
        header[hf] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for hf, name in names.items():
            value = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
            if hf.endswith("norm.weight"):  # bfloat16 when 1 was added
                value = (value - np.float32(1)).astype(ml_dtypes.bfloat16).astype(np.float32)
            out.write(np.ascontiguousarray(value, np.float32).data)
    (folder / "config.json").write_text(json.dumps(REAL))
    return folder
