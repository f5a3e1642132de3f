"""Quantise the layers of a model that has no values: all that ``model.quantize`` does, without computing numbers.

    float kernel (abstract)  ─►  codes, scale, zero point (abstract), and how their values follow from the kernel's

Only layers of exactly the classes Dense, EinsumDense, Embedding and ReversibleEmbedding are quantised, as in Keras.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src import ops as keras_ops
from numpy.typing import NDArray

from shardload.errors import UnsupportedError, UsageError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.patches import Patches
from shardload.keras_bridge.saving import assignments_to
from shardload.keras_bridge.variables import has_value

_KERNEL_CLASSES = ("Dense", "EinsumDense", "Embedding", "ReversibleEmbedding")
_MODES = ("int8", "int4")


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedKernel:
    """A kernel of which Keras stores codes and scales instead, and how it computes them."""

    layer: Any
    kernel: Variable
    """The floats, which the layer no longer has."""
    codes: Variable
    scale: Variable
    zero: Variable | None
    group_index: Variable | None
    """The number of the group of each element along the reduced dim; always the same."""
    shape: tuple[int, ...]
    """Shape of the kernel, or of the matrix to which Keras flattens it."""
    reduced: tuple[int, ...]
    """Dims of ``shape`` along which elements share a scale."""
    reduced_before: tuple[int, ...]
    """The same dims of the kernel, before Keras flattens it."""
    scale_dims: tuple[int | None, ...]
    """For each dim of the scale, the dim of ``shape`` that it is along; ``None`` for a dim of length 1."""
    packed: int | None = None
    """The dim of ``shape`` along which two codes are packed into a byte."""
    group: int | None = None
    """Elements along the reduced dim that share a scale; ``None`` if all do."""
    row_dims: int | None = None
    """How many leading dims of the kernel become the rows of its matrix; ``None`` if others do, or none."""
    is_transposed: bool = False
    """Whether ``codes`` have the columns of ``shape`` first, as in GPTQ."""
    order: NDArray[np.float32] | None = None
    """The group of each row of ``shape``, if the groups do not follow one another."""

    @property
    def is_flattened(self) -> bool:
        """Whether Keras flattens the kernel to a matrix."""
        return self.shape != tuple(self.kernel.shape)

    @property
    def value_range(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return (-127, 127) if self.packed is None else (-8, 7)

    @property
    def groups(self) -> NDArray[np.float32] | None:
        """The value of `group_index`."""
        if self.order is not None or self.group_index is None:
            return self.order
        if self.group is None:
            return np.zeros(self.group_index.shape, np.float32)
        return np.floor_divide(np.arange(self.group_index.shape[0], dtype=np.float32), np.float32(self.group))


def quantisation_config(wanted: Any) -> Any:
    """Return Keras' configuration of a quantisation: of ``"int8"``, ``"int4"`` or ``"int4/BLOCK"``, or a given one.

    Raises:
        UsageError: When it is none of these.
        UnsupportedError: When it is one that cannot be computed during a load.
    """
    quantizers = keras.quantizers
    if isinstance(wanted, str):
        mode, _, block = wanted.partition("/")
        if wanted == "int8":
            return quantizers.Int8QuantizationConfig()
        if mode == "int4" and (not block or block == "-1" or (block.isdecimal() and int(block))):
            return quantizers.Int4QuantizationConfig(**({"block_size": int(block)} if block else {}))
    elif isinstance(wanted, quantizers.QuantizationConfig):
        mode = wanted.mode
        if mode in _MODES and wanted.weight_quantizer is not None:
            raise UnsupportedError(
                f"Cannot quantise while loading with the weight quantizer {type(wanted.weight_quantizer).__name__}: "
                "only Keras' default for weights is supported. Load the model, then call model.quantize(config=…)"
            )
        if mode in _MODES:
            return wanted
    else:
        mode = ""
    if mode == "float8":
        raise UnsupportedError(
            "Cannot quantise to float8 while loading: Keras keeps float kernels for it, so it saves no memory. Load "
            "the model, then call model.quantize('float8')"
        )
    if mode in ("gptq", "awq"):
        raise UnsupportedError(
            f"Cannot quantise with {mode.upper()} while loading: it needs samples of data. Load the model, then call "
            "model.quantize(config=…)"
        )
    raise UsageError(
        f"Cannot use quantize={wanted!r:.60}: expected 'int8', 'int4' or 'int4/BLOCK' such as 'int4/64' (one scale for "
        "so many weights, -1 for one per output), or keras.quantizers.Int8QuantizationConfig or Int4QuantizationConfig"
    )


def quantisation_text(wanted: Any) -> str:
    """Return a text that is equal for equal quantisations, to compare what processes ask for; never raises."""
    if isinstance(wanted, keras.quantizers.QuantizationConfig):
        return f"{wanted.mode} {wanted.get_config()}"
    return repr(wanted)


def check_quantisable(model: Model) -> None:
    """Raise `UnsupportedError` if a kernel of ``model`` has a value, or its optimizer was built for floats."""
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise UnsupportedError(
            f"Cannot quantise the model {model.name!r} while loading: its optimizer was built for float kernels. "
            "Compile the model after the load"
        )
    for layer in model._flatten_layers():
        if is_quantisable(layer) and layer.built:
            for _, kernel in _kernels(layer):
                if has_value(kernel):
                    raise UnsupportedError(
                        f"Cannot quantise {kernel.path!r} while loading: it has a value already. Build the model "
                        "inside shardload.abstract(), or load it, then call model.quantize(…)"
                    )


def renew_optimizer(model: Model) -> None:
    """Replace an optimizer that was built for float kernels by a new one: quantised kernels are not trained."""
    if getattr(getattr(model, "optimizer", None), "built", False):
        with abstract():
            model.optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer))


def quantise_structure(model: Model, config: Any) -> list[QuantisedKernel]:
    """Quantise the layers of a model whose kernels have no values, as ``model.quantize(config=config)`` would.

    Raises:
        UnsupportedError: When a layer is quantised already, has LoRA, or no layer can be quantised.
    """
    found: list[QuantisedKernel] = []
    with abstract():
        for layer in model._flatten_layers():
            if len(list(layer._flatten_layers())) == 1 and is_quantisable(layer):
                _require_plain(layer)
                found += quantise_layer(layer, config)
        if not found:
            raise _without_kernels(model)
    # A wrapper such as SpectralNormalization has a reference to the floats, which nothing would load.
    left = {id(variable) for variable in model.variables}
    if shared := next((kernel.kernel.path for kernel in found if id(kernel.kernel) in left), None):
        raise UnsupportedError(
            f"Cannot quantise {shared!r} while loading: a layer around its own layer uses the floats, too. Load the "
            "model, then call model.quantize(…)"
        )
    # Keras does so, too: compiled functions have the old variables.
    model.train_function = model.test_function = model.predict_function = None
    return found


def is_quantisable(layer: Any) -> bool:
    """Whether a layer has kernels that Keras quantises; raise an error if its class does so by code of its own."""
    if any(type(layer) is getattr(keras.layers, name) for name in _KERNEL_CLASSES):
        return True
    if not type(layer).quantize.__module__.startswith("keras.src."):
        raise UnsupportedError(
            f"Cannot quantise the layer {layer.path!r} while loading: {type(layer).__name__} has a quantize method of "
            "its own. Load the model, then call model.quantize(…)"
        )
    return False


def _without_kernels(model: Model) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot quantise the model {model.name!r}: it has no layer that Keras quantises "
        f"({', '.join(_KERNEL_CLASSES)}). Load it without quantize="
    )


def _require_plain(layer: Any) -> None:
    if layer.quantization_mode is not None or getattr(layer, "lora_enabled", False):
        what = "has LoRA" if layer.quantization_mode is None else f"is quantised already ({layer.quantization_mode})"
        raise UnsupportedError(f"Cannot quantise the layer {layer.path!r}: it {what}. Load it without quantize=")


def quantise_layer(layer: Any, config: Any) -> list[QuantisedKernel]:
    """Quantise a layer whose kernels have no values: all that ``layer.quantize(config=config)`` does, but no numbers.

    Call it inside `abstract`.
    """
    with_own_policy(layer)
    try:
        layer._check_quantize_args(config.mode, layer.compute_dtype)
    except ValueError as error:
        raise UnsupportedError(f"Cannot quantise the layer {layer.path!r}: {error}") from error
    before = dict(_kernels(layer))
    with _unlocked(layer):
        layer.quantization_config = config
        if isinstance(layer, keras.layers.EinsumDense):
            layer._set_quantization_info()
        for name, kernel in before.items():
            # Keras' `__delattr__` also runs the garbage collector, which takes half a second for a large model.
            layer._untrack_variable(kernel)
            object.__delattr__(layer, name)
        is_embedding = isinstance(layer, keras.layers.Embedding)
        shape = (layer.input_dim, layer.output_dim) if is_embedding else tuple(before["_kernel"].shape)
        _build_codes(layer, shape, config)
        layer.dtype_policy = keras.dtype_policies.get(f"{_policy(config)}_from_{layer.dtype_policy.name}")
        mark_calibrated(layer)
    return [_quantised(layer, name, kernel, config) for name, kernel in before.items()]


def _build_codes(layer: Any, shape: tuple[int, ...], config: Any) -> None:
    token = _building.set(True)
    try:
        # What Keras assigns is what `QuantisedKernel.groups` has.
        with _NUMPY_PATCH.applied(), assignments_to(lambda variable, value, assign: value):
            layer.quantized_build(shape, config.mode, config)
    finally:
        _building.reset(token)


def _by_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        return (getattr(np, original.__name__) if _building.get() else original)(*args, **named)

    return functools.wraps(original)(call)


_building: ContextVar[bool] = ContextVar("shardload_building_codes", default=False)

# JAX would compile the numbers of the groups for each length: a tenth of the time to load a small model.
_NUMPY_PATCH = Patches(lambda: [(keras_ops, "arange", _by_numpy), (keras_ops, "floor_divide", _by_numpy)])


def mark_calibrated(layer: Any) -> None:
    """Let a layer in GPTQ's mode use its codes, although Keras did not make them; others stay as they are."""
    if layer.quantization_mode == "gptq":
        layer.is_gptq_calibrated = True


