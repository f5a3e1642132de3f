"""Whether what was printed is what a page shows."""

import difflib
import re

UNSTABLE = (
    (r"\d[\d.]* ?(µs|ms|s|min|h)\b(?!/)", "TIME"),
    (r"\d[\d.]*m?s/step", "TIME"),
    (r", TIME of them to prepare", ""),
    (r"\d[\d.]* [kMG]B/s", "RATE"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:?\d\d)?", "DATE"),
    (r"(?:/[\w.-]+)+/(?=\w)", "/"),
    (r"█+", "█"),
    (r"─+", "─"),
    (r" +", " "),
)
"""What is another in each run, and what stands for it: times (and whether most of one was to prepare), rates, dates,
the folders of a path, the lengths of bars, and the widths of columns."""
NUMBERS = (
    *UNSTABLE[:4],
    (r"\d[\d.]* [KMGT]?i?B\b", "SIZE"),
    (r"-?\d[\d.,]*(e[+-]?\d+)?", "N"),
    (r" (best|-) +(?=not read)", " BEST "),
    *UNSTABLE[4:],
)
"""The same, all numbers, and which step is best: for a smaller model, or fewer batches, than those of the page."""


def is_as_shown(output, printed, *, unstable=UNSTABLE):
    """Whether the lines of a page are those that were printed; ``…`` is any text, alone on a line any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in _stable(output, unstable)
    )
    return bool(re.fullmatch(pattern, "".join(f"{line}\n" for line in _stable(printed, unstable))))


def difference(output, printed, *, unstable=UNSTABLE):
    """The lines of a page, and below them those that were printed, where they differ."""
    lines = (_stable(each, unstable) for each in (output, printed))
    return "\n".join(difflib.unified_diff(*lines, "the page", "printed", lineterm="", n=1))


def _stable(lines, unstable):
    """The lines between empty ones at the beginning and the end, with a name for what is unstable."""
    found = []
    for line in "\n".join(lines).strip("\n").split("\n"):
        stable = line
        for pattern, name in unstable:
            stable = re.sub(pattern, name, stable)
        found.append(stable.strip())
    return found
