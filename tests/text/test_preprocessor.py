"""Text from a model with KerasHub's preprocessor, and with the tokenizer of any source, without TensorFlow."""

import json
import os
import subprocess
import sys
import threading

import keras_hub
import models
import pytest
from by_hand import check_same
from gguf_tokenizers import add_byte_pairs, add_pieces, byte_pairs, gguf_with_tokenizer, sentence_pieces

import shardload
from shardload.errors import SourceNotFoundError, TransferError, UnsupportedError, UsageError
from shardload.hub import building, kerashub
from shardload.hub.kerashub import as_with_tensorflow
from shardload.synth import synth

pytestmark = [
    # KerasHub leaves the vocabulary open when it builds a tokenizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

PROMPTS = ["the quick brown fox", "jumps over"]


@pytest.fixture
def gemma2(tmp_path, monkeypatch):
    return gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add_pieces, vocab_size=320)


def test_the_preprocessor_is_keras_hubs_and_makes_the_files_tokens(gemma2):
    model = shardload.load(gemma2)
    assert type(model.preprocessor) is keras_hub.models.GemmaCausalLMPreprocessor
    assert model.preprocessor is model.preprocessor
    own = shardload.tokenizer(gemma2)
    for text in (*PROMPTS, "  two  spaces\n", "naïve 日本語", ""):
        found = model.preprocessor.generate_preprocess([text], sequence_length=64)
        assert found["token_ids"][0][found["padding_mask"][0]].tolist() == own.encode(text)
    assert not any("preprocessor" in note for note in shardload.report(model).notes)


@pytest.mark.slow
def test_text_in_text_out_as_on_the_command_line(gemma2):
    model = shardload.load(gemma2, mesh="1x8")
    model.compile(sampler="greedy")
    lengths = [len(shardload.tokenizer(gemma2).encode(text)) for text in PROMPTS]
    for text, length in zip(PROMPTS, lengths, strict=True):
        added = shardload.generate(model, text, max_new_tokens=4)
        assert model.generate(text, max_length=length + 4) == text + added


def test_it_is_made_on_first_use_and_by_nobody_else(gemma2):
    model, plain = shardload.load(gemma2), models.causal_lm("gemma2")
    assert "_preprocessor" not in vars(model)
    assert plain.preprocessor is None
    assert "_preprocessor" not in vars(model)
    model.preprocessor = None
    assert model.preprocessor is None
    assert shardload.load(gemma2).get_config()["preprocessor"]["class_name"] == "GemmaCausalLMPreprocessor"
    assert model.preprocessor is None


