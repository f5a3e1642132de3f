"""Notes on the tensors that adapters of PEFT have in full, and that replace those of the base model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from shardload.loaders.peft import AdaptedNames, Weighted
from shardload.manifest import Manifest
from shardload.reports.facts import Note, NoteKind
from shardload.units import plural

_SHOWN = 5
"""Most names of tensors in a note."""


def replaced_notes(manifest: Manifest, adapters: Iterable[Weighted], *, lacked: Container[str] = ()) -> Iterator[str]:
    """Yield notes on the tensors that adapters, which are merged into ``manifest``, have in full (``modules_to_save``).

    ``lacked``: names of tensors that the model has no variables for, such as those of a task's head.
    """
    for one in adapters:
        where = one.adapter.location
        names = [name for name, _ in AdaptedNames(manifest, one).replaced()]
        lost = [name for name in names if name in lacked]
        if len(names) > len(lost):
            yield f"{plural(len(names) - len(lost), 'tensor')} replaced by those of the adapter {where}"
        if lost:
            shown = f"{', '.join(map(repr, lost[:_SHOWN]))}{' …' if len(lost) > _SHOWN else ''}"
            yield Note(
                f"{plural(len(lost), 'tensor')} that the adapter {where} trained {'are' if len(lost) > 1 else 'is'} "
                f"not loaded, because the model lacks this head: {shown}",
                NoteKind.HEAD_OF_ADAPTER,
            )
