"""What may have the target's name, what is refused, and what the messages say."""

import errno
import os
import shutil
import signal
from pathlib import Path

import keras
import pytest
import small_folders
from conversions import same

import shardload
from shardload.converting.publishing import ConversionFolder, staged
from shardload.errors import UsageError, WriteError


@pytest.fixture(scope="module")
def preset(presets):
    return presets["gemma_2b"]


def precious(path):
    path.mkdir()
    (path / "mine").write_text("precious")
    return path


@pytest.mark.slow
def test_nothing_is_overwritten_unless_asked(preset, tmp_path):
    shardload.convert(preset, tmp_path / "out", to="orbax")
    with pytest.raises(WriteError, match=r"already exists.*overwrite"):
        shardload.convert(preset, tmp_path / "out", to="h5")
    shardload.convert(preset, tmp_path / "out", to="h5", overwrite=True)
    assert same(preset, tmp_path / "out")
    assert not (tmp_path / "out" / "pytree").exists()


def test_an_empty_folder_is_free(preset, tmp_path):
    (tmp_path / "out").mkdir()
    shardload.convert(preset, tmp_path / "out", to="h5")
    assert same(preset, tmp_path / "out")


@pytest.mark.parametrize("to", ["h5", "safetensors", "orbax"])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(to, preset, tmp_path):
    out = precious(tmp_path / "out")
    with pytest.raises(WriteError, match=r"not a checkpoint.*Remove it yourself"):
        shardload.convert(preset, out, to=to, overwrite=True)
    (out / "config.json").write_text('{"model_type": "of somebody\'s program"}')
    (out / "model.h5").mkdir()
    with pytest.raises(WriteError, match="not a checkpoint"):
        shardload.convert(preset, out, to=to, overwrite=True)
    assert (out / "mine").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_folder_of_a_training_run_is_never_replaced(preset, tmp_path):
    shardload.convert(preset, tmp_path / "run" / "3", to="orbax")
    with pytest.raises(WriteError, match="not a checkpoint"):
        shardload.convert(preset, tmp_path / "run", to="h5", overwrite=True)
    assert (tmp_path / "run" / "3").is_dir()


@pytest.mark.slow
def test_damaged_checkpoints_are_replaced(preset, tmp_path):
    shardload.convert(preset, tmp_path / "out", to="safetensors", max_shard_bytes="256KiB")
    next((tmp_path / "out").glob("*.safetensors")).unlink()
    shardload.convert(preset, tmp_path / "out", to="h5", overwrite=True)
    assert same(preset, tmp_path / "out")


def test_files_that_are_no_checkpoints_stay(preset, tmp_path):
    one = tmp_path / "one.weights.h5"
    one.write_text("precious")
    with pytest.raises(WriteError, match="not a checkpoint"):
        shardload.convert(preset, one, overwrite=True)
    one.unlink()
    (tmp_path / "one.json").write_text('{"mine": "precious"}')
    with pytest.raises(WriteError, match=r"one\.json: it does not describe a model"):
        shardload.convert(preset, one, overwrite=True)
    (tmp_path / "one.json").unlink()
    precious(one)
    with pytest.raises(WriteError, match="is a folder, and the result is a file"):
        shardload.convert(preset, one, overwrite=True)


def test_a_link_is_replaced_and_what_it_names_stays(preset, tmp_path):
    shardload.convert(preset, tmp_path / "first", to="h5")
    (tmp_path / "out").symlink_to("first")
    shardload.convert(preset, tmp_path / "out", to="orbax", overwrite=True)
    assert not (tmp_path / "out").is_symlink()
    assert same(preset, tmp_path / "first")


FILES = ("z.h5", "z.safetensors", "z.gguf", "z.json", "Z.HDF5")
FOLDER = r"(?i)has a file extension, .* is a folder.* or name it z\.weights\.h5"
ARCHIVE = r"\.keras files can only be read\. Name it z\.weights\.h5"


@pytest.mark.parametrize(
    ("name", "to", "says"),
    [
        *((name, to, FOLDER) for name in FILES for to in ("h5", "orbax")),
        *(("z.keras", to, ARCHIVE) for to in (None, "h5", "orbax")),
    ],
)
def test_a_folder_does_not_get_a_file_s_name_and_no_archive_is_written(name, to, says, preset, tmp_path):
    with pytest.raises(UsageError, match=says):
        shardload.convert(preset, tmp_path / name, to=to)
    assert not list(tmp_path.iterdir())


