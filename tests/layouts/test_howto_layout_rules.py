"""The how-to's own files, loaded with."""

import re
from pathlib import Path

import pytest

import shardload
from shardload.errors import LayoutError
from shardload.keras_bridge.variables import value_of
from shardload.synth import synth

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
