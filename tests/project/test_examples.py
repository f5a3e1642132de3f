"""Each example runs as a user runs it, in a process of its own, and shows what it is about."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import gguf_pairs
import pytest
import small_folders
import warm_start
from gguf_tokenizers import add_pieces, gguf_with_tokenizer

import shardload
from shardload.runs.listing import list_steps
from shardload.synth import synth

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "how-to" / "examples.md").read_text()
RUN = """
import runpy, sys
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # not needed, and slow to import
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WARNINGS = ("-W", "error::UserWarning")


def start(name, *arguments, cwd):
    command = [sys.executable, *WARNINGS, "-c", RUN, str(ROOT / "examples" / name), *arguments]
    # The real Gemma computes longer than XLA compiles: there the flags of the other tests cost more than they save.
    left_out = {"KERAS_BACKEND", "XLA_FLAGS"} if "gemma3_270m" in arguments else {"KERAS_BACKEND"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=cwd, env=environment)


def run(name, *arguments, cwd):
    return said_by(start(name, *arguments, cwd=cwd))


def run_again(name, *arguments, cwd):
    """As `run`, where the same test has shown already that it starts as a process of its own."""
    if "gemma3_270m" in arguments:
        return run(name, *arguments, cwd=cwd)
    code = f"import warnings; warnings.simplefilter('error', UserWarning)\n{RUN}"
    return said_by(warm_start.start(["-c", code, ROOT / "examples" / name, *arguments], cwd=cwd))


def said_by(child):
    said, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    return said


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_linked(path):
    text = path.read_text()
    most = 120 if "\nclass " in text else 40  # a model of one's own takes 60 lines
    assert len(text.splitlines()) <= most and f"examples/{path.name})" in PAGE


@pytest.mark.slow
def test_load_and_generate(tmp_path):
    said = run("load_and_generate.py", "gemma3_270m", "The capital of France is", cwd=tmp_path)
    assert "batch=1,model=8 (8 cpu devices)" in said
    assert said.splitlines()[-1].startswith("The capital of France is the capital of the country of France.")


@pytest.mark.slow
def test_load_into_own_model(tmp_path):
    said = run("load_into_own_model.py", cwd=tmp_path)
    assert "146.0 KiB read, each needed byte once" in said and "spec=P(None, 'model')" in said


@pytest.mark.slow
def test_save_and_resume(tmp_path):
    first = run("save_and_resume.py", "run", "1", cwd=tmp_path).splitlines()
    second = run_again("save_and_resume.py", "run", "2", cwd=tmp_path).splitlines()
    assert second[0] == "Epoch 1/2" and second[2] == "Epoch 2/2"
    assert first[0].rpartition("loss")[2] == second[1].rpartition("loss")[2]  # batches 7 and 8 of the same epoch
    assert {path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()} == {"12", "15"}


@pytest.mark.slow
def test_restore_on_new_mesh(tmp_path):
    assert run("restore_on_new_mesh.py", "run", cwd=tmp_path) in PAGE
    assert shardload.inspect(tmp_path / "run").format == "orbax"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A checkpoint root where the name of the real Gemma 3 stands for its architecture with two small layers."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        file = gguf_with_tokenizer(folder, patch, "gemma3_text", add_pieces, vocab_size=1024)
    file.rename(folder / "gemma3_270m.gguf")
    return folder


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.full)])
def gemma3(request, monkeypatch):
    """A quantised Gemma 3: its name or path, the number of its layers, and of its tokens."""
    if request.param == "real":
        return "gemma3_270m", 18, 262144
    home = request.getfixturevalue("home")
    monkeypatch.setenv("SHARDLOAD_HOME", str(home))
    return str(home / "gemma3_270m.gguf"), gguf_pairs.LAYERS, 1024


