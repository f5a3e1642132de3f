"""Whether what was printed is what a page shows.

python -m page_outputs PAGE

Runs the Python of a page, and compares what each block prints with the block below it.
"""

import contextlib
import difflib
import io
import re
import sys
from pathlib import Path

PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```(?:text|console)?\n(?!\$ )(.*?)^```$)?", re.DOTALL | re.MULTILINE)
"""A block of Python, and what it prints if a block with that is next."""

UNSTABLE = (
    (r"\d[\d.]* ?(µs|ms|s|min|h)\b(?!/)", "TIME"),
    (r"\d[\d.]*m?s/step", "TIME"),
    (r", TIME of them to prepare", ""),
    (r"\d[\d.]* [kMG]B/s", "RATE"),
    (r"\bPartitionSpec\(", "P("),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:?\d\d)?", "DATE"),
    (r"(?:/[\w.-]+)+/(?=\w)", "/"),
    (r"█+", "█"),
    (r"─+", "─"),
    (r" +", " "),
)
"""What differs between runs, and what replaces it: times (and whether most of one was to prepare), rates, dates,
how JAX writes a layout, the folders of a path, the lengths of bars, and the widths of columns."""
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


def run_page(page, text, names, *, unstable=None):
    """Run the Python of a page; with ``unstable``, what each block prints must be what the page shows."""
    for block in PYTHON.finditer(text):
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        if not (unstable and block[2]):
            exec(compile(code, page, "exec"), names)  # our own page
            continue
        with contextlib.redirect_stdout(io.StringIO()) as terminal:
            exec(compile(code, page, "exec"), names)
        sys.stdout.write(terminal.getvalue())
        lines = block[2].splitlines(), terminal.getvalue().splitlines()
        assert is_as_shown(*lines, unstable=unstable), f"{page}:\n{difference(*lines, unstable=unstable)}"
    return names


if __name__ == "__main__":
    run_page(sys.argv[1], Path(sys.argv[1]).read_text(), {}, unstable=UNSTABLE)