def test_an_empty_name(preset):
    with pytest.raises(UsageError, match="to an empty path"):
        shardload.convert(preset, "", to="h5")


def test_nothing_stays_of_what_was_not_begun(preset, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(WriteError, match="Free some space, or choose another folder") as refused:
        shardload.convert(preset, tmp_path / "out", to="h5")
    assert not getattr(refused.value, "__notes__", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["out", "out.weights.h5", "out.weights.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_ctrl_c_while_the_result_gets_its_name_leaves_it_complete(preset, tmp_path, monkeypatch, name, overwrite):
    target = tmp_path / name
    if overwrite:
        shardload.convert(preset, target, to="h5", dtype="float16")
    renames = os.replace

    def interrupted(self, new):
        if Path(new) == target:
            signal.raise_signal(signal.SIGINT)
        renames(self, new)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        shardload.convert(preset, target, to="h5", overwrite=overwrite)
    assert caught.value.__notes__ == [f"{target} is complete."]
    assert not list(tmp_path.glob(".*"))
    assert "float16" not in {str(t.dtype) for t in shardload.inspect(target).tensors.values()}  # of what it replaces


def test_what_an_earlier_run_did_stays_when_the_source_is_gone(preset, tmp_path, monkeypatch):
    def stop(self, name, digest):
        raise KeyboardInterrupt

    monkeypatch.setattr(ConversionFolder, "note_done", stop)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        shardload.convert(preset, tmp_path / "out", to="h5")
    assert "The finished part is in" in interrupted.value.__notes__[0]
    monkeypatch.setattr("shardload.converting.conversion.identity", lambda *args: Path("gone").stat())
    with pytest.raises(WriteError) as failed:
        shardload.convert(preset, tmp_path / "out", to="h5")
    assert "again to continue" in failed.value.__notes__[0]
    assert (tmp_path / ".out.converting" / "result").is_dir()


def test_a_disk_without_room_for_the_lock_keeps_no_empty_folder(tmp_path, monkeypatch):
    def full(path, flags, mode=0o777):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(WriteError, match="the disk is full"), staged(tmp_path / "out", folder=True, overwrite=False):
        pass
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_a_place_where_the_system_lets_nothing_be_written_names_the_way_out():
    with pytest.raises(WriteError, match=r"Cannot write /proc/x: .*\. Choose another place\."):  # noqa: SIM117
        with staged(Path("/proc/x"), folder=True, overwrite=False):
            pass


def test_shard_sizes_that_cannot_be(preset, tmp_path):
    for name, to, size, match in (
        ("z.weights.h5", None, "1GiB", r"one file. For shards, name it z\.weights\.json"),
        ("z", "orbax", "1GiB", "Orbax has separate files"),
        ("z", "safetensors", "many", "max_shard_bytes: "),
        ("z", "safetensors", 0, r"max_shard_bytes: .*positive"),
    ):
        with pytest.raises(UsageError, match=match):
            shardload.convert(preset, tmp_path / name, to=to, max_shard_bytes=size)
    assert not list(tmp_path.iterdir())


def test_models_of_your_own_have_no_names_at_hugging_face(tmp_path):
    keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)]).save(tmp_path / "model.keras")
    with pytest.raises(UsageError, match="Cannot tell the format of out"):
        shardload.convert(tmp_path / "model.keras", tmp_path / "out")
    message = r"not a KerasHub model. Choose the name out\.weights\.h5 or the format orbax"
    with pytest.raises(shardload.errors.UnsupportedError, match=message):
        shardload.convert(tmp_path / "model.keras", tmp_path / "out", to="safetensors")


def test_a_link_that_could_make_a_private_file_public_is_left_out(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "gpt2")
    (tmp_path / "home").mkdir()
    private = {"notes.txt": "id_rsa", "id_rsa": "id_rsa", "sub/config.json": "config.json"}
    for link, name in {**private, "generation_config.json": "generation_config.json"}.items():
        (tmp_path / "home" / name).write_text("{}")
        (folder / link).parent.mkdir(exist_ok=True)
        (folder / link).symlink_to(tmp_path / "home" / name)
    report = shardload.convert(folder, tmp_path / "out", to="preset")
    made = tmp_path / "out" / "transformers"
    copied = {path.relative_to(made).as_posix() for path in made.glob("**/*")}
    assert "generation_config.json" in copied and not copied & {*private}
    for name in private:
        assert f"{name} was left out: it is a link to a file outside the folder" in report.notes
