"""Decoders, each in every variant that folders of decoders come in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers_cross.cases.parts import (
    DECODER,
    EXPERTS,
    FULL,
    HEAD_DIM,
    KV_1,
    KV_3,
    KV_4,
    LABELS,
    SLIDING,
    TIED,
    Case,
    Config,
)

SCALINGS: dict[str, Config] = {
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip
"""Ways to stretch rotary embeddings. All but the last change the outputs of twelve tokens."""
METHODS = ("fp8_without_scales", "peft")


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder and the least that it needs to be configured."""

    name: str
    stem: str
    """What its classes begin with."""
    changed: Config
    theta: float = 5000.0
    """Base of the rotary embeddings; not 10000, which some code takes where it finds none."""
    causal: str = ""

    @property
    def config(self) -> Config:
        """As `transformers` 5 takes it."""
        return {**DECODER, **self.rope(rope_type="default"), **self.changed}

    @property
    def config_4(self) -> Config:
        """As `transformers` 4 takes it."""
        return {**DECODER, **({"rope_theta": self.theta} if self.theta else {}), **self.changed}

    def rope(self, **scaling: Any) -> Config:
        """Rotary embeddings, scaled."""
        return {"rope_parameters": {"rope_theta": self.theta, **scaling}} if self.theta else {}

    def case(self, variant: str, changed: Config | None = None, cls: str = "ForCausalLM", **options: Any) -> Case:
        """One folder, whose configuration is ``changed``."""
        base = self.config_4 if options.get("writer") == 4 else self.config
        name = self.causal if self.causal and cls == "ForCausalLM" else f"{self.stem}{cls}"
        return Case(self.name, variant, name, {**base, **(changed or {})}, **options)


