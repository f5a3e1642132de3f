"""Notes of a report that code acts on: what such a note says is its kind, and its words are for people.

Note("the step has no optimizer state; …", NoteKind.OPTIMIZER_UNCHANGED) ─► report.notes ─► of_kind(notes, …)
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

__all__ = ["Note", "NoteKind", "of_kind"]


class NoteKind(Enum):
    """What a note says."""

    OPTIMIZER_UNCHANGED = auto()
    """The step has no state for an optimizer that ``fit`` uses, so it stays as it is."""
    BATCHES_RECOUNTED = auto()
    """The count of batches was converted for another ``gradient_accumulation_steps``."""
    AVERAGES = auto()
    """Which of the two the weights are: moving averages (``use_ema``), or the weights in training."""
    ASSETS = auto()
    """What became of files that layers save (vocabularies), where they were not just loaded."""
    TENSOR_NOT_STORED = auto()
    """A converter asked for a tensor that the checkpoint does not have."""


class Note(str):
    """A note with its kind; most notes are plain strings, because no code asks what they say.

    Args:
        text: The sentence.
        kind: What it says.
    """

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind) -> Note:
        """Make a string that knows its kind."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, NoteKind]]:
        """Let copies and pickles keep the kind."""
        return Note, (str(self), self.kind)


def of_kind(notes: Iterable[str], kind: NoteKind) -> tuple[str, ...]:
    """Return the notes of one kind."""
    return tuple(note for note in notes if getattr(note, "kind", None) is kind)
