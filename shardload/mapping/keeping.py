"""Load the codes of a quantised folder into Keras' packed layers, where these compute the same numbers from them.

The mapping is first that of dequantised weights: it says which elements of ``x.weight`` a float kernel is. Then the
layer is put in a packed mode, and codes, scales and zero points fill its variables::

    x.weight (out, in)  ─►  kernel (in, heads, head_dim)      becomes
    codes  (out, in)    ─►  matrix (in, heads * head_dim), packed
    scales (out, group) ─►  scale  (heads * head_dim, group), zero alike

A kernel whose output dims come before its input dims, ``(heads, in, head_dim)``, has rows for each head and each input:
every head has groups of its own then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from shardload.errors import UnsupportedError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.kept_layers import PackedForm, constants_of, layers_of_kernels, pack_layers
from shardload.keras_bridge.kept_values import KeptCodes, KeptGroups
from shardload.keras_bridge.quantising import QuantisedKernel, row_dims_of
from shardload.keras_bridge.variables import stored_dtype
from shardload.layouts.choice import LayoutChoice
from shardload.loaders.quantised.kept import WAY_OUT, KeptWeight, PerGroup, kept, kept_weight, quantised_names
from shardload.manifest import Manifest, View
from shardload.mapping.quantising import gathered_notes, with_bindings
from shardload.mapping.variable_map import VariableMap
from shardload.sharding.layout import Layout
from shardload.transfer.encoding import Output, staged_layout
from shardload.transfer.load_plan import Binding
from shardload.units import plural

_MODES = {4: ("int4", "gptq"), 8: ("gptq",)}
"""Bits of codes → Keras' modes with the same arithmetic. Layers in int4 can be saved by Keras, and can have LoRA."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptKernel:
    """A float kernel of a model, and the quantised weight that it is made of."""

    binding: Binding
    weight: KeptWeight
    form: PackedForm
    output_dims: tuple[int, ...]
    """Dims of the kernel along which the row of the weight changes."""


def kept_kernels(model: Model, found: VariableMap, manifest: Manifest) -> list[KeptKernel]:
    """Return the kernels that are made of quantised weights; ``found`` maps these as if they were floats.

    Raises:
        UnsupportedError: When there are none, or Keras' layers cannot compute with one.
    """
    names, layers = set(quantised_names(manifest)), layers_of_kernels(model)
    if not names:
        raise UnsupportedError(
            f"Cannot keep the weights of {manifest.source} packed: it has no weights that are quantised in a form that "
            "is read by rows, expected a quantised Hugging Face folder. Leave out quantized='keep' (--quantized keep)"
        )
    for computed in found.computed:
        for name in names.intersection(computed.tensors):
            raise _refused(name, f"{computed.owner} computes {computed.names[0]!r} from it")
    kernels = []
    for binding in found.bindings:
        if (name := binding.view.tensor) in names:
            if (layer := layers.get(id(binding.variable))) is None:
                raise _refused(name, f"{binding.name!r} is no kernel of a Dense or EinsumDense layer")
            kernels.append(_kept_kernel(layer, binding, kept_weight(manifest.tensors[name])))
    if not kernels:
        raise UnsupportedError(
            f"Cannot keep the weights of {manifest.source} packed: the model uses none of those that are quantised. "
            "Leave out quantized='keep' (--quantized keep)"
        )
    return kernels


def _kept_kernel(layer: Any, binding: Binding, weight: KeptWeight) -> KeptKernel:
    view, n_columns = binding.view, weight.codes.shape[1]
    dims = [d for d, n in enumerate(view.shape) if n > 1]
    inputs = [d for d in dims if view.strides[d] < n_columns]
    outputs = tuple(d for d in dims if view.strides[d] and view.strides[d] % n_columns == 0 and d not in inputs)
    last = view.offset % n_columns + sum((view.shape[d] - 1) * view.strides[d] for d in inputs)
    if len(inputs) + len(outputs) < len(dims) or last >= n_columns:
        raise _refused(weight.name, f"{binding.name!r} takes elements of it in an order of its own")
    for mode in _MODES[weight.bits]:
        row_dims = row_dims_of(layer, view.shape, mode)
        if row_dims is None or any(d >= row_dims for d in inputs):
            continue
        form = _form(mode, row_dims, view, weight, inputs)
        # Keras' int4 has groups in order, and relies on it when it merges LoRA.
        if form is not None and (mode != "int4" or form.is_in_order):
            return KeptKernel(binding, weight, form, outputs)
    raise _refused(weight.name, f"Keras divides the kernel {binding.name!r} of {view.shape} into other groups")


