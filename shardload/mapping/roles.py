"""Names for the variables of a model and its optimizers that are the same in any process, and what slots contain.

A *slot* is an optimizer's variable for one weight, such as a momentum. The names, by `Role.kind`:

    weight     layers/dense_1/vars/0             as in ``.weights.h5``: class names, numbered by position
               layers/dense_1/vars/lora_kernel_a      by attribute, if its layer's hook stores it changed (LoRA)
    seed       layers/dropout/seed_generators/0
    slot       momentums of layers/dense_1/vars/0, inner_optimizer/momentums of …
    optimizer  iteration, learning_rate, inner_optimizer/dynamic_scale
               inner_optimizers/1/Adam/iteration      of the second optimizer in a MultiOptimizer
               optimizers/d_optimizer/iteration       of an optimizer other than the compiled one (a GAN's)
    metric     0/total                            position of the metric, name of its variable

The state of one optimizer can be restored into another if slots contain the same quantity:

    Adam          momentums of dense/kernel   ─►  first moment of dense/kernel    ◄─   AdamW
    RMSprop       momentums of dense/kernel   ─►  a quantity of RMSprop only: it contains the learning rate

Slots in attributes of the same name may differ: SGD's momentum contains the learning rate, Adam's is a mean of
gradients. A step therefore stores the class of each optimizer. For steps without the class, only the names of
attributes are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardload.keras_bridge import Variable
from shardload.keras_bridge.model_state import other_optimizers, seeds_of, variables_of, weights_optimized
from shardload.keras_bridge.saving import saved_objects, stored_by_hook, stored_variables
from shardload.keras_bridge.variables import numbered

_INNER = "inner_optimizers/"
"""How keys of a ``MultiOptimizer`` begin; then come position and class: ``inner_optimizers/1/Adam/iteration``."""
_NOT_SLOTS = frozenset({"_variables", "_trainable_variables"})
_SHORT = {"iterations": "iteration"}
"""Attribute of an optimizer → name in keys, where they differ: Keras calls the variable itself ``iteration``."""
AVERAGE = "model_variables_moving_average"
"""The attribute of an optimizer with the moving averages of the weights (``use_ema``)."""
RATE = "learning_rate"
WRAPPER = "wrapper/"
"""How names of a ``LossScaleOptimizer``'s own attributes begin here, unlike those of the optimizer that it wraps."""
_ADAM = {"momentums": "first moment", "velocities": "second moment", "velocity_hats": "largest second moment"}
_OWN: Mapping[str, str] = {}
_SHARED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("Adam", "AdamW", "Nadam", "Lamb"), _ADAM),
    "Lion": {"momentums": "first moment"},
    "RMSprop": {"velocities": "second moment"},
    **dict.fromkeys(("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Muon", "SGD", "ScheduleFreeAdamW"), _OWN),
}
"""Class of optimizer in Keras → attribute → quantity in its slots, if several classes have slots of that quantity."""
SLOT_KINDS = frozenset(_SHARED)
_BY_SUFFIX = {
    "average": AVERAGE,
    "gradient_accumulator": "accumulated_gradients",
    "momentum": "momentums",
    "velocity": "velocities",
    "velocity_hat": "velocity_hats",
}
_SCALARS = ("iteration", RATE, "step_counter", "dynamic_scale")
_OF_EVERY_CLASS = {AVERAGE, "accumulated_gradients"}
_MAY_BEGIN_LATER = {*_OF_EVERY_CLASS, "velocity_hats"}
"""Attributes whose slots may begin as new in a restored optimizer: its count of iterations does not matter for them."""
_OF_OPTIONS: Mapping[str, frozenset[str]] = {
    "RMSprop": frozenset({"momentums", "average_gradients"}),
    "SGD": frozenset({"momentums"}),
}
"""Class → attributes with slots only if an option is set (``momentum=``); these slots may begin as new at any time."""
_WRAPPED = "inner_optimizer/"
_POSITION = re.compile(rf"^{_INNER}\d+/")


@dataclass(frozen=True, slots=True)
class Role:
    """What a variable is for in its model: the name by which a step stores and finds it."""

    kind: str
    """What the variable is: ``weight``, ``seed``, ``slot``, ``optimizer`` (a count, a rate) or ``metric``."""
    key: str
    """Name that is the same in any process, such as ``layers/dense/vars/0``; unique among the roles of its kind."""
    slot: str | None = None
    """For a slot: the attribute of the optimizer that contains it, such as ``momentums``."""
    of: str | None = None
    """Key of the weight that a slot is for; for counts and rates in a ``MultiOptimizer``, of their first weight."""
    name: str | None = None
    """For a variable of a metric: the metric's name."""
    optimizer: str | None = None
    """For a variable of an optimizer: the optimizer's path in the model; ``None`` for the compiled one."""


