"""Folders of adapters as PEFT writes them, and what PyTorch computes with each: fixtures of `peft.json.gz`.

    .venv-torch/bin/python -m transformers_cross.adapters OUT        needs PyTorch, transformers and peft

An adapter is saved by PEFT on the base model of one of `cases`, its values are replaced by those of `weights`, and PEFT
loads it back: the fixture has what it then answers, and samples of what ``merge_and_unload`` made in float32.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from transformers_cross import folders, inputs, weights
from transformers_cross.cases import CASES

FAMILY = "peft"
FIXTURES = Path(os.environ.get("SHARDLOAD_ADAPTERS", Path(__file__).parent / "adapter_fixtures"))
"""Where fixtures are read: the stored ones, unless `make folders` has written others."""
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class AdapterCase:
    """One adapter: on the base of a case, with arguments of ``LoraConfig``; the second one of two with ``second``."""

    name: str
    base: str
    config: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)
    weights: tuple[float, float] = (1.0, 1.0)


ADAPTERS = (
    AdapterCase("llama, every linear", "llama, 3 KV heads", {"r": 3, "lora_alpha": 6, "target_modules": _LINEAR}),
    AdapterCase(
        "llama, ranks and alphas",
        "llama, untied",
        {"r": 2, "lora_alpha": 4, "target_modules": _LINEAR, "rank_pattern": {"q_proj": 4, "layers.1.mlp.up_proj": 1}}
        | {"alpha_pattern": {"q_proj": 2, "layers.0.mlp.down_proj": 16}},
    ),
    AdapterCase("llama, rank 1", "llama, untied", {"r": 1, "lora_alpha": 2, "target_modules": _LINEAR}),
    AdapterCase(
        "llama, rank-stabilised",
        "llama, 1 KV head",
        {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    AdapterCase(
        "llama, modules_to_save",
        "llama, untied",
        {"r": 2, "lora_alpha": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    AdapterCase(
        "llama, embedding and head",
        "llama, untied",
        {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    ),
    AdapterCase(
        "llama, bfloat16", "llama, bfloat16", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    ),
    AdapterCase(
        "llama, two adapters",
        "llama, untied",
        {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        {"r": 4, "lora_alpha": 4, "target_modules": ["v_proj", "down_proj"]},
        (0.5, 0.25),
    ),
    AdapterCase("gemma2, every linear", "gemma2, 1 KV head", {"r": 1, "lora_alpha": 4, "target_modules": _LINEAR}),
    AdapterCase(
        "gemma3_text, every linear",
        "gemma3_text, head_dim is not hidden / heads",
        {"r": 2, "lora_alpha": 4, "target_modules": _LINEAR},
    ),
    AdapterCase(
        "qwen2, all biases",
        "qwen2, 3 KV heads",
        {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "bias": "all"},
    ),
    AdapterCase(
        "phi3, fused",
        "phi3, 1 KV head",
        {"r": 1, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    ),
    AdapterCase(
        "gpt2, transposed",
        "gpt2, tied",
        {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
)


def build(fixture: dict[str, Any], folder: Path) -> tuple[Path, list[Path]]:
    """Write the folder of the base model and those of the adapters that a fixture describes."""
    base = folders.build(folders.read_family(fixture["family"])[fixture["base"]], folder / "base")
    made = []
    for i, adapter in enumerate(fixture["adapters"]):
        own = folders.build({"json": {"adapter_config.json": adapter["config"]}, "files": {}}, folder / f"adapter{i}")
        write_tensors(own, adapter["tensors"], salt=str(i))
        made.append(own)
    return base, made


def write_tensors(folder: Path, tensors: dict[str, str], *, salt: str) -> None:
    """Write an adapter's tensors; their values depend on their names, the second adapter's on its number too."""
    from safetensors.numpy import save_file

    values = {}
    for name, text in tensors.items():
        dtype, shape = folders.parse(text)
        values[name] = weights.values(name + salt.strip("0"), shape).astype(weights.FLOATS[dtype])
    save_file(values, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def fixture(case: AdapterCase) -> dict[str, Any]:
    """All that is kept of one adapter."""
    import peft
    import torch
    import transformers

    of_base = next(one for one in CASES if one.name == case.base)
    found: dict[str, Any] = {"family": of_base.family, "base": case.base, "adapters": [], "weights": case.weights}
    scratch = Path(tempfile.mkdtemp(prefix="peft-cross-"))
    try:
        base = folders.build(folders.read_family(of_base.family)[case.base], scratch / "made")

        def model() -> Any:
            cls = getattr(transformers, of_base.cls)
            return cls.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()

        for number, config in enumerate(filter(None, (case.config, case.second))):
            saved = scratch / f"saved{number}"
            peft.get_peft_model(model(), peft.LoraConfig(task_type="CAUSAL_LM", **config)).save_pretrained(saved)
            found["adapters"].append(_described(saved, of_base.family))
        _, made = build(found, scratch / "again")
        tuned = peft.PeftModel.from_pretrained(model(), made[0], adapter_name="first")
        if len(made) > 1:
            tuned.load_adapter(made[1], adapter_name="second")
            tuned.add_weighted_adapter(["first", "second"], list(case.weights), "both", combination_type="cat")
            tuned.set_adapter("both")
        found["inputs"] = inputs.of(of_base, json.loads((base / "config.json").read_text()))
        tokens = {name: torch.tensor(value) for name, value in inputs.expand(found["inputs"]).items()}
        with torch.no_grad():
            logits = tuned(**tokens).logits.numpy()
            plain = {name: value.numpy() for name, value in model().state_dict().items()}
            after = tuned.merge_and_unload().state_dict()
        found["outputs"] = {"logits": folders.sample(logits)}
        changed = {n: v.float().numpy() for n, v in after.items() if not np.array_equal(v.float().numpy(), plain[n])}
        found["merged"] = {name: folders.sample(value) for name, value in changed.items()}
        found["written_by"] = f"peft {peft.__version__}, transformers {transformers.__version__}"
    finally:
        shutil.rmtree(scratch)
    return found


def _described(saved: Path, base: str) -> dict[str, Any]:
    """Return what a fixture keeps of an adapter that PEFT saved: its configuration, and names and shapes of tensors."""
    from safetensors.numpy import load_file

    config = json.loads((saved / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"example/{base}"
    for key in ("target_modules", "modules_to_save"):  # PEFT keeps them as sets
        config[key] = sorted(config[key]) if isinstance(config[key], list) else config[key]
    found = load_file(saved / "adapter_model.safetensors")
    return {"config": config, "tensors": {n: folders.describe("F32", v.shape) for n, v in sorted(found.items())}}


def main() -> None:
    out = Path(sys.argv[1])
    folders.write_family(FAMILY, {case.name: fixture(case) for case in ADAPTERS}, out)
    print(f"{len(ADAPTERS)} adapters written")


if __name__ == "__main__":
    main()
