"""A tokenizer from any source that has one, and text from a model with the tokenizer of its source."""

import os

import pytest
from gguf_tokenizers import add_pieces, gguf_with_tokenizer, sentence_pieces

import shardload
from shardload.errors import SourceNotFoundError, TransferError, UnsupportedError
from shardload.synth import synth

pytestmark = [
    # KerasHub leaves the vocabulary open when it builds a tokenizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

TEXT = "the quick brown fox"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """One vocabulary in each form."""
    folder = synth("gemma2_2b", scale=0.02, directory=tmp_path / "folder", format="safetensors")
    (folder / "tokenizer.model").write_bytes(sentence_pieces("bpe"))
    shardload.convert(folder, tmp_path / "preset", to="h5")
    gguf = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add_pieces, vocab_size=320)
    return {"folder": folder, "file": folder / "model.safetensors", "preset": tmp_path / "preset", "gguf": gguf}


def test_every_form_gives_the_same_tokens(sources):
    found = {name: shardload.tokenizer(source) for name, source in sources.items()}
    ids = {name: tokenizer.encode(TEXT) for name, tokenizer in found.items()}
    assert ids["folder"][0] == 2 and len(ids["folder"]) > 4
    assert all(each == ids["folder"] for each in ids.values())
    assert {name: tokenizer.decode(ids[name]) for name, tokenizer in found.items()} == dict.fromkeys(found, TEXT)
    # A model's vocabulary may be larger than its tokenizer's.
    assert all(tokenizer.decode([*ids["folder"], 5000]) == TEXT for tokenizer in found.values())


def test_no_source_and_no_tokenizer(tmp_path):
    with pytest.raises(SourceNotFoundError):
        shardload.tokenizer("nothing")
    (tmp_path / "x.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UnsupportedError, match="has no tokenizer"):
        shardload.tokenizer(tmp_path / "x.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder", "file", "preset", "gguf"])
def test_text_in_text_out(name, sources):
    model = shardload.load(sources[name], dtype="float32")
    text = shardload.generate(model, TEXT, max_new_tokens=3)
    assert shardload.generate(model, [TEXT, "jumps"], max_new_tokens=3)[0] == text
    assert shardload.generate(model, TEXT, max_new_tokens=3, tokenizer=sources[name]) == text
    assert shardload.generate(model, TEXT, max_new_tokens=3, tokenizer=shardload.tokenizer(sources[name])) == text
    assert shardload.generate(model, []) == []


@pytest.mark.slow
def test_weights_that_were_loaded_bring_their_tokenizer(sources):
    built, model = shardload.load(sources["gguf"]), shardload.load(sources["gguf"])
    model.backbone.set_weights([0 * value for value in model.backbone.get_weights()])
    shardload.load_weights(model, sources["gguf"])
    expected = shardload.generate(built, TEXT, max_new_tokens=3)
    assert shardload.generate(model, TEXT, max_new_tokens=3) == expected


def test_a_file_that_changed_since_is_refused(sources):
    model = shardload.load(sources["gguf"])
    os.utime(sources["gguf"], ns=(1, 1))
    with pytest.raises(TransferError, match="changed since its headers were read"):
        shardload.generate(model, TEXT)
