"""Qwen 2 and 2.5, and their mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.checks import RMS_EPSILON, SILU, Checks, after_first_layers, by_layer_type
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import (
    Export,
    LayerSettings,
    VariablePart,
    expert_matrices,
    exported_plain_decoder,
)
from shardload.families.parts.gguf import BLOCK, CONTRACTIONS, EXPERTS, WORDS, GgufArchitecture, PreTokenizer
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, expert_entries
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, DECODER_HEADS, DecoderTensors, TensorSpec, gated_mlp
from shardload.families.record import Family, ModelType

MOE_FIELDS = (*DECODER_FIELDS, "num_experts", "moe_intermediate_size")
QWEN_DEFAULTS = ROTARY | {"sliding_window": 4096, "use_sliding_window": False}
MOE_DEFAULTS = QWEN_DEFAULTS | {
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}


def _published_qwen_2(dims: Dims, *, vocab: int, tied: bool) -> dict[str, Any]:
    rest: dict[str, Any] = {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768}
    return published_decoder("qwen2", "Qwen2ForCausalLM", dims, vocab=vocab, tied=tied, **rest)


def lacking_dense_layers(config: Config, name: str) -> str | None:
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


def experts(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    """Yield name and shape of the tensors of a layer's feed-forward part: router and experts, or else a gated MLP."""
    if not _has_experts(config, layer):
        yield from gated_mlp(config, f"{at}.mlp")
        return
    yield TensorSpec(f"{at}.mlp.gate.weight", (config["num_experts"], config["hidden_size"]))
    for i in range(config["num_experts"]):
        yield from gated_mlp(config, f"{at}.mlp.experts.{i}", size="moe_intermediate_size")


def experts_with_shared(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    """Yield what `experts` yields, and the tensors of the expert that computes every token."""
    yield from experts(config, layer, at)
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


def _export_qwen_2_moe(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    # As in `_export_qwen_2`. A window of the first layers, every other one, is off.
    return {
        **exported_plain_decoder(backbone, "qwen2_moe", "Qwen2MoeForCausalLM"),
        **exported_experts(backbone),
        "shared_expert_intermediate_size": backbone.shared_expert_intermediate_dim,
        "qkv_bias": True,
        "use_sliding_window": backbone.use_sliding_window_attention,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if backbone.use_sliding_window_attention else backbone.num_layers,
    }


def exported_experts(backbone: Any) -> dict[str, Any]:
    """Return the ``config.json`` entries about the experts of an exported mixture."""
    return {
        "moe_intermediate_size": backbone.moe_intermediate_dim,
        "num_experts": backbone.num_experts,
        "num_experts_per_tok": backbone.top_k,
        "norm_topk_prob": backbone.norm_top_k_prob,
        "decoder_sparse_step": backbone.decoder_sparse_step,
        "mlp_only_layers": list(backbone.mlp_only_layers),
    }


def matrices_of_experts(backbone: Any, *, at: str = "model.layers") -> Iterator[VariablePart]:
    """Yield the matrices of a mixture's experts; KerasHub's class has gate and up projection side by side.

    ``at``: start of the names of a layer's tensors.
    """
    for i, block in enumerate(backbone.transformer_layers):
        if hasattr(block.mlp, "expert_bank"):
            bank, one = block.mlp.expert_bank, f"{at}.{i}.mlp.experts.{{}}"
            yield from expert_matrices(bank._expert_feedforward_gate_dense, f"{one}.gate_proj.weight", half=0)
            yield from expert_matrices(bank._expert_feedforward_gate_dense, f"{one}.up_proj.weight", half=1)
            yield from expert_matrices(bank._expert_feedforward_output_dense, f"{one}.down_proj.weight")


QWEN_2 = ModelType(
    name="qwen2",
    defaults=QWEN_DEFAULTS | decoder_defaults(151936, 4096, 22016, 32, 32, kv=32, longest=32768),
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
    defaults=MOE_DEFAULTS
    | decoder_defaults(151936, 2048, 5632, 24, 16, kv=16, longest=32768)
    | {"num_experts": 60, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    renamed={"num_experts": "num_local_experts"},
    lacking=lacking_dense_layers,
    has_tie_argument=True,
    checks=Checks(RMS_EPSILON, SILU, Rotary(1e4), by_layer_type(_slides, always=False)),
    only={"qkv_bias": (True,)},
    heads=DECODER_HEADS,
    tensors=DecoderTensors(reads_attention_bias=False, qkv_biases=True, feed_forward=experts_with_shared),
    tensor_fields=(*MOE_FIELDS, "shared_expert_intermediate_size", "decoder_sparse_step"),
)
FAMILY = Family(
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
        GgufArchitecture(name="qwen2", model_types=("qwen2",), config=_gguf_qwen_2, block_names=BLOCK),
        GgufArchitecture(
            name="qwen2moe",
            model_types=("qwen2_moe",),
            config=_gguf_qwen_2_moe,
            block_names=BLOCK | EXPERTS | _SHARED_EXPERT,
        ),
    ),
    exports={
        "QwenBackbone": Export(_export_qwen_2, "qwen2", ("qwen2",)),
        "QwenMoeBackbone": Export(_export_qwen_2_moe, "qwen2", ("qwen2_moe",), matrices_of_experts),
    },
    pre_tokenizers={"qwen2": PreTokenizer(CONTRACTIONS + WORDS % "")},
)
