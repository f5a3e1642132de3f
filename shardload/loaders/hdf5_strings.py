"""Strings of variable length in an HDF5 attribute, read without libhdf5, which a damaged heap makes loop or crash.

object header ─► message 0x0C, the attribute: one reference for each string
                    (length, collection, index) ─► collection "GCOL": objects of (index, size, bytes)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from shardload.loaders.hdf5_structures import Structures
from shardload.units import plural

_ATTRIBUTE = 0x0C
_REFERENCE = struct.Struct("<IQI")
_COLLECTION = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HH4xQ")
MAX_OBJECTS = 4096
"""Most strings in one collection; libhdf5 fills 64 KiB before it begins another one."""


class Strings:
    """Reads the strings of one file, by its structures."""

    def __init__(self, file: Structures) -> None:
        self._file = file
        self._collection: tuple[int, dict[int, int], bytes] = (-1, {}, b"")

    def of_attribute(self, header: int, name: str, *, count: int) -> Iterator[bytes]:
        """Yield the ``count`` strings of an attribute of the object whose header is at an address.

        Raises:
            SourceError: When they are not where the file says.
            UnsupportedError: When the file has another form than h5py writes by default.
        """
        body = self._find(header, name.encode())
        if len(body) < count * _REFERENCE.size:
            raise self._file.damaged(f"the attribute {name!r} is too short for {plural(count, 'string')}")
        for length, address, index in _REFERENCE.iter_unpack(body[: count * _REFERENCE.size]):
            yield self._string(address, index, length) if length else b""

    def _find(self, header: int, name: bytes) -> bytes:
        for kind, body in self._file.messages(header):
            if kind == _ATTRIBUTE and (found := self._body(body, name)) is not None:
                return found
        raise self._file.damaged(f"an object's header lacks the attribute {name.decode()!r}")

    def _body(self, body: bytes, name: bytes) -> bytes | None:
        """Return an attribute's data if it has this name."""
        if len(body) < 9 or body[0] not in (1, 2, 3):
            raise self._file.unsupported("an attribute of an unknown version")
        unit = 8 if body[0] == 1 else 1
        place, parts = 9 if body[0] == 3 else 8, []
        for size in struct.unpack_from("<HHH", body, 2):
            parts.append(body[place : place + size])
            place += -(-size // unit) * unit
        if parts[0].rstrip(b"\0") != name:
            return None
        # Class 9, variable length, and of its two kinds the one for strings; not shared with other objects.
        if len(parts[1]) < 2 or parts[1][0] & 15 != 9 or parts[1][1] & 15 != 1 or (body[0] > 1 and body[1] & 3):
            raise self._file.unsupported("an attribute of another type")
        return body[place:]

    def _string(self, address: int, index: int, length: int) -> bytes:
        if self._collection[0] != address:
            self._collection = (address, *self._objects(address))
        _, places, raw = self._collection
        if (place := places.get(index)) is None or _OBJECT.unpack_from(raw, place)[2] < length:
            raise self._file.damaged(f"a name in the collection at byte {address} does not exist")
        return raw[place + _OBJECT.size : place + _OBJECT.size + length]

    def _objects(self, address: int) -> tuple[dict[int, int], bytes]:
        magic, version, size = _COLLECTION.unpack(self._file.read(address, _COLLECTION.size))
        if magic != b"GCOL" or version != 1:
            raise self._file.damaged(f"there is no collection of strings at byte {address}")
        raw, place = self._file.read(address, size), _COLLECTION.size
        found: dict[int, int] = {}
        while place + _OBJECT.size <= size:
            index, _, n_bytes = _OBJECT.unpack_from(raw, place)
            # Index 0 is the free space at the end.
            if index == 0 or place + _OBJECT.size + n_bytes > size:
                break
            found[index] = place
            place += _OBJECT.size + -(-n_bytes // 8) * 8
            if len(found) > MAX_OBJECTS:
                raise self._file.unsupported(f"more than {MAX_OBJECTS} strings in one collection")
        self._file.spend(len(found) * _OBJECT.size)
        return found, raw
