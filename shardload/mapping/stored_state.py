"""Map a training step to an existing model by role: weights, seeds, optimizer and metrics.

Steps saved by shardload store the role of each leaf (`state_tree`), and are matched by role. Other trees (Keras' own
callback, plain Orbax) only have names, and are matched by the names under which the model itself would be saved, or by
an explicit map; nothing is matched by similarity.

    items         taken                              left alone ("skipped")
    all           everything the model also has      an optimizer that the model lacks, metrics
    weights       weights and seeds                  optimizer, metrics
    optimizer     the optimizer's variables          weights, seeds, metrics
    metrics       sums and counts of an epoch        weights, seeds, optimizer

A partial step (``save_trainable_only``) lists the weights that it leaves out; the model's keep their values
(`partial_steps`).

If a step lacks the state of an optimizer (it has weights alone, or was saved before training), that optimizer stays
unchanged, with a note. This applies to each optimizer: a GAN has two, besides the compiled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from shardload.errors import MismatchError, SourceError, UsageError
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.model_state import other_optimizers, state_of, variables_of
from shardload.keras_bridge.variables import unique
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.partial_steps import different_base, lora_advice, lora_differences, require_values
from shardload.mapping.state_keys import Role
from shardload.mapping.state_tree import StateLeaf, Stored, describe, find
from shardload.mapping.suggestions import suggestion, unknown_tensor
from shardload.mapping.variable_map import DirectStep, Mismatch, VariableMap, bind, variable_names
from shardload.transfer.read_tensor import read_tensor

Items = Literal["all", "weights", "optimizer", "metrics"]
_KINDS = {
    "all": {"weight", "seed", "slot", "optimizer", "metric"},
    "weights": {"weight", "seed"},
    "optimizer": {"slot", "optimizer"},
    "metrics": {"metric"},
}
_OPTIMIZER = _KINDS["optimizer"]
NO_OPTIMIZER = "the step has no optimizer state; the model's is unchanged"
"""Note of a restore that left the optimizer unchanged although everything was requested."""
UNTRAINED = "the step was saved before training and has no optimizer slots; the model's are unchanged"
"""Note of a restore that left slots unchanged, because the step's optimizer had none yet."""
_NO_OTHER = "the step has no state of the optimizer "
_MINOR = {"seed", "metric"}
"""Kinds that may be missing or unused: another dropout or metric changes no weight."""
_GROUPS = {
    "trainable_variables": "weight",
    "non_trainable_variables": "weight",
    "optimizer_variables": "optimizer",
    "metrics_variables": "metric",
}
"""The kind of the leaves of a tree without structure, by Keras' group."""


@dataclass(frozen=True, slots=True)
class _Paired:
    """Paired tensors and variables, and the unpaired rest of both."""

    pairs: tuple[tuple[Tensor, StateLeaf], ...]
    missing: tuple[StateLeaf, ...]
    left: tuple[_Left, ...]
    left_out: tuple[tuple[Stored, StateLeaf], ...] = ()
    """Leaves that a partial step lists as left out, and the model's variables for them."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A tensor without a variable."""

    tensor: str
    kind: str
    optimizer: str | None = None
    """Like `Role.optimizer`."""


def leaves_optimizer_alone(note: str) -> bool:
    """Whether a note of a restore means that the step lacks the state of an optimizer of the model."""
    if note.startswith(_NO_OTHER):
        return not _is_of_inner_model(note.removeprefix(_NO_OTHER).partition(":")[0])
    return note == NO_OPTIMIZER


def _is_of_inner_model(optimizer: str) -> bool:
    """Whether the optimizer belongs to a compiled submodel, so the outer ``fit`` does not use it."""
    return optimizer.endswith("/optimizer")


