"""The table of families in the docs is made from their declarations: ``python tests/project/test_family_table.py``."""

import re
import sys
from pathlib import Path

from shardload.families import Part
from shardload.families.registry import families

PAGE = Path(__file__).parents[2] / "docs/reference/names.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
HEADS = "family", "`model_type`", "written for Hugging Face", "GGUF architecture", "adapters of PEFT", "sizes"


def declared(family, model_type, part):
    """The names that a family declares for a part of a model: of KerasHub's classes, GGUF architectures, sizes."""
    match part:
        case Part.EXPORT:
            return [name for name, one in family.exports.items() if model_type.name in one.model_types]
        case Part.GGUF:
            of_all = (one for other in families() for one in other.gguf)
            return list(dict.fromkeys(one.name for one in of_all if model_type.name in one.model_types))
        case Part.ADAPTERS:
            return [] if part in model_type.lacks else ["yes"]
        case Part.SIZE:
            return [name for name, config in family.sizes.items() if config["model_type"] == model_type.name]


def cell(family, model_type, part):
    names = declared(family, model_type, part)
    if part is Part.ADAPTERS and names:
        return "merged, written"
    return ", ".join(f"`{name}`" for name in names) or f"- ({model_type.lacks.get(part)})"


def rows():
    """One for each model that is loaded; a part of others (``siglip_vision_model``) has none."""
    for family in families():
        for one in family.model_types:
            if not one.is_part:
                cells = (family.title, f"`{one.name}`", *(cell(family, one, part) for part in Part))
                yield f"| {' | '.join(cells)} |\n"


def table():
    return f"| {' | '.join(HEADS)} |\n" + "|---" * len(HEADS) + "|\n" + "".join(rows())


def test_the_docs_have_the_table():
    assert BEGIN + table() + END in PAGE.read_text(), f"run python {Path(__file__).name}, which writes it"


def test_every_family_is_read_from_somewhere():
    assert [one.title for one in families() if not (one.model_types or one.gguf or one.gguf_refused)] == []


if __name__ == "__main__":
    written = re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(written)
    sys.stdout.write(table())
