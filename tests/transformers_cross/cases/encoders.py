"""Encoders of text, GPT-2 and BART: the older families, whose folders hold the most that is no weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers_cross.cases.parts import ENCODER, LABELS, Case, Config

GPT2: Config = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
BART: Config = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
DISTILBERT: Config = {
    "vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40,
}  # fmt: skip
ESM: Config = {**ENCODER, "position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False}


@dataclass(frozen=True, slots=True)
class Family:
    """An encoder."""

    name: str
    stem: str
    config: Config

    def case(self, variant: str, cls: str = "Model", changed: Config | None = None, **options: Any) -> Case:
        """One folder, whose configuration is ``changed``."""
        return Case(self.name, variant, f"{self.stem}{cls}", {**self.config, **(changed or {})}, **options)


FAMILIES = (
    Family("bert", "Bert", ENCODER), Family("roberta", "Roberta", {**ENCODER, "type_vocab_size": 1}),
    Family("xlm-roberta", "XLMRoberta", {**ENCODER, "type_vocab_size": 1}),
    Family("albert", "Albert", {**ENCODER, "embedding_size": 16}), Family("esm", "Esm", ESM),
    Family("distilbert", "DistilBert", DISTILBERT),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _gpt2()
    for family in FAMILIES:
        for some in (_heads, _writers, _faults, _fields, _of_one):
            yield from some(family)
    yield from _bart()


def _heads(family: Family) -> Iterator[Case]:
    yield family.case("base model")
    yield family.case("base model, transformers 4", writer=4, mesh="2x2")
    yield family.case("masked LM", "ForMaskedLM")
    yield family.case("masked LM, transformers 4", "ForMaskedLM", writer=4)
    yield family.case("classifier", "ForSequenceClassification", LABELS)
    yield family.case("tagger", "ForTokenClassification", LABELS)
    if family.name != "esm":
        yield family.case("questions", "ForQuestionAnswering")


def _writers(family: Family) -> Iterator[Case]:
    yield family.case("bfloat16", dtype="bfloat16", mesh="1x8")
    yield family.case("bfloat16, masked LM", "ForMaskedLM", dtype="bfloat16")
    yield family.case("sharded", "ForMaskedLM", sharded=True)
    yield family.case("position_ids", edits=("position_ids",))
    yield family.case("position_ids, masked LM", "ForMaskedLM", edits=("position_ids",), writer=4)


def _faults(family: Family) -> Iterator[Case]:
    yield family.case("a norm is missing", edits=("no_layer_norm",))
    if family.name != "esm":  # transformers 5 cannot load that one
        yield family.case("num_hidden_layers too small", edits=("one_layer_fewer",))


def _fields(family: Family) -> Iterator[Case]:
    if family.name != "esm":
        key = "activation" if family.name == "distilbert" else "hidden_act"
        yield family.case("another activation", changed={key: "relu"})
        yield family.case("GELU by tanh", changed={key: "gelu_new"})
    if family.name not in ("esm", "distilbert"):
        yield family.case("another epsilon", changed={"layer_norm_eps": 0.1})


def _of_one(family: Family) -> Iterator[Case]:
    match family.name:
        case "bert":
            yield family.case("pretraining", "ForPreTraining")
            yield family.case("gamma and beta", "ForPreTraining", edits=("gamma_beta", "position_ids"))
            yield family.case("one token type", changed={"type_vocab_size": 1})
            yield family.case("no positions, transformers 4", changed={"position_embedding_type": None}, writer=4)
            yield family.case("decoder", "LMHeadModel", {"is_decoder": True})
        case "roberta" | "xlm-roberta":
            yield family.case("token types of zeros", edits=("zero_token_types",))
            yield family.case("token types of zeros, masked LM", "ForMaskedLM", edits=("zero_token_types",), writer=4)
            yield family.case("decoder", "ForCausalLM", {"is_decoder": True})
            yield family.case("2 token types", changed={"type_vocab_size": 2})
        case "albert":
            yield family.case("defaults left out", edits=("defaults_left_out",))
            yield family.case("2 groups", changed={"num_hidden_groups": 2})
            yield family.case("2 inner groups", changed={"inner_group_num": 2})
        case "esm":
            yield family.case("inv_freq", edits=("inv_freq",))
            yield family.case("absolute positions", changed={"position_embedding_type": "absolute"})
            yield family.case("token_dropout", changed={"token_dropout": True})
            yield family.case("layer norm before", changed={"emb_layer_norm_before": True})
        case "distilbert":
            yield family.case("sinusoidal", changed={"sinusoidal_pos_embds": True})


def _gpt2() -> Iterator[Case]:
    family = Family("gpt2", "GPT2", GPT2)
    lm = "LMHeadModel"
    yield family.case("tied", lm)
    yield family.case("transformers 4", lm, writer=4, mesh="2x2")
    yield family.case("untied", lm, {"tie_word_embeddings": False})
    yield family.case("bfloat16", lm, dtype="bfloat16")
    yield family.case("sharded", lm, sharded=True)
    yield family.case("causal masks", lm, edits=("causal_masks",))
    yield family.case("causal masks, no prefix", lm, edits=("no_prefix", "causal_masks"))
    yield family.case("causal masks, transformers 4", lm, edits=("causal_masks",), writer=4)
    yield family.case("tied, head stored too", lm, edits=("tied_copy",))
    yield family.case("base model")
    yield family.case("classifier", "ForSequenceClassification", LABELS)
    yield family.case("n_inner", lm, {"n_inner": 48})
    yield family.case("another activation", lm, {"activation_function": "relu"})
    yield family.case("scale_attn_weights off", lm, {"scale_attn_weights": False})
    yield family.case("scale by inverse layer", lm, {"scale_attn_by_inverse_layer_idx": True})
    yield family.case("another epsilon", lm, {"layer_norm_epsilon": 0.1})
    yield family.case("num_hidden_layers too small", lm, edits=("one_layer_fewer",))


def _bart() -> Iterator[Case]:
    family = Family("bart", "Bart", BART)

    def case(
        variant: str, cls: str = "ForConditionalGeneration", changed: Config | None = None, **options: Any
    ) -> Case:
        return family.case(variant, cls, changed, ask="text to text", **options)

    yield case("base model", "Model")
    yield case("base model, transformers 4", "Model", writer=4)
    yield case("LM")
    yield case("LM, transformers 4", writer=4, mesh="2x2")
    yield case("bfloat16", dtype="bfloat16")
    yield case("sharded", sharded=True)
    yield case("scale_embedding", changed={"scale_embedding": True})
    yield case("other decoder width", "Model", {"decoder_ffn_dim": 64})
    yield case("other decoder depth", "Model", {"decoder_layers": 1})
    yield case("other decoder heads", "Model", {"decoder_attention_heads": 2})
    yield case("another activation", "Model", {"activation_function": "relu"})
    yield case("GELU by tanh", "Model", {"activation_function": "gelu_new"})
