"""Compare a step's folder name with the number in ``step.json``, which the digests protect: copies and renames differ.

9/shardload/step.json  {"step": 4, …}      step 4 in folder 9: refused, since it would pass for a newer step
final/                 {"step": 4, …}      a name that is not a number: accepted
9/                     {"epoch": 1, …}     no number stored: nothing to compare
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from shardload.errors import DamagedError, ShardloadError
from shardload.steps.digest_list import Damage
from shardload.steps.record import STEP_FILE, StepRecord
from shardload.stores.local import located
from shardload.stores.location import Location

NAME = re.compile(r"0|[1-9][0-9]{0,17}")
"""At most 18 digits, so that every number fits into 64 bits."""


def other_number(folder: str | os.PathLike[str] | Location) -> tuple[int, int] | None:
    """Return the numbers in the folder's name and in the step's record if they differ, else ``None``."""
    with suppress(ShardloadError, OSError):  # an unreadable record is reported as damage elsewhere
        where = located(folder)
        stated = StepRecord.read(where).step
        for name in (where.name, where.resolved().name):  # a link's name, then its target's
            if stated is not None and NAME.fullmatch(name) and int(name) != stated:
                return int(name), stated
    return None


def number_damage(folder: str | os.PathLike[str] | Location) -> list[Damage]:
    """Return the mismatch between folder name and stored number, if any: at most one item."""
    if (numbers := other_number(folder)) is None:
        return []
    return [Damage(STEP_FILE, f"{mismatch(numbers[1])}. {_advice(numbers[1])}", step=str(numbers[0]))]


def check_number(folder: str | os.PathLike[str] | Location) -> None:
    """Check that the name of a step's folder matches its stored number.

    Raises:
        DamagedError: If the folder was copied or renamed.
    """
    if (numbers := other_number(folder)) is not None:
        named, stated = numbers
        raise DamagedError(
            f"Cannot use {folder} as step {named}: it contains step {stated}, so the folder was "
            f"copied or renamed. {_advice(stated)}"
        )


def mismatch(stated: int) -> str:
    """Return a short description of the mismatch."""
    return f"contains step {stated}: copied or renamed"


def _advice(stated: int) -> str:
    return f"Rename it to {stated}; a copy needs a name that is not a number"
