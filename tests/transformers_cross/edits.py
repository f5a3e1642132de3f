"""What becomes of a folder after it was saved: what older writers left in it, and what people do to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from transformers_cross import folders

Saved = dict[str, Any]


def _add(saved: Saved, name: str, text: str, exact: Any = None) -> None:
    last = sorted(saved["files"])[-1]
    saved["files"][last] = dict(sorted({**saved["files"][last], name: text}.items()))
    if exact is not None:
        saved["exact"][name] = exact


def _names(saved: Saved) -> list[str]:
    return [name for tensors in saved["files"].values() for name in tensors]


def _find(saved: Saved, pattern: str) -> list[str]:
    return [name for name in _names(saved) if re.search(pattern, name)]


def _text_of(saved: Saved, name: str) -> str:
    return next(tensors[name] for tensors in saved["files"].values() if name in tensors)


def _rename(saved: Saved, change: Callable[[str], str]) -> Saved:
    def renamed(named: dict[str, Any]) -> dict[str, Any]:
        return {change(name): value for name, value in named.items()}

    files = {file: renamed(tensors) for file, tensors in saved["files"].items()}
    copies = {change(name): change(first) for name, first in saved["copies"].items()}
    return {**saved, "files": files, "copies": copies, "exact": renamed(saved["exact"])}


def _drop(saved: Saved, pattern: str) -> Saved:
    assert _find(saved, pattern), pattern
    files = {
        file: {name: text for name, text in tensors.items() if not re.search(pattern, name)}
        for file, tensors in saved["files"].items()
    }
    return {**saved, "files": files}


def _config(saved: Saved, **changed: Any) -> Saved:
    return {**saved, "json": {**saved["json"], "config.json": {**saved["json"]["config.json"], **changed}}}


def position_ids(saved: Saved) -> Saved:
    """``embeddings.position_ids``, as BERT and its kin saved them until transformers 4.31."""
    for name in _find(saved, r"embeddings\.position_embeddings\.weight$|embeddings\.position_embedding\.weight$"):
        positions = folders.parse(_text_of(saved, name))[1][0]
        buffer = re.sub(r"position_embeddings?\.weight$", "position_ids", name)
        _add(saved, buffer, f"I64 1x{positions}", list(range(positions)))
    return saved


def inv_freq(saved: Saved) -> Saved:
    """``rotary_emb.inv_freq`` in every layer, as Llama and its kin saved it until transformers 4.32."""
    config = saved["json"]["config.json"]
    half = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    frequencies = [float(f"{10000.0 ** (-i / half):.8g}") for i in range(half)]
    for name in _find(saved, r"self_attn\.q_proj\.weight$|attention\.self\.query\.weight$"):
        part = re.sub(r"(q_proj|query)\.weight$", "", name)
        _add(
            saved,
            f"{part}{'rotary_emb' if 'self_attn' in name else 'rotary_embeddings'}.inv_freq",
            f"F32 {half}",
            frequencies,
        )
    return saved


def causal_masks(saved: Saved) -> Saved:
    """``attn.bias`` and ``attn.masked_bias`` in every layer, as GPT-2 saved them until transformers 4.31."""
    size = saved["json"]["config.json"]["n_positions"]
    mask = [int(column <= row) for row in range(size) for column in range(size)]
    for name in _find(saved, r"attn\.c_attn\.weight$"):
        part = name.removesuffix("c_attn.weight")
        _add(saved, f"{part}bias", f"BOOL 1x1x{size}x{size}", mask)
        _add(saved, f"{part}masked_bias", "F32", -10000.0)
    return saved


def batches_tracked(saved: Saved) -> Saved:
    """A counter as a batch normalisation leaves it behind."""
    _add(saved, "stem.norm.num_batches_tracked", "I64", 7)
    return saved


def no_prefix(saved: Saved) -> Saved:
    """Names without the family's prefix, as a base model saves them."""
    first = re.compile(r"^(model|bert|roberta|distilbert|albert|esm|transformer|vit|deit|dinov2|swin)\.")
    return _rename(saved, lambda name: first.sub("", name))


def gamma_beta(saved: Saved) -> Saved:
    """``LayerNorm.gamma`` and ``beta``, as the first BERTs have them."""
    return _rename(
        saved,
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
    )


def tied_copy(saved: Saved) -> Saved:
    """The tied head stored once more, byte for byte."""
    embedding = _find(saved, r"(embed_tokens|wte|word_embeddings|tok_embeddings|shared)\.weight$")[0]
    _add(saved, "lm_head.weight", _text_of(saved, embedding))
    saved["copies"]["lm_head.weight"] = embedding
    return saved


def tied_differing(saved: Saved) -> Saved:
    """A head of its own values in a folder whose configuration ties it."""
    _add(saved, "lm_head.weight", _text_of(saved, _find(saved, r"(embed_tokens|wte|word_embeddings)\.weight$")[0]))
    return saved


