"""Qwen 2 and 2.5, Qwen 3, Qwen 3.5, and their mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks, after_first_layers, by_layer_type, if_used
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_plain_decoder
from shardload.families.parts.gguf import BLOCK, CONTRACTIONS, EXPERTS, WORDS, GgufArchitecture, PreTokenizer
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, expert_entries
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, DecoderTensors, TensorSpec, gated_mlp
from shardload.families.record import Family, ModelType

_MOE_FIELDS = (*DECODER_FIELDS, "num_experts", "moe_intermediate_size")
_DEFAULTS = ROTARY | {"sliding_window": 4096, "use_sliding_window": False}
_MOE_DEFAULTS = _DEFAULTS | {
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}


def _published_qwen_2(dims: Dims, *, vocab: int, tied: bool) -> dict[str, Any]:
    rest: dict[str, Any] = {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768}
    return published_decoder("qwen2", "Qwen2ForCausalLM", dims, vocab=vocab, tied=tied, **rest)


def _lacking_dense_layers(config: Config, name: str) -> str | None:
    """Return an error's text if a layer of a mixture has no experts, which KerasHub cannot build; else ``None``."""
    layers, every = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
    dense = None if every == 1 else f"decoder_sparse_step={every}"
    if isinstance(layers, list) and any(i in layers for i in range(int(config["num_hidden_layers"]))):
        dense = f"mlp_only_layers={layers}"
    return dense and f"config.json sets {dense}, but KerasHub's converter needs experts in every layer"


_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _gguf_qwen_2(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "qwen2", "Qwen2ForCausalLM")
    # KerasHub's converter also reads the size of a window that is off.
    return base | {"use_sliding_window": False, "sliding_window": base["max_position_embeddings"]}


def _gguf_qwen_2_moe(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "qwen2_moe", "Qwen2MoeForCausalLM") | expert_entries(values)
    shared = values.shape("blk.0.ffn_up_shexp.weight") or (0, 0)
    return base | {
        "shared_expert_intermediate_size": values.number("expert_shared_feed_forward_length", shared[0]),
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "sliding_window": base["max_position_embeddings"],
    }


def _has_experts(config: Config, layer: int) -> bool:
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % config["decoder_sparse_step"] == 0


def _experts(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    """Yield name and shape of the tensors of a layer's feed-forward part: router and experts, or else a gated MLP."""
    if not _has_experts(config, layer):
        yield from gated_mlp(config, f"{at}.mlp")
        return
    yield TensorSpec(f"{at}.mlp.gate.weight", (config["num_experts"], config["hidden_size"]))
    for i in range(config["num_experts"]):
        yield from gated_mlp(config, f"{at}.mlp.experts.{i}", size="moe_intermediate_size")


def _with_shared_expert(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    yield from _experts(config, layer, at)
    if _has_experts(config, layer):
        yield from gated_mlp(config, f"{at}.mlp.shared_expert", size="shared_expert_intermediate_size")
        yield TensorSpec(f"{at}.mlp.shared_expert_gate.weight", (1, config["hidden_size"]))


def _export_qwen_2(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    # KerasHub's window applies to all layers or none; transformers' applies from layer max_window_layers on.
    windowed = backbone.use_sliding_window_attention
    return {
        **exported_plain_decoder(backbone, "qwen2", "Qwen2ForCausalLM"),
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if windowed else backbone.num_layers,
    }


QWEN_2 = ModelType(
    name="qwen2",
    defaults=_DEFAULTS | decoder_defaults(151936, 4096, 22016, 32, 32, kv=32, longest=32768),
    has_tie_argument=True,
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), by_layer_type(after_first_layers, always=False)),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(qkv_biases=True),
    tensor_fields=DECODER_FIELDS,
)


# Every other one of the first layers slides, the others attend to all tokens.
def _slides(config: Config, i: int) -> bool:
    return i % 2 == 0 and i < int(config.get("max_window_layers", 28))


QWEN_2_MOE = ModelType(
    name="qwen2_moe",
    defaults=_MOE_DEFAULTS
    | decoder_defaults(151936, 2048, 5632, 24, 16, kv=16, longest=32768)
    | {"num_experts": 60, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    renamed={"num_experts": "num_local_experts"},
    lacking=_lacking_dense_layers,
    has_tie_argument=True,
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), by_layer_type(_slides, always=False)),
    only={"qkv_bias": (True,)},
    heads=DECODER_HEADS,
    tensors=DecoderTensors(reads_attention_bias=False, qkv_biases=True, feed_forward=_with_shared_expert),
    tensor_fields=(*_MOE_FIELDS, "shared_expert_intermediate_size", "decoder_sparse_step"),
)
QWEN_2_FAMILY = Family(
    name="qwen2",
    title="Qwen",
    model_types=(QWEN_2, QWEN_2_MOE),
    sizes={
        "qwen2.5_0.5b": _published_qwen_2(Dims(896, 24, 14, 2, 4864), vocab=151936, tied=True),
        "qwen2.5_7b": _published_qwen_2(Dims(3584, 28, 28, 4, 18944), vocab=152064, tied=False),
        "qwen2.5_32b": _published_qwen_2(Dims(5120, 64, 40, 8, 27648), vocab=152064, tied=False),
        "qwen2.5_72b": _published_qwen_2(Dims(8192, 80, 64, 8, 29568), vocab=152064, tied=False),
        "qwen1.5_moe_a2.7b": published_decoder(
            *("qwen2_moe", "Qwen2MoeForCausalLM", Dims(2048, 24, 16, 16, 5632)),
            vocab=151936,
            tied=False,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
            norm_topk_prob=False,
            rope_theta=1000000.0,
            use_sliding_window=False,
            sliding_window=32768,
        ),
    },
    aliases={"qwen1.5_moe_2.7b": "qwen1.5_moe_a2.7b"},
    dense_experts=("QwenMoeExperts",),
    gguf=(
        GgufArchitecture(name="qwen2", config=_gguf_qwen_2, block_names=BLOCK),
        GgufArchitecture(name="qwen2moe", config=_gguf_qwen_2_moe, block_names=BLOCK | EXPERTS | _SHARED_EXPERT),
    ),
    exports={"QwenBackbone": Export(_export_qwen_2, "qwen2")},
    pre_tokenizers={"qwen2": PreTokenizer(CONTRACTIONS + WORDS % "")},
)


