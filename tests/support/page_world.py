"""Small checkpoints with the names that pages of the documentation use."""

import shutil

import peft_folders
import pytest
import quantised_folders
import small_folders
from gguf_tokenizers import add_pieces, gguf_with_tokenizer

import shardload
from shardload.cli import main
from shardload.synth import synth


def make(root):
    """Write them into a folder; return it."""
    preset, folder = (
        synth("gemma2_2b", format=kind, scale=0.02, directory=root / "made" / kind)
        for kind in ("preset", "safetensors")
    )
    for name in ("gemma2_2b", "gemma2_9b"):
        shutil.copytree(preset, root / name)
    for name in ("gemma-2-2b", "gemma-2-9b"):
        shutil.copytree(folder, root / name)
    shutil.copy(folder / "model.safetensors", root)
    _write_gguf_files(root)
    _write_hugging_face_folders(root, folder)
    _train(root, preset)
    shutil.rmtree(root / "made")
    return root


def _write_gguf_files(root):
    with pytest.MonkeyPatch.context() as patch:
        file = gguf_with_tokenizer(root / "made", patch, "gemma3_text", add_pieces, vocab_size=1024)
    for name in ("gemma3_270m", "model", "model-Q8_0"):
        shutil.copy(file, root / f"{name}.gguf")
    # By the command, which ignores the warning about a file that KerasHub leaves open.
    assert main(["convert", str(file), str(root / "gemma-preset"), "--to", "h5", "--no-progress"]) == 0


def _write_hugging_face_folders(root, base):
    small_folders.write(root / "llama-hf", "llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    small_folders.write(root / "qwen3-hf", "qwen3", architectures=["Qwen3ForCausalLM"])
    quantised_folders.write(root / "Llama-3.1-8B-GPTQ", "gptq 4", intermediate_size=48)
    for name, modules in (("my-lora", ("o_proj", "up_proj")), ("style", ("v_proj",)), ("facts", ("down_proj",))):
        peft_folders.write(root / name, base, modules)


def _train(root, preset):
    """Steps of a run, and what Keras writes of its model."""
    model = shardload.load(preset)
    model.compile("sgd", "mse")
    model.save_weights(root / "model.weights.h5")
    model.save(root / "model.keras")
    with shardload.Checkpointer(root / "run") as checkpointer:
        for step in (100, 200, 400, 1200):
            checkpointer.save(step, model, metrics={"loss": 1 / step})
    shutil.copytree(root / "run", root / "checkpoints")
