"""Shell completion; it must be fast, so nothing here imports JAX or Keras.

Files are completed as well: if no name matches, shells fall back to file names.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from shardload.errors import UsageError
from shardload.units import FLOATS

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_PROGRAM = {"prog_name": "shardload", "complete_var": "_SHARDLOAD_COMPLETE"}

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
    """Return common optimizers; `shardload plan` accepts every optimizer of Keras, and ``rekls``."""
    return [name for name in _OPTIMIZERS if name.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """Return the canonical names of dtypes."""
    return [name for name in FLOATS if name.startswith(incomplete)]


def sources(incomplete: str) -> list[tuple[str, str]]:
    """Return what `shardload sources` lists, without formats of other packages, whose import takes time."""
    from shardload.console import known_sources
    from shardload.errors import ShardloadError

    # An error would be printed into the line that is being typed; the command itself will report it.
    try:
        return [(s.name, s.what) for s in known_sources.known(announced=False) if s.name.startswith(incomplete)]
    except (OSError, ShardloadError):
        return []


def synthetic(incomplete: str) -> list[tuple[str, str]]:
    """Return the architectures that `shardload synth` can write."""
    from shardload.console import known_sources

    return [(s.name, s.what) for s in known_sources.architectures() if s.name.startswith(incomplete)]


def answered(arguments: Sequence[str]) -> bool:
    """Show or install completion for a shell, if the arguments name one.

    Args:
        arguments: The command's arguments: ``--show-completion zsh``, or ``--install-completion=zsh``.

    Returns:
        Whether they did; if so, nothing else is left to run.

    Raises:
        UsageError: If the shell is not supported.
    """
    # typer's own options take no name: they detect the current shell, whichever one the user asked for.
    option, _, shell = " ".join(arguments).replace("=", " ", 1).partition(" ")
    if option not in ("--show-completion", "--install-completion") or not shell:
        return False
    if shell not in SHELLS:
        raise UsageError(f"Cannot set up completion for {shell!r}. Supported shells: {', '.join(SHELLS)}")
    import typer

    # By import_module, because typer declares no types for these functions.
    completion: Any = importlib.import_module("typer.completion")
    completion.completion_init()
    if option == "--show-completion":
        typer.echo(completion.get_completion_script(shell=shell, **_PROGRAM))
    else:
        _, path = completion.install(shell=shell, **_PROGRAM)
        typer.echo(f"{shell} completion installed in {path}. It takes effect in new shells")
    return True
