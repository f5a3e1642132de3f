"""The only module that saves with Orbax: start writing named items to a folder, wait, raise the cause of a failure.

Orbax writes to ``path + ".orbax-checkpoint-tmp"`` and renames that to ``path``. The path is inside a staging
folder, so none of Orbax's names appears among the steps. By default, array data is not compressed:
each chunk is then a byte range of a file that loads without decoding.

Orbax treats every folder in a step as a checkpointable, and plain ``load_checkpointables(step)`` fails if one is not.
So the folder ``shardload/``, which later receives shardload's own files, is written as a tiny checkpointable.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from shardload.errors import SaveError, UsageError
from shardload.loaders.ocdbt import BACKSLASH
from shardload.steps import orbax_log_filter
from shardload.steps.digests import OWN_FOLDER
from shardload.steps.save_errors import describe, save_error
from shardload.stores.local import temporary_folder

OWN_ITEM = {OWN_FOLDER: {"format": "1"}}
"""The content that plain Orbax loads from ``shardload/``. Written as JSON: as a pytree, the default for strings, it
would get its own array store, and Orbax would warn at every save that the store is empty."""

COMPRESSED_CHUNK_BYTES = 4 << 20
"""A compressed chunk is decoded as a whole: a restore keeps it in memory, and each process that needs it decodes it."""
_PATTERNS = set("[]*?\\")
DEFAULT_TIMEOUT_S = 1200
"""Orbax's own default, 20 minutes per save."""


class PendingSave:
    """A save that runs in the background."""

    def __init__(
        self,
        response: Any,
        *,
        path: Path,
        step: int | str,
        parent: os.stat_result,
        ended: ExitStack | None = None,
        n_bytes: int | None = None,
    ) -> None:
        self.path = path
        self._n_bytes = n_bytes
        self._step = step
        self._parent = parent
        self._ended = ended or ExitStack()
        self._error: BaseException | None = None
        self._done = threading.Event()
        # Wait in a thread: Orbax calls back on success only, and its timeout looks like a failure.
        threading.Thread(target=self._wait, args=(response,), name="shardload-save", daemon=True).start()

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the save is complete.

        Args:
            timeout_s: The time to wait in seconds; ``None`` waits without limit.

        Raises:
            SaveError: If the save failed; the message gives the cause, and ``errno`` is set if there is one.
            TimeoutError: If the save is still running after ``timeout_s``; the call can be repeated.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"Step {self._step} is still being written to {self.path} after {timeout_s} s")
        if self._error is not None:
            raise save_error(
                self._error, step=self._step, folder=self.path, needed_bytes=self._n_bytes
            ) from self._error
        if not self.path.is_dir():
            raise describe("the folder is gone after Orbax wrote it", step=self._step, folder=self.path)
        # Orbax recreates missing parents and reports success, so compare with the folder seen before the save.
        if not os.path.samestat(self._parent, self.path.parent.stat()):
            why = f"the folder {self.path.parent} was removed while it was written"
            raise describe(why, step=self._step, folder=self.path, number=errno.ENOENT)

    def _wait(self, response: Any) -> None:
        try:
            response.result()
        except BaseException as error:
            self._error = error
        finally:
            orbax_log_filter.save_ended(failed=self._error is not None)
            self._ended.close()
            self._done.set()


def prepare() -> None:
    """Import Orbax, so that the first save does not delay training by about a second."""
    from orbax.checkpoint import v1  # noqa: F401


