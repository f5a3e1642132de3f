"""What the site shows of the Python API: `.ci/api_reference.py` makes links, and leaves out what users never write."""

from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def package():
    extensions = griffe.load_extensions(str(ROOT / ".ci/api_reference.py"))
    return griffe.load("shardload", search_paths=[str(ROOT)], extensions=extensions)


def test_a_name_in_a_docstring_is_a_link(package):
    text = package["loading.load_weights"].docstring.value
    assert "inside [`shardload.abstract`][shardload.abstract]" in text and "As for [`load`][shardload.load]" in text


def test_a_method_of_a_documented_class_is_a_link(package):
    text = package["following.follow"].docstring.value
    assert "[`Follower.update`][shardload.Follower.update]" in text


def test_an_alias_is_replaced_by_its_meaning_and_a_documented_one_stays(package):
    step, mesh = (package["restoring.restore"].parameters[name] for name in ("step", "mesh"))
    assert str(step.annotation) == "int | Literal['latest', 'best']" and str(mesh.annotation) == "MeshLike | None"


def test_a_constant_is_replaced_by_its_value(package):
    assert str(package["text.generation.generate"].parameters["max_new_tokens"].default) == "32"


def test_only_what_users_make_has_a_constructor(package):
    assert "__init__" not in package["reports.PlanReport"].members
    assert "__init__" in package["pipeline.stored_as.StoredAs"].members


def test_every_error_that_a_function_raises_is_a_link(package):
    raises = package["pipeline.arrays.load_arrays"].docstring.parse("google")[-1]
    assert raises.kind == griffe.DocstringSectionKind.raises
    assert {error.annotation.canonical_path.rpartition(".")[0] for error in raises.value} == {"shardload.errors"}


def test_a_default_is_what_users_would_write(package):
    assert str(package["pipeline.stored_as.StoredAs"].parameters["sizes"].default) == "dict()"
