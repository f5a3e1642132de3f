"""How format detection reads files and folders, and how a name from an untrusted index becomes the path of a file.

A name must be plain (no separator, no ``..``); an index may also list ``subfolder/name``. The file must be inside the
folder. Symbolic links may lead out of it in three cases that are common: Hugging Face's cache, folders of links to
files elsewhere, and stores that name files after their content::

    models--org--name/snapshots/<revision>/tokenizer.json -> ../../blobs/<digest>     blobs of the same repository
    farm/tokenizer.json -> /shared/gemma/tokenizer.json                               a file of the same name
    farm/model.safetensors -> /store/ab/cdef0123                                      any file, for tensors

Any other link could make a private file public: a conversion would copy ``tokenizer.json -> ~/.ssh/id_rsa``.

A file's name may say that it is one of several parts: the part's number, ``of``, and the number of parts. Separators
may surround ``of``, and no letter or digit may follow the second number::

    model-00002-of-00003.safetensors            00002-of-00003.safetensors            model (2 of 3).safetensors
    model-00002-of-00003.fp16.safetensors       model-part2of3-Q4_K_M.gguf            model-00002-of-000163.safetensors

The names of one checkpoint's parts differ in the first number only. A file that only seems to be a
part (``weights-3-of-5-epochs``) is refused too: loading half a checkpoint as if it were a whole one would be worse.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from shardload.errors import SourceError, SourceNotFoundError, TransferError, UnsafeSourceError
from shardload.stores.json_files import read_object
from shardload.stores.location import Location, read_ahead
from shardload.stores.store import File, FileIdentity, read_bytes
from shardload.units import plural

# More than the longest signature that is checked, the 23 bytes of a Git LFS pointer.
_HEAD_BYTES = 64
CONFIG = "config.json"
_MAX_PATH = 4096
"""Limit on the length of a path in an index, in characters; 4096 is also Linux's limit for any path."""
_TENSOR_FILES = (".safetensors", ".gguf", ".h5")
_CLAIM = re.compile(r"(?<![0-9])(?P<number>[0-9]+)(?P<of>[\W_]*of[\W_]*)(?P<count>[0-9]+)(?![^\W_])", re.IGNORECASE)
_SPARSE = re.compile(r"spars|prun", re.IGNORECASE)
"""Matches a word which shows that ``2of4`` in a name means sparsity (2 of 4 weights are 0), not part 2 of 4."""
_BROWSER = re.compile(r" ?\([0-9]+\)(?=\.\w+$)")
"""Matches the number that a browser adds to a file's name when it downloads the file again: ``model (1).gguf``."""
_LABEL = re.compile(r"[\W_]*(part|shard|split|chunk|piece)?[\W_]*$", re.IGNORECASE)
"""Matches what joins a checkpoint's name to the number of a part: ``-part`` in ``model-part2of3.gguf``."""
_SHOWN = 8
"""How many missing files an error names at most."""


# No slots in these two classes: `cached_property` keeps its values in the instance's dict.
@dataclass(frozen=True)
class FileContent:
    """An open, non-empty file whose format is being detected: every `FormatSpec.is_file` gets it."""

    path: Location
    file: File

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.file.n_bytes

    @cached_property
    def head(self) -> bytes:
        """The first 64 bytes, which contain the signatures of most formats; the whole file if it is shorter."""
        return self.read(0, _HEAD_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        """Read ``count`` bytes from ``offset`` on, or fewer where the file ends."""
        count = max(0, min(count, self.size - offset))
        return read_bytes(self.file, count, offset=offset, path=str(self.path), what="the first bytes")

    @cached_property
    def first_shard(self) -> str | None:
        """Name of the first shard, which shows the format, if the file is an index of shards; else ``None``."""
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
    """A folder whose format is being detected: every `FormatSpec.is_folder` gets it."""

    path: Location
    names: list[str]
    """Sorted names of the files and folders directly in the folder."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; empty if there is none."""
        return read_object(member(self.path, CONFIG, named_by=str(self.path))) if CONFIG in self.names else {}


def member(folder: Location, name: object, *, named_by: str) -> Location:
    """Return the location of the file ``name`` in a folder; raise if the name or an unsafe link leads outside."""
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
    """Clean a relative path from an index: remove ``.`` and doubled slashes, which some tools write."""
    if name.startswith("/"):  # `shards_of` refuses it
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def shards_of(index: Location, names: set[str], *, way_out: str) -> dict[str, Location]:
    """Return name → location of an index's shards; raise if one does not exist, or is outside of the index's folder.

    ``way_out`` is the verb in the advice on missing shards: "Copy" becomes "Copy them into that folder".
    """
    files = {name: _listed(index, name) for name in sorted(names)}
    read_ahead(files.values())
    if missing := [name for name, file in files.items() if not file.exists()]:
        raise SourceNotFoundError(
            f"{index} lists {plural(len(files), 'shard')}, but {index.parent} lacks {len(missing)} of them: "
            f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}. {way_out} them into that folder"
        )
    return files


