"""What a server finds in its folders: checkpoints and their files, and nothing else."""

import errno
import json
import os
import resource
import shutil
import socket
import threading
import time
from pathlib import Path

import gguf_pairs
import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
from saved_steps import save_step

from shardload.errors import SourceError, SourceNotFoundError, UsageError
from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.roots.folder_times import FolderTimes


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def small_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one checkpoint of each kind."""
    root = tmp_path_factory.mktemp("models")
    (root / "team").mkdir()
    gguf_pairs.write(root / "team", "llama", "Q8_0")
    model = small_model()
    (root / "keras").mkdir()
    model.save(root / "keras" / "model.keras")
    model.save_weights(root / "keras" / "some.weights.h5")
    for step in (2, 10):
        save_step(model, root / "run", step)
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "models")


def facts(catalogue):
    return {each.name: (each.format, each.kind) for each in catalogue.checkpoints()}


def test_checkpoints_of_each_kind(root):
    found = Catalogue([root])
    [gguf] = (root / "team").glob("*.gguf")
    assert facts(found) == {
        f"team/{gguf.name}": ("gguf", "file"),
        "team/hf": ("hf-safetensors", "folder"),
        "keras/model.keras": ("keras-archive", "file"),
        "keras/some.weights.h5": ("keras-h5", "file"),
        "run": ("orbax", "run"),
    }
    run = next(each for each in found.checkpoints() if each.name == "run")
    assert run.steps == (2, 10)
    files = [path for path in (root / "run").rglob("*") if path.is_file() and ".staging" not in path.parts]
    assert run.n_bytes == sum(path.stat().st_size for path in files) and run.n_files == len(files)
    assert found.names("") == {"keras": True, "run": True, "team": True}
    assert found.names("run") == {"10": True, "2": True}
    assert found.names("team/hf") == dict.fromkeys(names_in(root / "team" / "hf"), False)
    assert not found.left_out()


def test_a_root_that_is_a_checkpoint_has_its_own_name(root):
    assert facts(Catalogue([root / "team" / "hf"])) == {"hf": ("hf-safetensors", "folder")}
    assert set(facts(Catalogue([root / "team" / "hf", root / "run"]))) == {"hf", "run"}


def test_only_files_of_checkpoints(root):
    (root / "secret.txt").write_text("password")
    (root / ".netrc").write_text("password")
    (root / "docs").mkdir()
    (root / "docs" / "config.json").write_text("{}")
    (root / "team" / "hf" / ".git").mkdir()
    (root / "team" / "hf" / ".git" / "config").write_text("token")
    (root / "keras" / "notes.md").write_text("x")
    (root / "keras" / "some.json").write_text("{}")
    (root / "keras" / "broken.weights.h5").write_text("no HDF5")
    found = Catalogue([root])
    for key in ("secret.txt", ".netrc", "docs/config.json", "team/hf/.git/config", "keras/notes.md"):
        assert found.file(key) is None and found.open(key) is None, key
    assert found.file("keras/some.json") is not None  # it may describe the weights
    assert found.file("keras/broken.weights.h5") is None
    assert "docs" not in found.names("") and ".git" not in found.names("team/hf")


@pytest.mark.parametrize("where", ["loose", "steps"])
def test_a_folder_that_also_has_weights_is_not_served_with_everything_in_it(root, where):
    folder = root / "mine"
    (folder / "private").mkdir(parents=True)
    for name in ("id_rsa", "notes.txt", "private/key.pem"):
        (folder / name).write_text("password")
    if where == "loose":
        save_file({"x": np.ones(3, np.float32)}, folder / "x.safetensors")
        (folder / "vocab.txt").write_text("a")
        shutil.copytree(root / "team" / "hf", folder / "nested")
        expected = {"vocab.txt": False, "x.safetensors": False, "nested": True}
    else:
        shutil.copytree(root / "run" / "2", folder / "2")
        shutil.copytree(root / "team" / "hf", folder / "nested")
        expected = {"2": True, "nested": True}
    for found, key in ((Catalogue([root]), "mine"), (Catalogue([folder]), "" if where == "loose" else "mine")):
        assert found.names(key) == expected
        assert facts(found)[f"{key}/nested".lstrip("/")] == ("hf-safetensors", "folder")
        if where == "steps":
            assert found.file("mine/2/_CHECKPOINT_METADATA") is not None


def test_a_file_that_is_added_changes_no_addresses(root):
    found = Catalogue([root])
    before = facts(found)
    save_file({"x": np.ones(3, np.float32)}, root / "x.safetensors")
    found.refresh()
    assert facts(found) == before | {"x.safetensors": ("safetensors", "file")} == facts(Catalogue([root]))


def test_a_link_that_leads_elsewhere_since(root):
    (root / "latest").symlink_to("run/2")
    found = Catalogue([root])
    key = "latest/_CHECKPOINT_METADATA"
    os.close(found.open(key)[0])
    (root / "latest").unlink()
    (root / "latest").symlink_to("run/10")
    assert found.open(key) is None
    found.refresh()
    descriptor, _ = found.open(key)
    with os.fdopen(descriptor, "rb") as file:
        assert file.read() == (root / "run" / "10" / "_CHECKPOINT_METADATA").read_bytes()


def test_a_folder_that_is_swapped_for_a_link_while_a_file_is_opened(root, tmp_path):
    """As often as it is swapped: either the file that was listed is opened, or none."""
    found = Catalogue([root])
    folder, kept, secret = root / "team" / "hf", root / "team" / "kept", tmp_path / "secret"
    shutil.copytree(folder, secret)
    (secret / "config.json").write_text("password")
    folder.rename(kept)
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            folder.symlink_to(secret)
            folder.unlink()
            kept.rename(folder)
            folder.rename(kept)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(3000):
            if (opened := found.open("team/hf/config.json")) is not None:
                with os.fdopen(opened[0], "rb") as file:
                    assert file.read() != b"password"
    finally:
        stop.set()
        swapping.join()


def test_a_file_that_cannot_be_opened_now_is_not_said_to_be_gone(root):
    found = Catalogue([root])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            found.open("team/hf/config.json")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_this_user_may_not_read_is_said(root):
    (root / "team" / "hf" / "model.safetensors").chmod(0)
    (root / "run").chmod(0)
    found = Catalogue([root])
    (root / "run").chmod(0o700)
    assert found.file("team/hf/model.safetensors") is None
    assert sum("may not read" in line for line in found.left_out()) == 2


def test_links_inside_are_followed_and_others_are_not(root, tmp_path):
    """As in Hugging Face's cache: names in a snapshot are links to files elsewhere in the cache."""
    outside = tmp_path / "outside"
    shutil.copytree(root / "team" / "hf", outside)
    snapshot = root / "models--x" / "snapshots" / "abc"
    blobs = root / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(names_in(outside)):
        shutil.copy(outside / name, blobs / f"blob{number}")
        (snapshot / name).symlink_to(f"../../blobs/blob{number}")
    (root / "away").symlink_to(outside)
    (snapshot / "generation_config.json").symlink_to("/etc/passwd")
    (snapshot / "again").symlink_to("..")
    (snapshot / "self").symlink_to("self")
    found = Catalogue([root])
    assert facts(found)["models--x/snapshots/abc"] == ("hf-safetensors", "folder")
    key = "models--x/snapshots/abc/model.safetensors"
    descriptor, _ = found.open(key)
    with os.fdopen(descriptor, "rb") as file:
        assert file.read() == (outside / "model.safetensors").read_bytes()
    assert found.names("away") is None
    assert found.file("models--x/snapshots/abc/generation_config.json") is None
    assert len(found.left_out()) == 2 and all("outside of" in line for line in found.left_out())
    assert not any("blobs" in each.name for each in found.checkpoints())


