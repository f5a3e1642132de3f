"""Generation against KerasHub's own, on meshes, and rebuilt tokenizers against the ones they were made from."""

import json
import sys

import jax
import keras
import keras_hub
import models
import numpy as np
import pytest
import sentencepiece
import tokenizers
from checkpoints import write_gguf
from gguf_tokenizers import LIKE_GEMMA, trained_pieces
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers

import shardload
from shardload import parallel
from shardload.errors import SourceError, UnsupportedError, UsageError
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.binding import bind, unbind
from shardload.loaders import open_manifest
from shardload.loaders.gguf.loader import TokenizerMetadata
from shardload.manifest import Manifest
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.synth import synth
from shardload.text import gguf_tokenizer, sources, tokenizer
from shardload.text.generation import generate_ids
from shardload.text.gguf_tokenizer import tokenizer_files
from shardload.text.sources import tokenizer_of

TEXT = ["The quick brown fox jumps over the lazy dog.", "  def f(x):\n    return x", "naïve café", "日本語"] * 20
HARD = [
    "The capital of France is",
    "  two  spaces   three ",
    "line\nbreak\n\n\ntabs\tend\r\n",
    "emoji 😀👩‍👩‍👧 🇫🇷",
    "日本語と中文 한국어",
    "café naïve Å ﬁ e\u0301",
    "def f(x):\n    return x ** 2  # ok",
    " leading",
    "\x00 control \u200b",
    "<b>bold</b>",
    "1234567.89 $%^&*",
    "",
]


def manifest(source, format="hf-safetensors", **config):
    return Manifest(located(source), format, {}, {}, config)


@pytest.fixture(scope="module")
def trained():
    """A small SentencePiece model with everything Gemma's has: bytes, spaces, tags and turns as pieces."""
    symbols = ["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<b>", "<start_of_turn>", "<end_of_turn>"]
    options = {"vocab_size": 460, "model_type": "bpe", "byte_fallback": True, "user_defined_symbols": symbols}
    unchanged = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    return trained_pieces(TEXT, **options, **unchanged, **LIKE_GEMMA)


def as_gguf(proto, *, add_space_prefix=False):
    """What a writer of GGUF files keeps of a SentencePiece model: no settings, and spaces for ▁ where user-defined."""
    model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    user = gguf_tokenizer.USER_DEFINED
    return TokenizerMetadata(
        model="llama",
        pre="default",
        tokens=tuple(p.piece.replace("▁", " ") if p.type == user else p.piece for p in model.pieces),
        scores=np.array([p.score for p in model.pieces], np.float32),
        token_types=np.array([p.type for p in model.pieces], np.int32),
        merges=(),
        special_ids={"padding": 0, "eos": 1, "bos": 2, "unknown": 3},
        flags={"add_space_prefix": add_space_prefix, "add_bos_token": True},
        chat_template=None,
    )


@pytest.mark.parametrize("text", HARD)
def test_rebuilt_sentencepiece_equals_the_original(trained, monkeypatch, text):
    original = sentencepiece.SentencePieceProcessor(model_proto=trained)
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: as_gguf(trained))
    rebuilt = gguf_tokenizer.rebuild("x.gguf")
    assert rebuilt.encode(text) == [2, *original.encode(text)]
    assert rebuilt.decode(rebuilt.encode(text)) == text


def test_rebuilt_tokenizer_reads_turns_and_stops_at_their_end(trained, monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: as_gguf(trained))
    rebuilt = gguf_tokenizer.rebuild("x.gguf")
    assert rebuilt.encode("<start_of_turn>x")[1] == rebuilt.processor.piece_to_id("<start_of_turn>")
    assert set(rebuilt.stop_ids) == {1, rebuilt.processor.piece_to_id("<end_of_turn>")}


def test_a_space_before_the_text_where_the_header_says_so(trained, monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: as_gguf(trained, add_space_prefix=True))
    rebuilt = gguf_tokenizer.rebuild("x.gguf")
    assert rebuilt.processor.id_to_piece(rebuilt.encode("fox"))[1].startswith("▁")


def byte_level(*special):
    """A small byte-level BPE tokenizer, trained here."""
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(TEXT, vocab_size=400, special_tokens=[*special], show_progress=False)
    return inner