def map_state(
    model: Any,
    manifest: Manifest,
    *,
    items: Items = "all",
    rename: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    has_base: bool = False,
) -> VariableMap:
    """Map the leaves of a step to variables.

    Args:
        model: A built model, abstract or not; it is not changed.
        manifest: The manifest of a training step.
        items: ``"all"``, ``"weights"``, ``"optimizer"`` or ``"metrics"``.
        rename: Stored structural key prefix → the model's (`state_tree.find`).
        names: Tensor name → variable path, for trees without roles.
        has_base: Whether the weights that a partial step leaves out come from elsewhere, so that the model needs no
            values for them.

    Raises:
        UsageError: When ``items`` is invalid, or requires a compiled model.
        MismatchError: When ``names`` or ``rename`` contain unknown names.
        SourceError: When the step contradicts itself.
    """
    if items not in get_args(Items):
        raise UsageError(f"items={items!r} is not valid, expected one of {', '.join(get_args(Items))}")
    others = items == "optimizer" and other_optimizers(model)
    if items in ("optimizer", "metrics") and getattr(model, "optimizer", None) is None and not others:
        raise UsageError(f"The model {model.name!r} has no {items}: it was not compiled. Call model.compile(...) first")
    if rename is not None and not isinstance(rename, Mapping):
        raise UsageError(
            f"rename={rename!r} is not valid, expected a dict of stored keys to the model's: "
            "{'layers/dense': 'layers/head'}"
        )
    # Pair tensors with variables: by role if the step stores roles, else by name.
    structure = manifest.metadata.get("structure")
    if structure is None or names is not None:
        paired = _by_name(model, manifest, names or {})
    else:
        paired = _by_structure(model, manifest, structure, rename)
    # State of optimizers that only one side has, or that never trained, is left out with a note, not reported missing.
    noted: list[str] = []
    if items == "all" and _is_untrained(paired, manifest, None):
        kept = _without(paired, None)
        noted += [UNTRAINED] if len(kept.missing) < len(paired.missing) else []
        paired = kept
    if items in ("all", "optimizer"):
        paired = _resolve_other_optimizers(paired, manifest, noted)
    # A partial step fills only a part of the model, so the rest must have values already.
    if items in ("all", "weights") and not has_base:
        require_values(model, manifest, paired.left_out)
    found = _summarise(model, paired, items, tuple(noted))
    if structure is None or not {"weight"} & _KINDS[items] or rename:
        return found
    lora = lora_differences(model, structure.get("form"))
    advice = lora_advice(model, structure.get("form")) if lora or found.missing or found.unused else ""
    return replace(found, mismatched=(*lora, *found.mismatched), advice=advice)


def _without(paired: _Paired, optimizer: str | None) -> _Paired:
    """Drop an optimizer's missing variables."""
    missing = (m for m in paired.missing if m.kind not in _OPTIMIZER or m.role.optimizer != optimizer)
    return replace(paired, missing=tuple(missing))


def _resolve_other_optimizers(paired: _Paired, manifest: Manifest, noted: list[str]) -> _Paired:
    """Resolve optimizers other than the compiled one that step or model lacks, or that never trained; add notes."""
    both = {leaf.role.optimizer for _, leaf in paired.pairs}
    in_step = {found.optimizer for found in paired.left} | both
    in_model = {leaf.role.optimizer for leaf in paired.missing} | both
    for name in sorted(filter(None, in_step | in_model)):
        if name not in in_step:
            noted.append(f"{_NO_OTHER}{name}: the model's is unchanged")
            paired = _without(paired, name)
        # An empty kind belongs to no item, so `_summarise` lists these tensors as skipped.
        elif name not in in_model:
            noted.append(f"the model has no optimizer {name}; its state in the step is not used")
            left = (replace(found, kind="") if found.optimizer == name else found for found in paired.left)
            paired = replace(paired, left=tuple(left))
        elif _is_untrained(paired, manifest, name):
            kept = _without(paired, name)
            if len(kept.missing) < len(paired.missing):
                noted.append(f"the optimizer {name}: {UNTRAINED}")
            paired = kept
        elif _is_of_inner_model(name) and not _fits(paired, name):
            noted.append(f"the step has another kind of state for the optimizer {name}; the model's is unchanged")
            paired = _alone(paired, name)
    return paired


def _fits(paired: _Paired, optimizer: str) -> bool:
    """Whether step and model have the same variables of an optimizer."""
    unpaired = [leaf.role.optimizer for leaf in paired.missing] + [found.optimizer for found in paired.left]
    return optimizer not in unpaired


