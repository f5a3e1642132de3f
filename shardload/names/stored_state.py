"""A training step into a given model: weights, seeds, optimizer and metrics, by what they are.

Steps saved by shardload say for each leaf what it is (`state_tree`), and are matched by that. Other trees (Keras' own
callback, plain Orbax) only have names, and are matched by the names the model itself would be saved under, or by an
explicit map; nothing is matched by likeness.

    items         taken                              left alone ("unasked")
    all           everything the model has a place for, an optimizer the model does not have, metrics
    weights       weights and seeds                  optimizer, metrics
    optimizer     the optimizer's variables          weights, seeds, metrics
    metrics       sums and counts of an epoch        weights, seeds, optimizer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shardload import _keras
from shardload.errors import MismatchError, SourceError, UsageError
from shardload.manifest import Manifest, Tensor, View
from shardload.names.nearest import nearest
from shardload.names.state_tree import Leaf, Stored, describe, find
from shardload.names.variable_map import Binding, DirectStep, Mismatch, Variable, VariableMap, variable_names

Items = Literal["all", "weights", "optimizer", "metrics"]
_KINDS = {
    "all": {"weight", "seed", "slot", "optimizer", "metric"},
    "weights": {"weight", "seed"},
    "optimizer": {"slot", "optimizer"},
    "metrics": {"metric"},
}
_OPTIMIZER = _KINDS["optimizer"]
NO_OPTIMIZER = "the step holds no state of an optimizer: the model's is as it was"
"""Note of a restore that left the optimizer alone though everything was asked for."""
_MINOR = {"seed", "metric"}
"""What may be missing or left over: another dropout or metric changes no weight."""
_GROUPS = {
    "trainable_variables": "weight",
    "non_trainable_variables": "weight",
    "optimizer_variables": "optimizer",
    "metrics_variables": "metric",
}
"""What the leaves of a tree without structure are, by the group Keras puts them in."""


@dataclass(frozen=True, slots=True)
class _Paired:
    """Tensors and variables that belong together, and what is left of both."""

    pairs: tuple[tuple[Tensor, Leaf], ...]
    missing: tuple[Leaf, ...]
    left: tuple[tuple[str, str], ...]
    """Names of tensors without variable, and what they are."""


def map_state(
    model: Any,
    manifest: Manifest,
    *,
    items: Items = "all",
    rename: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> VariableMap:
    """Which leaf of a step goes to which variable.

    Args:
        model: A built model, abstract or not; nothing of it is changed.
        manifest: Of a training step.
        items: ``"all"``, ``"weights"``, ``"optimizer"`` or ``"metrics"``.
        rename: Stored structural key prefix → the model's (`state_tree.find`).
        names: Tensor name → variable path, for trees that do not say what their leaves are.

    Raises:
        UsageError: When ``items`` is none of those, or asks for what only a compiled model has.
        MismatchError: When ``names`` or ``rename`` name what does not exist.
        SourceError: When the step contradicts itself.
    """
    if items not in get_args(Items):
        raise UsageError(f"items is one of {', '.join(get_args(Items))}; got {items!r}")
    if items in ("optimizer", "metrics") and getattr(model, "optimizer", None) is None:
        raise UsageError(f"The model {model.name!r} has no {items}: it was not compiled. Call model.compile(...) first")
    if rename is not None and not isinstance(rename, Mapping):
        raise UsageError(f"rename maps stored keys to the model's: {{'layers/dense': 'layers/head'}}; got {rename!r}")
    structure = manifest.metadata.get("structure")
    if structure is None or names is not None:
        paired = _by_name(model, manifest, names or {})
    else:
        paired = _by_structure(model, manifest, structure, rename)
    return _summarise(model, paired, items)


def _by_structure(
    model: Any, manifest: Manifest, structure: Mapping[str, Any], rename: Mapping[str, str] | None
) -> _Paired:
    found = find(model, structure, rename=rename)
    keys = [s.role.of or s.role.key for s, _ in found.pairs + found.mismatched]
    keys += [s.role.of or s.role.key for s in found.unexpected]
    for old in rename or ():
        if old and not any(key == old or key.startswith(f"{old}/") for key in keys):
            raise MismatchError(
                f"rename names {old!r}, but nothing in {manifest.source} has a key that begins so"
                + nearest(old, {key.split("/vars")[0]: None for key in keys})
            )
    both = (*found.pairs, *found.mismatched)
    stored = [s for s, _ in both] + list(found.unexpected)
    tensors = {id(s): _tensor_of(s, manifest) for s in stored}
    known = {tensor.name for tensor in tensors.values()}
    left = [(tensors[id(s)].name, s.role.kind) for s in found.unexpected]
    left += [(name, "weight") for name in manifest.tensors if name not in known]
    return _Paired(tuple((tensors[id(s)], leaf) for s, leaf in both), found.missing, tuple(left))


def _tensor_of(stored: Stored, manifest: Manifest) -> Tensor:
    name = "/".join(stored.path)
    tensor = manifest.tensors.get(name)
    if tensor is None or tensor.shape != stored.shape or tensor.dtype.name != stored.dtype:
        have = "it is not there" if tensor is None else f"its data is {tensor.dtype.name} of shape {tensor.shape}"
        raise SourceError(
            f"{manifest.source} contradicts itself: its structure.json lists {name!r} as {stored.dtype} of shape "
            f"{stored.shape}, but {have}. The step is damaged; restore another one"
        )
    return tensor


def _by_name(model: Any, manifest: Manifest, names: Mapping[str, str]) -> _Paired:
    leaves = describe(model).leaves
    by_tree = {"/".join(leaf.path): leaf for leaf in leaves}
    by_path: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_path.setdefault(leaf.variable.path, []).append(leaf)
    pairs: list[tuple[Tensor, Leaf]] = []
    left = []
    for name in names:
        if name not in manifest.tensors:
            raise MismatchError(
                f"The map names a tensor {name!r} that {manifest.source} does not have"
                + nearest(name, manifest.tensors)
            )
    for name, tensor in manifest.tensors.items():
        if name in names:
            pairs.append((tensor, _named(names[name], by_path)))
        elif name in by_tree:
            pairs.append((tensor, by_tree[name]))
        else:
            left.append((name, _kind_of(name)))
    taken = [id(leaf) for _, leaf in pairs]
    if len(set(taken)) < len(taken):
        twice = next(leaf for _, leaf in pairs if taken.count(id(leaf)) > 1)
        raise MismatchError(f"Variable {twice.variable.path!r} is provided twice; name each variable once")
    return _Paired(tuple(pairs), tuple(leaf for leaf in leaves if id(leaf) not in taken), tuple(left))


def _kind_of(name: str) -> str:
    group, last = name.split("/", maxsplit=1)[0], name.rsplit("/", maxsplit=1)[-1]
    return "seed" if last == "seed_generator_state" else _GROUPS.get(group, "weight")


def _named(path: str, by_path: Mapping[str, list[Leaf]]) -> Leaf:
    found = by_path.get(path, [])
    if len(found) != 1:
        raise MismatchError(
            f"The map sends a tensor to {path!r}, but the model has {len(found) or 'no'} variables of that path"
            + ("" if found else nearest(path, by_path))
        )
    return found[0]


def _summarise(model: Any, paired: _Paired, items: Items) -> VariableMap:
    kinds = set(_KINDS[items])
    stored = {leaf.kind for _, leaf in paired.pairs} | {kind for _, kind in paired.left}
    optimizer = getattr(model, "optimizer", None)
    if items == "all" and (optimizer is None or not (stored & _OPTIMIZER or _has_trained(optimizer))):
        kinds -= _OPTIMIZER
    everything = _keras.unique([*_keras.variables_of(model), *_keras.state_of(model)])
    titles = variable_names([*everything, *(leaf.variable for _, leaf in paired.pairs)])
    wanted = [(tensor, leaf) for tensor, leaf in paired.pairs if leaf.kind in kinds]
    fits = [(tensor, leaf) for tensor, leaf in wanted if tensor.shape == leaf.shape]
    wrong = [(tensor, leaf) for tensor, leaf in wanted if tensor.shape != leaf.shape]
    bindings = tuple(_binding(tensor, leaf, titles) for tensor, leaf in fits)
    demanded = [leaf for leaf in paired.missing if leaf.kind in kinds - _MINOR]
    covered = {id(v) for v in _variables([*(leaf for _, leaf in wanted), *demanded])}
    return VariableMap(
        bindings=bindings,
        computed=(),
        missing=tuple(titles.get(id(leaf.variable), leaf.variable.path) for leaf in demanded),
        missing_variables=tuple(_variables(demanded)),
        state=tuple(v for v in everything if id(v) not in covered),
        unused=tuple(name for name, kind in paired.left if kind in kinds - _MINOR),
        unasked=(
            *(name for name, kind in paired.left if kind not in kinds - _MINOR),
            *(tensor.name for tensor, leaf in paired.pairs if leaf.kind not in kinds),
        ),
        mismatched=tuple(_disagree(tensor, leaf) for tensor, leaf in wrong),
        notes=_notes(model, items, stored),
        steps=tuple(map(DirectStep, bindings)),
        refused=tuple((titles[id(leaf.variable)], leaf.variable) for _, leaf in wrong),
    )


def _has_trained(optimizer: Any) -> bool:
    """Whether its slots are of other weights than those of the step: keeping them would mix two states."""
    return bool(_keras.has_value(optimizer.iterations) and int(_keras.value_of(optimizer.iterations)))


def _notes(model: Any, items: Items, stored: set[str]) -> tuple[str, ...]:
    if items == "all" and getattr(model, "optimizer", None) is not None and not stored & _OPTIMIZER:
        return (NO_OPTIMIZER,)
    return ()


def _variables(leaves: Iterable[Leaf]) -> list[Variable]:
    return [leaf.variable for leaf in leaves]


def _binding(tensor: Tensor, leaf: Leaf, titles: Mapping[int, str]) -> Binding:
    variable = leaf.variable
    return Binding(titles[id(variable)], variable, View.whole(tensor), _keras.stored_dtype(variable), tensor.dtype)


def _disagree(tensor: Tensor, leaf: Leaf) -> Mismatch:
    path = leaf.variable.path
    text = f"Variable {path!r} has shape {leaf.shape}, but {tensor.name!r} was saved with shape {tensor.shape}"
    return Mismatch(path, tensor.name, leaf.shape, tensor.shape, text)
