"""The Python of README and docs, run: the blocks of a page one after the other, as a reader would type them.

All pages share this process and its eight devices; each has a folder of its own. There, small synthetic checkpoints
have the names of the large ones, and what else a page needs is made before its first block runs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grain
import jax
import keras
import numpy as np
import peft_folders
import pytest
from bucket_server import bucket
from page_outputs import NUMBERS, UNSTABLE, run_page
from safetensors.numpy import save_file

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.keras_bridge.lora import lora_layers
from shardload.runs.listing import list_steps
from shardload.synth import synth

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if BLOCK.search(page.read_text())
}
TESTED_ELSEWHERE = {
    "docs/how-to/add-a-family.md": "tests/project/test_add_a_family.py",
    "docs/how-to/keras-with-flax-nnx.md": "tests/keras_bridge/test_nnx.py",
    "docs/how-to/load-plain-orbax.md": "tests/restoring/test_howto_plain_orbax.py",
}
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
"""Set before the first test; JAX takes it once."""

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras, at the end of Grain data


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A KerasHub preset and a Hugging Face folder of one tiny Gemma 2."""
    root = tmp_path_factory.mktemp("gemma")
    kinds = ("preset", "safetensors")
    return {kind: Path(synth("gemma2_2b", format=kind, scale=0.02, directory=root / kind)) for kind in kinds}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page, names=None, *, replace=(), unstable=None):
    """Run the blocks of a page; ``replace`` is what would take a network or too long in a test.

    With ``unstable``, what they print must be what the page shows.
    """
    text, names = PAGES[page], {} if names is None else names
    for old, new in replace:
        assert old in text
        text = text.replace(old, new)
    return run_page(page, text.replace(DEVICES, ""), names, unstable=unstable)


def build_model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model


def numbers():
    x = np.random.default_rng(0).random((256, 64), "float32")
    return x, x[:, :8]


def test_every_page_with_python_runs():
    assert set(re.findall(r'\brun\(\s*"([^"]+)"', Path(__file__).read_text())) | TESTED_ELSEWHERE.keys() == PAGES.keys()
    assert all((ROOT / test).exists() for test in TESTED_ELSEWHERE.values())


def test_tensor_parallel(here, capsys):
    names = run("docs/how-to/tensor-parallel.md")
    assert {len(v.value.sharding.device_set) for v in names["model"].variables} == {8}
    assert "(-, model) column" in capsys.readouterr().out


def test_check_a_layout(here):
    names = run("docs/how-to/check-a-layout.md")
    assert names["step"].collective_bytes > names["forward"].collective_bytes
    assert names["trained"].variables == 3 * 4 + 2


def test_search_layouts(here, capsys):
    run("docs/how-to/search-layouts.md")
    assert "all-reduces over model" in capsys.readouterr().out


@pytest.mark.slow
def test_fit_training_into_memory(here, capsys):
    run("docs/how-to/fit-training-into-memory.md")
    assert "The least found is" in capsys.readouterr().out


def test_collectives(here):
    names = run("docs/how-to/collectives.md")
    assert names["parts"].sharding.spec == names["x"].sharding.spec


def test_optimizer_state(here, capsys):
    names = run("docs/how-to/optimizer-state.md")
    printed, said = capsys.readouterr().out, PAGES["docs/how-to/optimizer-state.md"]
    assert re.sub(r"^adam(_\d+)?", "# adam", printed) in said
    assert names["report"].not_spread == ()


@pytest.mark.slow
def test_readme(gemma, here):
    for name in ("gemma3_270m", "gemma2_9b"):
        shutil.copytree(gemma["preset"], here / name)
    shardload.load("gemma3_270m").save_weights("finetuned.weights.h5")
    build_model().save_weights("model.weights.h5")
    x, y = numbers()
    data = grain.MapDataset.source(list(zip(x, y, strict=True))).batch(25)  # ten batches: 100 in ten epochs
    names = {"build_my_model": build_model, "grain_dataset": data}
    found = run("README.md", names, replace=[('("./gemma2_9b")', '("./gemma2_9b", preprocessor=None)')])
    assert found["plan"].devices[-1].id == 31 and found["report"].missing == ()
    assert "step 100" in shardload.report(found["model"]).notes[0]


