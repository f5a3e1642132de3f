"""Orbax checkpoints, read without Orbax: a step's folder, or the root that contains it.

    root/
      7/                          a step (also 00000007 or prefix_7); the newest of several is opened
        _CHECKPOINT_METADATA
        pytree/                   an item (``default`` in Orbax v0, ``state`` from v1's ``save_pytree``)
          _METADATA               key path and kind of every leaf
          manifest.ocdbt d/ ocdbt.process_0/ …   the arrays, in OCDBT ─ or a folder for each array
          _strings.json           leaves that are text
        model_config/             Keras' callback: the model's JSON, as text
        shardload/                written by shardload: structure.json, digests.json

A tensor's name is its key path, joined by "/". Uncompressed arrays are read in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  names of its dtypes
import numpy as np

from shardload.errors import ShardloadError, SourceError, SourceNotFoundError, UnsafeSourceError, UnsupportedError
from shardload.loaders.contents import descendant, listing, member
from shardload.loaders.extents import checked_tensors
from shardload.loaders.orbax import ocdbt, zarr
from shardload.loaders.orbax.ocdbt import MAX_KEYS, OcdbtValue
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.json_files import MAX_JSON_BYTES, parse_object, read_object
from shardload.stores.location import Location
from shardload.units import exact_bytes, plural

_MARKS = ("_CHECKPOINT_METADATA", "orbax.checkpoint")
_ITEMS = ("pytree", "default")
"""Folder names of the item (saved tree) with the weights: the first by Keras and Orbax v1, the second by Orbax v0."""
_ALONE = "state"
"""Folder name of the item (saved tree) in a step that Orbax v1's ``save_pytree`` wrote, which is the step's only item.
In a step with several items, a user chose this name, so it does not show which item has the weights."""
OWN_FOLDER = "shardload"
"""Name of the folder in a training step for shardload's own files, such as digests."""
_MODEL_CONFIG, _ASSETS = "model_config", "assets"
# Bounded, because int() raises for thousands of digits.
_NAME = re.compile(r"(?:[^/]*_)?([0-9]{1,19})")
TREE = "_METADATA"
_STRINGS = "_strings.json"
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})
_HEADERS = frozenset({zarr.ZARR2, zarr.ZARR3})
_MAX_EXPANSION = 40_000
"""Limit on an array's decoded size, as a multiple of what all arrays take in files. zstd reaches 32 768 for zeros."""
_EXPANSION_FLOOR_BYTES = 1 << 26
_MAX_OVERHANG = 16
"""Limit on a chunk's size as a multiple of its tensor's size. A chunk may be larger than its tensor, but not much."""


def open_orbax(folder: Location) -> Manifest:
    """Return the manifest of a step, of the newest one in a folder of steps, or of an item: a saved tree in a step."""
    step = _step(folder)
    item = _item(step)
    tree = read_tree(item)
    arrays = Arrays(item, is_complete=tree.is_complete)
    found: list[Tensor] = []
    names: dict[str, list[str]] = {}
    for leaf in tree.leaves:
        # Handlers of other types may store arrays too: a leaf with an array in the store is a tensor.
        if leaf.is_array or (arrays.contains(leaf.stored_name) and not leaf.is_empty):
            found.append(arrays.tensor(leaf.stored_name, name=leaf.name))
            names[leaf.name] = list(leaf.keys)
    metadata = _metadata(step, item, tree.leaves, names)
    # Any file will do, as nothing is read of it.
    files = arrays.files or {item / TREE: (item / TREE).size}
    for tensor, keys in _empty(metadata["structure"], next(iter(files)), known=names):
        found.append(tensor)
        names[tensor.name] = keys
    tensors = checked_tensors(found, files=files)
    return Manifest(
        step, "orbax", tensors, files, _config(step), metadata, notes=(*_notes(tree.leaves), *_others(step, item))
    )


def is_checkpoint(folder: Location) -> bool:
    """Whether a folder is a step or an item (a saved tree), judging by Orbax's files; false for a folder of steps."""
    names = set(folder.names())
    if names.intersection(_MARKS) or TREE in names:
        return True
    return any(name in names and (folder / name / TREE).is_file() for name in (*_ITEMS, _ALONE))


def step_names(folder: Location) -> list[str]:
    """Return the names of the steps in a folder, oldest first. Subfolders without a checkpoint are left out."""
    found = [
        name
        for name in possible_steps(folder.names())
        if (folder / name).is_folder() and is_checkpoint(member(folder, name, named_by=str(folder)))
    ]
    # By number, not by text: 9 is older than 10.
    return sorted(found, key=lambda name: (step_number(name), name))


