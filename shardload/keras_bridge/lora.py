"""Layers with LoRA: what they store, and their kernels with the factors merged.

    kernel (frozen) + alpha / rank · a @ b   ─►  the kernel that the layer computes with

Keras merges kernels too, in ``save_own_variables``, but for the whole model at once, and in the compute dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras

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


def merge_matrix(kernel: Variable, left: Any, right: Any, *, along_rows: tuple[bool, ...]) -> jax.Array:
    """Return a kernel plus a product of factors of its matrix, in its dtype and sharding.

    ``left`` has the dims of the kernel that run along rows of the matrix, then the rank; ``right`` the others, then the
    rank. Computed in float32 or float64 and rounded once; no device gets more than its shard of the product.
    """
    value = value_of(kernel)
    return _merging(along_rows, value.sharding)(value, left, right)


def merged_array(value: Any, left: Any, right: Any, *, along_rows: tuple[bool, ...]) -> jax.Array:
    """Return an array plus a product of factors, as `merge_matrix` does for a kernel on devices."""
    names = "abcdefgh"[: len(along_rows)]
    rows = "".join(name for name, is_row in zip(names, along_rows, strict=True) if is_row)
    columns = "".join(name for name, is_row in zip(names, along_rows, strict=True) if not is_row)
    wide = jnp.promote_types(value.dtype, jnp.float32)
    factors = (jnp.asarray(left, wide), jnp.asarray(right, wide))
    change = jnp.einsum(f"{rows}z,{columns}z->{names}", *factors, precision="highest")
    return jnp.add(jnp.asarray(value, wide), change).astype(value.dtype)


@functools.lru_cache(maxsize=64)
def _merging(along_rows: tuple[bool, ...], sharding: Any) -> Any:
    return jax.jit(functools.partial(merged_array, along_rows=along_rows), out_shardings=sharding)


def lora_layers(model: Model) -> list[Any]:
    """Return the layers of a model that have LoRA enabled."""
    return [layer for layer in model._flatten_layers() if vars(layer).get("lora_enabled", False)]


def adapters_of(layers: Iterable[Any]) -> list[tuple[Variable, Variable]]:
    """Return the LoRA factors (a, b) of the kernels in ``layers``, quantised or not; leave out kernels without LoRA."""
    pairs = [(getattr(layer, a, None), getattr(layer, b, None)) for layer in layers for _, a, b in _KERNELS]
    return [(a, b) for a, b in pairs if hasattr(a, "assign") and hasattr(b, "assign")]


@dataclass(frozen=True, slots=True, eq=False)
class Twin:
    """A variable of one model, and the layer and attribute that has its counterpart in another model."""

    variable: Variable
    layer: Any
    attribute: str

    @property
    def own(self) -> Variable:
        """The counterpart. That of a quantised kernel has another shape and dtype."""
        found: Variable = _variables_of(self.layer)[self.attribute]
        return found

    @property
    def can_have_lora(self) -> bool:
        """Whether it is the kernel to which the layer's LoRA factors are added."""
        return self.attribute in (kernel for kernel, _, _ in _KERNELS) and hasattr(self.layer, "enable_lora")

    @property
    def lacks_lora(self) -> bool:
        """Whether Keras computes no LoRA in the layer because of how its kernel is quantised."""
        return getattr(self.layer, "quantization_mode", None) in ("gptq", "awq")

    @property
    def has_lora(self) -> bool:
        """Whether LoRA is enabled in the layer."""
        return bool(vars(self.layer).get("lora_enabled", False))

    @property
    def is_quantised(self) -> bool:
        """Whether the layer's kernel is stored as codes."""
        return getattr(self.layer, "quantization_mode", None) is not None

    @property
    def scale(self) -> float:
        """What the product of the layer's LoRA factors is multiplied by."""
        return float(self.layer.lora_alpha / self.layer.lora_rank)

    @property
    def factors(self) -> tuple[Variable, Variable]:
        """The LoRA factors of the layer."""
        [pair] = adapters_of([self.layer])
        return pair


def twins_of(model: Model, twin: Model) -> list[Twin]:
    """Pair each variable of ``twin``, a model of the same configuration, with its counterpart in ``model``."""
    pairs = list(zip(model._flatten_layers(), twin._flatten_layers(), strict=True))
    if wrong := next((a for a, b in pairs if type(a) is not type(b)), None):
        raise UnsupportedError(f"Cannot compare {model.name!r} with a new model of its configuration: {wrong.path!r}")
    return [
        Twin(value, layer, attribute)
        for layer, other in pairs
        for attribute, value in vars(other).items()
        if isinstance(value, keras.Variable) and isinstance(_variables_of(layer).get(attribute), keras.Variable)
    ]


def _variables_of(layer: Any) -> dict[str, Any]:
    """Return a layer's attributes; in GPTQ's and AWQ's modes, its codes are in the place of the kernel."""
    found = vars(layer)
    return {**found, "_kernel": found["quantized_kernel"]} if "quantized_kernel" in found else found


def freeze_for_lora(model: Model, layers: Iterable[Any], others: Iterable[Variable] = ()) -> None:
    """Make ``layers``, which get LoRA, and the variables ``others`` the only trainable ones, as KerasHub does."""
    chosen, trained = {id(layer) for layer in layers}, {id(variable) for variable in others}
    model.trainable = True
    for layer in model._flatten_layers(include_self=False):
        layer.trainable = False
    for layer in model._flatten_layers(include_self=False):
        own = [variable for variable in vars(layer).values() if id(variable) in trained]
        if id(layer) in chosen:
            layer.trainable = True
        elif own:
            layer.trainable = True
            for variable in layer._trainable_variables:
                variable.trainable = id(variable) in trained


def enable_lora_in(layer: Any, rank: int, scale: float) -> None:
    """Enable LoRA of this rank in a layer, with factors of zeros, whose product is multiplied by ``scale``."""
    # Zeros, as the caller sets the values: random ones would differ between processes, which Keras refuses.
    layer.enable_lora(rank, lora_alpha=scale * rank, a_initializer="zeros")


def changes_nothing(b: Variable) -> bool:
    """Whether an adapter's second factor ``b`` is all zeros, as in a new adapter, which does not change its kernel."""
    return not bool(jnp.any(value_of(b)))


def lora_kernels(layers: Iterable[Any]) -> list[LoraKernel]:
    """Return the kernel and factors of each of the ``layers``, which have LoRA; raise an error for a quantised one."""
    return [_kernel_of(layer) for layer in layers]


def _kernel_of(layer: Any) -> LoraKernel:
    if getattr(layer, "quantization_mode", None) is not None:
        raise UnsupportedError(
            f"Cannot merge LoRA into {layer.path!r}: its kernel is quantised ({layer.quantization_mode}). Save the "
            "adapter with shardload.save_as(model, path, to='peft'), and merge that into the base model"
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
