"""The family that a GGUF header belongs to, and its tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardload.errors import SourceError, UnsupportedError
from shardload.families.parts.gguf import GgufArchitecture, Undo
from shardload.families.parts.gguf_values import Config, GgufValues
from shardload.families.registry import gguf_architectures, why_refused
from shardload.loaders.gguf_header import GgufHeader, TensorInfo

MAX_EXPERTS, MIN_EXPERT_BYTES = 1024, 64
"""Limits for a stack of experts: a damaged header must not describe millions of empty ones."""


def values_of(
    header: GgufHeader, path: str, *, rope_factors: Mapping[str, tuple[float, ...]] | None = None
) -> GgufValues:
    """Return typed access to the key-values of a header."""
    return GgufValues(header.values, {info.name: info.shape for info in header.tensors}, path, rope_factors or {})


def architecture(header: GgufHeader, path: str) -> GgufArchitecture:
    """Return the architecture that a header names.

    Raises:
        UnsupportedError: When no family has it.
    """
    name, known = header.values.get("general.architecture"), gguf_architectures()
    if not isinstance(name, str) or name not in known:
        reason = why_refused(str(name))
        raise UnsupportedError(
            f"{path} has the architecture {name!r}, which is not supported{f' ({reason})' if reason else ''}. GGUF is "
            f"supported for {', '.join(known)}. Load the safetensors of this model instead"
        )
    values = values_of(header, path)
    return next(kind for kind in known[name] if kind.applies(values))


def config(header: GgufHeader, path: str, *, rope_factors: Mapping[str, tuple[float, ...]] | None = None) -> Config:
    """Return a Hugging Face ``config.json`` that KerasHub's converters accept.

    Raises:
        SourceError: When a key is missing or contradicts the tensors.
        UnsupportedError: When the configuration cannot express the model.
    """
    return architecture(header, path).config(values_of(header, path, rope_factors=rope_factors))


def pieces(known: GgufArchitecture, info: TensorInfo, path: str) -> Iterator[tuple[str, TensorInfo, Undo]]:
    """Yield a tensor, or the experts in it, with Hugging Face's names and the transformations to undo.

    Raises:
        UnsupportedError: When the architecture has no such tensor.
        SourceError: When it should be a stack of experts and is not.
    """
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
    """Yield each expert of a stack as a tensor of its own."""
    count = info.shape[0]
    if len(info.shape) != 3 or not 0 < count <= MAX_EXPERTS or info.nbytes < MIN_EXPERT_BYTES * count:
        raise SourceError(
            f"{info.path}: tensor {info.name!r} has the shape {info.shape}, expected (experts, out, in) with at most "
            f"{MAX_EXPERTS} experts"
        )
    for i in range(count):
        share = info.nbytes // count
        yield replace(info, shape=info.shape[1:], offset=info.offset + i * share, span=share)
