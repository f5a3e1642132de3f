"""The only module that saves with Orbax: it starts to write named items to a folder, waits, and raises errors.

Orbax writes to ``path + ".orbax-checkpoint-tmp"`` and renames that to ``path``. The path is inside a staging folder, so
no such name appears among the steps. By default, arrays are not compressed: chunks are then read without decoding.

During a save, and for `STRAGGLERS_S` after a failed one, what Orbax and TensorStore print about failures is suppressed,
so that shardload's own error stays visible. At other times it is shown, as it concerns other users of Orbax. Python's
warnings of Orbax coroutines that were "never awaited" are suppressed from the first failure on.

A conversion needs files without values: Orbax saves arrays of one element, whose metadata then get the real shapes::

    pytree/trainable_variables.dense.kernel/zarr.json     shape, chunk shape, codec: bytes
                                            c/0/0  c/1/0  rows [0, n), rows [n, 2n): raw, the last one padded

All other files are as Orbax wrote them, so Orbax can read the result. Arrays are cut into chunks along dim 0 only, so
each chunk is one run of the array's elements.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from shardload.errors import WAYS_OUT, SaveError, UnsupportedError, UsageError, errno_of, public_name
from shardload.loaders.file_pieces import FilePiece, TensorPlace, Wanted
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.loaders.orbax.ocdbt import BACKSLASH
from shardload.stores.local import temporary_folder
from shardload.units import format_bytes

OWN_ITEM = {OWN_FOLDER: {"format": "1"}}
"""Item (named part of a save) in the folder ``shardload/``: plain Orbax takes every folder in a step for an item, and
cannot load the step if one is none. It contains only a text, written as JSON: for a pytree, Orbax would make a store
for arrays, and warn that the store is empty."""

COMPRESSED_CHUNK_BYTES = 4 << 20
"""Bytes per compressed chunk: few, because each process that restores a part of a chunk must decode all of it."""
_PATTERNS = set("[]*?\\")
_DEFAULT_TIMEOUT_S = 1200
"""Default time limit for a save, in seconds: 20 minutes, as in Orbax."""
STRAGGLERS_S = 30.0
"""Seconds after a failed save for which late messages from threads of Orbax and TensorStore are still suppressed."""
_LEFT_BEHIND = r"coroutine '(.*\._background_save|async_serialize\w*\..*)' was never awaited"
"""Matches Python's warnings about coroutines of Orbax that never ran, because their save failed before."""
_ADVICE = {
    **WAYS_OUT,
    errno.ENOSPC: "Free some room, or keep fewer steps (max_to_keep)",
    errno.EDQUOT: "Free some room, or keep fewer steps (max_to_keep)",
    errno.EACCES: "Grant this user write access, or save elsewhere",
    errno.EPERM: "Grant this user write access, or save elsewhere",
    errno.EXDEV: "Steps are renamed into place, so .staging must be on the same file system as its parent folder",
    errno.EROFS: "Save to a disk that can be written",
    errno.ENOENT: "Something removed it while the step was being written; find out what before saving again",
}
_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OBJECT_BYTES = 64 << 20
"""About how long a file becomes that is to be uploaded, in bytes."""
CHUNK_BYTES = 64 << 20
"""Bytes per uncompressed chunk: few enough to read little more than a wanted slice, enough to make few files."""
_ITEM = "pytree"


