"""What the documentation says is there: links, the public names, the make targets."""

import importlib
import re
from pathlib import Path

import pytest
import yaml
from package_edges import EDGES
from page_blocks import anchors_of

import shardload

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_sections_lead_to_their_headings(page):
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text())
    inside = [(page.parent / path if path else page, anchor) for path, anchor in links if "://" not in path]
    wrong = [f"{path.name}#{anchor}" for path, anchor in inside if anchor not in anchors_of(path)]
    assert wrong == []


def test_links_to_the_repository_lead_somewhere():
    """Pages of the site link to files outside of docs/ by their address."""
    pages = "".join(page.read_text() for page in PAGES)
    paths = set(re.findall(r"shardload/shardload/(?:blob|tree)/main/([^)#\s]+)", pages))
    assert paths and {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_readme_names_exactly_the_two_commands_that_set_themselves_up():
    assert re.findall(r"^\$ make ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE) == ["demo", "test"]


def test_readme_calls_only_what_is_public():
    called = set(re.findall(r"shardload\.(\w+)\(", (ROOT / "README.md").read_text()))
    assert called and called <= set(shardload.__all__)


def test_every_public_name_can_be_imported_and_is_documented():
    for name in shardload.__all__:
        assert getattr(shardload, name).__doc__, name


def test_ci_runs_the_front_door():
    assert "make check" in (ROOT / ".ci/run").read_text()


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_contributing_names_every_part_of_the_package():
    parts = {p.stem + "/" * p.is_dir() for p in (ROOT / "shardload").iterdir() if not p.name.startswith("_")}
    house = CONTRIBUTING.partition("## The layout of the house")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+/?)`", house)) >= parts - {"py"}


def test_packages_import_from_their_row_of_contributing_and_below():
    rows = re.findall(r"^\| (`.*?) \|", CONTRIBUTING, re.MULTILINE)
    row = {name: number for number, names in enumerate(rows) for name in re.findall(r"\w+", names)}
    assert [(a, b) for a, imported in EDGES.items() if a in row for b in imported if row[b] < row[a]] == []
    assert EDGES.keys() - row.keys() <= {"__main__"}


def test_files_that_contributing_names_exist():
    named = set(re.findall(r"`((?:shardload|tests|docs|loaders)/[\w/.*]+)`", CONTRIBUTING))
    named = {f"shardload/{name}" if name.startswith("loaders/") else name for name in named}
    assert len(named) > 10
    assert [name for name in sorted(named) if "NAME" not in name and not list(ROOT.glob(name))] == []


def test_identifiers_that_contributing_names_exist():
    code = "".join(path.read_text() for path in (ROOT / "shardload").rglob("*.py"))
    for name in ("BUILT_IN", "_own_roles", "SCHEMES", "client"):
        assert f"`{name}`" in CONTRIBUTING and re.search(rf"\b{re.escape(name)}\b", code)


def test_contributing_runs_make_targets_that_exist():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert set(" ".join(re.findall(r"make ([a-z -]+?)(?:`|  )", CONTRIBUTING)).split()) <= set(targets)


# ---- the site ------------------------------------------------------------------------------------


DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
API = sorted((DOCS / "reference" / "api").glob("*.md"))
DOCUMENTED = [name for page in API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
SECTIONS = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "performance": "Performance",
    "explanation": "Explanation",
    "design": "Design notes",
}


def path_in_docs(page):
    return str(page.relative_to(DOCS))


def pages(nav):
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from pages(value) if isinstance(value, list) else [value]


def test_navigation_names_each_page_once():
    named = [page for page in pages(SITE["nav"]) if "://" not in page]
    assert sorted(named) == sorted(map(path_in_docs, DOCS.rglob("*.md")))


def test_the_list_of_all_pages_has_each_page_once():
    """The readme leads to it, where there is no navigation. Of the design notes, it has the list."""
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "pages.md").read_text())
    others = {page for page in pages(SITE["nav"]) if not page.startswith(("design/", "https:"))}
    assert sorted(listed) == sorted({*others, "design/index.md"} - {"index.md", "pages.md"})


def test_pages_are_in_the_section_of_their_folder():
    parts = {title: entries for part in SITE["nav"] for title, entries in part.items()}
    sections = {title: list(pages(entries)) for title, entries in parts.items() if isinstance(entries, list)}
    assert list(sections) == ["Home", *SECTIONS.values()]
    for page in DOCS.rglob("*/*.md"):
        path = path_in_docs(page)
        assert path in sections[SECTIONS[path.partition("/")[0]]]


@pytest.mark.parametrize(
    "page", [page for page in DOCS.rglob("*.md") if page.parent != DOCS / "design"], ids=path_in_docs
)
def test_a_page_is_short_or_says_why_it_is_not(page):
    text = page.read_text()
    words = len(re.sub(r"^```.*?^```$|!\[[^]]*\]", "", text, flags=re.DOTALL | re.MULTILINE).split())
    explained = "This page is long because" in text[:1500]
    assert words <= 1500 or explained, f"{words} words: split the page"


def test_the_list_of_design_notes_has_each_once():
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "design" / "index.md").read_text())
    assert sorted(listed) == sorted(page.name for page in (DOCS / "design").glob("0*.md"))


def test_a_broken_link_fails_the_build_and_no_font_comes_from_a_network():
    assert SITE["strict"] is True and SITE["theme"]["font"] is False


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_api_reference_names_what_is_there(name):
    parent, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(parent), attribute)
    assert found.__doc__ or name.endswith("Like")  # the text of a type alias is for readers of the source and site


@pytest.mark.parametrize("name", sorted({*shardload.__all__} - {*shardload.errors.__all__}))
def test_every_public_name_is_in_the_api_reference(name):
    assert any(shown == f"shardload.{name}" or shown.startswith(f"shardload.{name}.") for shown in DOCUMENTED)


def test_the_glossary_is_alphabetic_and_short():
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", (DOCS / "reference" / "glossary.md").read_text(), re.MULTILINE)
    assert [word for word, _ in rows] == sorted((word for word, _ in rows), key=str.lower)
    plain = [re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", meaning) for _, meaning in rows]
    assert len(plain) > 40
    assert [meaning for meaning in plain if len(re.findall(r"[a-z)*]\.(?= |$)", meaning)) > 3] == []


def test_the_comparison_has_measured_numbers_and_commands_that_exist():
    text = (DOCS / "explanation" / "compared.md").read_text()
    measured = [
        DOCS / "performance.md",
        *(DOCS / "performance").glob("*.md"),
        DOCS / "reference/huggingface-folders.md",
    ]
    known = "".join(page.read_text() for page in measured)
    rows = [row.split("|")[2] for row in text.splitlines() if row.count("|") == 4 and "benchmarks." in row]
    numbers = {number for row in rows for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*[a-z])", row)}
    assert len(numbers) > 12
    assert [number for number in sorted(numbers) if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", known)] == []
    assert {
        name for name in re.findall(r"-m benchmarks\.(\w+)", text) if not (ROOT / "benchmarks" / f"{name}.py").exists()
    } == set()