def _form(mode: str, row_dims: int, view: View, weight: KeptWeight, inputs: Sequence[int]) -> PackedForm | None:
    """Return how a matrix of so many leading dims has the groups of a weight; ``None`` if it cannot."""
    shape = view.shape[:row_dims]
    index = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
    column = np.full(index.shape[1], view.offset % weight.codes.shape[1])
    matrix = np.zeros_like(column)
    for d, n in enumerate(shape):
        if d in inputs:
            column += index[d] * view.strides[d]
        else:
            matrix = matrix * n + index[d]
    rows, n_groups = len(column), (int(matrix.max()) + 1) * weight.n_groups
    order = (matrix * weight.n_groups + weight.order[column]).astype(np.float32)
    for group in (weight.group_size, -(-rows // n_groups)):
        if -(-rows // group) == n_groups:
            return PackedForm(mode, weight.bits, group, n_groups, row_dims, order)
    return None


def pack_kernels(model: Model, kernels: Sequence[KeptKernel]) -> list[QuantisedKernel]:
    """Put the layers of these kernels in Keras' packed modes, without values."""
    return pack_layers(model, {id(kernel.binding.variable): kernel.form for kernel in kernels})


def kept_map(
    found: VariableMap,
    kernels: Sequence[KeptKernel],
    packed: Sequence[QuantisedKernel],
    *,
    before: LayoutChoice,
    after: LayoutChoice,
) -> VariableMap:
    """Return the mapping of a model with packed layers, by that for its float kernels.

    ``before`` has the layouts of the float kernels, ``after`` those of the packed model.
    """
    replaced = {
        kernel.binding.name: tuple(_bindings(kernel, layer, before, after))
        for kernel, layer in zip(kernels, packed, strict=True)
    }
    return with_bindings(found, replaced, [*_notes(kernels, packed), *gathered_notes(packed, before)])


def kept_manifest(manifest: Manifest, kernels: Sequence[KeptKernel]) -> Manifest:
    """Return the manifest with what is stored of each weight that is kept."""
    return kept(manifest, (kernel.weight for kernel in kernels))


def _bindings(
    kernel: KeptKernel, packed: QuantisedKernel, before: LayoutChoice, after: LayoutChoice
) -> Iterator[Binding]:
    binding, weight, form = kernel.binding, kernel.weight, kernel.form
    zero = weight.zeros if isinstance(weight.zeros, int) else None
    path, number, count = binding.name.partition("#")  # the second variable of a path is called path#2

    def output(ending: str, variable: Variable, constant: Any = None) -> Output:
        shape, dtype = tuple(variable.shape), stored_dtype(variable)
        return Output(f"{path}{ending}{number}{count}", shape, dtype, after.of(variable), variable, constant)

    transposed, signed = form.mode == "gptq", form.mode == "int4"
    outputs = [output("", packed.codes), *(output(*one) for one in constants_of(packed, zero))]
    codes = KeptCodes(tuple(outputs), binding.view.shape, form.row_dims, weight.bits == 4, transposed, signed)
    layout = staged_layout(codes, before.of(packed.kernel), binding.view.shape)
    yield replace(binding, dtype=weight.codes.dtype, layout=layout, encoding=codes)
    parts = [("_scale", packed.scale, weight.scales), ("_zero", packed.zero, weight.zeros)]
    for ending, variable, part in parts:
        if isinstance(part, PerGroup) and variable is not None:
            view, own = _view_of_groups(kernel, part), output(ending, variable)
            lead = sum(d < form.row_dims for d in kernel.output_dims)
            groups = KeptGroups((own,), view.shape, lead, transposed, signed and ending == "_zero")
            # What comes are unsigned codes, which the encoding makes signed.
            dtype = own.dtype if ending == "_scale" else weight.codes.dtype
            staged = Layout.replicated(own.layout.mesh, len(view.shape))
            yield Binding(own.name, view, dtype, staged, variable, groups)


def _view_of_groups(kernel: KeptKernel, part: PerGroup) -> View:
    """Return the numbers of each group, in the order of the kernel's outputs: ``(outputs, …, groups)``."""
    view, n_columns = kernel.binding.view, kernel.weight.codes.shape[1]
    of_row, of_group = part.strides
    shape = (*(view.shape[d] for d in kernel.output_dims), kernel.weight.n_groups)
    strides = (*(view.strides[d] // n_columns * of_row for d in kernel.output_dims), of_group)
    return View(part.tensor.name, view.offset // n_columns * of_row, shape, strides)


def _notes(kernels: Sequence[KeptKernel], packed: Sequence[QuantisedKernel]) -> Iterator[str]:
    names = Counter(kernel.form.name for kernel in kernels)
    modes = ", ".join(f"{name} ({n})" for name, n in names.most_common())
    yield f"{plural(len(kernels), 'weight')} kept packed, in layers that Keras calls {modes}; inputs are not quantised"
    pairs = (
        (kernel.weight.scales.tensor.dtype, stored_dtype(one.scale))
        for kernel, one in zip(kernels, packed, strict=True)
    )
    for stored, dtype in sorted({(a.name, b.name) for a, b in pairs if not _holds(b, a)}):
        yield f"scales of {stored} were rounded to {dtype}, the dtype of the model"


def _holds(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether a floating-point dtype has all numbers of another."""
    own, its = ml_dtypes.finfo(dtype), ml_dtypes.finfo(other)
    return bool(own.nmant >= its.nmant and own.nexp >= its.nexp)


def _refused(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"Cannot keep {name!r} packed: {why}. {WAY_OUT}")