def test_index(gemma, here, capsys):
    shutil.copytree(gemma["preset"], here / "gemma3_270m")
    run("docs/index.md")
    assert "batch=1,model=8 (8 cpu devices)" in capsys.readouterr().out


def test_load_into_jax(gemma, here):
    shutil.copytree(gemma["safetensors"], here / "gemma2-hf")
    found = run("docs/how-to/load-into-jax.md")
    assert {len(array.sharding.device_set) for array in found["params"].values()} == {8}


SIZES = [('"vocab": 256000', '"vocab": 5120'), ('"head": 256', '"head": 8'), ("(9216, 9216)", "(184, 184)")]
"""Of the tiny Gemma 2 instead of Gemma 2 2B."""


def test_stack_layers(gemma, here, capsys):
    shutil.copytree(gemma["safetensors"], here / "gemma2-hf")
    found = run("docs/how-to/stack-layers.md", replace=SIZES)
    for a, b in zip(*map(jax.tree.leaves, (found["params"], found["again"])), strict=True):
        assert a.sharding == b.sharding and (a == b).all()


def test_load_in_a_notebook(gemma, here):
    model = shardload.load(gemma["preset"])
    run("docs/how-to/load-in-a-notebook.md", {"model": model, "shardload": shardload})
    assert (here / "load.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_existing_programs(gemma, here, capsys):
    shutil.copytree(gemma["preset"], here / "gemma2")
    try:
        found = run("docs/how-to/existing-programs.md", unstable=NUMBERS)
    finally:
        keras.distribution.set_distribution(None)
    assert {call.by for call in found["report"]} == {"shardload"}
    shardings = [v.value.sharding for v in found["backbone"].weights]
    assert {len(s.device_set) for s in shardings} == {8} and any(s.spec[:1] == ("model",) for s in shardings)
    assert "CausalLM.load_weights('tuned.weights.h5'): shardload, " in capsys.readouterr().out


def test_quantise_while_loading(gemma, here):
    shutil.copytree(gemma["preset"], here / "gemma3_270m")
    found = run("docs/how-to/quantise-while-loading.md")
    assert str(found["kernel"].dtype) == "int8"


@pytest.mark.slow
def test_generate_text(gemma, here, capsys):
    shutil.copytree(gemma["preset"], here / "gemma3_270m")
    found = run("docs/how-to/generate-text.md")
    assert found["ids"] == found["tokenizer"].encode("The capital of France is")
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_fine_tune_from_kerashub(here, capsys):
    Path(synth("gemma3_270m", format="preset", scale=0.02, directory=here / "made")).rename("gemma3_270m_preset")
    tokens = np.ones((8, 16), "int32")
    text = [  # a synthetic preset has no preprocessor
        ("gemma.preprocessor.sequence_length = 16\nloss", "loss"),
        ("gemma.fit(data", 'gemma.fit({"token_ids": tokens, "padding_mask": tokens}, tokens'),
        ('print(gemma.generate(["The capital of Atlantis is"] * 2, max_length=16))\n```\n\n## What', "```\n\n## What"),
    ]
    try:
        found = run("docs/how-to/fine-tune-from-kerashub.md", {"tokens": tokens}, replace=text)
    finally:
        keras.distribution.set_distribution(None)
    assert [call.by for call in found["calls"]] == ["shardload"]
    assert "Epoch 2/2" in capsys.readouterr().out and list_steps("run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
def test_fine_tune_with_lora(gemma, here, capsys):
    shutil.copytree(gemma["preset"], here / "gemma3_270m")
    export = 'shardload.load("tuned", mesh="1x8")'  # without text: a synthetic tokenizer has no form for Hugging Face
    generate = f'shardload.generate({export}, "The capital of Atlantis is", max_new_tokens=5)'
    found = run("docs/how-to/fine-tune-with-lora.md", replace=[(generate, export)])
    assert found["report"].notes[1].startswith("the step is partial: ")
    adapters = [[v for v in found[name].get_weights() if 4 in v.shape] for name in ("model", "again")]
    assert all(np.array_equal(a, b) for a, b in zip(*adapters, strict=True))
    assert "Epoch 4/4" in capsys.readouterr().out and Path("tuned/config.json").exists()


def test_use_peft_adapters(gemma, here):
    shutil.copytree(gemma["safetensors"], here / "gemma-2-2b")
    for name, modules in (("my-lora", ("o_proj", "up_proj")), ("style", ("v_proj",)), ("facts", ("down_proj",))):
        peft_folders.write(here / name, here / "gemma-2-2b", modules)
    found = run("docs/how-to/use-peft-adapters.md")
    assert lora_layers(found["model"])


@pytest.mark.slow
def test_first_model_tutorial(gemma, here, capsys):
    shutil.copytree(gemma["preset"], here / "gemma3_270m")
    found = run("docs/tutorials/load-your-first-model.md")
    said = capsys.readouterr().out
    assert "batch=1,model=8 (8 planned devices)" in said and "batch=1,model=8 (8 cpu devices)" in said
    assert "token_embedding/embeddings (" in said and "P('model', None)\n" in said
    assert "4 () ()\nP(None, 'model')\nbatch=2,model=4\n(1280, 48)\n" in said
    loaded, again = (found[name].get_weights() for name in ("model", "again"))
    assert all(np.array_equal(a, b) for a, b in zip(loaded, again, strict=True))
    assert Path("own.keras").exists()


@pytest.mark.slow
def test_first_model_tutorial_prints_what_it_shows(here):
    """Of the real model, in a process of its own: what it generates depends on how XLA compiles."""
    command = [sys.executable, "-m", "page_outputs", ROOT / "docs/tutorials/load-your-first-model.md"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tutorial(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "1x8", "run"])
    shorter = [("save_freq=50", "save_freq=5"), ("steps_per_epoch=100", "steps_per_epoch=10")]
    for epochs in (2, 3):
        run("docs/tutorials/train-kill-resume.md", replace=[*shorter, ("epochs=20", f"epochs={epochs}")])
    said = capsys.readouterr().out
    assert said.count("Epoch 2/") == 1 and said.count("Epoch 3/3") == 1
    layers = [keras.layers.Dense(512, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("adam", "mse")
    assert shardload.restore(model, "run").notes[0].startswith("step 30")


@pytest.mark.slow
def test_planning_tutorial(here, capsys):
    smaller = [("(512, 1)", "(64, 1)"), ("epochs=3", "epochs=1")]
    found = run("docs/tutorials/plan-a-training-run.md", replace=smaller, unstable=UNSTABLE)
    said = capsys.readouterr().out
    assert "per device: 76.3 MiB\n" in said and "per device: 71.8 MiB of 72.0 MiB (100 %)" in said
    assert (
        "The least found is 69.3 MiB: 7.1 MiB of weights" in said and "{} ('model',) 44 MiB\nbatch=4,model=2\n" in said
    )
    # Over two devices, the sum of a gradient is twice what is scattered.
    scattered = sum(e.nbytes for e in found["plan"].exchanges if e.kind == "reduce-scatter")
    assert found["compiled"].collective_bytes == found["plan"].exchanged_bytes + scattered
    assert found["compiled"].total_bytes == pytest.approx(found["plan"].device.total, rel=0.12)
    assert Path("plan.svg").read_text().startswith("<svg")
    assert len(found["history"].history["loss"]) == 1


@pytest.fixture
def training(here):
    """What the pages on steps use, with the folder of a run that has trained for an epoch."""
    x, y = numbers()
    names = {"model": build_model(), "build_model": build_model, "x": x, "y": y, "root": str(here / "run")}
    build_model().fit(x, y, verbose=0, callbacks=[OrbaxCheckpoint(here / "run")])
    return names


@pytest.mark.slow
def test_save_and_restore(here):
    x, y = numbers()
    found = run("docs/how-to/save-and-restore.md", {"model": build_model(), "build_model": build_model, "x": x, "y": y})
    assert found["report"].notes and shardload.inspect(found["weights"]).format == "orbax"


def test_checkpoint_your_own_loop(here):
    assert run("docs/how-to/checkpoint-your-own-loop.md")["last"] is None
    assert run("docs/how-to/checkpoint-your-own-loop.md")["last"].step == 3


def test_restore_into_another_model(training, capsys):
    found = run("docs/how-to/restore-into-another-model.md", training)
    assert found["report"].missing and "the moving averages (use_ema)" in capsys.readouterr().out


def test_damaged_steps(training):
    assert run("docs/how-to/damaged-steps-and-failed-saves.md", training)["report"].notes


@pytest.mark.filterwarnings("ignore:Step .* without a data position")
def test_resume_with_the_next_batch(training):
    assert run("docs/how-to/resume-with-the-next-batch.md", training)["position"].at == 8


def test_follow_a_trainer(here, capsys):
    x, y = numbers()
    build_model().fit(x, y, verbose=0, callbacks=[OrbaxCheckpoint("run")])
    serving = iter([True, True, False] * 2)
    names = {"model": build_model(), "is_serving": lambda: next(serving), "next_batch": lambda: x[:8]}
    found = run("docs/how-to/follow-a-trainer.md", names)
    assert found["step"] == 8 and "weights of step 8, " in capsys.readouterr().out


def test_migrate(here):
    x, y = numbers()
    model = build_model()
    best = OrbaxCheckpoint("best", monitor="val_loss", save_best_only=True)
    model.fit(x, y, validation_split=0.25, verbose=0, callbacks=[best])
    found = run("docs/how-to/migrate-from-keras-callbacks.md", {"model": model, "shardload": shardload})
    assert found["callback"].save_weights_only


def test_errors(here, capsys):
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save_weights("model.weights.h5")
    run("docs/reference/api/errors.md", {"model": build_model(), "shardload": shardload})
    assert "model is unchanged" in capsys.readouterr().out


def test_read_from_object_stores():
    assert callable(run("docs/how-to/read-from-object-stores.md")["read"])
    assert callable(run("docs/how-to/cache-remote-checkpoints.md")["start"])


class _Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // 32

    def __getitem__(self, index):
        return self.x[index * 32 : index * 32 + 32], self.y[index * 32 : index * 32 + 32]


def test_save_to_object_stores(here, monkeypatch):
    (here / "bucket").mkdir()
    with bucket(here / "bucket", monkeypatch) as server:
        train = run("docs/how-to/save-to-object-stores.md")["train"]
        model, (x, y) = build_model(), numbers()
        train(model, _Batches(x, y), lambda model, saver: saver.save(1000, model, metrics={"loss": 1.0}))
        assert [info.step for info in list_steps(f"{server.s3}/final")] == [1]


def test_convert(gemma, here):
    shutil.copytree(gemma["safetensors"], here / "gemma2-hf")
    assert run("docs/how-to/convert-checkpoints.md")["report"].tensors > 0


def test_save_a_trained_model(gemma, here):
    shutil.copytree(gemma["safetensors"], here / "gemma2-hf")
    run("docs/how-to/save-a-trained-model.md")
    assert (here / "tuned-hf" / "config.json").exists() and (here / "tuned-preset").is_dir()


def test_layout_rules(gemma, here, capsys):
    shutil.copytree(gemma["preset"], here / "gemma2_2b")
    page = PAGES["docs/how-to/layout-rules.md"]
    (here / "rules.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    run("docs/how-to/layout-rules.md", replace=[('"gemma2_2b_en"', '"./gemma2_2b"')])
    assert "decoder_block_0/attention/query/kernel (8," in capsys.readouterr().out


def test_several_processes():
    assert callable(run("docs/reference/several-processes.md")["serve"])
    assert callable(run("docs/how-to/start-several-processes.md")["serve"])
    assert callable(run("docs/how-to/resume-several-processes.md")["train"])


def test_second_order_optimizer(here):
    assert run("docs/how-to/second-order-optimizer.md")["model"].optimizer.counts().steps == 8


def test_faq(gemma, here):
    shutil.copytree(gemma["safetensors"], here / "gemma2-hf")
    save_file({"embedding": np.ones((4, 8), np.float32), "other": np.ones(3)}, here / "model.safetensors")
    names = run("docs/explanation/faq.md")
    assert names["arrays"].keys() == {"embedding"}
    assert type(names["backbone"]).__name__ == "GemmaBackbone" and names["report"].bytes.needed > 0
