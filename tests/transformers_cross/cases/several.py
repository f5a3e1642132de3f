"""Several modalities, and encoders with decoders: families whose configurations are nested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers_cross.cases.parts import DECODER, EXPERTS, FULL, HEAD_DIM, KV_1, KV_3, SLIDING, TIED, Case, Config

VISION: Config = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
TEXT: Config = {**DECODER, **HEAD_DIM, **TIED}
WINDOWED: Config = {**TEXT, "query_pre_attn_scalar": 8, "sliding_window": 4, "layer_types": [SLIDING, FULL]}
TOKENS: Config = {"image_token_index": 63, "boi_token_index": 61, "eoi_token_index": 62}
PART: Config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROPE: Config = {"rope_type": "default", "rope_theta": 1e4}
QWEN: Config = {
    **TEXT,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
    },
}  # fmt: skip
QWEN_VISION: Config = {
    "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "in_channels": 3, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
GEMMA_4_VISION: Config = {
    "patch_size": 4, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 16,
    "use_clipped_linears": True,
}  # fmt: skip
GEMMA_4_AUDIO: Config = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [128, 4],
    "conv_kernel_size": 3, "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 24,
}  # fmt: skip
GEMMA_4_TOKENS: Config = {
    "boi_token_id": 58, "eoi_token_id": 59, "image_token_id": 60, "video_token_id": 61, "boa_token_id": 62,
    "audio_token_id": 63, "eoa_token_index": 57,
}  # fmt: skip
QWEN_TOKENS: Config = {
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63,
}  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _gemma_3()
    yield from _paligemma()
    yield from _t5gemma()
    yield from _t5gemma_2()
    yield from _gemma_4()
    yield from _qwen_3_5("qwen3_5", "Qwen3_5", {})
    experts = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40}
    yield from _qwen_3_5("qwen3_5_moe", "Qwen3_5Moe", experts)
    yield from _metaclip_2()
    yield from _blip_2()
    yield from _sam_3()


def _gemma_3() -> Iterator[Case]:
    text = {**WINDOWED, "layer_types": [SLIDING] * 2}
    config = {"text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4, **TOKENS}

    def case(
        variant: str, cls: str = "ForConditionalGeneration", changed: Config | None = None, **options: Any
    ) -> Case:
        return Case("gemma3", variant, f"Gemma3{cls}", {**config, **(changed or {})}, ask="image and text", **options)

    yield case("vision")
    yield case("vision, transformers 4", writer=4)
    yield case("bfloat16", dtype="bfloat16")
    yield case("sharded", sharded=True)
    yield case("1 KV head", changed={"text_config": {**text, **KV_1}})
    yield case("base model", "Model")
    yield case("16 tokens an image", changed={"mm_tokens_per_image": 16})


def _paligemma() -> Iterator[Case]:
    text = {**TEXT, "vocab_size": 72, "num_image_tokens": 16, "head_dim": 16}
    config = {
        "text_config": text, "vision_config": {**VISION, "patch_size": 8, "projection_dim": 32}, "projection_dim": 32,
        "image_token_index": 64, "image_token_id": 64, "vocab_size": 64, "hidden_size": 32,
    }  # fmt: skip

    def case(variant: str, config: Config = config, **options: Any) -> Case:
        return Case("paligemma", variant, "PaliGemmaForConditionalGeneration", config, ask="image and text", **options)

    yield case("vision")
    yield case("vision, transformers 4", writer=4)
    yield case("bfloat16", dtype="bfloat16")
    yield case("head_dim is not the number of image tokens", {**config, "text_config": {**text, "head_dim": 8}})


def _t5gemma() -> Iterator[Case]:
    module = {key: value for key, value in WINDOWED.items() if key != "tie_word_embeddings"}
    wide = {**module, "sliding_window": 32}
    full = {**module, "layer_types": [FULL] * 2, "attn_logit_softcapping": None}
    capped = {**full, "attn_logit_softcapping": 50.0}

    def case(variant: str, encoder: Config, decoder: Config, *, tied: bool = True, **options: Any) -> Case:
        config = {"encoder": encoder, "decoder": decoder, "vocab_size": 64, "dropout_rate": 0.0}
        cls = options.pop("cls", "T5GemmaForConditionalGeneration")
        return Case("t5gemma", variant, cls, {**config, "tie_word_embeddings": tied}, ask="text to text", **options)

    yield case("tied", wide, wide)
    yield case("tied, transformers 4", wide, wide, writer=4)
    yield case("bfloat16", wide, wide, dtype="bfloat16")
    yield case("untied", wide, wide, tied=False)
    yield case("base model", wide, wide, cls="T5GemmaModel")
    yield case("no sliding attention", full, full)
    yield case("soft caps", capped, capped)
    yield case("a window narrower than the text", module, module)
    yield case("a window in the decoder", full, {**full, "layer_types": module["layer_types"]})


def _t5gemma_2() -> Iterator[Case]:
    def case(variant: str, text: Config, decoder: Config | None = None, **options: Any) -> Case:
        encoder = {"text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4, **TOKENS}
        ids = {"image_token_index": 63, "eoi_token_index": 62, "vocab_size": 64}
        cls = options.pop("cls", "T5Gemma2ForConditionalGeneration")
        config = {"encoder": encoder, "decoder": decoder or text, **ids, **TIED}
        return Case("t5gemma2", variant, cls, config, ask="image and text to text", **options)

    text = {**WINDOWED, "sliding_window": 32}
    narrow = {**text, "sliding_window": 3}
    stretched = {FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, SLIDING: _ROPE}
    yield case("tied", text)
    yield case("bfloat16", text, dtype="bfloat16")
    yield case("base model", text, cls="T5Gemma2Model")
    yield case("3 KV heads", {**text, **KV_3})
    yield case("a window narrower than the text", narrow)
    yield case("soft cap", {**text, "final_logit_softcapping": 10.0})
    yield case("soft cap of attention", {**text, "attn_logit_softcapping": 2.0})
    yield case("rope linear", {**text, "rope_parameters": stretched})
    yield case("another window in the decoder", text, narrow)
    other = {FULL: {**_ROPE, "rope_theta": 1e5}, SLIDING: _ROPE}
    yield case("another base", {**text, "rope_parameters": other})


def _gemma_4() -> Iterator[Case]:
    text = {key: value for key, value in WINDOWED.items() if key != "query_pre_attn_scalar"}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    wide: Config = {"global_head_dim": 16}

    def case(variant: str, changed: Config, cls: str = "Gemma4ForCausalLM", **options: Any) -> Case:
        return Case("gemma4_text", variant, cls, {**text, **changed}, **options)

    yield case("one head_dim", {"per_layer_config": {}})
    yield case("two head_dims", {})
    yield case("global_head_dim", wide)
    inputs: Config = {**wide, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    yield case("per layer inputs", inputs)
    yield case("bfloat16", wide, dtype="bfloat16")
    yield case("sharded", wide, sharded=True)
    yield case("1 KV head", {**wide, **KV_1})
    yield case("base model", wide, "Gemma4TextModel")
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    yield case("experts", {**wide, **experts})
    deep: Config = {**inputs, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}
    deep |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    yield case("shared keys", deep)
    yield case("shared keys, and unused ones", deep, edits=("keys_of_layers_that_share",))
    yield case("keys as values", {**wide, "attention_k_eq_v": True, "num_global_key_value_heads": 1})
    whole = {"text_config": {**text, **wide}, "vision_config": None, "audio_config": None}
    yield Case("gemma4", "no vision", "Gemma4ForConditionalGeneration", whole)
    yield from _gemma_4_of_images(whole)


def _gemma_4_of_images(whole: Config) -> Iterator[Case]:
    text, lm = whole["text_config"], "Gemma4ForConditionalGeneration"
    seen = {**whole, "vision_config": GEMMA_4_VISION, **GEMMA_4_TOKENS}

    def case(
        variant: str, changed: Config | None = None, *, ask: str = "placed patches and text", **options: Any
    ) -> Case:
        return Case("gemma4", variant, lm, {**seen, **(changed or {})}, ask=ask, edits=("narrow_bounds",), **options)

    yield case("vision")
    yield case("vision, bfloat16", dtype="bfloat16")
    yield case("vision, sharded", sharded=True)
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    yield case("vision, per layer inputs", {"text_config": {**text, **inputs}})
    large = {**GEMMA_4_VISION, "use_clipped_linears": False, "standardize": True}
    odd = {**text, **KV_3, "use_bidirectional_attention": "vision"}
    yield case("vision, both directions", {"text_config": odd, "vision_config": large})
    heard = {"audio_config": GEMMA_4_AUDIO}
    yield case("vision, sound", heard, ask="placed patches, sound and text")
    yield case("sound", {**heard, "vision_config": None}, ask="sound and text")


def _qwen_3_5(family: str, stem: str, more: Config) -> Iterator[Case]:
    text = {**QWEN, **more}
    whole = {"text_config": text, "vision_config": QWEN_VISION, **QWEN_TOKENS, "tie_word_embeddings": False}
    lm = f"{stem}ForConditionalGeneration"

    def seen(variant: str, config: Config = whole, **options: Any) -> Case:
        return Case(family, variant, lm, config, ask="patches and text", **options)

    yield seen("vision")
    yield seen("vision, tied", {**whole, "text_config": {**text, **TIED}, **TIED})
    yield seen("vision, bfloat16", dtype="bfloat16")
    yield seen("vision, sharded", sharded=True)
    odd = {**text, **KV_3, "linear_num_key_heads": 3, "linear_num_value_heads": 6}
    wide = {**QWEN_VISION, "out_hidden_size": odd["hidden_size"]}
    yield seen("vision, 3 KV heads", {**whole, "text_config": odd, "vision_config": wide})
    yield Case(family, "text", lm, whole, mesh="2x2")
    yield Case(family, "text, no linear attention", lm, {**whole, "text_config": {**text, "layer_types": [FULL] * 2}})
    yield Case(f"{family}_text", "text only", f"{stem}ForCausalLM", text)


def _metaclip_2() -> Iterator[Case]:
    ends = {"eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}
    config = {
        "text_config": {**PART, "vocab_size": 64, "max_position_embeddings": 16, **ends},
        "vision_config": {**PART, "image_size": 32, "patch_size": 8},
        "projection_dim": 24,
    }

    def case(variant: str, config: Config = config, **options: Any) -> Case:
        return Case("metaclip_2", variant, "MetaClip2Model", config, ask="image beside text", **options)

    yield case("both")
    yield case("transformers 4", writer=4)
    yield case("bfloat16", dtype="bfloat16")
    yield case("position_ids", edits=("position_ids",))
    text = {**config["text_config"], "num_attention_heads": 3, "hidden_size": 24, "hidden_act": "gelu"}
    vision = {**config["vision_config"], "num_attention_heads": 5, "hidden_size": 40, "hidden_act": "gelu"}
    yield case("3 and 5 heads", {**config, "text_config": text, "vision_config": vision})


def _blip_2() -> Iterator[Case]:
    opt = {
        "model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 40, "word_embed_proj_dim": 32, "pad_token_id": 1,
        "bos_token_id": 2, "eos_token_id": 2,
    }  # fmt: skip
    config = {
        "vision_config": {**PART, "image_size": 32, "patch_size": 8},
        "qformer_config": {**PART, "vocab_size": 64, "encoder_hidden_size": 32}, "text_config": opt,
        "num_query_tokens": 4, "image_token_index": 63, "image_token_id": 63,
    }  # fmt: skip

    def case(variant: str, config: Config = config, **options: Any) -> Case:
        return Case("blip-2", variant, "Blip2ForConditionalGeneration", config, ask="queries and text", **options)

    yield case("opt")
    yield case("opt, transformers 4", writer=4)
    yield case("opt, bfloat16", dtype="bfloat16")
    odd = {
        **config,
        "vision_config": {**config["vision_config"], "hidden_size": 40, "num_attention_heads": 5},
        "qformer_config": {**config["qformer_config"], "hidden_size": 24, "num_attention_heads": 3},
        "text_config": {**opt, "hidden_size": 48, "num_attention_heads": 6, "word_embed_proj_dim": 48},
    }
    odd["qformer_config"] |= {"encoder_hidden_size": 40, "num_hidden_layers": 4, "cross_attention_frequency": 3}
    yield case("opt, 3 to 6 heads", odd)
    t5 = {
        "model_type": "t5", "vocab_size": 64, "d_model": 48, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_heads": 3,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
    }  # fmt: skip
    # Transformers 5 writes no output layer of its own for T5, which KerasHub's class needs, but reads one.
    yield replace(case("t5, transformers 4", {**odd, "text_config": t5}, writer=4), ask="queries and text to text")


def _sam_3() -> Iterator[Case]:
    part = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    tower = {**PART, "image_size": 32, "patch_size": 8, "pretrain_image_size": 16, "window_size": 2}
    text = {**PART, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": 64, "max_position_embeddings": 16}
    vision = {
        "backbone_config": {**tower, "model_type": "sam3_vit_model", "global_attn_indexes": [1]},
        "fpn_hidden_size": 16, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    }  # fmt: skip
    detector = {
        "model_type": "sam3", "vision_config": vision,
        "text_config": {**text, "model_type": "clip_text_model", "hidden_act": "gelu", "projection_dim": 512},
        "geometry_encoder_config": {**part, "roi_size": 3}, "detr_encoder_config": part,
        "detr_decoder_config": {**part, "num_queries": 5, "num_layers": 2},
        "mask_decoder_config": {"hidden_size": 16, "num_attention_heads": 2, "num_upsampling_stages": 3},
    }  # fmt: skip
    config = {"detector_config": detector}
    asked: Config = {"ask": "image and concept", "edits": ("in_a_video_model",)}
    yield Case("sam3_video", "detector", "Sam3Model", config, **asked)
