"""Suggest existing names for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from shardload.errors import MismatchError
from shardload.manifest import Manifest

SHOWN = 4


def unknown_tensor(name: str, manifest: Manifest) -> MismatchError:
    """Build the error for a tensor in a caller's ``names`` that the checkpoint lacks."""
    return MismatchError(
        f"Cannot map tensor {name!r}: {manifest.source} does not contain it" + suggestion(name, manifest.tensors)
    )


def suggestion(wanted: str, known: Iterable[str]) -> str:
    """Suggest the most likely existing names: what is below the name, those with the same ending, else some of them.

    Returns:
        ``". Did you mean 'a' or 'b'?"``, ``". Available: 'x', 'y', …"``, or an empty string if there are none.
    """
    names = sorted(set(known))
    # A box of Flax (`kernel/value`): the tensors of other layers, whose names are like it, are others.
    if inside := [n for n in names if n.startswith((f"{wanted}/", f"{wanted}."))]:
        return f". Did you mean {' or '.join(map(repr, inside[:SHOWN]))}?"
    # The last two parts: the variable's name alone ("kernel") would match every layer.
    ending = wanted.rsplit("/", 2)[-2:]
    close = [n for n in names if n.split("/")[-len(ending) :] == ending]
    close += [n for n in difflib.get_close_matches(wanted, names, n=SHOWN, cutoff=0.5) if n not in close]
    if close:
        return f". Did you mean {' or '.join(map(repr, close[:SHOWN]))}?"
    more = ", …" if len(names) > SHOWN else ""
    return f". Available: {', '.join(map(repr, names[:SHOWN]))}{more}" if names else ""