def with_own_policy(layer: Any) -> None:
    """Replace a layer's map of dtype policies (path of a layer → policy) by the policy for its own path.

    With the map, Keras' ``save_own_variables`` would omit the scale of a quantised kernel.
    """
    policy = getattr(layer, "_dtype_policy", None)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        layer._dtype_policy = policy[layer.path]


def quantisation_name(layer: Any) -> str | None:
    """Return how a layer's kernel is quantised, as `quantisation_config` takes it; ``None`` if it is not quantised.

    The name of a quantisation that is not Keras' default ends in ", not as by default".
    """
    mode: str | None = layer.quantization_mode
    config = getattr(layer, "quantization_config", None)
    if mode is None:
        return None
    name = mode
    if mode == "gptq" and getattr(layer, "is_gptq_calibrated", False):
        return f"gptq/{layer.dtype_policy.weight_bits}/{layer.dtype_policy.group_size}"
    if mode == "int4":
        block = layer.dtype_policy.block_size if config is None else config.block_size
        name = f"int4/{-1 if block is None else block}"
    plain = mode in _MODES and (config is None or config.get_config() == quantisation_config(name).get_config())
    return name if plain else f"{mode}, not as by default"


def _policy(config: Any) -> str:
    if config.mode == "int8":
        return "int8"
    if config.mode == "gptq":
        return str(config.dtype_policy_string())
    return f"int4/{-1 if config.block_size is None else config.block_size}"


