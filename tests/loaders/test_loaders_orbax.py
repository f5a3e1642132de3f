"""Orbax checkpoints, bit for bit what Orbax itself restores, and refused when they lie."""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import orbax.checkpoint as v0
import pytest
import tensorstore as ts
from checkpoints import flip, largest_file
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from orbax.checkpoint import v1

import shardload
from shardload.errors import (
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    TruncatedSourceError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.loaders import open_manifest
from shardload.loaders.extents import checked_tensors
from shardload.loaders.orbax.ocdbt import OcdbtWalk, read_values
from shardload.loaders.orbax.zarr import parse
from shardload.manifest import Chunked, Decoded, Extent, Manifest, Packed, Tensor
from shardload.runs.listing import find_step, list_steps
from shardload.stores.local import located

MESHES = {"1x8": (1, 8), "2x4": (2, 4), "1x1": (1, 1)}
Saving = v1.options.ArrayOptions.Saving


@pytest.mark.parametrize("options", [{"step_prefix": "ckpt"}, {"step_format_fixed_length": 6}])
def test_steps_are_found_under_every_name_that_orbax_gives_them(tmp_path: Path, options: dict[str, Any]) -> None:
    with v0.CheckpointManager(tmp_path / "run", options=v0.CheckpointManagerOptions(**options)) as manager:
        for step in (9, 10):
            manager.save(step, args=v0.args.StandardSave({"w": jnp.full(4, step)}))
    assert shardload.load_arrays(tmp_path / "run", PartitionSpec(), mesh="1x1")["w"].tolist() == [10] * 4
    assert open_manifest(tmp_path / "run").metadata["step"] == 10
    assert [info.step for info in list_steps(tmp_path / "run")] == [9, 10]
    first = find_step(tmp_path / "run", 9)
    assert shardload.load_arrays(first.path, PartitionSpec(), mesh="1x1")["w"].tolist() == [9] * 4
    shutil.copytree(first.path, tmp_path / "run" / "other_11")
    if "step_prefix" in options:  # two runs in one folder
        with pytest.raises(UnsupportedError, match="contains no checkpoint"):
            open_manifest(tmp_path / "run")


@pytest.mark.parametrize("tree", [{"": 1}, {"a": {"": 1}}, {"": {"w": 1}, "b": 1}, {"a": {"": {"w": 1}}}])
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_an_empty_key_is_a_key(tmp_path: Path, tree: dict[str, Any], use_ocdbt: bool) -> None:
    values = jax.tree.map(lambda _: jnp.arange(4.0) + 1, tree)
    if not use_ocdbt and "" in tree:
        pytest.skip("Orbax mixes such arrays with its own files")
    v0.Checkpointer(v0.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)).save(tmp_path / "7", values)
    found = shardload.load_arrays(tmp_path / "7", jax.tree.map(lambda _: PartitionSpec(), values), mesh="1x1")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, values))


def test_text_in_a_tree_is_noted(tmp_path: Path) -> None:
    v0.PyTreeCheckpointer().save(tmp_path / "7", {"a": jnp.ones(2), "name": "gemma", "n": {"x": "y"}})
    found = open_manifest(tmp_path / "7")
    assert set(found.tensors) == {"a"} and found.notes == ("left out 2 leaves that are text, no array: 'n/x', 'name'",)


def placed(value: Any, mesh: str, *spec: str | None) -> jax.Array:
    rows, columns = MESHES[mesh]
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return jax.device_put(value, NamedSharding(Mesh(devices, ("data", "model")), PartitionSpec(*spec)))


def tree(mesh: str = "1x8") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((256, 128), np.float32)
    return {
        "params": {
            "rows": placed(floats, mesh, "model"),
            "columns": placed(floats + 1, mesh, None, "model"),
            "both": placed(floats + 2, mesh, "data", "model"),
            "copied": placed(jnp.asarray(floats[:64], jnp.bfloat16), mesh),
            "int8": placed(rng.integers(-128, 127, (64, 64)).astype(np.int8), mesh, None, "model"),
            "bias": placed(np.arange(8, dtype=np.float32), mesh, "model"),
        },
        "step": jnp.int32(4),
        "numpy": rng.standard_normal((33, 17, 5)),
        "python": 3,
        "list": [np.ones(2), (jnp.ones(3), None)],
        "empty": {},
    }


