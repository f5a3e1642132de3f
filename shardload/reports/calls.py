"""The report of `shardload.fast`: one entry for each call that loaded something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardload.reports import printable
from shardload.reports.markup import ShownAsText
from shardload.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from shardload.reports import LoadReport


@dataclass(frozen=True, slots=True)
class CallReport(ShownAsText):
    """One call of ``from_preset``, ``load_model`` or ``load_weights`` that `shardload.fast` intercepted."""

    call: str
    """The call as it would be written in a program: ``GemmaCausalLM.from_preset('./gemma')``."""
    by: Literal["shardload", "keras"]
    """Who loaded the weights: shardload, or Keras itself where shardload could not (``why``)."""
    why: str | None
    """Why Keras loaded the weights instead of shardload, as text; ``None`` if shardload loaded them."""
    seconds: float
    """Wall-clock seconds of the whole call."""
    read_bytes: int | None
    """Bytes that shardload read; ``None`` if Keras did, which does not count them."""
    error: str | None = None
    """The error that the call raised, if any, as text."""
    load: LoadReport | None = field(default=None, repr=False)
    """The report of the load; ``None`` if Keras loaded the weights, or the call loads none (``load_weights=False``)."""

    def to_json(self) -> dict[str, Any]:
        """Return an object for `json.dumps`; ``load`` has the keys of a `LoadReport`."""
        names = ("call", "by", "why", "seconds", "read_bytes", "error")
        load = None if self.load is None else self.load.to_json()
        return {name: getattr(self, name) for name in names} | {"seconds": round(self.seconds, 6), "load": load}

    def __str__(self) -> str:
        size = "" if self.read_bytes is None else f", {format_bytes(self.read_bytes)}"
        lines = [f"{self.call}: {self.by}{size}, {format_seconds(self.seconds)}"]
        lines += [f"  because {self.why}"] if self.why else []
        lines += [f"  raised {self.error}"] if self.error else []
        return printable("\n".join(lines), keep="\n")


class FastReport(ShownAsText):
    """The calls that `shardload.fast` has handled so far; each call adds an entry when it ends."""

    def __init__(self) -> None:
        self._calls: list[CallReport] = []

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """The finished calls, in the order in which they ended."""
        return tuple(self._calls)

    def add(self, call: CallReport) -> None:
        """Add a finished call."""
        self._calls.append(call)

    def to_json(self) -> list[dict[str, Any]]:
        """Return a list for `json.dumps`, one object for each call."""
        return [call.to_json() for call in self.calls]

    def __iter__(self) -> Iterator[CallReport]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self._calls)

    # Without it, `__len__` would make an empty report false, and `if report:` mean something else.
    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls)) or "Nothing was loaded."

    def __repr__(self) -> str:
        ours = sum(call.by == "shardload" for call in self.calls)
        return f"<FastReport: {plural(len(self), 'call')}, {ours} by shardload; print it for all>"
