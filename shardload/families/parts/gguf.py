"""GGUF architectures: how to turn a file's tensor names and header into Hugging Face's names and ``config.json``.

GGUF names tensors alike in all models (``blk.0.attn_q.weight``), but KerasHub's converters read Hugging Face's names.
The tables are shardload's own: the package gguf only maps from Hugging Face's names to GGUF's.

GGUF has one tensor for all experts of a layer, Hugging Face one for each expert; ``{}`` is an expert's number::

    blk.0.ffn_up_exps.weight   (experts, out, in)   ─►   model.layers.0.mlp.experts.{}.up_proj.weight   (out, in)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.gguf_values import GgufValues

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""GGUF's name of a layer → Hugging Face's, for blocks with norms before and after attention and MLP, as in Gemma 2."""
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
ROPE_FREQS = frozenset({"rope_freqs.weight"})


class Undo(Enum):
    """How the program that wrote a GGUF file changed a tensor; `shardload.loaders.gguf.rows` reverses the change."""

    NOTHING = "nothing"
    MINUS_ONE = "minus one"
    DROP_TWO = "drop two"
    TRANSPOSE = "transpose"
    UNPERMUTE = "unpermute"
    UNFUSE = "unfuse"


PERMUTED = {"attn_q": Undo.UNPERMUTE, "attn_k": Undo.UNPERMUTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How to read GGUF files of one ``general.architecture``, or of one of its models (``bert``: BERT, RoBERTa, …)."""

    name: str
    config: Callable[[GgufValues], dict[str, Any]]
    """Takes the values of a header; returns a ``config.json`` that KerasHub's converter accepts."""
    applies: Callable[[GgufValues], bool] = lambda values: True
    """Takes the values of a header; returns whether the file has this kind of model. Several kinds may share one
    ``name``: ``bert`` stands for BERT, DistilBERT and RoBERTa."""
    block_names: Mapping[str, str]
    """GGUF's name of a layer within a block (``attn_q``) → Hugging Face's (``self_attn.q_proj``)."""
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP)
    """GGUF's name of a layer outside of blocks (``token_embd``) → Hugging Face's (``model.embed_tokens``)."""
    model_types: tuple[str, ...] = ()
    """The ``model_type`` values of the configurations that `config` returns."""
    block: str = "model.layers"
    """Start of Hugging Face's names of layers in blocks: all that comes before the number of the block."""
    bare: frozenset[str] = frozenset()
    """Hugging Face's names of layers that are whole names of tensors (``router.scale``): no ``.weight`` is added."""
    undone: Mapping[str, Undo] = field(default_factory=dict)
    """GGUF's name of a layer → how the program that wrote the file changed the layer's tensors: a load undoes it."""
    norms_plus_one: bool = False
    rope_factors: frozenset[str] = frozenset()
    """Names of GGUF tensors with factors for rotary positions. They are settings, which `config` reads, not weights."""
    fused_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hugging Face's tensor of all experts → GGUF's layers that it joins, column by column: gate, up, gate, up, …"""

    def hf_name(self, name: str, path: str) -> str | None:
        """Return Hugging Face's name of a GGUF tensor; ``None`` if it becomes a setting or part of another tensor."""
        if name in self.rope_factors:
            return None
        stem, _, suffix = name.rpartition(".")
        # Six digits at most: a hostile name must not reach int(), which raises for thousands of digits.
        block = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)(?:\.(\d{1,6}))?", stem)
        if block and any(block[2] in parts for parts in self.fused_experts.values()):
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
        ending = "" if part in self.bare else f".{suffix}"
        return f"{self.block}.{int(block[1])}.{part}{ending}" if block else f"{part}{ending}"

    def undo(self, name: str) -> Undo:
        """Return how the program that wrote the file changed the tensor ``name``: a load must undo it."""
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


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Expressions differ mostly in how they split numbers: up to three digits at a time, one by one, or not at all.
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Regular expression that finds words in a text, appended to `CONTRACTIONS`. ``%s`` stands for how many digits a word
may have (``{1,3}``)."""


class GgufTokenizer(StrEnum):
    """Supported kinds of tokenizers (``tokenizer.ggml.model``), which llama.cpp names after the first model of each."""

    SENTENCEPIECE = "llama"
    BYTE_PAIRS = "gpt2"
    SPACED_PAIRS = "gemma4"
    """Byte-pair merging over a text in which each space was replaced with ``▁``."""
    WORD_PIECES = "bert"
    UNIGRAMS = "t5"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split into words before byte pairs are merged: a value of ``tokenizer.ggml.pre``."""

    words: str | None
    """Regular expression that finds words; ``None``: GPT-2's expression, which the package ``tokenizers`` contains."""
    takes_whole_words: bool = False
    """Whether a word that is in the vocabulary is one token, even if no merges lead to it."""
    starts_texts: bool = False
    """Whether to put the start token before a text; a setting in a file's header takes precedence."""
    surrounds_texts: bool = False
    """Whether each text gets a token before and after it, as encoders expect, instead of just a start token."""