def save(path: Path, value: Any, **options: Any) -> Path:
    with v1.Context(array_options=v1.options.ArrayOptions(saving=Saving(**options))):
        v1.save_checkpointables(path, {"pytree": value})
    return path


def rows_of(tensor: Tensor) -> NDArray[Any]:
    """A tensor put together from what its manifest says, with NumPy alone."""
    match tensor.storage:
        case Decoded(reader):
            middle = tensor.rows // 2
            parts = [reader.read_rows(a, b) for a, b in ((0, middle), (middle, tensor.rows)) if a < b]
            return np.concatenate(parts) if tensor.shape else parts[0]
        case (Extent() | Packed()) as whole:
            return chunk_of(whole, tensor.shape, tensor.dtype)
        case Chunked(chunk, extents):
            grid = tuple(-(-n // c) for n, c in zip(tensor.shape, chunk, strict=True))
            assert set(extents) == set(np.ndindex(*grid))
            found = np.empty([n * c for n, c in zip(grid, chunk, strict=True)], tensor.dtype)
            for cell, e in extents.items():
                box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk, strict=True))
                found[box] = chunk_of(e, chunk, tensor.dtype)
            return found[tuple(map(slice, tensor.shape))]


def chunk_of(place: Extent | Packed, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(place, Extent):
        return np.fromfile(str(place.path), dtype, math.prod(shape), offset=place.offset).reshape(shape)
    stored = np.fromfile(str(place.path), np.uint8, place.n_bytes, offset=place.offset).tobytes() or place.kept
    return place.codec.decode(stored)


def check(manifest: Manifest, expected: Any) -> None:
    """Every leaf with a value is there, bit for bit, and every file with its size."""
    leaves = {jax.tree_util.keystr(k, simple=True, separator="/"): v for k, v in jax.tree.leaves_with_path(expected)}
    arrays = {name: np.asarray(value) for name, value in leaves.items() if not isinstance(value, str)}
    assert set(manifest.tensors) == set(arrays)
    for name, array in arrays.items():
        found = rows_of(manifest.tensors[name])
        assert (found.shape, found.dtype) == (array.shape, array.dtype), name
        assert found.tobytes() == array.tobytes(), name
    assert manifest.files == {path: path.local_path().stat().st_size for path in manifest.files}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("use_compression", [False, True])
def test_every_mesh_reads_back_what_orbax_restores(tmp_path: Path, mesh: str, use_compression: bool) -> None:
    step = save(tmp_path / "7", tree(mesh), use_compression=use_compression)
    check(open_manifest(step), v1.load_checkpointables(step, {"pytree": tree(mesh)})["pytree"])


@pytest.mark.parametrize("options", [{"use_zarr3": z, "use_ocdbt": o} for z in (False, True) for o in (False, True)])
@pytest.mark.parametrize("use_compression", [False, True])
def test_every_way_of_storing(tmp_path: Path, options: dict[str, Any], use_compression: bool) -> None:
    value = tree("2x4")
    check(open_manifest(save(tmp_path / "7", value, use_compression=use_compression, **options)), value)


def test_uncompressed_chunks_are_extents(tmp_path: Path) -> None:
    found = open_manifest(save(tmp_path / "7", tree(), use_compression=False)).tensors
    columns, array = found["params/columns"].storage, found["numpy"].storage
    assert isinstance(columns, Chunked) and isinstance(array, Extent)
    assert columns.chunk_shape == (256, 16)
    assert found["params/columns"].stored_bytes == found["params/columns"].nbytes


def test_chunks_within_shards(tmp_path: Path) -> None:
    value = {"a": np.arange(60 * 64, dtype=np.float32).reshape(60, 64)}
    small = Saving.StorageOptions(chunk_byte_size=1024)
    check(open_manifest(save(tmp_path / "7", value, use_compression=False, storage_options=small)), value)


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_edge_chunks_are_stored_in_full(tmp_path: Path, driver: str, is_sharded: bool) -> None:
    value = np.arange(50 * 30, dtype=np.float32).reshape(50, 30)
    step = save(tmp_path / "7", {"a": value}, use_ocdbt=False, use_compression=False, use_zarr3=driver == "zarr3")
    inner: dict[str, Any] = {"configuration": {"endian": "little"}, "name": "bytes"}
    shards = {"name": "sharding_indexed", "configuration": {"chunk_shape": [8, 8], "codecs": [inner]}}
    chunk = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 16]}}}
    metadata = {"chunks": [16, 16], "compressor": None} if driver == "zarr" else chunk | {"codecs": [inner]}
    if is_sharded and driver == "zarr3":
        metadata["codecs"] = [shards]
    shutil.rmtree(step / "pytree/a")
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{step}/pytree/a/"}, "metadata": metadata}
    ts.open(spec, create=True, shape=[50, 30], dtype="float32").result().write(value).result()
    manifest = open_manifest(step)
    assert isinstance(manifest.tensors["a"].storage, Chunked)
    check(manifest, {"a": value})


