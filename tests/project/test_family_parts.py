"""Each architecture that KerasHub converts has each part in `shardload.families`, or a reason why not."""

import inspect
import re

import gguf
import pytest
from keras_hub.src.utils.transformers import preset_loader
from test_family_table import declared

from shardload.families import Family, ModelType, Part, register, unregister
from shardload.families.record import NO_GGUF
from shardload.families.registry import families, model_types


def converted():
    """The ``model_type`` values that the installed KerasHub has a converter for."""
    compared = [line for line in inspect.getsource(preset_loader).splitlines() if "if model_type " in line]
    found = set(re.findall(r'"([\w.-]+)"', "".join(compared)))
    assert len(found) > 35, (
        "KerasHub's preset_loader compares model_type in another way: read it, and correct this test"
    )
    return found


def faults():
    """What is wrong with the declarations, as sentences that say what to do."""
    for name in sorted(converted() - model_types().keys()):
        yield f"KerasHub converts model_type {name!r}, which no family declares. Add it to shardload/families"
    for family in families():
        for one in family.model_types:
            for part in Part if not one.is_part else ():
                names, why = declared(family, one, part), one.lacks.get(part)
                if not names and not why:
                    yield f"{one.name} of {family.name} lacks its {part}. Declare it, or say why not in lacks"
                if names and why:
                    yield f"{one.name} of {family.name} has its {part}, {names[0]}, and says why not: {why!r}. Drop one"


def test_each_model_has_each_part_or_a_reason():
    assert list(faults()) == []


@pytest.mark.parametrize(
    ("lacks", "match"),
    [
        ({}, "new of new lacks its export"),
        (dict.fromkeys(Part, "it is new") | {Part.EXPORT: ""}, "new of new lacks its export"),
        ({part: "it is new" for part in Part if part is not Part.SIZE}, "new of new lacks its size"),
    ],
)
def test_a_part_that_is_lacking_without_a_reason_is_told(lacks, match):
    register(Family(name="new", title="New", model_types=(ModelType(name="new", lacks=lacks),)))
    try:
        assert re.search(match, "\n".join(faults()))
    finally:
        unregister("new")


def test_a_new_converter_of_keras_hub_is_told(monkeypatch):
    source = inspect.getsource(preset_loader) + '\n        elif model_type == "brand_new":\n'
    monkeypatch.setattr(inspect, "getsource", lambda module: source)
    assert list(faults()) == [
        "KerasHub converts model_type 'brand_new', which no family declares. Add it to shardload/families"
    ]


def plain(name):
    return re.sub(r"[^a-z0-9]", "", name.lower())


def test_gguf_has_no_architecture_of_models_that_say_so():
    known = {plain(name) for name in gguf.MODEL_ARCH_NAMES.values()}
    says = [one for one in model_types().values() if one.lacks.get(Part.GGUF) == NO_GGUF[Part.GGUF]]
    assert says
    assert [one.name for one in says if plain(one.name) in known] == []


def test_exports_sizes_and_gguf_files_are_of_known_models():
    kinds = [kind for family in families() for one in family.exports.values() for kind in one.model_types]
    kinds += [config["model_type"] for family in families() for config in family.sizes.values()]
    kinds += [kind for family in families() for one in family.gguf for kind in one.model_types]
    assert set(kinds) <= model_types().keys()
    # Without its tensors, an export cannot be planned.
    assert [
        k for f in families() for e in f.exports.values() for k in e.model_types if not model_types()[k].tensors
    ] == []
