"""Whether shardload really says what pages quote, with ``…`` for names and numbers."""

import ast
import functools
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "shardload"
TEXTS = (ast.Constant, ast.JoinedStr, ast.BinOp)


def texts_in(node):
    """The texts that code makes, with ``…`` for what it inserts."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(texts_in, values))
        case ast.BinOp(left=left, right=right):
            return texts_in(left) + texts_in(right)
    return "…"


def pattern(quoted):
    """Matches texts that contain the parts of a message between ``…`` and numbers, in order."""
    parts = [re.escape(part.strip()) for part in re.split(r"…|\d+", quoted) if part.strip()]
    return re.compile(".*".join(parts), re.DOTALL)


@functools.cache
def made_in_modules():
    """Module → the texts that it makes, and the names that it uses, with the bases of its own classes."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        bases = {base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
        names = {node.id for node in [*nodes, *bases] if isinstance(node, ast.Name)}
        found[path] = {texts_in(node) for node in nodes if isinstance(node, TEXTS)}, names
    return found


def is_said(quoted):
    """Whether one text of the package contains the parts of a message between ``…`` and numbers, in order."""
    return any(pattern(quoted).search(text) for texts, _ in made_in_modules().values() for text in texts)


def classes_near(quoted):
    """The names that modules of shardload which make a message use."""
    found = made_in_modules().values()
    return {name for texts, names in found if any(map(pattern(quoted).search, texts)) for name in names}
