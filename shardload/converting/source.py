"""A source for conversion: a model without weights, and the location of each variable's value.

The value of a variable is a view of a stored tensor, or code computes it from tensors (merged experts): a converter of
KerasHub, or a layer's loading hook. A few variables are not weights, and the source cannot store them (a dropout's
seed): their values are arrays in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.converting.companions import (
    KERAS,
    STATE,
    TRANSFORMERS,
    Companions,
    Preprocessing,
    companions_of,
    preprocessing_of,
)
from shardload.converting.computing import StoredValue, compute, computed_by
from shardload.converting.strided_copy import bits, copy_view, reader_of
from shardload.errors import MismatchError, SourceError
from shardload.hub import building, config_forms, fidelity, quantised
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_state import variables_of
from shardload.keras_bridge.variables import stored_dtype, unique, value_of
from shardload.loaders import open_manifest, spec_of
from shardload.loaders.contents import CONFIG
from shardload.loaders.hub_preset import SPEC as PRESET
from shardload.loaders.hub_preset import WEIGHTS
from shardload.loaders.peft import Weighted, merged
from shardload.manifest import Manifest, View, c_strides
from shardload.mapping import map_weights
from shardload.mapping.outside import OutsideTensor, sort_unused, without_parts
from shardload.mapping.replaced import replaced_notes
from shardload.mapping.roles import roles_of
from shardload.mapping.variable_map import VariableMap
from shardload.resolve.adapters import can_merge, merge_dtype
from shardload.stores.location import Location
from shardload.transfer.casts import is_float
from shardload.transfer.planning import Binding
from shardload.transfer.read_tensor import require_decoders
from shardload.units import plural

NAMES_SHOWN = 5
_STATE = ("optimizer_variables", "metrics_variables", "optimizer", "optimizer_weights")
"""First parts of the names of tensors that are not converted, because they are state of optimizers and metrics, in
files of Orbax, Keras and Keras 2."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What to convert: an opened checkpoint or a live model, and where the value of each variable comes from."""

    manifest: Manifest
    model: Any
    """The Keras model; it has values only if `is_live`. ``None`` if a Hugging Face folder is copied without a model."""
    values: dict[int, StoredValue]
    """Where the value of each weight and seed of the model comes from, by ``id`` of the variable."""
    companions: Companions
    preprocessing: Preprocessing
    """KerasHub's preprocessor or tokenizer, to be written if the target is a preset."""
    notes: tuple[str, ...]
    is_live: bool = False
    """Whether the model is the user's own, with its values on devices."""
    merged: frozenset[int] = frozenset()
    """``id`` of the variables that are merged into others and not written themselves: the factors of LoRA."""
    origin: Manifest | None = None
    """The Hugging Face folder that a live model was loaded from, if it still describes the model: its tensors are the
    template of those to write."""
    fresh: Any = None
    """If a live model is a KerasHub task: the same task, built again from its description, without values. KerasHub
    compiles it with its default optimizer. A preset stores that optimizer and not the user's, because readers of the
    preset build the task in the same way."""
    described_as: Mapping[str, Any] = field(default_factory=dict)
    """Hugging Face's ``config.json`` of the checkpoint that the weights came from, if it has one. It may describe more
    than the model, such as a task's head."""
    adapters: Manifest | None = None
    """The partial step whose weights replace some of those in ``manifest`` (the base); ``None`` if there is none."""
    adapted: tuple[Weighted, ...] = ()
    """Adapters of PEFT that are merged into the values."""

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All checkpoints to read values from: ``manifest`` and, if there is one, ``adapters``."""
        return (self.manifest,) if self.adapters is None else (self.manifest, self.adapters)

    @property
    def files(self) -> dict[Location, int]:
        """Each file to read values from, with its size when its headers were read: a file that changes is an error."""
        found = {path: size for manifest in self.manifests for path, size in manifest.files.items()}
        return found | {path: size for one in self.adapted for path, size in one.adapter.files.items()}

    @property
    def backbone(self) -> Any:
        """The model without a task's head (a KerasHub backbone), which presets and Hugging Face checkpoints contain."""
        return backbone_of(self.model)

    def variables_of(self, model: Any) -> list[Any]:
        """Return the variables of ``model`` (the source's, or a part of it) to write: all but merged LoRA factors."""
        return [v for v in model.variables if id(v) not in self.merged]

    @property
    def is_hub(self) -> bool:
        """Whether the model, or its backbone, is of a class of KerasHub."""
        return type(self.backbone).__module__.startswith("keras_hub.")