@contextmanager
def unchanging(index: Location) -> Iterator[None]:
    """Raise a `TransferError` if an index changes in the with block, in which the files that it lists are opened.

    A program that replaces a checkpoint removes its index first and writes the new one last. So files that were opened
    while the index stayed the same are of one version.
    """
    before = index.identity()
    try:
        yield
    except (SourceError, SourceNotFoundError) as error:
        _refuse_changed(index, before, cause=error)
        raise
    _refuse_changed(index, before)


def _refuse_changed(index: Location, before: FileIdentity, *, cause: Exception | None = None) -> None:
    if index.identity() != before or not index.store.is_current(index.key):
        raise TransferError(
            f"{index} changed while the files that it lists were opened: they may belong to two checkpoints. Load it "
            "again once its writer has finished"
        ) from cause


def _listed(index: Location, name: str) -> Location:
    is_outside = name.startswith("/") or ".." in name.split("/") or re.match(r"[A-Za-z]:", name)
    if is_outside or len(name) > _MAX_PATH:
        raise UnsafeSourceError(
            f"{index} names the file {name[:200]!r}, expected a path inside {index.parent}. "
            "A checkpoint may only point into its own folder; correct the index or download it again"
        )
    return descendant(index.parent, name, named_by=str(index))


def descendant(folder: Location, name: str, *, named_by: str) -> Location:
    """Return the location of the path ``name`` (``ocdbt.process_0/d/1d``) below a folder; raise if it leads outside."""
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


def group_above(name: str, groups: Container[str]) -> str:
    """Return the group that lists a dataset in a shard index: the innermost of ``groups`` above it, or its parent."""
    above = own = name.rpartition("/")[0]
    while above and above not in groups:
        above = above.rpartition("/")[0]
    return above or own


def _is_file_name(name: str) -> bool:
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
        f"{path} is a symbolic link that leaves its folder, to {target}. A link may leave it only to a file, which "
        f"must have the link's name unless that ends in {' or '.join(_TENSOR_FILES)}. Copy the file into the folder, "
        "or open it by its own path"
    )


def _hub_blobs(home: Location) -> Location | None:
    """If ``home`` is in Hugging Face's cache, return the folder ``blobs`` that files there link to; else ``None``."""
    # The folder may be a subfolder of a snapshot, so walk up to the snapshot.
    revision = home
    while revision != revision.parent:
        if revision.parent.name == "snapshots" and "--" in revision.parent.parent.name:
            return revision.parent.parent / "blobs"
        revision = revision.parent
    return None


def listing(folder: Location, *, limit: int = 8) -> str:
    """Return the first ``limit`` names in a folder as a text, for messages: ``a.txt, b.txt and 3 more``."""
    names = folder.names()
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + rest) or "nothing"


@dataclass(frozen=True, slots=True)
class _PartName:
    before: str
    number: str
    """The part's number as text, with leading zeros: ``00002``. ``count`` is the number of parts, also as text."""
    of: str
    count: str
    after: str

    @classmethod
    def of_name(cls, name: str) -> _PartName | None:
        """Split a file name at its part number, such as ``1-of-2`` (the last of several); ``None`` if it has none."""
        last = None
        for found in _CLAIM.finditer(name):
            is_sparsity = found["of"].lower() == "of" and len(found[0]) == 4 and _SPARSE.search(name)
            last = last if is_sparsity else found
        if last is None:
            return None
        return cls(name[: last.start()], last["number"], last["of"], last["count"], name[last.end() :])

    @property
    def checkpoint(self) -> str:
        """The file name without the part's number; it is the same for all parts of one checkpoint."""
        return f"{self.before}{self.of}{self.count}{_BROWSER.sub('', self.after)}"

    def numbered(self, number: int) -> str:
        """Return the file name of part ``number`` of the checkpoint that this part belongs to."""
        written = (self.number, self.count)
        width = len(self.number) if any(each.startswith("0") or len(each) > 4 for each in written) else 1
        return f"{self.before}{number:0{width}d}{self.of}{self.count}{_BROWSER.sub('', self.after)}"


