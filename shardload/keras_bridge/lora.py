"""Layers with LoRA: what they store, and their kernels with the factors merged.

    kernel (frozen) + alpha / rank · a @ b   ─►  the kernel that the layer computes with

Keras merges kernels too, in ``save_own_variables``, but for the whole model at once, and in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardload.errors import UnsupportedError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.variables import value_of

_KERNELS = (("_kernel", "lora_kernel_a", "lora_kernel_b"), ("_embeddings", "lora_embeddings_a", "lora_embeddings_b"))
"""Attributes with (kernel, LoRA factor a, factor b): first those of dense and convolution layers, then of
embeddings."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraKernel:
    """The frozen kernel of a layer with LoRA, and the factors ``a`` and ``b`` whose product is added to it."""

    layer: Any
    kernel: Variable
    a: Variable
    b: Variable

    def merged(self) -> jax.Array:
        """Return kernel plus scaled product of the factors, computed in float32, rounded once to the kernel's dtype."""
        kernel = value_of(self.kernel)
        found = merge(kernel, value_of(self.a), value_of(self.b), scale=self.scale)
        return jax.device_put(found, kernel.sharding)

    @property
    def scale(self) -> float:
        """What the product ``a @ b`` is multiplied by: alpha over rank."""
        return float(self.layer.lora_alpha / self.layer.lora_rank)


def merge(kernel: Any, a: Any, b: Any, *, scale: float) -> jax.Array:
    """Return ``kernel + scale * a @ b`` in the kernel's dtype, computed in float32 or float64 and rounded once."""
    # precision: by default, TPUs and many GPUs multiply float32 matrices in fewer bits.
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    change = jnp.matmul(jnp.asarray(a, wide), jnp.asarray(b, wide), precision="highest")
    return jnp.add(jnp.asarray(kernel, wide), jnp.multiply(scale, change)).astype(kernel.dtype)


def lora_layers(model: Model) -> list[Any]:
    """Return the layers of a model that have LoRA enabled."""
    return [layer for layer in model._flatten_layers() if vars(layer).get("lora_enabled", False)]


def adapters_of(layers: Iterable[Any]) -> list[tuple[Variable, Variable]]:
    """Return the LoRA factors (a, b) of the kernels in ``layers``, quantised or not; leave out kernels without LoRA."""
    pairs = [(getattr(layer, a, None), getattr(layer, b, None)) for layer in layers for _, a, b in _KERNELS]
    return [(a, b) for a, b in pairs if hasattr(a, "assign") and hasattr(b, "assign")]


def changes_nothing(b: Variable) -> bool:
    """Whether an adapter's second factor ``b`` is all zeros, as in a new adapter, which does not change its kernel."""
    return not bool(jnp.any(value_of(b)))


def lora_kernels(layers: Iterable[Any]) -> list[LoraKernel]:
    """Return the kernel and factors of each of the ``layers``, which have LoRA; raise an error for a quantised one."""
    return [_kernel_of(layer) for layer in layers]


def _kernel_of(layer: Any) -> LoraKernel:
    if getattr(layer, "quantization_mode", None) is not None:
        raise UnsupportedError(
            f"Cannot merge LoRA into {layer.path!r}: its kernel is quantised ({layer.quantization_mode}). Merge before "
            "quantising the model"
        )
    for names in _KERNELS:
        found = [getattr(layer, name, None) for name in names]
        if all(hasattr(variable, "assign") for variable in found):
            return LoraKernel(layer, *found)
    raise UnsupportedError(
        f"Cannot merge LoRA into {layer.path!r}: {type(layer).__name__} has no LoRA factors that shardload knows. "
        "Merge them yourself, and set lora_enabled=False"
    )


@contextmanager
def hidden(layers: Iterable[Any]) -> Iterator[None]:
    """Make LoRA look disabled inside the block: ``layer.kernel`` is then the stored kernel without the factors."""
    # Into __dict__, past Keras' tracking of attributes.
    changed = list(layers)
    for layer in changed:
        vars(layer)["lora_enabled"] = False
    try:
        yield
    finally:
        for layer in changed:
            vars(layer)["lora_enabled"] = True