def open_with_model(
    path: str | Location,
    *,
    dtype: str | None = None,
    ignore: Sequence[str] = (),
    ignore_config: Sequence[str] = (),
    adapters: Sequence[Weighted] = (),
) -> Source:
    """Open a checkpoint to convert: build its model without values, and find where each variable's value is stored.

    ``dtype``: dtype of the model's floating-point variables, and so of computed values; by default the checkpoint's.
    ``adapters``: adapters of PEFT to merge, if the checkpoint's tensors have Hugging Face's names.
    """
    manifest = open_manifest(path)
    # The weights file of a preset does not describe a model, but its folder does.
    weights = manifest.location
    if weights.name == WEIGHTS and weights.is_file() and (weights.parent / CONFIG).is_file():
        manifest = open_manifest(weights.parent)
    if adapters and can_merge(manifest):
        manifest = merged(manifest, adapters, dtype=merge_dtype(dtype))
    companions = companions_of(manifest)
    # A Hugging Face folder made from a preset keeps KerasHub's configuration, which also has what config.json cannot
    # express: dropout, dtype policies, names.
    described = manifest
    if spec_of(manifest).is_hugging_face and (config := companions.config(KERAS)) is not None:
        config_forms.tie_as_described(config, manifest)
        task = companions.config(KERAS, "task.json")
        metadata = {"task": task} if task else {}
        described = replace(manifest, format=PRESET.name, config=config, metadata=metadata)
    with abstraction.abstract():
        model = building.build_model(described, dtype=dtype, ignore_config=ignore_config)
    found = map_weights(model, manifest)
    # As in a load: a part that the checkpoint's class lacks gets initial values, and a note says so.
    mapping = without_parts(found, manifest)
    outside = _check(mapping, manifest, model, ignore)
    lacked = {each.tensor for each in outside}
    require_decoders(manifest.tensors[name] for name in mapping.read)
    values = {id(b.variable): viewed(b, manifest) for b in mapping.bindings}
    # A step that computes may use all of a tensor, so only tensors that are merely viewed can be used in part.
    used = {name for computed in mapping.computed for name in computed.tensors}
    partial = _partial(values.values(), manifest, used=used)
    values |= {id(v): StoredValue(v, stored_dtype(v), step=step) for step, v in computed_by(mapping)}
    values |= _stored_state(model, companions)
    # What remains are variables that this format does not store, such as a dropout's seed.
    rest = [v for v in unique(variables_of(model)) if id(v) not in values]
    made = [*made_now(rest)]
    paths = [v.variable.path for v in made]
    values |= {id(v.variable): v for v in made}
    notes = (
        *manifest.notes,
        *fidelity.notes_of(model, manifest),
        *quantised.accepted(manifest, mapping.bindings, ignore=fidelity.checked_fields(ignore_config)),
        *(replaced_notes(manifest, adapters, lacked=lacked) if can_merge(manifest) else ()),
        *companions.notes,
        *_left_out(outside, manifest),
        *(note for note in mapping.notes if note not in found.notes),
        *partial,
        *(
            f"{owner} computes {plural(count, 'tensor')}; while it runs, the tensors that it reads are in memory as a "
            "whole"
            for owner, count in Counter(step.owner for step, _ in computed_by(mapping)).items()
        ),
        *([f"initial values for {plural(len(made), 'variable')} that the source lacks: {some(paths)}"] if made else []),
    )
    preprocessing = preprocessing_of(model, manifest, companions)
    original = companions.config(TRANSFORMERS) or {}
    return Source(manifest, model, values, companions, preprocessing, notes, described_as=original)


