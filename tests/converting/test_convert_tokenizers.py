"""Tokenizers of Hugging Face folders, in presets: KerasHub reads them there and makes the same tokens."""

import json
import shutil
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest
import sentencepiece
from gguf_fixture import gemma3_gguf  # noqa: F401 - a fixture
from gguf_tokenizers import add_byte_pairs, add_pieces, byte_pairs, gguf_with_tokenizer, sentence_pieces

import shardload
from shardload.synth import synth
from shardload.text.sources import tokenizer_of

pytestmark = [
    pytest.mark.slow,
    # KerasHub leaves the vocabulary open when it builds a tokenizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

TEXT = ["the quick brown fox", "jumps over"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Hugging Face folders with a tokenizer, as they are published."""
    base = tmp_path_factory.mktemp("tokenizers")
    found = {
        name: synth(name, scale=0.02, directory=base, format="safetensors")
        for name in ("gemma2_9b", "gemma3_1b", "llama3.2_1b", "qwen3_0.6b")
    }
    (found["gemma3_1b"] / "tokenizer.model").write_bytes(sentence_pieces())
    (found["gemma2_9b"] / "tokenizer.model").write_bytes(sentence_pieces())
    for name in ("llama3.2_1b", "qwen3_0.6b"):
        (found[name] / "tokenizer.json").write_text(json.dumps(byte_pairs()))
        tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        (found[name] / "tokenizer_config.json").write_text(json.dumps(tokens))
    return found


def converted(source, via, folder, to):
    """What a source becomes, by way of another format if one is given."""
    if via is not None:
        shardload.convert(source, folder / "via", to=via)
        source = folder / "via"
    return shardload.convert(source, folder / "out", to=to)


def assert_same_tokens(one, two):
    for ours, theirs in zip(one(TEXT), two(TEXT), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def files(folder):
    skipped = ("transformers", "model.weights.h5", "metadata.json")
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.startswith(skipped))


@pytest.mark.sample(2)
@pytest.mark.parametrize("via", [None, "orbax", "safetensors"])
@pytest.mark.parametrize("name", ["gemma2_9b", "llama3.2_1b", "qwen3_0.6b"])
def test_a_preset_has_the_tokenizer_that_keras_hub_would_write(name, via, folders, tmp_path):
    source = folders[name]
    theirs = keras_hub.models.CausalLM.from_preset(str(source), dtype="bfloat16")
    theirs.save_to_preset(str(tmp_path / "theirs"))
    converted(source, via, tmp_path, "h5")
    assert files(tmp_path / "out") == files(tmp_path / "theirs")
    for path in (tmp_path / "theirs" / "assets").rglob("*.*"):
        assert (tmp_path / "out" / path.relative_to(tmp_path / "theirs")).read_bytes() == path.read_bytes()
    ours = keras_hub.models.CausalLM.from_preset(str(tmp_path / "out"), dtype="bfloat16")
    assert type(ours.preprocessor.tokenizer) is type(theirs.preprocessor.tokenizer)
    assert_same_tokens(ours.preprocessor.tokenizer, theirs.preprocessor.tokenizer)


def test_a_preset_with_a_tokenizer_can_be_read_by_others(tmp_path, monkeypatch):
    """KerasHub's files are made in a private folder first."""
    source = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add_pieces, vocab_size=320)
    (tmp_path / "plain").mkdir()
    shardload.convert(source, tmp_path / "preset", to="h5")
    made = [tmp_path / "preset", *(path for path in (tmp_path / "preset").rglob("*") if path.is_dir())]
    assert len(made) > 1
    assert {path.stat().st_mode for path in made} == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize("via", [None, "orbax"])
def test_the_tokenizer_works_where_the_preprocessor_needs_tensorflow(via, folders, tmp_path):
    source = folders["gemma3_1b"]
    converted(source, via, tmp_path, "h5")
    theirs, ours = (keras_hub.tokenizers.Gemma3Tokenizer.from_preset(str(path)) for path in (source, tmp_path / "out"))
    assert ours.get_config() == {**theirs.get_config(), "name": ours.name}
    assert_same_tokens(ours, theirs)
    assert shardload.load(tmp_path / "out").preprocessor is None
    assert tokenizer_of(shardload.inspect(tmp_path / "out")).encode(TEXT[0])[1:] == [int(i) for i in theirs(TEXT[0])]


GENERATES = """
import sys, keras_hub
for folder in sys.argv[1:]:
    model = keras_hub.models.CausalLM.from_preset(folder)
    model.preprocessor.generate_postprocess = lambda made: list(made["token_ids"].shape)  # random ids have no words
    print(type(model.preprocessor).__name__, *model.generate(["the quick"], max_length=12))
"""


def test_keras_hub_generates_from_presets_that_were_made_without_tensorflow(folders, tmp_path, monkeypatch):
    """Of a Hugging Face folder, of a backbone's folder, and of a GGUF file."""
    backbone = shutil.copytree(folders["gemma3_1b"], tmp_path / "backbone")
    config = json.loads((backbone / "config.json").read_text())
    (backbone / "config.json").write_text(json.dumps({**config, "architectures": ["Gemma3TextModel"]}))
    file = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma3_text", add_pieces, vocab_size=320)
    made = [tmp_path / name for name in ("of-folder", "of-backbone", "of-file")]
    for source, target in zip((folders["gemma3_1b"], backbone, file), made, strict=True):
        shardload.convert(source, target, to="h5")
    assert [(path / "task.json").exists() for path in made] == [True, False, True]
    done = subprocess.run([sys.executable, "-c", GENERATES, *made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Gemma3CausalLMPreprocessor 1 12"] * 3


def test_a_backbone_brings_its_tokenizer(tmp_path):
    source = synth("bert_base", scale=0.02, directory=tmp_path, format="safetensors")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick"]
    (source / "vocab.txt").write_text("\n".join(words))
    (source / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    shardload.convert(source, tmp_path / "out", to="h5")
    found = keras_hub.tokenizers.Tokenizer.from_preset(str(tmp_path / "out"))
    assert (type(found), found.get_vocabulary()) == (keras_hub.models.BertTokenizer, words)
    assert found(["The quick"]) == [[5, 6]]


@pytest.mark.parametrize("kind", ["BPE", "WordPiece"])
def test_a_tokenizer_in_one_file_is_enough(kind, tmp_path):
    """Newer versions of transformers write ``tokenizer.json`` only; KerasHub reads the files of older ones."""
    name = {"BPE": "gpt2_base", "WordPiece": "bert_base"}[kind]
    source = synth(name, scale=0.02, directory=tmp_path, format="safetensors")
    described = byte_pairs()
    if kind == "WordPiece":
        described["model"] = {"type": kind, "vocab": {"the": 5, "quick": 6}}
        special = enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
        described["added_tokens"] = [{"content": word, "id": number} for number, word in special]
    (source / "tokenizer.json").write_text(json.dumps(described))
    (source / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert not any("tokenizer" in note for note in shardload.convert(source, tmp_path / "out", to="h5").notes)
    found = keras_hub.tokenizers.Tokenizer.from_preset(str(tmp_path / "out"))
    expected = tokenizer_of(shardload.inspect(source)).encode("the") if kind == "BPE" else [5]
    assert [int(i) for i in found("the")] == expected
    assert not (tmp_path / "out" / "transformers" / "vocab.txt").exists()


def test_a_tokenizer_that_keras_hub_cannot_read_is_told(folders, tmp_path):
    source = shutil.copytree(folders["llama3.2_1b"], tmp_path / "source")
    (source / "tokenizer.json").write_text(json.dumps({**byte_pairs(), "model": {"type": "Unigram", "vocab": []}}))
    [note] = [note for note in shardload.convert(source, tmp_path / "out", to="h5").notes if "tokenizer" in note]
    assert note.startswith("the preset has no tokenizer, only its files in transformers/: KerasHub cannot read them: ")
    assert (tmp_path / "out" / "transformers" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_model_whose_tokenizer_has_no_words_is_a_preset_without_it(folders, tmp_path):
    """As a training step holds it: the configuration only."""
    model = keras_hub.models.CausalLM.from_preset(str(folders["gemma2_9b"]), dtype="bfloat16")
    described = keras.saving.serialize_keras_object(model)
    del described["compile_config"]
    model.save_weights(tmp_path / "task.weights.h5")
    (tmp_path / "task.json").write_text(json.dumps(described))
    shardload.convert(tmp_path / "task.weights.h5", tmp_path / "out", to="h5")
    assert json.loads((tmp_path / "out" / "task.json").read_text())["config"]["preprocessor"] is None
    found = keras_hub.models.CausalLM.from_preset(str(tmp_path / "out"), dtype="bfloat16", preprocessor=None)
    assert len(found.weights) == len(model.weights)


# ---- back to Hugging Face ------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("via", [None, "orbax"])
@pytest.mark.parametrize("name", ["gemma2_9b", "llama3.2_1b", "qwen3_0.6b"])
def test_a_preset_s_tokenizer_becomes_hugging_face_s(name, via, folders, tmp_path):
    source = folders[name]
    out, report = there_and_back(source, via, tmp_path)
    assert not any("tokenizer" in note for note in report.notes)
    theirs, ours = (tokenizer_of(shardload.inspect(path)) for path in (source, out))
    assert [ours.encode(text) for text in ("thexoqtthe", "the")] == [theirs.encode(t) for t in ("thexoqtthe", "the")]
    again = keras_hub.models.CausalLM.from_preset(str(tmp_path / "out"), dtype="bfloat16").preprocessor.tokenizer
    first = keras_hub.models.CausalLM.from_preset(str(source), dtype="bfloat16").preprocessor.tokenizer
    assert_same_tokens(again, first)


@pytest.mark.parametrize("via", [None, "orbax"])
def test_gpt2_s_vocabulary_becomes_hugging_face_s(via, tmp_path):
    source = synth("gpt2_base", scale=0.02, directory=tmp_path, format="safetensors")
    pairs = byte_pairs()["model"]
    vocabulary = {**pairs["vocab"], "<|endoftext|>": len(pairs["vocab"])}
    (source / "vocab.json").write_text(json.dumps(vocabulary))
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in pairs["merges"])]))
    out, report = there_and_back(source, via, tmp_path)
    assert not any("tokenizer" in note for note in report.notes)
    assert json.loads((out / "vocab.json").read_text()) == vocabulary
    theirs, ours = (keras_hub.tokenizers.GPT2Tokenizer.from_preset(str(path)) for path in (source, out))
    assert_same_tokens(ours, theirs)


@pytest.mark.parametrize("via", [None, "orbax"])
def test_bert_s_vocabulary_becomes_hugging_face_s(via, tmp_path):
    """KerasHub itself needs TensorFlow to read it, so the preset's files are written as KerasHub writes them."""
    preset = synth("bert_base", scale=0.02, directory=tmp_path)
    (preset / "assets" / "tokenizer").mkdir(parents=True)
    words = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick"])
    (preset / "assets" / "tokenizer" / "vocabulary.txt").write_text(words)
    settings = {"name": "bert_tokenizer", "lowercase": True, "config_file": "tokenizer.json"}
    (preset / "tokenizer.json").write_text(json.dumps({"class_name": "BertTokenizer", "config": settings}))
    out, report = there_and_back(preset, via, tmp_path)
    assert not any("tokenizer" in note for note in report.notes)
    assert (out / "vocab.txt").read_text() == words
    assert json.loads((out / "tokenizer_config.json").read_text())["do_lower_case"] is True


def there_and_back(source, via, folder):
    """From a preset that never was anything else to Hugging Face."""
    shardload.convert(source, folder / "preset", to="h5")
    shutil.rmtree(folder / "preset" / "transformers", ignore_errors=True)
    return folder / "out", converted(folder / "preset", via, folder, "safetensors")


# ---- GGUF ---------------------------------------------------------------------------------------


def test_gguf_pieces_become_a_tokenizer_model(tmp_path, monkeypatch):
    file = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add_pieces)
    wanted = tokenizer_of(shardload.inspect(file))
    report = shardload.convert(file, tmp_path / "out", to="safetensors")
    assert any("tokenizer was rebuilt" in note for note in report.notes)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "tokenizer.model"))
    assert (processor.pad_id(), processor.eos_id(), processor.bos_id(), processor.unk_id()) == (0, 1, 2, 3)
    found = tokenizer_of(shardload.inspect(tmp_path / "out"))
    assert [found.encode(text) for text in TEXT] == [wanted.encode(text) for text in TEXT]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["chat_template"]) == ("<bos>", "{{ bos_token }}")


