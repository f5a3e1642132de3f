"""Compressed chunks of zarr whose metadata, indexes or bytes are not what they should be."""

import json
import shutil

import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import v1

from shardload.errors import SourceError, TransferError, UnsafeSourceError
from shardload.loaders.orbax.loader import open_orbax
from shardload.manifest import Chunked, Packed
from shardload.stores.local import located
from shardload.transfer.read_tensor import read_tensor

VALUE = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3}}
CRC = {"name": "crc32c"}
BLOSC3 = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4}}
BLOSC = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1}


def step_of(folder, driver, metadata):
    """A step whose one array was written by TensorStore with these metadata; and that array's folder."""
    with v1.Context(array_options=v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(use_ocdbt=False))):
        v1.save_checkpointables(folder, {"pytree": {"a": VALUE}})
    place = folder / "pytree" / "a"
    shutil.rmtree(place)
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{place}/"}, "metadata": metadata}
    ts.open(spec, create=True, shape=VALUE.shape, dtype="float32").result().write(VALUE).result()
    return folder, place


INDEX = {"index_codecs": [BYTES, CRC]}


def shards(codecs, inner=(16, 64), index=INDEX):
    return {"name": "sharding_indexed", "configuration": {"chunk_shape": list(inner), "codecs": codecs, **index}}


def sharded(folder, codecs, inner=(16, 64)):
    """Shards of the whole array, cut into inner chunks."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [64, 64]}}
    return step_of(folder, "zarr3", {"chunk_grid": grid, "codecs": [shards(codecs, inner)]})


def test_inner_chunks_are_decoded_by_themselves(tmp_path):
    step, _ = sharded(tmp_path / "7", [BYTES, ZSTD])
    manifest = open_orbax(located(step))
    storage = manifest.tensors["a"].storage
    assert isinstance(storage, Chunked) and len(storage.extents) == 4
    assert all(isinstance(place, Packed) and 0 < place.n_bytes < 4096 for place in storage.extents.values())
    np.testing.assert_array_equal(read_tensor(manifest, "a"), VALUE)


@pytest.mark.parametrize("codecs", [[BYTES], [BYTES, ZSTD]], ids=["raw", "zstd"])
@pytest.mark.parametrize("damage", ["missing", "swapped", "repeated", "nothing", "checksum"])
def test_the_index_of_a_shard_has_a_checksum(damage, codecs, tmp_path):
    step, place = sharded(tmp_path / "7", codecs)
    raw = bytearray((place / "c/0/0").read_bytes())
    at = len(raw) - 4 - 16 * 4
    first, second = raw[at : at + 16], raw[at + 16 : at + 32]
    match damage:
        case "missing":
            raw[at : at + 16] = b"\xff" * 16
        case "swapped":
            raw[at : at + 32] = second + first
        case "repeated":
            raw[at : at + 16] = second
        case "nothing":
            raw[at:] = b"\xff" * (len(raw) - at)
        case "checksum":
            raw[-1] ^= 1
    (place / "c/0/0").write_bytes(raw)
    with pytest.raises(SourceError, match="index of the shard at byte 0 is damaged"):
        open_orbax(located(step))


def test_chunks_never_written_are_what_the_metadata_say(tmp_path):
    metadata = {"chunks": [16, 64], "compressor": {"id": "zlib", "level": 1}, "fill_value": 7.0, "dtype": "<f4"}
    step, place = step_of(tmp_path / "7", "zarr", metadata)
    (place / "1.0").unlink()
    tree = json.loads((step / "pytree/_METADATA").read_text())
    (step / "pytree/_METADATA").write_text(json.dumps({**tree, "store_array_data_equal_to_fill_value": False}))
    found = read_tensor(open_orbax(located(step)), "a")
    assert (found[16:32] == 7).all()
    np.testing.assert_array_equal(np.delete(found, np.s_[16:32], 0), np.delete(VALUE, np.s_[16:32], 0))


@pytest.mark.parametrize(
    ("make", "chunk", "n_bytes"),
    [
        (lambda folder: step_of(folder, "zarr", {"chunks": [16, 64], "compressor": BLOSC}), "2.0", 4096),
        (lambda folder: sharded(folder, [BYTES, BLOSC3], inner=(64, 64)), "c/0/0", 16384),
        (lambda folder: step_of(folder, "zarr3", {"codecs": [BYTES, BLOSC3, CRC]}), "c/0/0", 16384),
    ],
    ids=["zarr2", "in a shard", "with a checksum"],
)
def test_a_blosc_header_that_asks_for_gigabytes(make, chunk, n_bytes, tmp_path):
    step, place = make(tmp_path / "7")
    manifest = open_orbax(located(step))
    np.testing.assert_array_equal(read_tensor(manifest, "a"), VALUE)
    raw = bytearray((place / chunk).read_bytes())
    raw[4:8] = (2_000_000_000).to_bytes(4, "little")
    (place / chunk).write_bytes(raw)
    with pytest.raises(TransferError, match=f"declares 2000000000 bytes, but it should have {n_bytes}"):
        read_tensor(manifest, "a")


GZIP = {"name": "gzip", "configuration": {"level": 1}}
AGAIN, UNKNOWN = "compresses again what blosc compressed", "does not describe an array that can be decoded"
HEADERS = {
    "blosc and gzip": ({"codecs": [BYTES, BLOSC3, GZIP]}, AGAIN),
    "blosc in nested shards": ({"codecs": [shards([shards([BYTES, BLOSC3])], inner=(64, 64))]}, AGAIN),
    "blosc, odd index": (
        {"codecs": [shards([BYTES, BLOSC3], index={"index_codecs": [BYTES, CRC, CRC]})]},
        AGAIN,
    ),
    "compressor": ({"compressor": {"id": "magic"}}, UNKNOWN),
    "filters": ({"filters": [{"id": "delta"}]}, UNKNOWN),
    "fill_value": ({"fill_value": "x"}, UNKNOWN),
    "order": ({"order": "Q"}, UNKNOWN),
}


@pytest.mark.parametrize(("changes", "says"), HEADERS.values(), ids=HEADERS)
def test_what_cannot_be_decoded_is_known_from_the_header(changes, says, tmp_path):
    metadata = {"codecs": [BYTES]} if says == AGAIN else {"chunks": [16, 64], "compressor": {"id": "zlib", "level": 1}}
    step, place = step_of(tmp_path / "7", "zarr3" if says == AGAIN else "zarr", metadata)
    header = place / ("zarr.json" if says == AGAIN else ".zarray")
    header.write_text(json.dumps(json.loads(header.read_text()) | changes))
    with pytest.raises(SourceError, match=says):
        open_orbax(located(step))


def test_a_chunk_far_larger_than_its_tensor(tmp_path):
    step, _ = step_of(tmp_path / "7", "zarr", {"chunks": [8192, 8192], "compressor": {"id": "zlib", "level": 1}})
    with pytest.raises(UnsafeSourceError, match="declares chunks of 268435456 bytes for a tensor of 16384"):
        open_orbax(located(step))