def start_save(
    path: str | Path,
    items: Mapping[str, Any],
    *,
    compression: Literal["none", "zstd"] = "none",
    step: int | str | None = None,
    timeout_s: float | None = None,
) -> PendingSave:
    """Start to write ``items`` with Orbax; return once every array is copied off the devices.

    With `jax.distributed`, every process must call this with the same path and items.

    Args:
        path: The folder to write: absolute, not existing yet, inside an existing folder.
        items: Checkpointables by name: pytrees of arrays, dicts of strings, or objects with their own handler.
            The name ``shardload`` is reserved: that folder is also created, for shardload's own files.
        compression: ``"zstd"`` for smaller files that take longer to write and read.
        step: The step's number, for error messages.
        timeout_s: The timeout of Orbax itself, in seconds.

    Raises:
        UsageError: If the path, a name or the compression is invalid.
        SaveError: If the save cannot be started.
    """
    target = Path(path)
    step = "?" if step is None else step
    if not target.is_absolute():
        raise UsageError(f"Cannot save to {path}: Orbax needs an absolute path. Use Path(...).absolute()")
    if compression not in ("none", "zstd"):
        raise UsageError(f"Cannot save with compression={compression!r}: expected 'none' or 'zstd'")
    if OWN_FOLDER in items:
        raise UsageError(f"Cannot name a checkpointable {OWN_FOLDER!r}: shardload stores its own files there")
    if os.path.lexists(target):
        raise describe("the path already exists", step=step, folder=target, number=errno.EEXIST)
    why = ""
    if "\\" in str(target.parent):
        why = BACKSLASH
    elif (found := _PATTERNS & set(str(target.parent))) and _are_several():
        why = f"Orbax takes {' '.join(sorted(found))} in its path for a pattern, if several processes write to it"
    if why:
        raise describe(why, step=step, folder=target, advice="Choose another name for the folder")
    # Orbax would silently create the folder and hide that it was removed.
    if not target.parent.is_dir():
        raise describe(
            f"there is no folder {target.parent} to write into",
            step=step,
            folder=target,
            number=errno.ENOENT,
            advice="Create it first",
        )
    n_bytes = _bytes_of(items)
    try:
        parent = target.parent.stat()
        with ExitStack() as opened:
            named = opened.enter_context(_named_for_orbax(target))
            response = _start(named, items, compression, timeout_s)
            ended = opened.pop_all()  # the name is needed as long as Orbax writes
        return PendingSave(response, path=target, step=step, parent=parent, ended=ended, n_bytes=n_bytes)
    except SaveError:
        raise
    except (OSError, ValueError) as error:
        raise save_error(error, step=step, folder=target, needed_bytes=n_bytes) from error
    except KeyError as error:  # no handler of Orbax accepts the item
        raise UsageError(
            "Cannot save an item that Orbax has no handler for. Expected a pytree of arrays, a dict of text, or an "
            f"object with its own handler: {error.args[0] if error.args else error}"
        ) from error


def _are_several() -> bool:
    jax = sys.modules.get("jax")  # this package imports none: Orbax does
    return jax is not None and jax.process_count() > 1


@contextmanager
def _named_for_orbax(target: Path) -> Iterator[Path]:
    """Yield a path of the target that Orbax 0.12 takes literally: a link to its folder where the name has patterns.

    Orbax lists the files of its processes by ``glob``, so it finds none in ``run[lr=0.1]`` and leaves all arrays out.
    TensorStore takes a backslash for a slash.
    """
    if not _PATTERNS & set(str(target.parent)):
        yield target
        return
    with temporary_folder() as folder:
        link = folder / "folder"
        link.symlink_to(target.parent, target_is_directory=True)
        yield link / target.name


def _bytes_of(items: Any) -> int:
    """Return the bytes of all arrays in nested containers."""
    if isinstance(items, Mapping):
        return sum(map(_bytes_of, items.values()))
    if isinstance(items, list | tuple):
        return sum(map(_bytes_of, items))
    return int(getattr(items, "nbytes", 0))


def _start(target: Path, items: Mapping[str, Any], compression: str, timeout_s: float | None) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = _context(ocdbt=True)
    context.array.saving.use_compression = compression == "zstd"
    if compression == "zstd":
        context.array.saving.storage_options.chunk_byte_size = COMPRESSED_CHUNK_BYTES
    # Create folders synchronously: if that fails in the background, threads of Orbax wait for the folders until the
    # timeout and delay the exit of the process.
    context.asynchronous.create_directories_asynchronously = False
    # Orbax takes whole seconds, and half a second must not become 0.
    context.asynchronous.timeout_secs = math.ceil(timeout_s or DEFAULT_TIMEOUT_S)
    orbax_log_filter.save_began()
    try:
        with context:
            return ocp.save_checkpointables_async(str(target), {**items, **OWN_ITEM})
    except BaseException:
        orbax_log_filter.save_ended(failed=True)
        raise


def _context(*, ocdbt: bool) -> Any:
    """Return the Orbax settings for writing, uncompressed."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = ocdbt
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    # A copy of the global registry: other users of Orbax in this process must not get the handler added here.
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name=OWN_FOLDER)
    return context


def write_plain_arrays(path: str | Path, items: Mapping[str, Any]) -> None:
    """Write ``items`` with one folder per array, uncompressed, and wait until all is written.

    Args:
        path: The folder to create: absolute, not existing yet.
        items: As for `start_save`.

    Raises:
        SaveError: If the folder cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    orbax_log_filter.save_began()
    try:
        with _named_for_orbax(Path(path)) as named, _context(ocdbt=False):
            ocp.save_checkpointables(str(named), {**items, **OWN_ITEM})
    except BaseException as error:
        orbax_log_filter.save_ended(failed=True)
        if isinstance(error, (OSError, ValueError)):
            raise save_error(error, step="?", folder=Path(path)) from error
        raise
    orbax_log_filter.save_ended(failed=False)