def test_names_that_are_taken(root, tmp_path):
    other = tmp_path / "other"
    for name in ("team", "more", "metrics"):
        shutil.copytree(root / "team" / "hf", other / name)
    found = Catalogue([root, other])
    assert facts(found)["more"] == ("hf-safetensors", "folder")
    assert found.names("team") == Catalogue([root]).names("team")
    assert [line.partition(" is not served: ")[2] for line in found.left_out()] == [
        "the name 'metrics' is taken, it is the server's own. Rename it",
        "the name 'team' is taken, another folder has it. Rename it",
    ]


def test_two_roots_with_one_name(root, tmp_path):
    shutil.copytree(root / "run", tmp_path / "other" / "run")
    found = Catalogue([root / "run", tmp_path / "other" / "run"])
    assert set(facts(found)) == {"run"}
    assert "another folder has it" in found.left_out()[0]


def test_what_changes_is_found(root):
    found = Catalogue([root])
    key = "team/hf/model.safetensors"
    before = found.file(key)
    save_file({"x": np.ones(3, np.float32)}, root / "team" / "hf" / "model.safetensors")
    descriptor, now = found.open(key)
    os.close(descriptor)
    assert now.tag != before.tag and found.file(key) == now
    shutil.copytree(root / "team" / "hf", root / "new")
    assert found.names("new") is None
    found.refresh()
    assert found.file("new/model.safetensors") is not None
    shutil.rmtree(root / "new")
    assert found.open("new/model.safetensors") is None