@pytest.mark.parametrize("saver", ["standard", "pytree", "pytree-folders", "manager", "v1"])
def test_every_saver(tmp_path: Path, saver: str) -> None:
    value, path = tree("2x4"), tmp_path / "step"
    if saver == "standard":
        with v0.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, value)
    elif saver.startswith("pytree"):
        v0.PyTreeCheckpointer(use_ocdbt=saver == "pytree").save(path, value)
    elif saver == "manager":
        with v0.CheckpointManager(path) as manager:
            for number in (1, 9, 10):
                manager.save(number, args=v0.args.StandardSave(value if number == 10 else {"a": jnp.ones(2)}))
    else:
        v1.save(path, value)
    manifest = shardload.inspect(path)
    assert manifest.format == "orbax"
    assert manifest.metadata["step"] == (10 if saver == "manager" else None)
    check(manifest, value)


def test_strings_random_key_data_and_config(tmp_path: Path) -> None:
    value = {"text": "hi", "key": jax.random.key(3), "none": None, "w": jnp.ones(4)}
    v1.save_checkpointables(tmp_path / "3", {"pytree": value, "model_config": {"config": '{"class_name": "M"}'}})
    manifest = open_manifest(tmp_path / "3")
    assert manifest.metadata["strings"] == {"text": "hi"}
    assert manifest.metadata["left_out"] == {"none": "None", "text": "string"}
    assert manifest.config == {"class_name": "M"}
    assert json.dumps(dict(manifest.metadata))
    assert rows_of(manifest.tensors["key"]).tobytes() == np.asarray(jax.random.key_data(value["key"])).tobytes()


def test_only_files_that_a_load_needs_are_read(tmp_path: Path) -> None:
    """Orbax's descriptions of arrays repeat what the store says, one file for each process that saved."""
    step = save(tmp_path / "3", {"a": jnp.ones(3)})
    (described,) = step.glob("*/array_metadatas/*")
    described.write_bytes(b"\xff")
    assert rows_of(open_manifest(step).tensors["a"]).all()


