"""Decide which optimizer state of a step is restored into a model, and which state of the model begins as new.

    stored ─► pairs      in step and model, with the same role (`roles`)
              missing    only in the model: begins as in a new optimizer; moving averages begin with the weights
              left       only in the step: not used

A slot is an optimizer's variable for one weight, such as a momentum. Iterations and learning rate are restored only
together with the slots. If step or model lacks slots without which the count of iterations would be wrong (Adam's
velocities, in a step of SGD), the model's optimizer stays unchanged. Under ``strict``, any state that is not restored
is an error, except for the learning rate of an optimizer with a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardload.keras_bridge.model_state import optimizers_by_path
from shardload.keras_bridge.optimizer_slots import owner_of, start_of
from shardload.manifest import Manifest, Tensor
from shardload.mapping.roles import AVERAGE, RATE, WRAPPER, Forms, attribute_of, is_core, kind_in, owner_in, part_of
from shardload.mapping.state_tree import Pairing, StateLeaf, Stored, state_tree_of
from shardload.mapping.variable_map import Begun
from shardload.reports.facts import Note, NoteKind
from shardload.transfer.read_tensor import read_tensor
from shardload.units import plural

OPTIMIZER_KINDS = frozenset({"slot", "optimizer"})
UNTRAINED = "the step was saved before training and has no optimizer slots; the model's are unchanged"
"""Note in reports: the model's slots are unchanged, because the step's optimizer had none yet."""


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor of a saved step for which the model has no variable, so that it is reported as not used."""

    tensor: str
    kind: str
    optimizer: str | None = None
    part: str = ""
    is_core: bool = False
    weight: str | None = None
    """If the tensor is a slot of a weight that the model's optimizer now updates by another rule: the weight's key.

    This is so if the optimizer has the same class as in the step, but no such slot for this weight. Example: Muon had
    left the weight to Adam, which needs velocities, and now updates it itself. All slots of the weight then begin as
    new. ``None`` for other tensors: they keep no other slot from being restored.
    """

    @classmethod
    def of(cls, stored: Stored, tensor: str, found: Pairing) -> Left:
        """Describe ``stored``, a leaf that no variable of the model is paired with; its tensor is called ``tensor``."""
        role, forms = stored.role, found.stored_forms
        if role.kind not in OPTIMIZER_KINDS:
            return cls(tensor, role.kind, role.optimizer)
        part, kind = part_of(role, forms), kind_in(forms, role)
        core = role.kind == "slot" and is_core(part, kind)
        # Within one class, a weight with fewer slots is updated in another way; another class may need fewer.
        is_same = kind is not None and kind == kind_in(found.forms, role)
        return cls(tensor, role.kind, role.optimizer, part, core, found.weight_of(stored) if core and is_same else None)


@dataclass(frozen=True, slots=True)
class Paired:
    """Tensors of a step paired with the variables of a model that they belong to; what is unpaired on either side."""

    pairs: tuple[tuple[Tensor, StateLeaf], ...]
    missing: tuple[StateLeaf, ...]
    left: tuple[Left, ...]
    forms: Forms
    left_out: tuple[tuple[Stored, StateLeaf], ...] = ()
    """(leaf in the step, variable of the model) for weights and slots that a partial step lists, but does not store."""
    dropped: tuple[tuple[Tensor, StateLeaf], ...] = ()
    """Pairs that are not used: state of an optimizer or weight that is not restored from the step; it is skipped."""
    begun: tuple[StateLeaf, ...] = ()
    """Variables that begin as in a new optimizer, although the rest of their optimizer is restored."""

    def part(self, leaf: StateLeaf) -> str:
        """Return the name of the optimizer's attribute that contains a variable, such as ``momentums``."""
        return part_of(leaf.role, self.forms)

    def is_core(self, leaf: StateLeaf) -> bool:
        """Whether the variable is a slot (Adam's velocity) without which restored iterations make updates wrong."""
        return leaf.kind == "slot" and is_core(self.part(leaf), kind_in(self.forms, leaf.role))


