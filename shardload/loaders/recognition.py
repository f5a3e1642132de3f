"""Detect a checkpoint's format from its bytes or its folder's contents; a contradicting file ending is an error.

Formats of other libraries are recognised, too, to say which call converts them to a format that shardload reads. They
are tried last, after every `FormatSpec`, because an installed package may add a format that reads such files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass

from shardload.errors import ShardloadError, SourceError, SourceNotFoundError, UnsupportedError
from shardload.loaders.contents import CONFIG, FileContent, FolderContent, listing, member, refuse_bytes, set_of
from shardload.loaders.registry import BUILT_IN, FormatSpec, spec_named, specs
from shardload.manifest import Manifest
from shardload.stores.json_files import read_object
from shardload.stores.local import located
from shardload.stores.location import Location
from shardload.units import exact_bytes, plural

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of PyTorch's weight files: pickles, which are not supported."""


def open_manifest(path: str | os.PathLike[str] | Location, *, format: str | None = None) -> Manifest:
    """Read the headers of a checkpoint (a file or a folder), but no tensor data; ``format`` requires one of `names`.

    Raises:
        SourceNotFoundError: When ``path`` does not exist, or a shard is missing.
        TruncatedSourceError: When a file ends before what its header declares.
        UnsafeSourceError: When a name or a link leaves the folder, or far more is declared than is stored.
        SourceError: When the checkpoint contradicts itself or its ending.
        UnsupportedError: When its format is unknown, or it has a form that cannot be read.
    """
    if format is not None:
        spec_named(format)
    where = located(path)
    if "\0" in where.key:
        raise SourceError(f"{where.key!r} is not a file name: it contains a NUL character")
    return _open_folder(where, format) if where.is_folder() else _open_file(where, format)


def recognise(path: str | os.PathLike[str] | Location) -> FormatSpec:
    """Detect the format of a file or a folder without reading headers; damage in a folder's files stays unnoticed."""
    where = located(path)
    return _recognise_folder(where) if where.is_folder() else _recognise_file(where)


def folder_of(path: str | os.PathLike[str] | Location, *, format: str | None = None) -> Location | None:
    """Return the folder that has a weights file and describes its model, to open instead; ``None`` if none does."""
    where = located(path)
    asked = (spec.folder_of for spec in specs() if spec.folder_of is not None and format in (None, spec.name))
    return next((folder for find in asked if (folder := find(where)) is not None), None)


def open_variant(path: str | os.PathLike[str] | Location, *, format: str | None = None) -> Manifest | None:
    """Return the manifest of a model's variant (``model.fp16.safetensors``); ``None`` if the file is no variant."""
    where = located(path)
    asked = (spec.open_variant for spec in specs() if spec.open_variant is not None and format in (None, spec.name))
    return next((found for open_one in asked if (found := open_one(where)) is not None), None)


def describe_folder(path: str | os.PathLike[str] | Location, *, with_weights: bool = False) -> Manifest | None:
    """Return a manifest without tensors of the model that a folder's configuration files describe, to plan or build it.

    ``None`` if the path is not a folder, describes no model, or contains weights although ``with_weights`` is false.
    """
    folder = located(path)
    names = folder.names() if folder.is_folder() else []
    if CONFIG not in names or (not with_weights and any(map(_is_weights, names))):
        return None
    describe = _recognise_folder(folder).describe_folder
    return None if describe is None else describe(folder)


def _is_weights(name: str) -> bool:
    endings = (*_PICKLES, *(ending for spec in specs() for ending in spec.endings))
    # An index alone contains no weights.
    return name.lower().endswith(endings) and not name.endswith(".json")


def _open_file(path: Location, format: str | None) -> Manifest:
    # The content decides. An ending that contradicts it is an error, as one of the two must be wrong.
    found = _recognise_file(path)
    promised = _promised(path)
    if format is None and promised is not None and promised.name not in (found.name, found.variant_of):
        raise SourceError(
            f"{path} ends like {promised.description}, but its content is {found.description}. "
            f"Rename it, or insist with format={found.name!r} (--format {found.name})"
        )
    if format not in (None, found.name):
        wanted = spec_named(format).description
        raise SourceError(f"{path} should be {wanted}, but its content is {found.description}")
    assert found.open_file is not None, "a format that recognises files opens them"
    return found.open_file(path)


def _recognise_file(path: Location) -> FormatSpec:
    refuse_bytes(path, endings=tuple(ending for spec in specs() for ending in spec.endings))
    with closing(path.open()) as file:
        if not file.n_bytes:
            raise SourceError(f"{path} is empty (0 bytes). The download or the save did not finish; repeat it")
        content = FileContent(path, file)
        # In reverse: a later format may be a special case of an earlier one.
        found = next((spec for spec in reversed(specs()) if spec.is_file(content)), None)
        if found is None:
            raise _unknown(path, content.head, file.n_bytes)
    return found


