"""Folders of Hugging Face's cache, and names of what is on its Hub.

models--org--name/refs/main            the commit of a branch or tag
models--org--name/snapshots/<commit>/  its files, as links to ../../blobs: the folder to open
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from shardload.errors import SourceNotFoundError
from shardload.units import plural

_REPOSITORY = "models--"
_FORM = "hf://ORG/MODEL[@REVISION][/FILE]"
_OTHER_TYPES = ("datasets", "spaces", "kernels", "buckets")
_HANDLE = re.compile(
    r"(?:models/)?(?P<repository>(?!models/)[\w.\-]+/[\w.\-]+)"
    r"(?:@(?P<revision>refs/convert/[\w.\-]+(?=/|$)|refs/pr/\d+(?=/|$)|[^/]+))?(?:/(?P<path>.*))?"
)
"""As huggingface_hub reads it: another slash in a revision is written ``%2F``."""
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class HubName:
    """What an ``hf://`` handle names."""

    repository: str
    revision: str | None
    """A branch, tag or commit; ``None`` for the main branch."""
    path: str
    """A file or folder; empty for all."""

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Parse a handle without its scheme.

        Raises:
            SourceNotFoundError: When it is malformed, or no model's.
        """
        found = _HANDLE.fullmatch(name)
        path = (found["path"] or "").removesuffix("/") if found else ""
        # The name becomes a path in the cache, which it must not leave.
        if found is None or ".." in found["repository"] or not _is_inside(path) or ".." in (found["revision"] or ""):
            raise SourceNotFoundError(f"Cannot read hf://{name}, expected {_FORM}")
        if (kind := name.partition("/")[0]) in _OTHER_TYPES:
            raise SourceNotFoundError(f"Cannot read hf://{name}, expected a model, {_FORM}, not one of the {kind}")
        return cls(found["repository"], found["revision"] and unquote(found["revision"]), path)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repository}{revision}{f'/{self.path}' if self.path else ''}"


def _is_inside(path: str) -> bool:
    return not path or all(part not in ("", ".", "..") and "\\" not in part for part in path.split("/"))


def snapshot_of(path: Path) -> tuple[Path, str | None]:
    """Return the snapshot to open for a repository's folder in the cache, with a note; any other path unchanged.

    Raises:
        SourceNotFoundError: When there are several snapshots, and none is the main branch's.
    """
    folder = path.parent if path.name == "snapshots" else path
    snapshots = folder / "snapshots"
    if not folder.name.startswith(_REPOSITORY) or not snapshots.is_dir():
        return path, None
    refs = _refs(folder / "refs")
    there = sorted(entry.name for entry in snapshots.iterdir() if entry.is_dir())
    if (main := refs.get("main")) in there:
        return snapshots / str(main), f"revision main of the cached repository, {main}"
    if len(there) == 1:
        return snapshots / there[0], f"the only cached revision of the repository, {there[0]}"
    if not there:
        raise SourceNotFoundError(
            f"Cannot open {path}: this folder of Hugging Face's cache has no snapshot. Download the model again"
        )
    names = {commit: name for name, commit in refs.items()}
    shown = [f"{commit} ({names[commit]})" if commit in names else commit for commit in there[:_SHOWN]]
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    raise SourceNotFoundError(
        f"Cannot choose a revision of {path}: it has {plural(len(there), 'snapshot')}, none of them of the branch "
        f"main. Open one of the folders in {snapshots}: {', '.join(shown)}{more}"
    )


def _refs(folder: Path) -> dict[str, str]:
    """Return the commits of branches and tags, whose names may have slashes."""
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1000)
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace").strip() for path in files}
