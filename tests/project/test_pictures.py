"""The pictures of README and docs: each can be read in light and dark, without eyes, and is shown."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DRAWN = sorted(DOCS.rglob("*.svg"))
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


def shown():
    for page in PAGES:
        for alternative, target in SHOWN.findall(page.read_text()):
            yield page, alternative, (page.parent / target).resolve()


def test_every_picture_says_in_words_what_it_shows():
    assert [(page.name, file.name) for page, words, file in shown() if len(words.split()) < 4] == []


def test_every_picture_is_shown_somewhere():
    files = {file for _, _, file in shown()}
    assert [path.name for path in DRAWN if path.resolve() not in files] == []


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_has_a_name_and_asks_no_other_host(path):
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") or (root.findtext(f"{SVG}title") and root.findtext(f"{SVG}desc"))
    assert re.findall(r"(?:href|src|url)\W+https?:", text) == []


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_follows_the_colours_of_the_reader(path):
    """Terminals are dark in both."""
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text or 'aria-label="A terminal"' in text


def test_pictures_are_small():
    assert [
        path.name
        for path in DOCS.rglob("*.*")
        if path.suffix in {".png", ".webp", ".svg"} and path.stat().st_size > 1e5
    ] == []
