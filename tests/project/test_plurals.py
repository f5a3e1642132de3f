"""A count in a message agrees with its noun: `units.plural` or `units.exact_bytes` writes it."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import shardload
from shardload.units import exact_bytes, parse_bytes, plural

ROOT = Path(shardload.__file__).parent
NOUNS = (
    "array|batche|bit|block|byte|character|checkpoint|chunk|collective|device|dim|element|entrie|epoch|example|expert|"
    "file|gradient|group|head|item|key|layer|layout|level|member|meshe|number|output|parameter|part|patche|position|"
    "preset|processe|row|shard|snapshot|step|string|tensor|token|value|variable|weight"
)
ADJECTIVES = "different |equal |global |local |missing |more |other |quantised |small |unfinished |unlisted "
COUNTED = re.compile(rf" (?:{ADJECTIVES})?(?:{NOUNS})s\b")
NO_COUNTS = {
    "console/jax_setup.py": ["found"],  # a platform
    "loaders/gguf/header.py": ["kind.name"],
    "loaders/gguf/rows.py": ["self.info.kind.name"],
    "mapping/layer_hooks.py": ["found"],  # a dtype
    "pipeline/array_targets.py": ["layout.parts", "tensor.dtype"],  # a tuple
    "synth/__init__.py": ["advice"],  # ends in "The"
    "sharding/layout.py": ["layout.parts"],
    "units.py": ["n"],  # exact_bytes itself
}
"""Expressions before such a word that are no counts."""


def fixed_plurals(source):
    """Yield the text of each expression in an f-string that a plural noun follows, whatever its value is."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr)]
    for value, then in [pair for node in strings for pair in itertools.pairwise(node.values)]:
        if not (isinstance(value, ast.FormattedValue) and isinstance(then, ast.Constant)):
            continue
        text = ast.unparse(value.value)
        is_number = value.conversion == -1 and not re.match(r"format_|plural\(|([a-z_]+\.)?[A-Z_]+$", text)
        if is_number and COUNTED.match(then.value):
            yield text


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_count_has_a_fixed_plural(path):
    no_counts = NO_COUNTS.get(str(path.relative_to(ROOT)), ())
    found = [text for text in fixed_plurals(path.read_text()) if text not in no_counts]
    assert not found, "write plural(n, 'noun'), or exact_bytes(n)"


def test_a_fixed_plural_is_found():
    assert list(fixed_plurals('f"{n} more files, {plural(n, 1)} files, {name!r} files, {MAX} files, {m:,} bytes"')) == [
        "n",
        "m",
    ]


@pytest.mark.parametrize(
    ("n", "noun", "text"),
    [
        (1, "batch", "1 batch"), (2, "batch", "2 batches"), (0, "entry", "0 entries"), (3, "key", "3 keys"),
        (2, "process", "2 processes"), (1234, "tensor", "1,234 tensors"),
    ],
)  # fmt: skip
def test_plural(n, noun, text):
    assert plural(n, noun) == text


def test_exact_bytes_can_be_given_as_a_budget():
    assert exact_bytes(1) == "1 byte"
    assert parse_bytes(exact_bytes(1048577).removesuffix("ytes")) == 1048577