def test_a_root_opens_its_newest_step(tmp_path: Path) -> None:
    for step in (2, 10):
        save(tmp_path / str(step), {"a": np.full(3, step)})
    for name in ("11", ".staging/12", "13.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "99").mkdir()
    (tmp_path / "99/notes.txt").touch()
    manifest = open_manifest(tmp_path)
    assert manifest.metadata["step"] == 10
    assert rows_of(manifest.tensors["a"])[0] == 10


def test_one_of_several_trees_is_chosen_by_the_caller(tmp_path: Path) -> None:
    """A `CheckpointManager` saves a training state as items with names of the user's."""
    with v0.CheckpointManager(tmp_path / "run") as manager:
        items = {"state": v0.args.StandardSave({"w": jnp.ones(3)}), "opt": v0.args.StandardSave({"m": jnp.zeros(3)})}
        manager.save(3, args=v0.args.Composite(**items))
    for folder in (tmp_path / "run", tmp_path / "run/3"):
        with pytest.raises(SourceError, match=r"contains several trees \((state, opt|opt, state)\); open the folder"):
            open_manifest(folder)
    for name, tensor in (("state", "w"), ("opt", "m")):
        assert list(open_manifest(tmp_path / "run/3" / name).tensors) == [tensor]


@pytest.mark.parametrize("other", ["opt", "assets"])
def test_trees_beside_the_one_that_is_read_are_named(tmp_path: Path, other: str) -> None:
    v1.save_checkpointables(tmp_path / "3", {"pytree": {"w": jnp.ones(3)}, other: {"m": jnp.zeros(3)}})
    manifest = open_manifest(tmp_path / "3")
    assert list(manifest.tensors) == ["w"]
    # Keras' callback saves a model's assets like this.
    assert manifest.notes == (() if other == "assets" else ("only 'pytree' is read, not opt: open their folders",))


def test_what_lies_beside_is_told(tmp_path: Path) -> None:
    ours = save(tmp_path / "4", {"a": np.ones(3)}) / "shardload"
    ours.mkdir()
    (ours / "structure.json").write_text('{"version": 1}')
    (ours / "digests.json").write_text("{}")
    found = open_manifest(tmp_path / "4").metadata
    assert found["structure"] == {"version": 1}
    assert found["digests"] == str(ours / "digests.json")
    assert found["tree"] == {"a": ["a"]}


def test_deep_trees_of_other_folders(tmp_path: Path) -> None:
    context = ts.Context()
    config = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 4}
    expected = {f"long prefix/{i:03d}:%": b"x" * (i % 9 + 1) for i in range(80)}
    inner, outer = (
        ts.KvStore.open(
            {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}{sub}"}, "config": config},
            context=context,
        ).result()
        for sub in ("/sub/", "/")
    )
    transaction = ts.Transaction()
    for key, content in expected.items():
        inner.with_transaction(transaction)[key] = content
    transaction.commit_sync()
    transaction = ts.Transaction(atomic=True)
    inner.experimental_copy_range_to(outer.with_transaction(transaction)).result()
    transaction.commit_sync()
    for folder in (tmp_path, tmp_path / "sub"):
        assert {key: value.read(99, what="it") for key, value in read_values(located(folder)).items()} == expected


def test_files_that_shrink_later(tmp_path: Path) -> None:
    manifest = open_manifest(save(tmp_path / "7", {"a": placed(np.arange(4096.0), "1x8", "model")}))
    for path in manifest.files:
        os.truncate(path.local_path(), 10)
    with pytest.raises(TransferError):
        rows_of(manifest.tensors["a"])