@pytest.mark.slow
def test_lora_from_gguf_to_safetensors(gemma3, tmp_path):
    source, layers, _ = gemma3
    first = run("lora_from_gguf_to_safetensors.py", source, "run", "out", "2", cwd=tmp_path)
    second = run_again("lora_from_gguf_to_safetensors.py", source, "run", "out", "3", cwd=tmp_path)
    assert "Epoch 2/2" in first and second.startswith("Epoch 3/3")
    assert f"LoRA was merged into {2 * layers} kernels" in second
    [step] = list_steps(tmp_path / "run")
    assert (step.step, step.recorded.left_out) == (3, 13 * layers + 2) and step.n_bytes < 5 << 20
    command = ["convert", "run/3", "merged", "--to", "safetensors", "--merge-lora", "--base", source]
    for arguments in (command, ["diff", "out", "merged"]):
        warm_start.run(["-m", "shardload", *arguments], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_own_loop(tmp_path):
    parts = [
        run("own_loop.py", "run", "1x8", "2", cwd=tmp_path),
        run_again("own_loop.py", "run", "2x4", "4", cwd=tmp_path),
    ]
    whole = run_again("own_loop.py", "whole", "1x8", "4", cwd=tmp_path)
    losses = [[line.partition(",")[0] for line in said.splitlines()] for said in ("".join(parts), whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert parts[1].count("Mesh('batch': 2, 'model': 4") == 2


@pytest.mark.slow
def test_plain_jax(tmp_path):
    said = run("plain_jax.py", "gemma3_270m", cwd=tmp_path).splitlines()
    assert said == ["236 arrays, 511 MiB", "bfloat16 (262144, 640) P('model', None)", "(2, 640)"]


@pytest.mark.slow
def test_plain_jax_loads_a_llama_of_hugging_face(tmp_path):
    folder = synth("llama3.2_1b", format="safetensors", scale=0.02, directory=tmp_path)
    said = run("plain_jax.py", folder, cwd=tmp_path).splitlines()
    shape = json.loads((folder / "config.json").read_text())
    assert said[0].startswith(f"{2 + 9 * shape['num_hidden_layers']} arrays, ")
    assert said[1] == f"bfloat16 ({shape['vocab_size']}, {shape['hidden_size']}) P('model', None)"


@pytest.mark.slow
def test_stacked_layers(tmp_path):
    folder = synth("llama3.2_1b", format="safetensors", scale=0.02, directory=tmp_path / "in")
    said = run("stacked_layers.py", folder, "out", cwd=tmp_path).splitlines()
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert len(said) == 10 and said[-1].startswith(f"{8 * layers} tensors, ")
    assert len(shardload.inspect(tmp_path / "out").tensors) == 8 * layers


@pytest.mark.slow
def test_flax_nnx(gemma3, tmp_path):
    source, layers, vocabulary = gemma3
    prompt = [2, 818, 5279, 529, 7001, 563] if layers == 18 else [2, 5, 9]
    said = run("flax_nnx.py", source, "own.safetensors", *map(str, prompt), cwd=tmp_path).splitlines()
    ids = json.loads(said[0])
    assert len(ids) == 14 and ids[: len(prompt)] == prompt and max(ids) < vocabulary
    if layers == 18:
        assert ids[6:] == [506, 5279, 529, 506, 2891, 529, 7001, 236761]  # " the capital of the country of France."
    assert said[1:] == [f"{13 * layers + 2} tensors, P(None, 'model')"]
    assert len(shardload.inspect(tmp_path / "own.safetensors").tensors) == 13 * layers + 2


@pytest.mark.slow
def test_flax_linen(tmp_path):
    options = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "num_key_value_heads": 4}
    folder = small_folders.write(tmp_path / "llama", "llama", **options)
    said = run("flax_linen.py", str(folder), "trained", cwd=tmp_path).splitlines()
    assert said[0] == "P(None, None, 'model', None)" and losses_fall(said[1])
    assert_the_same_tensors(folder, tmp_path / "trained")


@pytest.mark.slow
def test_equinox_modules(tmp_path):
    folder = synth("gpt2_base", format="safetensors", scale=0.02, directory=tmp_path)
    said = run("equinox_modules.py", str(folder), "trained", cwd=tmp_path).splitlines()
    assert said[0] == "P('model',) P()" and losses_fall(said[1])  # nothing divides 1,009 tokens
    assert_the_same_tensors(folder, tmp_path / "trained")


def losses_fall(line):
    before, after = map(float, re.fullmatch(r"loss ([\d.]+), then ([\d.]+)", line).groups())
    return after < before


def assert_the_same_tensors(folder, saved):
    given, found = (shardload.inspect(path).tensors for path in (folder, saved))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in given.items()}


@pytest.mark.slow
def test_plan_and_lay_out(tmp_path):
    said = run("plan_and_lay_out.py", cwd=tmp_path)
    assert "Smallest mesh that fits: 1x4" in said
    assert said.splitlines()[-1] == "1x4: P('model', None)"


@pytest.mark.slow
def test_model_parallel(gemma3, tmp_path):
    said = run("model_parallel.py", gemma3[0], cwd=tmp_path).splitlines()
    assert said[0].split(None, 1) == ["token_embedding/embeddings", "P('model', None)"]
    assert said[-1].startswith("loss ") and said[-1].endswith("on 4 examples per row of the mesh")


def test_two_processes_without_arguments(tmp_path):
    child = start("two_processes.py", cwd=tmp_path)
    said, complaint = child.communicate()
    assert (said, child.returncode) == ("", 1) and complaint.startswith("usage: two_processes.py PROCESS FOLDER")


@pytest.mark.slow
def test_two_processes(gemma3, tmp_path):
    children = [start("two_processes.py", str(i), "run", cwd=tmp_path) for i in range(2)]
    said = [said_by(child) for child in children]
    n = gemma3[2]
    for i, rows in enumerate((f"rows 0 to {n // 2}", f"rows {n // 2} to {n}")):
        assert f"process {i} read " in said[i] and f"MiB, and has {rows} of {n}" in said[i]
        assert f"process {i} restored step 1" in said[i]
    assert shardload.inspect(tmp_path / "run").format == "orbax"
