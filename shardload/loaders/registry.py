"""The supported formats: how each is recognised and opened, and what other code must know of it.

    built in      `BUILT_IN`                                                          ─┐
    installed     an entry point of the group ``shardload.formats``: npz = "package.module:SPEC"  ├─► names() ─► specs()
    registered    `register(spec)`, in this process                                    ─┘

A loader module declares a `FormatSpec` for each of its formats. Other code reads properties of ``spec_of(manifest)``
and never compares names of formats, so a new format needs one module only.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import BinaryIO, Literal

from shardload.errors import UnsupportedError, UsageError
from shardload.loaders.contents import FileContent, FolderContent
from shardload.loaders.file_pieces import WriteFile
from shardload.manifest import Manifest
from shardload.stores.location import Location

GROUP = "shardload.formats"
_LOADERS = "shardload.loaders"
# The order matters: later formats are asked first. See design note 0014.
BUILT_IN = {
    "keras-h5": f"{_LOADERS}.keras_h5:SPEC",
    "flax-msgpack": f"{_LOADERS}.flax_msgpack:SPEC",
    "keras-legacy-h5": f"{_LOADERS}.keras_legacy:SPEC",
    "keras-sharded-h5": f"{_LOADERS}.keras_h5:SHARDED",
    "keras-archive": f"{_LOADERS}.keras_archive:SPEC",
    "numpy": f"{_LOADERS}.numpy_archive:SPEC",
    "keras-hub-preset": f"{_LOADERS}.hub_preset:SPEC",
    "hf-safetensors": f"{_LOADERS}.hf_folder:SPEC",
    "safetensors": f"{_LOADERS}.hf_folder:BARE",
    "gguf": f"{_LOADERS}.gguf.loader:SPEC",
    "orbax": f"{_LOADERS}.orbax.loader:SPEC",
}


def _never(_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """A checkpoint format: how to recognise and open it, and its properties. Fields with a default are optional."""

    name: str
    """The format's name in ``Manifest.format``, ``format=`` and ``--format``."""
    description: str
    """A noun with its article, for messages: ``a .gguf file``."""
    endings: tuple[str, ...] = ()
    """Endings of the format's files, in lower case. A checkpoint that is given by name, not by path, may lack the first
    one: ``gemma3_270m`` finds ``gemma3_270m.gguf``."""
    is_file: Callable[[FileContent], bool] = _never
    """Whether a file has this format. The formats of `specs` are asked from last to first, until one says yes."""
    is_folder: Callable[[FolderContent], bool] = _never
    """Whether a folder is a checkpoint of this format."""
    contains_some: Callable[[FolderContent], bool] = _never
    """Whether a folder, not itself of this format, has subfolders of it, such as the steps of a training run."""
    open_file: Callable[[Location], Manifest] | None = None
    """Reads the headers of a file, or, if it is an index, of the shards that it lists."""
    open_folder: Callable[[Location], Manifest] | None = None
    """Reads the headers of a folder. Without it, the only checkpoint with one of `endings` in the folder is opened."""
    describe_folder: Callable[[Location], Manifest] | None = None
    """Reads a model's description from a folder that may lack the weights; returns a manifest without tensors."""
    write_file: WriteFile | None = None
    """Makes a model's file without the values, and returns where they belong; gets the file's path, tensors named as in
    Keras' files (``layers/dense/vars/0``), and Keras' description of the model. With it, `convert` and `save_as` write
    files with one of `endings`. The built-in formats are written without it."""
    first_part: Callable[[str], str] = str
    """Returns the name of a split model's first file, given that of any of its files; unset if models are not split."""
    variant_of: str | None = None
    """Name of the format that has the same `endings` as this one: only a file's content tells the two apart."""
    part_format: str | None = None
    """For an index of shards: name of the shards' format, which in a folder then does not count as a second format."""
    folder_of: Callable[[Location], Location | None] | None = None
    """Given a weights file, returns the folder that contains it and describes its model, or ``None`` if there is none.
    The whole folder is then opened instead of the file."""
    open_variant: Callable[[Location], Manifest | None] | None = None
    """Opens a variant: a weights file with the same tensors as another one in its folder, for example in another dtype
    (``model.fp16.safetensors``). Its manifest has the folder's configuration. For other files, returns ``None``."""
    described_by: Literal["keras", "keras-legacy", "keras-sidecar", "keras-hub", "hugging-face"] | None = None
    """Origin of ``Manifest.config``: Keras (``keras-legacy``: in the form of Keras 2; ``keras-sidecar``: from a file
    with the same stem), a KerasHub preset, or Hugging Face. ``None``: the format describes no model."""
    tensor_names: Literal["keras", "order", "hugging-face", "step", "own"] = "own"
    """Whose names the tensors have: those of Keras 3's files, of Keras 2's (``order``: only their order counts), of
    `transformers`, of a training step, or the user's own, such as paths of variables."""
    model_dtype: str | None = None
    """Default dtype of a model that is built from this format, if not that of the tensors: GGUF's decode to float32,
    which has more bits than needed."""
    tokenizer: Literal["hugging-face", "keras-hub", "header"] | None = None
    """Where the tokenizer is: in Hugging Face's or KerasHub's files, or in a GGUF header. ``None``: there is none."""
    keras_files: str | None = None
    """Folder with KerasHub's configurations and tokenizer, relative to the checkpoint's; ``None`` if it has none."""
    transformers_files: str | None = None
    """Folder with Hugging Face's configurations and tokenizer, relative to the checkpoint's; ``None``: it has none."""
    assets: Callable[[Location], Iterator[tuple[str, Callable[[BinaryIO], None]]]] | None = None
    """Yields the files that layers saved next to their weights, such as vocabularies: names, and functions that write
    the content."""
    is_step: bool = False
    """Whether a checkpoint is a training step: it has an optimizer's state, metrics and perhaps digests (checksums)."""
    may_be_codes: bool = False
    """Whether tensors may be quantised codes or an adapter; only names and values reveal it, so they are checked."""

    @property
    def joins_parts(self) -> bool:
        """Whether a model of this format may be split over several files, which are then opened together."""
        return self.first_part is not str

    @property
    def is_hugging_face(self) -> bool:
        """Whether Hugging Face's configuration describes the model: KerasHub's converters then build and fill it."""
        return self.described_by == "hugging-face"


