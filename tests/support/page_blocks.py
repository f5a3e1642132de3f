"""Fenced blocks of README and docs, the commands in them, and the anchors of headings."""

import re
import textwrap
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
SHELLS = ("console", "bash", "")
"""Languages of blocks with commands; a block without one has commands if its lines begin with the program's name."""
LISTED = re.compile(r"^shardload \w+( [A-Z]+)*  +[a-z]")
"""A line of a list of commands, with what each does."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A command as a page shows it; ``output`` has the lines below it."""

    page: str
    line: str
    output: list[str] = field(default_factory=list)
    is_script: bool = False


def blocks():
    """Page, language and text of each fenced block."""
    for path in PAGES:
        for _, language, text in FENCE.findall(path.read_text()):
            yield str(path.relative_to(ROOT)), language, textwrap.dedent(text)


def slug(title):
    """The anchor of a heading, as Python-Markdown makes it, which is installed with the site's generator only."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors_of(page):
    """The anchors of a page: of its headings, and those that it names itself."""
    text = FENCE.sub("", page.read_text())
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {*map(slug, titles), *re.findall(r'<a id="([^"]+)"', text)}


def shown_commands():
    """All commands of all pages, in order."""
    return [one for page, language, text in blocks() if language in SHELLS for one in _commands(page, language, text)]


def _commands(page, language, text):
    lines = text.replace("\\\n", " ").splitlines()
    if language == "console":
        return _with_output(page, lines)
    is_script = "\n    " in text or text.startswith("#!") or "<<" in text
    words = [line for line in lines if line and not line.startswith("#")]
    if not language or is_script:
        words = [line for line in words if re.search(r"(^|[/ ])shardload \w", line) and not LISTED.match(line)]
        words = words if language else [line for line in words if re.match(r"(\w+=\S+ )*shardload ", line)]
    return [Shown(page, line.strip(), is_script=is_script) for line in words]


def _with_output(page, lines):
    found = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Shown(page, line[2:]))
        elif found:
            found[-1].output.append(line)
    return found