class PendingSave:
    """A save in the background: threads of Orbax write the files while training goes on."""

    def __init__(
        self,
        response: Any,
        *,
        path: Path,
        step: int | str,
        parent: os.stat_result,
        ended: ExitStack | None = None,
        n_bytes: int | None = None,
        shown: Path | str | None = None,
    ) -> None:
        self.path = path
        self._shown = shown or path
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
        """Wait until the save is complete. Raise its error if it failed, or a `TimeoutError` while it still goes on."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"Step {self._step} is still being written to {self.path} after {timeout_s} s")
        if self._error is not None:
            raise save_error(
                self._error, step=self._step, folder=self._shown, needed_bytes=self._n_bytes
            ) from self._error
        if not self.path.is_dir():
            raise failed_save("the folder is gone after Orbax wrote it", step=self._step, folder=self._shown)
        # Orbax recreates missing parents and reports success, so compare with the folder seen before the save.
        if not os.path.samestat(self._parent, self.path.parent.stat()):
            why = f"the folder {self.path.parent} was removed while it was written"
            raise failed_save(why, step=self._step, folder=self._shown, number=errno.ENOENT)

    def _wait(self, response: Any) -> None:
        try:
            response.result()
        except BaseException as error:
            self._error = error
        finally:
            save_ended(failed=self._error is not None)
            self._ended.close()
            self._done.set()


def import_orbax() -> None:
    """Import Orbax ahead of time, as the first save would otherwise delay training by about a second."""
    from orbax.checkpoint import v1  # noqa: F401


def start_save(
    path: str | Path,
    items: Mapping[str, Any],
    *,
    compression: Literal["none", "zstd"] = "none",
    step: int | str | None = None,
    timeout_s: float | None = None,
    is_shared: bool = True,
    shown: Path | str | None = None,
) -> PendingSave:
    """Start to write ``items`` with Orbax; return once every array is copied off the devices.

    With `jax.distributed`, every process must call this with the same path and items. The path is absolute, does not
    exist, and is in an existing folder. ``items`` maps names to pytrees of arrays, dicts of strings, or objects with a
    handler of their own. The name ``shardload`` is reserved for the folder of shardload's own files. ``step`` is only
    named in errors; ``timeout_s`` limits how long Orbax itself may take. Unless the folder ``is_shared``, each process
    writes its own part to a folder of its own, in files of bounded size, to be uploaded and joined. Errors call the
    folder ``shown``, by default its path.
    """
    target = Path(path)
    step, shown = "?" if step is None else step, shown or target
    if not target.is_absolute():
        raise UsageError(f"Cannot save to {path}: Orbax needs an absolute path. Use Path(...).absolute()")
    if compression not in ("none", "zstd"):
        raise UsageError(f"Cannot save with compression={compression!r}: expected 'none' or 'zstd'")
    if OWN_FOLDER in items:
        raise UsageError(f"Cannot name a checkpointable {OWN_FOLDER!r}: shardload stores its own files there")
    if os.path.lexists(target):
        raise failed_save("the path already exists", step=step, folder=shown, number=errno.EEXIST)
    why = ""
    if "\\" in str(target.parent):
        why = BACKSLASH
    elif (found := _PATTERNS & set(str(target.parent))) and (jax := sys.modules.get("jax")) and jax.process_count() > 1:
        why = f"Orbax takes {' '.join(sorted(found))} in its path for a pattern, if several processes write to it"
    if why:
        raise failed_save(why, step=step, folder=shown, advice="Choose another name for the folder")
    # Orbax would silently create the folder and hide that it was removed.
    if not target.parent.is_dir():
        raise failed_save(
            f"there is no folder {target.parent} to write into",
            step=step,
            folder=shown,
            number=errno.ENOENT,
            advice="Create it first",
        )
    n_bytes = _bytes_of(items)
    try:
        parent = target.parent.stat()
        with ExitStack() as opened:
            named = opened.enter_context(_named_for_orbax(target))
            response = _start(named, items, compression, timeout_s, is_shared=is_shared)
            ended = opened.pop_all()  # the name is needed as long as Orbax writes
        return PendingSave(response, path=target, step=step, parent=parent, ended=ended, n_bytes=n_bytes, shown=shown)
    except SaveError:
        raise
    except (OSError, ValueError) as error:
        raise save_error(error, step=step, folder=shown, needed_bytes=n_bytes) from error
    except KeyError as error:  # no handler of Orbax accepts the item
        raise UsageError(
            "Cannot save an item that Orbax has no handler for. Expected a pytree of arrays, a dict of text, or an "
            f"object with its own handler: {error.args[0] if error.args else error}"
        ) from error


@contextmanager
def _named_for_orbax(target: Path) -> Iterator[Path]:
    """Yield a path to the target that Orbax 0.12 does not take for a glob pattern; it may lead through a link.

    Orbax finds the files of its processes by ``glob``. In ``run[lr=0.1]`` it would find none, and leave all arrays out.
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
    """Return the total bytes of all arrays in nested dicts, lists and tuples, for the error on a full disk."""
    if isinstance(items, Mapping):
        return sum(map(_bytes_of, items.values()))
    if isinstance(items, list | tuple):
        return sum(map(_bytes_of, items))
    return int(getattr(items, "nbytes", 0))


