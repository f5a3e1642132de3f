"""The registry of formats: one module adds a format to every function and to the command."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import keras
import npz_format
import numpy as np
import pytest
import raw_format
from cli_fakes import shardload as command
from saving_models import Counting

import shardload
from shardload.errors import SourceError, UnsupportedError, UsageError
from shardload.loaders import FormatSpec, open_manifest, recognise, register, registry
from shardload.loaders.gguf import loader as gguf
from shardload.verifying import verify

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "docs" / "reference" / "formats.md"


@pytest.fixture
def npz():
    """The toy format, known until the end of the test."""
    register(npz_format.SPEC)
    yield
    registry.unregister(npz_format.SPEC.name)


@pytest.fixture
def installed(tmp_path):
    """What puts a package on the path of another process that announces a format at some place; to pass as ``env``."""

    def announce(value: str, name: str = "npz") -> dict[str, str]:
        folder = tmp_path / "site" / "npz_format-1.0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: npz-format\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {value}\n")
        return {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(folder.parent)]), "KERAS_BACKEND": "jax"}

    return announce


def model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, name="one")(inputs)
    built = keras.Model(inputs, keras.layers.Dense(2, name="two")(hidden))
    built.set_weights([np.random.default_rng(0).normal(size=v.shape).astype("float32") for v in built.weights])
    return built


@pytest.fixture
def saved(tmp_path):
    made = model()
    npz_format.save(made, path := tmp_path / "small.npz")
    return path, made


def same(one, other):
    return all(map(np.array_equal, one.get_weights(), other.get_weights()))


@pytest.mark.usefixtures("npz")
class TestAnotherFormat:
    def test_load(self, saved):
        assert same(shardload.load(saved[0], mesh="1x2"), saved[1])

    def test_load_weights(self, saved):
        path, made = saved
        filled = keras.models.clone_model(made)
        assert not same(filled, made)
        assert shardload.load_weights(filled, path).format == "npz"
        assert same(filled, made)

    def test_plan_reads_no_more_than_the_weights(self, saved):
        path, made = saved
        assert shardload.plan(path, mesh="1x2").bytes.needed == sum(4 * w.size for w in made.get_weights())

    def test_inspect(self, saved):
        path, made = saved
        manifest = shardload.inspect(path, format="npz")
        assert [(t.name, t.shape) for t in manifest.tensors.values()] == [(v.path, v.shape) for v in made.variables]

    def test_verify(self, saved):
        assert [(v.verdict, v.tensors) for v in verify(saved[0])] == [("readable", len(saved[1].variables))]

    @pytest.mark.parametrize(("target", "to"), [("copy.weights.h5", None), ("copy", "orbax")])
    def test_convert(self, saved, tmp_path, target, to):
        shardload.convert(saved[0], tmp_path / target, to=to)
        assert same(shardload.load(tmp_path / target), saved[1])

    def test_a_name_leaves_out_the_ending(self, saved, monkeypatch):
        monkeypatch.setenv("SHARDLOAD_HOME", str(saved[0].parent))
        assert shardload.inspect("small").source == str(saved[0])

    def test_a_folder_of_one(self, saved):
        assert open_manifest(saved[0].parent).source == str(saved[0])

    def test_an_ending_that_lies(self, saved):
        moved = saved[0].rename(saved[0].with_suffix(".gguf"))
        with pytest.raises(SourceError, match=r"ends like a \.gguf file, but its content is a NumPy archive"):
            open_manifest(moved)
        with pytest.raises(SourceError, match=r"should be a \.gguf file, but its content is a NumPy archive"):
            open_manifest(moved, format="gguf")
        assert open_manifest(moved, format="npz").format == "npz"

    def test_a_special_case_is_asked_first(self, saved, tmp_path):
        """Both are zip files."""
        saved[1].save(tmp_path / "small.keras")
        assert [recognise(tmp_path / "small.keras").name, recognise(saved[0]).name] == ["keras-archive", "npz"]

    def test_a_target_may_not_have_its_ending(self, saved, tmp_path):
        with pytest.raises(UsageError, match=r"Remove \.npz, or name it"):
            shardload.convert(saved[0], tmp_path / "copy.npz", to="orbax")

    def test_one_name_once(self):
        with pytest.raises(UsageError, match="'npz': the name is taken"):
            register(npz_format.SPEC)
        with pytest.raises(UsageError, match="'gguf': the name is taken"):
            register(FormatSpec(name="gguf", description="another"))

    @pytest.mark.parametrize("what", ["no model.json", "cut", "npy 2.0", "junk", "damaged header"])
    def test_damage_is_an_error_of_the_source(self, saved, what):
        path, raw = saved[0], saved[0].read_bytes()
        match what:
            case "no model.json":
                np.savez(path, one=np.zeros(3))
            case "cut":
                path.write_bytes(raw[:-30])
            case "npy 2.0":
                path.write_bytes(raw.replace(b"NUMPY\x01", b"NUMPY\x02"))
            case "junk":
                path.write_bytes(raw.replace(b"\x93NUMPY", b"\x93OTHER"))
            case "damaged header":
                path.write_bytes(raw.replace(b"'descr'", b"'other'"))
        with pytest.raises(SourceError, match=r"small\.npz"):
            open_manifest(path, format="npz")

    def test_it_is_missed_in_the_documentation(self):
        assert described() - documented() == {("npz", npz_format.SPEC.description, "`.npz`")}


@pytest.mark.slow
def test_the_command_knows_formats_that_packages_announce(saved, installed, tmp_path):
    env = installed("npz_format:SPEC")
    done = command("inspect", str(saved[0]), "--format", "npz", "--json", **env)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["format"] == "npz"
    assert re.search(r"orbax\|([\w-]+\|)*npz", re.sub(r"[\s│]", "", command("inspect", "--help", **env).stdout))
    saved[1].save(tmp_path / "m.keras")
    names = str(tmp_path / "m.keras"), str(tmp_path / "m.raw")
    assert command("convert", *names, "--to", "raw", **installed("raw_format:SPEC", name="raw")).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:SPEC", "importing no_such_module:SPEC failed: No module named 'no_such_module'"),
        ("npz_format:save", "expected its FormatSpec at npz_format:save"),
    ],
)
def test_a_package_that_announces_what_it_has_not_got(saved, installed, value, message):
    done = command("inspect", str(saved[0]), **installed(value))
    assert done.code == 1
    assert f"Cannot use the format 'npz': {message}" in done.error


def test_a_broken_package_does_not_disturb_the_prompt(installed):
    line = {"_SHARDLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "shardload load gem", "COMP_CWORD": "2"}
    done = command(**installed("no_such_module:SPEC"), **line)
    assert (done.code, done.stderr) == (0, "")


def test_a_package_does_not_replace_a_format(monkeypatch):
    point = EntryPoint("gguf", "npz_format:SPEC", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry.announced.cache_clear()
    try:
        assert registry.names() == tuple(registry.BUILT_IN)
        assert registry.spec_named("gguf") is gguf.SPEC
    finally:
        registry.announced.cache_clear()


def test_without_it_an_archive_with_a_model_is_no_archive_of_numpy(saved):
    with pytest.raises(SourceError, match=r"ends like an \.npz archive of NumPy, but its content is a \.keras archive"):
        open_manifest(saved[0])
    with pytest.raises(UnsupportedError, match="Unknown format 'npz'; supported formats: keras-h5"):
        open_manifest(saved[0], format="npz")


def test_each_spec_has_the_name_it_is_listed_by():
    assert tuple(spec.name for spec in registry.specs()) == registry.names()


def described():
    """Every format as a row of the documentation's list."""
    rows = set()
    for spec in registry.specs():
        shown = registry.spec_named(spec.variant_of) if spec.variant_of else spec
        endings = ", ".join(f"`{ending}`" for ending in shown.endings)
        rows.add((spec.name, spec.description, endings or "a folder"))
    return rows


