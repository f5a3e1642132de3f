"""What code decides rests on kinds and fields of notes and errors: their words may change at any time."""

import ast
import json
from pathlib import Path

import hub_folders
import keras
import numpy as np
import pytest
from callback_models import compiled, fit
from safetensors.numpy import load_file, save_file

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import DoesNotFitError, MismatchError, ShardloadError
from shardload.parallel import search_compiled
from shardload.reports.facts import Note, NoteKind, of_kind
from shardload.sharding.mesh import MeshSpec

PACKAGE = Path(__file__).parents[2] / "shardload"
OF_OTHERS = {
    "accelerating/__init__.py": "any error of the user's code, shortened",
    "runs/writer.py": "an error is not told twice",
    "console/failures.py": "XLA has one class for all its errors; an error is not told twice",
    "processes/heartbeats.py": "the first line of an error of JAX",
    "processes/joint_call.py": "an error is not told twice",
    "processes/__init__.py": "JAX has one class for all errors of its service",
    "processes/parcels.py": "JAX has one class for all errors of its service",
    "hub/building.py": "Keras wraps errors of constructors",
    "loaders/hdf5/datasets.py": "h5py raises OSError for everything",
    "resolve/hubs.py": "kagglehub raises one class for files that a model lacks",
    "sharding/devices.py": "JAX adds hints for its developers to its errors",
    "loaders/orbax/saving.py": "a log record of Orbax",
    "stores/answers.py": "obstore has one class for most failures of HTTP",
}
"""Modules that look into the text of other libraries' errors, which offer nothing else, and why."""
ASKED = {"endswith", "find", "index", "partition", "removeprefix", "removesuffix", "rpartition", "split", "startswith"}


def is_text(node: ast.AST) -> bool:
    """Whether an expression is the text of an error, or a note."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return isinstance(node.args[0], ast.Name) and node.args[0].id in ("error", "e", "own", "gone", "cause")
    return isinstance(node, ast.Name) and node.id in ("note", "message")


def is_plain(node: ast.Compare) -> bool:
    """Whether it asks whether there is a note at all, or whether a list has it already."""
    [other, *_] = node.comparators
    return isinstance(node.ops[0], ast.Is | ast.IsNot) or (isinstance(other, ast.Attribute) and other.attr == "notes")


def asks(path: Path) -> list[int]:
    """Return the lines that take a decision from such a text."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKED:
            found += [node.lineno] if is_text(node.func.value) else []
        if isinstance(node, ast.Compare) and not is_plain(node):
            found += [node.lineno] if any(map(is_text, [node.left, *node.comparators])) else []
    return found


def test_no_decision_is_taken_from_words():
    found = {path.relative_to(PACKAGE).as_posix(): asks(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines and name not in OF_OTHERS} == {}
    assert [name for name in OF_OTHERS if not found[name]] == []


@pytest.fixture
def noise(monkeypatch):
    """Let no error and no note with a kind have the words that it was given."""

    def made(cls, text, kind):
        del text
        note = str.__new__(cls, f"~{kind.name}~")
        note.kind = kind
        return note

    monkeypatch.setattr(Note, "__new__", made)
    monkeypatch.setattr(ShardloadError, "__str__", lambda error: "~")


def adam(**named):
    return compiled(optimizer=keras.optimizers.Adam(0.01, **named))


def resumed(model, folder, **named):
    fit(model, OrbaxCheckpoint(folder, resume=True), epochs=2, **named)


def test_a_resumed_fit_says_what_it_did(tmp_path, noise, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path / "weights", save_weights_only=True))
    with pytest.warns(UserWarning, match="~OPTIMIZER_UNCHANGED~"):
        resumed(compiled(), tmp_path / "weights")
    fit(adam(use_ema=True), OrbaxCheckpoint(tmp_path / "averages"))
    resumed(adam(use_ema=True), tmp_path / "averages")
    assert "Resumed step 4: ~AVERAGES~" in capsys.readouterr().out
    fit(adam(gradient_accumulation_steps=2), OrbaxCheckpoint(tmp_path / "batches"))
    resumed(adam(gradient_accumulation_steps=4), tmp_path / "batches")
    assert "Resumed step 4: ~BATCHES_RECOUNTED~" in capsys.readouterr().out


def test_a_step_that_does_not_fit_names_ways_out_that_fit_has(tmp_path, noise):
    fit(compiled(), OrbaxCheckpoint(tmp_path))
    with pytest.raises(MismatchError) as caught:
        resumed(compiled(optimizer="sgd"), tmp_path)
    assert "before fit, and pass resume=False" in caught.value.args[0]


def folder_of(path, family):
    path.mkdir()
    return hub_folders.write(path, family, hub_folders.build(path, family), unwanted=False)


def test_what_a_source_lacks_is_told_once(tmp_path, noise):
    folder = folder_of(tmp_path / "hf", "bert")
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: value for name, value in load_file(weights).items() if "pooler" not in name}, weights)
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["BertForMaskedLM"]}))
    notes = shardload.report(shardload.load(folder, mesh="1x2")).notes
    assert not of_kind(notes, NoteKind.TENSOR_NOT_STORED) and any("has no pooler" in note for note in notes)


def test_values_that_a_converter_computes_with_are_lent(tmp_path, noise):
    folder = folder_of(tmp_path / "hf", "dinov2")
    shardload.convert(folder, tmp_path / "out", to="orbax")
    one, two = (shardload.load(source, mesh="1x1") for source in (folder, tmp_path / "out"))
    for before, after in zip(one.weights, two.weights, strict=True):
        assert np.array_equal(np.asarray(before), np.asarray(after)), before.path


def test_a_search_that_compiles_does_not_advise_to_compile(noise):
    with pytest.raises(DoesNotFitError) as caught:
        search_compiled(compiled(), MeshSpec(("data",), (2,)), device_memory_bytes=128, batch=8)
    assert "too large" in caught.value.args[0] and "search_compiled (" not in caught.value.args[0]
