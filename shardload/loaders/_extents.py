"""What every loader owes its readers: extents inside their file, none over another, no name twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardload.errors import SourceError, TruncatedSourceError
from shardload.manifest import Extent, Tensor

MAX_RANK = 32
"""HDF5's limit, and more than any weight has."""
MAX_DIM = (1 << 63) - 1


def collect(tensors: Iterable[Tensor], *, files: Mapping[str, int]) -> dict[str, Tensor]:
    """Tensors by name, in file order (files as listed, then by offset; decoded ones after their file's extents).

    Args:
        tensors: What the headers describe.
        files: Size in bytes of every file that holds tensor data.

    Raises:
        SourceError: When a name appears twice, a shape is absurd, or two extents overlap.
        TruncatedSourceError: When an extent ends past its file.
    """
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if not _is_text(tensor.name):
            raise SourceError(f"The tensor name {tensor.name[:200]!r}, {_place(tensor)}, is not valid Unicode")
        if (other := found.get(tensor.name)) is not None:
            raise SourceError(f"Two tensors are named {tensor.name!r}: {_place(other)} and {_place(tensor)}")
        _check(tensor, files)
        found[tensor.name] = tensor
    order = {path: rank for rank, path in enumerate(files)}
    ordered = sorted(found.values(), key=lambda t: _position(t, order))
    _refuse_overlap(ordered)
    return {tensor.name: tensor for tensor in ordered}


def check_shape(shape: tuple[int, ...], *, name: str, path: str) -> None:
    """Refuse shapes that no array can have.

    Raises:
        SourceError: When a dim is negative or does not fit 63 bits, or there are too many dims.
    """
    if len(shape) > MAX_RANK:
        raise SourceError(f"{path}: tensor {name!r} has {len(shape)} dims; at most {MAX_RANK} are possible")
    if any(not 0 <= n <= MAX_DIM for n in shape):
        raise SourceError(f"{path}: tensor {name!r} has the shape {shape}; each dim must be from 0 to 2**63 - 1")


def _check(tensor: Tensor, files: Mapping[str, int]) -> None:
    match tensor.storage:
        case Extent(path, offset):
            check_shape(tensor.shape, name=tensor.name, path=path)
            if offset < 0 or offset + tensor.nbytes > files[path]:
                raise TruncatedSourceError(
                    f"{path} is truncated: tensor {tensor.name!r} should end at byte {offset + tensor.nbytes}, "
                    f"but the file has {files[path]} bytes. Download or save it again"
                )


def _is_text(name: str) -> bool:
    """Whether a name can be printed and written: JSON escapes can smuggle in halves of characters."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _position(tensor: Tensor, order: Mapping[str, int]) -> tuple[int, int, int]:
    match tensor.storage:
        case Extent(path, offset):
            return order[path], 0, offset
        case decoded:
            return order[decoded.reader.paths[0]], 1, 0


def _refuse_overlap(ordered: Iterable[Tensor]) -> None:
    previous: Tensor | None = None
    end = 0
    for tensor in ordered:
        if not isinstance(tensor.storage, Extent) or not tensor.nbytes:
            continue
        same_file = previous is not None and isinstance(previous.storage, Extent)
        if same_file and previous.storage.path == tensor.storage.path and tensor.storage.offset < end:  # type: ignore[union-attr]
            raise SourceError(
                f"{tensor.storage.path}: tensors {previous.name!r} and {tensor.name!r} overlap: "  # type: ignore[union-attr]
                f"the first ends at byte {end}, the second starts at byte {tensor.storage.offset}"
            )
        previous, end = tensor, tensor.storage.offset + tensor.nbytes


def _place(tensor: Tensor) -> str:
    match tensor.storage:
        case Extent(path, offset):
            return f"at byte {offset} of {path}"
        case decoded:
            return f"in {decoded.reader.paths[0]}"