def documented():
    return set(
        re.findall(r"^\| `([\w-]+)` \| ([^|]+?) \| ([^|]+?) \|", LISTED.read_text().partition("\n## ")[0], re.MULTILINE)
    )


def test_every_format_is_documented_and_no_other():
    assert described() == documented()


def named_formats():
    """Comparisons of something called ``format`` with a text, in the modules that are not loaders."""
    for path in (ROOT / "shardload").rglob("*.py"):
        parts = path.relative_to(ROOT / "shardload").parts
        if parts[0] in ("loaders", "synth"):  # `synth` writes three formats of its own
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Match):
                subjects = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
                if any(isinstance(one, ast.Attribute) and one.attr == "format" for one in subjects):
                    yield f"{path}:{node.lineno}"


def test_only_loaders_tell_formats_apart_by_name():
    """A capability of `FormatSpec` is what others ask for."""
    assert list(named_formats()) == []


class TestAFormatThatCanBeWritten:
    @pytest.fixture(autouse=True)
    def _raw(self):
        register(raw_format.SPEC)
        yield
        registry.unregister(raw_format.SPEC.name)

    @pytest.mark.parametrize("kind", ["functional", "sequential", "bfloat16"])
    def test_from_keras_and_back(self, tmp_path, kind):
        if kind == "sequential":
            made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
            made(np.zeros((1, 4), "float32"))
        else:
            made = model()
        made.save(tmp_path / "model.keras")
        dtype = "bfloat16" if kind == "bfloat16" else None
        assert shardload.convert(tmp_path / "model.keras", tmp_path / "model.raw", dtype=dtype).format == "raw"
        loaded = shardload.load(tmp_path / "model.raw", mesh="1x2")
        expected = [value.astype(str(v.dtype)) for v, value in zip(loaded.weights, made.get_weights(), strict=True)]
        assert all(map(np.array_equal, loaded.get_weights(), expected))
        shardload.convert(tmp_path / "model.raw", tmp_path / "again.weights.h5")
        assert same(shardload.load(tmp_path / "again.weights.h5"), loaded)

    def test_save_as(self, tmp_path):
        made = model()
        made.compile("adam")
        shardload.save_as(made, tmp_path / "model.raw")
        assert same(shardload.load(tmp_path / "model.raw"), made)
        assert "optimizer/vars/0" in shardload.inspect(tmp_path / "model.raw").tensors  # without it, Keras warns

    def test_what_convert_refuses(self, tmp_path):
        with pytest.raises(UsageError, match=r"Cannot write model with to='raw': name it model\.raw"):
            shardload.convert(tmp_path / "model.keras", tmp_path / "model", to="raw")
        with pytest.raises(UsageError, match=r"max_shard_bytes .* for model\.raw: it is one file"):
            shardload.convert(tmp_path / "model.keras", tmp_path / "model.raw", max_shard_bytes="1MiB")
        with pytest.raises(UnsupportedError, match=r"Cannot write a \.raw file: save_own_variables of Counting"):
            shardload.save_as(keras.Sequential([keras.Input((4,)), Counting()]), tmp_path / "model.raw")

    def test_without_an_ending_it_is_no_target(self, tmp_path):
        register(dataclasses.replace(raw_format.SPEC, name="bare", endings=()))
        try:
            with pytest.raises(UsageError, match="to='bare': expected one of preset, h5, safetensors, orbax"):
                shardload.convert(tmp_path / "model.keras", tmp_path / "model", to="bare")
        finally:
            registry.unregister("bare")

    def test_the_command_offers_those_of_shardload_too(self):
        added = "from shardload.loaders import registry; registry.BUILT_IN['raw'] = 'raw_format:SPEC'"
        code = f"{added}; from shardload.console.options import ConvertFormat; print(*ConvertFormat)"
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert printed.split() == ["preset", "h5", "safetensors", "orbax", "raw"]
