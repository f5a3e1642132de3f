"""A backbone whose source has the head of a task: what is written names the class without it, and a note tells."""

import json
import re

import peft_folders
import pytest
from safetensors.numpy import load_file, save_file
from transformers_cross import folders, weights

import shardload
from shardload.converting.heads import without_head

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")
ABOUT_HEADS = {"id2label", "label2id", "num_labels", "problem_type"}
FAMILIES = ("albert", "bert", "dinov2", "dinov2_with_registers", "distilbert", "esm", "gpt2", "llama", "qwen2", "qwen3")
FAMILIES += ("roberta", "xlm-roberta", "vit", "deit", "swin")
HEAD = re.compile(r".+For(SequenceClassification|TokenClassification|ImageClassification|QuestionAnswering|MaskedLM)")
HEAD_TENSOR = re.compile(r"(pre_)?classifier\.|score\.|qa_outputs\.|predictions\.|cls\.|lm_head\.|vocab_")
NOT_LOADED = r"roberta, (?!token types of zeros)|.*transformers 4|.*bfloat16|.*sharded"
"""Token types that are not zeros are refused; the others repeat a case."""


def fixtures(family):
    return folders.read_family(family)


def architecture(fixture):
    return (fixture["json"].get("config.json", {}).get("architectures") or [""])[0]


CASES = [
    (family, name)
    for family in FAMILIES
    for name, fixture in fixtures(family).items()
    if HEAD.fullmatch(architecture(fixture)) and not re.match(NOT_LOADED, name)
]


def base_class(family):
    """Transformers' class of this family without a head, by the folder that it wrote of one."""
    named = (n for n in fixtures(family) if n.endswith((", base model", ", token types of zeros")))
    return architecture(fixtures(family)[next(named)])


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
    return [name for path in sorted(folder.glob("*.safetensors")) for name in load_file(path)]


def note_on_head(report):
    [found] = [note for note in report.notes if note.startswith("the head of ")]
    return found


def assert_without_head(out, report, *, base, task):
    config = config_of(out)
    assert config["architectures"] == [base]
    assert not config.keys() & ABOUT_HEADS
    assert not [name for name in tensors_of(out) if HEAD_TENSOR.match(name)]
    assert note_on_head(report).startswith(f"the head of {task}")
    assert note_on_head(report).endswith(f"config.json names {base}")


def test_all_families_with_heads_are_tried():
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_is_written_does_not_claim_the_head(family, name, tmp_path):
    folder = folders.build(fixtures(family)[name], tmp_path / "hf")
    model = shardload.load(folder, mesh="1x2", task=False)
    report = shardload.save_as(model, tmp_path / "out", to="safetensors")
    task, base = architecture(fixtures(family)[name]), base_class(family)
    assert_without_head(tmp_path / "out", report, base=base, task=task)
    heads = [tensor for tensor in tensors_of(folder) if HEAD_TENSOR.match(tensor)]
    assert heads
    found = note_on_head(report)
    assert [tensor for tensor in heads[:3] if repr(tensor) not in found] == []
    assert int(re.search(r"\((\d+) tensor", found)[1]) >= len(heads)
    # Of the rest of config.json, nothing is lost.
    lost = config_of(folder).keys() - config_of(tmp_path / "out").keys()
    assert lost <= ABOUT_HEADS
    again = shardload.load(tmp_path / "out", mesh="1x2", task=False)
    assert [a.tobytes() for a in again.get_weights()] == [a.tobytes() for a in model.get_weights()]


@pytest.mark.parametrize("to", ["preset", "orbax"])
@pytest.mark.parametrize("case", [("xlm-roberta", "classifier"), ("gpt2", "classifier"), ("bert", "masked LM")])
def test_presets_and_steps_remember_the_task_and_give_the_base_class(case, to, tmp_path):
    family, kind = case
    fixture = fixtures(family)[f"{family}, {kind}"]
    shardload.convert(folders.build(fixture, tmp_path / "hf"), tmp_path / "between", to=to)
    report = shardload.convert(tmp_path / "between", tmp_path / "out", to="safetensors")
    assert_without_head(tmp_path / "out", report, base=base_class(family), task=architecture(fixture))


