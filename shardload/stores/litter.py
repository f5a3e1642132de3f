"""Files that operating systems and file systems leave in folders, and that belong to no checkpoint.

Finder writes ``.DS_Store`` into folders that it shows. macOS writes ``._model.safetensors`` next to each file on disks
that cannot store its attributes, and into archives. Windows writes ``Thumbs.db`` and ``desktop.ini``. NFS renames a
deleted file that is still open to ``.nfs000000000012ab34``.
"""

from __future__ import annotations

_NAMES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
_PREFIXES = ("._", ".nfs0")


def is_litter(path: str) -> bool:
    """Whether the last part of a path, separated by ``/``, is the name of such a file."""
    name = path.rpartition("/")[2]
    return name in _NAMES or name.startswith(_PREFIXES)