def metadata_of(inner, pre, ids, *, special):
    """What a GGUF file has of it; so many of its tokens, the first, are special."""
    described = json.loads(inner._tokenizer.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    kinds = np.array([*[3] * special, *[1] * (len(tokens) - special)], np.int32)
    merges = tuple(" ".join(m) if isinstance(m, list) else m for m in described["merges"])
    return TokenizerMetadata("gpt2", pre, tuple(tokens), np.array([], np.float32), kinds, merges, ids, {}, None)


def test_gemma_4_s_pairs_equal_the_original(monkeypatch):
    from tokenizers import decoders, normalizers, pre_tokenizers, trainers

    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    original = tokenizers.Tokenizer(tokenizer_models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "▁")
    original.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special[:4], show_progress=False)
    trainer.initial_alphabet = []
    original.train_from_iterator(TEXT, trainer)
    described = json.loads(original.to_str())
    words = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get) + special[4:]
    described["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    original = tokenizers.Tokenizer.from_str(json.dumps(described))
    found = TokenizerMetadata(
        model="gemma4",
        pre="default",
        tokens=tuple(words),
        scores=np.array([], np.float32),
        token_types=np.array([3 if w in special[:4] else 6 if w in special else 1 for w in words], np.int32),
        merges=tuple(" ".join(merge) for merge in described["model"]["merges"]),
        special_ids={"padding": 0, "eos": 1, "bos": 2, "unknown": 3},
        flags={"add_bos_token": True, "add_space_prefix": False},
        chat_template=None,
    )
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: found)
    rebuilt = gguf_tokenizer.rebuild("x.gguf")
    for text in HARD:
        assert rebuilt.encode(text) == [2, *original.encode(text).ids]
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_roberta_s_byte_pairs_are_put_between_two_tokens(monkeypatch):
    inner = byte_level("<s>", "</s>")
    found = metadata_of(inner, "roberta-bpe", {"bos": 0, "eos": 1, "seperator": 1}, special=2)
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: found)
    rebuilt = gguf_tokenizer.rebuild("x.gguf")
    for text in HARD:
        assert rebuilt.encode(text) == [0, *inner.encode(text).ids, 1]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "bloom", "dbrx"])
def test_rebuilt_byte_level_tokenizer_equals_the_original(pre, monkeypatch):
    inner = byte_level("<|endoftext|>")
    found = metadata_of(inner, pre, {"eos": 0, "bos": 0}, special=1)
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: found)
    rebuilt = gguf_tokenizer.rebuild("x.gguf")
    assert rebuilt.prefix == ((0,) if pre == "llama-bpe" else ())
    assert rebuilt.stop_ids == (0,)
    for text in HARD:
        ids = rebuilt.encode(text)[len(rebuilt.prefix) :]
        assert rebuilt.decode(ids) == text
        if pre == "gpt-2":
            assert ids == inner.encode(text).ids


@pytest.mark.parametrize(
    ("kind", "pre", "message"),
    [("rwkv", "default", "'rwkv', expected one of llama, gpt2, gemma4, bert, t5"), ("gpt2", "tekken", "'tekken'")],
)
def test_unknown_gguf_tokenizers_are_named(kind, pre, message, monkeypatch):
    empty = np.array([], np.int32)
    found = TokenizerMetadata(kind, pre, ("a",), empty.astype(np.float32), empty, (), {}, {}, None)
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_metadata", lambda path: found)
    with pytest.raises(UnsupportedError, match=message):
        gguf_tokenizer.rebuild("x.gguf")