def resolve_optimizers(
    model: Any, paired: Paired, manifest: Manifest, *, every: bool
) -> tuple[Paired, tuple[str, ...]]:
    """Decide, for each optimizer of a model, which of its variables are restored from a step.

    ``paired`` has the tensors of the step, paired with variables. Returns a copy without the pairs that are not
    restored, and notes for reports. ``every``: weights are restored too, not the optimizer alone. If the step was saved
    before training, it has no slots: with ``every``, the compiled optimizer keeps its own; else they count as missing.
    """
    noted: list[str] = []
    if every and is_untrained(paired, manifest, None):
        kept = _without(paired, None)
        noted += [UNTRAINED] if len(kept.missing) < len(paired.missing) else []
        paired = kept
    elif not is_untrained(paired, manifest, None):
        paired = _continue(model, paired, None, noted)
    both = {leaf.role.optimizer for _, leaf in paired.pairs}
    in_step = {found.optimizer for found in paired.left} | both
    in_model = {leaf.role.optimizer for leaf in paired.missing} | both
    for name in sorted(filter(None, in_step | in_model)):
        if name not in in_step:
            lacking = f"the step has no state of the optimizer {name}: the model's is unchanged"
            # That of a compiled submodel is not used by the outer `fit`.
            noted.append(lacking if _is_of_inner_model(name) else Note(lacking, NoteKind.OPTIMIZER_UNCHANGED))
            paired = _without(paired, name)
        elif name not in in_model:
            noted.append(f"the model has no optimizer {name}; its state in the step is not used")
            paired = _skipping(paired, name)
        elif is_untrained(paired, manifest, name):
            kept = _without(paired, name)
            if len(kept.missing) < len(paired.missing):
                noted.append(f"the optimizer {name}: {UNTRAINED}")
            paired = kept
        elif _is_of_inner_model(name) and name in {one.role.optimizer for one in paired.missing} | {
            found.optimizer for found in paired.left
        }:
            noted.append(f"the step has another kind of state for the optimizer {name}; the model's is unchanged")
            paired = _skipping(_without(_without_pairs(paired, name), name), name)
        else:
            paired = _continue(model, paired, name, noted)
    return paired, tuple(noted)


def begun_variables(model: Any, leaves: Iterable[StateLeaf], forms: Forms) -> tuple[Begun, ...]:
    """Return optimizer variables that begin as in a new optimizer (``leaves``), each with its initial value."""
    if not (wanted := list(leaves)):
        return ()
    optimizers = optimizers_by_path(model)
    weights = {leaf.key: leaf.variable for leaf in state_tree_of(model).leaves if leaf.kind == "weight"}
    found = []
    for leaf in wanted:
        part = attribute_of(part_of(leaf.role, forms))
        owner = owner_of(optimizers[leaf.role.optimizer], leaf.variable)
        start = start_of(owner, part, weights.get(leaf.role.of or ""))
        found.append(Begun(leaf.variable, part, start))
    return tuple(found)


def takes_state(paired: Paired, optimizer: str | None) -> bool:
    """Whether an optimizer of the model can continue with the state that the step stores for it.

    It can if, for at least one weight, the step has all the slots that updates depend on (Adam's velocities). It also
    can if neither step nor model has such slots.
    """
    incomplete = _incomplete(paired, optimizer)
    core = [leaf for _, leaf in paired.pairs if leaf.role.optimizer == optimizer and paired.is_core(leaf)]
    if any(leaf.role.of not in incomplete for leaf in core):
        return True
    unused = any(found.optimizer == optimizer and found.is_core for found in paired.left)
    lacking = any(leaf.role.optimizer == optimizer and paired.is_core(leaf) for leaf in paired.missing)
    return not (core or lacking or unused)


