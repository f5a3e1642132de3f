"""A model's training state as the tree of Keras' ``get_state_tree``, with the variable and role of each leaf.

    state_tree_of(model).tree       the values to write: {"trainable_variables": {"dense": {"kernel": array}}, …}
    state_tree_of(model).to_json()  stored with them: the role (`Role`) of each leaf
    find_stored(model, leaves)      read back: stored leaves paired with the variables of another model, by role

The tree's own names are auto-generated (``dense_7``, ``adam_1``), so variables are not looked up by them. If variables
share a path, which Keras refuses, ``#2``, ``#3`` is appended to the names of the later ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardload.errors import SourceError, UninitialisedError
from shardload.keras_bridge import Variable
from shardload.keras_bridge.layer_settings import settings_of
from shardload.keras_bridge.model_state import optimizer_variables_of, optimizers_by_path, other_optimizers
from shardload.keras_bridge.optimizer_slots import accumulations_in, batches_of_update, kind_of
from shardload.keras_bridge.variables import has_value, stored_dtype, unique, value_of
from shardload.mapping.roles import Forms, Role, forms_of, kind_in, meaning_of, owner_in, part_of, roles_of
from shardload.units import plural

_ACCUMULATES = "gradient_accumulation_steps"
_VERSION = 1
"""Version of the format of ``structure.json``, which lists the leaves of a step with their roles."""
WEIGHT_ITEMS = ("trainable_variables", "non_trainable_variables")
"""The groups of variables that a step contains if it was saved with ``save_weights_only``."""


Identity = tuple[str, str, str]
"""What a stored leaf and a variable must have in common to be paired: kind, contents and key of the weight.

For example, Adam's momentum of a weight has ``("slot", ":first moment", "layers/dense/vars/0")``.
"""


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """One variable of a model: its place in the tree that a step stores, and its role (what it is for)."""

    path: tuple[str, ...]
    """Unique path in the tree: ``("trainable_variables", "dense", "kernel")``."""
    role: Role
    shape: tuple[int, ...]
    dtype: str
    """Dtype of the variable and of what is stored for it, such as ``bfloat16``."""
    variable: Variable
    accumulates: int | None = None
    """For an optimizer's count of batches: its ``gradient_accumulation_steps``, the batches of one update."""

    @property
    def kind(self) -> str:
        """What the variable is: ``weight``, ``seed``, ``slot``, ``optimizer`` (a count, a rate) or ``metric``."""
        return self.role.kind

    @property
    def key(self) -> str:
        """Name that is the same in any process, such as ``layers/dense/vars/0``; unique within its kind."""
        return self.role.key

    def to_json(self) -> dict[str, Any]:
        """Return the leaf's entry in ``structure.json``, the file in a step that tells what its arrays are for."""
        role = {k: v for k in ("slot", "of", "name", "optimizer") if (v := getattr(self.role, k)) is not None}
        place = {"path": list(self.path), "kind": self.kind, "key": self.key}
        accumulates = {} if self.accumulates is None else {_ACCUMULATES: self.accumulates}
        return {**place, **role, "shape": list(self.shape), "dtype": self.dtype, **accumulates}