def roles_of(model: Any) -> dict[int, Role]:
    """Return ``id(variable)`` → role for every variable of ``model`` that a step stores, its optimizers' included."""
    roles = _weights(model)
    keys = {i: role.key for i, role in roles.items()}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        roles |= optimizer_roles(optimizer, keys)
    for path, other in other_optimizers(model):
        found = optimizer_roles(other, keys, f"optimizers/{path}/")
        roles |= {i: replace(role, optimizer=path) for i, role in found.items()}
    return roles | _metrics(model)


def _weights(model: Any) -> dict[int, Role]:
    # The first name of a variable counts: by its layer's hook, by attribute, by position in the layer, in the model.
    roles: dict[int, Role] = {}
    for path, saveable in saved_objects(model):
        prefix = f"{path}/" if path else ""
        stored = stored_by_hook(saveable) if stored_variables(saveable) else {}
        for key, variable in stored.items():
            roles.setdefault(id(variable), Role("weight", f"{prefix}vars/{key}"))
        for position, variable in enumerate(stored_variables(saveable)):
            attributes = (name.lstrip("_") for name, value in vars(saveable).items() if value is variable)
            name = next(attributes, "") or f"+{position}"
            roles.setdefault(id(variable), Role("weight", f"{prefix}vars/{name}"))
        for position, seed in enumerate(seeds_of(saveable)):
            roles.setdefault(id(seed), Role("seed", f"{prefix}seed_generators/{position}"))
    for position, variable in enumerate(variables_of(model)):
        roles.setdefault(id(variable), Role("weight", f"variables/{position}"))
    return roles


def optimizer_roles(optimizer: Any, weights: dict[int, str], prefix: str = "") -> dict[int, Role]:
    """Return ``id(variable)`` → role for an optimizer's variables; ``weights`` has the key of each weight by ``id``."""
    roles: dict[int, Role] = {}
    own = {id(v) for v in optimizer.variables}
    for attribute, value in vars(optimizer).items():
        name = attribute.lstrip("_")
        # A wrapped optimizer gets a prefix if its wrapper has variables, as LossScaleOptimizer has. Steps of a wrapper
        # without any (TensorParallelOptimizer) fit the plain optimizer, and the other way round.
        if hasattr(value, "apply_gradients"):
            adds_own = own != {id(v) for v in value.variables}
            roles |= optimizer_roles(value, weights, f"{prefix}{name}/" if adds_own else prefix)
        elif isinstance(value, list) and any(hasattr(one, "apply_gradients") for one in value):
            roles |= _of_several(value, weights, f"{prefix}{_INNER}")
        # An attribute may contain variables of others, such as the weights, so only the optimizer's own count.
        elif attribute not in _NOT_SLOTS:
            for variable, role in _attribute_roles(optimizer, value, f"{prefix}{_SHORT.get(name, name)}", weights):
                if id(variable) in own:
                    roles.setdefault(id(variable), role)
    for position, variable in enumerate(optimizer.variables):
        roles.setdefault(id(variable), Role("optimizer", f"{prefix}variables/{position}"))
    return roles


def owner_in(role: Role) -> str | None:
    """Return which optimizer of a ``MultiOptimizer`` has a slot (``inner_optimizers/1/Adam``), else ``None``."""
    return None if role.slot is None or _INNER not in role.slot else role.slot.rpartition("/")[0]


def _of_several(optimizers: Sequence[Any], weights: dict[int, str], prefix: str) -> dict[int, Role]:
    """Return ``id(variable)`` → role for the optimizers in a ``MultiOptimizer``, each of which trains some weights."""
    roles: dict[int, Role] = {}
    for position, optimizer in enumerate(optimizers):
        first = next((weights.get(id(weight)) for weight in weights_optimized(optimizer)), None)
        # By class too: the momentum of SGD is another quantity than Adam's.
        found = optimizer_roles(optimizer, weights, f"{prefix}{position}/{type(optimizer).__name__}/")
        roles |= {i: replace(role, of=role.of or first) for i, role in found.items()}
    return roles


def _attribute_roles(optimizer: Any, value: Any, name: str, weights: dict[int, str]) -> Iterator[tuple[Variable, Role]]:
    """Yield (variable, role) for an optimizer's attribute: a single variable, or a list with one for every weight."""
    if not isinstance(value, (list, tuple, dict)):
        yield value, Role("optimizer", name)
        return
    optimized = weights_optimized(optimizer)
    are_slots = not isinstance(value, dict) and len(value) == len(optimized)
    for position, variable in value.items() if isinstance(value, dict) else enumerate(value):
        of = weights.get(id(optimized[position])) if are_slots else None
        if of is None:
            yield variable, Role("optimizer", f"{name}/{position}")
        else:
            yield variable, Role("slot", f"{name}/{of}", slot=name, of=of)