def aged(*roots):
    """Give folders an old time: right after a change, another one may not show."""
    for root in roots:
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            os.utime(folder, (1e9, 1e9))


def test_what_a_folder_shows_of_changes(root, tmp_path):
    (root / "latest").symlink_to("team")
    whole = shutil.copytree(root / "team" / "hf", tmp_path / "hf")
    aged(root, whole)
    missing = ("", "none", "none/at/all", "team/none", "team/hf/none", "run/2/none", "hf/none", "../none", "hf/../../x")

    def changed(*keys):
        return [key for key in keys if found.has_changed(key)]

    found = Catalogue([root, whole])
    assert not changed(*missing, "latest/none")
    for add, key in (
        ((root / "team" / "new").mkdir, "team/new/model.safetensors"),
        (lambda: (root / "keras" / "x.safetensors").write_text(""), "keras/x.safetensors"),
        ((root / "new").mkdir, "new/model.safetensors"),
        (lambda: (whole / "more.json").write_text(""), "hf/more.json"),
        (lambda: shutil.rmtree(root / "run" / "2"), "run/2/none"),
    ):
        add()
        assert found.has_changed(key)
        found.refresh()
        aged(root, whole)
        found = Catalogue([root, whole])
        assert not changed(*missing, "latest/none")
    (root / "latest").unlink()
    (root / "latest").symlink_to("keras")
    os.utime(root, (1e9, 1e9))
    assert changed("team/none", "latest/none", "run/none") == ["latest/none"]


def test_what_was_added_within_a_tick_of_the_clock_is_found(tmp_path):
    now_ns = time.time_ns()
    os.utime(tmp_path, ns=(now_ns, now_ns))
    times = FolderTimes(now_ns=lambda: now_ns + 1000)
    times.note(tmp_path)
    assert times.have_changed(tmp_path, ())
    later = FolderTimes(now_ns=lambda: now_ns + 10**9)
    later.note(tmp_path)
    assert not later.have_changed(tmp_path, ("none",))


def test_a_scan_ends_early_when_the_server_ends(root):
    found = Catalogue([root])
    before = found.checkpoints()
    save_file({"x": np.ones(3, np.float32)}, root / "x.safetensors")
    found.stop()
    with pytest.raises(SourceError, match="the server ends"):
        found.refresh()
    assert found.checkpoints() == before and not found.has_changed("x.safetensors")


@pytest.mark.parametrize("what", ["link", "pipe", "socket", "folder", "linked folder"])
def test_what_took_the_place_of_a_file_is_not_opened(what, root, tmp_path, monkeypatch):
    found = Catalogue([root])
    path = root / "team" / "hf" / "model.safetensors"
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / path.name).write_text("password")
    path.unlink()
    if what == "link":
        path.symlink_to(secret / path.name)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            monkeypatch.chdir(path.parent)  # a longer path is none of a socket
            made.bind(path.name)
    elif what == "folder":
        path.mkdir()
    else:
        shutil.rmtree(path.parent)
        path.parent.symlink_to(secret)
    assert found.open("team/hf/model.safetensors") is None


def test_files_of_zarr_are_not_hidden(root):
    step = root / "plain" / "3"
    step.mkdir(parents=True)
    (step / "_METADATA").write_text(json.dumps({"tree_metadata": {}, "use_zarr3": False}))
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    (step / "w").mkdir()
    (step / "w" / ".zarray").write_text("{}")
    assert Catalogue([root]).file("plain/3/w/.zarray") is not None


def test_roots_that_are_none(tmp_path):
    with pytest.raises(SourceNotFoundError, match="--root takes a folder"):
        Catalogue([tmp_path / "missing"])
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceNotFoundError, match="Not a directory"):
        Catalogue([tmp_path / "file"])
    with pytest.raises(UsageError, match="--root"):
        Catalogue([])
    assert Catalogue([tmp_path]).checkpoints() == []


def test_a_folder_that_shows_names_only_is_left_out(tmp_path, monkeypatch):
    """Mode 0744, for another user than the owner: its names can be listed, and nothing in it can be looked at."""
    for name in ("a", "locked", "z"):
        (tmp_path / name).mkdir()
        save_file({}, tmp_path / name / "model.safetensors")
    for method in ("is_symlink", "is_dir", "lstat"):
        right = getattr(Path, method)

        def refused(path, *arguments, right=right):
            if path.parent.name == "locked":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return right(path, *arguments)

        monkeypatch.setattr(Path, method, refused)
    assert [each.name for each in Catalogue([tmp_path]).checkpoints()] == ["a", "z"]