def test_hugging_face_tokenizer_json(tmp_path):
    inner = tokenizers.Tokenizer(tokenizer_models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    found = tokenizer_of(manifest(tmp_path, eos_token_id=9))
    assert found.encode("b a b") == [1, 0, 1]
    assert found.stop_ids == (2, 7, 8, 9)


def test_hugging_face_sentencepiece_model(trained, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained)
    found = tokenizer_of(manifest(tmp_path))
    assert found.encode("fox")[0] == found.prefix[0] == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert tokenizer_of(manifest(tmp_path)).prefix == ()


def test_hugging_face_vocabulary_and_merges(tmp_path):
    byte_level("<|endoftext|>").save_model(str(tmp_path))
    found = tokenizer_of(manifest(tmp_path))
    assert found.decode(found.encode(HARD[1])) == HARD[1]


# KerasHub 0.32 leaves the vocabulary file to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_preset_tokenizer_is_kerashubs(trained, tmp_path):
    layer = keras_hub.models.Gemma3Tokenizer(proto=trained, has_vision_tokens=False)
    layer.save_to_preset(str(tmp_path))
    found = tokenizer_of(manifest(tmp_path, "keras-hub-preset", registered_name="x"))
    assert found.encode(HARD[6]) == [2, *layer(HARD[6])]
    assert found.decode(found.encode(HARD[6])) == HARD[6]
    assert set(found.stop_ids) == {1, layer.token_to_id("<end_of_turn>")}


def test_a_checkpoint_without_tokenizer_says_what_to_add(tmp_path):
    with pytest.raises(UnsupportedError, match=r"has no tokenizer, expected .*Add the file"):
        tokenizer_of(manifest(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_damaged_tokenizer_is_a_source_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff{ damaged")
    with pytest.raises(SourceError, match="Cannot read the tokenizer"):
        tokenizer_of(manifest(tmp_path))


def test_random_weights_answer_in_numbers(tmp_path):
    found = tokenizer_of(manifest(tmp_path, vocab_size=64, shardload={"synthetic": True}))
    assert all(0 <= i < 64 for i in found.encode("hé"))
    assert found.decode([5, 7]) == " <5> <7>"


def greedy_reference(model, ids, steps):
    """One forward pass a token, without cache."""
    ids = list(ids)
    for _ in range(steps):
        tokens = np.zeros((1, 32), "int32")
        tokens[0, : len(ids)] = ids
        mask = np.arange(32)[None] < len(ids)
        logits = model({"token_ids": keras.ops.array(tokens), "padding_mask": keras.ops.array(mask)})
        ids.append(int(np.asarray(logits)[0, len(ids) - 1].argmax()))
    return ids[-steps:]


@pytest.fixture(scope="module")
def gemma3():
    return models.randomise(models.causal_lm("gemma3"))


PROMPTS = [[3, 14, 15, 92, 65], [2, 71]]


@pytest.mark.slow
def test_ids_equal_a_forward_pass_per_token(gemma3):
    assert generate_ids(gemma3, PROMPTS, max_new_tokens=4) == [greedy_reference(gemma3, ids, 4) for ids in PROMPTS]


def test_the_models_own_sampler_and_optimizer_stay(gemma3):
    gemma3.compile(optimizer="sgd", sampler="top_k")
    optimizer, sampler = gemma3.optimizer, gemma3.sampler
    first = generate_ids(gemma3, PROMPTS, max_new_tokens=4)
    assert generate_ids(gemma3, PROMPTS, max_new_tokens=4) == first
    assert gemma3.optimizer is optimizer
    assert gemma3.sampler is sampler


@pytest.mark.slow
def test_a_stop_token_ends_the_text(gemma3):
    whole = generate_ids(gemma3, PROMPTS[:1], max_new_tokens=6)[0]
    stop = whole[3]
    assert generate_ids(gemma3, PROMPTS[:1], max_new_tokens=6, stop_ids=(stop,))[0] == whole[: whole.index(stop)]


@pytest.mark.slow
def test_text_in_text_out(gemma3, trained, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained)
    one = sentencepiece.SentencePieceProcessor(model_proto=trained)
    own = tokenizer_of(manifest(tmp_path))
    prompt = "\n"  # its ids must lie within the small model's vocabulary
    assert max(one.encode(prompt)) < 256
    text = shardload.generate(gemma3, prompt, max_new_tokens=4, tokenizer=own)
    assert isinstance(text, str)
    assert shardload.generate(gemma3, [prompt, prompt], max_new_tokens=4, tokenizer=own) == [text, text]


def test_a_backbone_does_not_generate():
    with abstract():
        bert = models.build("bert")
    with pytest.raises(UnsupportedError, match="is a BertBackbone, expected a CausalLM"):
        shardload.generate(bert, "x")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("t5gemma_s_s", r"T5GemmaSeq2SeqLM also needs the input 'encoder_token_ids', .* Call model\.generate with all"),
        ("gemma4_2b_assistant", "is an MTP draft model that requires a target model"),
    ],
)
def test_a_model_that_needs_more_than_text_says_so(size, words, tmp_path):
    loaded = shardload.load(synth(size, format="safetensors", scale=0.02, directory=tmp_path), mesh="1x1")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"Cannot generate text with .*{words}"):
            shardload.generate(loaded, "ab", max_new_tokens=2)


def test_a_model_from_elsewhere_needs_a_tokenizer(gemma3):
    with pytest.raises(UnsupportedError, match=r"no source that has a tokenizer\. Pass one: tokenizer=shardload\."):
        shardload.generate(gemma3, "x")


def test_empty_prompts_and_too_long_ones_are_refused(gemma3):
    with pytest.raises(UnsupportedError, match="an empty prompt"):
        generate_ids(gemma3, [[]])
    with abstract():
        gpt2 = models.causal_lm("gpt2")
    with pytest.raises(UnsupportedError, match="64 positions"):
        generate_ids(gpt2, [[1] * 60], max_new_tokens=10)
    assert generate_ids(gemma3, []) == []


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 16}, {"text_config": {"max_position_embeddings": 16}}, {"n_positions": 16}]
)
def test_a_prompt_beyond_the_context_is_refused_before_attention_takes_memory(config, tmp_path):
    with abstract():
        model = models.causal_lm("gemma3")
    sources.record_text_source(model, manifest(tmp_path, vocab_size=64, shardload={"synthetic": True}, **config))
    with pytest.raises(UnsupportedError, match=r"has 16\. Shorten"):
        shardload.generate(model, "x" * 9, max_new_tokens=8)


