"""A Hugging Face folder as a GGUF file, as llama.cpp's ``convert_hf_to_gguf.py`` makes it.

Written from that script and not from the loader: names come from the gguf package's own table, key-values from its
writer, and what the script does to tensors (permutations, transposes, stacks of experts) is done here with NumPy.
"""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
from checkpoints import finish_gguf
from safetensors.numpy import load_file, save_file

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "roberta": "bert", "xlm-roberta": "bert",
    "distilbert": "bert", "gemma4_text": "gemma4", "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
"""``model_type`` → ``general.architecture``, where they differ."""
_BERTS = ("bert", "roberta", "xlm-roberta", "distilbert")
_LLAMA = ("llama", "mistral", "mixtral", "smollm3")


def write(folder, path, *, kind="F16", **options):
    """Write the model of a folder; matrices as ``kind``, vectors as F32, as the script does."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    if config.get("use_bidirectional_attention"):
        architecture = "gemma-embedding"
    writer = gguf.GGUFWriter(str(path), architecture, **options)
    describe(writer, config)
    add_extra_tensors(writer, config)
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, value in sorted(modified(config, tensors_of(folder))):
        found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        stored, qtype = (value, None) if name.endswith("bias") else _stored(value, kind)
        writer.add_tensor(found, stored, raw_dtype=qtype)
    finish_gguf(writer)
    return path


def tensors_of(folder):
    """Every tensor of a folder, in float32."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {name: value.astype(np.float32) for name, value in load_file(path).items()}
    return found


def requantise(folder, kind):
    """Replace the values of a folder by those that a file of this kind has."""
    config, found = json.loads((folder / "config.json").read_text()), {}
    for name, value in tensors_of(folder).items():
        turned = _is_transposed(config["model_type"], name) and value.ndim > 1
        if name.endswith("bias"):
            found[name] = value
            continue
        stored, qtype = _stored(np.ascontiguousarray(value.swapaxes(-1, -2)) if turned else value, kind)
        read = stored.astype(np.float32) if qtype is None else gguf.dequantize(stored, qtype)
        found[name] = np.ascontiguousarray(read.swapaxes(-1, -2) if turned else read)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(found, folder / "model.safetensors")


def _stored(value, kind):
    """As the file has it, and its type where that is raw bytes; rows that do not fill blocks stay in float16."""
    if value.ndim == 1:
        return value, None
    if kind == "F16" or value.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        return value.astype(np.float16), None
    return gguf.quantize(value, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind]


def describe(writer, config):
    """The key-values of ``TextModel.set_gguf_parameters`` and of the classes of these architectures."""

    def first(*keys):
        return next((config[key] for key in keys if config.get(key) is not None), None)

    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    hidden = first("hidden_size", "n_embd", "dim")
    values = {
        "block_count": first("num_hidden_layers", "n_layer", "n_layers"),
        "context_length": first("max_position_embeddings", "n_positions"),
        "embedding_length": hidden,
        "feed_forward_length": first("intermediate_size", "n_inner", "hidden_dim") or 4 * hidden,
        "head_count": first("num_attention_heads", "n_head", "n_heads"),
        "head_count_kv": config.get("num_key_value_heads"),
        "rope_freq_base": rope.get("rope_theta") or config.get("rope_theta"),
        "rope_freq_base_swa": local.get("rope_theta"),
        "layer_norm_rms_eps": config.get("rms_norm_eps"),
        "layer_norm_eps": first("layer_norm_eps", "layer_norm_epsilon") or (1e-12 if "dim" in config else None),
        "expert_count": first("num_local_experts", "num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "key_length": config.get("head_dim"),
        "value_length": config.get("head_dim"),
        "sliding_window": config.get("sliding_window") or None,
    }
    if config["model_type"] == "gemma4_text":
        values |= of_gemma4(writer, config)
    for key, value in values.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    if config["model_type"] == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * hidden) // values["head_count"])
        writer.add_sliding_window(config["sliding_window"] or 0)
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] in _BERTS:
        writer.add_causal_attention(False)
        writer.add_tokenizer_model({"roberta": "gpt2", "xlm-roberta": "t5"}.get(config["model_type"], "bert"))


def of_gemma4(writer, config):
    """What ``Gemma4Model.set_gguf_parameters`` sets otherwise."""
    full = _full_width(config)
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    found = {"key_length": full, "value_length": full, "expert_used_count": config["top_k_experts"]}
    if (heads := config.get("num_global_key_value_heads")) is not None:
        found["head_count_kv"] = [config["num_key_value_heads"] if one else heads for one in slides]
    return found


def _full_width(config):
    """``head_dim`` of full attention, as transformers 5 or 4 writes it."""
    return config["global_head_dim"] if "global_head_dim" in config else config["per_layer_config"]["1"]["head_dim"]


def add_extra_tensors(writer, config):
    """What ``Phi3MiniModel.generate_extra_tensors`` adds."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        width = _full_width(config)
        turned = int(width * rope["full_attention"]["partial_rotary_factor"] / 2)
        factors = [1.0] * turned + [1e30] * (width // 2 - turned)
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for which in ("long", "short"):
        if f"{which}_factor" in rope:
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))


_PREFIXES = {"bloom": "transformer", "xlm-roberta": "roberta"}
"""First part of names that the script removes, where it is not the model's type."""
_DROPPED = ("cls.", "lm_head.", "pooler.", "vocab_", "classifier.")


def modified(config, tensors):
    """Yield names and values after ``modify_tensors``."""
    kind, experts = config["model_type"], {}
    for full, value in tensors.items():
        name = re.sub(rf"^{_PREFIXES.get(kind, kind)}\.", "", full)
        if kind in _BERTS and (name.startswith(_DROPPED) or name.endswith("position_ids")):
            continue
        if kind == "gpt_oss" and re.search(r"\.(experts|sinks)", name):
            yield from _of_gpt_oss(name, value)
            continue
        if kind == "gemma4_text" and (scaled := _of_gemma4(name)):
            yield scaled, value
            continue
        if kind == "gpt2" and name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+\.weight)", name):
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = value
            continue
        yield name, _changed(kind, config, name, value)
    for name, parts in experts.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def _of_gemma4(name):
    block = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        return f"blk.{block}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{block}.ffn_down_exps.scale"
    return f"{name}.weight" if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")) else ""


def _of_gpt_oss(name, value):
    if name.endswith("sinks"):
        yield f"{name}.weight", value
        return
    name, suffix = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    value = value if suffix == "bias" else value.swapaxes(-1, -2)
    if name.endswith("down_proj"):
        yield f"{name}.{suffix}", np.ascontiguousarray(value)
        return
    for i, part in enumerate(("gate_proj", "up_proj")):
        yield f"{name.replace('gate_up_proj', part)}.{suffix}", np.ascontiguousarray(value[:, i::2])


def _changed(kind, config, name, value):
    if kind in _LLAMA and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
    if kind == "bloom" and ".query_key_value." in name:
        heads = config["n_head"]
        split = value.reshape(heads, 3, value.shape[0] // heads // 3, *value.shape[1:])
        return np.concatenate([split[:, i].reshape(-1, *value.shape[1:]) for i in range(3)])
    if kind.endswith("roberta") and name.endswith("position_embeddings.weight"):
        return value[2:]
    if _is_transposed(kind, name):
        return np.ascontiguousarray(value.T)
    if kind.startswith("gemma") and kind != "gemma4_text" and name.endswith("norm.weight"):
        return value + np.float32(1)
    return value


def _is_transposed(kind, name):
    if kind == "gpt_oss":
        return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    return kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
