"""Gemma 3n, with images and sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.families.parts.checks import ROPE, TANH, Checks, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.parts.mobilenet import mobilenet_tensors
from shardload.families.parts.rope import FULL, SLIDING, Rotary, rotation
from shardload.families.parts.tensors import DECODER_FIELDS, TensorSpec, gated_mlp
from shardload.families.record import Family, ModelType, Part

_ROTARY = Rotary(1e6, sliding_theta=1e4)
_MOST_LAYERS = 1000


def _adapt(config: dict[str, Any]) -> None:
    """Give KerasHub the base of full attention as transformers 4 writes it, and a width for each layer."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return
    if "rope_theta" not in text:
        text["rope_theta"] = rotation(text, FULL, _ROTARY, head_dim=None).theta
    width, layers = text.get("intermediate_size"), text.get("num_hidden_layers")
    if isinstance(width, int) and isinstance(layers, int) and layers <= _MOST_LAYERS:
        text["intermediate_size"] = [width] * layers


def _differences(config: Config) -> Iterator[FieldDifference]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return
    full, sliding = (rotation(text, kind, _ROTARY, head_dim=None) for kind in (FULL, SLIDING))
    if full.kind != "default":
        yield FieldDifference("rope_parameters", str(full), "no scaling", ROPE)
    if (sliding.kind, sliding.theta) != ("default", _ROTARY.sliding_theta):
        yield FieldDifference("rope_parameters", f"{sliding} (in windows)", "no scaling, base 10000", ROPE)


def _forgotten(backbone: Any) -> Iterator[tuple[Any, str]]:
    if backbone.vision_encoder is not None:
        stem = backbone.vision_encoder.get_layer("conv_stem")
        yield stem.conv.bias, "model.vision_tower.timm_model.conv_stem.conv.bias"


def _uncomputed(config: Config) -> str | None:
    """Return which keys and values the last layers share with earlier ones; transformers 5 does not store their own."""
    text = config.get("text_config")
    count, shared = (text.get(key) for key in ("num_hidden_layers", "num_kv_shared_layers")) if text else (0, 0)
    if not (isinstance(count, int) and isinstance(shared, int) and 0 < shared < count <= _MOST_LAYERS):
        return None
    layers = "|".join(map(str, range(count - shared, count)))
    return rf"(.+\.)?language_model\.layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm)\.weight"


# ---- its tensors --------------------------------------------------------------------------------


def _tensors(config: Config) -> Iterator[TensorSpec]:
    text, vision, audio = config["text_config"], config["vision_config"], config["audio_config"]
    yield from _text(text)
    yield from mobilenet_tensors("model.vision_tower.timm_model")
    yield from _sound(audio)
    for name, part in (("vision", vision), ("audio", audio)):
        at, width = f"model.embed_{name}", part["hidden_size"]
        yield TensorSpec(f"{at}.embedding.weight", (part["vocab_size"], width))
        yield _scale(f"{at}.hard_embedding_norm", width)
        yield _scale(f"{at}.soft_embedding_norm", width)
        yield TensorSpec(f"{at}.embedding_projection.weight", (text["hidden_size"], width))


def _text(config: Config) -> Iterator[TensorSpec]:
    at, hidden, layers = "model.language_model", config["hidden_size"], config["num_hidden_layers"]
    inputs, streams = config["hidden_size_per_layer_input"], config["altup_num_inputs"]
    yield TensorSpec(f"{at}.embed_tokens.weight", (config["vocab_size"], hidden))
    yield TensorSpec(f"{at}.embed_tokens_per_layer.weight", (config["vocab_size_per_layer_input"], layers * inputs))
    yield TensorSpec(f"{at}.per_layer_model_projection.weight", (layers * inputs, hidden))
    yield _scale(f"{at}.per_layer_projection_norm", inputs)
    for stream in range(streams - 1):
        yield TensorSpec(f"{at}.altup_projections.{stream}.weight", (hidden, hidden))
        yield TensorSpec(f"{at}.altup_unembed_projections.{stream}.weight", (hidden, hidden))
    for i in range(layers):
        yield from _layer(config, f"{at}.layers.{i}")
    yield _scale(f"{at}.norm", hidden)