_SMALL_MOE: Config = {**EXPERTS, "num_experts": 4}
_GEMMA_2: Config = {"query_pre_attn_scalar": 8, "sliding_window": 4, **HEAD_DIM, **TIED}
FAMILIES = (
    Family("llama", "Llama", {}),
    Family("mistral", "Mistral", {"sliding_window": 4, **HEAD_DIM}),
    Family("mixtral", "Mixtral", {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("qwen2", "Qwen2", {"use_sliding_window": False}),
    Family("qwen2_moe", "Qwen2Moe", {"use_sliding_window": False, **_SMALL_MOE, "shared_expert_intermediate_size": 40}),
    Family("qwen3", "Qwen3", {"use_sliding_window": False, **HEAD_DIM}),
    Family("qwen3_moe", "Qwen3Moe", {"use_sliding_window": False, **HEAD_DIM, **_SMALL_MOE}),
    Family("smollm3", "SmolLM3", {"no_rope_layers": [1, 0], "layer_types": [FULL] * 2}),
    Family("gemma", "Gemma", {**HEAD_DIM, **TIED}, theta=10000.0),
    Family("gemma2", "Gemma2", _GEMMA_2, theta=10000.0),
    Family(
        "gemma3_text", "Gemma3Text", {**_GEMMA_2, "layer_types": [SLIDING] * 2}, theta=0, causal="Gemma3ForCausalLM"
    ),
    Family(
        "gpt_oss",
        "GptOss",
        {**HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        theta=0,
    ),
)


def cases() -> Iterator[Case]:
    """All of them."""
    for family in FAMILIES:
        for some in (_ties, _sizes, _writers, _faults, _biases, _rotary, _windows, _scalars, _layers, _directions):
            yield from some(family)
        yield from _quantised(family)
    yield from _phi3()
    yield from _bloom()


def _phi3() -> Iterator[Case]:
    family = Family("phi3", "Phi3", {"sliding_window": None})
    short, long = [1.0, 1.25, 1.5, 1.75], [2.0, 4.0, 8.0, 16.0]
    stretched = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    yield family.case("untied")
    yield family.case("tied", TIED)
    yield family.case("bfloat16", dtype="bfloat16")
    yield family.case("sharded", sharded=True, mesh="2x2")
    yield family.case("base model", cls="Model")
    yield family.case("1 KV head", KV_1, mesh="1x8")
    yield family.case("4 KV heads", KV_4, mesh="2x2")
    yield family.case("longrope, short text", {"original_max_position_embeddings": 32, **family.rope(**stretched)})
    yield family.case("longrope, long text", {"original_max_position_embeddings": 8, **family.rope(**stretched)})
    yield family.case("sliding window", {"sliding_window": 4})
    yield family.case("partial_rotary_factor", family.rope(rope_type="default", partial_rotary_factor=0.5))


def _bloom() -> Iterator[Case]:
    config = {k: DECODER[k] for k in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}

    def case(variant: str, changed: Config | None = None, cls: str = "ForCausalLM", **options: Any) -> Case:
        sizes = {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        return Case("bloom", variant, f"Bloom{cls}", {**config, **sizes, **(changed or {})}, **options)

    yield case("tied")
    yield case("bfloat16", dtype="bfloat16")
    yield case("sharded", sharded=True, mesh="2x2")
    yield case("base model", cls="Model")
    yield case("6 heads", {"hidden_size": 48, "n_head": 6})
    yield case("untied", {"tie_word_embeddings": False})
    yield case("residual after the norm", {"apply_residual_connection_post_layernorm": True})


def _ties(family: Family) -> Iterator[Case]:
    if not family.changed.get("tie_word_embeddings"):
        yield family.case("untied")
        yield family.case("untied, transformers 4", writer=4)
    yield family.case("tied", TIED)
    yield family.case("tied, transformers 4", TIED, writer=4)
    yield family.case("tied, head stored too", TIED, edits=("tied_copy",))
    yield family.case("tied, another head stored", TIED, edits=("tied_differing",))


def _sizes(family: Family) -> Iterator[Case]:
    scalar = {"query_pre_attn_scalar": 16} if "query_pre_attn_scalar" in family.changed else {}
    yield family.case("1 KV head", KV_1, mesh="1x8")
    yield family.case("3 KV heads", KV_3)
    yield family.case("4 KV heads", KV_4, mesh="2x2")
    yield family.case("head_dim is not hidden / heads", {"head_dim": 16, **scalar})


def _writers(family: Family) -> Iterator[Case]:
    yield family.case("bfloat16", dtype="bfloat16")
    yield family.case("bfloat16, transformers 4", dtype="bfloat16", writer=4)
    yield family.case("sharded", sharded=True, mesh="2x2")
    yield family.case("base model", cls="Model")
    yield family.case("base model, transformers 4", cls="Model", writer=4)
    yield family.case("inv_freq", edits=("inv_freq",))
    yield family.case("no architectures", edits=("no_architectures",))
    if family.name in ("mixtral", "qwen2_moe", "qwen3_moe", "smollm3"):
        plain = {"rope_parameters": None, **(TIED if family.name == "smollm3" else {})}
        yield family.case("defaults left out", plain, edits=("defaults_left_out",))
    if family.name in ("llama", "qwen2", "qwen3", "mistral"):
        yield family.case("classifier", LABELS, cls="ForSequenceClassification")


def _faults(family: Family) -> Iterator[Case]:
    yield family.case("num_hidden_layers too small", edits=("one_layer_fewer",))
    yield family.case("a norm is missing", edits=("no_layer_norm",))


def _biases(family: Family) -> Iterator[Case]:
    if family.name in ("llama", "smollm3", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"):
        yield family.case("attention_bias", {"attention_bias": True})
    if family.name in ("llama", "smollm3"):
        yield family.case("mlp_bias", {"mlp_bias": True})


def _rotary(family: Family) -> Iterator[Case]:
    if family.name in ("gemma", "gemma2"):
        yield family.case("another rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}})
        yield family.case("another rope_theta, transformers 4", {"rope_theta": 5000.0}, writer=4)
    if family.name == "llama":
        yield family.case("partial_rotary_factor", family.rope(rope_type="default", partial_rotary_factor=0.5))
    if not family.theta or family.name == "qwen2_moe":
        return
    for kind, scaling in SCALINGS.items():
        if (kind == "llama3" and family.name != "llama") or (family.name == "mixtral" and kind != "linear"):
            continue
        yield family.case(f"rope {kind}", family.rope(**scaling))
        if family.name in ("llama", "qwen2"):
            yield family.case(f"rope {kind}, transformers 4", {"rope_scaling": scaling}, writer=4)
    if family.name == "llama":
        short = {"max_position_embeddings": 8, **family.rope(**SCALINGS["dynamic"])}
        yield family.case("rope dynamic, text longer than max_position_embeddings", short)


def _windows(family: Family) -> Iterator[Case]:
    if family.name.startswith("qwen"):
        window = {"use_sliding_window": True, "sliding_window": 4}
        yield family.case("sliding window", {**window, "max_window_layers": 0})
        yield family.case("sliding window from layer 1", {**window, "max_window_layers": 1})
    if family.name in ("mistral", "mixtral"):
        yield family.case("no sliding window", {"sliding_window": None})


def _scalars(family: Family) -> Iterator[Case]:
    if family.name in ("gemma2", "gemma3_text"):
        yield family.case("query_pre_attn_scalar", {"query_pre_attn_scalar": 24})
        yield family.case("query_pre_attn_scalar is hidden / heads", {"query_pre_attn_scalar": 8, "head_dim": 16})
    if family.name == "gemma2":
        yield family.case("no soft caps", {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    if family.name in ("llama", "gemma", "qwen3", "gemma2"):
        yield family.case("another activation", {"hidden_act": "relu", "hidden_activation": "relu"})
        yield family.case("another epsilon", {"rms_norm_eps": 0.1})


def _layers(family: Family) -> Iterator[Case]:
    if family.name == "gemma2":
        yield family.case("odd layer types", {"layer_types": [FULL, SLIDING]})
    if family.name == "smollm3":
        turned = {"no_rope_layers": [1, 1, 1, 0], "layer_types": [FULL] * 4}
        yield family.case("4 layers", {"num_hidden_layers": 4, **turned, **TIED})
    if family.name in ("qwen2_moe", "qwen3_moe"):
        yield family.case("dense layer among experts", {"mlp_only_layers": [0]})
        yield family.case("norm_topk_prob", {"norm_topk_prob": True})
    if family.name == "gemma3_text":
        yield family.case("odd layer types", {"layer_types": [SLIDING, FULL]})
        yield family.case("7 layers", {"num_hidden_layers": 7, "layer_types": [*[SLIDING] * 5, FULL, SLIDING]})
        for variant, full, sliding in (
            ("linear scaling", {"rope_theta": 1e6, **SCALINGS["linear"]}, 1e4),
            ("another rope_theta", {"rope_type": "default", "rope_theta": 5e4}, 2e3),
        ):
            local = {"rope_type": "default", "rope_theta": sliding}
            yield family.case(variant, {"rope_parameters": {FULL: full, SLIDING: local}})


def _directions(family: Family) -> Iterator[Case]:
    if family.name in ("llama", "qwen2", "mistral", "gemma3_text"):
        yield family.case("is_causal is false", {"is_causal": False})
    if family.name == "gemma3_text":
        yield family.case("both directions", {"use_bidirectional_attention": True}, cls="Model")
        yield family.case("soft caps", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5})


def _quantised(family: Family) -> Iterator[Case]:
    if family.name == "llama":
        for method in METHODS:
            yield family.case(method.replace("_", " "), edits=(method,), reference=False)