def _metrics(model: Any) -> dict[int, Role]:
    roles: dict[int, Role] = {}
    for position, metric in enumerate(getattr(model, "metrics", ())):
        for name, variable in _numbered(metric.variables):
            roles.setdefault(id(variable), Role("metric", f"{position}/{name}", name=str(metric.name)))
    for name, variable in _numbered(getattr(model, "metrics_variables", ())):
        roles.setdefault(id(variable), Role("metric", f"variables/{name}"))
    return roles


def _numbered(variables: Sequence[Variable]) -> Iterator[tuple[str, Variable]]:
    return zip(numbered(v.name for v in variables), variables, strict=True)


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """The class of an optimizer, and whether it is wrapped: both decide whether its state fits another optimizer."""

    kind: str | None = None
    """Name of the optimizer's class in Keras; ``""`` if the class is not Keras' own, ``None`` if it is not known."""
    is_wrapped: bool = False
    """Whether a ``LossScaleOptimizer`` wraps it: its keys begin with ``inner_optimizer/``; others are the wrapper's."""


Forms = Mapping[str | None, OptimizerForm]
"""Path of an optimizer in a model (``None`` for the compiled one) → its class, and whether it is wrapped."""


def forms_of(roles: Iterable[Role], kinds: Mapping[str, str]) -> Forms:
    """Return the form (class, wrapped or not) of each optimizer that has ``roles``; ``kinds`` is path → class."""
    found: dict[str | None, OptimizerForm] = {}
    for role in roles:
        if role.kind in ("slot", "optimizer"):
            before = found.get(role.optimizer, OptimizerForm(kinds.get(role.optimizer or "")))
            is_wrapped = before.is_wrapped or _name(role).startswith(_WRAPPED)
            found[role.optimizer] = OptimizerForm(before.kind, is_wrapped)
    return found


def kind_in(forms: Forms, role: Role) -> str | None:
    """Return the name of the class of the optimizer that a variable belongs to; ``None`` if it is not known."""
    return forms.get(role.optimizer, OptimizerForm()).kind


def part_of(role: Role, forms: Forms) -> str:
    """Return the optimizer's attribute that contains a variable: ``momentums``, ``inner_optimizers/Adam/momentums``."""
    name, form = _name(role), forms.get(role.optimizer, OptimizerForm())
    # The wrapper has a count and a rate of its own, which Keras does not use.
    if form.is_wrapped and not name.startswith(_WRAPPED):
        return f"{WRAPPER}{name}"
    name = name.removeprefix(_WRAPPED)
    # The weights of an optimizer tell which of several it is, if it has any; its position may change.
    return name if role.of is None else _POSITION.sub(_INNER, name)


def meaning_of(part: str, kind: str | None) -> str:
    """Return the quantity in an attribute's slots, ``first moment``: optimizers can exchange slots if it is equal."""
    if not kind or part in _OF_EVERY_CLASS:
        return part
    return _SHARED.get(kind, _OWN).get(part, f"{kind} {part}")


def part_of_name(name: str) -> str:
    """Return the attribute that contains an optimizer's variable, by name: ``velocities`` for ``kernel_velocity``."""
    found = (part for suffix, part in _BY_SUFFIX.items() if name.endswith(f"_{suffix}"))
    return name if name in _SCALARS else next(found, name)


def is_scalar(part: str) -> bool:
    """Whether an optimizer's attribute is a single number, such as ``iteration``, and does not contain slots."""
    return part in _SCALARS


def kind_of_name(name: str) -> str | None:
    """Return the class of an optimizer by the name that Keras gave it: ``AdamW`` for ``adam_w_1``; else ``None``."""
    plain = name.rstrip("0123456789").replace("_", "")
    return next((kind for kind in SLOT_KINDS if kind.lower() == plain), None)


def is_core(part: str, kind: str | None) -> bool:
    """Whether iterations must not be restored without the slots in ``part`` (Adam's velocities): updates go wrong."""
    own = part.removeprefix(_INNER).partition("/")[0] if part.startswith(_INNER) else kind
    return attribute_of(part) not in _MAY_BEGIN_LATER | _OF_OPTIONS.get(own or "", frozenset())


def attribute_of(part: str) -> str:
    """Return an attribute without the optimizer it is in: ``momentums`` for ``inner_optimizers/Adam/momentums``."""
    return part.rpartition("/")[2] if part.startswith(_INNER) else part


def _name(role: Role) -> str:
    prefix = "" if role.optimizer is None else f"optimizers/{role.optimizer}/"
    return (role.slot or role.key).removeprefix(prefix)