def _published_qwen_3(dims: Dims, *, tied: bool) -> dict[str, Any]:
    rest: dict[str, Any] = {"head_dim": 128, "rope_theta": 1000000.0}
    rest |= {"use_sliding_window": False, "sliding_window": None}
    return published_decoder("qwen3", "Qwen3ForCausalLM", dims, vocab=151936, tied=tied, **rest)


def _published_qwen_3_moe(dims: Dims, *, width: int) -> dict[str, Any]:
    rest: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width}
    rest |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {
        **_published_qwen_3(dims, tied=False),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **rest,
    }


def _complete_qwen_3_moe(config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads")
    if config["head_dim"] is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = int(config["hidden_size"]) // heads


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}


def _export_qwen_3(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    windowed = backbone.sliding_window_size is not None
    return {
        **exported_plain_decoder(backbone, "qwen3", "Qwen3ForCausalLM"),
        "head_dim": backbone.head_dim,
        "attention_bias": False,
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if windowed else backbone.num_layers,
    }


QWEN_3 = ModelType(
    name="qwen3",
    defaults=_DEFAULTS | decoder_defaults(151936, 4096, 22016, 32, 32, kv=32, longest=32768) | {"head_dim": 128},
    has_tie_argument=True,
    checks=Checks(
        RMS_EPSILON, SILU, Rotary(1e4), by_layer_type(after_first_layers, always=False), has_unsized_windows=True
    ),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(normed_heads=True),
    tensor_fields=DECODER_FIELDS,
)
QWEN_3_MOE = ModelType(
    name="qwen3_moe",
    defaults=_MOE_DEFAULTS
    | decoder_defaults(151936, 2048, 6144, 24, 32, kv=4, longest=32768)
    | {"head_dim": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    complete=_complete_qwen_3_moe,
    renamed={"num_experts": "num_local_experts"},
    lacking=_lacking_dense_layers,
    has_tie_argument=True,
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), if_used, has_unsized_windows=True),
    heads=DECODER_HEADS,
    tensors=DecoderTensors(normed_heads=True, feed_forward=_experts),
    tensor_fields=(*_MOE_FIELDS, "decoder_sparse_step"),
)
QWEN_3_FAMILY = Family(
    name="qwen3",
    title="Qwen 3",
    model_types=(QWEN_3, QWEN_3_MOE),
    sizes={
        "qwen3_0.6b": _published_qwen_3(Dims(1024, 28, 16, 8, 3072), tied=True),
        "qwen3_8b": _published_qwen_3(Dims(4096, 36, 32, 8, 12288), tied=False),
        "qwen3_14b": _published_qwen_3(Dims(5120, 40, 40, 8, 17408), tied=False),
        "qwen3_32b": _published_qwen_3(Dims(5120, 64, 64, 8, 25600), tied=False),
        "qwen3_30b_a3b": _published_qwen_3_moe(Dims(2048, 48, 32, 4, 6144), width=768),
        "qwen3_235b_a22b": _published_qwen_3_moe(Dims(4096, 94, 64, 4, 12288), width=1536),
    },
    aliases={"qwen3_moe_30b_a3b": "qwen3_30b_a3b", "qwen3_moe_235b_a22b": "qwen3_235b_a22b"},
    dense_experts=("Qwen3MoeExperts",),
    gguf=(
        GgufArchitecture(
            name="qwen3",
            config=lambda values: decoder_entries(values, "qwen3", "Qwen3ForCausalLM") | _NO_WINDOW,
            block_names=BLOCK,
        ),
        GgufArchitecture(
            name="qwen3moe",
            config=lambda values: (
                decoder_entries(values, "qwen3_moe", "Qwen3MoeForCausalLM")
                | expert_entries(values)
                | {"norm_topk_prob": True, **_NO_WINDOW}
            ),
            block_names=BLOCK | EXPERTS,
        ),
    ),
    exports={"Qwen3Backbone": Export(_export_qwen_3, "qwen2")},
)


QWEN_3_5 = ModelType(
    name="qwen3_5",
    only={"hidden_act": ("silu", "swish", None)},
    outside={r"mtp\..+": "layers that predict several tokens ahead, which transformers leaves out too"},
)
QWEN_3_5_FAMILY = Family(
    name="qwen3_5",
    title="Qwen 3.5",
    model_types=(QWEN_3_5, replace(QWEN_3_5, name="qwen3_5_moe")),
    dense_experts=("Qwen3_5MoeExperts",),
    gguf_refused=dict.fromkeys(
        ("qwen35", "qwen35moe"), "it stores -exp(A_log), from which A_log cannot be recovered bit for bit"
    ),
)
