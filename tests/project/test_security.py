"""What the pages about security say about code, held against the code of the package."""

import ast
import inspect
from pathlib import Path

import pytest

from shardload import loading

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "shardload").rglob("*.py"))
PROMISES = [(ROOT / page).read_text() for page in ("SECURITY.md", "docs/explanation/security.md")]
RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def called(tree):
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    yield from (call.id for call in calls if isinstance(call, ast.Name))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_runs_code_that_it_reads(path):
    tree = ast.parse(path.read_text())
    assert not RUNS_WHAT_IT_READS & set(imported(tree))
    assert not {"eval", "exec", "compile", "__import__"} & set(called(tree))
    assert "trust_remote_code" not in path.read_text() and "allow_pickle" not in path.read_text()


def test_safe_mode_is_on_unless_the_caller_turns_it_off():
    assert inspect.signature(loading.load).parameters["safe_mode"].default is True
    assert loading.LoadRequest(source="").safe_mode is True
    assert all("`safe_mode=True`" in page for page in PROMISES)


def test_the_pages_say_how_to_report_and_name_the_errors():
    summary, page = PROMISES
    assert "security/advisories/new" in summary and "SECURITY.md#report-a-vulnerability" in page
    for name in ("ShardloadError", "SourceError", "UnsafeSourceError"):
        assert name in summary and name in page


def test_the_page_has_the_words_that_people_search_for():
    page = PROMISES[1].lower()
    assert {
        word for word in ("malicious", "vulnerability", "untrusted", "security", "attacker") if word not in page
    } == set()