def _check(mapping: VariableMap, manifest: Manifest, model: Any, ignore: Sequence[str]) -> tuple[OutsideTensor, ...]:
    """Raise if a checkpoint's tensors do not fit its model, or one would be lost; return those that are left out."""
    source = manifest.source
    wrong = [*map(str, mapping.mismatched), *map(str, mapping.refused)]
    if wrong or mapping.missing:
        problem = wrong[0] if wrong else f"no tensor for {some(mapping.missing)}"
        raise MismatchError(f"Cannot convert {source}: its tensors do not match its model: {problem}")
    found = sort_unused(mapping, manifest, model, ignore=ignore)
    unread = [*found.unused, *mapping.skipped]
    unread = [n for n in unread if n.split("/")[0] not in (*_STATE, "task:optimizer")]
    if unread:
        raise MismatchError(
            f"Cannot convert {source}: {plural(len(unread), 'tensor')} would be lost, because its model has no "
            f"variable for them: {some(unread)}. Correct its configuration, or leave them out: ignore=[{unread[0]!r}] "
            f"(--ignore {unread[0]})"
        )
    return found.outside


def _left_out(outside: Iterable[OutsideTensor], manifest: Manifest) -> Iterator[str]:
    """Yield notes on tensors that are left out: as in a load, a head or a pooler that KerasHub's class lacks; state."""
    reasons: dict[str, list[str]] = {}
    for each in outside:
        reasons.setdefault(each.reason, []).append(each.tensor)
    yield from (f"{some(names)} left out: {reason}" for reason, names in reasons.items())
    state = [n for n in manifest.tensors if n.split("/")[0] in _STATE]
    # State that is at most the two numbers that Keras writes of an optimizer before it trains is no loss to note.
    numbers = all(manifest.tensors[name].shape == () for name in state)
    if len(state) > 2 or not numbers or any(name.startswith("metrics") for name in state):
        yield f"{plural(len(state), 'tensor')} of optimizer and metrics left out: only weights are converted"


def viewed(binding: Binding, manifest: Manifest) -> StoredValue:
    """Return where a variable's value comes from; ``binding``: the variable, and the view of a tensor that fills it."""
    tensor = manifest.tensors[binding.view.tensor]
    decoded = spec_of(manifest).model_dtype is not None and is_float(tensor.dtype)
    return StoredValue(binding.variable, binding.dtype if decoded else tensor.dtype, tensor, binding.view)


def _partial(values: Iterable[StoredValue], manifest: Manifest, *, used: Container[str]) -> tuple[str, ...]:
    """Return a note for each tensor of which the model uses only a part (RoBERTa's position embeddings)."""
    taken: Counter[str] = Counter()
    for value in values:
        if value.view is not None:
            taken[value.view.tensor] += math.prod(value.view.shape)
    sizes = {name: (count, manifest.tensors[name].size) for name, count in taken.items() if name not in used}
    return tuple(
        f"the model uses {count} of the {plural(size, 'element')} of tensor {name!r}; the others were left out"
        for name, (count, size) in sizes.items()
        if count < size
    )


