"""The table of what becomes of each folder: read from ``expected.toml``, written into the documentation.

    [llama]
    "untied" = {ours = "loads", kerashub = "equal"}
    "rope yarn" = {ours = "refused", says = "rope_parameters", because = "…", kerashub = "wrong"}

``says`` is a regular expression that the refusal matches; ``because`` is its reason in the reader's words. What loads
equals PyTorch within `running.TOLERANCE`, or ``within`` another bound, which ``because`` then explains. KerasHub's own
``from_preset`` gives ``equal`` numbers, ``wrong`` ones, or ``fails``; ``untried`` is not known.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

EXPECTED = Path(__file__).parent / "expected.toml"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "huggingface-folders.md"


@dataclass(frozen=True, slots=True)
class Expected:
    """What must become of one folder."""

    ours: str
    kerashub: str
    says: str = ""
    because: str = ""
    within: float = 0.0


def read() -> dict[str, Expected]:
    """By name of the case."""
    families = tomllib.loads(EXPECTED.read_text(encoding="utf-8"))
    return {f"{family}, {kind}": Expected(**row) for family, rows in families.items() for kind, row in rows.items()}


def page(text: str) -> str:
    """The documentation's page with fresh tables."""
    return _between(_between(text, "overview", overview()), "table", markdown())


def _between(text: str, mark: str, content: str) -> str:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def overview() -> str:
    """One row for each family, which leads to its table."""
    families: dict[str, list[Expected]] = {}
    expected = read()
    for name, found in expected.items():
        families.setdefault(name.partition(", ")[0], []).append(found)
    lines = ["| family | load | are refused |", "|---|---|---|"]
    for family, rows in families.items():
        loads = sum(row.ours == "loads" for row in rows)
        lines.append(f"| [`{family}`](#{family}) | {loads} | {len(rows) - loads} |")
    return "\n".join([_summary(expected), "", *lines])


def markdown() -> str:
    """A table for each family; its variants that share an outcome are one row."""
    families: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, found in read().items():
        family, _, variant = name.partition(", ")
        rows = families.setdefault(family, {})
        rows.setdefault((_outcome(found), KERASHUB[found.kerashub]), []).append(variant)
    lines: list[str] = []
    for family, rows in families.items():
        lines += [f"### {family}", "", "| variants | what happens |", "|---|---|"]
        lines += [f"| {'; '.join(names)} | {ours}<br>KerasHub: {theirs} |" for (ours, theirs), names in rows.items()]
        lines.append("")
    return "\n".join(lines[:-1])


KERASHUB = {"equal": "equal", "wrong": "**other numbers**", "fails": "fails", "untried": "not tried"}


def _outcome(found: Expected) -> str:
    if found.ours == "refused":
        return f"refused: {found.because}"
    return f"loads, within {found.within:g}: {found.because}" if found.within else "loads"


def _summary(expected: dict[str, Expected]) -> str:
    rows = expected.values()
    loads, refused = ([row for row in rows if row.ours == kind] for kind in ("loads", "refused"))
    count = {kind: sum(row.kerashub == kind for row in rows) for kind in KERASHUB}
    return (
        f"{len(expected)} folders: {len(loads)} load, {len(refused)} are refused. "
        f"Of the same folders, KerasHub itself loads {count['equal']} with PyTorch's numbers, "
        f"silently loads {count['wrong']} with other numbers, and fails on {count['fails']}."
    )