@dataclass(frozen=True, slots=True)
class StateTree:
    """The variables of one model and their roles, as a training step stores them; contains no values."""

    leaves: tuple[StateLeaf, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Path of a layer → settings that the model's configuration omits: frozen, quantised, LoRA's rank."""
    left_out: tuple[StateLeaf, ...] = ()
    """Weights that a partial step (``save_trainable_only``) does not store, and their slots; it lists them."""
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """Path of an optimizer (``""`` for the compiled one) → name of its class."""

    @property
    def tree(self) -> dict[str, Any]:
        """The current values in nested dicts, to be written; not copied. Omits empty arrays, which Orbax refuses."""
        empty = [leaf.variable.path for leaf in self.leaves if not has_value(leaf.variable)]
        if empty:
            shown = ", ".join(map(repr, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            raise UninitialisedError(
                f"Cannot save the model: no value for {plural(len(empty), 'variable')}: {shown}. Load weights or "
                "train the model first"
            )
        # All four groups, even if empty, as in Keras; two for weights alone.
        rest = ("optimizer_variables", "metrics_variables")
        groups = (*WEIGHT_ITEMS, *rest) if any(leaf.path[0] in rest for leaf in self.leaves) else WEIGHT_ITEMS
        tree: dict[str, Any] = {group: {} for group in groups}
        for leaf in (leaf for leaf in self.leaves if 0 not in leaf.shape):
            place = tree
            for part in leaf.path[:-1]:
                place = place.setdefault(part, {})
            place[leaf.path[-1]] = value_of(leaf.variable)
        return tree

    def weights_only(self) -> StateTree:
        """Return the tree without optimizer and metrics, as ``save_weights_only`` stores it."""
        return replace(self, leaves=tuple(leaf for leaf in self.leaves if leaf.path[0] in WEIGHT_ITEMS))

    def only(self, selected: Callable[[Variable], bool]) -> StateTree:
        """Return the tree of a partial step: without the weights for which ``selected`` is false, and their slots."""
        out = {leaf.key for leaf in self.leaves if leaf.kind == "weight" and not selected(leaf.variable)}
        rest = tuple(leaf for leaf in self.leaves if _weight_of(leaf) in out)
        kept = tuple(leaf for leaf in self.leaves if _weight_of(leaf) not in out)
        return replace(self, leaves=kept, left_out=rest)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``structure.json``, the file in a step that tells what its arrays are for."""
        found = {"version": _VERSION, "leaves": [leaf.to_json() for leaf in self.leaves], "form": dict(self.settings)}
        found |= {"optimizers": dict(self.optimizers)} if any(leaf.kind == "optimizer" for leaf in self.leaves) else {}
        return found | ({"left_out": [leaf.to_json() for leaf in self.left_out]} if self.left_out else {})

    def still_describes(self, model: Any) -> bool:
        """Whether the model still has this tree's variables, in the same order, so that the next step can use it."""
        now = [id(v) for _, variables in _variables_by_group(model) for v in variables]
        return now == [id(leaf.variable) for leaf in self.leaves]


def _weight_of(leaf: StateLeaf) -> str | None:
    """Return the key of the weight that a leaf is, or whose slot it is; ``None`` for other leaves."""
    return leaf.key if leaf.kind == "weight" else leaf.role.of if leaf.kind == "slot" else None


def state_tree_of(model: Any) -> StateTree:
    """Return the tree of every variable that a training step stores; reads and computes no values."""
    roles = roles_of(model)
    counts = {
        id(one.count): one.steps for found in optimizers_by_path(model).values() for one in accumulations_in(found)
    }
    taken: set[str] = set()
    leaves = []
    for group, variables in _variables_by_group(model):
        for variable in variables:
            role = roles[id(variable)]
            # Keras assigns any entry of the group with a variable's path, so prefix other optimizers' variables.
            name = variable.path if role.optimizer is None else f"{role.optimizer}/{variable.path}"
            path = free_path(group, name, taken)
            shape, dtype = tuple(variable.shape), stored_dtype(variable).name
            leaves.append(StateLeaf(path, role, shape, dtype, variable, counts.get(id(variable))))
    kinds = {path or "": kind_of(optimizer) for path, optimizer in optimizers_by_path(model).items()}
    return StateTree(tuple(leaves), settings_of(model), optimizers=kinds)


def _variables_by_group(model: Any) -> list[tuple[str, list[Variable]]]:
    """Return (group, variables) for Keras' four groups (trainable, …); one in two groups is listed in the first."""
    others = (v for _, other in other_optimizers(model) for v in other.variables)
    optimizer = [*optimizer_variables_of(model), *others]
    groups = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": optimizer,
        "metrics_variables": getattr(model, "metrics_variables", ()),
    }
    seen: set[int] = set()
    found = []
    for group, variables in groups.items():
        found.append((group, [v for v in unique(variables) if id(v) not in seen]))
        seen.update(id(v) for v in variables)
    return found


