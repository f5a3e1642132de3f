"""``.keras`` archives: Keras stores the member ``model.weights.h5`` uncompressed, so it is read in place.

    ┌ local header ┬ metadata.json ┬ local header ┬ config.json ┬ local header ┬ model.weights.h5 ┬ central directory ┐
                                                                              └ an HDF5 file inside the file

If an archive was unzipped and zipped again, that member is compressed, and is unpacked to a private file here.

The zip is untrusted. The central directory lists where members start, and each local header must agree with it. Members
may not overlap, repeat or be encrypted, and nothing may precede the first one: other programs might find other members
in such an archive. Members are decompressed in blocks of limited size. `zipfile` has no such limit for bzip2 and LZMA,
and 40 bytes of bzip2 can become 45 MB.
"""

from __future__ import annotations

import bz2
import functools
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, Protocol

from shardload.errors import ShardloadError, SourceError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders.extents import checked_tensors
from shardload.loaders.recognition import refused_zip
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest
from shardload.stores.json_files import MAX_JSON_BYTES, parse_object
from shardload.stores.local import write_private_copy
from shardload.stores.location import Location
from shardload.stores.store import File, read_bytes
from shardload.units import exact_bytes, plural

_WEIGHTS = "model.weights.h5"
_CONFIG = "config.json"
_METADATA = "metadata.json"
ASSETS = "assets/"
_MAX_EXPANSION = 1000
"""Limit on inflated bytes per stored byte of a JSON file in the archive. Keras has the same limit."""
ASSET_EXPANSION, ASSET_FLOOR_BYTES = 100, 1 << 28
"""Limit on inflated bytes per stored byte of an asset, and the inflated size above which it applies. As in Keras."""
_WEIGHTS_EXPANSION, _WEIGHTS_FLOOR_BYTES = 100, 1 << 25
"""Limit on inflated bytes per stored byte of weights, and the inflated size above which it applies. Most need 2."""
_MAX_DICTIONARY_BYTES = 64 << 20
"""Limit on the bytes of LZMA's dictionary, which decompressing keeps in memory; xz's highest level uses 64 MiB."""
MAGIC = b"PK\x03\x04"
"""First bytes of a zip, and of each local header."""
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_WAY_OUT = "Save it again with Keras"
_LZMA = struct.Struct("<2xHBI")
"""Header of LZMA data in a zip: version (skipped), length of the properties, their first byte, dictionary size."""
_ENCRYPTED = 0x1
_BLOCK_BYTES = 1 << 18
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def open_file(path: Location) -> Manifest:
    """Return the manifest of one ``.keras`` archive: the model's configuration and its tensors."""
    # Imported late: formats are listed and recognised without h5py.
    from shardload.loaders.hdf5 import datasets as hdf5

    members = read_members(path)
    info = _weights(path, members)
    with closing(path.open()) as file:
        starts = data_starts(path, file, members)
        config, metadata = (_json(path, file, members, name, starts) for name in (_CONFIG, _METADATA))
        start, files = starts[_WEIGHTS], {path: file.n_bytes}
        if info.compress_type == zipfile.ZIP_STORED:
            region = hdf5.FileRegion(path, start, info.file_size)
        else:
            content = member_blocks(path, file, info, start=start)
            copy = write_private_copy(content, n_bytes=info.file_size, shown=f"{path}:{info.filename}")
            region = hdf5.FileRegion.whole(copy)
            files = {region.path: region.nbytes}
    found = hdf5.read_tensors(region)
    tensors = checked_tensors(found.tensors, files=files)
    return Manifest(path, "keras-archive", tensors, files, config, metadata, notes=found.notes)


def assets(path: Location) -> Iterator[tuple[str, Callable[[BinaryIO], None]]]:
    """Yield each asset file that layers saved: its path below ``assets/``, and a function that writes its content."""
    members = read_members(path)
    files = [info for key, info in members.items() if key.startswith(ASSETS) and not key.endswith("/")]
    for info in files:
        if info.file_size > ASSET_FLOOR_BYTES and info.file_size > ASSET_EXPANSION * info.compress_size:
            raise UnsafeSourceError(
                f"{path}: {info.filename} declares {exact_bytes(info.file_size)}, but stores only "
                f"{exact_bytes(info.compress_size)}; assets may expand at most {ASSET_EXPANSION} times. "
                "Save the model again with Keras"
            )
    with closing(path.open()) as file:
        starts = data_starts(path, file, members)
        for info in files:
            content = member_blocks(path, file, info, start=starts[info.filename])
            yield info.filename.removeprefix(ASSETS), functools.partial(_copy, content)


def _copy(content: Iterator[bytes], file: BinaryIO) -> None:
    for block in content:
        file.write(block)


