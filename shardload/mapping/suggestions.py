"""Suggest existing names for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 4


def nearest(wanted: str, known: Iterable[str]) -> str:
    """Suggest the most likely existing names: those with the same ending first, else some of them.

    Returns:
        ``" Closest are 'a', 'b'"``, ``" It has 'x', 'y', …"``, or an empty string if there are none.
    """
    names = sorted(set(known))
    ending = wanted.rsplit("/", 2)[-2:]
    close = [n for n in names if n.split("/")[-len(ending) :] == ending]
    close += [n for n in difflib.get_close_matches(wanted, names, n=SHOWN, cutoff=0.5) if n not in close]
    if close:
        return f". Closest {'is' if len(close) == 1 else 'are'} {', '.join(map(repr, close[:SHOWN]))}"
    more = ", …" if len(names) > SHOWN else ""
    return f". It has {', '.join(map(repr, names[:SHOWN]))}{more}" if names else ""
