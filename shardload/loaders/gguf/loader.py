"""Open GGUF files as if they were Hugging Face checkpoints, with Hugging Face's names, row order and configuration.

A file may describe no model that can be built: its architecture is unknown, or a key is missing. Its tensors then keep
GGUF's names, and `Manifest.undescribed` says why. `shardload.families` contains the names and makes the configuration.

Models may be split over several files. All parts state how many parts and tensors the model has, so a part that is
missing or of another model is found by the headers::

    model-00001-of-00003.gguf   split.no 0, and all other key-values; tensors, or none
    model-00002-of-00003.gguf   split.no 1; tensors
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import ShardloadError, SourceError, TruncatedSourceError, UnsupportedError
from shardload.families.parts.gguf import GgufArchitecture, Undo
from shardload.families.parts.gguf_values import GgufValues, head_counts
from shardload.families.registry import gguf_architectures, why_refused
from shardload.loaders.contents import CONFIG, FolderContent, all_parts, part_name, part_number
from shardload.loaders.extents import checked_tensors
from shardload.loaders.gguf.header import GgufHeader, LongArray, TensorInfo, read_array, read_gguf_header
from shardload.loaders.gguf.rows import fused, original_shape, storage
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest, Tensor
from shardload.stores.location import Location
from shardload.units import plural

_MAX_ROPE_BYTES = 1 << 16
"""Limit on the bytes of a tensor of RoPE scaling factors. Most models have 64 factors, one per rotated pair."""
_MAX_EXPERTS, _MIN_EXPERT_BYTES = 1024, 64
"""Most experts in one tensor, and fewest bytes of an expert. They stop headers that declare millions of experts."""


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """A tokenizer, as the header of a GGUF file describes it."""

    model: str
    """Kind of tokenizer: ``llama`` SentencePiece, ``gpt2`` byte-pair encoding, ``bert`` WordPiece, ``t5`` unigrams."""
    pre: str
    """Name of the pre-tokenizer, which first splits a text into words; ``default`` if the file names none."""
    tokens: tuple[str, ...]
    """The text of each token; the position is the token's id."""
    scores: NDArray[np.float32]
    """The score of each token, by id, which decides how SentencePiece splits a text; empty if the file has none."""
    token_types: NDArray[np.int32]
    """Type of each token, by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; may be empty."""
    merges: tuple[str, ...]
    special_ids: dict[str, int]
    """Role of a special token (``bos``, ``eos``, ``unknown``, ``padding``, …) → its id."""
    flags: dict[str, bool]
    """Setting (``add_bos_token``, ``add_space_prefix``, …) → whether it is on, as stored in the file."""
    chat_template: str | None
    charsmap: bytes = b""
    """SentencePiece's compiled rules for normalising text; empty if the file has none."""


def open_file(path: Location) -> Manifest:
    """Return the manifest of a ``.gguf`` file; for one file of a split model, the manifest of the whole model."""
    first, header = read_model(path)
    undescribed: ShardloadError | None = None
    try:
        config, tensors = _as_hugging_face(header, str(first))
    except TruncatedSourceError:
        raise
    except (SourceError, UnsupportedError) as error:
        undescribed = type(error)(str(error))  # without the traceback, which keeps what was made so far
    if undescribed is not None:
        stored = ((info, *storage(info, undo=Undo.NOTHING)) for info in header.tensors)
        config, tensors = {}, [Tensor(info.name, info.shape, dtype, where) for info, where, dtype in stored]
    checked_tensors(tensors, files=header.files)
    # It also sorts decoded tensors to the end. In GGUF they alternate with raw ones, and a plan reads a decoded tensor
    # after its predecessor here, so the order of the header, which is that of the bytes, is kept.
    ordered = {tensor.name: tensor for tensor in tensors}
    return Manifest(first, "gguf", ordered, header.files, config, header.values, undescribed=undescribed)


