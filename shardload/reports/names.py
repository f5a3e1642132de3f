"""Names as people read them: those that differ only in numbers on one line, and without control characters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TIMES = "×"  # noqa: RUF001 - the multiplication sign is meant
_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Folded:
    """Names that differ only in their numbers, shown as one line: ``decoder_block_*/attention/key/kernel  ×18``."""

    pattern: str
    """The name, with ``*`` where the names differ."""
    count: int

    def __str__(self) -> str:
        return self.pattern if self.count == 1 else f"{self.pattern} {TIMES}{self.count}"


def fold(names: Iterable[str]) -> tuple[Folded, ...]:
    """Group names that differ only in numbers, in order of first appearance; a number that all share is kept.

    decoder_block_0/attention/key/kernel
    decoder_block_1/attention/key/kernel      ─ fold ─►   decoder_block_*/attention/key/kernel  ×18
    …
    decoder_block_17/attention/key/kernel
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(without_numbers(name), []).append(name)
    folded = []
    for group in groups.values():
        # The group in `_NUMBERS` keeps the numbers in the split, so all names have as many parts.
        columns = zip(*(_NUMBERS.split(name) for name in group), strict=True)
        pattern = "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
        folded.append(Folded(printable(pattern), len(group)))
    return tuple(folded)


def without_numbers(text: str) -> str:
    """Return text with ``0`` for each number in it: equal for names that differ only in numbers."""
    return _NUMBERS.sub("0", text)


def printable(text: str, *, keep: str = "") -> str:
    r"""Return ``text``, such as untrusted names, with control characters as escapes (``\x1b``), except ``keep``."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters, with an ellipsis in place of the middle of a longer one."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
