"""Errors are told by names that users can look up: those of `shardload.errors`, of Python and of other packages."""

import ast
import builtins
import importlib
from pathlib import Path

import pytest

import shardload
from shardload import errors
from shardload.console.failures import failure_of
from shardload.errors import ProcessFailedError, ShardloadError, public_name
from shardload.processes import error_word, from_elsewhere

PACKAGE = Path(shardload.__file__).parent
TREES = {path.relative_to(PACKAGE.parent): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def exceptions_of_the_package():
    """All classes of exceptions that modules of the package define, by the words of their class statements."""
    defined = [(path, node) for path, tree in TREES.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    ends = ("Error", "Exception", "Interrupt")
    named = [(path, node.name) for path, node in defined if any(ast.unparse(b).endswith(ends) for b in node.bases)]
    for path, name in named:
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        found = getattr(importlib.import_module(module), name)
        assert issubclass(found, BaseException)
        yield found


ALL = list(exceptions_of_the_package())
OURS = [found for found in ALL if issubclass(found, ShardloadError)]


def made(cls, text="What happened."):
    error = cls.__new__(cls, text)  # constructors of some classes take other arguments
    error.args = (text,)
    return error


def test_private_classes_are_among_those_tested():
    assert {cls.__name__ for cls in OURS} > {*errors.__all__} | {"ForbiddenError", "TakenError", "NoPlaceError"}
    assert len(ALL) > len(OURS)


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_an_error_of_shardload_is_told_by_its_closest_public_class(cls):
    name = public_name(made(cls))
    assert name in errors.__all__ and issubclass(cls, getattr(errors, name))
    assert cls.__name__ not in errors.__all__ or name == cls.__name__
    assert failure_of(made(cls)).kind == name
    assert made(cls)._render_traceback_()[-1].startswith(f"{name}: ")


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_another_process_raises_the_closest_public_class(cls):
    error = made(cls)
    error.problem, error.other_arguments, error.in_order = "What happened", False, True
    assert type(from_elsewhere(1, error_word(error), foreign=ProcessFailedError)).__name__ == public_name(error)


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls not in OURS], ids=lambda cls: cls.__name__)
def test_what_only_the_package_knows_is_told_by_its_builtin(cls):
    known = getattr(builtins, public_name(made(cls)))
    assert issubclass(cls, known)


@pytest.mark.parametrize("error", [KeyError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")])
def test_errors_of_others_keep_their_names(error):
    assert public_name(error) == type(error).__name__ == failure_of(error).kind


def test_a_class_of_a_user_is_told_by_the_public_class_that_it_extends():
    class OwnError(errors.MismatchError):
        pass

    assert public_name(OwnError("x")) == "MismatchError"


def names_of_errors(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.arg) and node.annotation and "Exception" in ast.unparse(node.annotation):
            yield node.arg


def test_messages_name_errors_by_public_name():
    found = []
    for path, tree in TREES.items():
        source = ast.unparse(tree)
        private = {f"type({name}).__name__" for name in names_of_errors(tree)} | {"__class__.__name__"}
        found += [(str(path), text) for text in private if text in source]
    assert not found
