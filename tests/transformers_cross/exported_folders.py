"""Folders that shardload writes from KerasHub's backbones alone, and whether PyTorch computes with them as before.

    python -m transformers_cross.exported_folders write DIR          by ``save_as(model, …, to="safetensors")``
    .venv-torch/bin/python -m transformers_cross.exported_folders answer DIR         needs PyTorch and transformers

The folders have the tensors of those that transformers wrote (`tests/converting/test_family_exports.py`); the second
command shows that transformers reads their ``config.json`` as the same model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformers_cross import folders, inputs, running
from transformers_cross.cases.parts import Case

CASES = (
    *("gemma, tied", "gemma, 3 KV heads", "gemma2, tied", "gemma2, 3 KV heads"),
    *("gemma3_text, 7 layers", "gemma3_text, head_dim is not hidden / heads"),
    "gemma3, vision, transformers 4",
    *(
        "gemma4_text, one head_dim",
        "gemma4_text, two head_dims",
        "gemma4_text, per layer inputs",
        "gemma4_text, experts",
        "gemma4_text, shared keys",
        "gemma4_text, keys as values",
    ),
    *("gemma4, vision", "gemma4, vision, per layer inputs", "gemma4, vision, both directions"),
    *("gemma4, vision, sound", "gemma4, sound"),
    *("llama, untied", "llama, rope llama3", "llama, 3 KV heads", "mistral, untied", "mistral, 3 KV heads"),
    *("mixtral, untied", "mixtral, 3 KV heads", "mixtral, bfloat16", "smollm3, tied", "smollm3, 4 layers"),
    *("qwen2, tied", "qwen2, 3 KV heads", "qwen2_moe, untied", "qwen2_moe, 3 KV heads"),
    *("qwen3, tied", "qwen3, 3 KV heads", "qwen3_moe, tied", "qwen3_moe, norm_topk_prob", "qwen3_moe, bfloat16"),
    *("gpt_oss, untied", "gpt_oss, 3 KV heads", "gpt2, tied", "gpt2, n_inner"),
    *("phi3, untied", "phi3, 1 KV head", "phi3, longrope, short text", "bloom, tied", "bloom, 6 heads"),
    *("bert, base model", "roberta, token types of zeros", "xlm-roberta, token types of zeros"),
    *("albert, 2 groups", "albert, base model", "distilbert, base model", "bart, LM", "esm, base model"),
    *("vit, base model", "deit, base model", "swin, base model", "dinov2, base model", "dinov2, swiglu"),
    *("dinov2_with_registers, base model", "dinov3_vit, base model", "dinov3_vit, gated"),
    *("qwen3_5, vision", "qwen3_5, vision, tied", "qwen3_5, vision, 3 KV heads"),
    *("qwen3_5_moe, vision", "qwen3_5_moe, vision, tied", "qwen3_5_moe, vision, 3 KV heads"),
    *("metaclip_2, both", "metaclip_2, transformers 4", "metaclip_2, 3 and 5 heads"),
    *("blip-2, opt", "blip-2, opt, transformers 4", "blip-2, opt, 3 to 6 heads", "blip-2, t5, transformers 4"),
    *("t5gemma, no sliding attention", "t5gemma, soft caps", "t5gemma2, tied", "t5gemma2, 3 KV heads"),
    *("t5gemma2, a window narrower than the text", "t5gemma2, soft cap", "t5gemma2, rope linear"),
)
"""Folders of which the backbones are written: each model with an export, with uneven heads where there are any."""


SET_ON_LAYERS = ("hidden_act", "layer_norm_eps")
"""Fields that a load sets on layers, because some of KerasHub's classes have no argument for them: a backbone that is
built from KerasHub's configuration has the values of its class, and its ``config.json`` says so."""


LEFT_OUT = (
    *(*SET_ON_LAYERS, "image_token_index", "boi_token_index", "eoi_token_index"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("boi_token_id", "eoi_token_id", "audio_token_id", "boa_token_id", "eoa_token_index"),
)
"""Those, and token ids, which no backbone knows."""


def without_origin(folder: Path, *, mesh: str = "1x1") -> Any:
    """Load a folder into a backbone that was built from KerasHub's configuration, and knows no folder."""
    import shardload

    model = shardload.load(folder, mesh="1x1")
    loaded = getattr(model, "backbone", model)
    with shardload.abstract():
        backbone = type(loaded).from_config(loaded.get_config())
    loaded.save_weights(str(folder.parent / "shuttle.weights.h5"))
    shardload.load_weights(backbone, folder.parent / "shuttle.weights.h5", mesh=mesh)
    return backbone


def write(out: Path) -> None:
    """Write the folders of all cases."""
    import shardload

    for number, name in enumerate(CASES):
        folder = folders.build(folders.read_family(name.partition(", ")[0])[name], out / f"{number}" / "hf")
        shardload.save_as(without_origin(folder), out / f"{number}" / "out", to="safetensors", overwrite=True)


def answer(given: Path) -> list[str]:
    """Load the folders with transformers; return what differs from the outputs that the fixtures have."""
    from transformers_cross.cases import CASES as KNOWN

    cases = {one.name: one for one in KNOWN}
    found = []
    for number, name in enumerate(CASES):
        try:
            found += [f"{name}: {each}" for each in _differences(cases[name], given / f"{number}" / "out")]
        except Exception as error:  # of any kind: the other folders are tried too
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def _differences(case: Case, folder: Path) -> Iterator[str]:
    import torch
    import transformers

    from transformers_cross.generate import NO_CHOICE_OF_ATTENTION, answers

    fixture = folders.read_family(case.family)[case.name]
    options = {} if case.family in NO_CHOICE_OF_ATTENTION else {"attn_implementation": "eager"}
    # Not as options of from_pretrained, which would set them after the configuration gave them to its parts.
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written |= {key: value for key, value in fixture["json"]["config.json"].items() if key in LEFT_OUT}
    config = type(transformers.AutoConfig.for_model(written["model_type"])).from_dict(written)
    model, loading = getattr(transformers, case.cls).from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True, **options
    )
    fed = {key: torch.tensor(value) for key, value in inputs.expand(fixture["inputs"]).items()}
    with torch.no_grad():
        answered = answers(model.eval(), fed, case.ask)
    for output, wanted in fixture["outputs"].items():
        worst = np.abs(np.subtract(folders.sample(answered[output])["sample"], wanted["sample"])).max()
        if output != "pooler_output" and worst > running.TOLERANCE * wanted["scale"]:
            yield f"{output} differs by {worst:g} of {wanted['scale']:g}"
    for key, names in loading.items():
        if rest := [name for name in names if not re.search(r"pooler|contact_head|inv_freq", str(name))]:
            yield f"{key}: {rest[:3]}"


def main() -> None:
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
        return
    if found := answer(Path(sys.argv[2])):
        sys.exit("\n".join(found))
    print(f"{len(CASES)} folders computed by PyTorch as before")


if __name__ == "__main__":
    main()