def _promised(path: Location) -> FormatSpec | None:
    """Return the format that a file's name promises by its ending, the longest that matches; ``None`` if none does."""
    found = [(len(end), spec) for spec in specs() for end in spec.endings if path.name.lower().endswith(end)]
    # Of two with one ending the later one: a format that a package adds may read what a built-in one does.
    return max(reversed(found), key=lambda each: each[0])[1] if found else None


def _unknown(path: Location, head: bytes, size: int) -> SourceError | UnsupportedError:
    if head.lstrip().startswith(b"{"):
        # `read_object` raises if the JSON itself is damaged.
        if "model_type" in read_object(path):
            return UnsupportedError(
                f"{path} is a model's configuration and has no weights. To load, give the folder "
                "of the weights, with this file as config.json in it; to plan, shardload plan takes this file"
            )
        return UnsupportedError(
            f"{path} is JSON, but not an index: it has no 'weight_map'. Open the folder that contains it instead"
        )
    if placeholder := _placeholder(path, head):
        return placeholder
    # The PROTO opcode with the protocols that Python 3 writes.
    if head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        return UnsupportedError(
            f"{path} is a Python pickle, which can run code when opened. If PyTorch wrote it, convert it to "
            'safetensors: safetensors.torch.save_file(torch.load(path, weights_only=True), "new.safetensors")'
        )
    if refused := refused_file(path, name=path.name, head=head):
        return refused
    promised = _promised(path)
    promise = f"has the ending of a {promised.name} file, but " if promised else ""
    reason = f"{promise}begins with {head[:16]!r} ({exact_bytes(size)}), which matches no known format"
    kind = SourceError if promised else UnsupportedError
    return kind(f"{path} {reason}. Supported formats: {_supported()}")


def _placeholder(path: Location, head: bytes) -> SourceError | None:
    """Return the error for what a failed download left in a file's place: a Git LFS pointer or a web page."""
    if head.startswith(b"version https://git-lfs"):
        return SourceError(f"{path} is a Git LFS pointer, not the file itself. Fetch it with: git lfs pull")
    if head.lstrip()[:1] == b"<":
        return SourceError(f"{path} is a web page, not a checkpoint: the download was refused. Log in and repeat it")
    return None


def _placeholder_in(folder: Location) -> SourceError | None:
    for name in filter(_is_weights, folder.names()):
        path = folder / name
        with suppress(ShardloadError), closing(path.open()) as file:  # what cannot be read is reported already
            if found := _placeholder(path, FileContent(path, file).head):
                return found
    return None


def _open_folder(folder: Location, format: str | None) -> Manifest:
    found = spec_named(format) if format else _recognise_folder(folder)
    if found.open_folder is not None:
        try:
            return found.open_folder(folder)
        except SourceError as error:
            # A format's own error says how such a file contradicts the format, not what it is.
            if placeholder := _placeholder_in(folder):
                raise placeholder from error
            raise
    return _open_file(member(folder, _single(folder, found), named_by=str(folder)), format)


