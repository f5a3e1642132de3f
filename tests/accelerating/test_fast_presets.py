"""`from_preset` gives the same model inside `shardload.fast` and outside, for every family of KerasHub's converters."""

import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import hub_folders
import hub_nested
import keras
import keras_hub
import pytest
from gguf_tokenizers import add_pieces, gguf_with_tokenizer
from initial_values import zeros_for_random
from process_runs import told_by
from same_models import compare

import shardload

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")  # KerasHub's Swin

QUICK = {"gemma2", "gpt2", "bert", "vit"}
FAMILIES = [
    pytest.param(module, name, marks=[] if name in QUICK else pytest.mark.slow, id=name)
    for module in (hub_folders, hub_nested)
    for name in module.CONFIGS
]
BY_KERAS = {"blip-2 t5"}
"""Families that shardload cannot fill: their converters build layers while they convert."""


def tasks_of(backbone):
    """KerasHub's own tasks that have a class of backbone."""
    found = [vars(keras_hub.models)[name] for name in sorted(vars(keras_hub.models))]
    tasks = [cls for cls in found if isinstance(cls, type) and issubclass(cls, keras_hub.models.Task)]
    return [cls for cls in tasks if cls.backbone_cls is backbone]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(module, name):
        if (module, name) not in made:
            made[module, name] = str(write(tmp_path_factory.mktemp(name), module, name))
        return made[module, name]

    return folder


def write(path, module, name):
    if module is hub_nested:
        return hub_nested.write(path, name, files=2 if name == "gemma3n" else 1)
    with zeros_for_random():  # it is only asked for shapes
        model = hub_folders.build(path, name, abstract=name == "swin")
    return hub_folders.write(path, name, model)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("module", "name"), FAMILIES)
def test_a_backbone(module, name, folder_of, monkeypatch):
    if name == "gemma3n":
        hub_nested.shrink_mobilenet(monkeypatch)
    path = folder_of(module, name)
    report = compare(lambda: keras_hub.models.Backbone.from_preset(path))
    assert [call.why for call in report] == ([None] if name not in BY_KERAS else [mock.ANY])


TASKS = dict.fromkeys(("gemma2", "llama", "gpt2"), "CausalLM") | dict.fromkeys(("vit", "deit"), "ImageClassifier")


@pytest.mark.parametrize("name", TASKS)
def test_a_task(name, folder_of):
    path, cls = folder_of(hub_folders, name), getattr(keras_hub.models, TASKS[name])
    report = compare(lambda: cls.from_preset(path, preprocessor=None, dtype="bfloat16"))
    assert [call.why for call in report] == [None]


@pytest.mark.parametrize("load_weights", [True, False])
@pytest.mark.parametrize("name", ["gemma2", "bert"])
def test_a_backbone_under_model_parallel(name, load_weights, folder_of):
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ["batch", "model"]))
    layouts[".*(token_embedding|feedforward|ffw).*(embeddings|kernel)"] = ("model", None)
    path = folder_of(hub_folders, name)

    def load():
        with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
            return keras_hub.models.Backbone.from_preset(path, load_weights=load_weights)

    (call,) = compare(load)
    assert call.by == "shardload" and (call.load.layout.sharded > 1 if load_weights else call.read_bytes == 0)


@pytest.mark.parametrize("name", ["gemma2", "vit"])
def test_a_model_with_initial_values(name, folder_of):
    path, cls = folder_of(hub_folders, name), getattr(keras_hub.models, TASKS[name])
    (call,) = compare(lambda: cls.from_preset(path, preprocessor=None, load_weights=False))
    has_head = name == "vit"
    assert (call.by, call.load) == ("keras" if has_head else "shardload", None)
    assert (call.why is not None and "loads the weights of a head" in call.why) == has_head


def test_a_task_whose_head_is_asked_for_anew(folder_of):
    path = folder_of(hub_folders, "vit")
    report = compare(lambda: keras_hub.models.ImageClassifier.from_preset(path, num_classes=7, preprocessor=None))
    assert [call.by for call in report] == ["shardload"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory, folder_of):
    """A classifier as KerasHub saves it: the weights of its head are in a file of their own."""
    path = tmp_path_factory.mktemp("preset")
    backbone = keras_hub.models.Backbone.from_preset(folder_of(hub_folders, "bert"))
    keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None).save_to_preset(str(path))
    return str(path)


@pytest.mark.parametrize(
    "options", [{}, {"num_classes": 5}, {"dtype": "bfloat16"}, {"dropout": 0.3}, {"load_weights": False}], ids=str
)
def test_a_preset_with_a_head(preset, options):
    report = compare(lambda: keras_hub.models.TextClassifier.from_preset(preset, **options))
    assert [call.by for call in report] == ["shardload"]


@pytest.mark.parametrize("cls", ["Backbone", "MaskedLM", "BertBackbone"])
def test_a_preset_as_something_else(preset, cls):
    options = {"preprocessor": None} if cls == "MaskedLM" else {}
    report = compare(lambda: getattr(keras_hub.models, cls).from_preset(preset, **options))
    assert [call.by for call in report] == ["shardload"]


