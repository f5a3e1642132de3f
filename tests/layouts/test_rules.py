"""Rules people write: files, layout maps, KerasHub's own; all strict."""

import functools
import re
from pathlib import Path

import jax
import keras
import models
import pytest

import shardload
from shardload.errors import LayoutError
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.variables import value_of
from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec
from shardload.synth import synth

MESH = MeshSpec.parse("1x8")
QUERY = "decoder_block_0/attention/query/kernel"


@functools.cache
def family(name):
    with record_variables():
        return models.build(name)


@pytest.fixture
def rules(tmp_path):
    def write(text):
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return path

    return write


def rule(variable, *spec):
    return f"[[rule]]\nvariable = '{variable}'\nspec = {list(spec)}\n"


def layout_map(mesh=MESH):
    devices = [f"cpu:{i}" for i in range(mesh.size)]
    return keras.distribution.LayoutMap(keras.distribution.DeviceMesh(mesh.sizes, mesh.axes, devices))


def layouts(found):
    return {v.path: str(v.layout) for v in found.variables}


def test_a_file_decides_and_auto_does_the_rest(rules):
    path = rules(rule(r"decoder_block_\d/attention/query/kernel", "-", "model", "-"))
    found = choose(family("gemma2"), MESH, path)
    assert layouts(found)[QUERY] == "(-, model, -)"
    assert layouts(found)["decoder_block_0/ffw_linear/kernel"] == "(model, -)"
    assert found.rules[QUERY] == r"decoder_block_\d/attention/query/kernel"
    assert found.mode == str(path)


def test_a_file_may_replicate_the_rest_and_two_axes_may_split_one_dim(rules):
    path = rules('default = "replicated"\n' + rule(".*/ffw_linear/kernel", "fsdp+model", "-"))
    found = choose(family("gemma2"), MeshSpec.parse("data=2,fsdp=2,model=2"), str(path))
    assert layouts(found)["decoder_block_1/ffw_linear/kernel"] == "(fsdp+model, -)"
    assert (found.sharded, found.rules[QUERY]) == (2, "default")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (rule("attention/query/kernel", "model", "-", "-"), "matches only a part of decoder_block_0/attention/query"),
        (rule("decoder_block_0/atention/query/kernel", "model", "-", "-"), "the nearest are decoder_block_0/attention"),
        (rule(".*query/kernel", "model", "-", "-") + rule(".*0.*kernel", "model", "-", "-"), "Two rules .* match"),
        (rule(".*query/kernel", "model", "-"), r"has 2 entries, but .*query/kernel has shape \(8, 72, 16\)"),
        (rule(".*query/kernel", "tensor", "-", "-"), r"names axes \['tensor'\] that the mesh"),
        (rule("(", "-"), "is not a regular expression"),
        ("rule = 3\n", "need \\[\\[rule\\]\\] tables"),
        ("default = 'none'\n" + rule("a", "-"), "need \\[\\[rule\\]\\] tables"),
        ("[[rule]]\nvariable = 'a'\n", "A rule in .* must be variable ="),
        ("not toml", "Cannot read the layout rules"),
    ],
)
def test_a_file_that_would_do_nothing_or_two_things_is_refused(rules, text, message):
    with pytest.raises(LayoutError, match=message):
        choose(family("gemma2"), MESH, rules(text))


def test_a_path_itself_wins_over_an_expression(rules):
    path = rules(rule(QUERY, "-", "-", "model") + rule(".*query/kernel", "model", "-", "-"))
    found = layouts(choose(family("gemma2"), MESH, path))
    assert found[QUERY] == "(-, -, model)"
    assert found["decoder_block_1/attention/query/kernel"] == "(model, -, -)"


def test_a_partition_spec_is_a_rule_that_leaves_out_dims_at_the_end():
    found = choose(family("gemma2"), MESH, {QUERY: jax.sharding.PartitionSpec(None, "model")})
    assert layouts(found)[QUERY] == "(-, model, -)"
    for wrong in (jax.sharding.PartitionSpec(None, None, None, "model"), (None, "model")):
        with pytest.raises(LayoutError, match=r"has \d entries, but .* has shape"):
            choose(family("gemma2"), MESH, {QUERY: wrong})