def _as_hugging_face(header: GgufHeader, name: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a model's configuration and tensors as a Hugging Face checkpoint would have them; errors name ``name``."""
    values = GgufValues(header.values, {info.name: info.shape for info in header.tensors}, name)
    known = _architecture(values)
    config = known.config(replace(values, rope_factors=_rope_factors(header, known.rope_factors)))
    # Only permutations need the numbers of heads. Gemma 4's differ by layer, so they are not read for every model.
    heads, kv_heads = head_counts(values) if known.undone else (1, 1)
    tensors = []
    for stored in header.tensors:
        for hf_name, info, undo in _pieces(known, stored, name):
            # With grouped-query attention there are fewer heads of keys than of queries.
            count = kv_heads if ".attn_k." in info.name else heads
            _check_shape(info, undo, count)
            where, dtype = storage(info, undo=undo, heads=count)
            tensors.append(Tensor(hf_name, original_shape(info, undo), dtype, where))
    return config, [*tensors, *fused(header, known)]


def _architecture(values: GgufValues) -> GgufArchitecture:
    """Return how shardload reads the architecture that a GGUF header names; raise if it is not supported."""
    name, known = values.entries.get("general.architecture"), gguf_architectures()
    kinds = known.get(name, ()) if isinstance(name, str) else ()
    if (found := next((kind for kind in kinds if kind.applies(values)), None)) is not None:
        return found
    reason = why_refused(str(name))
    raise UnsupportedError(
        f"{values.path} has the architecture {name!r}, which is not supported{f' ({reason})' if reason else ''}. "
        f"GGUF is supported for {', '.join(known)}. Load the safetensors of this model instead"
    )


def _pieces(known: GgufArchitecture, info: TensorInfo, path: str) -> Iterator[tuple[str, TensorInfo, Undo]]:
    """Yield (Hugging Face's name, stored tensor, converter's change to reverse), or one such tuple per expert in it."""
    name = known.hf_name(info.name, path)
    if name is None:
        return
    if "{}" in name:
        for i, expert in enumerate(_experts(info)):
            yield name.format(i), expert, Undo.NOTHING
    elif "shared_expert_gate" in name and len(info.shape) == 1:
        # Older converters dropped this dim.
        yield name, replace(info, shape=(1, *info.shape)), Undo.NOTHING
    else:
        yield name, info, known.undo(info.name)


def _experts(info: TensorInfo) -> Iterator[TensorInfo]:
    """Yield each expert of a mixture-of-experts layer, whose matrices GGUF stacks in one tensor, as its own tensor."""
    count = info.shape[0]
    if len(info.shape) != 3 or not 0 < count <= _MAX_EXPERTS or info.nbytes < _MIN_EXPERT_BYTES * count:
        raise SourceError(
            f"{info.path}: tensor {info.name!r} has the shape {info.shape}, expected (experts, out, in) with at most "
            f"{_MAX_EXPERTS} experts"
        )
    for i in range(count):
        share = info.nbytes // count
        yield replace(info, shape=info.shape[1:], offset=info.offset + i * share, span=share)


def tokenizer_metadata(path: Location) -> TokenizerMetadata:
    """Read what the header of a ``.gguf`` file says of the tokenizer; raise if it has none."""
    name = str(path)
    values = {
        k.removeprefix("tokenizer."): v for k, v in read_gguf_header(path).values.items() if k.startswith("tokenizer.")
    }
    tokens = _strings(values, "ggml.tokens", name)
    if not tokens:
        raise UnsupportedError(f"{name} contains no tokenizer. Load the model without a prompt, or use another file")
    # "ggml.bos_token_id" → "bos"
    ids = {key[5:-9]: value for key, value in values.items() if key.startswith("ggml.") and key.endswith("_token_id")}
    found = TokenizerMetadata(
        model=str(values.get("ggml.model", "")),
        pre=str(values.get("ggml.pre", "default")),
        tokens=tokens,
        scores=_numbers(values, "ggml.scores", np.float32, name),
        token_types=_numbers(values, "ggml.token_type", np.int32, name),
        merges=_strings(values, "ggml.merges", name),
        special_ids={key: value for key, value in ids.items() if isinstance(value, int) and value < len(tokens)},
        flags={key[5:]: value for key, value in values.items() if key.startswith("ggml.") and isinstance(value, bool)},
        chat_template=_template(values.get("chat_template"), name),
        charsmap=_numbers(values, "ggml.precompiled_charsmap", np.uint8, name).tobytes(),
    )
    for what, items in (("scores", found.scores), ("token types", found.token_types)):
        if len(items) not in (0, len(tokens)):
            raise SourceError(
                f"{name} contains {plural(len(tokens), 'token')}, but {len(items)} {what}; expected one for each token"
            )
    return found


def _strings(values: dict[str, Any], key: str, path: str) -> tuple[str, ...]:
    found = values.get(key, [])
    # Anything but a list becomes a list that fails the next check.
    items = read_array(found) if isinstance(found, list | LongArray) else [None]
    if not all(isinstance(item, str) for item in items):
        raise SourceError(f"{path}: 'tokenizer.{key}' should be a list of strings. Convert the model again")
    return tuple(items)


def _template(found: object, path: str) -> str | None:
    """Return the chat template, if there is one; a long one is read here, as the header parser only noted its place."""
    try:
        text = bytes(read_array(found)).decode("utf-8") if isinstance(found, LongArray) else found
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: 'tokenizer.chat_template' is not UTF-8 at its byte {error.start}") from error
    return text if isinstance(text, str) else None


def _numbers(values: dict[str, Any], key: str, dtype: type, path: str) -> NDArray[Any]:
    found = values.get(key, [])
    items = read_array(found) if isinstance(found, list | LongArray) else []
    try:
        return np.asarray(items).astype(dtype) if len(items) else np.empty(0, dtype)
    except (TypeError, ValueError) as error:  # texts, or arrays of arrays
        raise SourceError(f"{path}: 'tokenizer.{key}' should be a list of numbers. Convert the model again") from error


def _check_shape(info: TensorInfo, undo: Undo, heads: int) -> None:
    if undo in (Undo.TRANSPOSE, Undo.DROP_TWO) and len(info.shape) != 2:
        raise SourceError(f"{info.path}: tensor {info.name!r} has the shape {info.shape}, expected a matrix")
    # Two halves of each head, or its query, key and value.
    parts = {Undo.UNPERMUTE: 2, Undo.UNFUSE: 3}.get(undo, 0) * heads
    # The rows of a quantised vector are single elements, which cannot be moved out of their block.
    is_quantised_vector = info.kind.block_elements > 1 and len(info.shape) == 1
    if parts and (info.shape[0] % parts or is_quantised_vector):
        raise SourceError(
            f"{info.path}: tensor {info.name!r} has {plural(info.shape[0], 'row')}, which cannot be put back into "
            f"Hugging Face's order: either they are not a whole number for {plural(heads, 'head')} (expected a "
            f"multiple of {parts}), or the tensor is a quantised vector, whose elements cannot be moved"
        )


def _rope_factors(header: GgufHeader, names: Collection[str]) -> dict[str, tuple[float, ...]]:
    """Read the RoPE scaling factors from the small tensors ``names``; in Hugging Face, the configuration has them."""
    found = {}
    for info in header.tensors:
        if info.name not in names:
            continue
        if info.kind.name != "F32" or info.nbytes > _MAX_ROPE_BYTES:
            raise SourceError(
                f"{info.path}: {info.name!r} should be a few F32 numbers, but is {info.shape} {info.kind.name}"
            )
        raw = info.path.read_header(info.nbytes, offset=info.offset, what=repr(info.name))
        found[info.name.removesuffix(".weight")] = tuple(np.frombuffer(raw, "<f4").tolist())
    return found


def _is_described_otherwise(content: FolderContent) -> bool:
    """Whether a folder has a ``config.json``, but only GGUF weights: then their header describes the model instead."""
    # A folder without config.json needs no rule: it is recognised by the endings of its files.
    endings = tuple(name.rpartition(".")[2].lower() for name in content.names)
    return CONFIG in content.names and "gguf" in endings and not {"safetensors", "h5", "bin"} & set(endings)


def read_model(path: Location) -> tuple[Location, GgufHeader]:
    """Return a model's first file and its header; for a split model (``path``: any file of it), all headers joined."""
    header = read_gguf_header(path)
    count = _number(header, "split.count", path, default=1)
    # llama.cpp, too, treats only counts above 1 as split.
    if count in (0, 1):
        if (claimed := part_number(path.name)) is not None:
            raise SourceError(
                f"{path} is part {claimed[0]} of {claimed[1]} according to its name, but its header has no "
                "split.count above 1. If it is a whole model, rename it; otherwise, split the model again"
            )
        return path, header
    number = _number(header, "split.no", path) + 1
    if part_number(path.name) != (number, count):
        raise SourceError(
            f"{path} is part {number} of {count} according to its header, expected a name that ends in "
            f"-{number:05d}-of-{count:05d}.gguf, by which the other parts are found. Rename the parts, or join "
            "them: llama-gguf-split --merge FIRST OUT"
        )
    parts = all_parts(path)
    headers = {part: header if part == path else read_gguf_header(part) for part in parts}
    _check_places(headers, count)
    return parts[0], _joined(headers)


def _check_places(headers: Mapping[Location, GgufHeader], count: int) -> None:
    """Raise if the header of a split model's part contradicts the part's file name or the header of the first part."""
    first, described = next(iter(headers.items()))
    total = _number(described, "split.tensors.count", first)
    for i, (part, header) in enumerate(headers.items()):
        for key, expected in (("split.count", count), ("split.no", i), ("split.tensors.count", total)):
            if (found := _number(header, key, part)) != expected:
                raise SourceError(
                    f"{part} has {key} {found}, expected {expected} from its name and {first.name}. It was renamed, or "
                    "belongs to another model: download the parts again"
                )
        for key, value in header.values.items():
            # Only the first part has to have all keys. Long arrays are not read to be compared.
            if isinstance(value, LongArray) or key.startswith("split."):
                continue
            # As text, two NaNs are equal.
            if repr(value) != repr(expected_value := described.values.get(key, value)):
                raise SourceError(
                    f"{part} and {first.name} belong to different models: {key} is {str(value)[:80]!r} and "
                    f"{str(expected_value)[:80]!r}. Download the parts again"
                )


def _joined(headers: Mapping[Location, GgufHeader]) -> GgufHeader:
    first, described = next(iter(headers.items()))
    owner: dict[str, Location] = {}
    for part, header in headers.items():
        for info in header.tensors:
            if (other := owner.setdefault(info.name, part)) is not part:
                raise SourceError(
                    f"{other} and {part.name} both contain the tensor {info.name!r}. They belong to different models: "
                    "download the parts again"
                )
    total = _number(described, "split.tensors.count", first)
    if len(owner) != total:
        raise SourceError(
            f"The {plural(len(headers), 'part')} of {first} contain {plural(len(owner), 'tensor')}, expected {total}. "
            "One of them belongs to another model: download the parts again"
        )
    tensors = tuple(info for header in headers.values() for info in header.tensors)
    return GgufHeader(described.values, tensors, dict(size for h in headers.values() for size in h.files.items()))


def _number(header: GgufHeader, key: str, path: Location, *, default: int | None = None) -> int:
    found = header.values.get(key, default)
    if type(found) is not int or not 0 <= found < 1 << 31:
        raise SourceError(
            f"{path}: {key!r} should be a whole number from 0, as in every part, but is {str(found)[:80]}"
        )
    return found


SPEC = FormatSpec(
    name="gguf",
    description="a .gguf file",
    endings=(".gguf",),
    is_file=lambda content: content.head.startswith(b"GGUF"),
    is_folder=_is_described_otherwise,
    open_file=open_file,
    first_part=lambda name: part_name(name, 1),
    described_by="hugging-face",
    tensor_names="hugging-face",
    model_dtype="bfloat16",
    tokenizer="header",
)
