"""The tables of families in the docs are made from declarations: ``python tests/project/test_family_table.py``."""

from pathlib import Path

import pytest

from shardload.families import Part
from shardload.families.registry import families

PAGE = Path(__file__).parents[2] / "docs/reference/families.md"
EXPORT, GGUF = Part.EXPORT, Part.GGUF
PARTS = {EXPORT: "export to Hugging Face", GGUF: "GGUF", Part.ADAPTERS: "adapters of PEFT", Part.SIZE: "sizes"}


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


def models():
    """Each model that is loaded, with its family; a part of others (``siglip_vision_model``) is none."""
    for family in families():
        yield from ((family, one) for one in family.model_types if not one.is_part)


def code(names):
    return ", ".join(f"`{name}`" for name in names) or "-"


def row(*cells):
    return f"| {' | '.join(cells)} |\n"


def table(*heads, rows):
    return row(*heads) + "|---" * len(heads) + "|\n" + "".join(rows)


def tables():
    """The tables of the page, by their marks."""
    has = (
        row(f"{family.title} `{one.name}`", code(declared(family, one, EXPORT)), code(declared(family, one, GGUF)))
        for family, one in models()
    )
    lacking: dict[tuple[str, str], list[str]] = {}
    for family, one in models():
        for part in Part:
            if not declared(family, one, part):
                lacking.setdefault((PARTS[part], str(one.lacks.get(part))), []).append(one.name)
    sizes = (row(f"`{one.name}`", code(declared(family, one, Part.SIZE))) for family, one in models())
    return {
        "families": table("family and `model_type`", "written for Hugging Face", "GGUF architecture", rows=has),
        "lacking": table("lacking", "because", "of", rows=(row(*why, code(of)) for why, of in lacking.items())),
        "sizes": table("`model_type`", "sizes", rows=sizes),
    }


@pytest.mark.parametrize("mark", ["families", "lacking", "sizes"])
def test_the_docs_have_the_table(mark):
    expected = f"<!-- {mark} -->\n{tables()[mark]}<!-- end of {mark} -->\n"
    assert expected in PAGE.read_text(), f"run python {Path(__file__).name}, which writes it"


def test_every_family_is_read_from_somewhere():
    assert [one.title for one in families() if not (one.model_types or one.gguf or one.gguf_refused)] == []


if __name__ == "__main__":
    text = PAGE.read_text()
    for mark, made in tables().items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
        text = text.partition(begin)[0] + begin + made + end + text.partition(end)[2]
    PAGE.write_text(text)