_registered: dict[str, FormatSpec] = {}


def register(spec: FormatSpec) -> None:
    """Register a format in this process. An installed package announces its formats by an entry point of `GROUP`.

    Raises:
        UsageError: When a format of that name exists already.
    """
    if spec.name in names():
        raise UsageError(f"Cannot register the format {spec.name!r}: the name is taken. Choose another name")
    _registered[spec.name] = spec


def unregister(name: str) -> None:
    """Remove a format that `register` added."""
    del _registered[name]


def names() -> tuple[str, ...]:
    """Return the name of every format: built in, announced by installed packages, or registered. Imports no loader."""
    return (*BUILT_IN, *announced(), *_registered)


def specs() -> tuple[FormatSpec, ...]:
    """Return the `FormatSpec` of every format, in the order of `names`; this imports all loaders."""
    return tuple(map(spec_named, names()))


def built_in_specs() -> tuple[FormatSpec, ...]:
    """Return the `FormatSpec` of every format that is part of shardload; no other package is imported."""
    return tuple(map(spec_named, BUILT_IN))


def spec_of(manifest: Manifest) -> FormatSpec:
    """Return the `FormatSpec` of an opened checkpoint's format."""
    return spec_named(manifest.format)


def spec_named(name: str) -> FormatSpec:
    """Return the `FormatSpec` of the format of this name; at its first use, this imports the loader's module."""
    return _registered.get(name) or _declared(name)


@cache
def announced() -> dict[str, EntryPoint]:
    """Return format name → entry point for the formats that other installed packages announce; imports none of them."""
    # A package cannot replace a built-in format, only add one.
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


@cache
def _declared(name: str) -> FormatSpec:
    if name in BUILT_IN:
        # Here, on first use, the loader's module is imported.
        built_in: FormatSpec = pkgutil.resolve_name(BUILT_IN[name])
        return built_in
    if (point := announced().get(name)) is None:
        raise UnsupportedError(f"Unknown format {name!r}; supported formats: {', '.join(names())}")
    try:
        found = point.load()
    # Any exception: importing runs the package's code. An error, not a warning, as otherwise the files of this format
    # would be reported as unknown.
    except Exception as error:
        raise UnsupportedError(
            f"Cannot use the format {name!r}: importing {point.value} failed: {error}. Update or uninstall its package"
        ) from error
    if not isinstance(found, FormatSpec) or found.name != name:
        raise UnsupportedError(f"Cannot use the format {name!r}: expected its FormatSpec at {point.value}")
    return found