@contextmanager
def _unlocked(layer: Any) -> Iterator[None]:
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()


def _kernels(layer: Any) -> Iterator[tuple[str, Variable]]:
    """Yield the attribute and the variable of each kernel that a layer quantises."""
    if not isinstance(layer, keras.layers.Embedding):
        yield "_kernel", layer._kernel
        return
    yield "_embeddings", layer._embeddings
    if isinstance(layer, keras.layers.ReversibleEmbedding) and not layer.tie_weights:
        yield "reverse_embeddings", layer.reverse_embeddings


def _quantised(layer: Any, attribute: str, kernel: Variable, config: Any) -> QuantisedKernel:
    if config.mode == "gptq":
        return _calibrated(layer, kernel, config)
    group = config.block_size if config.mode == "int4" else None
    group = None if group in (None, -1) else group
    name, shape = attribute.removeprefix("_"), tuple(kernel.shape)
    is_int4 = config.mode == "int4"
    index = None if group is None or name == "reverse_embeddings" else layer.g_idx
    zero = None if group is None else getattr(layer, f"{name}_zero")
    variables = (getattr(layer, attribute), getattr(layer, f"{name}_scale"), zero, index)
    if name == "embeddings":
        dims, packed = (1,), 1
    elif name == "reverse_embeddings":
        dims, packed = (0,), 0
    elif isinstance(layer, keras.layers.EinsumDense):
        dims, packed = tuple(layer._kernel_reduced_axes), 1
        if not is_int4:
            return QuantisedKernel(layer, kernel, *variables, shape, dims, dims, _einsum_scale_dims(layer, shape))
    else:
        dims, packed = (0,), 1
    before = dims
    if isinstance(layer, keras.layers.EinsumDense):
        rows = math.prod(shape[d] for d in dims)
        shape, dims = (rows, math.prod(shape) // rows), (0,)
    scale_dims: tuple[int | None, ...] = (1 - dims[0],) if group is None else (0, 1)
    return QuantisedKernel(
        layer, kernel, *variables, shape, dims, before, scale_dims, packed if is_int4 else None, group
    )


def row_dims_of(layer: Any, shape: Sequence[int], mode: str) -> int | None:
    """Return how many leading dims of a kernel of this shape become the rows of the matrix that Keras makes of it.

    ``None`` if others do, or if Keras makes no matrix of such a kernel in this mode (``int4`` or ``gptq``).
    """
    if not isinstance(layer, keras.layers.EinsumDense):
        return 1
    if mode == "gptq":  # Keras takes the longest dim for that of the model
        longest = shape.index(max(shape))
        return {2: 1, 3: 1 if longest == 0 else 2}.get(len(shape))
    layer._set_quantization_info()
    reduced = sorted(layer._kernel_reduced_axes)
    return len(reduced) if reduced == list(range(len(reduced))) else None


def _calibrated(layer: Any, kernel: Variable, config: Any) -> QuantisedKernel:
    """Return the kernel of a layer in GPTQ's mode."""
    shape = tuple(kernel.shape)
    row_dims = row_dims_of(layer, shape, config.mode)
    matrix = math.prod(shape[:row_dims]), math.prod(shape[row_dims:])
    grouped = config.group_size != -1
    return QuantisedKernel(
        layer,
        kernel,
        *(layer.quantized_kernel, layer.kernel_scale, layer.kernel_zero, layer.g_idx),
        shape=matrix,
        reduced=(0,),
        reduced_before=tuple(range(row_dims or 0)),
        scale_dims=(1, 0 if grouped else None),
        packed=1 if config.weight_bits == 4 else None,
        group=config.group_size if grouped else None,
        row_dims=row_dims,
        is_transposed=True,
    )


def _einsum_scale_dims(layer: Any, shape: Sequence[int]) -> tuple[int | None, ...]:
    """Return the dim of the kernel for each dim of the scale: as `EinsumDense` moves it to broadcast with outputs."""
    dims: list[int | None] = [None if d in layer._kernel_reduced_axes else d for d in range(len(shape))]
    if layer._kernel_transpose_axes:
        dims = [dims[d] for d in layer._kernel_transpose_axes]
    for at in sorted(layer._kernel_expand_axes):
        dims.insert(at, None)
    for at in sorted(layer._kernel_squeeze_axes, reverse=True):
        dims.pop(at)
    return tuple(dims)
