"""Tensors of a checkpoint that do not belong to the architecture in its configuration.

A tensor that no variable uses is an error, unless one of these rules explains why the built model gives the same
results without it::

    buffers         position_ids, inv_freq, causal masks    computed from the configuration; known by name and kind
    heads, poolers  classifier.*, cls.*, pooler.*           parts of a task that the built class lacks
    copies          lm_head.weight                          equal, bit for bit, to the embedding used instead
    zeros           final_logits_bias                       an added term that is all zeros

There is no rule for "everything else": biases, layers beyond ``num_hidden_layers`` and an output layer that differs
from the embedding stay errors. docs/design/0010-folders-as-they-are.md describes `transformers` and KerasHub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import UsageError
from shardload.families.parts.config import architecture_of
from shardload.families.parts.tensors import POOLER
from shardload.families.registry import model_type_of
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.loaders import spec_of
from shardload.manifest import Manifest, Tensor
from shardload.mapping.variable_map import VariableMap
from shardload.reports.facts import NoteKind, of_kind
from shardload.transfer.read_tensor import read_rows, row_ranges

_READ_BYTES = 8 << 20
"""Number of bytes of a tensor that are read at a time to compare its values with zeros or another tensor."""


@dataclass(frozen=True, slots=True)
class OutsideTensor:
    """A tensor that is left out, and why the model does not need it."""

    tensor: str
    reason: str
    is_weight: bool = False
    """True for a trained weight (of a part that the model lacks); false if nothing is lost without the tensor."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The tensors that no variable uses, in two groups: the model does not need them, or it should use them."""

    outside: tuple[OutsideTensor, ...]
    unused: tuple[str, ...]
    """Tensors that the model should use but does not: an error under ``strict``."""
    why: Mapping[str, str]
    """Name → why the model should use the tensor, for some of the unused ones."""
    read_bytes: int = 0
    """Number of bytes that were read to compare values, which the report adds to those of the load."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A kind of constant (a causal mask) that old `transformers` stored as a tensor, and how to recognise it."""

    suffix: str
    """Regular expression for the end of the tensor's name."""
    fits: Callable[[Tensor], bool]
    """Tells whether the shape or dtype of a tensor is as for this constant; a weight may have the same name."""
    reason: str
    """Why the model does not need the tensor, for reports."""


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype.kind in "iu"


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.size == 1


_BUFFERS = (
    _Buffer(r"embeddings\.(position_ids|token_type_ids)", _is_integer, "a buffer: the numbers 0, 1, 2 … or zeros"),
    _Buffer(
        r"rotary_emb(eddings)?\.(original_)?inv_freq",
        lambda tensor: len(tensor.shape) == 1,
        "a buffer: rotary frequencies, from config.json",
    ),
    # The causal mask of GPT-2, of shape (1, 1, positions, positions), is named "bias"; a real bias is a vector.
    _Buffer(
        r"(attn|attention|crossattention)\.bias",
        lambda tensor: tensor.shape[:2] == (1, 1) and len(set(tensor.shape[2:])) == 1 and len(tensor.shape) == 4,
        "a buffer: the causal mask",
    ),
    _Buffer(r"(attn|attention|crossattention)\.masked_bias", _is_scalar, "a buffer: the value of masked scores"),
    _Buffer(r"relative_position_index", _is_integer, "a buffer: indices that follow from the window size"),
    _Buffer(r"num_batches_tracked", _is_integer, "a buffer: counts batches of training"),
    _Buffer(r"(encoder|decoder)\.version", _is_scalar, "a version number"),
)
_COPY = re.compile(r"(.+\.)?(lm_head(\.out_proj)?|embed_tokens|shared|wte)\.weight")
_EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|shared|wte|word_embeddings)\.weight")
_ADDED = {
    "final_logits_bias": "added to the logits",
    "embeddings.token_type_embeddings.weight": "added to the embeddings",
}
"""End of a tensor's name → what `transformers` does with it. The model may lack such a tensor if it is all zeros."""


def sort_unused(
    mapping: VariableMap,
    manifest: Manifest,
    model: Any,
    *,
    ignore: Iterable[str] = (),
    compare: bool = True,
) -> Sorted:
    """Sort the tensors that no variable uses into those that the model does not need and those that it should use.

    ``ignore`` are patterns of names to count as not needed. Without ``compare``, no values are read, as for a plan.
    """
    patterns = tuple(ignore)
    ignored = {name: p for name in mapping.unused for p in patterns if fnmatchcase(name, p)}
    if unmatched := [p for p in patterns if not any(fnmatchcase(name, p) for name in mapping.unused)]:
        raise UsageError(f"ignore={unmatched[0]!r} matches none of the unused tensors. Remove or correct it")
    outside: list[OutsideTensor] = []
    why: dict[str, str] = {}
    values = _Comparer()
    for name in mapping.unused:
        found: OutsideTensor | str = ""
        if name in ignored:
            found = OutsideTensor(name, f"left out on request ({ignored[name]})", True)
        elif spec_of(manifest).is_hugging_face:
            # By name first, because values have to be read.
            found = _by_kind(manifest.tensors[name], manifest, model) or _by_value(
                manifest.tensors[name], mapping, manifest, model, values=values if compare else None
            )
        if isinstance(found, OutsideTensor):
            outside.append(found)
        elif found:
            why[name] = found
    left_out = {each.tensor for each in outside}
    return Sorted(tuple(outside), tuple(n for n in mapping.unused if n not in left_out), why, values.read_bytes)


