"""Files that are one of several by their names: ``model-00002-of-00003.safetensors``, in every spelling.

A number, ``of``, and a number that ends a word. Between them is anything but letters and digits, or nothing::

    model-00002-of-00003.safetensors            00002-of-00003.safetensors            model (2 of 3).safetensors
    model-00002-of-00003.fp16.safetensors       model-part2of3-Q4_K_M.gguf            model-00002-of-000163.safetensors

The parts of one checkpoint differ in the first number only. So a set of another variant (``.fp16``) is another set.
The claim is checked, not believed: all parts are opened, or the missing ones are named. A file that only seems to be a
part (``weights-3-of-5-epochs``) is refused too, as half a checkpoint that loads as a whole one would be worse.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from itertools import islice

from shardload.errors import SourceError, SourceNotFoundError
from shardload.loaders.contents import member
from shardload.stores.location import Location
from shardload.units import plural

_CLAIM = re.compile(r"(?<![0-9])(?P<number>[0-9]+)(?P<of>[\W_]*of[\W_]*)(?P<count>[0-9]+)(?![^\W_])", re.IGNORECASE)
_SPARSE = re.compile(r"spars|prun", re.IGNORECASE)
"""With this in its name, ``Sparse-Llama-3.1-8B-2of4`` has two of four weights that are not 0."""
_BROWSER = re.compile(r" ?\([0-9]+\)(?=\.\w+$)")
"""What a browser adds to the name of a file that it downloads twice."""
_LABEL = re.compile(r"[\W_]*(part|shard|split|chunk|piece)?[\W_]*$", re.IGNORECASE)
"""What may separate the name of a checkpoint from the number of a part."""
_SHOWN = 8
"""Most missing files that an error lists."""


@dataclass(frozen=True, slots=True)
class _PartName:
    before: str
    number: str
    """With its zeros, like ``count``."""
    of: str
    count: str
    after: str

    @classmethod
    def of_name(cls, name: str) -> _PartName | None:
        """Return what a name claims; of several claims, the last is that of the part."""
        claims = [found for found in _CLAIM.finditer(name) if not _is_sparsity(found)]
        if not claims:
            return None
        last = claims[-1]
        return cls(name[: last.start()], last["number"], last["of"], last["count"], name[last.end() :])

    @property
    def checkpoint(self) -> str:
        """What the names of all parts of one checkpoint have in common."""
        return f"{self.before}{self.of}{self.count}{_BROWSER.sub('', self.after)}"

    def numbered(self, number: int) -> str:
        """Return the name of another part."""
        written = (self.number, self.count)
        width = len(self.number) if any(each.startswith("0") or len(each) > 4 for each in written) else 1
        return f"{self.before}{number:0{width}d}{self.of}{self.count}{_BROWSER.sub('', self.after)}"


def part_number(name: str) -> tuple[int, int] | None:
    """Return 2 and 3 for ``model-00002-of-00003.safetensors``; ``None`` for a name that claims no other parts."""
    found = _PartName.of_name(name)
    return (int(found.number), int(found.count)) if found and int(found.count) > 1 else None


def part_name(name: str, number: int) -> str:
    """Return the name of another part of the checkpoint that a part belongs to; ``name`` itself if it is none."""
    found = _PartName.of_name(name)
    return name if found is None else found.numbered(number)


def set_of(name: str) -> str:
    """Return the same text for all parts of one checkpoint: for a part, its name without its number."""
    found = _PartName.of_name(name)
    return name if found is None else found.checkpoint


def stem_of(name: str) -> str:
    """Return a file's name without its ending and the number of its part; empty for ``1-of-2.safetensors``."""
    found = _PartName.of_name(name)
    return _LABEL.sub("", found.before, count=1) if found else name.rpartition(".")[0]


def pattern_of(name: str) -> str:
    """Return a glob pattern that matches the names of all parts of the checkpoint that a part belongs to."""
    found = _PartName.of_name(name)
    if found is None:
        return glob.escape(name)
    return f"{glob.escape(found.before)}*{glob.escape(found.of + found.count + found.after)}"


def all_parts(path: Location) -> list[Location]:
    """Return the files of all parts of the checkpoint that a file's name claims to be a part of, in order.

    Raises:
        SourceNotFoundError: When some are missing.
        SourceError: When the number is not one of the parts', or two files have the same.
        UnsafeSourceError: When one is a symbolic link that leaves the folder.
    """
    number, count = part_number(path.name) or (1, 1)
    there = _numbered(path) if count > 1 else {1: path.name}
    first = 0 if 0 in there else 1  # some writers count from 0
    # The name may be hostile: no list of a million names is made.
    numbers = range(first, first + count)
    if number not in numbers:
        raise SourceError(f"{path} is part {number} of {count} according to its name. Rename it")
    if (lacking := count - sum(i in numbers for i in there)) > 0:
        shown = islice((part_name(path.name, i) for i in numbers if i not in there), _SHOWN)
        raise SourceNotFoundError(
            f"{path} is one of {plural(count, 'part')}, but {path.parent} lacks {lacking} of them: "
            f"{', '.join(shown)}{' …' if lacking > _SHOWN else ''}. Download them into that folder; if it is a whole "
            "checkpoint, rename it"
        )
    return [member(path.parent, there[i], named_by=str(path)) for i in numbers]


def refuse_part(path: Location) -> None:
    """Refuse a file that is a part by its name, in a format whose files are not joined.

    Raises:
        SourceError: When it is one.
    """
    if (claimed := part_number(path.name)) is not None:
        raise SourceError(
            f"Cannot open {path}: it is part {claimed[0]} of {claimed[1]} according to its name, expected a whole "
            "checkpoint. Join the parts with the program that split them; if it is a whole checkpoint, rename it"
        )


def refuse_bytes(path: Location, *, endings: tuple[str, ...]) -> None:
    """Refuse ``model.gguf.part1of2``: bytes of a file that was split without regard to its content.

    Args:
        path: The file.
        endings: Endings of whole files.

    Raises:
        SourceError: When its name says so.
    """
    whole, found = stem_of(path.name), _PartName.of_name(path.name)
    if found is None or found.after or part_number(path.name) is None or not whole.lower().endswith(endings):
        return
    parts = " ".join(found.numbered(i) for i in range(1, min(int(found.count), 3) + 1))
    more = " …" if int(found.count) > 3 else ""
    raise SourceError(
        f"Cannot open {path}: according to its name it contains a part of the bytes of {whole}, expected the whole "
        f"file. Join the parts in order: cat {parts}{more} > {whole}"
    )


def _is_sparsity(claim: re.Match[str]) -> bool:
    return claim["of"].lower() == "of" and len(claim[0]) == 4 and bool(_SPARSE.search(claim.string))


def _numbered(path: Location) -> dict[int, str]:
    """Return the files in a part's folder that are parts of the same checkpoint, by number."""
    asked = _PartName.of_name(path.name)
    found: dict[int, str] = {}
    for name in path.parent.names():
        part = _PartName.of_name(name)
        if part is None or asked is None or part.checkpoint != asked.checkpoint:
            continue
        if (other := found.setdefault(int(part.number), name)) != name:
            raise SourceError(f"{other} and {name} in {path.parent} are the same part by their names. Remove one")
    return found