def test_a_rule_that_does_not_divide_falls_back_and_is_reported(rules):
    found = choose(family("gemma2"), MESH, rules(rule(".*(key|value)/kernel", "model", "-", "-")))
    assert layouts(found)["decoder_block_0/attention/key/kernel"] == "(-, model, -)"
    (why,) = {f.why for f in found.fallbacks}
    assert why == "4 does not divide by 8; split as (-, model, -) instead"


def test_a_layout_map_replicates_the_rest_and_says_so():
    given = layout_map()
    given["token_embedding/embeddings"] = ("model", None)
    found = choose(family("gemma2"), MESH, given)
    assert layouts(found)["token_embedding/embeddings"] == "(model, -)"
    assert found.rules[QUERY] == "default" and found.sharded == 1


def test_a_layout_map_that_matches_nothing_is_refused():
    given = layout_map()
    given["embedding.*"] = ("model", None)
    with pytest.raises(LayoutError, match="of the LayoutMap matches none of the model's"):
        choose(family("gemma2"), MESH, given)


def test_a_layout_map_belongs_to_its_mesh():
    with pytest.raises(LayoutError, match="on the mesh batch=2,model=4: it was made for batch=1,model=8"):
        choose(family("gemma2"), MeshSpec.parse("2x4"), layout_map())


@pytest.mark.parametrize(("name", "count"), [("gemma1", 4), ("gemma2", 4), ("llama", 0)])
def test_keras_hubs_own_map_where_it_has_one(name, count):
    found = choose(family(name), MESH, "keras_hub")
    assert len(found.fallbacks) == count
    assert layouts(found)["token_embedding/embeddings"] == "(model, batch)"


def test_a_class_without_a_map_names_the_way_out():
    with pytest.raises(LayoutError, match=r"Gemma3Backbone has no layout map of its own\. Use layout='auto'"):
        choose(family("gemma3"), MESH, "keras_hub")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("best", r"Unknown layout 'best', and no file has that name\. Supported: 'auto'"),
        ("autoo", r"no file has that name\. Did you mean 'auto'\? Supported: 'auto'"),
        (3, "Cannot use 3 as layout"),
    ],
)
def test_an_unknown_layout_names_the_known_ones(layout, said):
    with pytest.raises(LayoutError, match=said):
        choose(family("gemma2"), MESH, layout)


# ---- the files of the how-to, loaded with --------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "layout-rules.md").read_text()
FILES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return synth("gemma2_2b", scale=0.02, directory=tmp_path_factory.mktemp("root"))


def specs(model):
    """How each variable really lies: its mesh axes, dim by dim."""
    return {v.path: tuple(value_of(v).sharding.spec) for v in model.backbone.variables}


@pytest.fixture
def load(source, tmp_path):
    def call(text, mesh):
        (tmp_path / "rules.toml").write_text(text)
        return shardload.load(source, mesh=mesh, layout=str(tmp_path / "rules.toml"))

    return call


def test_the_first_file_splits_what_it_says_and_auto_the_rest(load):
    found = specs(load(FILES[0], "1x4"))
    for name in ("query", "key", "value"):
        assert found[f"decoder_block_1/attention/{name}/kernel"] == ("model", None, None)
    assert found["decoder_block_0/ffw_gating_2/kernel"] == (None, "model")
    assert found["token_embedding/embeddings"] == (None, "model")
    assert found["decoder_block_0/ffw_linear/kernel"] == ("model", None)


def test_the_second_file_splits_nothing_else(load):
    found = specs(load(FILES[1], "data=1,fsdp=2,model=2"))
    split = {path: spec for path, spec in found.items() if any(spec)}
    assert {re.sub(r"\d", "*", path) for path in split} == {
        "decoder_block_*/ffw_gating/kernel",
        "decoder_block_*/ffw_gating_*/kernel",
    }
    assert set(split.values()) == {(None, ("fsdp", "model"))}


def test_heads_that_do_not_divide_fall_back_as_the_page_says(load):
    model = load(FILES[0], "1x8")
    fallbacks = {f.variable: f for f in shardload.report(model).layout.fallbacks}
    assert "4" in fallbacks["decoder_block_0/attention/key/kernel"].why


def test_a_mesh_without_the_axis_is_refused_as_the_page_says(load):
    with pytest.raises(LayoutError, match="fsdp"):
        load(FILES[1], "1x4")
