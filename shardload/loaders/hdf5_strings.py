"""Strings of variable length in an HDF5 attribute, read without libhdf5, which a damaged heap makes loop or crash.

    object header ─► message 0x0C, the attribute: one reference for each string
                        (length, collection, index) ─► collection "GCOL": objects of (index, size, bytes)

Only what h5py writes by default is read: headers of version 1, addresses of 8 bytes. Every read is inside the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from shardload.errors import SourceError, UnsupportedError

_HEADER = struct.Struct("<BxHII4x")
_MESSAGE = struct.Struct("<HHB3x")
_ATTRIBUTE, _CONTINUATION = 0x0C, 0x10
_REFERENCE = struct.Struct("<IQI")
_COLLECTION = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HH4xQ")
MAX_BLOCK_BYTES = 16 << 20
"""Most bytes of a header or a collection; libhdf5 writes headers below 64 KiB."""
MAX_OBJECTS = 4096
"""Most strings in one collection; libhdf5 fills 64 KiB before it begins another one."""

Read = Callable[[int, int], bytes]
"""Reads bytes at an address; raises a `SourceError` outside the file."""


class Strings:
    """Reads the strings of one file.

    Args:
        read: Reads from the file.
        n_bytes: The file's size.
        path: Its name, for messages.
    """

    def __init__(self, read: Read, *, n_bytes: int, path: str) -> None:
        self._read, self._path = read, path
        self._steps = max(1 << 20, n_bytes)
        self._collection: tuple[int, dict[int, int], bytes] = (-1, {}, b"")

    def of_attribute(self, header: int, name: str, *, count: int) -> Iterator[bytes]:
        """Yield the ``count`` strings of an attribute of the object whose header is at an address.

        Raises:
            SourceError: When they are not where the file says.
            UnsupportedError: When the file has another form than h5py writes by default.
        """
        body = self._find(header, name.encode())
        if len(body) < count * _REFERENCE.size:
            raise self._damaged(f"the attribute {name!r} is too short for {count} strings")
        for length, address, index in _REFERENCE.iter_unpack(body[: count * _REFERENCE.size]):
            yield self._string(address, index, length) if length else b""

    def _find(self, header: int, name: bytes) -> bytes:
        version, _, _, size = _HEADER.unpack(self._read(header, _HEADER.size))
        if version != 1:
            raise self._unsupported(f"an object header of version {version}")
        blocks = [(header + _HEADER.size, size)]
        for at, length in blocks:  # grows
            raw, place = self._block(at, length), 0
            self._spend(1 + length)
            while place + _MESSAGE.size <= length:
                kind, n_bytes, _ = _MESSAGE.unpack_from(raw, place)
                body = raw[place + _MESSAGE.size : place + _MESSAGE.size + n_bytes]
                place += _MESSAGE.size + n_bytes
                if kind == _CONTINUATION and len(body) >= 16:
                    blocks.append(struct.unpack_from("<QQ", body))
                elif kind == _ATTRIBUTE and (found := self._body(body, name)) is not None:
                    return found
        raise self._damaged(f"its header lacks the attribute {name!r}")

    def _body(self, body: bytes, name: bytes) -> bytes | None:
        """Return an attribute's data if it has this name."""
        if len(body) < 9 or body[0] not in (1, 2, 3):
            raise self._unsupported("an attribute of an unknown version")
        unit = 8 if body[0] == 1 else 1
        place, parts = 9 if body[0] == 3 else 8, []
        for size in struct.unpack_from("<HHH", body, 2):
            parts.append(body[place : place + size])
            place += -(-size // unit) * unit
        if parts[0].rstrip(b"\0") != name:
            return None
        # Class 9, variable length, and of its two kinds the one for strings; not shared with other objects.
        if len(parts[1]) < 2 or parts[1][0] & 15 != 9 or parts[1][1] & 15 != 1 or (body[0] > 1 and body[1] & 3):
            raise self._unsupported("an attribute of another type")
        return body[place:]

    def _string(self, address: int, index: int, length: int) -> bytes:
        if self._collection[0] != address:
            self._collection = (address, *self._objects(address))
        _, places, raw = self._collection
        if (place := places.get(index)) is None or _OBJECT.unpack_from(raw, place)[2] < length:
            raise self._damaged(f"a name in the collection at byte {address} does not exist")
        return raw[place + _OBJECT.size : place + _OBJECT.size + length]

    def _objects(self, address: int) -> tuple[dict[int, int], bytes]:
        magic, version, size = _COLLECTION.unpack(self._read(address, _COLLECTION.size))
        if magic != b"GCOL" or version != 1:
            raise self._damaged(f"there is no collection of strings at byte {address}")
        raw, place = self._block(address, size), _COLLECTION.size
        found: dict[int, int] = {}
        while place + _OBJECT.size <= size:
            index, _, n_bytes = _OBJECT.unpack_from(raw, place)
            # Index 0 is the free space at the end.
            if index == 0 or place + _OBJECT.size + n_bytes > size:
                break
            found[index] = place
            place += _OBJECT.size + -(-n_bytes // 8) * 8
            if len(found) > MAX_OBJECTS:
                raise self._unsupported(f"more than {MAX_OBJECTS} strings in one collection")
        self._spend(len(found) * _OBJECT.size + size // 8)
        return found, raw

    def _block(self, address: int, n_bytes: int) -> bytes:
        if n_bytes > MAX_BLOCK_BYTES:
            raise self._unsupported(f"{n_bytes} bytes of names in one piece")
        return self._read(address, n_bytes)

    def _spend(self, steps: int) -> None:
        """Limit the work, however often blocks and collections are referred to."""
        self._steps -= steps
        if self._steps < 0:
            raise self._unsupported("lists of names that refer to the same bytes again and again")

    def _damaged(self, found: str) -> SourceError:
        return SourceError(f"{self._path} is damaged HDF5: {found}. Download or save it again")

    def _unsupported(self, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"Cannot read names from {self._path}: it has {found}, expected those of Keras 2. If you trust the file, "
            "load and save it with keras: model.load_weights(old); model.save_weights('new.weights.h5')"
        )
