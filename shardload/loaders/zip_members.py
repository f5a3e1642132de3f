"""Members of an untrusted zip: where each starts, and its content in blocks, whatever it was compressed with.

    ┌ local header ┬ member ┬ local header ┬ member ┬ … ┬ central directory ┐

The central directory lists where members start; each local header must agree with it, members may not overlap,
repeat or be encrypted, and nothing may precede the first one: such archives are built to be read in two ways.

`zipfile` decompresses bzip2 and LZMA without a limit, and 40 bytes of bzip2 can hold 45 MB; here blocks are limited.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from shardload.errors import ShardloadError, SourceError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.stores.file_reading import read_header
from shardload.stores.location import Location
from shardload.stores.store import File
from shardload.units import exact_bytes, plural

MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LZMA = struct.Struct("<2xHBI")
"""Version, length of the properties, their first byte, size of the dictionary."""
_ENCRYPTED = 0x1
_BLOCK_BYTES = 1 << 18
MAX_DICTIONARY_BYTES = 64 << 20
"""LZMA's dictionary, which takes that much memory; xz uses 64 MiB at its highest level."""


def read_members(path: Location) -> dict[str, zipfile.ZipInfo]:
    """Return the members of a zip by name.

    Raises:
        SourceError: When the zip contradicts itself.
        UnsafeSourceError: When members repeat, or something precedes the first one.
    """
    with translated(path), path.stream() as raw, zipfile.ZipFile(raw) as archive:
        infos = archive.infolist()
    members = {info.filename: info for info in infos}
    # zipfile returns the last of several members with one name; other readers may return the first.
    if len(members) < len(infos):
        raise UnsafeSourceError(
            f"{path} contains {plural(len(infos), 'member')} under {len(members)} names; save it again with Keras"
        )
    # zipfile tolerates data before the archive, such as a self-extracting program, and adjusts all offsets.
    if not members or min(info.header_offset for info in infos) != 0:
        raise UnsafeSourceError(f"{path} has other data before its first member; save it again with Keras")
    size = path.size
    for info in infos:
        if info.header_offset + info.compress_size > size:
            raise TruncatedSourceError(
                f"{path} is truncated: member {info.filename!r} ends past its {exact_bytes(size)}"
            )
    return members


def data_starts(path: Location, file: File, members: dict[str, zipfile.ZipInfo]) -> dict[str, int]:
    """Return where each member's data starts, after checking that local headers agree and members do not overlap."""
    starts: dict[str, int] = {}
    end, before = 0, ""
    # Members that overlap let a small archive unpack to petabytes.
    for info in sorted(members.values(), key=lambda info: info.header_offset):
        if info.header_offset < end:
            raise UnsafeSourceError(
                f"{path}: members {before!r} and {info.filename!r} overlap, so it could expand to any size"
            )
        starts[info.filename] = _data_start(path, file, info)
        end, before = starts[info.filename] + info.compress_size, info.filename
    if end > file.n_bytes:
        raise TruncatedSourceError(
            f"{path} is truncated: member {before!r} ends at byte {end}, the file at {file.n_bytes}"
        )
    return starts


def _data_start(path: Location, file: File, info: zipfile.ZipInfo) -> int:
    what = f"the local header of {info.filename!r}"
    raw = read_header(file, _LOCAL_HEADER.size, offset=info.header_offset, path=str(path), what=what)
    magic, _, flags, method, *_, name_length, extra_length = _LOCAL_HEADER.unpack(raw)
    at = info.header_offset + _LOCAL_HEADER.size
    name = read_header(file, name_length, offset=at, path=str(path), what=what)
    # `filename` is cut at a NUL byte; `orig_filename` is what the directory says. Bit 11 of the flags means UTF-8.
    expected = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace")
    # Sizes are not compared: a local header may leave them to a zip64 field or to a descriptor after the data.
    if magic != MAGIC or name != expected or method != info.compress_type or (flags ^ info.flag_bits) & _ENCRYPTED:
        raise UnsafeSourceError(
            f"{path}: {what} says {name[:100]!r} (method {method}), the central directory {info.filename!r} "
            f"(method {info.compress_type}); they must agree. Save it again with Keras"
        )
    return at + int(name_length) + int(extra_length)


def check_readable(path: Location, info: zipfile.ZipInfo) -> None:
    """Refuse a member that is encrypted or compressed in an unknown way.

    Raises:
        UnsupportedError: When it is.
    """
    if info.flag_bits & _ENCRYPTED:
        raise UnsupportedError(f"{path}: member {info.filename} is encrypted; save the model again without a password")
    if info.compress_type not in _DECODERS:
        raise UnsupportedError(
            f"{path}: member {info.filename} is compressed by method {info.compress_type}, expected deflate, bzip2, "
            "LZMA or none. Unzip the archive, and zip it again"
        )