def test_half_a_character_is_refused(gemma3):
    with pytest.raises(UsageError, match=r"'\\ud800' at position 1, which is half of a character"):
        shardload.generate(gemma3, "a\ud800", tokenizer=tokenizer.ByteIds(100))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x4", "8x1"])
def test_fewer_prompts_than_the_batch_axis(mesh, gemma3):
    expected = generate_ids(gemma3, PROMPTS[:1], max_new_tokens=4)
    spec = MeshSpec.parse(mesh)
    bind(gemma3, mesh=spec, devices=jax.devices(), layouts=parallel.choose(gemma3, spec).layouts)
    try:
        assert generate_ids(gemma3, PROMPTS[:1], max_new_tokens=4) == expected
    finally:
        unbind(gemma3)


@pytest.mark.parametrize("watched", [True, False])
def test_people_at_a_terminal_are_told_of_the_compilation(watched, capsys, monkeypatch):
    with abstract():
        model = models.causal_lm("gemma3")
    monkeypatch.setattr("shardload.text.generation.generate_ids", lambda *args, **kwargs: [[1]])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    shardload.generate(model, "x", tokenizer=tokenizer.ByteIds(100))
    assert capsys.readouterr().err.startswith("Compiling for the first prompt") == watched


CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world", "naïve façade, don't stop: 3.14!"] * 9
ODD_TEXTS = ["hello world", "Don't  STOP the naïve fox!", "  two\n\nlines\t日本語 3.14", "unjumped foxes", "", "ﬁ ½ Å"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
START = "\u2581"


def word_pieces(*, lowercase):
    """A small tokenizer as BERT's, trained here."""
    inner = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    text = CORPUS if lowercase else [*CORPUS, "Hello World, The Quick Fox", "HELLO"] * 2
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
    for text in ODD_TEXTS:
        assert rebuilt.encode(text) == original.encode(text).ids, text
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text).ids)
    files = tokenizer_files(open_manifest(path))
    assert files["vocab.txt"].decode().splitlines() == words
    assert json.loads(files["tokenizer_config.json"])["do_lower_case"] is lowercase
    again = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert again.encode(ODD_TEXTS[1]).ids == original.encode(ODD_TEXTS[1]).ids


def unigrams():
    """A small SentencePiece model as XLM-RoBERTa's: unigrams, and Unicode normalisation."""
    return sentencepiece_model_pb2.ModelProto.FromString(trained_pieces(CORPUS, vocab_size=60))


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
    for text in ODD_TEXTS:
        expected = [i + 1 if i else 3 for i in original.encode(text)]
        assert rebuilt.encode(text) == [0, *expected, 2], text
    again = tokenizers.Tokenizer.from_str(tokenizer_files(open_manifest(path))["tokenizer.json"].decode())
    assert again.encode(ODD_TEXTS[0]).ids == rebuilt.encode(ODD_TEXTS[0])


def test_a_header_without_beginning_and_end(tmp_path):
    def add(writer):
        describe(writer)
        writer.add_tokenizer_model("bert")
        writer.add_token_list([START + "a"])

    path = write_gguf(tmp_path / "x.gguf", {}, arch="bert", extra=add)
    with pytest.raises(SourceError, match="names no tokens for the beginning and the end of a text"):
        shardload.tokenizer(path)
