"""Object headers and strings of HDF5, read without libhdf5, which some damaged structures make loop or crash.

    version 1    ─► prefix of 16 bytes ─► message, message, … ─► (continuation) ─► message, …
    version 2    ─► "OHDR" …           ─► message, message, … ─► "OCHK" message, …

Addresses and lengths have 8 bytes, as in every file that h5py writes. Every read is inside the file, and the work that
a file can cause is limited by its size, however often its structures refer to the same bytes.

Strings of variable length in an attribute are in a heap::

    object header ─► message 0x0C, the attribute: one reference for each string
                        (length, collection, index) ─► collection "GCOL": objects of (index, size, bytes)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from shardload.errors import SourceError, UnsupportedError
from shardload.stores.location import Location
from shardload.units import exact_bytes, plural

_PREFIX = struct.Struct("<BxHII4x")
_MESSAGE = struct.Struct("<HHB3x")
_MESSAGE_2 = struct.Struct("<BHB")
_CONTINUATION = 0x10
_CHECKSUM_BYTES = 4
MAX_BLOCK_BYTES = 16 << 20
"""Most bytes of one structure; libhdf5 writes headers and collections below 64 KiB."""
FREE_STEPS = 1 << 20
"""Work that files of any size may cause; larger ones may cause a step for each byte."""
BYTES_PER_STEP = 8
"""Read in the time of one step, such as looking at a message."""

Read = Callable[[int, int], bytes]
"""Reads bytes at an address; raises a `SourceError` outside the file."""


class Structures:
    """The structures of one file.

    Args:
        read: Reads from the file.
        n_bytes: The file's size.
        path: Its name, for messages.
    """

    def __init__(self, read: Read, *, n_bytes: int, path: Location) -> None:
        self._read, self._path = read, path
        self._steps = max(FREE_STEPS, n_bytes)

    def messages(self, header: int) -> Iterator[tuple[int, bytes]]:
        """Yield kind and body of each message in the object header at an address.

        Raises:
            SourceError: When the file ends before the header does.
            UnsupportedError: When it has an unknown version, or refers to the same bytes again and again.
        """
        prefix = self.read(header, _PREFIX.size)
        if prefix.startswith(b"OHDR"):
            yield from self._messages_2(header)
            return
        version, _, _, size = _PREFIX.unpack(prefix)
        if version != 1:
            raise self.unsupported(f"an object header of version {version}")
        blocks = [(header + _PREFIX.size, size)]
        for at, length in blocks:  # grows
            raw, place = self.read(at, length), 0
            while place + _MESSAGE.size <= length:
                kind, n_bytes, _ = _MESSAGE.unpack_from(raw, place)
                body = raw[place + _MESSAGE.size : place + _MESSAGE.size + n_bytes]
                place += _MESSAGE.size + n_bytes
                if kind == _CONTINUATION and len(body) >= 16:
                    blocks.append(struct.unpack_from("<QQ", body))
                yield kind, body

    def _messages_2(self, header: int) -> Iterator[tuple[int, bytes]]:
        version, flags = self.read(header + 4, 2)
        if version != 2:
            raise self.unsupported(f"an object header of version {version}")
        at = header + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        length = int.from_bytes(self.read(at, width), "little")
        blocks = [(at + width, length)]
        extra = 2 if flags & 4 else 0
        for start, n_bytes in blocks:  # grows
            raw, place = self.read(start, n_bytes), 0
            while place + _MESSAGE_2.size + extra <= n_bytes:
                kind, size, _ = _MESSAGE_2.unpack_from(raw, place)
                place += _MESSAGE_2.size + extra
                body = raw[place : place + size]
                place += size
                if kind == _CONTINUATION and len(body) >= 16:
                    where, count = struct.unpack_from("<QQ", body)
                    # Between the signature "OCHK" and the checksum.
                    blocks.append((where + 4, max(0, count - 4 - _CHECKSUM_BYTES)))
                yield kind, body

    def read(self, address: int, n_bytes: int) -> bytes:
        """Read a structure, and count the work of it."""
        if n_bytes > MAX_BLOCK_BYTES:
            raise self.unsupported(f"a structure of {exact_bytes(n_bytes)} in one piece")
        self.spend(1 + n_bytes // BYTES_PER_STEP)
        return self._read(address, n_bytes)

    def spend(self, steps: int) -> None:
        """Count work, and refuse what is out of proportion to the file.

        Raises:
            UnsupportedError: When it is.
        """
        self._steps -= steps
        if self._steps < 0:
            raise self.unsupported("structures that refer to the same bytes again and again")

    def damaged(self, found: str) -> SourceError:
        """Return the error for a structure that contradicts itself."""
        return SourceError(f"{self._path} is damaged HDF5: {found}. Download or save it again")

    def unsupported(self, found: str) -> UnsupportedError:
        """Return the error for a structure that h5py does not write."""
        return UnsupportedError(
            f"Cannot read {self._path}: it has {found}, expected what h5py writes. If you trust the file, load and "
            "save it with keras: model.load_weights(old); model.save_weights('new.weights.h5')"
        )


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