def possible_steps(names: Iterable[str]) -> list[str]:
    """Return those names in a folder that can be steps: numbers, or else names like ``ckpt_7``, all with one prefix."""
    found = [name for name in names if step_number(name) is not None]
    if bare := [name for name in found if name.isdecimal()]:
        # Zeros in front only where they make all names equally long.
        is_fixed = len({len(name) for name in bare}) == 1
        return bare if is_fixed else [name for name in bare if name == "0" or not name.startswith("0")]
    return found if len({name.rpartition("_")[0] for name in found}) == 1 else []


def step_number(name: str) -> int | None:
    """Return the number of a step's folder: 7 for ``7``, ``00000007`` and ``ckpt_7``, as Orbax's managers name them."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def _step(folder: Location) -> Location:
    if not folder.is_folder():
        raise SourceNotFoundError(f"There is no folder {folder}. Check the path")
    if is_checkpoint(folder):
        return folder
    found = step_names(folder)
    if not found:
        raise SourceNotFoundError(f"{folder} contains no step that Orbax finished; found: {listing(folder)}")
    return member(folder, found[-1], named_by=str(folder))


def _item(step: Location) -> Location:
    names = step.names()
    if TREE in names:
        return step
    for name in _ITEMS:
        if name in names:
            return _finished(member(step, name, named_by=str(step)))
    # Other names are free; one tree that is not the model's configuration is unambiguous.
    others = [n for n in names if n != _MODEL_CONFIG and (step / n / TREE).is_file()]
    if len(others) > 1:
        raise SourceError(f"{step} contains several trees ({', '.join(others[:8])}); open the folder of one of them")
    if others or _ALONE in names:
        return _finished(member(step, others[0] if others else _ALONE, named_by=str(step)))
    raise SourceError(
        f"{step} should contain a folder with a tree of arrays ({', '.join((*_ITEMS, _ALONE))}), "
        f"but contains {listing(step)}. The save did not finish; use another step"
    )


def _others(step: Location, item: Location) -> tuple[str, ...]:
    """Return a note on other items of a step than ``item``: they are not read. No note if shardload saved the step."""
    names = step.names()
    if item == step or OWN_FOLDER in names:
        return ()
    known = (item.name, _MODEL_CONFIG, _ASSETS)
    found = [name for name in names if name not in known and (step / name / TREE).is_file()]
    return (f"only {item.name!r} is read, not {', '.join(found[:8])}: open their folders",) if found else ()


def _finished(item: Location) -> Location:
    if (item / TREE).is_file():
        return item
    if item.is_folder() and "checkpoint" in item.names():
        raise UnsupportedError(f"{item} was saved by Orbax in 2023 or earlier; save it again with a newer version")
    raise SourceError(f"{item} has no file {TREE}: the save did not finish, or files are missing. Use another step")


def _metadata(
    step: Location, item: Location, leaves: tuple[SavedLeaf, ...], tensors: dict[str, list[str]]
) -> dict[str, Any]:
    # Only shardload writes this folder: both files may be missing.
    own = step / OWN_FOLDER
    digests = member(own, "digests.json", named_by=str(own))
    structure = member(own, "structure.json", named_by=str(own))
    return {
        "step": step_number(step.name),
        "item": str(item),
        "structure": read_object(structure) if structure.is_file() else None,
        "digests": str(digests) if digests.is_file() else None,
        "tree": tensors,
        "strings": read_strings(item),
        "left_out": {leaf.name: leaf.kind for leaf in leaves if leaf.name not in tensors},
    }


def _empty(structure: Any, file: Location, *, known: Mapping[str, Any]) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield (tensor, key path) for variables without elements, which Orbax does not store, but structure.json lists."""
    leaves = structure.get("leaves") if isinstance(structure, Mapping) else None
    for leaf in leaves if isinstance(leaves, list) else ():
        found = leaf if isinstance(leaf, Mapping) else {}
        shape, keys = found.get("shape"), found.get("path")
        if not (isinstance(shape, list) and 0 in shape and all(type(n) is int for n in shape)):
            continue
        if not (isinstance(keys, list) and keys and all(isinstance(key, str) for key in keys)):
            continue
        if "/".join(keys) in known:
            continue
        try:
            dtype = np.dtype(str(found.get("dtype")))
        except TypeError:  # the leaf is refused where the structure is read
            continue
        yield Tensor("/".join(keys), tuple(shape), dtype, Extent(file, 0)), keys


def _notes(leaves: Iterable[SavedLeaf]) -> tuple[str, ...]:
    texts = [leaf.name for leaf in leaves if leaf.kind == "string"]
    if not texts:
        return ()
    n = "1 leaf that is" if len(texts) == 1 else f"{len(texts)} leaves that are"
    return (f"left out {n} text, no array: {', '.join(map(repr, texts[:4]))}{', …' if len(texts) > 4 else ''}",)


