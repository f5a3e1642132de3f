"""Adapters that shardload writes, and what PEFT computes with them: the fixtures of `exported.json.gz`.

    python -m transformers_cross.exported_adapters write DIR           folders, by ``save_as(model, …, to="peft")``
    .venv-torch/bin/python -m transformers_cross.exported_adapters answer DIR OUT      needs PyTorch, transformers, peft

A fixture has what PEFT was given (settings, shapes, samples of values), and what it answered. Tests write the same
folders again, compare them with what PEFT was given, and compare Keras' answers with those of PEFT.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from transformers_cross import folders, inputs, weights
from transformers_cross.cases import CASES

FAMILY = "exported"


@dataclass(frozen=True)
class ExportCase:
    """LoRA on a model of Keras: layers by name → rank and alpha; layers that are trained as a whole."""

    name: str
    base: str
    lora: dict[str, tuple[int, float]]
    trained: tuple[str, ...] = field(default=())


EXPORTS = (
    ExportCase("llama, queries and values", "llama, 3 KV heads", {"query": (2, 4), "value": (2, 4)}),
    ExportCase(
        "llama, ranks, and a head that was trained",
        "llama, untied",
        {"query": (1, 2), "attention_output": (3, 4), "feedforward_output_dense": (2, 3)},
        ("token_embedding", "sequence_output_layernorm"),
    ),
    ExportCase(
        "gemma2, every layer",
        "gemma2, 1 KV head",
        dict.fromkeys(
            ("query", "key", "value", "attention_output", "ffw_gating", "ffw_gating_2", "ffw_linear"), (2, 4)
        ),
    ),
    ExportCase("gemma3_text, ranks", "gemma3_text, head_dim is not hidden / heads", {"query": (1, 1), "value": (4, 2)}),
    ExportCase("qwen2, biases", "qwen2, 3 KV heads", {"query": (2, 4), "value": (2, 4)}),
    ExportCase("phi3, parts of fused weights", "phi3, 1 KV head", {"query": (1, 2), "value": (2, 4)}),
    ExportCase(
        "gpt2, transposed", "gpt2, tied", {"query": (2, 4), "value": (2, 4), "feedforward_output_dense": (2, 4)}
    ),
)


def tuned(case: ExportCase, base: Path, *, mesh: str = "1x1") -> Any:
    """Load a base, enable LoRA in layers of it, and set what would be trained."""
    import shardload
    from shardload.keras_bridge.model_state import own_layers

    model = shardload.load(base, dtype="float32", mesh=mesh)
    layers = [layer for layer in own_layers(model.backbone) if layer.name]
    for layer in layers:
        layer.trainable = layer.name in case.lora or layer.name in case.trained
    for layer in layers:
        if layer.name in case.lora and hasattr(layer, "enable_lora"):
            rank, alpha = case.lora[layer.name]
            layer.enable_lora(rank, lora_alpha=alpha)
    for number, variable in enumerate(model.trainable_variables):
        # Of a norm's scale, which is about 1, too.
        variable.assign(weights.values(f"{variable.path.rpartition('/')[2]}.{number}", tuple(variable.shape)))
    return model


def described(folder: Path) -> dict[str, Any]:
    """Return what a fixture keeps of an adapter's folder: its settings, and shapes and samples of its tensors."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    found = load_file(folder / "adapter_model.safetensors")
    return {"config": config, "tensors": {name: folders.sample(value) for name, value in sorted(found.items())}}


def write(out: Path) -> None:
    """Write the folders of all cases, and of their bases."""
    import shardload

    for number, case in enumerate(EXPORTS):
        of_base = next(one for one in CASES if one.name == case.base)
        base = folders.build(folders.read_family(of_base.family)[case.base], out / f"base{number}")
        shardload.save_as(tuned(case, base), out / f"adapter{number}", to="peft", overwrite=True)


def answer(given: Path) -> dict[str, Any]:
    """Load the folders with PEFT, and return the fixtures."""
    import peft
    import torch
    import transformers

    fixtures = {}
    for number, case in enumerate(EXPORTS):
        of_base = next(one for one in CASES if one.name == case.base)
        cls = getattr(transformers, of_base.cls)
        base, folder = given / f"base{number}", given / f"adapter{number}"
        model = cls.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
        model = peft.PeftModel.from_pretrained(model, folder).eval()
        fed = inputs.of(of_base, json.loads((base / "config.json").read_text()))
        with torch.no_grad():
            logits = model(**{name: torch.tensor(value) for name, value in inputs.expand(fed).items()}).logits.numpy()
            merged = model.merge_and_unload()
            again = merged(**{name: torch.tensor(value) for name, value in inputs.expand(fed).items()}).logits.numpy()
        assert np.allclose(logits, again, atol=1e-4 * np.abs(logits).max())
        fixtures[case.name] = {
            "family": of_base.family, "base": case.base, "inputs": fed, **described(folder),
            "outputs": {"logits": folders.sample(logits)}, "read_by": f"peft {peft.__version__}",
        }  # fmt: skip
    return fixtures


def main() -> None:
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        folders.write_family(FAMILY, answer(Path(sys.argv[2])), Path(sys.argv[3]))
        print(f"{len(EXPORTS)} adapters read by PEFT")


if __name__ == "__main__":
    main()
