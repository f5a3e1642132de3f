"""Quantise a model that is about to be loaded: its kernels' tensors then fill codes and scales.

Layouts are chosen for the float kernels, by rules that name their dims, and codes and scales follow them::

    kernel (in, out)  (-, model)   ─►  codes (in, ⌈out/2⌉)  (-, model)     scale (⌈in/128⌉, out)  (-, model)
    kernel (in, out)  (model, -)   ─►  codes (in, ⌈out/2⌉)  (model, -)     scale: split if no shard cuts a group
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardload.errors import MismatchError
from shardload.keras_bridge import Model, Variable
from shardload.keras_bridge.quantised_values import KernelCodes
from shardload.keras_bridge.quantising import QuantisedKernel
from shardload.keras_bridge.variables import stored_dtype
from shardload.layouts.choice import LayoutChoice, VariableLayout
from shardload.layouts.model_variables import all_variables
from shardload.mapping.layer_hooks import LayerStep, has_keras_hook
from shardload.mapping.variable_map import AssignStep, MappingStep, VariableMap
from shardload.sharding.layout import Fallback, Layout, Spec
from shardload.transfer.encoding import Output, staged_layout
from shardload.transfer.load_plan import Binding
from shardload.units import format_bytes, plural


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the variables that replace a kernel, and for each of its dims, the dims of the kernel it is along."""

    variable: Variable
    word: str
    """What it is, for names and reports: ``scale``."""
    spec: Spec
    """The axes that should split each dim."""


def quantised_layouts(layouts: LayoutChoice, model: Model, kernels: Sequence[QuantisedKernel]) -> LayoutChoice:
    """Return layouts in which codes, scales and zero points follow the layouts of their kernels.

    ``layouts`` has those of the kernels; ``model`` is quantised already.
    """
    found: dict[int, VariableLayout] = {}
    for kernel in kernels:
        found |= _placed(kernel, layouts.by_id[id(kernel.kernel)])
    by_id = {key: found.get(key) or layouts.by_id[key] for key in all_variables(model)}
    uses = {key: layout for key, layout in layouts.uses.items() if key in by_id}
    return replace(layouts, by_id=by_id, uses=uses)


def quantised_bytes(layouts: LayoutChoice, kernels: Sequence[QuantisedKernel]) -> int:
    """Return the bytes on each device once ``kernels`` are quantised.

    ``layouts`` are of a model whose variables have the paths that they had before.
    """
    by_path = {kernel.kernel.path: kernel for kernel in kernels}

    def device_bytes(own: VariableLayout) -> int:
        kernel = by_path.get(own.path)
        if kernel is None:
            return own.device_bytes
        return sum(placed.device_bytes for _, placed in _placed(kernel, own))

    return sum(map(device_bytes, layouts.variables))


def _placed(kernel: QuantisedKernel, own: VariableLayout) -> Iterator[tuple[int, VariableLayout]]:
    for part in _parts(kernel, own.layout):
        layout = _divided(part, own.layout)
        fallback = own.fallback if part.word == "codes" else None
        if layout.spec != part.spec and part.word == "codes":
            wanted = Layout(own.layout.mesh, part.spec)
            why = f"its packed shape {tuple(part.variable.shape)} does not divide by {wanted.parts}"
            fallback = Fallback(part.variable.path, str(wanted), str(layout), why)
        yield id(part.variable), VariableLayout.of(part.variable, layout, own.rule, fallback)


def _divided(part: _Part, layout: Layout) -> Layout:
    """Return the layout of a part: dims that the wanted axes do not divide evenly are not split."""
    wanted = Layout(layout.mesh, part.spec)
    dims = zip(part.spec, wanted.parts, part.variable.shape, strict=True)
    return Layout(layout.mesh, tuple(axes if n % parts == 0 else () for axes, parts, n in dims))


