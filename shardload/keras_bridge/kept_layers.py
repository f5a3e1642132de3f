"""Put layers without values in Keras' packed modes (int4 in groups, GPTQ), for codes that a checkpoint stores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from shardload.errors import UnsupportedError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.quantising import QuantisedKernel, quantisation_config, quantise_layer
from shardload.keras_bridge.variables import stored_dtype

PACKED_NAME = re.compile(r"gptq/(2|3|4|8)/(-1|[1-9][0-9]{0,8})")
"""Names of quantisations with groups of codes that Keras does not make without samples of data."""
_CLASSES = ("Dense", "EinsumDense")


@dataclass(frozen=True, slots=True, eq=False)
class PackedForm:
    """The mode for one kernel, and how its rows (elements along ``in``, of the matrix of the kernel) share scales."""

    mode: str
    """``int4`` or ``gptq``."""
    bits: int
    group: int
    """Keras' size of a group, in rows."""
    n_groups: int
    row_dims: int
    """How many leading dims of the kernel become rows."""
    order: NDArray[np.float32]
    """The group of each row."""

    @property
    def name(self) -> str:
        """Its name, as in the dtype policy of a layer: ``gptq/4/128``."""
        if self.mode == "int4":
            return f"int4/{self.group}"
        return f"gptq/{self.bits}/{-1 if self.n_groups == 1 else self.group}"

    @property
    def is_in_order(self) -> bool:
        """Whether each group is so many rows after those of the group before."""
        return bool(np.array_equal(self.order, np.arange(len(self.order)) // self.group))


def packed_config(name: str) -> Any:
    """Return Keras' configuration for the name of a quantisation that a layer can have: ``gptq/4/128``, ``int4/64``.

    Raises:
        UsageError: When it is none of these.
    """
    if not PACKED_NAME.fullmatch(name):
        return quantisation_config(name)
    _, bits, group = name.split("/")
    return keras.quantizers.GPTQConfig(dataset=None, tokenizer=None, weight_bits=int(bits), group_size=int(group))


def layers_of_kernels(model: Model) -> dict[int, Any]:
    """Return the layers that can have packed kernels, by the ``id`` of the variable that is the float kernel."""
    found = {}
    for layer in model._flatten_layers():
        exact = any(type(layer) is getattr(keras.layers, name) for name in _CLASSES)
        if exact and layer.built and layer.quantization_mode is None and not getattr(layer, "lora_enabled", False):
            found[id(layer._kernel)] = layer
    return found


def pack_layers(model: Model, forms: Mapping[int, PackedForm]) -> list[QuantisedKernel]:
    """Put the layers of float kernels, given by their ``id``, in the modes that ``forms`` says; without values.

    Raises:
        UnsupportedError: When something else of the model uses one of the kernels.
    """
    layers, found = layers_of_kernels(model), []
    with abstract():
        for key, form in forms.items():
            (kernel,) = quantise_layer(layers[key], packed_config(form.name))
            found.append(replace(kernel, order=None if form.is_in_order else form.order))
    left = {id(variable) for variable in model.variables}
    if shared := next((kernel.kernel.path for kernel in found if id(kernel.kernel) in left), None):
        raise UnsupportedError(
            f"Cannot keep the codes of {shared!r}: a layer around its own layer uses the floats, too. Leave out "
            "quantized='keep' (--quantized keep)"
        )
    model.train_function = model.test_function = model.predict_function = None
    return found


def constants_of(kernel: QuantisedKernel, zero: int | None) -> list[tuple[str, Variable, NDArray[Any]]]:
    """Return the variables of a packed kernel that do not depend on what is read: ending of a name, variable, value.

    ``zero`` is the zero point of all groups, as it is stored unsigned; ``None`` if they are read.
    """
    found: list[tuple[str, Any, Any]] = []
    if zero is not None and kernel.zero is not None:
        value = zero if kernel.is_transposed else zero - 8
        found.append(("_zero", kernel.zero, np.full(kernel.zero.shape, value, stored_dtype(kernel.zero))))
    if kernel.group_index is not None:
        found.append(("_g_idx", kernel.group_index, kernel.groups))
    return found
