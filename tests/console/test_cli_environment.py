"""What the command settles before Keras and JAX are imported."""

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from cli_fakes import run, with_fakes

import shardload.sharding.devices  # noqa: F401 - imported here, so that it never sees a pretended JAX
from shardload.console import jax_setup, streams
from shardload.console.jax_setup import Platform
from shardload.errors import MeshError
from shardload.sharding.mesh import MeshSpec

SHOW = """
import json, os
def show(source, **options):
    import keras, jax
    seen = dict(backend=keras.backend.backend(), devices=len(jax.devices()))
    print(json.dumps(seen | dict(tensorflow=sys.modules.get("tensorflow", 0))), file=sys.stderr)
    return loads(source)
engine.load = show
"""


@pytest.mark.slow
def test_the_mesh_gets_its_devices_and_the_person_is_told():
    done = with_fakes(SHOW, "load", "x", "--mesh", "1x8", "--platform", "cpu")
    assert '"devices": 8' in done.stderr
    said = "note: simulating 8 CPU devices for the mesh batch=1,model=8; no accelerator is used.\n"
    assert done.stderr.startswith(said)


@pytest.mark.slow
def test_what_is_there_already_is_not_simulated():
    done = with_fakes(SHOW, "load", "x", "--mesh", "1x2", "--platform", "cpu", JAX_NUM_CPU_DEVICES="4")
    assert '"devices": 4' in done.stderr and "simulating" not in done.stderr


@pytest.mark.slow
def test_another_backend_is_overridden_and_said():
    done = with_fakes(SHOW, "load", "x", "--platform", "cpu", KERAS_BACKEND="torch")
    assert done.stderr.startswith("note: KERAS_BACKEND is 'torch', but sharded loading needs JAX; using 'jax'")
    assert '"backend": "jax", "devices": 1, "tensorflow": null' in done.stderr


@pytest.mark.slow
def test_a_note_is_wrapped_between_words_on_a_terminal(monkeypatch, capsys):
    text = "simulating 8 CPU devices for the mesh batch=1,model=8; no accelerator is used."
    streams.note(text)
    assert capsys.readouterr().err == f"note: {text}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    streams.note(text)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == f"note: {text}" and max(map(len, lines)) <= 40


def test_tensorflow_may_be_kept():
    assert '"tensorflow": 0' in with_fakes(SHOW, "load", "x", "--platform", "cpu", SHARDLOAD_KEEP_TENSORFLOW="1").stderr


@pytest.mark.slow
def test_nothing_is_said_when_there_is_nothing_to_say():
    assert with_fakes("", "load", "x", "--platform", "cpu").stderr == ""


@pytest.fixture
def machine(monkeypatch):
    """A pretended JAX with some devices, and a pretended set of its plugins."""

    def make(platform: str, count: int, *, plugins: tuple[str, ...] = (), cpu_devices: int = -1, error: str = ""):
        def devices():
            if error:
                raise RuntimeError(error)
            return [SimpleNamespace(platform=platform)] * max(count, config.jax_num_cpu_devices * (platform == "cpu"))

        config = SimpleNamespace(jax_num_cpu_devices=cpu_devices)
        config.update = lambda name, value: setattr(config, name, value)
        points = [SimpleNamespace(name=name) for name in plugins]
        monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config, devices=devices))
        monkeypatch.setattr(jax_setup.metadata, "entry_points", lambda group: points)
        monkeypatch.setenv("JAX_PLATFORMS", "")

    return make


def provide(mesh: str, platform: Platform | None = None) -> list[str]:
    notes: list[str] = []
    jax_setup.provide_devices(MeshSpec.parse(mesh), platform=platform, note=notes.append)
    return notes


@pytest.mark.parametrize(
    ("platform", "count", "mesh", "says"),
    [
        ("gpu", 4, "1x8", r"needs 8 devices, but there are 4 gpu devices here.*or add --platform cpu"),
        ("tpu", 1, "2x4", "there is 1 tpu device here"),
        ("cpu", 1, "64x64", "needs 4,096 devices; on the CPU at most 1024 can be simulated"),
    ],
)
def test_too_few_devices_name_the_way_out(platform, count, mesh, says, machine):
    machine(platform, count)
    with pytest.raises(MeshError, match=says):
        provide(mesh)


def test_enough_accelerators_need_no_words(machine):
    machine("tpu", 8)
    assert provide("2x4", Platform.TPU) == []


def test_a_platform_without_plugin_says_what_to_install(machine):
    machine("cpu", 1)
    said = r"no GPU plugin here\. Install one, for example with pip install 'jax\[cuda13\]'"
    with pytest.raises(MeshError, match=said):
        provide("1x1", Platform.GPU)


@pytest.mark.parametrize(("plugin", "platforms"), [("xla_cuda13", "cuda,cpu"), ("xla_rocm7", "rocm,cpu")])
def test_the_gpu_plugin_that_is_installed_is_used(machine, monkeypatch, plugin, platforms):
    machine("gpu", 2, plugins=(plugin,))
    assert provide("1x2", Platform.GPU) == []
    assert jax_setup.os.environ["JAX_PLATFORMS"] == platforms


def test_a_plugin_without_its_device_is_told(machine):
    machine("cpu", 1, plugins=("xla_cuda13",))
    with pytest.raises(MeshError, match="Cannot use --platform gpu: JAX found only cpu devices on this machine"):
        provide("1x1", Platform.GPU)


def test_a_jax_that_cannot_start_is_told(machine):
    machine("tpu", 0, error="Unable to initialize backend 'tpu': no libtpu.so. (set JAX_PLATFORMS='')")
    said = r"Unable to initialize backend 'tpu': no libtpu.so\. Installed here: cpu.*--platform cpu"
    with pytest.raises(MeshError, match=said):
        provide("1x1", Platform.TPU)


@pytest.mark.slow
def test_cuda_where_there_is_none_is_one_paragraph():
    done = with_fakes("", "load", "x", "--mesh", "1x8", JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    assert (done.code, done.stdout) == (1, "")
    assert done.error.startswith("Error: JAX could not start with JAX_PLATFORMS=cuda: ")
    assert "Installed here: cpu" in done.error and "--platform cpu" in done.error


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "value"), [("JAX_NUM_CPU_DEVICES", "eight"), ("JAX_ENABLE_X64", "maybe")])
def test_a_variable_that_jax_refuses_is_told(variable, value):
    done = with_fakes("", "load", "x", "--mesh", "1x8", **{variable: value})
    said = f"Error: Cannot start JAX with {variable}={value}: it does not accept this value. Correct the environment "
    assert (done.code, done.error.strip()) == (2, said + "variable, or unset it")


@pytest.mark.slow
def test_cuda_where_there_is_none_is_our_error_in_python():
    code = "from shardload.sharding.devices import resolve_devices; resolve_devices('1x8')"
    done = run((sys.executable, "-c", code), JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.stderr.splitlines()[-1].startswith("shardload.errors.MeshError: JAX could not start with JAX_PLATFORMS")


def test_warnings_are_kept_from_people_who_did_not_ask(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as caught:
        jax_setup.set_up_jax(note=lambda message: None)
        warnings.warn("noise", stacklevel=1)
    assert caught == []


def test_what_a_library_prints_to_stdout_does_not_mix_with_the_result():
    code = (
        "import ctypes; from shardload.console import streams\n"
        "with streams.results() as out:\n"
        "    ctypes.CDLL(None).printf(b'Solving LP')\n"
        "    out.json({'a': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"a": 1} and done.stderr.endswith("Solving LP")
