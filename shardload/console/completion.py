"""What can be typed on the command line: names of sources on this machine, and values for a shell to complete.

`shardload sources` and the shell list the same names. Listing changes nothing: no checkpoint is opened, assembled or
downloaded. KerasHub's presets are listed only on request, because that imports KerasHub; nothing here imports JAX or
Keras, as completion must be fast. Where no name matches, shells complete file names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardload import resolve
from shardload.errors import ShardloadError, UsageError
from shardload.synth import names as architecture_names
from shardload.units import format_bytes, format_parameters

MESHES = tuple(
    (mesh, "batch={}, model={}".format(*mesh.split("x")))
    for mesh in ("1x1", "1x2", "1x4", "1x8", "1x16", "2x2", "2x4", "2x8", "4x1", "4x2", "4x4", "4x8", "8x1")
)
"""Meshes that a shell offers to complete ``--mesh``, each with the names of the mesh's axes."""
LAYOUTS = (
    ("auto", "rules for the model's own layers"),
    ("replicated", "every device holds everything"),
    ("keras_hub", "KerasHub's layout map"),
    ("search", "what makes a step fastest, by search"),
)
OPTIMIZERS = ("adam", "adamw", "adafactor", "lion", "muon", "rekls", "rmsprop", "sgd")
"""Optimizers that a shell offers to complete ``--train``; `shardload plan` accepts all of Keras', and ``rekls``."""
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_PROGRAM = {"prog_name": "shardload", "complete_var": "_SHARDLOAD_COMPLETE"}


class SourceKind(StrEnum):
    """Where the checkpoint behind a name comes from: this machine, a package, random weights, or KerasHub."""

    LOCAL = "local"
    INSTALLED = "installed"
    ALIAS = "alias"
    SYNTHETIC = "synthetic"
    PRESET = "preset"


@dataclass(frozen=True, slots=True)
class KnownSource:
    """A name that commands accept as the argument SOURCE, and what it stands for."""

    name: str
    kind: SourceKind
    what: str
    """One line that describes the source: its path, its size, or what to type."""


def make_available(source: str, *, weights: bool = True) -> None:
    """Assemble or download a source that cannot be opened yet; without ``weights``, its configuration is enough."""
    if not resolve.is_read_in_place(source):
        resolve.resolve(source, weights=weights)


def known(*, presets: bool = False, announced: bool = True) -> list[KnownSource]:
    """Return the names that SOURCE can have, each once; names of checkpoints on this machine come first.

    Args:
        presets: Also list KerasHub's.
        announced: Also list files in formats that other packages add by entry points, which imports these packages.
    """
    found: dict[str, KnownSource] = {}
    # The first of a name counts: a checkpoint on this machine hides an architecture or preset of its name.
    for source in (*_on_this_machine(announced=announced), *known_architectures()):
        found.setdefault(source.name, source)
    if presets:
        from shardload.hub import kerashub

        for name, handle in sorted(kerashub.preset_handles().items()):
            found.setdefault(name, KnownSource(name, SourceKind.PRESET, handle))
    return list(found.values())


def _on_this_machine(*, announced: bool) -> Iterator[KnownSource]:
    root = resolve.root_if_any()
    for entry in sorted(root.iterdir()) if root is not None and root.is_dir() else ():
        # Files count by their endings: anything else in the root is not a checkpoint. Folders are not looked into.
        stem = resolve.stem_of(entry.name, announced=announced)
        if not entry.name.startswith(".") and (stem != entry.name or entry.is_dir()):
            yield KnownSource(stem, SourceKind.LOCAL, str(entry))
    # Without importing it, and without assembling its parts: a list must be quick.
    if importlib.util.find_spec(resolve.PIP_PACKAGE) is not None:
        yield KnownSource(
            resolve.PIP_NAME, SourceKind.INSTALLED, f"real weights, from the package {resolve.PIP_PACKAGE}"
        )


def known_architectures() -> Iterator[KnownSource]:
    """Yield the architectures that `shardload synth` can write; aliases of a name follow it."""
    for found in architecture_names():
        size = f"{format_parameters(found.parameters)}, {format_bytes(found.nbytes)} in bfloat16"
        yield KnownSource(found.name, SourceKind.SYNTHETIC, f"{size}; write it with: shardload synth {found.name}")
        for alias in found.aliases:
            yield KnownSource(alias, SourceKind.ALIAS, f"another name of {found.name}")


def source_names() -> list[tuple[str, str]]:
    """Return (name, help) of each SOURCE that a shell offers to complete: all that are found without slow imports."""
    # An error would be printed into the line that is being typed; the command itself will report it.
    try:
        return [(source.name, source.what) for source in known(announced=False)]
    except (OSError, ShardloadError):
        return []


def answered(arguments: Sequence[str]) -> bool:
    """Show or install completion if the arguments ask for it and name a shell; return whether they did."""
    # typer's own options take no name: they detect the current shell, whichever one the user asked for.
    option, _, shell = " ".join(arguments).replace("=", " ", 1).partition(" ")
    if option not in ("--show-completion", "--install-completion") or not shell:
        return False
    if shell not in _SHELLS:
        raise UsageError(f"Cannot set up completion for {shell!r}. Supported shells: {', '.join(_SHELLS)}")
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