def _weights(path: Location, members: Mapping[str, zipfile.ZipInfo]) -> zipfile.ZipInfo:
    if (info := members.get(_WEIGHTS)) is None:
        if "model.weights.npz" in members:
            raise UnsupportedError(
                f"{path} stores its weights as .npz; save it again: keras.saving.save_model(model, path)"
            )
        if refused := refused_zip(path, members=members):
            raise refused
        listed = ", ".join(sorted(members)[:8])
        raise SourceError(
            f"{path} is a zip, but not a Keras archive: it should contain {_WEIGHTS}, but contains {listed}"
        )
    _check_readable(path, info)
    is_stored = info.compress_type == zipfile.ZIP_STORED
    is_large = info.file_size > _WEIGHTS_FLOOR_BYTES
    if not is_stored and is_large and info.file_size > _WEIGHTS_EXPANSION * info.compress_size:
        raise UnsafeSourceError(
            f"{path}: {_WEIGHTS} declares {exact_bytes(info.file_size)}, but stores only "
            f"{exact_bytes(info.compress_size)}; compressed weights may expand at most {_WEIGHTS_EXPANSION} times. "
            f"If you trust it, unzip it and open {_WEIGHTS}"
        )
    # The region must end where the member does, or libhdf5 would read its neighbour.
    if is_stored and info.compress_size != info.file_size:
        raise SourceError(
            f"{path}: {_WEIGHTS} is not compressed, but takes {exact_bytes(info.compress_size)} for a file of "
            f"{exact_bytes(info.file_size)}. Download or save it again"
        )
    return info


def _json(
    path: Location, file: File, members: Mapping[str, zipfile.ZipInfo], name: str, starts: Mapping[str, int]
) -> dict[str, Any]:
    if (info := members.get(name)) is None:
        raise SourceError(
            f"{path} should contain {name}, as every Keras archive does, but contains {', '.join(members)}"
        )
    # Up to 1 KiB stored counts as 1 KiB: small configurations that compress well are harmless.
    if info.file_size > MAX_JSON_BYTES or info.file_size > _MAX_EXPANSION * max(info.compress_size, 1024):
        raise UnsafeSourceError(
            f"{path}: {name} declares {exact_bytes(info.file_size)}, but stores only "
            f"{exact_bytes(info.compress_size)}; it may expand at most {_MAX_EXPANSION} times, and "
            f"to {exact_bytes(MAX_JSON_BYTES)} at most. Save the model again with Keras"
        )
    content = b"".join(member_blocks(path, file, info, start=starts[name]))
    return parse_object(content, path=f"{path}:{name}")


def read_members(path: Location, *, way_out: str = _WAY_OUT) -> dict[str, zipfile.ZipInfo]:
    """Return name → member of a zip; raise if another program could find other members in this zip.

    ``way_out``: the last sentence of errors.
    """
    with _translated(path), path.stream() as raw, zipfile.ZipFile(raw) as archive:
        infos = archive.infolist()
    members = {info.filename: info for info in infos}
    # zipfile returns the last of several members with one name; other readers may return the first.
    if len(members) < len(infos):
        raise UnsafeSourceError(f"{path} contains {plural(len(infos), 'member')} under {len(members)} names. {way_out}")
    # zipfile tolerates data before the archive, such as a self-extracting program, and adjusts all offsets.
    if not members or min(info.header_offset for info in infos) != 0:
        raise UnsafeSourceError(f"{path} has other data before its first member. {way_out}")
    size = path.size
    for info in infos:
        if info.header_offset + info.compress_size > size:
            raise TruncatedSourceError(
                f"{path} is truncated: member {info.filename!r} ends past its {exact_bytes(size)}. Download it again"
            )
    return members


def data_starts(
    path: Location, file: File, members: dict[str, zipfile.ZipInfo], *, way_out: str = _WAY_OUT
) -> dict[str, int]:
    """Return member → byte offset of its data in the zip; raise if members overlap or local headers are wrong.

    ``way_out``: the last sentence of errors.
    """
    starts: dict[str, int] = {}
    end, before = 0, ""
    # Members that overlap let a small archive unpack to petabytes.
    for info in sorted(members.values(), key=lambda info: info.header_offset):
        if info.header_offset < end:
            raise UnsafeSourceError(
                f"{path}: members {before!r} and {info.filename!r} overlap, so they could expand to any size. {way_out}"
            )
        starts[info.filename] = _data_start(path, file, info, way_out)
        end, before = starts[info.filename] + info.compress_size, info.filename
    if end > file.n_bytes:
        raise TruncatedSourceError(
            f"{path} is truncated: member {before!r} ends at byte {end}, but the file has {exact_bytes(file.n_bytes)}. "
            "Download it again"
        )
    return starts


def _data_start(path: Location, file: File, info: zipfile.ZipInfo, way_out: str) -> int:
    what = f"the local header of {info.filename!r}"
    raw = read_bytes(file, LOCAL_HEADER.size, offset=info.header_offset, path=str(path), what=what)
    magic, _, flags, method, *_, name_length, extra_length = LOCAL_HEADER.unpack(raw)
    at = info.header_offset + LOCAL_HEADER.size
    name = read_bytes(file, name_length, offset=at, path=str(path), what=what)
    # `filename` is cut at a NUL byte; `orig_filename` is what the directory says. Bit 11 of the flags means UTF-8.
    expected = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace")
    # Sizes are not compared: a local header may leave them to a zip64 field or to a descriptor after the data.
    if magic != MAGIC or name != expected or method != info.compress_type or (flags ^ info.flag_bits) & _ENCRYPTED:
        raise UnsafeSourceError(
            f"{path}: {what} says {name[:100]!r} (method {method}), the central directory {info.filename!r} "
            f"(method {info.compress_type}); they must agree. {way_out}"
        )
    return at + int(name_length) + int(extra_length)