def _config(step: Location) -> dict[str, Any]:
    """Return the model's configuration, JSON that Keras' callback stores in a leaf of text; empty if there is none."""
    item = member(step, _MODEL_CONFIG, named_by=str(step))
    if not item.is_folder():
        return {}
    text = read_strings(item).get("config")
    if not isinstance(text, str) or len(text) > MAX_JSON_BYTES:
        return {}
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(f"{item}: the model's description is not valid Unicode") from error
    return parse_object(raw, path=f"{item}: the model's description")


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A leaf of a saved pytree, as the file ``_METADATA`` lists it."""

    keys: tuple[str, ...]
    """Keys that lead from the root of the tree to the leaf; the index of an item in a list is such a key, as text."""
    kind: str
    """Orbax's type of the leaf: ``jax.Array``, ``np.ndarray``, ``scalar``, ``string``, ``None``, ``Dict`` …"""

    @property
    def name(self) -> str:
        """Name of the tensor that the leaf becomes: the keys joined by ``/``."""
        return "/".join(self.keys)

    @property
    def stored_name(self) -> str:
        """Name under which Orbax stores the leaf's array: the keys joined by ``.``."""
        return ".".join(self.keys)

    @property
    def is_empty(self) -> bool:
        """Whether the leaf has no value: ``None``, or an empty container."""
        return self.kind in _EMPTY

    @property
    def is_array(self) -> bool:
        """Whether Orbax itself, not a user's handler, stored the leaf as an array."""
        return self.kind in _ARRAYS


@dataclass(frozen=True, slots=True)
class SavedTree:
    """The leaves of a saved pytree, parsed from the file ``_METADATA``."""

    leaves: tuple[SavedLeaf, ...]
    is_complete: bool
    """Whether Orbax wrote every chunk, so that a missing one is an error; otherwise, it left out chunks of zeros."""


def read_tree(item: Location) -> SavedTree:
    """Read the ``_METADATA`` of an item, a folder with a saved tree; raise if it is damaged."""
    path = member(item, TREE, named_by=str(item))
    document = read_object(path)
    found = document.get("tree_metadata")
    if not isinstance(found, dict):
        raise SourceError(f"{path} should contain a 'tree_metadata' that lists the leaves of the tree, but does not")
    leaves: list[SavedLeaf] = []
    for entry in found.values():
        try:
            keys = tuple(str(part["key"]) for part in entry["key_metadata"])
            leaves.append(SavedLeaf(keys, str(entry["value_metadata"]["value_type"])))
        except (KeyError, TypeError) as error:
            raise SourceError(f"{path} describes a leaf by {str(entry)[:200]}, which has no keys and type") from error
    if len({leaf.keys for leaf in leaves}) < len(leaves):
        raise SourceError(f"{path} lists the same leaf twice. Copy the step again, or use another one")
    return SavedTree(tuple(leaves), document.get("store_array_data_equal_to_fill_value") is True)


def read_strings(item: Location) -> dict[str, Any]:
    """Return name → text for those leaves of a saved tree that are text; empty if there are none."""
    path = member(item, _STRINGS, named_by=str(item))
    return read_object(path) if path.exists() else {}