def _alone(paired: _Paired, optimizer: str) -> _Paired:
    """Drop an optimizer's pairs, so that the model's state stays unchanged."""
    pairs = tuple(pair for pair in paired.pairs if pair[1].role.optimizer != optimizer)
    left = tuple(replace(found, kind="") if found.optimizer == optimizer else found for found in paired.left)
    return replace(_without(paired, optimizer), pairs=pairs, left=left)


def _is_untrained(paired: _Paired, manifest: Manifest, optimizer: str | None) -> bool:
    """Whether a step's optimizer has zero iterations and no slots: ``fit`` would have created them.

    With iterations but no slots it is of another kind (SGD), and does not fit an optimizer that has slots.
    """
    pairs = [(tensor, leaf) for tensor, leaf in paired.pairs if leaf.role.optimizer == optimizer]
    kinds = [leaf.kind for _, leaf in pairs] + [found.kind for found in paired.left if found.optimizer == optimizer]
    of_optimizer = [(tensor, leaf) for tensor, leaf in pairs if leaf.kind == "optimizer"]
    counts = [tensor.name for tensor, leaf in of_optimizer if leaf.key.rpartition("/")[2] == "iteration"]
    return "slot" not in kinds and bool(counts) and not any(read_tensor(manifest, name).any() for name in counts)


def _by_structure(
    model: Any, manifest: Manifest, structure: Mapping[str, Any], rename: Mapping[str, str] | None
) -> _Paired:
    found = find(model, structure, rename=rename)
    stored = [s for s, _ in found.pairs] + list(found.unexpected)
    keys = [s.role.of or s.role.key for s in stored]
    for old in rename or ():
        if old and not any(key == old or key.startswith(f"{old}/") for key in keys):
            raise MismatchError(
                f"Cannot rename {old!r}: no key in {manifest.source} starts with it"
                + suggestion(old, {key.split("/vars")[0] for key in keys})
            )
    tensors = {id(s): _tensor_of(s, manifest) for s in stored}
    known = {tensor.name for tensor in tensors.values()}
    left = [_Left(tensors[id(s)].name, s.role.kind, s.role.optimizer) for s in found.unexpected]
    left += [_Left(name, "weight") for name in manifest.tensors if name not in known]
    pairs = tuple((tensors[id(s)], leaf) for s, leaf in found.pairs)
    return _Paired(pairs, found.missing, tuple(left), found.left_out)


def _tensor_of(stored: Stored, manifest: Manifest) -> Tensor:
    name = "/".join(stored.path)
    tensor = manifest.tensors.get(name)
    if tensor is None or tensor.shape != stored.shape or tensor.dtype.name != stored.dtype:
        found = "it is missing" if tensor is None else f"its data is {tensor.dtype.name} of shape {tensor.shape}"
        raise SourceError(
            f"Cannot restore {manifest.source}: structure.json lists {name!r} as {stored.dtype} of shape "
            f"{stored.shape}, but {found}. The step is damaged; restore another one"
        )
    return tensor


def _by_name(model: Any, manifest: Manifest, names: Mapping[str, str]) -> _Paired:
    leaves = describe(model).leaves
    by_tree = {"/".join(leaf.path): leaf for leaf in leaves}
    by_path: dict[str, list[StateLeaf]] = {}
    for leaf in leaves:
        by_path.setdefault(leaf.variable.path, []).append(leaf)
    pairs: list[tuple[Tensor, StateLeaf]] = []
    left = []
    # An explicit name comes before the tree's own.
    for name in names:
        if name not in manifest.tensors:
            raise unknown_tensor(name, manifest)
    for name, tensor in manifest.tensors.items():
        if name in names:
            pairs.append((tensor, _named(names[name], by_path)))
        elif name in by_tree:
            pairs.append((tensor, by_tree[name]))
        else:
            left.append(_Left(name, _kind_of(name)))
    taken = [id(leaf) for _, leaf in pairs]
    if len(set(taken)) < len(taken):
        twice = next(leaf for _, leaf in pairs if taken.count(id(leaf)) > 1)
        raise MismatchError(f"Cannot map two tensors to variable {twice.variable.path!r}. Name each variable once")
    return _Paired(tuple(pairs), tuple(leaf for leaf in leaves if id(leaf) not in taken), tuple(left))


