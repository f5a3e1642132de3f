"""Write a checkpoint to a bucket: make it in a local folder, upload its files, and last what makes it a checkpoint.

    staging disk/.staging/0-ab12cd34/step/model/…  ─►  s3://bucket/path/model/model-00001-of-00002.safetensors …
                                                   ─►  config.json, then the index

A reader never finds an index before its files. A long file is one object, which appears when all its parts are there.
If the upload fails or is interrupted, what was uploaded is deleted. A replaced checkpoint whose data are one object is
put back then; one of several objects was deleted before the upload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardload.converting.publishing import listed_shards
from shardload.errors import ShardloadError, TransferError, UsageError, WriteError
from shardload.interrupts import defer_interrupt
from shardload.loaders import recognise
from shardload.progress import Progress
from shardload.runs.digest_list import DIGESTS_FILE
from shardload.runs.publish import Root, Staging, remove_stale
from shardload.runs.remote_root import staging_disk
from shardload.runs.step import NAME
from shardload.stores.clients import Address
from shardload.stores.json_files import MAX_JSON_BYTES
from shardload.stores.objects import Version
from shardload.stores.remote import location_of
from shardload.stores.requests import Requests
from shardload.stores.uploads import Uploads

_LAST = (".json", "config.json", "model.safetensors.index.json", ".weights.json", DIGESTS_FILE)
"""Endings of the files that make others a checkpoint: they are uploaded last, in this order."""
_DESCRIPTION = ".json"
_MAX_DESCRIPTION_BYTES = 1 << 20
_GIVING_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A checkpoint to be uploaded."""

    url: str
    path: Path
    """Where to write it on this machine."""
    uploads: Uploads
    """Of the folder in which it is to be."""
    before: Mapping[str, int]
    """Name → size of what is in its place, and next to it under names that begin alike."""
    copied: Mapping[str, bytes]
    """Name → content of small files next to it, which were copied next to `path`, as they may describe a model."""

    shards: frozenset[str]
    """Names of the shards that the index in its place lists."""

    def upload(self, *, overwrite: bool, progress: Progress) -> None:
        """Upload what was written to `path` and next to it; delete what it replaces."""
        folder = self.path.parent
        found = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
        made = {n: p for n, p in found.items() if n not in self.copied or p.read_bytes() != self.copied[n]}
        replaced = sorted(made.keys() & self.before.keys())
        if replaced and not overwrite:
            raise _exists(self.uploads.shown(replaced[0]))
        gone = {n for n in self.before if n == self.path.name or n.startswith(f"{self.path.name}/")} - made.keys()
        gone |= (self.copied.keys() - found.keys()) | (self.shards & self.before.keys()) - made.keys()
        groups = [{n: p for n, p in made.items() if _rank(n) == rank} for rank in range(len(_LAST) + 1)]
        lists, data = ({n for n in (*replaced, *gone) if bool(_rank(n)) is ranked} for ranked in (True, False))
        # One object, which appears whole in place of the old one: until then, the old checkpoint can be had back.
        old = _Old.of(self.uploads, lists, data) if len(data) <= 1 and not data & gone else None
        progress.start(sum(p.stat().st_size for p in made.values()), f"Uploading {self.path.name}")
        begun: list[str] = []
        is_deleted = False
        try:
            # First, so that a new file is never taken for a part of the old checkpoint: what makes others a checkpoint,
            # and then these, as all shards of a folder are a checkpoint without an index, too.
            self.uploads.delete(lists)
            if old is None:
                self.uploads.delete(data)
                is_deleted = True
            for group in groups:
                begun += group
                self.uploads.put_files(group, advance=progress.advance)
            self.uploads.delete(gone)
        except BaseException as error:
            is_back = self._take_back(begun, old)
            state = f"Nothing is left at {self.url} of what was written."
            if lists or data:
                deleted = "was deleted before the upload" if is_deleted else "may lack files: it could not be put back"
                state += f" The old checkpoint {'is there again' if is_back else deleted}."
            error.add_note(state)
            raise
        finally:
            progress.stop()

    def _take_back(self, begun: Sequence[str], old: _Old | None) -> bool:
        """Delete what was uploaded; return whether the old checkpoint is there again."""
        with defer_interrupt(), suppress(ShardloadError):
            uploads = Uploads(self.uploads.url, most_s=_GIVING_UP_S)
            is_old = old is not None and old.has_its_data(uploads)
            kept = old.versions if old is not None and is_old else {}
            uploads.delete(sorted(set(begun) - kept.keys(), key=_rank, reverse=True))
            if old is not None and is_old:
                old.put_back(uploads)
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Old:
    """A checkpoint that is replaced: its object with data, if it has one, and what the others contain."""

    versions: Mapping[str, Version | None]
    contents: Mapping[str, bytes]

    @classmethod
    def of(cls, uploads: Uploads, lists: Iterable[str], data: Iterable[str]) -> _Old:
        """Read what is needed to put the checkpoint together again; `lists` are small."""
        read = {name: uploads.read(name) for name in sorted(lists)}
        versions = {name: Requests(uploads.url).version(name) for name in data}
        return cls(versions, {name: found[0] for name, found in read.items() if found is not None})

    def has_its_data(self, uploads: Uploads) -> bool:
        """Whether the object with data is still the same."""
        return all(Requests(uploads.url).version(name) == version for name, version in self.versions.items())

    def put_back(self, uploads: Uploads) -> None:
        """Upload the others again, the last ones last."""
        for name in sorted(self.contents, key=_rank):
            uploads.put(name, self.contents[name])


