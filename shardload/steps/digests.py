"""Digests of a step: one xxh3-64 per MiB of every file, so that every byte can be checked when it is read.

`Digests` is the list of digests (``shardload/digests.json``), written last and read first. `verify` reads a whole
step; a `Checker` checks only the MiB units that a partial read overlaps, each once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardload.errors import LimitError, ShardloadError, SourceNotFoundError, TransferError
from shardload.steps.checker import Checker, VerifyingStore
from shardload.steps.digest_list import (
    DIGESTS_FILE,
    OWN_FOLDER,
    THREADS,
    Damage,
    Digests,
    DigestTask,
    FileDigest,
    digest_piece,
    flip_damage,
    name_damage,
    pieces_of,
    step_name,
)
from shardload.steps.file_tree import scan
from shardload.steps.number import number_damage
from shardload.stores.local import located
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES

__all__ = ["DIGESTS_FILE", "OWN_FOLDER", "Checker", "Damage", "Digests", "verify"]


def verify(folder: str | os.PathLike[str] | Location, *, progress: Callable[[int], None] | None = None) -> list[Damage]:
    """Read a whole shardload step and return its damage; an empty list means that the step is intact.

    Args:
        folder: The step's folder.
        progress: Called in this thread with the number of bytes checked since the previous call.

    Raises:
        SourceNotFoundError: If the folder does not exist.
    """
    where = located(folder)
    if not where.is_folder():
        raise SourceNotFoundError(f"Cannot verify {where}: there is no such folder")
    step = step_name(where)
    try:
        digests = Digests.read(where)
        if isinstance(where.store, VerifyingStore):
            damage = where.store.name_damage()
        else:
            damage = name_damage(digests, scan(where.local_path()), step)
    # A store that does not respond says nothing about the step, nor does a limit of this process.
    except (TransferError, LimitError):
        raise
    except ShardloadError as error:
        return [Damage(DIGESTS_FILE, f"cannot be trusted: {error}", step=step)]
    except OSError as error:
        if limit := LimitError.explaining(error, f"read {where}"):
            raise limit from error
        return [Damage(str(error.filename), f"cannot be listed: {error.strerror}", step=step)]
    # A file of the wrong size would also fail its digests; one line for each file is enough.
    bad = {found.path for found in damage}
    pieces = [p for name, f in digests.files.items() if name not in bad for p in pieces_of(name, f.n_bytes)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="shardload-verify") as pool:
        results = pool.map(lambda p: _piece_damage(where, p, digests.files[p.path], step), pieces)
        for piece, found in zip(pieces, results, strict=True):
            damage += found
            if progress is not None:
                size = digests.files[piece.path].n_bytes
                progress(min(piece.count * UNIT_BYTES, size - piece.first * UNIT_BYTES))
    damage += number_damage(where)
    return sorted(damage, key=lambda d: (d.path, d.offset or 0))


def _piece_damage(folder: Location, piece: DigestTask, expected: FileDigest, step: str) -> list[Damage]:
    try:
        found = digest_piece(folder, piece, expected.n_bytes)
    except LimitError:
        raise
    except (ShardloadError, OSError) as error:
        if limit := LimitError.explaining(error, f"read {folder / piece.path}"):
            raise limit from error
        if isinstance(error, TransferError) and folder.store.is_remote:
            raise  # a store that does not respond says nothing about the step
        return [Damage(piece.path, f"cannot be read: {error}", piece.first * UNIT_BYTES, step)]
    wrong = [piece.first + k for k, unit in enumerate(found) if unit != expected.units[piece.first + k]]
    # Merge adjacent units: a lost block of 1 GiB is one line of the report, not 1024.
    runs: list[list[int]] = []
    for unit in wrong:
        if runs and runs[-1][1] == unit:
            runs[-1][1] = unit + 1
        else:
            runs.append([unit, unit + 1])
    size = expected.n_bytes
    return [flip_damage(piece.path, a * UNIT_BYTES, min(b * UNIT_BYTES, size), step) for a, b in runs]