def _start(
    target: Path, items: Mapping[str, Any], compression: str, timeout_s: float | None, *, is_shared: bool
) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = _context(ocdbt=True)
    context.array.saving.use_compression = compression == "zstd"
    if not is_shared:
        # Objects that one request uploads: an upload in parts leaves parts in the bucket when the process is killed.
        context.array.saving.ocdbt_target_data_file_size = OBJECT_BYTES
        context.array.saving.storage_options.chunk_byte_size = OBJECT_BYTES // 2
        _set_alone(context)
    if compression == "zstd":
        context.array.saving.storage_options.chunk_byte_size = COMPRESSED_CHUNK_BYTES
    # Create folders synchronously: if that fails in the background, threads of Orbax wait for the folders until the
    # timeout and delay the exit of the process.
    context.asynchronous.create_directories_asynchronously = False
    # Orbax takes whole seconds, and half a second must not become 0.
    context.asynchronous.timeout_secs = math.ceil(timeout_s or _DEFAULT_TIMEOUT_S)
    save_began()
    try:
        with context:
            return ocp.save_checkpointables_async(str(target), {**items, **OWN_ITEM})
    except BaseException:
        save_ended(failed=True)
        raise


def _set_alone(context: Any) -> None:
    """Make this process write its shards as if it were the only one, to be joined with those of the others.

    Without OCDBT, whose databases would have to be merged on one disk: each chunk is a file, and no file of two
    processes has the same name with another content.
    """
    import jax

    if jax.process_count() == 1:
        return
    context.array.saving.use_ocdbt = False
    context.array.saving.array_metadata_store = None  # it would miss the lists of the others
    me = jax.process_index()
    context.multiprocessing.primary_host = me
    context.multiprocessing.active_processes = {me}
    context.multiprocessing.barrier_sync_key_prefix = f"shardload-{me}"


def _context(*, ocdbt: bool) -> Any:
    """Return Orbax's settings for saving uncompressed: all arrays in few files if ``ocdbt``, else a folder for each."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = ocdbt
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    # True would let a program of XLA cut arrays that have replicas, and some XLA_FLAGS let it change the bits of a NaN.
    context.array.saving.use_replica_parallel = False
    # A copy of the global registry: other users of Orbax in this process must not get the handler added here.
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name=OWN_FOLDER)
    return context


def write_plain_arrays(path: str | Path, items: Mapping[str, Any], *, own: bool = True) -> None:
    """Write ``items`` with Orbax, uncompressed and without OCDBT: a folder per array. Return once all is written.

    ``own``: whether to make the folder of shardload's own files, too.
    """
    from orbax.checkpoint import v1 as ocp

    save_began()
    try:
        with _named_for_orbax(Path(path)) as named, _context(ocdbt=False):
            ocp.save_checkpointables(str(named), {**items, **(OWN_ITEM if own else {})})
    except BaseException as error:
        save_ended(failed=True)
        if isinstance(error, (OSError, ValueError)):
            raise save_error(error, step="?", folder=Path(path)) from error
        raise
    save_ended(failed=False)


_lock = threading.Lock()
_saving = 0
"""Number of saves in progress, during which Orbax's messages are suppressed; several threads may save."""
# Not 0: the monotonic clock may have started with the machine, less than STRAGGLERS_S ago.
_failed_at = -STRAGGLERS_S
_installed = False


def save_began() -> None:
    """Record that a save begins: from now on, what Orbax prints about failures is suppressed."""
    global _saving  # noqa: PLW0603
    _install()
    with _lock:
        _saving += 1


def save_ended(*, failed: bool) -> None:
    """Record that a save ended. If it ``failed``, late messages about it are suppressed for `STRAGGLERS_S`."""
    global _saving, _failed_at  # noqa: PLW0603
    with _lock:
        _saving -= 1
        if failed:
            _failed_at = time.monotonic()
            # For good: some later garbage collection finds the coroutines, after an unknown time.
            warnings.filterwarnings("ignore", _LEFT_BEHIND, RuntimeWarning)


def is_saving() -> bool:
    """Whether Orbax still writes, or waits for other processes, for a save by shardload."""
    return _saving > 0


