"""The documentation site: every page is in its navigation, every public name in its reference."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

import shardload

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
API = sorted((DOCS / "reference" / "api").glob("*.md"))
DOCUMENTED = [name for page in API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
SECTIONS = {"tutorials": "Tutorials", "how-to": "How-to guides", "reference": "Reference", "design": "Explanation"}


def pages(nav):
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from pages(value) if isinstance(value, list) else [value]


def test_navigation_names_each_page_once():
    named = [page for page in pages(SITE["nav"]) if "://" not in page]
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_pages_are_in_the_section_of_their_folder():
    sections = {title: list(pages(entries)) for part in SITE["nav"][1:-1] for title, entries in part.items()}
    assert list(sections) == list(SECTIONS.values())
    for page in DOCS.rglob("*/*.md"):
        path = page.relative_to(DOCS)
        assert str(path) in sections[SECTIONS[path.parts[0]]]


def test_a_broken_link_fails_the_build_and_no_font_comes_from_a_network():
    assert SITE["strict"] is True
    assert SITE["theme"]["font"] is False


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_api_reference_names_what_is_there(name):
    parent, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(parent), attribute).__doc__


@pytest.mark.parametrize("name", sorted({*shardload.__all__} - {*shardload.errors.__all__}))
def test_every_public_name_is_in_the_api_reference(name):
    assert any(shown == f"shardload.{name}" or shown.startswith(f"shardload.{name}.") for shown in DOCUMENTED)
