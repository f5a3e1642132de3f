"""Names that say "part n of m", in every spelling, and what they stand for in every format."""

import json
from functools import partial

import gguf
import h5py
import jax
import keras
import numpy as np
import pytest
from checkpoints import finish_gguf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import shardload
from shardload.errors import SourceError, SourceNotFoundError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.loaders.contents import part_name, part_number, pattern_of, set_of, stem_without_part
from shardload.verifying import verify

SPELLINGS = (
    "0000{}-of-00002", "{}-of-2", "model-0000{}-of-00002", "model-{}of2", "model-0{}of02", "model({}of2)",
    "model ({} of 2)", "model-part{}of2", "model.part{}of2", "modelpart{}of2", "model--0000{}--of--00002",
    "model_0000{}_OF_00002", "model.{}.of.2", "model-rank-{}-of-2", "Copy of model-{}-of-2",
    "model-0000{}-of-00002.fp16", "model.fp16-0000{}-of-00002", "model-0000{}-of-00002-Q4", "v1-of-3.x-{}-of-2",
)  # fmt: skip
WHOLE = (
    "model", "best-of-10", "1-of-1", "model-00001-of-00001", "of-2", "3-of", "model_1_2", "layer1of", "1offset2",
    "10f2", "2-of-4th", "one-of-2", "Sparse-Llama-3.1-8B-2of4", "model-of-00001-00002",
)  # fmt: skip
SEPARATORS = st.text("-_. ()[]+", max_size=3)
WORDS = st.text(st.characters(categories=("L",), max_codepoint=0x24F), max_size=5)


@st.composite
def names(draw, number, count):
    """The name of a part, in any spelling."""
    width = draw(st.integers(1, 7))
    of = draw(st.sampled_from(["of", "OF", "Of"])).join(draw(st.tuples(SEPARATORS, SEPARATORS)))
    return f"{draw(WORDS)}{number:0{width}d}{of}{count:0{width}d}.{draw(WORDS)}.gguf"


@given(st.data(), st.integers(0, 10**7), st.integers(2, 10**7))
def test_every_spelling_is_the_same_claim(data, number, count):
    name = data.draw(names(number, count))
    assert part_number(name) == (number, count)
    for other in (0, 1, count):
        sibling = part_name(name, other)
        assert part_number(sibling) == (other, count)
        assert set_of(sibling) == set_of(name)
        assert stem_without_part(sibling) == stem_without_part(name)


@given(st.text(max_size=30))
def test_a_name_without_two_numbers_around_of_is_that_of_a_whole_file(name):
    if not any(letter.isdigit() for letter in name.lower().partition("of")[2]):
        assert part_number(name) is None
        assert part_name(name, 2) == name


@pytest.mark.parametrize("name", WHOLE)
def test_names_of_whole_files(name):
    assert part_number(f"{name}.safetensors") is None


def test_the_zeros_of_a_part_are_those_of_the_others():
    assert part_name("model-00001-of-00002.fp16.safetensors", 2) == "model-00002-of-00002.fp16.safetensors"
    assert part_name("m-01of12.gguf", 12) == "m-12of12.gguf"
    assert part_name("m-12of12.gguf", 1) == "m-1of12.gguf"
    assert pattern_of("m[1]-1-of-2.gguf") == "m[[]1]-*-of-2.gguf"
    assert pattern_of("m.gguf") == "m.gguf"