def test_a_head_that_the_model_has_is_written(tmp_path):
    folder = folders.build(fixtures("vit")["vit, classifier"], tmp_path / "hf")
    report = shardload.save_as(shardload.load(folder), tmp_path / "out", to="safetensors")
    assert config_of(tmp_path / "out") == config_of(folder)
    assert sorted(tensors_of(tmp_path / "out")) == sorted(tensors_of(folder))
    assert not any(note.startswith("the head of") for note in report.notes)


def test_a_copy_keeps_the_head(tmp_path):
    folder = folders.build(fixtures("bert")["bert, classifier"], tmp_path / "hf")
    shardload.convert(folder, tmp_path / "out", to="safetensors")
    assert config_of(tmp_path / "out") == config_of(folder)
    assert sorted(tensors_of(tmp_path / "out")) == sorted(tensors_of(folder))


@pytest.mark.parametrize(
    ("model_type", "name", "base"),
    [
        ("llama", "LlamaForCausalLM", "LlamaForCausalLM"),
        ("bart", "BartForConditionalGeneration", "BartForConditionalGeneration"),
        ("gpt2", "GPT2LMHeadModel", "GPT2LMHeadModel"),
        ("gpt2", "GPT2DoubleHeadsModel", "GPT2Model"),
        ("bert", "BertLMHeadModel", "BertModel"),
        ("xlm-roberta", "XLMRobertaForCausalLM", "XLMRobertaModel"),
        ("vit", "ViTForMaskedImageModeling", "ViTModel"),
        ("deit", "DeiTForImageClassificationWithTeacher", "DeiTModel"),
        ("t5", "T5EncoderModel", "T5EncoderModel"),
        ("bert", "BertModel", "BertModel"),
    ],
)
def test_only_classes_whose_head_is_not_written_are_renamed(model_type, name, base):
    found = without_head({"model_type": model_type, "architectures": [name]})
    assert found == {"model_type": model_type, "architectures": [base]}


def adapter_with_head(folder, base):
    """An adapter of a classifier as PEFT writes it, with the trained head (``modules_to_save``)."""
    peft_folders.write(folder, base, ["query"], modules_to_save=["classifier"])
    path = folder / "adapter_model.safetensors"
    found = load_file(path)
    for name, tensor in shardload.inspect(base).tensors.items():
        if name.startswith("classifier."):
            found[f"base_model.model.{name}"] = weights.values(f"trained {name}", tensor.shape)
    save_file(found, path, metadata={"format": "pt"})
    return folder


LOST = (
    "4 tensors that the adapter {} trained are not loaded, because the model lacks this head: 'classifier.dense.bias', "
)


def test_a_head_that_an_adapter_trained_is_noted_where_the_model_lacks_it(tmp_path):
    folder = folders.build(fixtures("xlm-roberta")["xlm-roberta, classifier"], tmp_path / "hf")
    adapter = adapter_with_head(tmp_path / "adapter", folder)
    model = shardload.load(folder, mesh="1x2", adapter=adapter)
    reports = [
        shardload.report(model),
        shardload.save_as(model, tmp_path / "out", to="safetensors"),
        shardload.save_as(model, tmp_path / "preset", to="preset"),
        shardload.convert(folder, tmp_path / "converted", to="preset", adapter=adapter),
    ]
    for report in reports:
        assert sum(note.startswith(LOST.format(adapter)) for note in report.notes) == 1
        assert not any("replaced by those of the adapter" in note for note in report.notes)
    assert "4 tensors: 'classifier.dense.bias'" in note_on_head(reports[1])
    # A copy from Hugging Face to Hugging Face has the trained head.
    report = shardload.convert(folder, tmp_path / "copy", to="safetensors", adapter=adapter)
    assert f"4 tensors replaced by those of the adapter {adapter}" in report.notes
    written = load_file(tmp_path / "copy" / "model.safetensors")["classifier.dense.weight"]
    assert written.tobytes() == weights.values("trained classifier.dense.weight", written.shape).tobytes()
