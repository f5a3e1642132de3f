"""What the documentation says is there: links, the public names, the make targets."""

import re
from pathlib import Path

import pytest

import shardload

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_links_to_the_repository_lead_somewhere():
    """Pages of the site link to files outside of docs/ by their address."""
    pages = "".join(page.read_text() for page in PAGES)
    paths = set(re.findall(r"shardload/shardload/(?:blob|tree)/main/([^)#\s]+)", pages))
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_readme_names_exactly_the_two_commands_that_set_themselves_up():
    targets = re.findall(r"^\$ make ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert targets == ["demo", "test"]


def test_readme_calls_only_what_is_public():
    called = set(re.findall(r"shardload\.(\w+)\(", (ROOT / "README.md").read_text()))
    assert called and called <= set(shardload.__all__)


def test_every_public_name_can_be_imported_and_is_documented():
    for name in shardload.__all__:
        assert getattr(shardload, name).__doc__, name


def test_ci_runs_the_front_door():
    assert "make check" in (ROOT / ".ci/run").read_text()
