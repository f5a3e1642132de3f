"""GPT-2, whose ``Conv1D`` layers store matrices as (in, out), and the related models Falcon and GPT-NeoX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer, Undo
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.parts.tensors import TensorSpec, affine, norm
from shardload.families.record import Family, KerasTokenizer, ModelType


def _published_gpt_2(*, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
    }


_GPT_2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT_2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_CONV1D = dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), Undo.TRANSPOSE)
"""Layers of a GGUF file whose matrices are transposed when read: it has (out, in), GPT-2's ``Conv1D`` (in, out)."""


def _gguf_gpt_2(values: GgufValues) -> dict[str, Any]:
    return model_entries(values, "gpt2", "GPT2LMHeadModel") | {
        "n_embd": values.count("embedding_length"),
        "n_inner": values.count("feed_forward_length"),
        "n_layer": values.count("block_count"),
        "n_head": values.count("attention.head_count"),
        "n_positions": values.count("context_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def _gpt_2_tensors(config: Config) -> Iterator[TensorSpec]:
    hidden, intermediate = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
    yield TensorSpec("wte.weight", (config["vocab_size"], hidden))
    yield TensorSpec("wpe.weight", (config["n_positions"], hidden))
    for i in range(config["n_layer"]):
        yield from norm(f"h.{i}.ln_1", hidden)
        yield from affine(f"h.{i}.attn.c_attn", (hidden, 3 * hidden), out=3 * hidden)
        yield from affine(f"h.{i}.attn.c_proj", (hidden, hidden), out=hidden)
        yield from norm(f"h.{i}.ln_2", hidden)
        yield from affine(f"h.{i}.mlp.c_fc", (hidden, intermediate), out=intermediate)
        yield from affine(f"h.{i}.mlp.c_proj", (intermediate, hidden), out=hidden)
    yield from norm("ln_f", hidden)


def _export_gpt_2(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": backbone.vocabulary_size,
        "n_embd": backbone.hidden_dim,
        "n_layer": backbone.num_layers,
        "n_head": backbone.num_heads,
        "n_inner": None if backbone.intermediate_dim == 4 * backbone.hidden_dim else backbone.intermediate_dim,
        "n_positions": backbone.max_sequence_length,
        "activation_function": layers.activation,
        "layer_norm_epsilon": layers.epsilon,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), backbone.dropout),
        "tie_word_embeddings": True,
    }


GPT_2 = ModelType(
    name="gpt2",
    has_conv1d=True,
    defaults={"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.1},
    checks=Checks(
        ("layer_norm_epsilon", 1e-5), ("activation_function", "gelu_new"), arguments={"n_inner": "intermediate_dim"}
    ),
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False, None)},
    heads=r"score\.|classifier\.|qa_outputs\.|multiple_choice_head\.",
    tensors=_gpt_2_tensors,
    tensor_fields=("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
    keras_tokenizer=KerasTokenizer({"vocabulary.json": "vocab.json", "merges.txt": "merges.txt"}),
)
GPT_2_FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    model_types=(GPT_2,),
    sizes={
        "gpt2_base": _published_gpt_2(hidden=768, layers=12, heads=12),
        "gpt2_extra_large": _published_gpt_2(hidden=1600, layers=48, heads=25),
    },
    aliases={"gpt2": "gpt2_base"},
    gguf=(
        GgufArchitecture(
            name="gpt2",
            model_types=("gpt2",),
            config=_gguf_gpt_2,
            block_names=_GPT_2_BLOCK,
            top_names=_GPT_2_TOP,
            block="transformer.h",
            undone=_CONV1D,
        ),
    ),
    exports={"GPT2Backbone": Export(_export_gpt_2, model_types=("gpt2",))},
    pre_tokenizers={"gpt-2": PreTokenizer(None), "default": PreTokenizer(None)},
)


FALCON_FAMILY = Family(
    name="falcon",
    title="Falcon",
    gguf_refused={"falcon": "KerasHub's Falcon has ALiBi and biases, like Falcon-RW; llama.cpp's has neither"},
)


GPT_NEOX_FAMILY = Family(
    name="gpt_neox",
    title="GPT-NeoX",
    gguf_refused={"gptneox": "KerasHub's GPTNeoX uses the embedding as output layer; these models have a separate one"},
)