def blocks(path: Location, file: File, info: zipfile.ZipInfo, *, start: int) -> Iterator[bytes]:
    """Yield a member's content, at most 256 KiB at a time, and check its size and its CRC.

    Args:
        path: The zip, for messages.
        file: The same, open.
        info: The member; whether it may expand as much as it declares is for the caller to check.
        start: Where its data starts, of `data_starts`.

    Raises:
        SourceError: When it does not decode, or differs from its declared size or CRC.
        UnsupportedError: When it is encrypted, or compressed in an unknown way.
    """
    check_readable(path, info)
    left, crc = info.file_size, 0
    with translated(path):
        for block in _decoded(path, file, info, start=start):
            left, crc = left - len(block), zlib.crc32(block, crc)
            yield block
    if left or crc != info.CRC:
        found = f"ends {exact_bytes(left)} early" if left else "does not match its checksum"
        raise SourceError(f"{path} is damaged: member {info.filename} {found}. Download or save it again")


def _decoded(path: Location, file: File, info: zipfile.ZipInfo, *, start: int) -> Iterator[bytes]:
    at, end, left = start, start + info.compress_size, info.file_size
    head = read_header(file, min(_LZMA.size, end - at), offset=at, path=str(path), what=info.filename)
    decoder = _DECODERS[info.compress_type](info, head)
    at += decoder.header_bytes
    # LZMA without an end marker goes on after its last byte, so the declared size ends it.
    while left and not decoder.eof:
        raw = b""
        if decoder.needs_input and at < end:
            raw = read_header(file, min(_BLOCK_BYTES, end - at), offset=at, path=str(path), what=info.filename)
            at += len(raw)
        block = decoder.decompress(raw, min(_BLOCK_BYTES, left))
        if not block and not raw:
            return
        left -= len(block)
        yield block


class _Decoder(Protocol):
    header_bytes: int
    """Bytes in front of the compressed data."""

    @property
    def needs_input(self) -> bool: ...

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Stored:
    header_bytes, needs_input, eof = 0, True, False

    def __init__(self, info: zipfile.ZipInfo, head: bytes) -> None:
        del info, head

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return data[:max_length]


class _Deflated:
    header_bytes = 0

    def __init__(self, info: zipfile.ZipInfo, head: bytes) -> None:
        del info, head
        self._inner = zlib.decompressobj(-zlib.MAX_WBITS)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


class _Other:
    """bzip2 and LZMA, whose decompressors in Python have the same methods."""

    def __init__(self, inner: bz2.BZ2Decompressor | lzma.LZMADecompressor, *, header_bytes: int) -> None:
        self._inner, self.header_bytes = inner, header_bytes

    @property
    def needs_input(self) -> bool:
        return self._inner.needs_input

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(data, max_length)


def _bzip2(info: zipfile.ZipInfo, head: bytes) -> _Decoder:
    del info, head
    return _Other(bz2.BZ2Decompressor(), header_bytes=0)


def _lzma(info: zipfile.ZipInfo, head: bytes) -> _Decoder:
    n_properties, properties, declared = _LZMA.unpack(head)
    if n_properties != 5 or properties >= 9 * 5 * 5:
        raise ValueError(f"{info.filename} has no valid LZMA header")
    # What lies further back than the content is long is never referred to.
    dictionary = max(1 << 12, min(declared, info.file_size))
    if dictionary > MAX_DICTIONARY_BYTES:
        raise UnsupportedError(
            f"Cannot unpack {info.filename}: its LZMA dictionary has {exact_bytes(declared)}, expected at most "
            f"{MAX_DICTIONARY_BYTES}. Unzip the archive, and zip it again with a smaller one"
        )
    rest, lc = divmod(properties, 9)
    pb, lp = divmod(rest, 5)
    settings = {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
    return _Other(lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[settings]), header_bytes=_LZMA.size)


_DECODERS: Mapping[int, Callable[[zipfile.ZipInfo, bytes], _Decoder]] = {
    zipfile.ZIP_STORED: _Stored,
    zipfile.ZIP_DEFLATED: _Deflated,
    zipfile.ZIP_BZIP2: _bzip2,
    zipfile.ZIP_LZMA: _lzma,
}


@contextmanager
def translated(path: Location) -> Iterator[None]:
    """Translate errors of zipfile and of decompressors, eight types that all mean a damaged archive."""
    try:
        yield
    except ShardloadError:
        # Some of these are a ValueError or an OSError as well, and say more.
        raise
    except RuntimeError as error:
        # Encryption and unknown compression; a NotImplementedError is a RuntimeError.
        raise UnsupportedError(f"{path}: {error}; save it again with Keras") from error
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, struct.error, zlib.error, lzma.LZMAError, KeyError) as e:
        raise SourceError(f"{path} is a damaged zip archive: {e}. Download or save it again") from e