def _check_readable(path: Location, info: zipfile.ZipInfo) -> None:
    """Raise for a member of a zip that is encrypted, or compressed in a way that cannot be decompressed here."""
    if info.flag_bits & _ENCRYPTED:
        raise UnsupportedError(f"{path}: member {info.filename} is encrypted; save the model again without a password")
    if info.compress_type not in _COMPRESSIONS:
        raise UnsupportedError(
            f"{path}: member {info.filename} is compressed by method {info.compress_type}, expected deflate, bzip2, "
            "LZMA or none. Unzip the archive, and zip it again"
        )


def member_blocks(path: Location, file: File, info: zipfile.ZipInfo, *, start: int) -> Iterator[bytes]:
    """Yield a member's content in blocks of at most 256 KiB, and check its size and its CRC.

    The caller must have checked that the size which the member declares is acceptable.
    """
    _check_readable(path, info)
    left, crc = info.file_size, 0
    with _translated(path):
        for block in _decoded(path, file, info, start=start):
            left, crc = left - len(block), zlib.crc32(block, crc)
            yield block
    if left or crc != info.CRC:
        found = f"ends {exact_bytes(left)} early" if left else "does not match its checksum"
        raise SourceError(f"{path} is damaged: member {info.filename} {found}. Download or save it again")


def _decoded(path: Location, file: File, info: zipfile.ZipInfo, *, start: int) -> Iterator[bytes]:
    at, end, left = start, start + info.compress_size, info.file_size
    head = read_bytes(file, min(_LZMA.size, end - at), offset=at, path=str(path), what=info.filename)
    decoder, header_bytes = _decoder(info, head)
    at += header_bytes
    # LZMA without an end marker goes on after its last byte, so the declared size ends it.
    while left and not decoder.eof:
        raw = b""
        if decoder.needs_input and at < end:
            raw = read_bytes(file, min(_BLOCK_BYTES, end - at), offset=at, path=str(path), what=info.filename)
            at += len(raw)
        block = decoder.decompress(raw, min(_BLOCK_BYTES, left))
        if not block and not raw:
            return
        left -= len(block)
        yield block


class _Decoder(Protocol):
    @property
    def needs_input(self) -> bool: ...

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Stored:
    needs_input, eof = True, False

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return data[:max_length]


class _Deflated:
    """zlib's decompressor with the interface of `bz2.BZ2Decompressor`, so that one loop serves all compressions."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(-zlib.MAX_WBITS)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


def _decoder(info: zipfile.ZipInfo, head: bytes) -> tuple[_Decoder, int]:
    """Return a decompressor for a member, and how many header bytes precede the member's compressed data."""
    match info.compress_type:
        case zipfile.ZIP_STORED:
            return _Stored(), 0
        case zipfile.ZIP_DEFLATED:
            return _Deflated(), 0
        case zipfile.ZIP_BZIP2:
            return bz2.BZ2Decompressor(), 0
    n_properties, properties, declared = _LZMA.unpack(head)
    if n_properties != 5 or properties >= 9 * 5 * 5:
        raise ValueError(f"{info.filename} has no valid LZMA header")
    # What lies further back than the content is long is never referred to.
    dictionary = max(1 << 12, min(declared, info.file_size))
    if dictionary > _MAX_DICTIONARY_BYTES:
        raise UnsupportedError(
            f"Cannot unpack {info.filename}: its LZMA dictionary has {exact_bytes(declared)}, expected at most "
            f"{exact_bytes(_MAX_DICTIONARY_BYTES)}. Unzip the archive, and zip it again with a smaller one"
        )
    rest, lc = divmod(properties, 9)
    pb, lp = divmod(rest, 5)
    settings = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[settings]), _LZMA.size


@contextmanager
def _translated(path: Location) -> Iterator[None]:
    """Turn errors of zipfile and of decompressors in the with block into shardload's errors, which name the file."""
    try:
        yield
    except ShardloadError:
        # Some of these are a ValueError or an OSError as well, and say more.
        raise
    except RuntimeError as error:
        # Encryption and unknown compression; a NotImplementedError is a RuntimeError.
        raise UnsupportedError(f"{path}: {error}; save it again with Keras") from error
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, struct.error, zlib.error, lzma.LZMAError, KeyError) as e:
        # zipfile takes any OSError for a damaged file: a store that does not respond says nothing about the archive.
        if isinstance(e.__context__, ShardloadError):
            raise e.__context__ from None
        raise SourceError(f"{path} is a damaged zip archive: {e}. Download or save it again") from e


SPEC = FormatSpec(
    name="keras-archive",
    description="a .keras archive",
    endings=(".keras",),
    is_file=lambda content: content.head.startswith(MAGIC),
    open_file=open_file,
    described_by="keras",
    tensor_names="keras",
    assets=assets,
)
