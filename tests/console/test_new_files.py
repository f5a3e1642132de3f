"""Files that `--html`, `--svg` and `--save-plan` write: nothing is lost, neither a source, an old page nor a result."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from cli_fakes import COMMAND, environment, in_process, install, report, with_fakes
from safetensors.numpy import save_file

from shardload.errors import WriteError
from shardload.parallel import LayoutPlan
from shardload.stores.local import check_replaceable, replace_text

LOAD = ("--mesh", "1x2", "--platform", "cpu")


@pytest.fixture
def cli(capfd):
    return in_process(capfd)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The current folder: a file, two links to it and a copy, as pages, and a folder with a checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path / "home"))
    save_file({"a": np.ones((4, 4), np.float32)}, "mine.safetensors")
    save_file({"a": np.ones((4, 4), np.float32)}, "same.html")
    Path("link.html").symlink_to("mine.safetensors")
    Path("hard.html").hardlink_to("mine.safetensors")
    Path("again.html").symlink_to("same.html")
    Path("folder").mkdir()
    save_file({"a": np.ones((4, 4), np.float32)}, "folder/model.safetensors")
    Path("folder/notes.html").write_text("notes")
    Path("alias").symlink_to("folder")
    Path("home").mkdir()
    Path("home/named.safetensors").symlink_to("../same.html")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("source", "page"),
    [
        ("same.html", "same.html"),
        ("same.html", "folder/../same.html"),
        ("same.html", "again.html"),
        ("again.html", "same.html"),
        ("file://{}/same.html", "same.html"),
        ("named", "same.html"),
        ("mine.safetensors", "link.html"),
        ("mine.safetensors", "hard.html"),
        ("folder", "folder/notes.html"),
        ("folder", "alias/notes.html"),
        ("alias", "folder/notes.html"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "{source}"),
        ("load", "{source}", *LOAD),
        ("plan", "{source}"),
        ("diff", "{source}", "other"),
        ("diff", "other", "{source}"),
    ],
    ids=" ".join,
)
def test_what_a_command_reads_is_never_replaced(command, source, page, cli, place):
    before = contents(place)
    given = [part.format(source=source.format(place)) for part in command]
    done = cli(*given, "--html", page, "--json")
    assert done.code == 2 and done.json["error"]["type"] == "UsageError"
    assert "--html" in done.error and page in done.error
    assert "which the command reads. Choose" in done.error or "is a link to" in done.error
    assert contents(place) == before


@pytest.mark.parametrize(("option", "name"), [("--svg", "folder/plan.svg"), ("--save-plan", "folder/config.json")])
def test_no_file_of_a_plan_replaces_one_of_its_source(option, name, cli, place):
    Path(name).write_text("{}")
    before = contents(place)
    done = cli("plan", "folder", "--mesh", "1x2", option, name)
    assert done.code == 2 and f"{option}: '{name}' is in" in done.error and contents(place) == before


def test_a_page_may_be_written_into_the_folder_of_its_source_and_again(cli, place, monkeypatch):
    monkeypatch.chdir("folder")
    for _ in range(2):
        assert cli("inspect", ".", "--html", "page.html").code == 0
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")


def test_a_configuration_is_not_replaced_by_its_plan(cli, place):
    Path("config.json").write_text("{}")
    done = cli("plan", "config.json", "--mesh", "1x2", "--save-plan", "config.json")
    assert done.code == 2 and "which the command reads. Choose another name" in done.error
    assert Path("config.json").read_text() == "{}"


def test_a_layout_and_an_adapter_are_read_too(cli, place):
    Path("rules.html").write_text("{}")
    for given in (
        ("--layout", "rules.html", "--html", "rules.html"),
        ("--adapter", "folder", "--html", "folder/notes.html"),
    ):
        done = cli("load", "mine.safetensors", *LOAD, *given)
        assert done.code == 2 and "which the command reads" in done.error


def test_a_folder_with_the_name_of_a_layout_is_not_read(cli, place, monkeypatch):
    install(monkeypatch)
    Path("auto").mkdir()
    assert cli("plan", "mine.safetensors", "--layout", "auto", "--html", "auto/plan.html").code == 0


def test_a_file_that_a_folder_links_to_is_not_replaced(cli, place):
    Path("folder/deep").mkdir()
    Path("folder/deep/second.safetensors").symlink_to("../../same.html")
    done = cli("inspect", "folder", "--html", "same.html")
    assert done.code == 2 and "is in" in done.error


def test_a_link_to_another_kind_of_file_is_refused(cli, place):
    before = contents(place)
    done = cli("inspect", "folder", "--html", "link.html")
    assert done.code == 2 and "mine.safetensors', which does not end in .html" in done.error
    assert contents(place) == before


def test_a_page_beside_its_source_is_written(cli, place):
    done = cli("inspect", "mine.safetensors", "--html", "page.html")
    assert done.code == 0 and Path("page.html").read_text().startswith("<!DOCTYPE html>")
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_a_link_to_a_page_stays_a_link(cli, place):
    Path("folder/notes.html").chmod(0o640)
    Path("latest.html").symlink_to("folder/notes.html")
    assert cli("inspect", "mine.safetensors", "--html", "latest.html").code == 0
    assert Path("latest.html").is_symlink() and Path("folder/notes.html").read_text().startswith("<!DOCTYPE html>")
    assert Path("folder/notes.html").stat().st_mode & 0o777 == 0o640


def test_a_failed_write_leaves_the_old_page_and_prints_the_result(place):
    Path("keep.html").write_text("good")
    command = [*COMMAND, "inspect", "mine.safetensors", "--html", "keep.html", "--json"]
    limited = f"ulimit -f 1; exec {sys.executable} -c '{COMMAND[2]}' {' '.join(command[3:])}"
    done = subprocess.run(["bash", "-c", limited], check=False, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and '"name": "a"' in done.stdout and '"error"' not in done.stdout
    assert "Cannot write 'keep.html': File too large. Raise the limit" in done.stderr
    assert Path("keep.html").read_text() == "good"
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("command", [("inspect", "mine.safetensors"), ("diff", "mine.safetensors", "same.html")])
def test_the_result_is_printed_although_the_disk_is_full(command, cli, place):
    Path("full.html").symlink_to("/dev/full")
    for given in ((), ("--json",)):
        done = cli(*command, "--html", "full.html", *given)
        assert done.code == 1 and done.error.startswith("Error: Cannot write 'full.html': No space left on device.")
        assert done.json.keys().isdisjoint({"error"}) if given else "tensor" in done.stdout


@pytest.mark.parametrize("command", [("load", "x", *LOAD), ("plan", "x")])
def test_the_report_of_a_load_is_printed_although_the_disk_is_full(command, place):
    Path("full.html").symlink_to("/dev/full")
    done = with_fakes("", *command, "--html", "full.html", "--json")
    assert done.code == 1 and done.json["weight_bytes"] == 100, done.stderr
    assert "Cannot write 'full.html': No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        (("inspect", "mine.safetensors"), "inspect"),
        (("diff", "mine.safetensors", "same.html"), "diff"),
        (("load", "mine.safetensors", *LOAD), "load"),
        (("plan", "mine.safetensors"), "plan"),
    ],
)
def test_a_place_that_cannot_be_written_is_said_before_the_work(command, engine, cli, place, monkeypatch):
    fakes = install(monkeypatch)
    setattr(fakes, engine, work := Mock(return_value=report()))
    done = cli(*command, "--html", "/proc/x.html", "--json")
    assert done.code == 1 and done.json["error"]["type"] == "WriteError" and not work.called
    assert done.error == "Error: Cannot write '/proc/x.html' (--html): No such file or directory. Choose another place."


@pytest.mark.parametrize(("option", "ending"), [("--html", "html"), ("--svg", "svg"), ("--save-plan", "json")])
def test_a_name_that_is_too_long_is_said_with_its_option(option, ending, cli, place):
    done = cli("plan", "gpt2_base", "--mesh", "1x2", option, f"{'a' * 300}.{ending}")
    assert done.code == 2 and option in done.error and "File name too long" in done.error


def test_the_longest_name_can_be_written(cli, place):
    name = f"{'a' * 250}.html"
    assert cli("inspect", "mine.safetensors", "--html", name).code == 0 and Path(name).stat().st_size


def test_a_second_process_does_not_ask_for_a_place_to_write(place):
    """Only the first writes, perhaps on another machine."""
    meet = ("--coordinator-address", "host:1", "--num-processes", "2", "--process-id")
    setup = "import shardload.console.jax_setup as j; j.provide_devices = lambda *a, processes, **k: processes"
    first, second = (with_fakes(setup, "load", "x", *LOAD, *meet, i, "--html", "/proc/x.html") for i in "01")
    assert first.code == 1 and "Cannot write '/proc/x.html' (--html)" in first.stderr
    assert second.code == 0, second.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_page_that_must_not_be_written_to_is_not_replaced(cli, place):
    Path("old.html").write_text("old")
    Path("old.html").chmod(0o444)
    done = cli("inspect", "mine.safetensors", "--html", "old.html")
    assert done.code == 1 and "'old.html' (--html): Permission denied" in done.error
    assert Path("old.html").read_text() == "old"


def test_names_that_are_not_text_are_written(tmp_path):
    replace_text(tmp_path / "page.html", "caf\udce9 é")
    assert (tmp_path / "page.html").read_bytes() == "caf\\udce9 é".encode()


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_replaceable(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_text(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_a_plan_that_cannot_be_saved_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(WriteError, match="No space left on device"):
        LayoutPlan.save(Mock(to_json=dict), tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"
