"""Tiny Hugging Face folders whose configurations are nested: several modalities, encoders with decoders, assistants.

`CONFIGS` holds one per variant of a converter, with the fewest and smallest parts it accepts. `write` asks the
converter for its tensors as `hub_folders` does, and adds the files some read past their loader (``2_Dense``).
"""

from __future__ import annotations

import contextlib
import io
import json

import hub_folders
import numpy as np
from initial_values import zeros_for_random
from safetensors.numpy import save_file

from shardload.hub import kerashub
from shardload.manifest import Manifest
from shardload.stores.local import located

ROPE = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "full_attention": {"rope_theta": 1e6, "factor": 1.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0},
}
TEXT = {
    **hub_folders.COMMON, "rope_parameters": ROPE, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "dropout_rate": 0.0, "initializer_range": 0.02,
    "num_image_tokens": 8,
}  # fmt: skip
VISION = {
    "image_size": 32, "patch_size": 8, "num_attention_heads": 2, "hidden_size": 16, "num_hidden_layers": 1,
    "intermediate_size": 24, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
}  # fmt: skip
QWEN3_5 = {
    **TEXT, "hidden_act": "silu", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN3_5_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "in_channels": 3, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
GEMMA4_AUDIO = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "attention_chunk_size": 4,
    "attention_context_left": 5, "attention_context_right": 0, "attention_logit_cap": 50.0,
    "attention_invalid_logits_value": -1e9, "conv_kernel_size": 3, "residual_weight": 0.5, "gradient_clipping": 1e10,
    "subsampling_conv_channels": [8, 4], "output_proj_dims": 24, "rms_norm_eps": 1e-6,
}  # fmt: skip
GEMMA3N_TEXT = {
    **TEXT, "vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
    "laurel_rank": 4, "altup_coef_clip": 120.0, "altup_active_idx": 0, "altup_correct_scale": True,
    "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [56, 56],
}  # fmt: skip
GEMMA3N_AUDIO = {
    "hidden_size": 16, "input_feat_size": 16, "sscp_conv_channel_size": [8, 4],
    "sscp_conv_kernel_size": [[3, 3], [3, 3]], "sscp_conv_stride_size": [[2, 2], [2, 2]],
    "sscp_conv_group_norm_eps": 1e-3, "conf_num_hidden_layers": 1, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10,
    "conf_residual_weight": 0.5, "conf_num_attention_heads": 2, "conf_attention_chunk_size": 4,
    "conf_attention_context_right": 0, "conf_attention_context_left": 5, "conf_attention_logit_cap": 50.0,
    "conf_conv_kernel_size": 3, "conf_reduction_factor": 2, "vocab_size": 8, "vocab_offset": 56,
}  # fmt: skip
SAM3_PART = {
    "num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "hidden_act": "relu",
    "hidden_dropout": 0.0, "dropout": 0.0, "layer_norm_eps": 1e-6,
}  # fmt: skip
SAM3 = {
    "vision_config": {
        "backbone_config": {
            **VISION, "pretrain_image_size": 16, "rope_theta": 10000.0, "window_size": 2, "global_attn_indexes": [0],
            "attention_dropout": 0.0, "hidden_dropout": 0.0,
        },
        "fpn_hidden_size": 16,
        "scale_factors": [4.0, 2.0, 1.0, 0.5],
    },
    "text_config": {**TEXT, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "geometry_encoder_config": {**SAM3_PART, "roi_size": 3},
    "detr_encoder_config": SAM3_PART,
    "detr_decoder_config": {**SAM3_PART, "num_queries": 4},
    "mask_decoder_config": {**SAM3_PART, "num_upsampling_stages": 2},
}  # fmt: skip
DINOV3 = {
    "hidden_act": "gelu", "layerscale_value": 1.0, "num_register_tokens": 2, "query_bias": True, "key_bias": False,
    "value_bias": True, "proj_bias": True, "mlp_bias": True,
}  # fmt: skip
BLIP2 = {"vision_config": VISION, "num_query_tokens": 4}
QFORMER = {**VISION, "num_hidden_layers": 2, "cross_attention_frequency": 2}
GEMMA4_TEXT = {**TEXT, "num_kv_shared_layers": 0, "global_head_dim": 16}
ASSISTANT = {
    "text_config": {**GEMMA4_TEXT, "num_kv_shared_layers": 2}, "centroid_intermediate_top_k": 2,
    "use_ordered_embeddings": True, "backbone_hidden_size": 24, "num_centroids": 4,
    "architectures": ["Gemma4AssistantForCausalLM"],
}  # fmt: skip
UNCAPPED = {**TEXT, "attn_logit_softcapping": None}
TINY_MOBILENET = [
    ["er_r1_k3_s2_e4_c8"],
    ["uir_r1_a3_k5_s2_e2_c8"],
    ["uir_r1_a5_k5_s2_e2_c16", "mqa_r1_k3_h2_v2_s1_d8_c16", "uir_r1_a0_k0_s1_e1_c16"],
    ["uir_r1_a5_k5_s2_e2_c16", "mqa_r1_k3_h2_s1_d8_c16"],
]
"""In place of the 300 million parameters that Gemma 3n's converter has as a constant; every kind of block."""
CONFIGS = {
    "blip-2 opt": {**BLIP2, "qformer_config": QFORMER, "text_config": {**TEXT, "model_type": "opt", "ffn_dim": 56}},
    "blip-2 t5": {
        **BLIP2,
        "qformer_config": QFORMER,
        "text_config": {
            "model_type": "t5", "vocab_size": 48, "num_layers": 2, "num_heads": 4, "d_model": 32, "d_ff": 56,
            "d_kv": 8,
        },
    },
    "dinov2_with_registers swiglu": {**hub_folders.CONFIGS["dinov2"], "num_register_tokens": 2, "use_swiglu_ffn": True},
    "dinov3_vit": {**DINOV3, "use_gated_mlp": False},
    "dinov3_vit gated": {**DINOV3, "use_gated_mlp": True},
    "gemma3 vision": {"text_config": TEXT, "vision_config": VISION},
    "gemma3_text embedding": {"use_bidirectional_attention": True},
    "gemma3n": {
        "text_config": GEMMA3N_TEXT, "vision_config": {"hidden_size": 32, "vocab_size": 8, "vocab_offset": 48},
        "audio_config": GEMMA3N_AUDIO, "vision_soft_tokens_per_image": 4, "image_token_id": 3,
        "audio_soft_tokens_per_image": 4, "audio_token_id": 4,
    },
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_text moe": {**GEMMA4_TEXT, "enable_moe_block": True, "top_k_experts": 2},
    "gemma4_text per layer": {**GEMMA4_TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 48},
    "gemma4 vision audio": {
        "text_config": GEMMA4_TEXT,
        "vision_config": {
            **VISION, "patch_size": 128, "head_dim": 8, "position_embedding_size": 64, "num_key_value_heads": 2,
            "use_clipped_linears": True,
        },
        "audio_config": GEMMA4_AUDIO,
    },
    "gemma4_assistant": ASSISTANT,
    "metaclip_2": {
        "vision_config": {**VISION, "layer_norm_eps": 1e-5},
        "text_config": {**TEXT, "layer_norm_eps": 1e-5, "eos_token_id": 2},
        "projection_dim": 24,
    },
    "paligemma": {"text_config": TEXT, "vision_config": VISION, "image_token_index": 47},
    "qwen3_5": {"text_config": QWEN3_5},
    "qwen3_5 vision": {"text_config": QWEN3_5, "vision_config": QWEN3_5_VISION},
    "qwen3_5_moe": {"text_config": QWEN3_5},
    "qwen3_5_moe vision experts": {"text_config": QWEN3_5, "vision_config": QWEN3_5_VISION},
    "sam3_video": {"detector_config": SAM3},
    "t5gemma": {
        "tie_word_embeddings": True,  # an output layer of its own is one the converter forgets
        "encoder": UNCAPPED,
        "decoder": TEXT,
    },
    "t5gemma2": {
        "encoder": {
            "text_config": {**UNCAPPED, "tie_word_embeddings": True},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
        "decoder": UNCAPPED,
        "eoi_token_index": 5,
    },
    "t5gemma2 text": {
        "encoder": {"text_config": {**UNCAPPED, "tie_word_embeddings": True}},
        "decoder": UNCAPPED,
        "eoi_token_index": 5,
    },
}  # fmt: skip
"""By ``model_type`` and variant: what differs from `hub_folders.COMMON`."""

SHAPES = {
    "mlp.experts.gate_up_proj": (3, 48, 32),
    "mlp.experts.down_proj": (3, 32, 24),
    ".experts.gate_up_proj": (3, 48, 32),
    "self_attn.qkv.weight": (48, 16),
    "self_attn.qkv.bias": (48,),
}
"""Of tensors that are cut into parts, by the end of their names. Qwen 3.5 stores its expert banks whole, or, in the
variant named ``experts``, each expert by itself."""


def config_of(name):
    return {**hub_folders.COMMON, "architectures": [""], **CONFIGS[name], "model_type": name.split()[0]}


def shrink_mobilenet(monkeypatch):
    """Give Gemma 3n's converter `TINY_MOBILENET` for its vision tower."""
    from keras_hub.src.utils.transformers import convert_gemma3n as convert

    tiny = convert.convert_arch_def_to_stackwise(TINY_MOBILENET)
    full = convert.MODEL_CONFIGS["mobilenetv5_300m_enc"]
    monkeypatch.setitem(
        convert.MODEL_CONFIGS, "mobilenetv5_300m_enc", {**full, **tiny, "stem_size": 8, "num_features": 32}
    )


def write(folder, name, *, files=1):
    """A folder KerasHub and we can load."""
    from keras_hub.models import Backbone, Gemma4AssistantCausalLM

    config = config_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    hub_folders.save(folder, {"model.unwanted.weight": np.ones(3, np.float32)}, 1)
    with zeros_for_random():  # it is only asked for shapes
        model = Backbone.from_preset(str(folder), load_weights=False)
    convert = kerashub.converter(Manifest(located(folder), "hf-safetensors", {}, {}, config))
    loader = Asking("float32", whole_experts="experts" not in name)
    with contextlib.redirect_stdout(io.StringIO()):
        convert.convert_weights(model, loader, config)
        if config["architectures"] == ["Gemma4AssistantForCausalLM"]:
            task = Gemma4AssistantCausalLM(backbone=model, preprocessor=None, **convert.convert_task_config(config))
            convert.convert_head(task, loader, config)
    (folder / "model.safetensors").unlink()
    hub_folders.save(folder, loader.tensors, files)
    if "embedding" in name:
        _dense(folder, loader.rng)
    return folder


class Asking(hub_folders.AskingLoader):
    """As its base, for tensors that are cut into parts too."""

    def __init__(self, dtype, *, whole_experts):
        super().__init__(dtype)
        self.whole_experts = whole_experts

    def get_tensor(self, name):
        shape = next((shape for end, shape in SHAPES.items() if name.endswith(end)), None)
        if shape is None or (".mlp.experts." in name and not self.whole_experts):
            return super().get_tensor(name)
        return self.make(name, shape)

    def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
        if hf_weight_key.endswith(tuple(SHAPES)):
            self.get_tensor(hf_weight_key)
        else:
            super().port_weight(keras_variable, hf_weight_key, hook_fn)


def _dense(folder, rng):
    """The heads of EmbeddingGemma, each in a file of its own."""
    for part, shape in (("2_Dense", (3072, 32)), ("3_Dense", (32, 3072))):
        (folder / part).mkdir()
        save_file({"linear.weight": rng.normal(size=shape).astype(np.float32)}, folder / part / "model.safetensors")
