"""Tokenizers of Hugging Face folders, in presets: KerasHub reads them there and makes the same tokens."""

import io
import json

import keras
import keras_hub
import numpy as np
import pytest
import sentencepiece

import shardload
from shardload.synth import synth

# Keras 3.15 converts its variables with an old signature of __array__ that NumPy 2.4 warns about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # KerasHub leaves the vocabulary open when it builds a tokenizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

TEXT = ["the quick brown fox", "jumps over"]


def sentence_pieces():
    """A vocabulary as Gemma's: these names and places of the special tokens."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "hello world"] * 9),
        model_writer=made,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "unk_piece": "<unk>"},
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
    )
    return made.getvalue()


def byte_pairs():
    """A ``tokenizer.json`` as Llama 3's and Qwen's."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    merges = [["t", "h"], ["th", "e"], ["Ġ", "q"], ["o", "x"]]
    words = [*letters, *("".join(pair) for pair in merges)]
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special += ["<|endoftext|>", "<|im_end|>"]
    return {
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": merges},
        "added_tokens": [{"content": word, "id": len(words) + i} for i, word in enumerate(special)],
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Hugging Face folders with a tokenizer, as they are published."""
    base = tmp_path_factory.mktemp("tokenizers")
    found = {
        name: synth(name, scale=0.02, directory=base, format="safetensors")
        for name in ("gemma2_9b", "llama3.2_1b", "qwen3_0.6b")
    }
    (found["gemma2_9b"] / "tokenizer.model").write_bytes(sentence_pieces())
    for name in ("llama3.2_1b", "qwen3_0.6b"):
        (found[name] / "tokenizer.json").write_text(json.dumps(byte_pairs()))
        tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        (found[name] / "tokenizer_config.json").write_text(json.dumps(tokens))
    return found


def files(folder):
    skipped = ("transformers", "model.weights.h5", "metadata.json")
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.startswith(skipped))


@pytest.mark.parametrize("via", [None, "orbax", "safetensors"])
@pytest.mark.parametrize("name", ["gemma2_9b", "llama3.2_1b", "qwen3_0.6b"])
def test_a_preset_has_the_tokenizer_that_keras_hub_would_write(name, via, folders, tmp_path):
    source = folders[name]
    theirs = keras_hub.models.CausalLM.from_preset(str(source), dtype="bfloat16")
    theirs.save_to_preset(str(tmp_path / "theirs"))
    if via is not None:
        shardload.convert(source, tmp_path / "via", to=via)
    shardload.convert(source if via is None else tmp_path / "via", tmp_path / "ours", to="h5")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    for path in (tmp_path / "theirs" / "assets").rglob("*.*"):
        assert (tmp_path / "ours" / path.relative_to(tmp_path / "theirs")).read_bytes() == path.read_bytes()
    ours = keras_hub.models.CausalLM.from_preset(str(tmp_path / "ours"), dtype="bfloat16")
    assert type(ours.preprocessor.tokenizer) is type(theirs.preprocessor.tokenizer)
    for one, two in zip(*(m.preprocessor.tokenizer(TEXT) for m in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_model_whose_tokenizer_has_no_words_is_a_preset_without_it(folders, tmp_path):
    """As a training step holds it: the configuration only."""
    model = keras_hub.models.CausalLM.from_preset(str(folders["gemma2_9b"]), dtype="bfloat16")
    described = keras.saving.serialize_keras_object(model)
    del described["compile_config"]
    model.save_weights(tmp_path / "task.weights.h5")
    (tmp_path / "task.json").write_text(json.dumps(described))
    shardload.convert(tmp_path / "task.weights.h5", tmp_path / "out", to="h5")
    task = json.loads((tmp_path / "out" / "task.json").read_text())
    assert task["config"]["preprocessor"] is None
    found = keras_hub.models.CausalLM.from_preset(str(tmp_path / "out"), dtype="bfloat16", preprocessor=None)
    assert len(found.weights) == len(model.weights)