def _incomplete(paired: Paired, optimizer: str | None) -> set[str | None]:
    """Return the keys of the weights for which step and model have some slots in common, but not all.

    The slots of a weight only work together (Adam's momentum needs its velocity), so it gets none from the step.
    """
    lacking = {leaf.role.of for leaf in paired.missing if leaf.role.optimizer == optimizer and paired.is_core(leaf)}
    differing = lacking | {found.weight for found in paired.left if found.optimizer == optimizer}
    return differing & {leaf.role.of for _, leaf in paired.pairs if leaf.role.optimizer == optimizer and leaf.role.of}


def _continue(model: Any, paired: Paired, name: str | None, noted: list[str]) -> Paired:
    """Decide which slots of the optimizer ``name`` are restored: all, some or none; add notes on them to ``noted``."""
    if not any(leaf.role.optimizer == name and leaf.kind in OPTIMIZER_KINDS for _, leaf in paired.pairs):
        return paired
    paired = _with_own_rate(paired, name, noted)
    of_it = [leaf for leaf in paired.missing if leaf.role.optimizer == name and leaf.kind in OPTIMIZER_KINDS]
    unused = [found for found in paired.left if found.optimizer == name and found.kind in OPTIMIZER_KINDS]
    which = "the optimizer" if name is None else f"the optimizer {name}"
    # One without slots yet cannot continue with those of the step.
    is_built = name not in (optimizers := optimizers_by_path(model)) or optimizers[name].built
    if not (is_built and takes_state(paired, name)):
        lacking = _listed(attribute_of(paired.part(leaf)) for leaf in of_it if paired.is_core(leaf))
        slots = _listed(found.part for found in unused if found.kind == "slot")
        why = f"the step lacks its {lacking or 'slots'}"
        if slots:
            why = f"the step has {slots} of another optimizer, and lacks its {lacking or 'slots'}"
        noted.append(
            f"{which} does not continue with the stored state, nor with its iterations and learning rate: {why}"
        )
        return _without_pairs(paired, name)
    about = []
    if parts := list(dict.fromkeys(attribute_of(paired.part(leaf)) for leaf in of_it)):
        scale = "the scale of the loss (LossScaleOptimizer)"
        new = _listed(scale if part.startswith(WRAPPER) else part for part in parts if part != AVERAGE)
        texts = [f"as in a new optimizer: {new}"] if new else []
        texts += ["with the weights as they are now: the moving averages (use_ema)"] if AVERAGE in parts else []
        not_stored = f"Not stored, so they begin {'; '.join(texts)}"
        about.append(f"{which} continues with what is stored of it. {not_stored}")
    continuing = _beginning_whole(replace(paired, begun=(*paired.begun, *of_it)), name, about)
    own = [pair for pair in continuing.pairs if pair[1].role.optimizer == name and pair[1].kind == "slot"]
    reshaped = tuple((tensor, leaf) for tensor, leaf in own if tensor.shape != leaf.shape)
    begins = [*continuing.begun[len(paired.begun) :], *(leaf for _, leaf in reshaped)]
    begun = begun_variables(model, begins, paired.forms)
    if unknown := _listed(one.attribute for one in begun if one.start is None and not one.attribute.endswith(RATE)):
        noted.append(
            f"{which} does not continue with the stored state: it does not say what a new optimizer has in {unknown}. "
            "Give its class a method start_of_slot(attribute) that returns that number"
        )
        # Those of another shape are refused under `strict`.
        unchanged = _without_pairs(paired, name)
        return replace(unchanged, pairs=(*unchanged.pairs, *reshaped))
    noted += about
    return continuing


