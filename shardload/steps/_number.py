"""A step's number is the one in ``step.json``, which the digests cover. A folder named otherwise was copied or renamed.

9/shardload/step.json  {"step": 4, …}      step 4 in a folder that says 9: refused, as it would pass for a new one
final/                 {"step": 4, …}      a name that is not a number claims nothing
9/                     {"epoch": 1, …}     no number stored: nothing to compare
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from shardload.errors import DamagedError, ShardloadError
from shardload.steps.digest_list import Damage
from shardload.steps.record import STEP_FILE, StepRecord

NAME = re.compile(r"0|[1-9][0-9]{0,17}")
"""At most 18 digits: any such number fits 64 bits."""


def other_number(folder: str | os.PathLike[str]) -> tuple[int, int] | None:
    """The number in the name of a step's folder and the one in its record, where they differ."""
    with suppress(ShardloadError, OSError):  # a record that cannot be read is reported as damage elsewhere
        stated = StepRecord.read(Path(folder)).step
        for name in (Path(folder).absolute().name, Path(folder).resolve().name):  # of a link, and of what it leads to
            if stated is not None and NAME.fullmatch(name) and int(name) != stated:
                return int(name), stated
    return None


def number_damage(folder: str | os.PathLike[str]) -> list[Damage]:
    """What is wrong with the name of a step's folder: at most one thing."""
    if (numbers := other_number(folder)) is None:
        return []
    return [Damage(STEP_FILE, f"{holds(numbers[1])}. {_way_out(numbers[1])}", step=str(numbers[0]))]


def check_number(folder: str | os.PathLike[str]) -> None:
    """Make sure that a step lies in the folder of its number.

    Raises:
        DamagedError: When the folder was copied or renamed.
    """
    if (numbers := other_number(folder)) is not None:
        named, stated = numbers
        raise DamagedError(
            f"Cannot use {os.fspath(folder)} as step {named}: it holds step {stated}, so the folder was "
            f"copied or renamed. {_way_out(stated)}"
        )


def holds(stated: int) -> str:
    """The finding in a few words."""
    return f"holds step {stated}: copied or renamed"


def _way_out(stated: int) -> str:
    return f"Rename it to {stated}; a copy needs a name that is not a number"