def _recognise_folder(folder: Location) -> FormatSpec:
    content = FolderContent(folder, folder.names())
    known = specs()
    # Next to steps, a config.json without weights may be any program's: settings of the run, for instance.
    is_described = CONFIG in content.names and not any(map(_is_weights, content.names))
    if is_described and (found := _containing(content)):
        return found
    # 1. A format that knows its folders: Hugging Face, a preset, a step.
    if found := next((spec for spec in reversed(known) if spec.is_folder(content)), None):
        return found
    if CONFIG in content.names:
        path, config = content.path / CONFIG, content.config
        if "architecture" in config:
            raise UnsupportedError(
                f"{path} describes a timm model; KerasHub converts it: save that with save_to_preset"
            )
        raise SourceError(
            f"{path} should describe a model by 'registered_name' (Keras) or 'model_type' (Hugging Face), but has only "
            f"{', '.join(sorted(config)[:8]) or 'no keys'}. Open the weights file itself to load it into your own model"
        )
    # 2. Files with a known ending, all of one format. The shards of an index do not count as a second one.
    kinds = [spec for spec in known if any(name.endswith(spec.endings) for name in content.names)]
    parts = {spec.part_format for spec in kinds}
    kinds = [spec for spec in kinds if spec.name not in parts and not _is_replaced(spec, kinds)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise SourceError(
            f"{folder} contains checkpoints of several formats ({listing(folder)}); open one of its files"
        )
    # 3. A folder that only its subfolders identify: a root of steps.
    if found := _containing(content):
        return found
    files = [name for name in content.names if (folder / name).is_file()]
    raise refused_folder(folder, names=files) or UnsupportedError(
        f"{folder} contains no checkpoint; found: {listing(folder)}. Supported formats: {_supported()}"
    )


def _is_replaced(spec: FormatSpec, kinds: Collection[FormatSpec]) -> bool:
    """Whether a package has added a format with all endings of a built-in one, and is asked first for such files."""
    added = (other for other in kinds if other.name not in BUILT_IN)
    return spec.name in BUILT_IN and any(set(spec.endings) <= set(other.endings) for other in added)


def _containing(content: FolderContent) -> FormatSpec | None:
    return next((spec for spec in reversed(specs()) if spec.contains_some(content)), None)


def _single(folder: Location, spec: FormatSpec) -> str:
    found = [name for name in folder.names() if name.lower().endswith(spec.endings)]
    firsts = sorted({spec.first_part(name) for name in found})
    if len(firsts) == 1 or (spec.joins_parts and len(set(map(set_of, found))) == 1):
        return found[0]
    if not found:
        raise SourceNotFoundError(f"{folder} should contain {spec.description}, but contains {listing(folder)}")
    raise SourceError(
        f"{folder} should contain one checkpoint of the format {spec.name!r}, but contains "
        f"{plural(len(firsts), 'checkpoint')} of that format ({', '.join(firsts[:8])}); open one of them"
    )


def _supported() -> str:
    return "; ".join(spec.description for spec in specs())


@dataclass(frozen=True, slots=True)
class _OtherFormat:
    noun: str
    """What another library's format is called in messages, with its article: ``an ONNX model``."""
    way_out: str
    """A sentence for messages that says how to convert a file to a format that shardload reads."""
    names: re.Pattern[str]
    """Matches the whole names, in lower case, of files that have this format."""
    head: bytes = b""
    """First bytes of the format's files, if they are always the same."""

    def error(self, path: object) -> UnsupportedError:
        """Return the error for a file or a folder of this format: it cannot be read, and how to convert it."""
        return UnsupportedError(
            f"Cannot read {path}: it is {self.noun}, expected a format that shardload reads. {self.way_out}"
        )


_FILE = '"new.safetensors")'
_ARRAYS = f"reader.get_tensor(name) returns each array, and safetensors.numpy.save_file(arrays, {_FILE} writes them"
_PYTORCH = _OtherFormat(
    "a PyTorch checkpoint, a pickle that can run code when opened",
    'Convert it to safetensors: safetensors.torch.save_file(torch.load(path, map_location="cpu", weights_only=True), '
    f"{_FILE}",
    re.compile(r".*\.(bin|pt|pth|ckpt)"),
)
_FLAX = _OtherFormat(
    "Flax's msgpack",
    'Convert it: tree = flax.serialization.msgpack_restore(open(path, "rb").read()); '
    f'safetensors.flax.save_file(flax.traverse_util.flatten_dict(tree, sep="/"), {_FILE}',
    re.compile(r".*\.msgpack"),
)
_FORMATS = (
    _OtherFormat(
        "a NumPy array (.npy)",
        f'Convert it: safetensors.numpy.save_file({{"name": numpy.load(path)}}, {_FILE}',
        re.compile(r".*\.npy"),
        b"\x93NUMPY",
    ),
    _OtherFormat(
        "a TensorFlow SavedModel",
        'Convert it with Keras 2: tf_keras.models.load_model(folder).save_weights("new.weights.h5"). Or without its '
        f'program: reader = tf.train.load_checkpoint(folder + "/variables/variables"); {_ARRAYS}',
        re.compile(r"saved_model\.pb(txt)?"),
    ),
    _OtherFormat(
        "a TensorFlow checkpoint",
        'Convert it with the model in Keras 2: model.load_weights(prefix); model.save_weights("new.weights.h5"). Or '
        f"without the model: reader = tf.train.load_checkpoint(prefix); {_ARRAYS}. prefix is the path without .index",
        re.compile(r".*\.index|.*\.data-\d{5}-of-\d{5}|.*\.ckpt\.meta"),
        b"model_checkpoint_path:",
    ),
    _OtherFormat(
        "an ONNX model",
        "Convert its weights: safetensors.numpy.save_file({i.name: onnx.numpy_helper.to_array(i) for i in "
        f"onnx.load(path).graph.initializer}}, {_FILE}",
        re.compile(r".*\.onnx"),
    ),
)


def refused_file(path: object, *, name: str, head: bytes) -> UnsupportedError | None:
    """Return the error for a file whose first bytes or name show another library's format; ``None`` for other files."""
    by_head = (found for found in _FORMATS if found.head and head.startswith(found.head))
    by_name = (found for found in _FORMATS if found.names.fullmatch(name.lower()))
    found = next(by_head, None) or next(by_name, None)
    return None if found is None else found.error(path)


def refused_folder(path: object, *, names: Collection[str]) -> UnsupportedError | None:
    """Return the error for a folder that contains a file of another library's format; ``None`` for other folders."""
    # Files of PyTorch are recognised by their content: any data may be called .bin.
    # Those of Flax are read, but a folder with a model's configuration promises tensors by its names.
    asked = (*_FORMATS, _PYTORCH, _FLAX)
    found = next((each for each in asked if any(each.names.fullmatch(name.lower()) for name in names)), None)
    return None if found is None else found.error(path)


def refused_zip(path: object, *, members: Collection[str]) -> UnsupportedError | None:
    """Return the error for a zip whose members show another library's format; ``None`` for other zips."""
    return _PYTORCH.error(path) if any(name.endswith("data.pkl") for name in members) else None
