"""Check that the processes of a run agree about a call, its arguments, and the initial values of variables."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from jax.sharding import Sharding

from shardload import processes
from shardload.errors import DisagreementError, UninitialisedError

_T = TypeVar("_T")

Facts = dict[str, str]
"""Facts that all processes should agree about: name → value as text, for example an argument's name and value."""


class Meetings(Protocol):
    """What `require` needs of a `JointCall` or `Exchanges`: the methods by which processes exchange results."""

    def together(self, do: Callable[[], _T], what: str) -> list[_T]:
        """Run ``do`` on every process and return all results; see `JointCall.together`."""
        ...

    def first(self, do: Callable[[], _T], what: str) -> _T:
        """Run ``do`` on process 0 only, and return its result on every process; see `JointCall.first`."""
        ...


class Exchanges:
    """The exchanges of a channel as `Meetings`, for calls that are not joint calls, such as saves in the background."""

    def __init__(self, channel: processes.Channel) -> None:
        self._channel = channel

    def together(self, do: Callable[[], _T], what: str) -> list[_T]:
        """Run ``do`` on every process and return all results."""
        return self._channel.together(do)

    def first(self, do: Callable[[], _T], what: str) -> _T:
        """Run ``do`` on process 0 only, and return its result on every process."""
        return self._channel.first(do)


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that must be the same on all processes, such as the arguments of a call they make together."""

    what: str
    """What the thing is called in the error "the processes disagree about …", for example "the arguments"."""
    facts: Callable[[], Facts]
    fix: str
    """What a user should do about a difference: the last sentence of the error message."""
    titles: Callable[[], Facts] = dict
    """Returns the names that error messages show for facts: a dict from a fact's name to a clearer one. Facts that are
    not in it keep their names. It is called on process 0 only, so all processes show the same names."""


def call_topics(function: str, arguments: Mapping[str, Any]) -> list[Topic]:
    """Return what processes compare as they begin a call together: its function's name, and its arguments as given."""
    return [
        Topic("the call", lambda: {"function": repr(function)}, "Make the same calls in the same order on all of them"),
        Topic("the arguments", lambda: _written(arguments), "Pass the same on every process"),
    ]


def require(joint: Meetings, found: Sequence[Topic], *, value: _T | None = None) -> list[_T]:
    """Compare the facts of these topics on all processes; if they differ, all processes raise the first difference.

    Return the ``value`` of each process, in process order: JSON that they exchange in the same meeting.
    """
    facts = [topic.facts() for topic in found]
    # One meeting for all topics, with digests: the facts, a line per tensor, follow only where digests differ.
    mine: list[Any] = [value, *map(facts_digest, facts)]
    values, *of_each = zip(*joint.together(lambda: mine, f"the comparison of {found[0].what}"), strict=True)
    for topic, own, digests in zip(found, facts, of_each, strict=True):
        if len(set(digests)) > 1:
            _raise_difference(joint, topic, own)
    return list(values)


def _raise_difference(joint: Meetings, topic: Topic, mine: Facts) -> NoReturn:
    # All processes come here together, as all compared the same digests.
    first, titles = joint.first(lambda: (mine, topic.titles()), f"what process 0 has of {topic.what}")
    differing = next((key for key in first | mine if first.get(key) != mine.get(key)), None)
    found = None if differing is None else (differing, first.get(differing, "none"), mine.get(differing, "none"))
    differences = joint.together(lambda: found, f"what differs of {topic.what}")
    key, wanted, _ = next(one for one in differences if one is not None)
    others = [f"process {i} has {one[2]}" for i, one in enumerate(differences) if one is not None and one[0] == key]
    raise DisagreementError(
        f"Cannot make this call together: the processes disagree about {topic.what}. {titles.get(key, key)}: process "
        f"0 has {wanted}, {', '.join(others[:8])}{' …' if len(others) > 8 else ''}. {topic.fix}"
    )


def facts_digest(facts: Facts) -> str:
    """Return a short digest of facts, which processes exchange instead of the facts: equal only for equal facts."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _written(arguments: Mapping[str, Any]) -> Facts:
    found: Facts = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found |= {f"{name}[{key!r}]": _as_text(item) for key, item in sorted(value.items(), key=str)}
        elif value is not None:
            found[name] = _as_text(value)
    return found


def _as_text(value: Any) -> str:
    """Format an argument's value as text that is equal on every process; an object becomes the name of its type."""
    match value:
        case None | str():
            return repr(value)
        # Before int, which bool is a subclass of.
        case bool() | np.bool_():
            return repr(bool(value))
        case int() | np.integer():
            return repr(int(value))
        # Sorted, as a set is in another order in each process.
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(sorted(map(_as_text, value)))}]"
    return type(value).__name__


def require_agreement(values: Iterable[Any], path: str, sharding: Sharding) -> None:
    """Raise unless all processes give a variable the same initial value; all of them call this, in the same order.

    ``values`` are the initial value, or the inputs it is computed from. The processes exchange digests of them through
    the key-value store. Those with devices in ``sharding`` take part. (JAX's ``device_put`` compares values, too, but
    on the devices: a process that raises could then not exit, as its devices wait for those of the others.)
    """
    members = tuple(sorted({d.process_index for d in sharding.device_set}))
    digest = hashlib.sha256()
    for value in values:
        array = np.asarray(value)
        # Bytes, not values: NaN differs from itself, and dtypes and shapes must agree, too.
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    channel = _channel(members, processes.call.name)
    if len(set(channel.together(digest.hexdigest))) > 1:
        raise UninitialisedError(
            f"The initial value of {path!r}, which is not in the checkpoint, differs from process to process, most "
            "likely because each draws its own random seed. Before building the model, call "
            "keras.utils.set_random_seed(n) with the same n on every process, or keras.distribution.initialize(), "
            "which does so"
        )


@functools.cache
def _channel(members: tuple[int, ...], call: str) -> processes.Channel:
    """Return a channel for `require_agreement` in one joint call: a failed call may leave an exchange incomplete."""
    return processes.Channel("-".join(("initial", *map(str, members), call)), members=members)
