"""Files on this machine, read at positions: no function moves a file position, so threads can share a descriptor.

Opening a file raises a `SourceError` for every failure (the checkpoint is bad). After that, a failed read raises a
`TransferError` (the file changed, or the disk failed). Temporary copies of files are in private folders, which the
process removes when it ends, even if shardload ends it by ``os._exit``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardload.errors import (
    LimitError,
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UsageError,
    WriteError,
)
from shardload.stores.location import Location
from shardload.stores.store import FileIdentity, Kind, Store
from shardload.units import exact_bytes, plural

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/")
"""Matches the start of a URL, also after pathlib merged its slashes. A single letter is a drive of Windows, no URL."""
_FILE = "file://"
_BUCKETS = ("s3", "gs")
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand ``~`` and ``~user`` in a path; a path with an unknown user is returned unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def without_file_scheme(source: Any) -> Any:
    """Return the path of a URL ``file:///path``; anything else is returned unchanged."""
    return source[len(_FILE) :] if isinstance(source, str) and source[: len(_FILE)].lower() == _FILE else source


@contextlib.contextmanager
def temporary_folder(prefix: str = "shardload-") -> Iterator[Path]:
    """Yield a new folder for temporary files, which only this user can read and which is removed afterwards."""
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise WriteError(
            f"Cannot write temporary files: {error.strerror or error}. Set TMPDIR to a folder that can be written to"
        ) from error
    with made as name:
        yield Path(name)


def home() -> Path | None:
    """Return the user's home folder; ``None`` if neither HOME nor the system names one, as in many containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


@contextlib.contextmanager
def any_home() -> Iterator[None]:
    """Set HOME to the null device inside the with block if there is none: kagglehub cannot be imported without it."""
    if home() is not None:
        yield
        return
    os.environ["HOME"] = os.devnull
    try:
        yield
    finally:
        os.environ.pop("HOME", None)


def local_target(path: str | os.PathLike[str]) -> Path:
    """Return the path to which a user wants to write, with ``~`` expanded; raise if the user gave a URL."""
    text = os.fspath(path)
    if (scheme := _SCHEME.match(text)) is None:
        found = expanded(path)
        if text.startswith("~") and found == Path(path):
            raise UsageError(
                f"Cannot write to {text}: this system knows no home folder {found.parts[0]}. Write out its path. (For "
                f"a file or folder with such a name, ./{text})"
            )
        return found
    if not isinstance(path, str) and "://" not in text:
        text = text.replace(":/", "://", 1)  # as it was before pathlib
    copy = "Leave out file://" if scheme[1] == "file" else "Write to a local folder, and copy it from there"
    if not isinstance(path, str) and scheme[1].lower() in _BUCKETS:
        copy = "Pass an address of a bucket as text, not as a path"
    raise UsageError(
        f"Cannot write to {text}: it is a URL ({scheme[1]}), expected a path on this machine. {copy}. "
        "(For a folder with such a name, write its absolute path)"
    )


def working_folder(target: Path) -> Path:
    """Return the folder, next to a conversion's target, in which the target is written until it is complete."""
    return target.with_name(f".{target.name}.converting")


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise an `OSError` if `replace_text` could not write a file: creates an empty file beside it, and removes it."""
    if (target := _replaceable(path)) is not None:
        with _draft_beside(target) as draft:
            draft.touch()


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in UTF-8, whole or not at all: until it is complete, and after an error, the old file is there.

    A link stays: the file that it leads to is replaced. A device or named pipe is written to.
    """
    # Names of files may have surrogates, which UTF-8 cannot encode.
    data = text.encode("utf-8", "backslashreplace")
    if (target := _replaceable(path)) is None:
        Path(path).write_bytes(data)
        return
    with _draft_beside(target) as draft:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            draft.chmod(stat.S_IMODE(target.stat().st_mode))
        draft.replace(target)


def _replaceable(path: str | os.PathLike[str]) -> Path | None:
    """Return a path without links; ``None`` if something other than a file has it; raise if the file is read-only."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        return target
    # A rename asks for no permission to write to the file that it replaces.
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return target if target.is_file() else None


@contextlib.contextmanager
def _draft_beside(target: Path) -> Iterator[Path]:
    """Yield the path of a new file in the target's folder, because a rename stays within one file system."""
    # Short, because the target's own name may be as long as names can be.
    draft = target.with_name(f".shardload-{secrets.token_hex(8)}.tmp")
    try:
        yield draft
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created
            draft.unlink()


