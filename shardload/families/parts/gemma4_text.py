"""The text model of Gemma 4: its tensors, and its configuration as KerasHub's converter understands it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.config import Config
from shardload.families.parts.rope import FULL
from shardload.families.parts.tensors import TensorSpec, gated_mlp


def adapt(config: dict[str, Any]) -> None:
    """Fill in sizes of layers with full attention, and remove a null encoder, which KerasHub would try to build."""
    for part in ("vision_config", "audio_config"):
        if part in config and config[part] is None:
            del config[part]
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        return
    if text.get("global_head_dim") is None and (width := _of_layers(text, "head_dim")):
        text["global_head_dim"] = width
    if not text.get("attention_k_eq_v"):
        text["num_global_key_value_heads"] = None  # as in transformers; KerasHub would use keys as values
    elif text.get("num_global_key_value_heads") is None:
        heads = _of_layers(text, "num_key_value_heads")
        text["num_global_key_value_heads"] = heads or text.get("num_key_value_heads")


def _of_layers(text: Config, name: str) -> Any:
    """Return the value of a field that ``per_layer_config`` gives single layers; ``None`` if it has not one."""
    layers = text.get("per_layer_config")
    listed = layers.values() if isinstance(layers, dict) else ()
    found = {layer.get(name) for layer in listed if isinstance(layer, dict) and isinstance(layer.get(name), int)}
    return found.pop() if len(found) == 1 else None


def norm_scale(name: str, width: int) -> TensorSpec:
    """Return the tensor of a norm's scale."""
    return TensorSpec(name, (width,), near_one=True)


def text_tensors(config: Config) -> Iterator[TensorSpec]:
    """Yield the tensors of a text model."""
    config = dict(config)
    adapt(config)
    vocab, hidden, layers = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden))
    if inputs := config.get("hidden_size_per_layer_input"):
        yield TensorSpec("model.embed_tokens_per_layer.weight", (config["vocab_size_per_layer_input"], layers * inputs))
        yield TensorSpec("model.per_layer_model_projection.weight", (layers * inputs, hidden))
        yield norm_scale("model.per_layer_projection_norm.weight", inputs)
    for i in range(layers):
        at, shares = f"model.layers.{i}", i >= layers - (config.get("num_kv_shared_layers") or 0)
        yield from _attention(config, f"{at}.self_attn", config["layer_types"][i] == FULL, shares=shares)
        # Only layers that share keys and values can be wider.
        width = config["intermediate_size"] * (2 if shares and config.get("use_double_wide_mlp") else 1)
        yield from gated_mlp({"hidden_size": hidden, "width": width}, f"{at}.mlp", size="width")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield norm_scale(f"{at}.{name}_layernorm.weight", hidden)
        yield TensorSpec(f"{at}.layer_scalar", (1,), near_one=True)
        if inputs:
            yield TensorSpec(f"{at}.per_layer_input_gate.weight", (inputs, hidden))
            yield TensorSpec(f"{at}.per_layer_projection.weight", (hidden, inputs))
            yield norm_scale(f"{at}.post_per_layer_input_norm.weight", hidden)
        if config.get("enable_moe_block"):
            yield from _experts(at, hidden, config["num_experts"], config["moe_intermediate_size"])
    yield norm_scale("model.norm.weight", hidden)


def _attention(config: Config, at: str, is_full: bool, *, shares: bool) -> Iterator[TensorSpec]:
    hidden, heads, kv_heads = (config[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    width, keys_are_values = config["head_dim"], False
    if is_full:
        width = config.get("global_head_dim") or width
        keys_are_values = bool(config.get("num_global_key_value_heads"))
        kv_heads = config.get("num_global_key_value_heads") or kv_heads
    yield TensorSpec(f"{at}.q_proj.weight", (heads * width, hidden))
    yield norm_scale(f"{at}.q_norm.weight", width)
    if not shares:
        yield TensorSpec(f"{at}.k_proj.weight", (kv_heads * width, hidden))
        yield norm_scale(f"{at}.k_norm.weight", width)
        if not keys_are_values:
            yield TensorSpec(f"{at}.v_proj.weight", (kv_heads * width, hidden))
    yield TensorSpec(f"{at}.o_proj.weight", (hidden, heads * width))


def _experts(at: str, hidden: int, experts: int, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.router.proj.weight", (experts, hidden))
    yield norm_scale(f"{at}.router.scale", hidden)
    yield norm_scale(f"{at}.router.per_expert_scale", experts)
    yield TensorSpec(f"{at}.experts.gate_up_proj", (experts, 2 * width, hidden))
    yield TensorSpec(f"{at}.experts.down_proj", (experts, hidden, width))
    for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
        yield norm_scale(f"{at}.{name}.weight", hidden)


def assistant_tensors(config: Config) -> Iterator[TensorSpec]:
    """Yield the tensors of an assistant: a text model whose layers all take the keys of the model that it assists."""
    text, outside = config["text_config"], config["backbone_hidden_size"]
    yield from text_tensors(text)
    yield TensorSpec("pre_projection.weight", (text["hidden_size"], 2 * outside))
    yield TensorSpec("post_projection.weight", (outside, text["hidden_size"]))
    if config["use_ordered_embeddings"]:
        yield TensorSpec("masked_embedding.centroids.weight", (config["num_centroids"], text["hidden_size"]))
        # Zeros are tokens too.
        yield TensorSpec("masked_embedding.token_ordering", (text["vocab_size"],), is_zero=True)