def _parts(kernel: QuantisedKernel, layout: Layout) -> Iterator[_Part]:
    spec = _flattened(kernel, layout.spec) if kernel.is_flattened else layout.spec
    parts = Layout(layout.mesh, spec).parts
    yield _Part(kernel.codes, "codes", spec[::-1] if kernel.is_transposed else spec)

    def along(dim: int | None) -> tuple[str, ...]:
        if dim is None or (dim in kernel.reduced and kernel.order is not None):
            return ()
        # Not if a shard would end inside a group.
        return () if dim in kernel.reduced and kernel.shape[dim] % (parts[dim] * (kernel.group or 1)) else spec[dim]

    scale = tuple(map(along, kernel.scale_dims))
    yield _Part(kernel.scale, "scale", scale)
    if kernel.zero is not None:
        yield _Part(kernel.zero, "zero", scale)
    if kernel.group_index is not None:
        yield _Part(kernel.group_index, "g_idx", (spec[kernel.reduced[0]],))


def _flattened(kernel: QuantisedKernel, spec: Spec) -> Spec:
    """Return how to split a kernel's matrix as its dims are split: both follow each other in memory."""
    if kernel.row_dims is not None:
        rows = tuple(axis for axes in spec[: kernel.row_dims] for axis in axes)
    elif kernel.reduced_before == tuple(range(len(kernel.reduced_before))):
        rows = tuple(axis for d, axes in enumerate(spec) if d in kernel.reduced_before for axis in axes)
    else:  # the first dim of either goes furthest in memory
        rows = spec[0]
    return rows, tuple(axis for axes in spec for axis in axes if axis not in rows)


def quantised_map(
    found: VariableMap, kernels: Sequence[QuantisedKernel], *, before: LayoutChoice, after: LayoutChoice
) -> VariableMap:
    """Return the mapping for a quantised model, by that for its float kernels.

    ``before`` has the layouts of the float kernels, ``after`` those of the quantised model.

    Raises:
        MismatchError: When the checkpoint has no tensor for a kernel, or loading code computes it.
    """
    by_id = {id(b.variable): b for b in found.bindings}
    computed = {id(v) for c in found.computed for v in c.variables}
    replaced: dict[str, tuple[Binding, ...]] = {}
    for kernel in kernels:
        binding = by_id.get(id(kernel.kernel))
        if binding is None:
            raise _no_tensor(kernel, found, is_computed=id(kernel.kernel) in computed)
        codes = _codes(kernel, binding.name, after)
        staged = staged_layout(codes, before.of(kernel.kernel), binding.view.shape)
        replaced[binding.name] = (replace(binding, layout=staged, encoding=codes),)
    notes = [
        _note(kernels, [binding for (binding,) in replaced.values()]),
        *_left(found, replaced),
        *gathered_notes(kernels, before),
    ]
    return with_bindings(found, replaced, notes)


def gathered_notes(kernels: Sequence[QuantisedKernel], before: LayoutChoice) -> Iterator[str]:
    """Yield a note if a layout would gather kernels for use that are quantised now; ``before`` has that layout."""
    if gathered := sum(id(kernel.kernel) in before.uses for kernel in kernels):
        stays = "stays" if gathered == 1 else "stay"
        yield f"{plural(gathered, 'quantised kernel')} {stays} split as stored: the layout gathers floats for use"


def with_bindings(found: VariableMap, replaced: Mapping[str, tuple[Binding, ...]], notes: Sequence[str]) -> VariableMap:
    """Return a mapping in which others replace the bindings of these names, also where they are assigned."""
    return replace(
        found,
        bindings=_all_replaced(found.bindings, replaced),
        steps=tuple(_step(step, replaced) for step in found.steps),
        notes=(*found.notes, *notes),
    )


def _all_replaced(bindings: Sequence[Binding], replaced: Mapping[str, tuple[Binding, ...]]) -> tuple[Binding, ...]:
    return tuple(new for old in bindings for new in replaced.get(old.name, (old,)))