def test_ctrl_c_while_it_is_made_leaves_it_for_the_next_use(gemma2, monkeypatch):
    model = shardload.load(gemma2)

    def interrupted(self, proto, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(keras_hub.models.GemmaTokenizer, "__init__", interrupted)
        _ = model.preprocessor
    assert type(model.preprocessor) is keras_hub.models.GemmaCausalLMPreprocessor


def test_keras_hub_saves_and_loads_it(gemma2, tmp_path):
    model = shardload.load(gemma2)
    model.save_to_preset(str(tmp_path / "saved"))
    again = keras_hub.models.CausalLM.from_preset(str(tmp_path / "saved"))
    assert again.preprocessor.tokenizer(PROMPTS[0]).tolist() == model.preprocessor.tokenizer(PROMPTS[0]).tolist()


def test_a_file_that_changed_since_gives_none_with_a_warning(gemma2):
    model = shardload.load(gemma2)
    os.utime(gemma2, ns=(1, 1))
    with pytest.warns(UserWarning, match=r"Cannot make the preprocessor of .* changed since .*shardload\."):
        assert model.preprocessor is None
    assert model.preprocessor is None


def test_other_tokens_than_the_files_are_a_warning(tmp_path, monkeypatch):
    """KerasHub takes up to three digits for one word, as in Llama 3; Qwen takes one."""

    def add(writer):
        words = [*byte_pairs()["model"]["vocab"], *"0123456789", "12", "<|endoftext|>", "<|im_end|>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(words)
        writer.add_token_types([3 if word.startswith("<|") else 1 for word in words])
        writer.add_token_merges(["1 2"])
        writer.add_eos_token_id(words.index("<|endoftext|>"))

    model = shardload.load(gguf_with_tokenizer(tmp_path, monkeypatch, "qwen2", add))
    with pytest.warns(UserWarning, match="splits some texts into other tokens than the tokenizer in"):
        assert type(model.preprocessor) is keras_hub.models.QwenCausalLMPreprocessor


def test_byte_pairs_of_llama_3(tmp_path, monkeypatch):
    file = gguf_with_tokenizer(tmp_path, monkeypatch, "llama", add_byte_pairs)
    found = shardload.load(file).preprocessor.generate_preprocess(PROMPTS[:1], sequence_length=64)
    assert found["token_ids"][0][found["padding_mask"][0]].tolist() == shardload.tokenizer(file).encode(PROMPTS[0])


# ---- where it cannot be made ---------------------------------------------------------------------


def add_bert(writer):
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a", "b"])


CLASS = "CausalLMPreprocessor"
TENSORFLOW = f"Gemma3{CLASS} requires TensorFlow, which was not found."


@pytest.mark.parametrize(
    ("model_type", "add", "why"),
    [
        ("gemma2", lambda writer: None, "contains no tokenizer. Pass token ids to the model"),
        ("gemma2", add_bert, "is WordPiece, which KerasHub's GemmaCausalLMPreprocessor cannot read"),
        ("llama", add_pieces, f"is SentencePiece, which KerasHub's Llama3{CLASS} cannot read. Use shardload.generate("),
        ("gemma3_text", add_pieces, f"{TENSORFLOW} Use shardload.generate("),
    ],
)
def test_the_report_says_why_there_is_none(model_type, add, why, tmp_path, monkeypatch):
    model = shardload.load(gguf_with_tokenizer(tmp_path, monkeypatch, model_type, add))
    assert model.preprocessor is None
    [note] = [note for note in shardload.report(model).notes if note.startswith("model.preprocessor is None: ")]
    assert why in note


@pytest.mark.parametrize("form", ["safetensors", "h5"])
def test_a_folder_s_report_says_so_too(form, tmp_path):
    source = synth("gemma3_1b", scale=0.02, directory=tmp_path, format="safetensors")
    (source / "tokenizer.model").write_bytes(sentence_pieces())
    if form == "h5":
        shardload.convert(source, tmp_path / "preset", to="h5")
        source = tmp_path / "preset"
    model = shardload.load(source)
    assert model.preprocessor is None
    wanted = f"model.preprocessor is None: KerasHub's {TENSORFLOW}"
    assert any(note.startswith(wanted) for note in shardload.report(model).notes)


def test_a_folder_s_tokenizer_that_keras_hub_cannot_read(tmp_path):
    source = synth("gemma2_2b", scale=0.02, directory=tmp_path, format="safetensors")
    assert not any("preprocessor" in note for note in shardload.report(shardload.load(source)).notes)
    (source / "tokenizer.json").write_text("{}")
    [note] = [note for note in shardload.report(shardload.load(source)).notes if "preprocessor" in note]
    assert "KerasHub's GemmaCausalLMPreprocessor cannot read the tokenizer: `tokenizer.model` doesn't exist" in note


def test_an_entry_that_a_folder_s_tokenizer_lacks_is_named(tmp_path):
    source = synth("llama3.2_1b", scale=0.02, directory=tmp_path, format="safetensors")
    described = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        "added_tokens": [],
    }
    (source / "tokenizer.json").write_text(json.dumps(described))
    (source / "tokenizer_config.json").write_text("{}")
    [note] = [note for note in shardload.report(shardload.load(source)).notes if "preprocessor" in note]
    assert "cannot read the tokenizer: the entry 'bos_token' is missing." in note
    notes = shardload.convert(source, tmp_path / "out", to="preset").notes
    assert any("KerasHub cannot read them: the entry 'bos_token' is missing" in note for note in notes)


def test_a_folder_s_is_as_keras_hub_makes_it(tmp_path):
    source = synth("gemma2_2b", scale=0.02, directory=tmp_path, format="safetensors")
    (source / "tokenizer.model").write_bytes(sentence_pieces())
    ours, peer = shardload.load(source), keras_hub.models.CausalLM.from_preset(str(source))
    found, wanted = (task.preprocessor.get_config() for task in (ours, peer))
    for config in (found, wanted):  # names count on with every object
        config.pop("name")
        config["tokenizer"]["config"].pop("name")
        config["tokenizer"]["config"].pop("proto", None)
    assert found == wanted
    assert ours.preprocessor.tokenizer(PROMPTS[0]).tolist() == peer.preprocessor.tokenizer(PROMPTS[0]).tolist()


def test_a_model_that_keras_hub_loaded_has_a_tokenizer_of_its_own(tmp_path):
    source = synth("gemma2_2b", scale=0.02, directory=tmp_path, format="safetensors")
    (source / "tokenizer.model").write_bytes(sentence_pieces())
    ours, peer = shardload.load(source), keras_hub.models.CausalLM.from_preset(str(source), dtype="bfloat16")
    wanted = shardload.generate(ours, PROMPTS, max_new_tokens=3)
    assert shardload.generate(peer, PROMPTS, max_new_tokens=3) == wanted
    layer = peer.preprocessor.tokenizer
    peer.preprocessor = None
    assert shardload.generate(peer, PROMPTS, max_new_tokens=3, tokenizer=layer) == wanted
    with pytest.raises(UsageError, match=r"Cannot use tokenizer=3: expected shardload\.tokenizer"):
        shardload.generate(peer, PROMPTS, tokenizer=3)


def test_it_is_begun_before_the_model_is_built(tmp_path, monkeypatch):
    source = synth("gemma2_2b", scale=0.02, directory=tmp_path, format="safetensors")
    begun = threading.Event()
    monkeypatch.setattr(kerashub, "make_preprocessor", lambda cls, manifest: begun.set())

    def build(*args, **kwargs):
        assert begun.wait(60)
        raise UsageError("enough")

    monkeypatch.setattr(building, "build_model", build)
    with pytest.raises(UsageError, match="enough"):
        shardload.load(source)


def test_a_backbone_alone_begins_none(tmp_path, monkeypatch):
    source = synth("gemma2_2b", scale=0.02, directory=tmp_path, format="safetensors")
    monkeypatch.setattr(kerashub, "make_preprocessor", lambda cls, manifest: pytest.fail("was made"))
    assert isinstance(shardload.load(source, task=False), keras_hub.models.GemmaBackbone)


def test_a_plan_makes_none(tmp_path, monkeypatch):
    source = synth("gemma2_2b", scale=0.02, directory=tmp_path, format="safetensors")
    (source / "tokenizer.model").write_bytes(sentence_pieces())
    monkeypatch.setattr(keras_hub.models.GemmaTokenizer, "__init__", lambda *args, **kwargs: pytest.fail("was made"))
    shardload.plan(source, mesh="1x2")


def test_a_backbone_has_none_and_no_note(gemma2):
    assert not any("preprocessor" in note for note in shardload.report(shardload.load(gemma2, task=False)).notes)


GENERATES = """
import sys, shardload
model = shardload.load(sys.argv[1])
model.compile(sampler="greedy")
added = shardload.generate(model, "the quick", max_new_tokens=4)
print(type(model.preprocessor).__name__, model.generate("the quick", max_length=7).startswith("the quick" + added[:1]))
print(model.preprocessor.generate_preprocess("the quick", sequence_length=16)["token_ids"].tolist())
"""


@pytest.mark.slow
def test_gemma_3_where_there_is_tensorflow(tmp_path, monkeypatch):
    file = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma3_text", add_pieces, vocab_size=320)
    done = subprocess.run([sys.executable, "-c", GENERATES, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kind, ids = done.stdout.splitlines()
    own = shardload.tokenizer(file).encode("the quick")
    assert kind == "Gemma3CausalLMPreprocessor True"
    assert ids == str([*own, *[0] * (16 - len(own))])


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
    assert shardload.generate(model, TEXT, max_new_tokens=3) == shardload.generate(built, TEXT, max_new_tokens=3)


def test_a_file_that_changed_since_is_refused(sources):
    model = shardload.load(sources["gguf"])
    os.utime(sources["gguf"], ns=(1, 1))
    with pytest.raises(TransferError, match="changed since its headers were read"):
        shardload.generate(model, TEXT)


def test_a_keras_archive_with_gemma_3_s_preprocessor(tmp_path):
    model = models.randomise(models.causal_lm("gemma3"))
    cls = keras_hub.models.Gemma3CausalLMPreprocessor
    with as_with_tensorflow(cls):
        model.preprocessor = cls(keras_hub.models.Gemma3Tokenizer(sentence_pieces(), has_vision_tokens=False))
    model.save(tmp_path / "model.keras")
    found = shardload.load(tmp_path / "model.keras")
    check_same(found.backbone, model.backbone)
    assert found.preprocessor is None
    assert any("model.preprocessor is None" in note for note in shardload.report(found).notes)


def test_a_preprocessor_that_needs_none_stays(tmp_path):
    model = models.randomise(models.causal_lm("gemma2"))
    model.preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(keras_hub.models.GemmaTokenizer(sentence_pieces()))
    model.save(tmp_path / "model.keras")
    found = shardload.load(tmp_path / "model.keras")
    assert found.preprocessor.tokenizer("the quick").tolist() == model.preprocessor.tokenizer("the quick").tolist()