@contextmanager
def remote_target(url: str, *, overwrite: bool, progress: Progress) -> Iterator[RemoteTarget]:
    """Yield where to write a checkpoint on this machine, and upload it when the with block ends.

    Raise `WriteError` before that if the bucket cannot be written to, or the target exists and may not be replaced.
    """
    address = Address.parse(url)
    if not address.path:
        raise UsageError(f"Cannot write to {url}: it is a bucket. Give a name in it, such as {address.root}/model")
    above, _, name = address.path.rpartition("/")
    uploads = Uploads(f"{address.root}/{above}")
    uploads.check()
    before = _existing(uploads, name)
    _check_replaceable(uploads.shown(name), name, before, overwrite=overwrite)
    remove_stale(staging_disk())
    staging = Staging.begin(Root(staging_disk()), 0)  # locked while this process lives
    folder = staging.path
    folder.mkdir()
    try:
        copied = _copied(uploads, name, before, folder)
        shards = _shards(uploads, name, before, folder)
        target = RemoteTarget(uploads.shown(name), folder / name, uploads, before, copied, shards)
        try:
            yield target
        except BaseException as error:
            # They say how to continue in the folder, but it is removed: a conversion to a bucket starts again.
            error.__notes__ = []
            raise
        target.upload(overwrite=overwrite, progress=progress)
    finally:
        staging.discard()


def _existing(uploads: Uploads, name: str) -> dict[str, int]:
    """Return name → size of the objects of a target, and of those next to it whose names begin like its own."""
    stem = _stem(name)
    here = {n: size for n, size in uploads.entries().items() if size is not None and n.startswith(stem)}
    return here | {f"{name}/{n}": size for n, size in uploads.sizes(name).items()}


def _stem(name: str) -> str:
    return name.partition(".")[0] or name


def _check_replaceable(url: str, name: str, before: Mapping[str, int], *, overwrite: bool) -> None:
    inside = [n.removeprefix(f"{name}/") for n in before if n.startswith(f"{name}/")]
    if name not in before and not inside:
        return
    if not overwrite:
        raise _exists(url)
    found = location_of(url)
    try:
        assert found is not None
        recognise(found)
    except TransferError as error:
        raise WriteError(f"Cannot replace {url}: whether it is a checkpoint cannot be told. {error}") from error
    except ShardloadError:
        is_checkpoint = False
    else:
        is_checkpoint = not any(NAME.fullmatch(n.partition("/")[0]) and "/" in n for n in inside)
    if not is_checkpoint:
        raise WriteError(f"Cannot replace {url}: it is not a checkpoint. Remove it yourself, or choose another name")


def _copied(uploads: Uploads, name: str, before: Mapping[str, int], folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for other, size in before.items():
        if other == name or "/" in other or not other.endswith(_DESCRIPTION) or size > _MAX_DESCRIPTION_BYTES:
            continue
        if (read := uploads.read(other)) is not None:
            found[other] = read[0]
            (folder / other).write_bytes(read[0])
    return found


def _shards(uploads: Uploads, name: str, before: Mapping[str, int], folder: Path) -> frozenset[str]:
    """Return the names of the shards that the index in a target's place lists."""
    if not 0 < before.get(name, 0) <= MAX_JSON_BYTES or not name.endswith(_DESCRIPTION):
        return frozenset()
    found = uploads.read(name)
    index = folder / name
    index.write_bytes(b"" if found is None else found[0])
    try:
        return frozenset(listed_shards(index))
    finally:
        index.unlink()


def _rank(name: str) -> int:
    return max((number for number, ending in enumerate(_LAST, 1) if name.endswith(ending)), default=0)


def _exists(url: str) -> WriteError:
    return WriteError(f"{url} already exists. Replace it with overwrite=True (--overwrite), or choose another name")
