"""Content of files and folders: what format detection reads of them, and files by names from an untrusted index.

A name must be plain (no separator, no ``..``), or be a path of plain names where an index may list subfolders, and
resolve to a path inside the folder. Symbolic links may leave it as people's
folders do: in Hugging Face's cache, in link farms, and in stores that name files after their content::

    models--org--name/snapshots/<revision>/tokenizer.json -> ../../blobs/<digest>     blobs of the same repository
    farm/tokenizer.json -> /shared/gemma/tokenizer.json                               a file of the same name
    farm/model.safetensors -> /store/ab/cdef0123                                      any file, for tensors

Any other link could make a private file public: a conversion would copy ``tokenizer.json -> ~/.ssh/id_rsa``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardload.errors import SourceError, SourceNotFoundError, UnsafeSourceError
from shardload.stores.file_reading import read_header
from shardload.stores.json_files import read_object
from shardload.stores.location import Location
from shardload.stores.store import File
from shardload.units import plural

# More than the longest signature that is checked, the 23 bytes of a Git LFS pointer.
HEAD_BYTES = 64
CONFIG = "config.json"


# No slots in these two classes: `cached_property` keeps its values in the instance's dict.
@dataclass(frozen=True)
class FileContent:
    """An open, non-empty file whose format is being detected."""

    path: Location
    file: File

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.file.n_bytes

    @cached_property
    def head(self) -> bytes:
        """The first `HEAD_BYTES` bytes, or the whole file if it is shorter."""
        return self.read(0, HEAD_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        """Read at most ``count`` bytes; fewer at the end of the file."""
        count = max(0, min(count, self.size - offset))
        return read_header(self.file, count, offset=offset, path=str(self.path), what="the first bytes")

    @cached_property
    def first_shard(self) -> str | None:
        """The first file named in the ``weight_map`` of a JSON file, or ``None``."""
        try:
            found = read_object(self.path).get("weight_map") if self.head.lstrip().startswith(b"{") else None
        except SourceError:
            # Damaged JSON matches no format; `recognition` reads the file again to report the error.
            return None
        if not isinstance(found, dict) or not found:
            return None
        # Keras lists several shards for a group of variables; transformers names one file for each tensor.
        first = next(iter(found.values()))  # enough: an index lists shards of one format
        return str(first[0] if isinstance(first, list) and first else first)


@dataclass(frozen=True)
class FolderContent:
    """A folder whose format is being detected."""

    path: Location
    names: list[str]
    """Names of its entries, sorted."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; empty if there is none.

        Raises:
            SourceError: When it is not a JSON object.
        """
        return read_object(member(self.path, CONFIG, named_by=str(self.path))) if CONFIG in self.names else {}


_MAX_PATH = 4096
"""Most characters of a path in an index, as in Linux."""
_TENSOR_FILES = (".safetensors", ".gguf", ".h5")


def member(folder: Location, name: object, *, named_by: str) -> Location:
    """Return the location of the file ``name`` in a folder; it need not exist.

    Args:
        folder: The checkpoint folder.
        name: A file name from an index.
        named_by: The file that contains the name, for messages.

    Raises:
        SourceError: When the name is not a valid file name.
        UnsafeSourceError: When the name leaves the folder, by itself or through a symbolic link.
    """
    if not isinstance(name, str) or not _is_file_name(name):
        raise SourceError(f"{named_by} should name files in its folder, but names {str(name)[:200]!r}")
    if name in {".", ".."} or "/" in name or "\\" in name:
        raise UnsafeSourceError(
            f"{named_by} names the file {name!r}, which is not a plain name in {folder}. "
            "A checkpoint may only point into its own folder; correct the index or download it again"
        )
    path = folder / name
    # A plain name can only leave its folder through a symbolic link, so other files need no `realpath`.
    if path.is_link():
        _refuse_escape(path, folder)
    return path


def inner_path(name: str) -> str:
    """Return a relative path from an index without ``.`` and doubled slashes, which some tools write."""
    if name.startswith("/"):  # `shards_of` refuses it
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def shards_of(index: Location, names: set[str], *, way_out: str) -> dict[str, Location]:
    """Return the files that an index lists, by path within its folder, sorted; raises like `descendant`.

    Raises:
        SourceNotFoundError: When files are missing; ``way_out`` is the verb of the advice (``Download``).
    """
    files = {name: _listed(index, name) for name in sorted(names)}
    if missing := [name for name, file in files.items() if not file.exists()]:
        raise SourceNotFoundError(
            f"{index} lists {plural(len(files), 'shard')}, but {index.parent} lacks {len(missing)} of them: "
            f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}. {way_out} them into that folder"
        )
    return files


def _listed(index: Location, name: str) -> Location:
    is_outside = name.startswith("/") or ".." in name.split("/") or re.match(r"[A-Za-z]:", name)
    if is_outside or len(name) > _MAX_PATH:
        raise UnsafeSourceError(
            f"{index} names the file {name[:200]!r}, expected a path inside {index.parent}. "
            "A checkpoint may only point into its own folder; correct the index or download it again"
        )
    return descendant(index.parent, name, named_by=str(index))


def descendant(folder: Location, name: str, *, named_by: str) -> Location:
    """Return a path below a folder (``ocdbt.process_0/d/1d35``); it need not exist. Raises like `member`."""
    path = folder
    linked = False
    for part in name.split("/"):
        path = member(path, part, named_by=named_by)
        linked = linked or path.is_link()
    # Each link was checked against its own folder only; where Hugging Face's cache is trusted, several in a row may
    # still lead out of this folder.
    if linked and path.parent != folder:
        _refuse_escape(path, folder)
    return path


def _is_file_name(name: str) -> bool:
    """Whether a file system accepts the name: not empty, no NUL, valid Unicode of at most 255 bytes."""
    try:
        return 0 < len(name.encode("utf-8")) <= 255 and "\0" not in name
    except UnicodeEncodeError:
        return False


def _refuse_escape(path: Location, folder: Location) -> None:
    # Both sides are resolved: the folder itself may be reached through a link.
    target, home = path.resolved(), folder.resolved()
    if target.is_inside(home):
        return
    blobs = _hub_blobs(home)
    if blobs is not None and target.parent == blobs:
        return
    # Of a file of tensors, only tensors are read; a file that is none is refused by its header.
    if target.is_file() and (target.name == path.name or path.name.lower().endswith(_TENSOR_FILES)):
        return
    raise UnsafeSourceError(
        f"{path} is a symbolic link that leaves its folder, to {target}. Such links may only end in a file of the same "
        "name, or, for files of tensors, in any file. Copy it into the folder, or open it by its own path"
    )


def _hub_blobs(home: Location) -> Location | None:
    """Return the blobs folder that belongs to a snapshot in Hugging Face's cache, or ``None``."""
    # The folder may be a subfolder of a snapshot, so walk up to the snapshot.
    revision = home
    while revision != revision.parent:
        if revision.parent.name == "snapshots" and "--" in revision.parent.parent.name:
            return revision.parent.parent / "blobs"
        revision = revision.parent
    return None


def listing(folder: Location, *, limit: int = 8) -> str:
    """List the folder's first entries, for messages.

    Raises:
        SourceError: When the folder cannot be read.
    """
    names = folder.names()
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + rest) or "nothing"
