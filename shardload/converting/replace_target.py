"""Check what exists at the target: nothing, an empty folder, or, if requested, a checkpoint to be replaced.

Replacing removes everything in a folder, so a folder is only replaced if its content is a checkpoint.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardload.converting.sidecar_files import is_weights
from shardload.errors import WAYS_OUT, ShardloadError, WriteError
from shardload.loaders import recognise
from shardload.loaders.contents import FolderContent
from shardload.steps.file_tree import is_empty
from shardload.stores.json_files import read_optional
from shardload.stores.local import located
from shardload.units import format_bytes


def exists(target: Path) -> WriteError:
    """Return the error for an existing target."""
    return WriteError(f"{target} already exists. Replace it with overwrite=True (--overwrite), or choose another name")


def write_error(target: Path, number: int, n_bytes: int | None = None) -> WriteError:
    """Build the error for a disk, or a limit of this process, that refuses a target with ``n_bytes`` of tensors."""
    why = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
    size = f", for {format_bytes(n_bytes)} of tensors" if n_bytes and number in _ROOM else ""
    made = WriteError(f"Cannot write {target}: {why}{size}.{f' {WAYS_OUT[number]}.' if number in WAYS_OUT else ''}")
    made.errno = number
    return made


_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_free(target: Path, *, folder: bool, overwrite: bool) -> None:
    """Check that a result may get this name.

    Args:
        target: The result's name.
        folder: Whether the result is a folder.
        overwrite: Whether to replace an existing checkpoint.

    Raises:
        WriteError: When something else has the name, which must be kept.
    """
    if not os.path.lexists(target) or (folder and is_empty(target)):
        return
    if not overwrite:
        raise exists(target)
    if target.is_dir() and not folder:
        raise WriteError(
            f"Cannot replace {target}: it is a folder, and the result is a file. Remove it, or choose another name"
        )
    # A dangling link does not exist() and leads to nothing that could be lost.
    if target.exists() and not _is_checkpoint(target):
        raise WriteError(f"Cannot replace {target}: it is not a checkpoint. Remove it yourself, or choose another name")


def check_description(path: Path, content: bytes, *, overwrite: bool) -> None:
    """Check that a small file of a target may get this name: an existing file must be equal or replaceable.

    Raises:
        WriteError: When it may not.
    """
    if not os.path.lexists(path) or (path.is_file() and path.read_bytes() == content):
        return
    if not overwrite:
        raise exists(path)
    if not describes_model(path):
        raise WriteError(
            f"Cannot replace {path}: it does not describe a model. Remove it yourself, or choose another name"
        )


def check_undescribed(path: Path, target: Path, *, overwrite: bool) -> None:
    """Check that no file of this name describes another model, or that it may be removed.

    Raises:
        WriteError: When it does, and must be kept.
    """
    if describes_model(path) and not overwrite:
        raise WriteError(
            f"Cannot write {target}: {path.name} next to it describes a model, and would be taken for the description "
            "of this one. Remove it with overwrite=True (--overwrite), or choose another name"
        )


def describes_model(path: Path) -> bool:
    """Whether a file is Keras' description of a model."""
    found = read_optional(path) if path.is_file() else None
    return isinstance(found, dict) and "class_name" in found


def check_shard(path: Path, made: Path, *, overwrite: bool) -> None:
    """Check that a shard of a target may get this name.

    Raises:
        WriteError: When something else has the name.
    """
    # The same file under both names: an earlier run was killed while it published shards as second links.
    if not os.path.lexists(path) or (made.exists() and path.exists() and path.samefile(made)):
        return
    if not overwrite:
        raise exists(path)
    check_free(path, folder=False, overwrite=True)


def _is_checkpoint(path: Path) -> bool:
    try:
        found = recognise(path)
    except ShardloadError:
        return False
    if path.is_file():
        return True
    if found.is_step:
        folder = located(path)
        return found.is_folder(FolderContent(folder, folder.names()))  # a single step, not a training run's folder
    # Many programs write a config.json; only next to weights does it make the folder a checkpoint.
    described = found.open_folder is not None and found.described_by is not None
    return described and any(is_weights(e.name) and e.is_file() for e in path.iterdir())