def part_number(name: str) -> tuple[int, int] | None:
    """Return part number and part count in a file name, (2, 3) for ``model-00002-of-00003.gguf``; else ``None``."""
    found = _PartName.of_name(name)
    return (int(found.number), int(found.count)) if found and int(found.count) > 1 else None


def part_name(name: str, number: int) -> str:
    """Return the file name of part ``number`` of a checkpoint, given that of any part; other names stay unchanged."""
    found = _PartName.of_name(name)
    return name if found is None else found.numbered(number)


def set_of(name: str) -> str:
    """Return a file name without its part number: a key by which parts of the same checkpoint can be grouped."""
    found = _PartName.of_name(name)
    return name if found is None else found.checkpoint


def stem_without_part(name: str) -> str:
    """Return a file name without part number and ending: ``model`` for ``model-1-of-2.gguf``, empty for ``1-of-2``."""
    found = _PartName.of_name(name)
    return _LABEL.sub("", found.before, count=1) if found else name.rpartition(".")[0]


def pattern_of(name: str) -> str:
    """Return a glob pattern that finds all parts of a checkpoint: ``model-*-of-2.gguf`` for ``model-1-of-2.gguf``."""
    found = _PartName.of_name(name)
    if found is None:
        return glob.escape(name)
    return f"{glob.escape(found.before)}*{glob.escape(found.of + found.count + found.after)}"


def all_parts(path: Location) -> list[Location]:
    """Find all parts of a checkpoint from the name of one part; return them in order, or raise if one is missing."""
    number, count = part_number(path.name) or (1, 1)
    there = _numbered(path) if count > 1 else {1: path.name}
    first = 0 if 0 in there else 1  # some writers count from 0
    # The name may be hostile: no list of a million names is made.
    numbers = range(first, first + count)
    if number not in numbers:
        raise SourceError(f"{path} is part {number} of {count} according to its name, which is impossible. Rename it")
    if (lacking := count - sum(i in numbers for i in there)) > 0:
        shown = islice((part_name(path.name, i) for i in numbers if i not in there), _SHOWN)
        raise SourceNotFoundError(
            f"{path} is one of {plural(count, 'part')}, but {path.parent} lacks {lacking} of them: "
            f"{', '.join(shown)}{' …' if lacking > _SHOWN else ''}. Download them into that folder; if it is a whole "
            "checkpoint, rename it"
        )
    parts = [member(path.parent, there[i], named_by=str(path)) for i in numbers]
    read_ahead(parts)
    return parts


def refuse_part(path: Location) -> None:
    """Raise if a file's name says that it is a part of a checkpoint, for formats whose parts shardload cannot join."""
    if (claimed := part_number(path.name)) is not None:
        raise SourceError(
            f"Cannot open {path}: it is part {claimed[0]} of {claimed[1]} according to its name, expected a whole "
            "checkpoint. Join the parts with the program that split them; if it is a whole checkpoint, rename it"
        )


def refuse_bytes(path: Location, *, endings: tuple[str, ...]) -> None:
    """Raise for a piece of a file cut at some byte (``model.gguf.part1of2``), and say how to join the pieces."""
    whole, found = stem_without_part(path.name), _PartName.of_name(path.name)
    if found is None or found.after or part_number(path.name) is None or not whole.lower().endswith(endings):
        return
    parts = " ".join(found.numbered(i) for i in range(1, min(int(found.count), 3) + 1))
    more = " …" if int(found.count) > 3 else ""
    raise SourceError(
        f"Cannot open {path}: according to its name it contains a part of the bytes of {whole}, expected the whole "
        f"file. Join the parts in order: cat {parts}{more} > {whole}"
    )


def _numbered(path: Location) -> dict[int, str]:
    """Return part number → file name for the parts of a checkpoint that exist; ``path`` is one of them."""
    asked = _PartName.of_name(path.name)
    found: dict[int, str] = {}
    for name in path.parent.names():
        part = _PartName.of_name(name)
        if part is None or asked is None or part.checkpoint != asked.checkpoint:
            continue
        if (other := found.setdefault(int(part.number), name)) != name:
            raise SourceError(f"{other} and {name} in {path.parent} are the same part by their names. Remove one")
    return found
