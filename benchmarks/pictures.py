"""Draw the terminals of README and docs, as SVG, from runs of the commands that they show.

    python -m benchmarks.pictures [--folder docs/pictures]

Each command runs on this machine, with colours, in a window of 92 columns. What it prints is drawn by rich; the path of
the user's folder is shortened to ``~``, as shells do. A test compares the text of the pictures with that of the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 92
"""Of the terminal, in characters."""
COMMANDS: Mapping[str, str] = {
    "load": 'shardload load gemma3_270m --mesh 1x8 --prompt "The capital of France is"',
    "plan": "shardload plan gemma2_27b --mesh 4x8 --device-memory 16GiB",
}
"""Name of a picture → the command whose terminal it shows."""

_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="A terminal">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; \
line-height: {line_height}px }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich's own, which names a font on a network."""


def printed(command: str) -> str:
    """Run a command in a terminal of its own, and return what it prints to stdout, with the codes of its colours."""
    words = [sys.executable, "-m", *shlex.split(command)]
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    environment["TERM"] = "xterm-256color"
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with subprocess.Popen(words, env=environment, stdout=theirs, stderr=errors) as process:
            os.close(theirs)
            output = b"".join(_read(ours))
        os.close(ours)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{command} ended with exit code {process.returncode}:\n{errors.read()}")
    return output.decode("utf-8").replace("\r\n", "\n").replace(f"{Path.home()}/", "~/")


def _read(terminal: int) -> Iterator[bytes]:
    """Yield what arrives at a terminal until the process at its other end has closed it."""
    with contextlib.suppress(OSError):  # Linux: the other end was closed
        while part := os.read(terminal, 1 << 16):
            yield part


def terminal(command: str, output: str) -> str:
    """Return a picture of a terminal as SVG, in which ``command`` has printed ``output``."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, legacy_windows=False)
        console.print(Text(f"$ {command}", style="bold"))
        for line in output.rstrip("\n").split("\n"):
            text = Text.from_ansi(line)
            text.rstrip()
            for part in text.divide(range(COLUMNS, len(text), COLUMNS)):  # as terminals do
                console.print(part, no_wrap=True)
        return console.export_svg(title="", theme=MONOKAI, code_format=_FORMAT, unique_id="terminal")


def main() -> None:
    """Run the commands and draw their terminals."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    folder = parser.parse_args().folder
    for name, command in COMMANDS.items():
        drawn = terminal(command, printed(command))
        (folder / f"{name}.svg").write_text("\n".join(line.rstrip() for line in drawn.split("\n")), encoding="utf-8")


if __name__ == "__main__":
    main()