def _stored_state(model: Any, companions: Companions) -> dict[int, StoredValue]:
    """Read values (seeds) from ``state.json``, which shardload writes if a format's weights files cannot store them."""
    found = companions.config(KERAS, STATE) or {}
    backbone = backbone_of(model)
    roles = roles_of(backbone)
    values = {}
    # By structural key: a path like dropout_3 depends on what was built before in the process.
    for variable in variables_of(backbone):
        stored = found.get(roles[id(variable)].key) if id(variable) in roles else None
        if stored is None:
            continue
        refused = f"Cannot read the value of {variable.path!r} in {companions.keras[STATE]}"
        try:
            array = np.asarray(stored["values"], stored["dtype"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SourceError(f"{refused}: {error}") from error
        if array.shape != tuple(variable.shape):
            raise SourceError(f"{refused}: it has shape {array.shape}, expected {variable.shape}")
        values[id(variable)] = StoredValue(variable, array.dtype, array=array)
    return values


def made_now(variables: list[Any]) -> Iterable[StoredValue]:
    """Give variables that a source does not store their initial values, and yield these values to be written."""
    abstraction.initialise(variables)
    for variable in variables:
        array = np.asarray(value_of(variable))
        yield StoredValue(variable, array.dtype, array=array)


def some(names: Iterable[str]) -> str:
    """Return the first of ``names`` as text for a message, such as "'a', 'b' (2 times) and 3 more"."""
    counts = Counter(names)
    listed = [repr(name) if count == 1 else f"{name!r} ({count} times)" for name, count in counts.items()]
    more = f" and {counts.total() - sum([*counts.values()][:NAMES_SHOWN])} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more


_VALUES_READ_BYTES = 64 << 20
"""Bytes of a weight to read at once: many, because each read of a transposed weight reads most of its tensor again."""


@dataclass(slots=True, eq=False)
class ModelValues:
    """The weights of a checkpoint's model, to be read a few rows at a time, for a comparison."""

    source: Source
    values: dict[str, StoredValue]
    """For each weight, where its value comes from. Keys are equal in all models of the same structure."""
    _computed: tuple[str, NDArray[Any]] | None = field(default=None)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype in which a weight is stored or, if it is decoded or computed, the variable's dtype."""
        return self.values[key].dtype

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(map(int, self.values[key].variable.shape))

    @property
    def keys(self) -> Iterable[str]:
        """The keys of all weights, in the order of the model's weights."""
        return self.values

    def name(self, key: str) -> str:
        """Return the path of a weight in its model."""
        return str(self.values[key].variable.path)

    def ranges(self, key: str) -> Iterator[tuple[int, int]]:
        """Split a weight's rows into ranges, to read one at a time: `_VALUES_READ_BYTES` at most, or one longer row."""
        shape = self.shape(key) or (1,)
        row_bytes = max(1, math.prod(shape[1:]) * self.dtype(key).itemsize)
        step = max(1, _VALUES_READ_BYTES // row_bytes)
        for start in range(0, shape[0], step):
            yield start, min(start + step, shape[0])

    def encoded(self, key: str) -> None:
        """Return ``None``: weights are compared by value, because a weight may be only a part of a stored tensor."""

    def rows(self, key: str, start: int, stop: int) -> NDArray[Any]:
        """Read rows of a weight; a scalar counts as one row."""
        value = self.values[key]
        if value.tensor is None or value.view is None:
            whole = self._compute(key, value)
            return whole[start:stop] if whole.shape else whole
        view = value.view
        if view.shape:
            view = View(
                view.tensor, view.offset + start * view.strides[0], (stop - start, *view.shape[1:]), view.strides
            )
        found = np.empty(view.shape, value.dtype)
        flat = bits(found).reshape(-1)  # the same memory

        def write(at: int, elements: NDArray[Any]) -> None:
            flat[at : at + len(elements)] = elements

        target = View("", 0, view.shape, c_strides(view.shape))
        # One block: `ranges` already limits the rows.
        block = max(1, found.size)
        copy_view(reader_of(value.tensor, value.dtype), write, view, target, block_elements=block)
        return found

    def _compute(self, key: str, value: StoredValue) -> NDArray[Any]:
        """Return a weight's computed value, and keep the last one in memory, because callers read it range by range."""
        if self._computed is None or self._computed[0] != key:
            found: dict[int, NDArray[Any]] = {}
            assert value.step is not None
            compute(
                value.step,
                self.source.manifest,
                {id(value.variable): value.dtype},
                values=self.source.values.values(),
                write=lambda variable, array: found.update({id(variable): np.array(array, value.dtype)}),
                done=lambda variable: None,
            )
            self._computed = key, found[id(value.variable)]
        return self._computed[1]


def of_models(first: Location, second: Location) -> tuple[ModelValues, ModelValues]:
    """Open two checkpoints to compare their models' weights, or their backbones' if the models' classes differ."""
    one, two = open_with_model(first), open_with_model(second)
    if type(one.model) is type(two.model):
        return _values(one, one.model), _values(two, two.model)
    return _values(one, one.backbone), _values(two, two.backbone)


def _values(source: Source, model: Any) -> ModelValues:
    # Values that are arrays are initial ones or seeds, not what the checkpoint says about its weights.
    keys = {i: role.key for i, role in roles_of(model).items() if role.kind == "weight"}
    stored = {keys[i]: value for i, value in source.values.items() if i in keys and value.array is None}
    return ModelValues(source, stored)
