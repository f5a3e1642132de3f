"""Folders of adapters as PEFT writes them, for any base model, with values that depend on names alone."""

import json

from safetensors.numpy import save_file
from transformers_cross import weights

import shardload


def write(folder, base, modules, *, rank=2, alpha=4, **settings):
    """An adapter of a Hugging Face folder: LoRA on every linear layer whose name ends with one of ``modules``."""
    found = {}
    for name, tensor in shardload.inspect(base).tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(tuple(modules)):
            out, width = tensor.shape
            for leaf, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
                key = f"base_model.model.{module}.{leaf}.weight"
                found[key] = weights.values(key, shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
