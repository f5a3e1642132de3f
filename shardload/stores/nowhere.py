"""A store for models that are only described: it has names, but no files."""

from __future__ import annotations

from shardload.errors import SourceError, SourceNotFoundError
from shardload.stores.location import Location
from shardload.stores.store import File, Kind, Store


class _Nowhere(Store):
    """A store without files."""

    def shown(self, key: str) -> str:
        return key

    def kind(self, key: str) -> Kind | None:
        return None

    def names(self, key: str) -> list[str]:
        raise SourceError(f"Cannot list the folder {key}: it does not exist")

    def open(self, key: str) -> File:
        raise SourceNotFoundError(f"There is no file {key}")


_NOWHERE = _Nowhere()


def nowhere(name: str) -> Location:
    """Return the location of a model without files; it is shown by its name."""
    return Location(_NOWHERE, name)


def is_nowhere(location: Location) -> bool:
    """Whether a location was made by `nowhere`: tensors there have no values."""
    return location.store is _NOWHERE