def read_exact(fd: int, buffer: memoryview, offset: int, path: str) -> None:
    """Fill ``buffer`` with the bytes from ``offset`` on of the open file ``fd``; error messages call it ``path``."""
    # `cast` raises for a view with a zero in its shape.
    rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
    # A system call reads at most 2 GiB, and network file systems may return less.
    while rest:
        try:
            count = os.preadv(fd, [rest], offset)
        except OSError as error:
            raise TransferError(
                f"Cannot read {exact_bytes(len(rest))} at offset {offset} of {path}: {error}"
            ) from error
        if count == 0:
            raise TransferError(
                f"{path} ends at or before byte {offset}, expected {plural(len(rest), 'more byte')} there. "
                "The file shrank after its headers had been read; restore it and load again"
            )
        rest = rest[count:]
        offset += count


def open_readonly(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open a regular file for positional reads; the caller closes the descriptor. ``flags``: more flags of `os.open`.

    A file system that does not know ``O_DIRECT`` fails with an `OSError`, as it is.
    """
    try:
        # O_NONBLOCK: without it, opening a named pipe waits for a writer forever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            raise
        raise _open_error(path, error) from error
    except ValueError as error:
        raise SourceError(f"{os.fspath(path)!r} is not a file name: {error}") from error
    # Check the open file, not its name, which may have been given to another file since.
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file (a pipe, socket or device)"
        raise SourceError(f"{os.fspath(path)} should be a file, but it is {what}")
    return fd


def _open_error(path: str | os.PathLike[str], error: OSError) -> LimitError | SourceError | SourceNotFoundError:
    name = os.fspath(path)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        dangling = " (a symbolic link that points to nothing)" if Path(path).is_symlink() else ""
        return SourceNotFoundError(f"There is no file {name}{dangling}. Check the path, or download the file again")
    if limit := LimitError.explaining(error, f"open {name}"):
        return limit
    if error.errno in (errno.EACCES, errno.EPERM):
        return SourceError(f"{name} may not be read by this user: {error.strerror}. Try: chmod u+r {name!r}")
    return SourceError(f"{name} cannot be opened: {error.strerror}")


class LocalFile:
    """An open file on this machine. ``descriptor`` is that of a file that is open already, and is closed with it."""

    def __init__(
        self, path: str | os.PathLike[str], *, shown: str | None = None, descriptor: int | None = None
    ) -> None:
        self._name = os.fspath(path) if shown is None else shown
        self.descriptor = open_readonly(path) if descriptor is None else descriptor
        self.n_bytes = os.fstat(self.descriptor).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes that start at ``offset``; see `shardload.stores.store.File`."""
        read_exact(self.descriptor, buffer, offset, self._name)

    # Local files have no digests here: a training step's are compared by its checker.
    read_unchecked = read_into

    def close(self) -> None:
        """Close the descriptor; a second time does nothing, as its number may be another file's by then."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LocalStore(Store):
    """The file systems of this machine; keys are absolute paths."""

    def shown(self, key: str) -> str:
        """Return the path, which is the file's name in messages."""
        return key

    def kind(self, key: str) -> Kind | None:
        """Return whether a path is a file, a folder or something else; symbolic links are followed (`Store.kind`)."""
        try:
            mode = os.stat(key).st_mode  # noqa: PTH116
        except ValueError:
            # A NUL character: no file can have this name.
            return None
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise SourceError(
                f"Cannot open {key[:300]}: {error.strerror}. Check the path and its permissions"
            ) from error
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"

    def names(self, key: str) -> list[str]:
        """Return the names directly in a folder, sorted; see `Store.names`."""
        try:
            return sorted(os.listdir(key))  # noqa: PTH208
        except OSError as error:
            raise LimitError.explaining(error, f"list the folder {key}") or SourceError(
                f"Cannot list the folder {key}: {error.strerror}"
            ) from error

    def open(self, key: str) -> LocalFile:
        """Open a file of this machine for reading; see `Store.open`."""
        return LocalFile(key)

    def identity(self, key: str) -> FileIdentity:
        """Return a file's size and version; raise `OSError` if the file is gone. See `Store.identity`."""
        found = os.stat(key)  # noqa: PTH116
        return FileIdentity(found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns))

    def local_path(self, key: str) -> Path:
        """Return the key, which is the path, as a `Path`."""
        return Path(key)

    def is_link(self, key: str) -> bool:
        """Whether a path is a symbolic link."""
        return os.path.islink(key)  # noqa: PTH114

    def resolved(self, key: str) -> str:
        """Return the path with all symbolic links followed."""
        return os.path.realpath(key)