def _codes(kernel: QuantisedKernel, name: str, layouts: LayoutChoice) -> KernelCodes:
    return KernelCodes(
        name=kernel.kernel.path,
        outputs=tuple(_outputs(kernel, name, layouts)),
        shape=kernel.shape,
        reduced=kernel.reduced,
        scale_dims=kernel.scale_dims,
        value_range=kernel.value_range,
        packed=kernel.packed,
        group=kernel.group,
        unflattened=tuple(kernel.kernel.shape) if kernel.is_flattened else None,
    )


def _outputs(kernel: QuantisedKernel, name: str, layouts: LayoutChoice) -> Iterator[Output]:
    path, number, count = name.partition("#")  # the second variable of a path is called path#2
    named = [("", kernel.codes), ("_scale", kernel.scale), ("_zero", kernel.zero), ("_g_idx", kernel.group_index)]
    for ending, variable in named:
        if variable is not None:
            constant = kernel.groups if variable is kernel.group_index else None
            shape, dtype = tuple(variable.shape), stored_dtype(variable)
            full = f"{path}{ending}{number}{count}"
            yield Output(full, shape, dtype, layouts.of(variable), variable, constant)


def _step(step: MappingStep, replaced: Mapping[str, tuple[Binding, ...]]) -> MappingStep:
    """Return a part of the load that assigns codes and scales where it assigned floats."""
    names = [name for name in step.needs if name in replaced]
    if not names:
        return step
    if isinstance(step, AssignStep):
        return replace(step, bindings=_all_replaced(step.bindings, replaced))
    # Keras' own hooks do nothing besides.
    if isinstance(step, LayerStep) and not step.computes and not step.kept and has_keras_hook(step.saveable):
        return AssignStep(_all_replaced(step.bindings, replaced), step.saveable)
    raise MismatchError(
        f"Cannot quantise {names[0]!r} while loading: {step.owner} computes values when it is loaded. Load the model, "
        "then call model.quantize(…)"
    )


def _no_tensor(kernel: QuantisedKernel, found: VariableMap, *, is_computed: bool) -> MismatchError:
    path = kernel.kernel.path
    if is_computed:
        owner = next(c.owner for c in found.computed if any(v is kernel.kernel for v in c.variables))
        return MismatchError(
            f"Cannot quantise {path!r} while loading: its values are computed by {owner}. Load the model, then call "
            "model.quantize(…)"
        )
    wrong = next((f": {m}" for m in found.mismatched if m.variable == path), "")
    return MismatchError(
        f"Cannot quantise {path!r} while loading: the checkpoint has no tensor for it{wrong}. Load it without "
        "quantize= to see all that differs"
    )


def _left(found: VariableMap, quantised: Container[str]) -> list[str]:
    """Return a note if many weights are not quantised, such as the experts of KerasHub's models."""
    sizes = [(b.name, tuple(b.view.shape), b.dtype) for b in found.bindings]
    sizes += [(v.path, tuple(v.shape), stored_dtype(v)) for c in found.computed for v in c.variables]
    by_bytes = {name: math.prod(shape) * dtype.itemsize for name, shape, dtype in sizes}
    matrices = [name for name, shape, _ in sizes if len(shape) > 1 and name not in quantised]
    total = sum(by_bytes[name] for name in matrices)
    if total * 20 < sum(by_bytes.values()):
        return []
    largest = max(matrices, key=lambda name: by_bytes[name])
    return [
        f"{format_bytes(total)} of other weights stay as they are, because Keras cannot quantise their layers; the "
        f"largest is {largest} ({format_bytes(by_bytes[largest])})"
    ]


def _note(kernels: Sequence[QuantisedKernel], bindings: Sequence[Binding]) -> str:
    before = sum(math.prod(b.view.shape) * b.dtype.itemsize for b in bindings)
    after = sum(math.prod(o.shape) * o.dtype.itemsize for b in bindings for o in b.outputs)
    mode = kernels[0].layer.quantization_mode
    return (
        f"{plural(len(kernels), 'kernel')} quantised to {mode}: {format_bytes(before)} of {bindings[0].dtype} became "
        f"{format_bytes(after)} of codes and scales"
    )