def plain(tmp_path: Path, **changes: Any) -> Path:
    """A step whose one array lies in a folder, its metadata changed."""
    step = save(tmp_path / "7", {"a": np.arange(64.0)}, use_ocdbt=False, use_compression=False, use_zarr3=False)
    header = step / "pytree/a/.zarray"
    header.write_text(json.dumps(json.loads(header.read_text()) | changes))
    return step


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"shape": [1 << 62]}, SourceError, "chunks, but"),
        ({"shape": [1 << 62], "chunks": [1 << 62]}, UnsafeSourceError, "at most 40000 times"),
        ({"shape": [64, 1 << 50, 1 << 50], "chunks": [1, 1, 1]}, SourceError, "but also"),
        ({"shape": [-1]}, SourceError, "from 0 to"),
        ({"shape": [64] * 40, "chunks": [64] * 40}, SourceError, "40 dims"),
        ({"chunks": [0]}, SourceError, "expected one number per dim"),
        ({"chunks": [64, 64]}, SourceError, "cuts the shape"),
        ({"chunks": [32]}, SourceError, "should have 2 chunks, but has 1"),
        ({"chunks": [128]}, SourceError, "should have 1024 bytes"),
        ({"dtype": "<f2"}, SourceError, "should have 128 bytes"),
        ({"dtype": "|O"}, UnsupportedError, "is not supported"),
        ({"dtype": [["a", "<f4"]]}, SourceError, "does not describe"),
        ({"shape": "wide"}, SourceError, "is not a list of integers"),
        ({"zarr_format": 9}, SourceError, "zarr_format"),
        ({"dimension_separator": 5}, SourceError, "the separator in keys"),
        ({"compressor": {"id": "zstd", "level": 1 << 70}}, SourceError, "more than 64 bits"),
        ({"compressor": {"id": "zstd"}, "fill_value": float("nan")}, SourceError, "is not a JSON number"),
        ({"compressor": {"id": "zstd", "level": "\ud800"}}, SourceError, "does not describe"),
        ({"compressor": {"id": 5}}, SourceError, "is not a compressor or filter"),
        ({"compressor": "zstd"}, SourceError, "is not a compressor or filter"),
        ({"filters": [5]}, SourceError, "is not a compressor or filter"),
        ({"filters": 5}, SourceError, "does not describe"),
        ({"dtype": "f4,f4"}, UnsupportedError, "is not supported"),
        ({"dtype": "(9999999999999999999,)f4"}, UnsupportedError, "is not supported"),
    ],
)
def test_metadata_that_lies(tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        open_manifest(plain(tmp_path, **changes))


def zstd_step(tmp_path: Path, **changes: Any) -> Path:
    """A step whose one array lies compressed in a folder, in one shard, its metadata changed."""
    step = save(tmp_path / "7", {"a": np.arange(64.0)}, use_ocdbt=False, use_compression=True, use_zarr3=True)
    header = step / "pytree/a/zarr.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | changes))
    return step


DEEP = json.loads("[" * 40 + "]" * 40)
ROWS = {"name": "rows", "configuration": {"chunk_shape": [64]}}
SHARDING = {"name": "sharding_indexed", "configuration": {"codecs": [5]}}


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"codecs": []}, SourceError, "is not a list of codecs"),
        ({"codecs": ["zstd"]}, SourceError, "does not describe"),
        ({"codecs": [{"name": ["zstd"]}]}, SourceError, "is not a codec"),
        ({"codecs": [{"name": "zstd", "configuration": 5}]}, SourceError, "is not a codec"),
        ({"codecs": [{"name": "zstd", "configuration": {"level": 1 << 70}}]}, SourceError, "more than 64 bits"),
        ({"codecs": [{"name": "transpose", "configuration": {"order": DEEP}}]}, SourceError, "deep"),
        ({"codecs": [SHARDING]}, SourceError, "does not describe"),
        ({"fill_value": -(1 << 64)}, SourceError, "more than 64 bits"),
        ({"node_type": "group"}, SourceError, "is not an array with a regular grid"),
        ({"chunk_grid": ROWS}, SourceError, "is not an array with a regular grid"),
        ({"chunk_key_encoding": {"name": "v3"}}, SourceError, "is not an array with a regular grid"),
        ({"codecs": None}, ShardloadError, r"array: None is not a list of codecs\. Copy"),
        ({"chunk_grid": 5}, ShardloadError, r"array: an entry is of the wrong type\. Copy"),
        ({"chunk_grid": {"name": "regular"}}, ShardloadError, r"array: 'configuration' is missing\. Copy"),
        ({"data_type": "string"}, ShardloadError, r"zarr\.json: the data type 'string' is not supported"),
    ],
)
def test_codecs_that_lie(tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        open_manifest(zstd_step(tmp_path, **changes))


def test_a_chunk_that_does_not_decode_is_told_without_the_insides_of_tensorstore(tmp_path: Path) -> None:
    step = zstd_step(tmp_path)
    chunk = step / "pytree/a/c/0"
    chunk.write_bytes(b"\0" + chunk.read_bytes()[1:])
    with pytest.raises(TransferError) as caught:
        rows_of(open_manifest(step).tensors["a"])
    message = str(caught.value)
    assert "does not decode: ZSTD_decompressStream() failed: Unknown frame descriptor. Copy the checkpoint" in message
    assert not any(word in message for word in ("FAILED_PRECONDITION", "spec", "uncompressed byte", "source loc"))


def test_what_only_describes_an_array_may_be_anything(tmp_path: Path) -> None:
    step = zstd_step(tmp_path, attributes={"a": [float("nan"), 1 << 70, DEEP]})
    check(open_manifest(step), {"a": np.arange(64.0)})


def test_a_compressed_chunk_is_not_stored_in_far_more_bytes_than_it_has(tmp_path: Path) -> None:
    step = save(tmp_path / "7", {"a": np.arange(64.0)}, use_ocdbt=False, use_compression=True, use_zarr3=False)
    os.truncate(step / "pytree/a/0", 1 << 40)
    with pytest.raises(UnsafeSourceError, match="is stored in 1099511627776"):
        open_manifest(step)


def _link_data_out(item: Path) -> None:
    outside = item.parent.parent / "outside"
    (item / "ocdbt.process_0").rename(outside)
    (item / "ocdbt.process_0").symlink_to(outside)


def _replace_in_tree(item: Path, old: str, new: str) -> None:
    (item / "_METADATA").write_text((item / "_METADATA").read_text().replace(old, new))


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "remove_tree": (lambda item: (item / "_METADATA").unlink(), SourceError, "_METADATA"),
    "empty_manifest": (lambda item: (item / "manifest.ocdbt").write_bytes(b""), TruncatedSourceError, "empty"),
    "remove_manifest": (lambda item: (item / "manifest.ocdbt").unlink(), SourceError, "does not contain it"),
    "flip_manifest": (lambda item: flip(item / "manifest.ocdbt", 40), SourceError, "damaged"),
    "flip_node": (lambda item: flip(next((item / "d").iterdir()), 40), SourceError, "damaged"),
    "truncate_data": (
        lambda item: os.truncate(largest_file(item / "ocdbt.process_0/d"), 4000),
        TruncatedSourceError,
        "truncated",
    ),
    "remove_data": (lambda item: shutil.rmtree(item / "ocdbt.process_0"), SourceNotFoundError, "There is no file"),
    "link_data_out": (_link_data_out, UnsafeSourceError, "symbolic link"),
    "duplicate_key": (lambda item: _replace_in_tree(item, '"use_zarr3"', '"use_ocdbt"'), SourceError, "twice"),
    "unknown_leaf": (
        lambda item: _replace_in_tree(item, '"key": "a"', '"key": "b"'),
        SourceError,
        "does not contain it",
    ),
}


