"""What the shell offers after TAB; must answer in a blink, so nothing here imports JAX or Keras.

Files complete as well: where no name fits, the shells fall back to file names.
"""

from __future__ import annotations

from shardload.units import FLOATS

_MESHES = ("1x1", "1x2", "1x4", "1x8", "1x16", "2x2", "2x4", "2x8", "4x1", "4x2", "4x4", "4x8", "8x1")
_LAYOUTS = (
    ("auto", "rules for the model's own layers"),
    ("replicated", "every device holds everything"),
    ("keras_hub", "KerasHub's layout map"),
)


def meshes(incomplete: str) -> list[tuple[str, str]]:
    """Meshes people use, with the names of their axes."""
    offered = ((mesh, "batch={}, model={}".format(*mesh.split("x"))) for mesh in _MESHES)
    return [(mesh, text) for mesh, text in offered if mesh.startswith(incomplete)]


def layouts(incomplete: str) -> list[tuple[str, str]]:
    """Layouts by name."""
    return [(name, text) for name, text in _LAYOUTS if name.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """Dtypes by their canonical names."""
    return [name for name in FLOATS if name.startswith(incomplete)]


def sources(incomplete: str) -> list[tuple[str, str]]:
    """Names `shardload sources` lists."""
    from shardload.console import known_sources
    from shardload.errors import ShardloadError

    try:
        return [(s.name, s.what) for s in known_sources.known() if s.name.startswith(incomplete)]
    except (OSError, ShardloadError):  # the command reports what is wrong, not the prompt
        return []


def synthetic(incomplete: str) -> list[tuple[str, str]]:
    """Architectures `shardload synth` can write."""
    from shardload.console import known_sources

    return [(s.name, s.what) for s in known_sources.architectures() if s.name.startswith(incomplete)]
