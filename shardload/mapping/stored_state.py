"""Map a training step to an existing model by role: weights, seeds, optimizer and metrics.

Steps saved by shardload store the role of each leaf (`state_tree`), and are matched by role. Other trees (Keras' own
callback, plain Orbax) only have names, and are matched by the names under which the model itself would be saved, or by
an explicit map; nothing is matched by similarity.

    items         taken                              left alone ("skipped")
    all           everything the model also has      an optimizer or metrics that the model lacks
    weights       weights and seeds                  optimizer, metrics
    optimizer     the optimizer's variables          weights, seeds, metrics
    metrics       sums and counts of an epoch        weights, seeds, optimizer

A partial step (``save_trainable_only``) lists the weights that it leaves out; they keep their values in the model. An
optimizer whose state the step lacks (it has weights alone, or was saved before training) also stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from shardload.errors import MismatchError, SourceError, UsageError
from shardload.keras_bridge.model_state import other_optimizers, state_of, variables_of
from shardload.keras_bridge.variables import unique
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.accumulation import with_updates_kept
from shardload.mapping.adapters import different_base, lora_advice, lora_differences, require_values
from shardload.mapping.optimizer_pairs import (
    OPTIMIZER_KINDS,
    Left,
    Paired,
    begun_variables,
    resolve_optimizers,
)
from shardload.mapping.roles import (
    WRAPPER,
    Role,
    forms_of,
    is_core,
    is_scalar,
    kind_of_name,
    meaning_of,
    part_of_name,
)
from shardload.mapping.state_tree import StateLeaf, Stored, find_stored, state_tree_of
from shardload.mapping.variable_map import (
    AssignStep,
    Mismatch,
    VariableMap,
    suggestion,
    unknown_tensor,
    unsharded_binding,
    variable_names,
)
from shardload.reports.facts import Note, NoteKind
from shardload.units import plural

Items = Literal["all", "weights", "optimizer", "metrics"]
_KINDS = {
    "all": {"weight", "seed", "slot", "optimizer", "metric"},
    "weights": {"weight", "seed"},
    "optimizer": {"slot", "optimizer"},
    "metrics": {"metric"},
}
_OPTIMIZER_GROUP, _SCALING = "optimizer_variables", "loss_scale_optimizer"
_MINOR = {"seed", "metric"}
"""Kinds of leaves that the step or the model may lack without an error, because weights do not depend on them."""
_GROUPS = {
    "trainable_variables": "weight",
    "non_trainable_variables": "weight",
    "optimizer_variables": "optimizer",
    "metrics_variables": "metric",
}
"""Keras' group of variables → kind of the variables in it, for steps without ``structure.json``."""


def map_state(
    model: Any,
    manifest: Manifest,
    *,
    items: Items = "all",
    rename: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    has_base: bool = False,
) -> VariableMap:
    """Map the leaves (stored arrays) of a step to the variables of the model that get their values.

    ``items``: which leaves to map. ``rename``: prefixes of stored keys → the model's. ``names``: tensor → path of its
    variable. ``has_base``: another checkpoint has the weights that a partial step lacks, so they need no values yet.
    """
    if items not in get_args(Items):
        raise UsageError(f"items={items!r} is not valid, expected one of {', '.join(get_args(Items))}")
    others = items == "optimizer" and other_optimizers(model)
    if items in ("optimizer", "metrics") and getattr(model, "optimizer", None) is None and not others:
        raise UsageError(f"The model {model.name!r} has no {items}: it was not compiled. Call model.compile(...) first")
    structure = manifest.metadata.get("structure")
    paired = pair(model, manifest, rename=rename, names=names)
    # State of optimizers that only one side has, or that never trained, is left out with a note, not reported missing.
    noted: tuple[str, ...] = ()
    if items in ("all", "optimizer"):
        paired, noted = resolve_optimizers(model, paired, manifest, every=items == "all")
    # A partial step fills only a part of the model, so the rest must have values already.
    if items in ("all", "weights") and not has_base:
        require_values(model, manifest, paired.left_out)
    found = with_updates_kept(_summarise(model, paired, items, noted), model, manifest)
    if structure is None or not {"weight"} & _KINDS[items] or rename:
        return found
    lora = lora_differences(model, structure.get("form"))
    advice = lora_advice(model, structure.get("form")) if lora or found.missing or found.unused else ""
    return replace(found, mismatched=(*lora, *found.mismatched), advice=advice)


