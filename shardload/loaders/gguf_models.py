"""Translate GGUF architectures to Hugging Face: tensor names, and transformations to undo.

GGUF has one name table for all models (``blk.0.attn_q.weight``); KerasHub's converters want Hugging Face's names
and configuration (`gguf_config`). shardload has small tables of its own, because the gguf package maps in the other
direction and to several names for each tensor; a test compares them with it.

A mixture's experts are one tensor in GGUF, and one tensor each in Hugging Face; ``{}`` is their number::

    blk.0.ffn_up_exps.weight   (experts, out, in)   ─►   model.layers.0.mlp.experts.{}.up_proj.weight   (out, in)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.gguf_config import CONFIGS, bert_kind
from shardload.loaders.gguf_header import GgufHeader, TensorInfo
from shardload.loaders.gguf_rows import Undo
from shardload.loaders.gguf_values import Config, Values

MAX_EXPERTS, MIN_EXPERT_BYTES = 1024, 64
"""Limits for a stack of experts: a damaged header must not describe millions of empty ones."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **_MLP,
}
_SANDWICH = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma 2 and 3 have a norm before and after each half of a block."""
_GEMMA4_TOP = _TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA4 = _SANDWICH | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_BARE = frozenset(
    {
        *("self_attn.sinks", "layer_scalar", "router.scale", "router.per_expert_scale"),
        *("experts.gate_up_proj", "experts.down_proj"),
    }
)
"""Hugging Face's parameters whose names do not end in ``.weight``."""
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOOM_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_GPT_OSS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_FUSED = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})
"""GPT-OSS' experts, which `gguf_experts` names."""
_ROPE_FREQS = frozenset({"rope_freqs.weight"})
_LONG_ROPE = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
_DISTILBERT_TOP = {name: hf for name, hf in _BERT_TOP.items() if name != "token_types"}
_DISTILBERT = {
    "attn_q": "attention.q_lin",
    "attn_k": "attention.k_lin",
    "attn_v": "attention.v_lin",
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}
_PERMUTED = {"attn_q": Undo.UNPERMUTE, "attn_k": Undo.UNPERMUTE}
_CONV1D = dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), Undo.TRANSPOSE)
"""GPT-2's ``Conv1D`` stores (in, out); llama.cpp transposes it to (out, in), as in all other models."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One value of ``general.architecture``."""

    block_names: Mapping[str, str]
    """GGUF part of a block → Hugging Face's."""
    top_names: Mapping[str, str] = field(default_factory=lambda: _TOP)
    """The same for tensors outside of blocks."""
    block: str = "model.layers"
    """Hugging Face's name of the list of blocks."""
    undone: Mapping[str, Undo] = field(default_factory=dict)
    """GGUF part of a block → what the converter to GGUF did to it."""
    norms_plus_one: bool = False
    rope_factors: frozenset[str] = frozenset()
    """Tensors with factors of rotary positions, which `gguf_config` reads: part of the configuration, not learnt."""
    fuses_experts: bool = False
    """Whether `gguf_experts` makes the tensors of experts."""

    def hf_name(self, name: str, path: str) -> str | None:
        """Return the Hugging Face name of a tensor; ``None`` for one that is not a weight.

        Raises:
            UnsupportedError: When the architecture has no such tensor.
        """
        if name in self.rope_factors:
            return None
        stem, _, suffix = name.rpartition(".")
        # Six digits at most: a hostile name must not reach int(), which raises for thousands of digits.
        block = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)(?:\.(\d{1,6}))?", stem)
        if self.fuses_experts and block and block[2] in _FUSED:
            return None
        part = self.top_names.get(stem) if block is None else self._part(block[2], block[3])
        # Gemma 4 has `ffn_gate_inp.scale` and `ffn_gate_inp.weight`; all other suffixes are weight and bias only.
        if block and f"{block[2]}.{suffix}" in self.block_names:
            part = self.block_names[f"{block[2]}.{suffix}"]
        elif suffix not in {"weight", "bias"}:
            part = None
        if part is None:
            raise UnsupportedError(
                f"{path}: tensor {name!r} has no counterpart in Hugging Face's layout of this architecture "
                "(vision tensors and other additions are not supported). Load the safetensors of this model instead"
            )
        ending = "" if part in _BARE else f".{suffix}"
        return f"{self.block}.{int(block[1])}.{part}{ending}" if block else f"{part}{ending}"

    def pieces(self, info: TensorInfo, path: str) -> Iterator[tuple[str, TensorInfo, Undo]]:
        """Yield a tensor, or the experts in it, with Hugging Face's names and the transformations to undo.

        Raises:
            UnsupportedError: When the architecture has no such tensor.
            SourceError: When it should be a stack of experts and is not.
        """
        name = self.hf_name(info.name, path)
        if name is None:
            return
        if "{}" in name:
            for i, expert in enumerate(_experts(info)):
                yield name.format(i), expert, Undo.NOTHING
        elif "shared_expert_gate" in name and len(info.shape) == 1:
            # Older converters dropped this dim.
            yield name, replace(info, shape=(1, *info.shape)), Undo.NOTHING
        else:
            yield name, info, self.undo(info.name)

    def undo(self, name: str) -> Undo:
        """Return the transformation to undo for the GGUF tensor ``name``."""
        stem, _, suffix = name.rpartition(".")
        if self.norms_plus_one and stem.endswith("norm"):
            return Undo.MINUS_ONE
        found = self.undone.get(stem.rpartition(".")[2], Undo.NOTHING)
        # A bias is a vector: nothing to transpose. Permutations of rows apply to it as well.
        return Undo.NOTHING if found is Undo.TRANSPOSE and suffix == "bias" else found

    def _part(self, part: str, expert: str | None) -> str | None:
        if expert is None:
            return self.block_names.get(part)
        # Files from before April 2024 have one tensor for each expert.
        stacked = self.block_names.get(f"{part}_exps")
        return stacked and stacked.format(int(expert))


