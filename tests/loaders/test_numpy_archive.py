"""Archives of `numpy.savez`: read in place or decoded, and refused where they are damaged or hostile."""

import contextlib
import io
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ShardloadError, SourceError, TransferError, UnsafeSourceError, UnsupportedError
from shardload.manifest import Extent, Packed

VALUES = {
    "params.kernel": np.arange(24 * 16, dtype=np.float32).reshape(24, 16),
    "half": np.arange(10, dtype=np.float16),
    "step": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.uint8),
    "flags": np.array([True, False]),
    "fortran": np.asfortranarray(np.arange(48, dtype=np.int16).reshape(8, 6)),
    "big": np.arange(8, dtype=">f4"),
}


def load(path, **options):
    def layout(name, shape):
        return P("model") if shape[:1] in ((24,), (8,)) else P()

    return shardload.load_arrays(path, layout, mesh="1x8", **options)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_saves_loads(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, **VALUES)
    found = load(path)
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        own = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))).reshape(value.shape)
        assert found[name].dtype == own.dtype and found[name].shape == own.shape
        assert np.asarray(found[name]).tobytes() == own.tobytes()
    storage = shardload.inspect(path).tensors["params.kernel"].storage
    assert isinstance(storage, Extent if save is np.savez else Packed)
    transposed = load(path, transpose={"fortran": (1, 0)})["fortran"]
    assert np.array_equal(transposed, VALUES["fortran"].T)


def test_a_folder_with_one_archive_and_a_tree(tmp_path):
    np.savez(tmp_path / "weights.npz", **{"a.b": np.ones(3, np.float32)})
    found = shardload.load_arrays(tmp_path, {"a": {"b": jax.devices()[0]}})
    assert np.array_equal(found["a"]["b"], np.ones(3))
    with pytest.raises(ShardloadError, match=r"weights\.npz describes no model|call shardload\.load_weights"):
        shardload.load(tmp_path / "weights.npz")


def test_what_has_no_numbers_is_left_out(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(
        path,
        a=np.ones(3),
        names=np.array(["x", "y"]),
        when=np.array(["2020-01-01"], "M8[D]"),
        b=np.ones(3, ml_dtypes.bfloat16),
    )
    manifest = shardload.inspect(path)
    assert list(manifest.tensors) == ["a"] and len(manifest.notes) == 3
    assert manifest.notes[0] == "names.npy in a.npz contains no numbers, and is left out"


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('unpickled')",))

    np.savez(tmp_path / "a.npz", a=np.array([Bomb()], object))
    with pytest.raises(UnsupportedError, match="an array of Python objects, a pickle that can run code"):
        shardload.inspect(tmp_path / "a.npz")


def archive(path, content, **options):
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("a.npy", content)
    return path


def npy(header, values=b"", *, version=b"\x01\x00"):
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + values


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (npy(GOOD, b"1234"), r"an array of float32 \(2,\) needs 8 bytes, but the member has 4 bytes"),
        (npy(GOOD.replace("(2,)", "(-2,)"), b""), "shape"),
        (npy(GOOD.replace("(2,)", "(1 << 62,)"), b""), "Cannot read"),
        (npy(GOOD.replace("(2,)", f"({1 << 62}, {1 << 62})"), b""), "needs"),
        (npy(GOOD.replace("<f4", "nonsense"), b"12345678"), "Cannot read"),
        (npy("__import__('os').abort()", b""), "Cannot read"),
        (npy("(" * 5000, b""), "Cannot read"),
        (npy(" " * 20_000 + GOOD, b"12345678"), "Cannot read"),
        (npy(GOOD, b"12345678", version=b"\x09\x00"), "Cannot read"),
        (b"\x93NUMPY", "Cannot read"),
        (b"", "Cannot read"),
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_hostile_headers(tmp_path, content, text, compression):
    with pytest.raises(SourceError, match=text):
        shardload.inspect(archive(tmp_path / "a.npz", content, compression=compression))


def test_version_2_and_other_compressions(tmp_path):
    value = np.array([1.5, 2.5], np.float32)
    path = archive(tmp_path / "a.npz", npy(GOOD, value.tobytes(), version=b"\x02\x00"))
    assert np.array_equal(load(path)["a"], value)
    with pytest.raises(UnsupportedError, match="encrypted or not deflated"):
        shardload.inspect(archive(tmp_path / "b.npz", npy(GOOD, value.tobytes()), compression=zipfile.ZIP_BZIP2))


def test_bombs_and_damage(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(100_000, dtype=np.int32))
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    central = raw.rindex(b"PK\x01\x02")
    lie = raw.copy()
    lie[central + 24 : central + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    (tmp_path / "lie.npz").write_bytes(lie)
    with pytest.raises(UnsafeSourceError, match="it declares 4294967280 bytes"):
        shardload.inspect(tmp_path / "lie.npz")
    raw[5_000] ^= 0xFF
    (tmp_path / "damaged.npz").write_bytes(raw)
    with pytest.raises(TransferError, match="Cannot decompress"):
        load(tmp_path / "damaged.npz")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), save=st.sampled_from([np.savez, np.savez_compressed]))
def test_any_damage_ends_in_our_errors(tmp_path_factory, data, save):
    out = io.BytesIO()
    save(out, a=np.arange(30, dtype=np.float32), b=np.ones((3, 4)))
    raw = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]
    path = tmp_path_factory.mktemp("fuzz") / "a.npz"
    path.write_bytes(raw)
    with contextlib.suppress(ShardloadError):
        load(path)