def surfaces(source):
    """Return each call that opens a source."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return (
        partial(shardload.inspect, source),
        partial(shardload.load_arrays, source, device),
        partial(shardload.convert, source, source.parent / "out.weights.h5"),
        partial(shardload.load, source, mesh="1x1"),
    )


def write_safetensors(path, name):
    save_file({name: np.arange(4, dtype="f")}, path)


def write_part_of_gguf(path, name, *, number):
    writer = gguf.GGUFWriter(str(path), "other")
    for key, value in (("no", number), ("count", 2)):
        writer.add_uint16(f"split.{key}", value)
    writer.add_int32("split.tensors.count", 2)
    writer.add_tensor(name, np.zeros((2, 32), "f"))
    finish_gguf(writer)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_part_of_safetensors_stands_for_all(spelling, tmp_path):
    parts = [tmp_path / f"{spelling.format(number)}.safetensors" for number in (1, 2)]
    write_safetensors(parts[0], "a")
    for source in (parts[0], tmp_path):
        for call in surfaces(source):
            with pytest.raises(SourceNotFoundError) as refused:
                call()
            assert "one of 2 parts" in str(refused.value)
            assert f"lacks 1 of them: {parts[1].name}" in str(refused.value)
        assert [found.verdict for found in verify(source)] == ["damaged"]
    write_safetensors(parts[1], "b")
    for source in (*parts, tmp_path):
        assert {*shardload.inspect(source).tensors} == {"a", "b"}
        assert [found.verdict for found in verify(source)] != ["damaged"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_part_of_gguf_stands_for_all(spelling, tmp_path):
    parts = [tmp_path / f"{spelling.format(number)}.gguf" for number in (1, 2)]
    write_part_of_gguf(parts[0], "a", number=0)
    for source in (parts[0], tmp_path):
        with pytest.raises(SourceNotFoundError, match=r"one of 2 parts, but .* lacks 1 of them: "):
            open_manifest(source)
    write_part_of_gguf(parts[1], "b", number=1)
    for source in (*parts, tmp_path):
        assert {*open_manifest(source).tensors} == {"a", "b"}


@pytest.mark.parametrize("ending", ["gguf", "safetensors"])
def test_a_set_of_another_variant_is_another_set(ending, tmp_path):
    for variant in ("", ".fp16"):
        for number, name in ((1, "a"), (2, "b")):
            path = tmp_path / f"model-{number}-of-2{variant}.{ending}"
            if ending == "gguf":
                write_part_of_gguf(path, name, number=number - 1)
            else:
                write_safetensors(path, name)
    both = r"(?i)model-1-of-2\.(fp16\.)?\w+.* model-1-of-2\.(fp16\.)?\w+.*open one of the"
    with pytest.raises(SourceError, match=both):
        open_manifest(tmp_path)
    for variant in ("", ".fp16"):
        found = open_manifest(tmp_path / f"model-2-of-2{variant}.{ending}")
        assert [path.name for path in found.files] == [f"model-{n}-of-2{variant}.{ending}" for n in (1, 2)]


def test_a_variant_has_its_own_index(tmp_path):
    shards = [f"unet-{number}-of-2.fp16.safetensors" for number in (1, 2)]
    for name, shard in zip("ab", shards, strict=True):
        write_safetensors(tmp_path / shard, name)
    index = tmp_path / "unet.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    assert open_manifest(tmp_path / shards[1]).source == str(index)


@pytest.mark.parametrize("name", ["model.gguf.part1of2", "model.safetensors.part2of2", "m.weights.h5.1-of-2"])
@pytest.mark.parametrize("content", [b"GGUF", b"\x08" + bytes(7) + b"{}      ", b"\0" * 99])
def test_bytes_of_a_file_are_to_be_joined(content, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"a part of the bytes of m.*cat m.*1.* > m"):
        open_manifest(path)


def test_a_part_of_tensorflows_weights_is_no_checkpoint(tmp_path):
    path = tmp_path / "tf_model-00001-of-00002.h5"
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [b"dense"]
        file["dense/kernel:0"] = np.zeros((2, 2), "f")
        file["dense"].attrs["weight_names"] = [b"kernel:0"]
    with pytest.raises((SourceError, UnsupportedError), match="part 1 of 2 according to its name"):
        open_manifest(path)
    assert open_manifest(path.rename(tmp_path / "tf_model.h5")).tensors


@pytest.mark.parametrize("name", ["epoch-1-of-2.weights.h5", "epoch-1-of-2.keras"])
def test_a_whole_model_of_keras_is_none_whatever_its_name(name, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    (model.save if name.endswith(".keras") else model.save_weights)(tmp_path / name)
    assert open_manifest(tmp_path / name).tensors
    assert open_manifest(tmp_path).tensors