def _kind_of(name: str) -> str:
    group, last = name.split("/", maxsplit=1)[0], name.rsplit("/", maxsplit=1)[-1]
    return "seed" if last == "seed_generator_state" else _GROUPS.get(group, "weight")


def _named(path: str, by_path: Mapping[str, list[StateLeaf]]) -> StateLeaf:
    found = by_path.get(path, [])
    if len(found) != 1:
        raise MismatchError(
            f"Cannot map a tensor to {path!r}: the model has {len(found) or 'no'} variables with that path"
            + ("" if found else suggestion(path, by_path))
        )
    return found[0]


def _summarise(model: Any, paired: _Paired, items: Items, noted: tuple[str, ...] = ()) -> VariableMap:
    # The compiled optimizer is restored only if model and step both have one; others were resolved before.
    kinds = set(_KINDS[items])
    stored = {leaf.kind for _, leaf in paired.pairs if leaf.role.optimizer is None}
    stored |= {found.kind for found in paired.left if found.optimizer is None}
    if items == "all" and (getattr(model, "optimizer", None) is None or not stored & _OPTIMIZER):
        kinds -= _OPTIMIZER
    everything = unique([*variables_of(model), *state_of(model)])
    names = variable_names([*everything, *(leaf.variable for _, leaf in paired.pairs)])

    def requested(found: _Left | Role) -> bool:
        return found.kind in (kinds if found.optimizer is None else _KINDS[items])

    # Of what was requested: pairs that fit, pairs of different shapes, variables and tensors that are alone.
    wanted = [(tensor, leaf) for tensor, leaf in paired.pairs if requested(leaf.role)]
    fits = [(tensor, leaf) for tensor, leaf in wanted if tensor.shape == leaf.shape]
    wrong = [(tensor, leaf) for tensor, leaf in wanted if tensor.shape != leaf.shape]
    bindings = tuple(bind(leaf.variable, View.whole(tensor), names) for tensor, leaf in fits)
    demanded = [leaf for leaf in paired.missing if requested(leaf.role) and leaf.kind not in _MINOR]
    out = [(stored, leaf) for stored, leaf in paired.left_out if requested(leaf.role) and leaf.kind == "weight"]
    unused = [found for found in paired.left if requested(found) and found.kind not in _MINOR]
    bases = different_base(out)
    differing = [leaf.kind for leaf in (*demanded, *(leaf for _, leaf in wrong))] + [found.kind for found in unused]
    covered = {id(v) for v in _variables([*(leaf for _, leaf in (*wanted, *out)), *demanded])}
    return VariableMap(
        bindings=bindings,
        computed=(),
        missing=tuple(names.get(id(leaf.variable), leaf.variable.path) for leaf in demanded),
        missing_variables=tuple(_variables(demanded)),
        state=tuple(v for v in everything if id(v) not in covered),
        unused=tuple(found.tensor for found in unused),
        skipped=(
            *(found.tensor for found in paired.left if not requested(found) or found.kind in _MINOR),
            *(tensor.name for tensor, leaf in paired.pairs if not requested(leaf.role)),
        ),
        mismatched=(
            *bases,
            *(Mismatch.of_shapes(leaf.variable, tensor.name, tensor.shape) for tensor, leaf in wrong),
        ),
        notes=(*_notes(model, items, stored), *noted),
        steps=tuple(map(DirectStep, bindings)),
        refused=tuple((names[id(leaf.variable)], leaf.variable) for _, leaf in wrong),
        only_optimizer_differs=items == "all" and bool(differing) and not bases and _OPTIMIZER.issuperset(differing),
        kept=tuple(names.get(id(leaf.variable), leaf.variable.path) for _, leaf in out),
        kept_variables=tuple(leaf.variable for _, leaf in out),
    )


def _notes(model: Any, items: Items, stored: set[str]) -> tuple[str, ...]:
    if items == "all" and getattr(model, "optimizer", None) is not None and not stored & _OPTIMIZER:
        return (NO_OPTIMIZER,)
    return ()


def _variables(leaves: Iterable[StateLeaf]) -> list[Variable]:
    return [leaf.variable for leaf in leaves]
