"""Shell completion; it must be fast, so nothing here imports JAX or Keras.

Files are completed as well: if no name matches, shells fall back to file names.
"""

from __future__ import annotations

from shardload.units import FLOATS

_MESHES = ("1x1", "1x2", "1x4", "1x8", "1x16", "2x2", "2x4", "2x8", "4x1", "4x2", "4x4", "4x8", "8x1")
_LAYOUTS = (
    ("auto", "rules for the model's own layers"),
    ("replicated", "every device holds everything"),
    ("keras_hub", "KerasHub's layout map"),
    ("search", "what makes a step fastest, by search"),
)
_OPTIMIZERS = ("adam", "adamw", "adafactor", "lion", "muon", "rekls", "rmsprop", "sgd")


def meshes(incomplete: str) -> list[tuple[str, str]]:
    """Return common meshes, with the names of their axes."""
    offered = ((mesh, "batch={}, model={}".format(*mesh.split("x"))) for mesh in _MESHES)
    return [(mesh, text) for mesh, text in offered if mesh.startswith(incomplete)]


def layouts(incomplete: str) -> list[tuple[str, str]]:
    """Return the names of layouts."""
    return [(name, text) for name, text in _LAYOUTS if name.startswith(incomplete)]


def optimizers(incomplete: str) -> list[str]:
    """Return names of optimizers; any that Keras knows can be given, and ``rekls``."""
    return [name for name in _OPTIMIZERS if name.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """Return the canonical names of dtypes."""
    return [name for name in FLOATS if name.startswith(incomplete)]


def sources(incomplete: str) -> list[tuple[str, str]]:
    """Return the names that `shardload sources` lists."""
    from shardload.console import known_sources
    from shardload.errors import ShardloadError

    try:
        return [(s.name, s.what) for s in known_sources.known() if s.name.startswith(incomplete)]
    except (OSError, ShardloadError):  # the command reports the error, not the shell's completion
        return []


def synthetic(incomplete: str) -> list[tuple[str, str]]:
    """Return the architectures that `shardload synth` can write."""
    from shardload.console import known_sources

    return [(s.name, s.what) for s in known_sources.architectures() if s.name.startswith(incomplete)]