@pytest.mark.parametrize(("damage", "error", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage(tmp_path: Path, damage: Callable[[Path], object], error: type[Exception], says: str) -> None:
    step = save(tmp_path / "7", {"a": placed(np.arange(4096.0), "1x8", "model")}, use_compression=False)
    damage(step / "pytree")
    with pytest.raises(error, match=says):
        open_manifest(step)


def test_a_node_that_would_inflate_is_refused_unread(tmp_path: Path) -> None:
    step = save(tmp_path / "7", {"a": np.arange(4096.0)})
    block = (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"  # 128 KiB of zeros, by run length
    body = b"\x28\xb5\x2f\xfd\x00\x58" + block * 2000 + b"\x01\0\0"
    raw = bytes.fromhex("0cdb3a2a") + struct.pack("<Q", 18 + len(body)) + b"\0\1" + body + b"\0" * 4
    (step / "pytree/manifest.ocdbt").write_bytes(raw)
    with pytest.raises(UnsafeSourceError, match="inflates to more than"):
        open_manifest(step)


def test_nodes_that_share_their_children_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four levels of 60 entries, all for the same node below: 13 million leaves in a file of 500 bytes."""
    (tmp_path / "manifest.ocdbt").write_bytes(bytes(100))
    (tmp_path / "d").write_bytes(bytes(500))

    def dump(_: object, location: str | None, path: Path) -> Any:
        if location is None:
            root = {"location": "btreenode::d:0:100", "statistics": {"num_keys": 1}}
            return {"versions": [{"generation_number": 1, "root": root}]}
        height = 4 - int(location.split(":")[3]) // 100
        below = {"location": f"btreenode::d:{500 - height * 100}:100", "subtree_common_prefix": b"a"}
        leaf = {"key": b"a", "inline_value": b"1"}
        return {"height": height, "entries": [below if height else leaf] * 60}

    monkeypatch.setattr(OcdbtWalk, "dump", dump)
    with pytest.raises(SourceError, match="again and again"):
        read_values(located(tmp_path))


REFERENCES = {
    "names": ("value::../../etc/passwd:0:1", "value:../:d/x:0:1", "value::/etc/passwd:0:1"),  # out of the folder
    "which is not the location of a value": ("value::d::1", "value::d:1:", f"value::d:0:{'9' * 5000}", "value::d:-1:1"),
}


@pytest.mark.parametrize(("says", "place"), [(says, place) for says, places in REFERENCES.items() for place in places])
def test_references_that_leave_the_folder_or_lack_two_numbers(tmp_path: Path, says: str, place: str) -> None:
    with pytest.raises(SourceError, match=says):
        OcdbtWalk(located(tmp_path)).locate(place, "value")


def test_chunks_may_not_overlap() -> None:
    grid = Chunked((2,), {(0,): Extent(located("f"), 0), (1,): Extent(located("f"), 4)})
    with pytest.raises(SourceError, match="overlap"):
        checked_tensors([Tensor("a", (4,), np.dtype("float32"), grid)], files={located("f"): 100})
    with pytest.raises(TruncatedSourceError, match="byte 12"):
        checked_tensors([Tensor("a", (4,), np.dtype("float32"), grid)], files={located("f"): 11})


def test_arrays_without_all_chunks(tmp_path: Path) -> None:
    step = plain(tmp_path, shape=[96], chunks=[64], fill_value=7)
    metadata = step / "pytree/_METADATA"
    metadata.write_text(metadata.read_text().replace('fill_value": true', 'fill_value": false'))
    assert rows_of(open_manifest(step).tensors["a"]).tolist() == [*range(64), *[7] * 32]


def test_big_endian_is_decoded(tmp_path: Path) -> None:
    step = plain(tmp_path, dtype=">f8")
    (step / "pytree/a/0").write_bytes(np.arange(64.0).astype(">f8").tobytes())
    check(open_manifest(step), {"a": np.arange(64.0)})


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no checkpoint"):
        open_manifest(tmp_path)
    with pytest.raises(SourceNotFoundError, match="no step"):
        open_manifest(tmp_path, format="orbax")


def test_keras_own_callback(tmp_path: Path) -> None:
    inputs = keras.Input((64,))
    model = keras.Model(inputs, keras.layers.Dense(48)(inputs))
    model.compile("adam", "mse")
    callback = keras.callbacks.OrbaxCheckpoint(directory=str(tmp_path), save_freq="epoch")
    model.fit(np.ones((8, 64)), np.ones((8, 48)), verbose=0, callbacks=[callback])
    manifest = open_manifest(tmp_path)
    assert manifest.config["class_name"] == "Functional"
    for variable in model.trainable_variables:
        found = rows_of(manifest.tensors[f"trainable_variables/{variable.path}"])
        assert found.tobytes() == np.asarray(variable.value).tobytes()


@pytest.mark.parametrize("raw", [b"{}", b'{"zarr_format": 3}', b'{"zarr_format": 3, "chunk_grid": []}', b"[]"])
def test_headers_without_sense(raw: bytes) -> None:
    with pytest.raises(SourceError):
        parse(raw, name="a", where="somewhere")