def test_gguf_byte_pairs_become_a_tokenizer_json(tmp_path, monkeypatch):
    file = gguf_with_tokenizer(tmp_path, monkeypatch, "llama", add_byte_pairs)
    wanted = tokenizer_of(shardload.inspect(file))
    shardload.convert(file, tmp_path / "out", to="safetensors")
    found = tokenizer_of(shardload.inspect(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    for text in TEXT:
        assert [*wanted.prefix, *found.encode(text)] == wanted.encode(text)


@pytest.mark.parametrize(("model_type", "add"), [("gemma2", add_pieces), ("llama", add_byte_pairs)])
@pytest.mark.parametrize("via", [None, "orbax"])
def test_a_preset_of_gguf_has_its_tokenizer(model_type, add, via, tmp_path, monkeypatch):
    file = gguf_with_tokenizer(tmp_path, monkeypatch, model_type, add)
    wanted = tokenizer_of(shardload.inspect(file))
    converted(file, via, tmp_path, "h5")
    found = keras_hub.models.CausalLM.from_preset(str(tmp_path / "out"), dtype="bfloat16").preprocessor.tokenizer
    for text in TEXT:
        assert [*wanted.prefix, *(int(i) for i in found(text))] == wanted.encode(text)


def test_a_gguf_tokenizer_that_cannot_be_rebuilt_is_told(tmp_path, monkeypatch):
    def add(writer):
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a", "b"])

    file = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add)
    report = shardload.convert(file, tmp_path / "out", to="safetensors")
    assert any("tokenizer in the GGUF file was left out" in note and "'rwkv'" in note for note in report.notes)
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_a_damaged_gguf_tokenizer_does_not_keep_the_weights(tmp_path, monkeypatch):
    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "a", "b"])

    report = shardload.convert(gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add), tmp_path / "out", to="h5")
    assert any("tokenizer in the GGUF file was left out" in note for note in report.notes)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_the_real_gguf_tokenizer(gemma3_gguf, tmp_path):  # noqa: F811
    wanted = tokenizer_of(shardload.inspect(gemma3_gguf))
    shardload.convert(gemma3_gguf, tmp_path / "hf", to="safetensors")
    shardload.convert(tmp_path / "hf", tmp_path / "out", to="h5")
    found = tokenizer_of(shardload.inspect(tmp_path / "hf"))
    preset = keras_hub.tokenizers.Gemma3Tokenizer.from_preset(str(tmp_path / "out"))
    for text in (*TEXT, "  def f(x):\n\treturn x ** 2", "na\u00efve \u65e5\u672c\u8a9e \U0001f680"):
        assert found.encode(text) == wanted.encode(text)
        assert [*wanted.prefix, *(int(i) for i in preset(text))] == wanted.encode(text)


@pytest.mark.parametrize("name", ["gemma2_9b", "llama3.2_1b"])
def test_a_live_model_keeps_its_tokenizer(name, folders, tmp_path):
    def ids(source):
        return shardload.tokenizer(source).encode(TEXT[0])

    wanted = ids(folders[name])
    model = shardload.load(folders[name], mesh="1x8")
    for to in ("preset", "safetensors"):
        shardload.save_as(model, tmp_path / to, to=to)
        assert ids(tmp_path / to)[-len(wanted) :] == wanted  # Llama 3 begins with a token only in KerasHub
    from_preset = shardload.load(tmp_path / "preset")  # knows of no folder of Hugging Face
    shardload.save_as(from_preset, tmp_path / "back", to="safetensors")
    assert ids(tmp_path / "back")[-len(wanted) :] == wanted
    shardload.save_as(model.backbone, tmp_path / "backbone", to="preset")
    assert not list((tmp_path / "backbone").glob("*tokenizer*"))
