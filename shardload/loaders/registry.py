"""The formats there are: how each is recognised and opened, and what the rest of shardload has to know about it.

    built in      `_BUILT_IN`                                                          ─┐
    installed     an entry point of the group ``shardload.formats``: npz = "package.module:SPEC"  ├─► names() ─► specs()
    registered    `register(spec)`, in this process                                    ─┘

A loader module declares one `FormatSpec` for each of its formats. Code elsewhere asks ``spec_of(manifest)`` for what it
needs to know and compares no names, so that a format is one module. Names cost nothing; a loader is imported when
something about its format is asked.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import BinaryIO, Literal

from shardload.errors import UnsupportedError, UsageError
from shardload.loaders.contents import FileContent, FolderContent
from shardload.manifest import Manifest

GROUP = "shardload.formats"
_LOADERS = "shardload.loaders"
_BUILT_IN = {
    "keras-h5": f"{_LOADERS}.keras_h5:SPEC",
    "keras-sharded-h5": f"{_LOADERS}.keras_sharded:SPEC",
    "keras-archive": f"{_LOADERS}.keras_archive:SPEC",
    "keras-hub-preset": f"{_LOADERS}.hub_preset:SPEC",
    "hf-safetensors": f"{_LOADERS}.hf_folder:SPEC",
    "safetensors": f"{_LOADERS}.hf_folder:BARE",
    "gguf": f"{_LOADERS}.gguf:SPEC",
    "orbax": f"{_LOADERS}.orbax:SPEC",
}


def _never(_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """One format. What has a default need not be said."""

    name: str
    """As in ``Manifest.format``, ``format=`` and ``--format``."""
    description: str
    """In words, with an article: ``a .gguf file``."""
    endings: tuple[str, ...] = ()
    """What its files end with, in lower case. The first may be left out of a name in the checkpoint root."""
    is_file: Callable[[FileContent], bool] = _never
    """Whether a file is one; formats listed later are asked first, as a special case of those before them."""
    is_folder: Callable[[FolderContent], bool] = _never
    """Whether a folder is one."""
    contains_some: Callable[[FolderContent], bool] = _never
    """Whether a folder that is nothing else contains folders of this format."""
    open_file: Callable[[str], Manifest] | None = None
    """Reads the headers of a file, or of what a file lists."""
    open_folder: Callable[[Path], Manifest] | None = None
    """Reads the headers of a folder. Without it, a folder is opened by its only file with one of `endings`."""
    part_format: str | None = None
    """Format of the files that a file of this one lists."""
    folder_of: Callable[[str], Path | None] | None = None
    """For formats with a description in the folder: the folder that a file of weights belongs to."""
    described_by: Literal["keras", "keras-beside", "keras-hub", "hugging-face"] | None = None
    """What ``Manifest.config`` is: Keras' own (``keras-beside``: in a file with the same stem instead), that of a
    KerasHub preset, Hugging Face's. ``None``: the format describes no model."""
    tensor_names: Literal["keras", "hugging-face", "step", "own"] = "own"
    """Who named the tensors: Keras' layers, `transformers`, a training step, or the user, as the variables' paths."""
    model_dtype: str | None = None
    """Dtype of the model where that is not the tensors': quantised blocks decode to more bits than they carry."""
    tokenizer: Literal["hugging-face", "keras-hub", "header"] | None = None
    """Form of the tokenizer: files of one of the two, or entries of a GGUF header."""
    keras_files: str | None = None
    """Folder of the small files beside the weights as Keras has them, relative to the source."""
    transformers_files: str | None = None
    """The same for Hugging Face's."""
    assets: Callable[[str], Iterator[tuple[str, Callable[[BinaryIO], None]]]] | None = None
    """The files layers saved: names, and what writes their content."""
    is_step: bool = False
    """Whether it is a training step, with optimizer, metrics and perhaps digests."""
    may_be_codes: bool = False
    """Whether its tensors can be codes of a quantisation method, or an adapter's, which only names and values show."""

    @property
    def is_hugging_face(self) -> bool:
        """Whether KerasHub's converters build the model and name its tensors."""
        return self.described_by == "hugging-face"


_registered: dict[str, FormatSpec] = {}


def register(spec: FormatSpec) -> None:
    """Make a format known in this process; a package announces its own by an entry point of `GROUP` instead.

    Raises:
        UsageError: When there is a format of that name.
    """
    if spec.name in names():
        raise UsageError(f"Cannot register the format {spec.name!r}: there is one of that name. Choose another name")
    _registered[spec.name] = spec


def names() -> tuple[str, ...]:
    """Every format's name; no loader is imported."""
    return (*_BUILT_IN, *_installed(), *_registered)


def specs() -> tuple[FormatSpec, ...]:
    """Every format, in the order of `names`."""
    return tuple(map(spec_named, names()))


def spec_of(manifest: Manifest) -> FormatSpec:
    """The format of an opened checkpoint."""
    return spec_named(manifest.format)


def spec_named(name: str) -> FormatSpec:
    """One format.

    Raises:
        UnsupportedError: When there is none of that name, or an installed package that has it cannot be imported.
    """
    return _registered.get(name) or _declared(name)


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _BUILT_IN}


@cache
def _declared(name: str) -> FormatSpec:
    if name in _BUILT_IN:
        built_in: FormatSpec = pkgutil.resolve_name(_BUILT_IN[name])
        return built_in
    if (point := _installed().get(name)) is None:
        raise UnsupportedError(f"There is no format {name!r}; there are {', '.join(names())}")
    try:
        found = point.load()
    except Exception as error:  # of any kind: importing runs the package's code
        raise UnsupportedError(
            f"Cannot use the format {name!r}: importing {point.value} failed: {error}. Update or uninstall its package"
        ) from error
    if not isinstance(found, FormatSpec) or found.name != name:
        raise UnsupportedError(f"Cannot use the format {name!r}: expected its FormatSpec at {point.value}")
    return found