class Arrays:
    """The arrays in a saved tree's folder: finds the chunks of each and makes it a `Tensor`, without reading it."""

    def __init__(self, folder: Location, *, is_complete: bool) -> None:
        self._folder = folder
        self._is_complete = is_complete
        is_ocdbt = ocdbt.MANIFEST in folder.names()
        values = ocdbt.read_values(folder) if is_ocdbt else _files(folder)
        self._total = sum(value.length for value in values.values())
        # An array named "" is the root of the store: a tree may have an empty text as key.
        self._headers = {key.rpartition("/")[0]: key for key in values if key.rpartition("/")[2] in _HEADERS}
        self._values: dict[str, dict[str, OcdbtValue]] = {name: {} for name in self._headers}
        for key, value in values.items():
            name = key
            # Find the longest prefix that is an array: keys of chunks contain slashes, and so may names of arrays.
            while "/" in name:
                name = name.rpartition("/")[0]
                if name in self._headers:
                    self._values[name][key[len(name) + 1 :]] = value
                    break
            else:
                if "" in self._headers:
                    self._values[""][key] = value
        self._sizes: dict[Location, int] = {}

    @property
    def files(self) -> dict[Location, int]:
        """Location → size in bytes of each file with data of the tensors that `tensor` has returned so far."""
        return dict(sorted(self._sizes.items()))

    def contains(self, name: str) -> bool:
        """Whether an array is stored under this name (the keys joined by ``.``)."""
        return name in self._headers

    def tensor(self, stored_name: str, *, name: str) -> Tensor:
        """Locate the chunks of the array ``stored_name``; return it as a tensor called ``name``."""
        if stored_name not in self._headers:
            raise SourceError(
                f"{self._folder} lists the array {stored_name!r}, but does not contain it. The save did not finish, or "
                "files are missing; use another step"
            )
        key = self._headers[stored_name]
        where = f"{self._folder}: {key}"
        values = self._values[stored_name]
        header = values[key.rpartition("/")[2]]
        metadata = header.read(zarr.MAX_METADATA_BYTES, what=key)
        array = zarr.parse(metadata, name=name, where=where)
        chunks = self._chunks(array, values, where)
        self._refuse_expansion(array, where)
        # The header's file counts too: chunks that were never written name it as theirs.
        for value in (header, *chunks.values()):
            if value.path not in self._sizes:
                self._sizes[value.path] = value.path.size
        # Nothing to read, so any offset is valid.
        if not math.prod(array.shape):
            return Tensor(name, array.shape, array.dtype, Extent(header.path, 0))
        return Tensor(
            name, array.shape, array.dtype, zarr.array_storage(array, chunks, header=header, metadata=metadata)
        )

    def _chunks(self, array: zarr.ZarrArray, values: dict[str, OcdbtValue], where: str) -> dict[zarr.Cell, OcdbtValue]:
        found: dict[zarr.Cell, OcdbtValue] = {}
        for key, value in values.items():
            if key in (zarr.ZARR3, zarr.ZARR2, ".zattrs"):
                continue
            cell = array.cell(key)
            if cell is None:
                raise SourceError(
                    f"{where} has shape {array.shape} in chunks of {array.chunk_shape}, but also a chunk {key!r}, "
                    "which is outside that grid"
                )
            found[cell] = value
        cells = math.prod(array.grid)
        # Otherwise a missing chunk contains the fill value: Orbax skips chunks that are all zeros.
        if self._is_complete and len(found) != cells:
            raise SourceError(
                f"{where} should have {plural(cells, 'chunk')}, but has {len(found)}. Copy the step again, or use "
                "another one"
            )
        return found

    def _refuse_expansion(self, array: zarr.ZarrArray, where: str) -> None:
        size, chunk = (math.prod(shape) * array.dtype.itemsize for shape in (array.shape, array.chunk_shape))
        if chunk > max(_EXPANSION_FLOOR_BYTES, _MAX_OVERHANG * size):
            raise UnsafeSourceError(
                f"{where} declares chunks of {exact_bytes(chunk)} for a tensor of {exact_bytes(size)}"
            )
        most = max(_EXPANSION_FLOOR_BYTES, _MAX_EXPANSION * self._total)
        for what, declared in (("tensor", size), ("chunk", chunk)):
            if declared > most:
                raise UnsafeSourceError(
                    f"{where} declares a {what} of {exact_bytes(declared)}, but all arrays together store "
                    f"{exact_bytes(self._total)}; at most {_MAX_EXPANSION} times as many are possible. Copy the step "
                    "again, or use another one"
                )


def _files(folder: Location) -> dict[str, OcdbtValue]:
    """Return path → file for a checkpoint without OCDBT: each array has a folder. Links to folders are not followed."""
    found: dict[str, OcdbtValue] = {}
    # Files next to the arrays' folders are Orbax' own metadata.
    waiting = [name for name in folder.names() if (folder / name).is_folder() and not (folder / name).is_link()]
    while waiting:
        inside = waiting.pop()
        for name in (folder / inside).names():
            key = f"{inside}/{name}"
            path = descendant(folder, key, named_by=str(folder))
            if path.is_folder() and not path.is_link():
                waiting.append(key)
                continue
            try:
                found[key] = OcdbtValue(path, 0, path.store.identity(path.key).size)
            except ShardloadError:  # some are an OSError: a store that does not respond says nothing about the file
                raise
            except OSError as error:
                raise SourceError(f"Cannot read {path}: {error}") from error
            if len(found) > MAX_KEYS:
                raise UnsafeSourceError(f"{folder} contains more than {MAX_KEYS} files")
    return found


SPEC = FormatSpec(
    name="orbax",
    description="an Orbax checkpoint: a step's folder, or the folder of the steps",
    is_folder=lambda content: is_checkpoint(content.path),
    contains_some=lambda content: bool(step_names(content.path)),
    open_folder=open_orbax,
    described_by="keras",
    tensor_names="step",
    keras_files="shardload/keras",
    transformers_files="shardload/transformers",
    is_step=True,
)
