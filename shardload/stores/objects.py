"""What is known of the objects of a store (its files): their sizes and versions, asked for or known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardload.stores.store import Kind


@dataclass(frozen=True, slots=True)
class Version:
    """Size and version of an object, as its store tells them."""

    size: int
    tag: str = ""
    """ETag without its quotes; empty if the store has none."""
    changed_s: float = 0.0
    """When the object was last written, in seconds since 1970; 0 if the store does not say."""

    @classmethod
    def of(cls, meta: Any) -> Version:
        """Return what obstore's description of an object says."""
        return cls(meta["size"], (meta.get("e_tag") or "").strip('"'), meta["last_modified"].timestamp() // 1)

    def differs(self, other: Version) -> bool:
        """Whether two answers were certainly given for different versions."""
        if self.size != other.size:
            return True
        if self.tag and other.tag:
            return self.tag != other.tag
        return bool(self.changed_s and other.changed_s and self.changed_s != other.changed_s)

    @property
    def number(self) -> int:
        """A number that differs between versions."""
        return int.from_bytes(f"{self.tag or self.changed_s}".encode(), "big")


@dataclass(frozen=True, slots=True)
class KnownObjects:
    """What is known of the objects at an address that names one version of them, such as a commit."""

    sizes: Mapping[str, int]
    """Name → size in bytes of all objects."""
    sha256: Mapping[str, str]
    """Name → digest of objects for which one is known."""
    address_of: Callable[[str], str | None]
    """Returns where the server redirects requests for an object to; ``None`` if it sends the object itself."""

    def inside(self, folder: str, *, whole: bool) -> dict[str, Version | None]:
        """Return name → version of all objects below a folder, or of what is directly in it: ``None`` for a folder."""
        prefix = f"{folder}/" if folder else ""
        below = {name[len(prefix) :]: Version(size) for name, size in self.sizes.items() if name.startswith(prefix)}
        if whole:
            return dict(below)
        return {name.partition("/")[0]: None if "/" in name else found for name, found in below.items()}


@dataclass(frozen=True, slots=True)
class ListedFolder:
    """What is known about the content of a folder."""

    kinds: dict[str, Kind]
    is_complete: bool
    """Whether these are all its names. Otherwise there may be others: an HTTP server was asked for usual names."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a store has told one process, so that others need not ask: which objects it has, and what is in folders."""

    versions: dict[str, Version | None] = field(default_factory=dict)
    """Name → size and version of an object that was asked for; ``None`` if there is none."""
    folders: dict[str, ListedFolder | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the facts as values that JSON has; see `of`."""
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> StoreFacts:
        """Return the facts that `as_json` has written."""
        return cls(
            {key: None if one is None else Version(**one) for key, one in found["versions"].items()},
            {key: None if one is None else ListedFolder(**one) for key, one in found["folders"].items()},
        )


class NameTree:
    """Files and folders of a remote store, found from the files' names, as a store lists only files, no folders."""

    def __init__(self, files: Collection[str]) -> None:
        self.kinds: dict[str, Kind] = {"": "folder"}
        for name in files:
            parts = name.split("/")[:-1]
            self.kinds |= dict.fromkeys(("/".join(parts[:n]) for n in range(1, len(parts) + 1)), "folder")
        self.kinds |= dict.fromkeys(files, "file")

    def names(self, folder: str) -> list[str] | None:
        """Return the names of files and folders directly in a folder, sorted; ``None`` if there is no such folder."""
        if self.kinds.get(folder) != "folder":
            return None
        prefix = f"{folder}/" if folder else ""
        inside = (name.removeprefix(prefix) for name in self.kinds if name.startswith(prefix) and name != folder)
        return sorted(name for name in inside if "/" not in name)