LOCAL = LocalStore()


def located(path: str | os.PathLike[str] | Location) -> Location:
    """Return the location of a local path; a location is returned unchanged."""
    return path if isinstance(path, Location) else Location(LOCAL, str(Path(path).absolute()))


_private_folders: dict[str, int] = {}
"""Each folder of `make_private_folder`, with an open descriptor of it, locked as long as this process lives."""
_COPIES = "shardload-copy-"
_LOCKED_AFTER_S = 60.0
"""Age in seconds at which a folder of a living process is locked for sure."""


def make_private_folder() -> Path:
    """Create an empty folder for copies of files, which only this user can read."""
    _remove_abandoned_folders()
    # `mkdtemp` gives the folder mode 0700.
    folder = os.path.realpath(tempfile.mkdtemp(prefix=_COPIES))
    _private_folders[folder] = fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_EX)
    return Path(folder)


@functools.cache
def _remove_abandoned_folders() -> None:
    """Remove private folders of processes that were killed: the system has unlocked these."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_COPIES}*"):
        with contextlib.suppress(OSError):  # of another user, or locked
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or time.time() - found.st_mtime < _LOCKED_AFTER_S:
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def remove_private_folder(folder: str | os.PathLike[str]) -> None:
    """Remove a folder that `make_private_folder` returned."""
    shutil.rmtree(folder, ignore_errors=True)
    if (fd := _private_folders.pop(os.fspath(folder), None)) is not None:
        os.close(fd)


def remove_private_folders() -> None:
    """Remove all folders of `make_private_folder`; for use before `os._exit`, which runs no cleanup functions."""
    # A copy, because `remove_private_folder` changes it.
    for folder in list(_private_folders):
        remove_private_folder(folder)


class PrivateCopies:
    """Copies of remote files in a private folder, which is made when it is needed and removed with this object."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._whole: set[str] = set()
        self.n_bytes = 0
        """Bytes written so far."""
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        """Whether there is a whole copy of this name."""
        return name in self._whole

    def path(self, name: str) -> Path:
        """Return the path that a copy has, or would have; ``name`` is relative, its parts joined by ``/``."""
        if not {"..", "."}.isdisjoint(name.split("/")) or "\0" in name:
            raise UnsafeSourceError(f"{name[:300]!r} is not a path inside a checkpoint")
        with self._lock:
            if self._folder is None:
                self._folder = make_private_folder()
                weakref.finalize(self, remove_private_folder, self._folder)
        return self._folder / name

    def write(self, name: str, data: bytes | memoryview, *, shown: str, offset: int | None = None) -> None:
        """Write a whole copy, or a part of one that begins at ``offset``; errors call the original ``shown``."""
        target = self.path(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("r+b" if target.exists() else "xb") as file:
                file.seek(offset or 0)
                file.write(data)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"Cannot copy {shown} into the temporary folder {self._folder}: {error}. Free some space, or set "
                "TMPDIR to another folder"
            ) from error
        self.n_bytes += len(data)
        if offset is None:
            self._whole.add(name)


class _PrivateCopy(LocalStore):
    """A store of one file that only this user can read, removed when this object is garbage-collected."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        folder = make_private_folder()
        self._remove = weakref.finalize(self, remove_private_folder, folder)
        self.path = folder / "copy"

    def shown(self, key: str) -> str:
        """Return the name of the file that was copied, for messages."""
        del key
        return self._shown

    def open(self, key: str) -> LocalFile:
        """Open the copy for reading; error messages name the file that was copied."""
        return LocalFile(key, shown=self._shown)


def write_private_copy(blocks: Iterable[bytes], *, n_bytes: int, shown: str) -> Location:
    """Write bytes to a temporary file that only this user can read; return its location. Messages call it ``shown``.

    The file is removed once nothing refers to the location, or if ``blocks`` raises an error, which passes through.
    """
    try:
        copy = _PrivateCopy(shown)
        free = shutil.disk_usage(copy.path.parent).free
        if n_bytes > free:
            raise _no_room(
                shown, f"{copy.path.parent.parent} has {exact_bytes(free)} free, expected {exact_bytes(n_bytes)}"
            )
        with copy.path.open("xb") as file:
            file.writelines(blocks)
    except ShardloadError:
        # Some of these are an OSError as well, and say more.
        raise
    except OSError as error:
        raise _no_room(shown, str(error)) from error
    return Location(copy, str(copy.path))


def _no_room(shown: str, found: str) -> WriteError:
    return WriteError(f"Cannot unpack {shown}: {found}. Set TMPDIR to a folder with more room")