def is_from_save() -> bool:
    """Whether a save by shardload is in progress, or failed less than `STRAGGLERS_S` ago."""
    return _saving > 0 or time.monotonic() < _failed_at + STRAGGLERS_S


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether to show a log record: false for Orbax's errors in saves by shardload, and its warning of empty items."""
    if "Skipping merge of OCDBT checkpoints: No per-process OCDBT" in record.getMessage():
        return False
    # By the path of the code, not by logger: absl's logger is shared by all packages that use absl.
    return not (record.levelno >= logging.ERROR and "orbax" in record.pathname and is_from_save())


def is_late_write(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether an error is only TensorStore's report that a write finished after Orbax had closed the event loop."""
    return (
        # The write is reported by a C++ thread, so the outermost frame is the asyncio function that it calls.
        isinstance(error, RuntimeError)
        and str(error) == "Event loop is closed"
        and trace is not None
        and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        and trace.tb_frame.f_globals.get("__name__") == "asyncio.base_events"
    )


def _install() -> None:
    """Install, once per process, filters that suppress what Orbax logs and prints when a save by shardload fails."""
    global _installed  # noqa: PLW0603
    with _lock:
        if _installed:
            return
        _installed = True
    logging.getLogger("absl").addFilter(is_worth_logging)
    print_error, print_unraisable = sys.excepthook, sys.unraisablehook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (is_late_write(error, trace) and is_from_save()):
            print_error(kind, error, trace)

    def on_unraisable(what: Any) -> None:
        if not (is_late_write(what.exc_value, what.exc_traceback) and is_from_save()):
            print_unraisable(what)

    sys.excepthook, sys.unraisablehook = on_error, on_unraisable


def save_error(
    cause: BaseException, *, step: int | str, folder: str | os.PathLike[str], needed_bytes: int | None = None
) -> SaveError:
    """Build the error for a failed save, with the reason in ``cause``. For a full disk, it states ``needed_bytes``."""
    if isinstance(cause, SaveError):
        return cause
    number = errno_of(cause)
    reported = f"{public_name(cause)}: {str(cause).rstrip('. ')}"
    room = f", for {format_bytes(needed_bytes)} of arrays" if needed_bytes and number in _ROOM else ""
    why = f"{os.strerror(number)}{room} ({reported})" if number else reported
    # Writers report a removed folder in many ways, often as an error of their own metadata.
    if isinstance(folder, Path) and not folder.parent.exists() and number in (None, errno.ENOENT):
        number, why = errno.ENOENT, f"the folder {Path(folder).parent} was removed ({reported})"
    return failed_save(why, step=step, folder=folder, number=number)


def failed_save(
    why: str,
    *,
    step: int | str,
    folder: str | os.PathLike[str],
    number: int | None = None,
    advice: str | None = None,
    others: str = "Earlier steps are untouched",
) -> SaveError:
    """Build the error for a failed save: ``why``, then ``advice`` (default: for errno ``number``), then ``others``."""
    if advice is None and number is not None:
        advice = _ADVICE.get(number)
    fix = "" if advice is None else f". {advice}"
    made = SaveError(f"Cannot save step {step} to {os.fspath(folder)}: {why}{fix}. {others}")
    made.errno = number
    return made


def write_skeleton(
    folder: Path, tensors: Sequence[Wanted], *, groups: Sequence[str], model_config: str, assets: Mapping[str, Any]
) -> tuple[TensorPlace, ...]:
    """Make an Orbax checkpoint without the values in a new folder; return where the values of each tensor belong.

    Tensors are named by the keys in the tree, joined by "/". ``groups`` are top-level keys, written even if empty.
    ``assets`` are files that layers save, as arrays of uint8 in nested dicts: the form that Keras' callback stores.
    """
    # Orbax writes one element per array, so that its files exist without the memory or the disk for real values.
    tree: dict[str, Any] = {group: {} for group in groups}
    # Nor does it write arrays without elements: a step's structure.json alone has them.
    for tensor in (tensor for tensor in tensors if tensor.size):
        *above, last = tensor.name.split("/")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        # Of the right rank, which other entries of zarr.json depend on: `_resize` replaces only sizes and codecs.
        place[last] = np.zeros((1,) * len(tensor.shape), tensor.dtype)
    items = {_ITEM: tree, "model_config": {"config": model_config}}
    write_plain_arrays(folder, items | ({"assets": assets} if assets else {}))
    return tuple(_resize(folder, t) if t.size else TensorPlace(t.name, ()) for t in tensors)


ORBAX_DTYPES = frozenset({
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz",
})  # fmt: skip
"""Names of the dtypes of arrays that TensorStore writes as zarr, and reads."""


def write_array_skeleton(folder: Path, tensors: Sequence[Wanted]) -> tuple[TensorPlace, ...]:
    """Make a pytree for Orbax, of nested dicts, without the values; return where the values of each tensor belong."""
    tree: dict[str, Any] = {}
    for tensor in tensors:
        *above, last = tensor.name.split("/")
        place = tree
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else {}
        if not isinstance(place, dict) or last in place:
            raise UnsupportedError(
                f"Cannot write tensor {tensor.name!r} to Orbax, which has a tree of names: another tensor has this "
                "name or is above it. Rename one with names="
            )
        if not tensor.size:
            raise UnsupportedError(
                f"Cannot write tensor {tensor.name!r} of shape {tensor.shape} to Orbax, which has no arrays without "
                "elements. Leave it out, or save as safetensors"
            )
        place[last] = np.zeros((1,) * len(tensor.shape), tensor.dtype)
    files = [tensor.name.replace("/", ".") for tensor in tensors]
    if len(set(files)) < len(files):
        raise UnsupportedError(
            "Cannot write these tensors to Orbax, which joins names by dots: two of them would have one name. Rename "
            "one with names="
        )
    import jax

    if jax.process_count() > 1:
        _write_in_another_process(folder, tensors)
    else:
        write_plain_arrays(folder, {_ITEM: tree}, own=False)
    return tuple(_resize(folder, tensor) for tensor in tensors)


_ALONE = """
import json, sys
from pathlib import Path
import jax
from shardload.loaders.file_pieces import Wanted
from shardload.loaders.orbax.saving import write_array_skeleton
tensors = [Wanted(name, tuple(shape), jax.numpy.dtype(dtype)) for name, shape, dtype in json.load(sys.stdin)]
write_array_skeleton(Path(sys.argv[1]), tensors)
"""


def _write_in_another_process(folder: Path, tensors: Sequence[Wanted]) -> None:
    """Make a pytree's files in a process that is no part of this run: Orbax would wait for all processes of the run."""
    wanted = json.dumps([(tensor.name, tensor.shape, tensor.dtype.name) for tensor in tensors])
    # The search path too, as a script may have changed it; no accelerator may be taken twice.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _ALONE, str(folder)]
    done = subprocess.run(command, input=wanted, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it ended without an error"])[-1]
        raise failed_save(f"the process that makes its files failed: {why}", step="?", folder=folder)


def _resize(folder: Path, tensor: Wanted) -> TensorPlace:
    # Orbax joins the keys of a path with dots, and zarr names the folder so.
    name = f"{_ITEM}/{tensor.name.replace('/', '.')}"
    description = folder / name / "zarr.json"
    found = json.loads(description.read_text(encoding="utf-8"))
    chunk = _chunk_shape(tensor)
    found["shape"] = list(tensor.shape)
    found["chunk_grid"]["configuration"]["chunk_shape"] = list(chunk)
    # Without compression, so that values can be copied to their place.
    found["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    description.write_text(json.dumps(found), encoding="utf-8")
    return TensorPlace(tensor.name, tuple(_pieces(folder, name, tensor, chunk)))


def _chunk_shape(tensor: Wanted) -> tuple[int, ...]:
    if not tensor.shape:
        return ()
    # Cut evenly: zarr stores the last chunk in full, so a short one would waste its padding. Zarr allows no size of 0.
    rows = tensor.shape[0]
    row_bytes = max(1, tensor.nbytes // max(1, rows))
    count = -(-rows * row_bytes // CHUNK_BYTES)
    return (max(1, -(-rows // max(1, count))), *(max(1, n) for n in tensor.shape[1:]))


def _pieces(folder: Path, name: str, tensor: Wanted, chunk: tuple[int, ...]) -> list[FilePiece]:
    count = math.prod(chunk)
    pieces = []
    for i, start in enumerate(range(0, tensor.size, count)):
        # Zarr 3's default key of chunk i along dim 0: c/i/0/0; of a scalar, c.
        cell = "/".join(["c", *([str(i)] + ["0"] * (len(chunk) - 1) if chunk else [])])
        path = folder / name / cell
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(count * tensor.dtype.itemsize)  # Zarr pads the last chunk to full size
        pieces.append(FilePiece(f"{name}/{cell}", 0, start, min(count, tensor.size - start)))
    return pieces