def _experts(info: TensorInfo) -> Iterator[TensorInfo]:
    """Yield each expert of a stack as a tensor of its own."""
    count = info.shape[0]
    if len(info.shape) != 3 or not 0 < count <= MAX_EXPERTS or info.nbytes < MIN_EXPERT_BYTES * count:
        raise SourceError(
            f"{info.path}: tensor {info.name!r} has the shape {info.shape}, expected (experts, out, in) with at most "
            f"{MAX_EXPERTS} experts"
        )
    for i in range(count):
        share = info.nbytes // count
        yield replace(info, shape=info.shape[1:], offset=info.offset + i * share, span=share)


def architecture(header: GgufHeader, path: str) -> GgufArchitecture:
    """Return the architecture that a header names.

    Raises:
        UnsupportedError: When it is not in `ARCHITECTURES`.
    """
    name = header.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reason = f" ({_REASONS[str(name)]})" if name in _REASONS else ""
        raise UnsupportedError(
            f"{path} has the architecture {name!r}, which is not supported{reason}. GGUF is supported for "
            f"{', '.join(ARCHITECTURES)}. Load the safetensors of this model instead"
        )
    return _BERTS[bert_kind(Values(header, path))] if name == "bert" else ARCHITECTURES[name]


def config(header: GgufHeader, path: str, *, rope_factors: Mapping[str, tuple[float, ...]] | None = None) -> Config:
    """Return a Hugging Face ``config.json`` that KerasHub's converters accept.

    Raises:
        SourceError: When a key is missing or contradicts the tensors.
        UnsupportedError: When the configuration cannot express the model.
    """
    values = Values(header, path, rope_factors or {})
    architecture(header, path)
    return CONFIGS[values.architecture](values)


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "gemma": GgufArchitecture(_BLOCK, norms_plus_one=True),
    "gemma2": GgufArchitecture(_SANDWICH, norms_plus_one=True),
    "gemma3": GgufArchitecture(_SANDWICH, norms_plus_one=True),
    "gemma4": GgufArchitecture(_GEMMA4, _GEMMA4_TOP, rope_factors=_ROPE_FREQS),
    "llama": GgufArchitecture(_BLOCK | _MIXTRAL, undone=_PERMUTED, rope_factors=_ROPE_FREQS),
    "smollm3": GgufArchitecture(_BLOCK, undone=_PERMUTED, rope_factors=_ROPE_FREQS),
    "qwen2": GgufArchitecture(_BLOCK),
    "qwen2moe": GgufArchitecture(_BLOCK | _EXPERTS | _SHARED_EXPERT),
    "qwen3": GgufArchitecture(_BLOCK),
    "qwen3moe": GgufArchitecture(_BLOCK | _EXPERTS),
    "gpt-oss": GgufArchitecture(_GPT_OSS, fuses_experts=True),
    "gpt2": GgufArchitecture(_GPT2, _GPT2_TOP, "transformer.h", _CONV1D),
    "phi3": GgufArchitecture(_PHI3, rope_factors=_LONG_ROPE),
    "bloom": GgufArchitecture(_BLOOM, _BLOOM_TOP, "transformer.h", {"attn_qkv": Undo.UNFUSE}),
    "gemma-embedding": GgufArchitecture(_SANDWICH, norms_plus_one=True),
    "bert": GgufArchitecture(_BERT, _BERT_TOP, "encoder.layer"),
}
_ROBERTA = replace(ARCHITECTURES["bert"], undone={"position_embd": Undo.DROP_TWO})
_BERTS: Mapping[str, GgufArchitecture] = {
    "bert": ARCHITECTURES["bert"],
    "distilbert": GgufArchitecture(_DISTILBERT, _DISTILBERT_TOP, "transformer.layer"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""``model_type`` → what the architecture ``bert`` means for it."""
_REASONS: Mapping[str, str] = {
    "clip": "it is the vision part of another file: load the model itself, without mmproj",
    "falcon": "KerasHub's Falcon has ALiBi and biases, like Falcon-RW; llama.cpp's has neither",
    **dict.fromkeys(("qwen35", "qwen35moe"), "it stores -exp(A_log), from which A_log cannot be recovered bit for bit"),
    "gptneox": "KerasHub's GPTNeoX uses the embedding as output layer; these models have a separate one",
}
"""Why an architecture that KerasHub seems to have is not supported."""