def free_path(group: str, path: str, taken: set[str]) -> tuple[str, ...]:
    """Return a path in the tree for a variable that no other variable has, and add it to ``taken``, the paths in use.

    If ``path`` is in use, it gets a number: ``#2``, ``#3``. Orbax joins the parts of a path with dots, so it would
    write ``a/b`` and ``a.b`` to the same place. They count as one path here, too.
    """
    # `taken` has each path ("a.b.c"), and with a slash at its end each node above it ("a.b/").
    first, *rest = path.split("/")
    *start, last = path.split("/")
    # The path, then paths numbered at the end or, for conflicts higher up, at the start.
    numbered = (
        found for n in itertools.count(2) for found in ((group, *start, f"{last}#{n}"), (group, f"{first}#{n}", *rest))
    )
    for found in itertools.chain([(group, first, *rest)], numbered):
        dotted = ".".join(found)
        above = [dotted[:i] for i, letter in enumerate(dotted) if letter == "."]
        if dotted not in taken and f"{dotted}/" not in taken and not taken.intersection(above):
            break
    taken.add(dotted)
    taken.update(f"{name}/" for name in above)
    return found


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored array (leaf) of a step, as listed in ``structure.json``: its place in the step, and its role."""

    path: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    dtype: str
    accumulates: int | None = None
    """For an optimizer's count of batches: its ``gradient_accumulation_steps``; ``None`` if an older step lacks it."""

    @classmethod
    def of_json(cls, leaf: Mapping[str, Any]) -> Stored:
        """Return the leaf that an entry of ``structure.json`` describes; raise an error if the entry is not valid."""
        try:
            path, shape = tuple(leaf["path"]), tuple(leaf["shape"])
            role = Role(leaf["kind"], leaf["key"], *(leaf.get(k) for k in ("slot", "of", "name", "optimizer")))
            texts = [*path, role.kind, role.key, leaf["dtype"]]
        except (KeyError, TypeError, AttributeError) as error:
            text = f"structure.json has a leaf without path, kind, key, shape or dtype: {leaf}. Restore another step"
            raise SourceError(text) from error
        texts += [t for t in (role.slot, role.of, role.name, role.optimizer) if t is not None]
        if not all(isinstance(t, str) for t in texts) or not all(type(n) is int and n >= 0 for n in shape):
            raise SourceError(f"structure.json has a leaf with values of the wrong type: {leaf}. Restore another step")
        return cls(path, role, shape, leaf["dtype"], batches_of_update(leaf.get(_ACCUMULATES)))


@dataclass(frozen=True, slots=True)
class Pairing:
    """The leaves of a step paired with the variables of a model in which it is restored."""

    pairs: tuple[tuple[Stored, StateLeaf], ...]
    """Leaves and variables with the same role; shapes and dtypes may differ."""
    missing: tuple[StateLeaf, ...]
    """Variables of the model for which the step has no leaf."""
    unexpected: tuple[Stored, ...]
    """Leaves of the step for which the model has no variable."""
    left_out: tuple[tuple[Stored, StateLeaf], ...] = ()
    """Leaves that a partial step lists but does not store, and the variables of the model in these roles."""
    forms: Forms = field(default_factory=dict)
    stored_forms: Forms = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)

    def weight_of(self, stored: Stored) -> str:
        """Return the key of a stored slot's weight in the model: the stored key, with its prefix renamed."""
        return renamed_key(stored.role.of or "", self.rename)


def find_stored(
    model: Any, leaves: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, rename: Mapping[str, str] | None = None
) -> Pairing:
    """Pair the leaves of a step with the variables of ``model`` by role; auto-generated names are not used.

    ``leaves`` is the parsed ``structure.json``, or its ``leaves``. ``rename`` maps prefixes of stored keys to those in
    the model: with ``{"layers/gemma_backbone": ""}``, the stored step of a task fits a model that is its backbone.
    """
    listed = leaves.get("leaves") if isinstance(leaves, Mapping) else leaves
    stored = [Stored.of_json(leaf) for leaf in _listed(listed)]
    out = [Stored.of_json(leaf) for leaf in _listed(leaves.get("left_out", ()) if isinstance(leaves, Mapping) else ())]
    tree, kinds = state_tree_of(model), kinds_in(leaves)
    forms = forms_of([s.role for s in (*stored, *out)], kinds)
    own = forms_of([leaf.role for leaf in tree.leaves], {k: v for k, v in tree.optimizers.items() if k in kinds})
    by_identity = {_identity(s.role, rename or {}, forms): s for s in stored}
    left_out = {_identity(s.role, rename or {}, forms): s for s in out}
    wanted = {_identity(leaf.role, {}, own): leaf for leaf in tree.leaves}
    wanted = _by_shared_weights(_by_position(wanted, by_identity), by_identity)
    return Pairing(
        tuple((by_identity[i], leaf) for i, leaf in wanted.items() if i in by_identity),
        tuple(leaf for i, leaf in wanted.items() if i not in by_identity and i not in left_out),
        tuple(s for i, s in by_identity.items() if i not in wanted),
        tuple((left_out[i], leaf) for i, leaf in wanted.items() if i in left_out and i not in by_identity),
        own,
        forms,
        rename or {},
    )


