"""JSON that nobody vouches for: what a valid document may look like."""

import codecs
import json

import pytest

from shardload.errors import UnsafeSourceError
from shardload.stores.json_files import parse_object, read_object


@pytest.mark.parametrize(
    "template", ["{" * 3000, "{%- for m in messages %}{{ m['role'] }}{% endfor %}" * 500, '\\"[' * 2000]
)
def test_brackets_in_texts_are_no_containers(template):
    document = {"chat_template": template, "layers": [1, 2]}
    assert parse_object(json.dumps(document).encode(), path="x") == document


def test_brackets_beside_texts_are(template="{" * 3000):
    raw = json.dumps({"chat_template": template, "layers": [[]] * 3000}, separators=(",", ":")).encode()
    with pytest.raises(UnsafeSourceError, match="3002 brackets and braces"):
        parse_object(raw, path="x")


@pytest.mark.parametrize("after", ["", "\n", " \r\n\t" * 5000])
@pytest.mark.parametrize("length", [10, 5000, 100_000])
def test_a_byte_order_mark_and_blanks_at_the_end(tmp_path, after, length):
    document = {"name": "x" * length}
    (tmp_path / "x.json").write_bytes(codecs.BOM_UTF8 + (json.dumps(document) + after).encode())
    assert read_object(tmp_path / "x.json") == document