def one_layer_fewer(saved: Saved) -> Saved:
    """A configuration that says one layer where there are two."""
    config = saved["json"]["config.json"]
    key = next(key for key in ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers") if key in config)
    changed = {key: 1}
    if "layer_types" in config:
        changed["layer_types"] = config["layer_types"][:1]
    return _config(saved, **changed)


def no_layer_norm(saved: Saved) -> Saved:
    """One weight lost."""
    return _drop(saved, "^" + re.escape(_find(saved, r"(norm|ln_f|LayerNorm|layernorm)\w*\.weight$")[-1]) + "$")


def zero_token_types(saved: Saved) -> Saved:
    """Token types as RoBERTa has them: one, and nothing in it."""
    for name in _find(saved, r"token_type_embeddings\.weight$"):
        saved["exact"][name] = 0.0
    return saved


def no_architectures(saved: Saved) -> Saved:
    """A configuration that names no class."""
    config = {key: value for key, value in saved["json"]["config.json"].items() if key != "architectures"}
    return {**saved, "json": {**saved["json"], "config.json": config}}


def defaults_left_out(saved: Saved) -> Saved:
    """A configuration without what transformers takes by default, as people write them by hand."""
    import transformers

    config = saved["json"]["config.json"]
    default = transformers.AutoConfig.for_model(config["model_type"]).to_dict()
    kept = {k: v for k, v in config.items() if k in ("model_type", "architectures") or default.get(k, ...) != v}
    return {**saved, "json": {**saved["json"], "config.json": kept}}


def _quantised(saved: Saved, parts: Callable[[tuple[int, int]], dict[str, str]], **config: Any) -> Saved:
    """Each matrix of a layer replaced by the tensors that a method makes of it."""
    files = {}
    for file, tensors in saved["files"].items():
        files[file] = {}
        for name, text in tensors.items():
            _, shape = folders.parse(text)
            if not re.search(r"_proj\.weight$", name):
                files[file][name] = text
                continue
            for part, stored in parts((shape[0], shape[1])).items():
                files[file][name.removesuffix("weight") + part] = stored
    return _config({**saved, "files": files}, quantization_config=config)


def fp8_without_scales(saved: Saved) -> Saved:
    """Eight-bit floats and nothing beside them."""
    return _quantised(saved, lambda shape: {"weight": f"F8_E4M3 {shape[0]}x{shape[1]}"}, quant_method="fp8")


def peft(saved: Saved) -> Saved:
    """An adapter alone, as PEFT saves it."""
    tensors = {}
    for name in _find(saved, r"[qv]_proj\.weight$"):
        out, into = folders.parse(_text_of(saved, name))[1]
        part = f"base_model.model.{name.removesuffix('weight')}"
        tensors |= {f"{part}lora_A.weight": f"F32 4x{into}", f"{part}lora_B.weight": f"F32 {out}x4"}
    config = {
        "base_model_name_or_path": "example/base-model", "peft_type": "LORA", "r": 4, "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    return {
        **saved,
        "json": {"adapter_config.json": config},
        "files": {"adapter_model.safetensors": tensors},
        "copies": {},
    }


def in_a_video_model(saved: Saved) -> Saved:
    """A detector of SAM 3 as the one of a `Sam3VideoModel`, without the tracker."""
    config = {"model_type": "sam3_video", "architectures": ["Sam3Model"], "dtype": "float32"}
    detector = {key: value for key, value in saved["json"]["config.json"].items() if key != "architectures"}
    return _rename(
        {**saved, "json": {"config.json": {**config, "detector_config": detector}}}, lambda n: f"detector_model.{n}"
    )


def narrow_bounds(saved: Saved) -> Saved:
    """Bounds between which Gemma 4's towers clip; transformers makes infinite ones."""
    # No two alike, so that a swap shows.
    bounds = [name for name in saved["exact"] if re.search(r"(in|out)put_(min|max)$", name)]
    made = {name: (1 + i / 256) * (-1 if name.endswith("min") else 1) for i, name in enumerate(bounds)}
    # Those of the standardisation are uninitialised there: here they are made like weights.
    kept = {name: value for name, value in saved["exact"].items() if not re.search(r"std_(bias|scale)$", name)}
    return {**saved, "exact": kept | made}


def keys_of_layers_that_share(saved: Saved) -> Saved:
    """Keys and values of Gemma 4's layers that take those of earlier layers, as in its published folders."""
    for layer in (2, 3):
        for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            text = _text_of(saved, f"model.layers.{layer - 2}.self_attn.{part}")
            _add(saved, f"model.layers.{layer}.self_attn.{part}", text)
    return saved


EDITS: dict[str, Callable[[Saved], Saved]] = {
    edit.__name__: edit
    for edit in (
        position_ids, inv_freq, causal_masks, batches_tracked, no_prefix, gamma_beta, tied_copy, tied_differing,
        one_layer_fewer, no_layer_norm, zero_token_types, no_architectures, defaults_left_out,
        fp8_without_scales, peft, in_a_video_model, narrow_bounds, keys_of_layers_that_share,
    )
}  # fmt: skip
"""By name."""
