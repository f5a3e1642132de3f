"""GGUF architectures: their names for tensors, and a Hugging Face configuration from the key-values of a header.

GGUF has one name table for all models (``blk.0.attn_q.weight``); KerasHub's converters want Hugging Face's names and
configuration. shardload has small tables of its own, because the gguf package maps in the other direction and to
several names for each tensor; a test compares them with it.

A mixture's experts are one tensor in GGUF, and one tensor each in Hugging Face; ``{}`` is their number::

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
"""A norm before and after each half of a block, as Gemma 2 and later have."""
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
ROPE_FREQS = frozenset({"rope_freqs.weight"})


class Undo(Enum):
    """The transformation that the converter to GGUF applied to a tensor; `shardload.loaders.gguf.rows` undoes it."""

    NOTHING = "nothing"
    MINUS_ONE = "minus one"
    DROP_TWO = "drop two"
    TRANSPOSE = "transpose"
    UNPERMUTE = "unpermute"
    UNFUSE = "unfuse"


PERMUTED = {"attn_q": Undo.UNPERMUTE, "attn_k": Undo.UNPERMUTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One value of ``general.architecture``, or one of several kinds of models that share it."""

    name: str
    config: Callable[[GgufValues], dict[str, Any]]
    """Returns a ``config.json`` that KerasHub's converter accepts."""
    applies: Callable[[GgufValues], bool] = lambda values: True
    """Whether a file of this name is of this kind; kinds that share a name exclude one another."""
    block_names: Mapping[str, str]
    """GGUF part of a block → Hugging Face's."""
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP)
    """GGUF name outside of blocks → Hugging Face's."""
    block: str = "model.layers"
    """Hugging Face's name of the list of blocks."""
    bare: frozenset[str] = frozenset()
    """Hugging Face's parameters whose names do not end in ``.weight``."""
    undone: Mapping[str, Undo] = field(default_factory=dict)
    """GGUF part of a block → what the converter to GGUF did to it."""
    norms_plus_one: bool = False
    rope_factors: frozenset[str] = frozenset()
    """Tensors with factors of rotary positions, which `config` reads: part of the configuration, not learnt."""
    fused_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hugging Face's tensor of all experts → the GGUF parts of a block whose outputs it interleaves."""

    def hf_name(self, name: str, path: str) -> str | None:
        """Return the Hugging Face name of a tensor; ``None`` for one that is not a weight."""
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


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Expressions differ mostly in how they split numbers: up to three digits at a time, one by one, or not at all.
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words of a text; ``%s`` says how many digits are one."""


class GgufTokenizer(StrEnum):
    """Supported values of ``tokenizer.ggml.model``: algorithms, named after the first model of each in llama.cpp."""

    SENTENCEPIECE = "llama"
    BYTE_PAIRS = "gpt2"
    SPACED_PAIRS = "gemma4"
    """Pieces as in SentencePiece, and merges."""
    WORD_PIECES = "bert"
    UNIGRAMS = "t5"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split into words before byte pairs are merged: a value of ``tokenizer.ggml.pre``."""

    words: str | None
    """Expression that finds words; ``None``: GPT-2's, which is built into tokenizers."""
    takes_whole_words: bool = False
    """Whether a word that is in the vocabulary is taken as it is, even if no merges lead to it."""
    starts_texts: bool = False
    """Whether a text begins with the start token, if the header does not say."""
    surrounds_texts: bool = False
    """Whether the model has tokens before and after each text, as encoders do, not a start token before a prompt."""