def pair(
    model: Any, manifest: Manifest, *, rename: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None
) -> Paired:
    """Pair the tensors of a step with the variables of a model, by role if the step stores roles, else by name.

    ``rename``: prefixes of stored keys → the model's. ``names``: tensor → path of its variable.
    """
    if rename is not None and not isinstance(rename, Mapping):
        raise UsageError(
            f"rename={rename!r} is not valid, expected a dict of stored keys to the model's: "
            "{'layers/dense': 'layers/head'}"
        )
    structure = manifest.metadata.get("structure")
    if structure is None or names is not None:
        return _by_name(model, manifest, names or {})
    found = find_stored(model, structure, rename=rename)
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
    left = [Left.of(s, tensors[id(s)].name, found) for s in found.unexpected]
    left += [Left(name, "weight") for name in manifest.tensors if name not in known]
    pairs = tuple((tensors[id(s)], leaf) for s, leaf in found.pairs)
    return Paired(pairs, found.missing, tuple(left), found.forms, left_out=found.left_out)


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


def _by_name(model: Any, manifest: Manifest, names: Mapping[str, str]) -> Paired:
    tree = state_tree_of(model)
    leaves = tree.leaves
    by_tree = {"/".join(leaf.path): leaf for leaf in leaves}
    by_path: dict[str, list[StateLeaf]] = {}
    for leaf in leaves:
        by_path.setdefault(leaf.variable.path, []).append(leaf)
    pairs: list[tuple[Tensor, StateLeaf]] = []
    rest: dict[str, Tensor] = {}
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
            rest[name] = tensor
    taken_names = {id(leaf) for _, leaf in pairs}
    forms = forms_of([leaf.role for leaf in leaves], tree.optimizers)
    renamed = _in_another_optimizer(rest, [leaf for leaf in leaves if id(leaf) not in taken_names], tree.optimizers)
    pairs += [(rest[name], leaf) for name, leaf in renamed.items()]
    left = [_left_by_name(name) for name in rest if name not in renamed]
    taken = [id(leaf) for _, leaf in pairs]
    if len(set(taken)) < len(taken):
        twice = next(leaf for _, leaf in pairs if taken.count(id(leaf)) > 1)
        raise MismatchError(f"Cannot map two tensors to variable {twice.variable.path!r}. Name each variable once")
    return Paired(tuple(pairs), tuple(leaf for leaf in leaves if id(leaf) not in taken), tuple(left), forms)


def _in_another_optimizer(
    names: Iterable[str], leaves: Iterable[StateLeaf], kinds: Mapping[str, str]
) -> dict[str, StateLeaf]:
    """Pair an optimizer's stored names (``adam_1/…``) with the model's (``adam/…``), by what comes after the slash."""
    own = [leaf for leaf in leaves if leaf.path[0] == _OPTIMIZER_GROUP and leaf.role.optimizer is None]
    own = [leaf for leaf in own if not leaf.path[1].startswith(_SCALING)]
    stored = [tuple(name.split("/")) for name in names]
    stored = [path for path in stored if path[0] == _OPTIMIZER_GROUP and not path[1].startswith(_SCALING)]
    # Of several optimizers, their names alone do not tell which is which.
    if len({path[1] for path in stored}) != 1 or len({leaf.path[1] for leaf in own}) != 1:
        return {}
    by_rest, kind, stored_kind = {leaf.path[2:]: leaf for leaf in own}, kinds.get(""), kind_of_name(stored[0][1])
    found = {}
    for path in stored:
        leaf, part = by_rest.get(path[2:]), part_of_name(path[-1])
        same = kind is None or stored_kind is None or meaning_of(part, kind) == meaning_of(part, stored_kind)
        if leaf is not None and (same or is_scalar(part)):
            found["/".join(path)] = leaf
    return found


def _left_by_name(name: str) -> Left:
    group, last = name.split("/", maxsplit=1)[0], name.rsplit("/", maxsplit=1)[-1]
    kind = "seed" if last == "seed_generator_state" else _GROUPS.get(group, "weight")
    part = part_of_name(last)
    if kind != "optimizer":
        return Left(name, kind)
    if name.split("/")[1].startswith(_SCALING):
        part = f"{WRAPPER}{part}"
    if is_scalar(part.removeprefix(WRAPPER)):
        return Left(name, "optimizer", part=part)
    return Left(name, "slot", part=part, is_core=is_core(part, kind_of_name(name.split("/")[1])))


