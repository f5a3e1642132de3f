"""All that a server has, on this machine and at addresses: what is on this machine hides what has the same name."""

from __future__ import annotations

from shardload.serving.roots.catalogue import Catalogue, ServedFile
from shardload.serving.roots.remote_roots import ListedObject, RemoteCatalogue
from shardload.serving.roots.scanning import ServedCheckpoint


class AllRoots:
    """The catalogues of folders and of addresses, asked as one. Thread-safe."""

    def __init__(self, own: Catalogue, remote: RemoteCatalogue) -> None:
        self._own, self._remote = own, remote

    def is_own(self, key: str) -> bool:
        """Whether a name counts as one on this machine."""
        return self._own.has_top(key.partition("/")[0])

    def is_remote(self, key: str) -> bool:
        """Whether a name counts as one at an address."""
        return not self.is_own(key) and self._remote.has_top(key.partition("/")[0])

    def checkpoints(self) -> list[ServedCheckpoint]:
        """Return all checkpoints, sorted by name."""
        remote = (each for each in self._remote.checkpoints() if not self.is_own(each.name))
        return sorted((*self._own.checkpoints(), *remote), key=lambda each: each.name)

    def checkpoint(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name; ``None`` if there is none."""
        return self._of(name).checkpoint(name)

    def checkpoint_or_step(self, name: str) -> ServedCheckpoint | None:
        """Return a checkpoint by its name, or a step of a run by the name of its folder; ``None`` if there is none."""
        return self._of(name).checkpoint_or_step(name)

    def names(self, folder: str) -> dict[str, bool] | None:
        """Return name → whether it is a folder, sorted, for what is directly in a folder; ``None`` if there is none."""
        if folder:
            return self._of(folder).names(folder)
        own, remote = self._own.names(""), self._remote.names("")
        return remote if own is None else dict(sorted(((remote or {}) | own).items()))

    def file(self, key: str) -> ServedFile | ListedObject | None:
        """Return a file by its address below the server's; ``None`` if there is none."""
        return self._of(key).file(key)

    def _of(self, key: str) -> Catalogue | RemoteCatalogue:
        return self._own if self.is_own(key) else self._remote