def test_a_backbone_of_the_caller(preset):
    own = keras_hub.models.Backbone.from_preset(preset)
    report = compare(lambda: keras_hub.models.TextClassifier.from_preset(preset, backbone=own, num_classes=2))
    assert [call.by for call in report] == ["shardload"]


@pytest.mark.parametrize("source", ["nowhere", "gemma_99b_en", 3])
def test_what_is_no_preset_raises_as_in_keras_hub(source):
    compare(lambda: keras_hub.models.CausalLM.from_preset(source))


def test_a_wrong_class_raises_as_in_keras_hub(preset):
    compare(lambda: keras_hub.models.GemmaBackbone.from_preset(preset))
    compare(lambda: keras_hub.models.CausalLM.from_preset(preset))


def test_a_tokenizer_has_no_weights(preset):
    report = compare(lambda: keras_hub.models.BertTokenizer.from_preset(preset))
    assert [call.why for call in report] == ["it has no weights"]


@pytest.fixture
def generating(tmp_path, monkeypatch):
    """A preset that takes text."""
    path = gguf_with_tokenizer(tmp_path, monkeypatch, "gemma2", add_pieces, vocab_size=320)
    shardload.load(path).save_to_preset(str(tmp_path / "preset"))
    return str(tmp_path / "preset")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # KerasHub leaves vocabularies open
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_preprocessor_and_what_it_generates(generating):
    made = []

    def load():
        made.append(keras_hub.models.CausalLM.from_preset(generating))
        return made[-1]

    report = compare(load)
    assert [call.by for call in report] == ["shardload"]
    assert {type(model.preprocessor) for model in made} == {keras_hub.models.GemmaCausalLMPreprocessor}
    outside, inside = (model.generate("the quick brown fox", max_length=12) for model in made)
    assert inside == outside and len(inside) > len("the quick brown fox")
    assert shardload.generate(made[1], "the quick brown fox", max_new_tokens=3)


def test_a_handle_of_the_hugging_face_hub(folder_of, tmp_path, monkeypatch):
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(folder_of(hub_folders, "gemma2"), cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = compare(lambda: keras_hub.models.Backbone.from_preset("hf://someone/tiny"))
    assert [call.why for call in report] == [None]
    assert str(report.calls[0]).startswith("GemmaBackbone.from_preset('hf://someone/tiny'): shardload, ")


def test_a_handle_of_kaggle(preset, monkeypatch):
    def download(handle, path):
        if not (found := Path(preset) / path).exists():
            raise ValueError(f"{path} is not present in the model files")
        return str(found)

    monkeypatch.setattr("kagglehub.model_download", download)
    report = compare(lambda: keras_hub.models.TextClassifier.from_preset("kaggle://someone/bert/keras/tiny"))
    assert [call.why for call in report] == [None]


@pytest.mark.slow
def test_keras_hub_may_be_imported_inside(preset):
    code = f"""
import sys
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # not needed, and slow to import
import shardload
with shardload.fast() as report:
    import keras_hub
    keras_hub.models.TextClassifier.from_preset({preset!r})
keras_hub.models.TextClassifier.from_preset({preset!r})
print([call.by for call in report])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['shardload']", done.stderr


SLOW_AND_LIKE_OTHERS = {"blip-2 t5", "swin"}
"""Their backbones take longest; their tasks are what `BY_KERAS` has, and a classifier like those of ViT and DeiT."""


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(*p.values, id=p.id, marks=[pytest.mark.full] if p.id in SLOW_AND_LIKE_OTHERS else [])
        for p in FAMILIES
    ],
)
def test_every_task_of_a_family(module, name, folder_of, monkeypatch):
    if name == "gemma3n":
        hub_nested.shrink_mobilenet(monkeypatch)
    path = folder_of(module, name)
    with shardload.abstract():
        backbone = type(keras_hub.models.Backbone.from_preset(path, load_weights=False))
    for cls in tasks_of(backbone):
        report = compare(lambda: cls.from_preset(path, preprocessor=None, dtype="bfloat16"))  # noqa: B023  # called here
        unable = name in BY_KERAS or cls is keras_hub.models.Gemma3nCausalLM  # needs the values of its embedding
        assert all(call.by == "shardload" or call.error or unable for call in report), str(report)


# ---- several processes ---------------------------------------------------------------------------


@pytest.mark.slow
def test_each_process_gets_what_keras_would_give_it(tmp_path):
    path = hub_folders.write(tmp_path / "hf", "gemma2", hub_folders.build(tmp_path / "hf", "gemma2"))
    told = told_by(2, 2, "1x4", "inside,outside", path, module="fast_child")  # inside first: in a fresh process
    inside, outside = ([one[where]["digest"] for one in told] for where in ("inside", "outside"))
    assert inside == outside and inside[0] != inside[1]
    assert [one["inside"]["why"] for one in told] == [[None], [None]]
