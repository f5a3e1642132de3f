"""Files of `flax.serialization.to_bytes`: read in place, and refused where they are damaged or hostile."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ShardloadError, SourceError, TruncatedSourceError
from shardload.manifest import Decoded, Extent

pytestmark = pytest.mark.filterwarnings("ignore:.*is left out:UserWarning")
SAVED = Path(__file__).parents[1] / "support" / "flax_state.msgpack"
"""Written by Flax: `write_flax_msgpack`."""
NUMBERS = {
    "params/dense/kernel": np.arange(24 * 8, dtype=np.float32).reshape(24, 8),
    "params/dense/bias": np.ones(8, jnp.bfloat16),
    "params/long": np.arange(40 * 16, dtype=np.int16).reshape(40, 16),
    "params/layers/0": np.full((3,), 1.5, np.float16),
    "params/layers/1": np.zeros((0, 2), np.uint8),
    "scalar": np.float32(2.5),
    "key": np.asarray(jax.random.key_data(jax.random.key(3))),
}


def array(value, code=1):
    """An array as Flax packs it."""
    inside = msgpack.packb((value.shape, value.dtype.name, value.tobytes()), use_bin_type=True)
    return msgpack.ExtType(code, inside)


def written(path, tree):
    path.write_bytes(tree if isinstance(tree, bytes) else msgpack.packb(tree, use_bin_type=True))
    return path


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x1"])
def test_what_flax_saved_loads(mesh):
    def layout(name, shape):
        if name in ("step", "rate"):  # of 64 bits
            return None
        return P("model") if shape[:1] in ((24,), (40,)) else P()

    found = shardload.load_arrays(SAVED, layout, mesh=mesh)
    assert found.keys() == NUMBERS.keys() | {"done"} and found["done"].item() is True
    for name, value in NUMBERS.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert np.asarray(found[name]).tobytes() == value.tobytes()
    tensors = shardload.inspect(SAVED).tensors
    assert isinstance(tensors["params/dense/bias"].storage, Extent)
    assert isinstance(tensors["params/long"].storage, Decoded)  # in chunks


def test_a_state_is_the_target():
    dense = {"kernel": P("model"), "bias": P()}
    targets = {"params": {"dense": dense}, "step": 0, "rate": 0.0, "key": jax.random.key(0)}
    found = shardload.load_arrays(SAVED, targets, mesh="1x8", strict=False)
    assert (found["step"], found["rate"]) == (7, 0.5)
    assert (jax.random.key_data(found["key"]) == NUMBERS["key"]).all()
    assert np.array_equal(found["params"]["dense"]["kernel"], NUMBERS["params/dense/kernel"])


def test_notes_say_what_is_left_out():
    assert [note.split()[0] for note in shardload.inspect(SAVED).notes] == ["phase", "name"]


def test_a_name_without_an_ending(tmp_path):
    path = written(tmp_path / "checkpoint_100", {"a": array(np.ones(3, np.float32))})
    assert shardload.inspect(path).format == "flax-msgpack"


GOOD = np.arange(6, dtype=np.float32).reshape(2, 3)
INSIDE = (GOOD.shape, "float32", GOOD.tobytes())


def extension(*inside):
    return msgpack.ExtType(1, msgpack.packb(inside, use_bin_type=True))


def nested(depth):
    return b"\x81\xa1a" * depth + b"\x01"


@pytest.mark.parametrize(
    ("tree", "error", "text"),
    [
        ({"a": extension((2, 4), *INSIDE[1:])}, SourceError, "'a' has 24 bytes of values .*, expected 32"),
        ({"a": extension((-2, -3), *INSIDE[1:])}, SourceError, "each dim must be from 0"),
        ({"a": extension((2.0, 3), *INSIDE[1:])}, SourceError, "expected a whole number"),
        ({"a": extension((True, 6), *INSIDE[1:])}, SourceError, "expected a whole number"),
        ({"a": extension((1 << 40, 1 << 40), *INSIDE[1:])}, SourceError, "'a' has 24 bytes"),
        ({"a": extension((1,) * 65, *INSIDE[1:])}, SourceError, "at most 64 numbers"),
        ({"a": extension(INSIDE[0], "object", INSIDE[2])}, SourceError, "the dtype of 'a' is 'object'"),
        ({"a": extension(INSIDE[0], "O", INSIDE[2])}, SourceError, "the dtype of 'a' is 'O'"),
        ({"a": extension(INSIDE[0], "f4,f4", INSIDE[2])}, SourceError, "the dtype of 'a'"),
        ({"a": extension(INSIDE[0], "finfo", INSIDE[2])}, SourceError, "the dtype of 'a'"),
        ({"a": extension(INSIDE[0], 3, INSIDE[2])}, SourceError, "expected a text"),
        ({"a": extension(*INSIDE, 1)}, SourceError, "is no array of Flax"),
        ({"a": extension(*INSIDE[:2], "text")}, SourceError, "'a' has 4 bytes"),
        ({"a": msgpack.ExtType(1, b"")}, SourceError, "Cannot read|truncated"),
        ({"a": {"b": array(GOOD)}, "a/b": array(GOOD)}, SourceError, "Two tensors are named 'a/b'"),
        ({"a": {1: array(GOOD)}}, SourceError, "expected a text"),
        ({"k" * 5000: 1}, SourceError, "at most 4096 bytes"),
        (b"\x81\xa1a\xc1", SourceError, "a type is reserved"),
        (b"\x81\xa1a\x01\x02", SourceError, "the value ends, but the file has 5 bytes"),
        (b"\x81\xa1\xff\x01", SourceError, "a text is no UTF-8"),
        (b"\xdf\xff\xff\xff\xff\xa1a\x01", TruncatedSourceError, "truncated"),
        (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01", SourceError, "Cannot read|truncated"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", TruncatedSourceError, "truncated"),
        (nested(100), SourceError, "nested more than 64 deep"),
        (nested(100_000), SourceError, "nested more than 64 deep"),
    ],
)
def test_hostile_files(tmp_path, tree, error, text):
    with pytest.raises(error, match=text):
        shardload.inspect(written(tmp_path / "a.msgpack", tree))


def chunked(shape, chunks):
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): n for i, n in enumerate(shape)},
        "chunks": {str(i): array(chunk) for i, chunk in enumerate(chunks)},
    }


def test_chunks(tmp_path):
    value = np.arange(35, dtype=np.int32).reshape(7, 5)
    flat = value.reshape(-1)
    for cuts in ([35], [11, 11, 11, 2], [1] * 35):
        parts = np.split(flat, np.cumsum(cuts)[:-1])
        path = written(tmp_path / "a.msgpack", {"x": {"w": chunked(value.shape, parts)}, "b": 1})
        options = {"mesh": "1x8", "strict": False, "transpose": {"x/w": (1, 0)}}
        found = shardload.load_arrays(path, {"x": {"w": P(None, None)}}, **options)
        assert np.array_equal(found["x"]["w"], value.T)
    for shape, parts, text in (
        ((7, 6), [flat], "do not have the elements"),
        ((), [flat[:1]], "do not have the elements"),
        ((7, 5), [], "do not have the elements"),
        ((7, 5), [value], "expected an array with one dim"),
        ((7, 5), [flat[:5], flat[5:].astype(np.float32)], "of the same dtype"),
    ):
        with pytest.raises(SourceError, match=text):
            shardload.inspect(written(tmp_path / "b.msgpack", {"w": chunked(shape, parts)}))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_damage_ends_in_our_errors(tmp_path_factory, data):
    raw = bytearray(SAVED.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]
    path = tmp_path_factory.mktemp("fuzz") / "a.msgpack"
    path.write_bytes(raw)
    with contextlib.suppress(ShardloadError):
        shardload.load_arrays(path, lambda name, shape, dtype: None if dtype.itemsize == 8 else P(), mesh="1x8")