def _named(path: str, by_path: Mapping[str, list[StateLeaf]]) -> StateLeaf:
    found = by_path.get(path, [])
    if len(found) != 1:
        raise MismatchError(
            f"Cannot map a tensor to {path!r}: the model has {plural(len(found), 'variable')} with that path"
            + ("" if found else suggestion(path, by_path))
        )
    return found[0]


def _summarise(model: Any, paired: Paired, items: Items, noted: tuple[str, ...] = ()) -> VariableMap:
    # The compiled optimizer is restored only if model and step both have one; others were resolved before.
    kinds = set(_KINDS[items])
    stored = {leaf.kind for _, leaf in (*paired.pairs, *paired.dropped) if leaf.role.optimizer is None}
    stored |= {found.kind for found in paired.left if found.optimizer is None}
    if items == "all" and (getattr(model, "optimizer", None) is None or not stored & OPTIMIZER_KINDS):
        kinds -= OPTIMIZER_KINDS
    notes: tuple[str, ...] = ()
    if items == "all" and getattr(model, "optimizer", None) is not None and not stored & OPTIMIZER_KINDS:
        notes = (Note("the step has no optimizer state; the model's is unchanged", NoteKind.OPTIMIZER_UNCHANGED),)
    everything = unique([*variables_of(model), *state_of(model)])
    names = variable_names([*everything, *(leaf.variable for _, leaf in paired.pairs)])

    def requested(found: Left | Role) -> bool:
        return found.kind in (kinds if found.optimizer is None else _KINDS[items])

    # Of what was requested: pairs that fit, pairs of different shapes, variables and tensors that are alone.
    wanted = [(tensor, leaf) for tensor, leaf in paired.pairs if requested(leaf.role)]
    fits = [(tensor, leaf) for tensor, leaf in wanted if tensor.shape == leaf.shape]
    wrong = [(tensor, leaf) for tensor, leaf in wanted if tensor.shape != leaf.shape]
    bindings = tuple(unsharded_binding(leaf.variable, View.whole(tensor), names) for tensor, leaf in fits)
    demanded = [leaf for leaf in paired.missing if requested(leaf.role) and leaf.kind not in _MINOR]
    out = [(stored, leaf) for stored, leaf in paired.left_out if requested(leaf.role) and leaf.kind == "weight"]
    unused = [found for found in paired.left if requested(found) and found.kind not in _MINOR]
    bases = different_base(out)
    differing = [leaf.kind for leaf in (*demanded, *(leaf for _, leaf in wrong))] + [found.kind for found in unused]
    covered = {id(leaf.variable) for leaf in (*(leaf for _, leaf in (*wanted, *out)), *demanded)}
    return VariableMap(
        bindings=bindings,
        missing=tuple(names.get(id(leaf.variable), leaf.variable.path) for leaf in demanded),
        missing_variables=tuple(leaf.variable for leaf in demanded),
        state=tuple(v for v in everything if id(v) not in covered),
        unused=tuple(found.tensor for found in unused),
        skipped=(
            *(found.tensor for found in paired.left if not requested(found) or found.kind in _MINOR),
            *(tensor.name for tensor, leaf in paired.pairs if not requested(leaf.role)),
            *(tensor.name for tensor, _ in paired.dropped),
        ),
        mismatched=(
            *bases,
            *(Mismatch.of_shapes(leaf.variable, tensor.name, tensor.shape) for tensor, leaf in wrong),
        ),
        notes=(*notes, *noted),
        steps=tuple(AssignStep((binding,)) for binding in bindings),
        refused=tuple((names[id(leaf.variable)], leaf.variable) for _, leaf in wrong),
        only_optimizer_differs=items == "all"
        and bool(differing)
        and not bases
        and OPTIMIZER_KINDS.issuperset(differing),
        kept=tuple(names.get(id(leaf.variable), leaf.variable.path) for _, leaf in out),
        kept_variables=tuple(leaf.variable for _, leaf in out),
        begun=begun_variables(
            model, [*paired.begun, *(leaf for _, leaf in wrong if leaf.kind == "slot")], paired.forms
        ),
    )
