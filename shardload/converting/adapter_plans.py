"""Which variables of a KerasHub model adapters of PEFT change, and how: decided and checked before any is changed.

names of the adapter ─► tensors of Hugging Face ─► `hub_sites`: kernels, and their views of these ─► AdapterPlan
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.converting.hub_sites import HubSites, Site, hub_sites
from shardload.errors import UnsupportedError, UsageError
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.loaders.peft import AdaptedNames, Weighted, base_notes
from shardload.loaders.peft.rows import Change
from shardload.manifest import Tensor
from shardload.mapping.lora_views import KernelDims
from shardload.transfer.read_tensor import read_rows
from shardload.units import plural


@dataclass(frozen=True, eq=False)
class AdaptedKernel:
    """A kernel to change: what is added to its matrix, and how its dims run along the matrix."""

    site: Site
    dims: KernelDims
    changes: tuple[Change, ...]

    @property
    def path(self) -> str:
        """Path of the kernel, for messages."""
        return str(self.site.twin.own.path)

    @cached_property
    def keras_factors(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keras' factors of the first change: ``a`` and ``b``."""
        return self.dims.kernel_factors(*self.matrix_factors(self.changes[0]))

    @property
    def rank(self) -> int:
        """Rank of Keras' factors."""
        return int(self.keras_factors[1].shape[0])

    def matrix_factors(self, change: Change) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return both factors of a change of the whole matrix: ``(rows, rank)`` and ``(rank, columns)``."""
        a, b = (read_rows(tensor, 0, tensor.rows) for tensor in (change.factors.a, change.factors.b))
        left, right = (a.T, b.T) if change.is_transposed else (b, a)
        return left.astype(np.float32), right.astype(np.float32)

    def merging_factors(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return factors of all changes at once, with their scales, so that their sum is rounded once.

        The first has the kernel's dims along rows of the matrix, the second the others; then comes the rank.
        """
        parts = [(*self.matrix_factors(change), change.scale) for change in self.changes]
        left = np.concatenate([np.float32(scale) * left[self.dims.rows] for left, _, scale in parts], 1)
        right = np.concatenate([right[:, self.dims.columns].T for _, right, _ in parts], 1)
        shapes: tuple[list[int], list[int]] = ([], [])
        for n, is_row in zip(self.dims.shape, self.dims.along_rows, strict=True):
            shapes[not is_row].append(n)
        return left.reshape(*shapes[0], left.shape[1]), right.reshape(*shapes[1], right.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPlan:
    """What adapters change in a model."""

    model: Any
    kernels: tuple[AdaptedKernel, ...]
    replaced: tuple[tuple[Site, Tensor], ...]
    """Variables that get values of an adapter's own, and the tensors with these values."""
    notes: tuple[str, ...]
    merge: bool


def replacing_value(site: Site, tensor: Tensor) -> NDArray[Any]:
    """Return the value that a variable gets from a tensor of an adapter: the elements in its view of that tensor."""
    found = read_rows(tensor, 0, tensor.rows)
    strides = tuple(step * found.itemsize for step in site.view.strides)
    return np.lib.stride_tricks.as_strided(found.reshape(-1)[site.view.offset :], site.view.shape, strides)


def plan_adapters(model: Any, adapters: Sequence[Weighted], *, merge: bool) -> AdapterPlan:
    """Find the variables that adapters change in a model, and raise if it cannot have them; nothing is changed.

    Without ``merge``, they are to be kept as LoRA of Keras.
    """
    if len(adapters) > 1 and not merge:
        raise UsageError("Cannot keep several adapters as LoRA of one model. Pass merge=True, or one adapter")
    if not type(backbone_of(model)).__module__.startswith("keras_hub."):
        raise UnsupportedError(
            f"Cannot put a PEFT adapter onto {model.name!r}: it is a {type(model).__name__}, expected a model of "
            "KerasHub, whose kernels have names of Hugging Face"
        )
    sites = hub_sites(model)
    changes, replaced = _changes(sites, adapters)
    for name in (*replaced, *changes):
        if not sites.cover(name):
            raise UnsupportedError(
                f"Cannot put a PEFT adapter onto {model.name!r}: KerasHub's converter computes with {name!r}, so that "
                "no variable has its elements. Pass the adapter to shardload.load, which merges it before that"
            )
    check = _check_merging if merge else _check_keeping
    kernels = tuple(check(k) for name, found in changes.items() for k in _kernels(sites, name, found))
    own = tuple((site, tensor) for name, tensor in replaced.items() for site in sites.of(name))
    notes = [note for one in adapters for note in base_notes(sites.manifest, one)]
    return AdapterPlan(model, kernels, own, (*notes, *(() if merge else _ranks(kernels))), merge)


def _changes(sites: HubSites, adapters: Sequence[Weighted]) -> tuple[dict[str, list[Change]], dict[str, Tensor]]:
    """Return what adapters add to each tensor of Hugging Face, and the tensors that replace some."""
    changes: dict[str, list[Change]] = {}
    replaced: dict[str, Tensor] = {}
    for one in adapters:
        names = AdaptedNames(sites.manifest, one)
        for name, tensor in names.replaced():
            if name in replaced:
                raise UnsupportedError(
                    f"Cannot use the PEFT adapter {one.adapter.location}: two adapters replace {name!r}. Pass one of "
                    "them"
                )
            replaced[name] = tensor
        for name, change in names.changes():
            changes.setdefault(name, []).append(change)
    return changes, replaced


_WAY_ON = "Pass merge=True, or the adapter to shardload.load, which merges it"


def _kernels(sites: HubSites, name: str, changes: Sequence[Change]) -> Iterator[AdaptedKernel]:
    rows, columns = sites.manifest.tensors[name].shape
    for site in sites.of(name):
        if (dims := KernelDims.of(site.view, (rows, columns))) is None:
            raise UnsupportedError(
                f"Cannot put the adapter of {name!r} onto {site.twin.own.path!r}, which has its elements in another "
                "form. Pass it to shardload.load, which merges it before that"
            )
        yield AdaptedKernel(site, dims, tuple(changes))


def _check_merging(kernel: AdaptedKernel) -> AdaptedKernel:
    twin = kernel.site.twin
    if twin.is_quantised or twin.has_lora:
        state = "is quantised" if twin.is_quantised else "has LoRA"
        raise UnsupportedError(
            f"Cannot merge an adapter into {kernel.path!r}, which {state}. Load the base model again, with the adapter"
        )
    return kernel


def _check_keeping(kernel: AdaptedKernel) -> AdaptedKernel:
    twin, name, shape = kernel.site.twin, kernel.site.tensor.name, kernel.dims.shape
    if twin.lacks_lora:
        raise UnsupportedError(
            f"Cannot put LoRA onto {kernel.path!r}: its layer is in the mode {twin.layer.quantization_mode}, in which "
            "Keras computes no LoRA. Load the base model without quantized='keep'; to quantise it, pass quantize='int4'"
        )
    if not twin.can_have_lora:
        raise UnsupportedError(f"Cannot put LoRA onto {kernel.path!r}, which is {name!r} here. {_WAY_ON}")
    if kernel.rank * (math.prod(shape[:-1]) + shape[-1]) > math.prod(shape):
        raise UnsupportedError(
            f"Cannot keep the adapter of {name!r} as LoRA: the kernel {kernel.path!r} has "
            f"{plural(kernel.dims.blocks, 'head')}, so that Keras' factors would have rank {kernel.rank}, and more "
            f"elements than the kernel. {_WAY_ON}"
        )
    if twin.has_lora and (twin.layer.lora_rank, twin.scale) != (kernel.rank, kernel.changes[0].scale):
        raise UnsupportedError(
            f"Cannot put the adapter onto {kernel.path!r}: it has LoRA of rank {twin.layer.lora_rank} already, "
            f"expected {kernel.rank} with the same alpha, or none. Load the base model again"
        )
    return kernel


def _ranks(kernels: Sequence[AdaptedKernel]) -> list[str]:
    larger = [kernel for kernel in kernels if kernel.rank > kernel.changes[0].factors.rank]
    if not larger:
        return []
    first = larger[0]
    return [
        f"{plural(len(larger), 'kernel')} with a dim of heads got a rank that is larger by their number: "
        f"{first.path!r} has rank {first.rank} for {first.changes[0].factors.rank}, with the same product"
    ]