def _beginning_whole(paired: Paired, name: str | None, noted: list[str]) -> Paired:
    """Let all slots of a weight begin as new if the step lacks one of them: a momentum of Adam needs its velocity."""
    own = [pair for pair in paired.pairs if pair[1].role.optimizer == name and pair[1].kind == "slot"]
    reshaped = {leaf.role.of for tensor, leaf in own if paired.is_core(leaf) and tensor.shape != leaf.shape}
    incomplete = _incomplete(paired, name) | reshaped
    # Which of several optimizers the step has no iterations of.
    lacking = (leaf.role for leaf in paired.missing if leaf.role.optimizer == name and leaf.role.of is not None)
    without_count = {role.key.rpartition("/")[0] for role in lacking if role.key.endswith("/iteration")}
    uncounted = {leaf.role.of for _, leaf in own if owner_in(leaf.role) in without_count} - incomplete
    if incomplete:
        weights = plural(len(incomplete), "weight")
        noted.append(f"step and model have other slots for {weights}: these begin as in a new optimizer")
    if uncounted:
        weights = plural(len(uncounted), "weight")
        noted.append(f"the step has no iterations for the optimizer of {weights}: its slots begin as in a new one")
    # Pairs of different shapes stay, as they are refused under `strict`.
    begins = incomplete | uncounted
    whole = [(tensor, leaf) for tensor, leaf in own if leaf.role.of in begins and tensor.shape == leaf.shape]
    pairs = tuple(pair for pair in paired.pairs if pair not in whole)
    begun = (*paired.begun, *(leaf for _, leaf in whole))
    return replace(paired, pairs=pairs, dropped=(*paired.dropped, *whole), begun=begun)


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(parts))


def _with_own_rate(paired: Paired, name: str | None, noted: list[str]) -> Paired:
    """Do not restore a learning rate if step or model has none: an optimizer with a schedule has no variable for it."""
    stored = [found for found in paired.left if found.optimizer == name and attribute_of(found.part) == RATE]
    own = [leaf for leaf in paired.missing if leaf.role.optimizer == name and attribute_of(paired.part(leaf)) == RATE]
    if stored and not own:
        noted.append("the stored learning rate is not used: the optimizer of the model has a schedule")
    if own and not stored:
        noted.append("no learning rate is stored, as there was a schedule: the learning rate of the model is unchanged")
    left = tuple(replace(found, kind="") if found in stored and not own else found for found in paired.left)
    missing = tuple(leaf for leaf in paired.missing if leaf not in own or stored)
    return replace(paired, left=left, missing=missing)


def _without(paired: Paired, optimizer: str | None) -> Paired:
    """Return a copy of ``paired`` in which no variable of an optimizer counts as missing, as they keep their values."""
    missing = (m for m in paired.missing if m.kind not in OPTIMIZER_KINDS or m.role.optimizer != optimizer)
    return replace(paired, missing=tuple(missing))


def _without_pairs(paired: Paired, optimizer: str | None) -> Paired:
    """Return a copy of ``paired`` without the pairs of an optimizer, whose state in the model then stays unchanged."""
    own = [p for p in paired.pairs if p[1].role.optimizer == optimizer and p[1].kind in OPTIMIZER_KINDS]
    pairs = tuple(pair for pair in paired.pairs if pair not in own)
    return replace(paired, pairs=pairs, dropped=(*paired.dropped, *own))


def _skipping(paired: Paired, optimizer: str | None) -> Paired:
    """Return a copy of ``paired`` in which an optimizer's leftover tensors are skipped; else they may be an error."""
    # An empty kind belongs to no item.
    return replace(paired, left=tuple(replace(f, kind="") if f.optimizer == optimizer else f for f in paired.left))


def _is_of_inner_model(optimizer: str) -> bool:
    """Whether a path is that of a compiled submodel's optimizer (``gan/optimizer``), unused by the outer ``fit``."""
    return optimizer.endswith("/optimizer")


def is_untrained(paired: Paired, manifest: Manifest, optimizer: str | None) -> bool:
    """Whether a step's optimizer was saved before it ever trained: its iterations are zero, and it has no slots yet."""
    pairs = [(tensor, leaf) for tensor, leaf in paired.pairs if leaf.role.optimizer == optimizer]
    kinds = [leaf.kind for _, leaf in pairs] + [found.kind for found in paired.left if found.optimizer == optimizer]
    of_optimizer = [(tensor, leaf) for tensor, leaf in pairs if leaf.kind == "optimizer"]
    counts = [tensor.name for tensor, leaf in of_optimizer if leaf.key.rpartition("/")[2] == "iteration"]
    return "slot" not in kinds and bool(counts) and not any(read_tensor(manifest, name).any() for name in counts)