def without_parts(mapping: VariableMap, manifest: Manifest) -> VariableMap:
    """Return ``mapping`` without missing weights of an optional part that checkpoints of this class never store.

    The part keeps its initial values. KerasHub's BERT and ALBERT always have a pooler, its Mistral, Mixtral and GPT-OSS
    an output layer; `transformers` stores neither for tasks that use none.
    """
    architecture, part = architecture_of(manifest.config), model_type_of(manifest.config).optional_part
    if part is None or not architecture.endswith(part.without):
        return mapping
    if not mapping.absent or not all(re.fullmatch(part.names, name) for name in mapping.absent):
        return mapping
    # If some of it is stored, the rest was lost.
    if any(re.fullmatch(part.names, name) for name in manifest.tensors):
        return mapping
    note = (
        f"{architecture} has no {part.title}: {', '.join(mapping.missing)} keep their initial values; train them "
        f"before you use {part.output}"
    )
    other_notes = tuple(n for n in mapping.notes if n not in of_kind(mapping.notes, NoteKind.TENSOR_NOT_STORED))
    return replace(
        mapping,
        missing=(),
        missing_variables=(),
        state=(*mapping.state, *mapping.missing_variables),
        notes=(*other_notes, note),
        absent=(),
    )


def _by_kind(tensor: Tensor, manifest: Manifest, model: Any) -> OutsideTensor | None:
    """Return why the model does not need a tensor, judged by name, dtype and shape; ``None`` if these do not tell."""
    name, known = tensor.name, model_type_of(manifest.config)
    if not tensor.size:
        return OutsideTensor(name, "has no elements")
    for buffer in _BUFFERS:
        if re.fullmatch(rf"(.+\.)?{buffer.suffix}", name) and buffer.fits(tensor):
            return OutsideTensor(name, buffer.reason)
    if known.has_pooler_outside and re.fullmatch(POOLER, name):
        return OutsideTensor(name, f"a pooler, which {_class(model)} does not have", True)
    if reason := next((reason for names, reason in known.outside.items() if re.fullmatch(names, name)), None):
        return OutsideTensor(name, reason, True)
    # A backbone has no head. A task has one, so tensors of a head that it does not use are an error.
    is_backbone = backbone_of(model) is model
    if is_backbone and known.heads and re.match(known.heads, name):
        head = f"part of the head of {architecture_of(manifest.config) or 'a task'}"
        return OutsideTensor(name, f"{head}; {_class(model)} ends before it", True)
    return None


def _by_value(
    tensor: Tensor, mapping: VariableMap, manifest: Manifest, model: Any, *, values: _Comparer | None
) -> OutsideTensor | str:
    """Compare a tensor with zeros or another tensor: return why the model does not need it or, as text, why it does."""
    for end, use in _ADDED.items():
        if tensor.name == end or tensor.name.endswith(f".{end}"):
            if values is None:
                return OutsideTensor(tensor.name, f"{use}; loading checks that it is all zeros")
            if values.is_zero(tensor):
                return OutsideTensor(tensor.name, f"all zeros, {use}")
            return f"it is {use} and not all zeros, but {_class(model)} has no variable for it"
    # Equal values mean a tied copy only if shape and dtype are equal, and if the model uses the other tensor.
    left = set(mapping.unused)
    originals = [
        other
        for name, other in manifest.tensors.items()
        if _COPY.fullmatch(tensor.name) and name not in left and _EMBEDDING.fullmatch(name)
        if (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
    ]
    if originals and values is None:
        return OutsideTensor(tensor.name, f"loading checks that it equals {originals[0].name!r}")
    for original in originals:
        if values is not None and values.is_same(tensor, original):
            return OutsideTensor(tensor.name, f"equal to {original.name!r}, which {_class(model)} uses for both")
    return f"it differs from {originals[0].name!r}, which {_class(model)} uses for both" if originals else ""


@dataclass(slots=True)
class _Comparer:
    """Compares the values of tensors in parts, so that memory stays small, and counts the bytes that it reads."""

    read_bytes: int = 0

    def is_same(self, one: Tensor, two: Tensor) -> bool:
        # As bytes: NaNs equal themselves, and -0.0 differs from 0.0.
        return all(
            self._rows(one, a, b).tobytes() == self._rows(two, a, b).tobytes()
            for a, b in row_ranges(one, limit_bytes=_READ_BYTES)
        )

    def is_zero(self, tensor: Tensor) -> bool:
        return not any(np.any(self._rows(tensor, a, b)) for a, b in row_ranges(tensor, limit_bytes=_READ_BYTES))

    def _rows(self, tensor: Tensor, start: int, stop: int) -> NDArray[Any]:
        # A share of what is stored: a compressed tensor takes fewer bytes than its values.
        self.read_bytes += tensor.stored_bytes * (stop - start) // max(1, tensor.rows)
        return read_rows(tensor, start, stop)


def _class(model: Any) -> str:
    return f"KerasHub's {type(backbone_of(model)).__name__}"
