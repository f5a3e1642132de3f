"""Tokenizers of encoders, rebuilt from GGUF: the ids are those of the tokenizer that was converted."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from checkpoints import write_gguf
from sentencepiece import sentencepiece_model_pb2

import shardload
from shardload.errors import SourceError
from shardload.loaders import open_manifest
from shardload.text.gguf_tokenizer import tokenizer_files

TEXT = ["the quick brown fox jumps over the lazy dog", "hello world", "naïve façade, don't stop: 3.14!"] * 9
HARD = ["hello world", "Don't  STOP the naïve fox!", "  two\n\nlines\t日本語 3.14", "unjumped foxes", "", "ﬁ ½ Å"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
START = "\u2581"


def word_pieces(*, lowercase):
    """A small tokenizer as BERT's, trained here."""
    inner = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    text = TEXT if lowercase else [*TEXT, "Hello World, The Quick Fox", "HELLO"] * 2
    inner.train_from_iterator(text, vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    described = json.loads(inner.to_str())
    trained = tokenizers.BertWordPieceTokenizer(described["model"]["vocab"], lowercase=lowercase)
    return trained, sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)


def add_word_pieces(words):
    """What ``BertModel.set_vocab`` of llama.cpp's converter writes."""

    def add(writer):
        describe(writer)
        stored = [w if w in SPECIAL else w[2:] if w.startswith("##") else START + w for w in words]
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("jina-v2-en")
        writer.add_token_list(stored)
        writer.add_token_types([3 if w in SPECIAL else 1 for w in words])
        for name, word in (("unk", "[UNK]"), ("sep", "[SEP]"), ("pad", "[PAD]"), ("bos", "[CLS]"), ("mask", "[MASK]")):
            getattr(writer, f"add_{name}_token_id")(words.index(word))

    return add


def describe(writer):
    writer.add_context_length(16)
    writer.add_layer_norm_eps(1e-12)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces(tmp_path, lowercase):
    original, words = word_pieces(lowercase=lowercase)
    path = write_gguf(tmp_path / "x.gguf", {}, arch="bert", extra=add_word_pieces(words))
    rebuilt = shardload.tokenizer(path)
    for text in HARD:
        assert rebuilt.encode(text) == original.encode(text).ids, text
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text).ids)
    files = tokenizer_files(open_manifest(path))
    assert files["vocab.txt"].decode().splitlines() == words
    assert json.loads(files["tokenizer_config.json"])["do_lower_case"] is lowercase
    again = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert again.encode(HARD[1]).ids == original.encode(HARD[1]).ids


def unigrams():
    """A small SentencePiece model as XLM-RoBERTa's: unigrams, and Unicode normalisation."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=made, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    return sentencepiece_model_pb2.ModelProto.FromString(made.getvalue())


def add_unigrams(model):
    """What ``_xlmroberta_set_vocab`` of llama.cpp's converter writes: fairseq's order, all ids one higher."""

    def add(writer):
        describe(writer)
        pieces = [("<s>", 0.0, 3), ("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
        pieces += [(piece.piece, piece.score, piece.type) for piece in model.pieces[3:]]
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([piece for piece, _, _ in pieces])
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        writer.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
        writer.add_remove_extra_whitespaces(model.normalizer_spec.remove_extra_whitespaces)
        writer.add_precompiled_charsmap(model.normalizer_spec.precompiled_charsmap)
        for name, number in (("bos", 0), ("pad", 1), ("eos", 2), ("unk", 3), ("sep", 2)):
            getattr(writer, f"add_{name}_token_id")(number)

    return add


def test_unigrams(tmp_path):
    model = unigrams()
    original = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    path = write_gguf(tmp_path / "x.gguf", {}, arch="bert", extra=add_unigrams(model))
    rebuilt = shardload.tokenizer(path)
    for text in HARD:
        expected = [i + 1 if i else 3 for i in original.encode(text)]
        assert rebuilt.encode(text) == [0, *expected, 2], text
    again = tokenizers.Tokenizer.from_str(tokenizer_files(open_manifest(path))["tokenizer.json"].decode())
    assert again.encode(HARD[0]).ids == rebuilt.encode(HARD[0])


def test_a_header_without_beginning_and_end(tmp_path):
    def add(writer):
        describe(writer)
        writer.add_tokenizer_model("bert")
        writer.add_token_list([START + "a"])

    path = write_gguf(tmp_path / "x.gguf", {}, arch="bert", extra=add)
    with pytest.raises(SourceError, match="names no tokens for the beginning and the end of a text"):
        shardload.tokenizer(path)