def _by_position(wanted: dict[Identity, StateLeaf], stored: Mapping[Identity, Stored]) -> dict[Identity, StateLeaf]:
    """Return ``wanted`` with other identities for an optimizer's variables that the step lists by number only.

    Some steps only number the variables of a ``MultiOptimizer``: the identity of the fourth has ``:variables/3``. The
    fourth variable in the model then gets this identity, too, if its shape is the same.
    """
    own = [(i, leaf) for i, leaf in wanted.items() if i[0] in ("slot", "optimizer") and leaf.role.optimizer is None]
    for position, (identity, leaf) in enumerate(own):
        older = ("optimizer", f":variables/{position}", "")
        if identity not in stored and older in stored and older not in wanted and stored[older].shape == leaf.shape:
            wanted = {older if i == identity else i: found for i, found in wanted.items()}
    return wanted


def _by_shared_weights(
    wanted: dict[Identity, StateLeaf], stored: Mapping[Identity, Stored]
) -> dict[Identity, StateLeaf]:
    """Return ``wanted`` with the step's identities for the counts and rates of optimizers in a ``MultiOptimizer``.

    The identity of an optimizer's count of iterations contains the first weight that the optimizer trains. If the step
    has another first weight there, the same optimizer is found by its slots, which are for the same weights.
    """
    scalars = {s.role.key: i for i, s in stored.items() if i[0] == "optimizer"}
    found: dict[Identity, StateLeaf] = {}
    for identity, leaf in wanted.items():
        own, _, name = leaf.role.key.rpartition("/")
        if identity in stored or identity[0] != "optimizer" or leaf.role.of is None:
            found[identity] = leaf
            continue
        slots = [i for i, other in wanted.items() if owner_in(other.role) == own and i in stored]
        theirs = {owner_in(stored[i].role) for i in slots}
        other = scalars.get(f"{theirs.pop()}/{name}", identity) if len(theirs) == 1 else identity
        found[identity if other in wanted else other] = leaf
    return found


def kinds_in(structure: Any) -> dict[str, str]:
    """Return path → class of each optimizer in a step; empty for steps of older versions, which lack classes."""
    found = structure.get("optimizers", {}) if isinstance(structure, Mapping) else {}
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise SourceError(f"structure.json has no valid classes of optimizers: {str(found)[:80]}. Restore another step")
    return dict(found)


def _listed(leaves: Any) -> Iterable[Any]:
    if not isinstance(leaves, Iterable):
        raise SourceError(f"structure.json has no valid list of leaves: {str(leaves)[:80]}. Restore another step")
    return leaves


def _identity(role: Role, rename: Mapping[str, str], forms: Forms) -> Identity:
    if role.kind in ("slot", "optimizer"):
        # A slot by what it is and its weight, as its own key would keep the old name of a renamed weight.
        part = part_of(role, forms)
        of = renamed_key(role.of or "", rename)
        name = f"{role.optimizer or ''}:{meaning_of(part, kind_in(forms, role)) if role.kind == 'slot' else part}"
        return (role.kind, name, of)
    return (role.kind, "", renamed_key(role.key, rename) if role.kind in ("weight", "seed") else role.key)


def renamed_key(key: str, rename: Mapping[str, str]) -> str:
    """Replace the longest prefix of ``key`` that is in ``rename``; parts between slashes count as a whole."""
    for old in sorted(rename, key=len, reverse=True):
        if key == old or key.startswith(f"{old}/") or not old:
            rest = key[len(old) :].lstrip("/")
            return "/".join(part for part in (rename[old], rest) if part)
    return key
