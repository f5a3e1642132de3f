"""Files of a checkpoint folder, found by names that may come from an untrusted index.

A name must be plain (no separator, no ``..``) and resolve to a path inside the folder. One layout of
symbolic links is trusted: Hugging Face's cache, where a snapshot's files link to blobs of the same repository::

    models--org--name/snapshots/<revision>/model.safetensors -> ../../blobs/<digest>
"""

from __future__ import annotations

from pathlib import Path

from shardload.errors import SourceError, SourceNotFoundError, UnsafeSourceError


def member(folder: Path, name: object, *, named_by: str) -> Path:
    """Return the path of the file ``name`` in a folder; it need not exist.

    Args:
        folder: The checkpoint folder.
        name: A file name from an index.
        named_by: The file that contains the name, for messages.

    Raises:
        SourceError: When the name is not a valid file name.
        UnsafeSourceError: When the name leaves the folder, by itself or through a symbolic link.
    """
    if not isinstance(name, str) or not _is_file_name(name):
        raise SourceError(f"{named_by} should name files of its folder, but names {str(name)[:200]!r}")
    if name in {".", ".."} or "/" in name or "\\" in name:
        raise UnsafeSourceError(
            f"{named_by} names the file {name!r}, which is not a plain name in {folder}. "
            "A checkpoint may only point into its own folder; correct the index or download it again"
        )
    path = folder / name
    if path.is_symlink():
        _refuse_escape(path, folder)
    return path


def shards_of(index: Path, names: set[str], *, way_out: str) -> dict[str, Path]:
    """Return the files that an index lists, by name, sorted; raises like `member`.

    Raises:
        SourceNotFoundError: When files are missing; ``way_out`` says where to get them.
    """
    files = {name: member(index.parent, name, named_by=str(index)) for name in sorted(names)}
    if missing := [name for name, file in files.items() if not file.exists()]:
        raise SourceNotFoundError(
            f"{index} lists {len(files)} shards, but {len(missing)} are missing from {index.parent}: "
            f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}. {way_out} them into that folder"
        )
    return files


def descendant(folder: Path, name: str, *, named_by: str) -> Path:
    """Return a path below a folder (``ocdbt.process_0/d/1d35``); it need not exist. Raises like `member`."""
    path = folder
    parts = name.split("/")
    for part in parts:
        path = member(path, part, named_by=named_by)
    if len(parts) > 1 and any(folder.joinpath(*parts[:n]).is_symlink() for n in range(1, len(parts) + 1)):
        _refuse_escape(path, folder)
    return path


def _is_file_name(name: str) -> bool:
    """Whether a file system accepts the name: not empty, no NUL, valid Unicode of at most 255 bytes."""
    try:
        return 0 < len(name.encode("utf-8")) <= 255 and "\0" not in name
    except UnicodeEncodeError:
        return False


def _refuse_escape(path: Path, folder: Path) -> None:
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise SourceError(f"{path} is a symbolic link that leads nowhere: {error}") from error
    if target.is_relative_to(home):
        return
    blobs = _hub_blobs(home)
    if blobs is not None and target.parent == blobs:
        return
    raise UnsafeSourceError(
        f"{path} is a symbolic link that leaves its folder, to {target}. Copy the file into the folder, "
        "or open the file it points to by its own path"
    )


def _hub_blobs(home: Path) -> Path | None:
    """Return the blobs folder that belongs to a snapshot in Hugging Face's cache, or ``None``."""
    for revision in (home, *home.parents):
        if revision.parent.name == "snapshots" and revision.parent.parent.name.count("--") >= 1:
            return revision.parent.parent / "blobs"
    return None


def listing(folder: Path, *, limit: int = 8) -> str:
    """List the folder's first entries, for messages.

    Raises:
        SourceError: When the folder cannot be read.
    """
    names = entries(folder)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + rest) or "nothing"


def entries(folder: Path) -> list[str]:
    """Return the names of a folder's entries, sorted.

    Raises:
        SourceError: When the folder cannot be read.
    """
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise SourceError(f"The folder {folder} cannot be read: {error.strerror}") from error