def _layer(config: Config, at: str) -> Iterator[TensorSpec]:
    hidden, head, rank = config["hidden_size"], config["head_dim"], config["laurel_rank"]
    inputs, streams = config["hidden_size_per_layer_input"], config["altup_num_inputs"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    # Published checkpoints have keys and values of all layers, also of those that share earlier ones.
    for name, shape in (
        ("q", (queries, hidden)),
        ("k", (keys, hidden)),
        ("v", (keys, hidden)),
        ("o", (hidden, queries)),
    ):
        yield TensorSpec(f"{at}.self_attn.{name}_proj.weight", shape)
    yield _scale(f"{at}.self_attn.q_norm", head)
    yield _scale(f"{at}.self_attn.k_norm", head)
    yield from gated_mlp(config, f"{at}.mlp")
    yield TensorSpec(f"{at}.laurel.linear_left.weight", (rank, hidden))
    yield TensorSpec(f"{at}.laurel.linear_right.weight", (hidden, rank))
    yield TensorSpec(f"{at}.per_layer_input_gate.weight", (inputs, hidden))
    yield TensorSpec(f"{at}.per_layer_projection.weight", (hidden, inputs))
    yield TensorSpec(f"{at}.altup.correct_output_scale", (hidden,))
    yield TensorSpec(f"{at}.altup.correction_coefs.weight", (streams, streams))
    yield TensorSpec(f"{at}.altup.prediction_coefs.weight", (streams**2, streams))
    yield TensorSpec(f"{at}.altup.modality_router.weight", (streams, hidden))
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for norm in (*norms, "laurel.post_laurel_norm", "post_per_layer_input_norm", "altup.router_norm"):
        yield _scale(f"{at}.{norm}", hidden)


def _sound(config: Config) -> Iterator[TensorSpec]:
    at, hidden = "model.audio_tower", config["hidden_size"]
    features, channels = config["input_feat_size"], (1, *config["sscp_conv_channel_size"])
    for i, (kernel, stride) in enumerate(
        zip(config["sscp_conv_kernel_size"], config["sscp_conv_stride_size"], strict=True)
    ):
        conv = f"{at}.subsample_conv_projection.conv_{i}"
        yield TensorSpec(f"{conv}.conv.weight", (channels[i + 1], channels[i], *kernel))
        yield _scale(f"{conv}.norm", channels[i + 1])
        features = -(-features // stride[1])
    yield TensorSpec(f"{at}.subsample_conv_projection.input_proj_linear.weight", (hidden, channels[-1] * features))
    for i in range(config["conf_num_hidden_layers"]):
        yield from _conformer(config, f"{at}.conformer.{i}", hidden)


def _conformer(config: Config, at: str, hidden: int) -> Iterator[TensorSpec]:
    for step in ("ffw_layer_start", "ffw_layer_end"):
        yield _scale(f"{at}.{step}.pre_layer_norm", hidden)
        yield TensorSpec(f"{at}.{step}.ffw_layer_1.weight", (4 * hidden, hidden))
        yield TensorSpec(f"{at}.{step}.ffw_layer_2.weight", (hidden, 4 * hidden))
        yield _scale(f"{at}.{step}.post_layer_norm", hidden)
    for name in ("q_proj", "k_proj", "v_proj", "relative_position_embedding.pos_proj"):
        yield TensorSpec(f"{at}.attention.attn.{name}.weight", (hidden, hidden))
    yield TensorSpec(f"{at}.attention.attn.per_dim_scale", (hidden // config["conf_num_attention_heads"],))
    yield TensorSpec(f"{at}.attention.post.weight", (hidden, hidden))
    yield _scale(f"{at}.attention.pre_attn_norm", hidden)
    yield _scale(f"{at}.attention.post_norm", hidden)
    yield _scale(f"{at}.lconv1d.pre_layer_norm", hidden)
    yield TensorSpec(f"{at}.lconv1d.linear_start.weight", (2 * hidden, hidden))
    yield TensorSpec(f"{at}.lconv1d.depthwise_conv1d.weight", (hidden, 1, config["conf_conv_kernel_size"]))
    yield _scale(f"{at}.lconv1d.conv_norm", hidden)
    yield TensorSpec(f"{at}.lconv1d.linear_end.weight", (hidden, hidden))
    yield _scale(f"{at}.norm", hidden)


def _scale(at: str, width: int) -> TensorSpec:
    return TensorSpec(f"{at}.weight", (width,), near_one=True)


# ---- published models ---------------------------------------------------------------------------


def _published(*, layers: int, shared: int, width: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3n_text",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2048,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10),
        "num_kv_shared_layers": shared,
        "layer_types": ([SLIDING] * 4 + [FULL]) * (layers // 5),
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-06,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    }
    audio = {
        "model_type": "gemma3n_audio",
        "hidden_size": 1536,
        "vocab_size": 128,
        "vocab_offset": 262272,
        "input_feat_size": 128,
        "sscp_conv_channel_size": [128, 32],
        "sscp_conv_kernel_size": [[3, 3], [3, 3]],
        "sscp_conv_stride_size": [[2, 2], [2, 2]],
        "sscp_conv_group_norm_eps": 0.001,
        "conf_num_hidden_layers": 12,
        "conf_num_attention_heads": 8,
        "conf_conv_kernel_size": 5,
        "conf_reduction_factor": 4,
        "conf_residual_weight": 0.5,
        "conf_attention_chunk_size": 12,
        "conf_attention_context_left": 13,
        "conf_attention_context_right": 0,
        "conf_attention_logit_cap": 50.0,
        "gradient_clipping": 10000000000.0,
        "rms_norm_eps": 1e-06,
    }
    vision = {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 2048}
    return {
        "model_type": "gemma3n",
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | {"vocab_size": 128, "vocab_offset": 262144, "rms_norm_eps": 1e-06},
        "audio_config": audio,
        "image_token_id": 262145,
        "audio_token_id": 262273,
        "vision_soft_tokens_per_image": 256,
        "audio_soft_tokens_per_image": 188,
        "tie_word_embeddings": True,
    }


GEMMA_3N = ModelType(
    name="gemma3n",
    lacks={
        Part.EXPORT: "KerasHub's vision tower has 121 biases more, which training would change",
        Part.GGUF: "GGUF has the text alone, and KerasHub's converter wants images and sound",
    },
    adapt=_adapt,
    checks=Checks(tower_activation=("vision_encoder", TANH)),  # timm's MobileNet V5 computes GELU with tanh
    differences=_differences,
    parts={
        name: f"gemma3n_{name.removesuffix('_config')}" for name in ("text_config", "vision_config", "audio_config")
    },
    tensors=_tensors,
    part_fields={
        "text_config": (
            *(*DECODER_FIELDS, "head_dim", "vocab_size_per_layer_input", "hidden_size_per_layer_input"),
            *("altup_num_inputs", "laurel_rank"),
        ),
        "vision_config": ("hidden_size", "vocab_size"),
        "audio_config": (
            *("hidden_size", "vocab_size", "input_feat_size", "conf_num_hidden_layers", "conf_num_attention_heads"),
            "conf_conv_kernel_size",
        ),
    },
    forgotten=_forgotten,
    uncomputed=_uncomputed,
    without_task="the constructor of KerasHub's Gemma3nCausalLM makes a constant of the embedding's initial values",
)
FAMILY = Family(
    name="gemma3n",
    title="Gemma 3n",
    model_types=(GEMMA_3N,),
    sizes={
        "gemma3n_e2b": _published(layers=30, shared=10, width=8192),
        "gemma3n_e4b": _published(layers=35, shared=15, width=16384),
    },
)
