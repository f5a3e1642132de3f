"""Turn a failed save into an error that names the operating system's reason, found in nested exceptions.

TensorStore reports a full disk as `ValueError("RESOURCE_EXHAUSTED: … [os_error_code='28']")`; Orbax reports a removed
folder as `ValueError("No ArrayMetadata found …")`. Both give the reason as text only, which `errno_of` knows.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardload.errors import WAYS_OUT, SaveError, errno_of
from shardload.units import format_bytes

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


def save_error(
    cause: BaseException, *, step: int | str, folder: str | os.PathLike[str], needed_bytes: int | None = None
) -> SaveError:
    """Build the `SaveError` that names the underlying reason for ``cause``.

    Args:
        cause: The exception raised by the operating system, TensorStore or Orbax.
        step: The step that was being saved, for the message.
        folder: The folder being written; if it is gone, that is the reason for any error.
        needed_bytes: The size of the step's arrays, if known: what a full disk has no room for.
    """
    if isinstance(cause, SaveError):
        return cause
    number = errno_of(cause)
    reported = f"{type(cause).__name__}: {str(cause).rstrip('. ')}"
    room = f", for {format_bytes(needed_bytes)} of arrays" if needed_bytes and number in _ROOM else ""
    why = f"{os.strerror(number)}{room} ({reported})" if number else reported
    # Writers report a removed folder in many ways, often as an error of their own metadata.
    if not Path(folder).parent.exists() and number in (None, errno.ENOENT):
        number, why = errno.ENOENT, f"the folder {Path(folder).parent} was removed ({reported})"
    return describe(why, step=step, folder=folder, number=number)


def describe(
    why: str,
    *,
    step: int | str,
    folder: str | os.PathLike[str],
    number: int | None = None,
    advice: str | None = None,
    others: str = "Earlier steps are untouched",
) -> SaveError:
    """Build a `SaveError` with the standard wording.

    Args:
        why: What happened.
        step: The step that was being saved.
        folder: The destination.
        number: The operating system's `errno`, if there is one.
        advice: How to fix it; by default what helps with ``number``.
        others: A sentence about the steps saved earlier.
    """
    if advice is None and number is not None:
        advice = _ADVICE.get(number)
    fix = "" if advice is None else f". {advice}"
    made = SaveError(f"Cannot save step {step} to {os.fspath(folder)}: {why}{fix}. {others}")
    made.errno = number
    return made
