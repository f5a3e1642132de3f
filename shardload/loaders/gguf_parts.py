"""Models that are split over several GGUF files, as llama.cpp's ``gguf-split`` and the gguf package write them.

    model-00001-of-00003.gguf   split.no 0, and all other key-values; tensors, or none
    model-00002-of-00003.gguf   split.no 1; tensors
    model-00003-of-00003.gguf   split.no 2; tensors

Each part is a complete GGUF file with the offsets of its own tensors. ``split.count`` and ``split.tensors.count`` (of
all parts together) are in every part, so a missing or foreign part is found in the headers.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardload.errors import SourceError
from shardload.loaders.gguf_header import GgufHeader, LongArray, read_header
from shardload.loaders.parts import all_parts, part_name, part_number
from shardload.stores.location import Location
from shardload.units import plural


def first_part(name: str) -> str:
    """Return the name of a model's first file, from the name of any of its files."""
    return part_name(name, 1)


def read_model(path: Location) -> tuple[Location, GgufHeader]:
    """Read the header of a file, or of all parts of the model that the file belongs to.

    Returns:
        The file with the key-values, and one header with the tensors of all parts.

    Raises:
        SourceNotFoundError: When parts are missing.
        SourceError: When the parts contradict their names or each other; also as `read_header`.
        UnsupportedError: As `read_header`.
    """
    header = read_header(path)
    count = _number(header, "split.count", path, default=1)
    # llama.cpp, too, treats only counts above 1 as split.
    if count in (0, 1):
        if (claimed := part_number(path.name)) is not None:
            raise SourceError(
                f"{path} is part {claimed[0]} of {claimed[1]} according to its name, but its header has no "
                "split.count above 1. If it is a whole model, rename it; otherwise, split the model again"
            )
        return path, header
    parts = _find_parts(path, _number(header, "split.no", path), count)
    headers = {part: header if part == path else read_header(part) for part in parts}
    _check_places(headers, count)
    return parts[0], _joined(headers)


def _find_parts(path: Location, number: int, count: int) -> list[Location]:
    if part_number(path.name) != (number + 1, count):
        raise SourceError(
            f"{path} is part {number + 1} of {count} according to its header, expected a name that ends in "
            f"-{number + 1:05d}-of-{count:05d}.gguf, by which the other parts are found. Rename the parts, or join "
            "them: llama-gguf-split --merge FIRST OUT"
        )
    return all_parts(path)


def _check_places(headers: Mapping[Location, GgufHeader], count: int) -> None:
    """Compare what each part says of itself with its name and with the first part."""
    first, described = next(iter(headers.items()))
    total = _number(described, "split.tensors.count", first)
    for i, (part, header) in enumerate(headers.items()):
        for key, expected in (("split.count", count), ("split.no", i), ("split.tensors.count", total)):
            if (found := _number(header, key, part)) != expected:
                raise SourceError(
                    f"{part} has {key} {found}, expected {expected} from its name and {first.name}. It was renamed, or "
                    "belongs to another model: download the parts again"
                )
        for key, value in header.values.items():
            # Only the first part has to have all keys. Long arrays are not read to be compared.
            if not isinstance(value, LongArray) and not key.startswith("split."):
                _check_same(key, described.values.get(key, value), value, first, part)


def _check_same(key: str, expected: object, found: object, first: Location, part: Location) -> None:
    # As text, two NaNs are equal.
    if repr(found) != repr(expected):
        raise SourceError(
            f"{part} and {first.name} belong to different models: {key} is {str(found)[:80]!r} and "
            f"{str(expected)[:80]!r}. Download the parts again"
        )


def _joined(headers: Mapping[Location, GgufHeader]) -> GgufHeader:
    first, described = next(iter(headers.items()))
    owner: dict[str, Location] = {}
    for part, header in headers.items():
        for info in header.tensors:
            if (other := owner.setdefault(info.name, part)) is not part:
                raise SourceError(
                    f"{other} and {part.name} both contain the tensor {info.name!r}. They belong to different models: "
                    "download the parts again"
                )
    total = _number(described, "split.tensors.count", first)
    if len(owner) != total:
        raise SourceError(
            f"The {plural(len(headers), 'part')} of {first} contain {plural(len(owner), 'tensor')}, expected {total}. "
            "One of them belongs to another model: download the parts again"
        )
    tensors = tuple(info for header in headers.values() for info in header.tensors)
    return GgufHeader(
        described.values, tensors, {part: size for h in headers.values() for part, size in h.files.items()}
    )


def _number(header: GgufHeader, key: str, path: Location, *, default: int | None = None) -> int:
    found = header.values.get(key, default)
    if type(found) is not int or not 0 <= found < 1 << 31:
        raise SourceError(
            f"{path}: {key!r} should be a whole number from 0, as in every part, but is {str(found)[:80]}"
        )
    return found
