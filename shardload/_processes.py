"""What the processes of one `jax.distributed` run tell each other, through its coordination service.

Collectives over devices would have to take turns with those of training. The service's key-value store (JAX has it in
every such run, and Orbax uses it too) does not, so a thread in the background may use it at any time.

    together    every process does its part and says what came of it ─► process 0 puts the words together
                ─► every process gets them all, or raises what failed anywhere

A `Channel` numbers what is done together, so all processes must do it in the same order. In a run of one process
nothing is sent at all.

`jax.distributed` has no public door to the store: this is the only module that takes the private one.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
from jax._src import distributed as _distributed

from shardload import errors
from shardload._heartbeat import Heartbeat
from shardload.errors import ProcessLostError, SaveError, ShardloadError

T = TypeVar("T")

WAIT_MS = 1000
"""After so long without an answer the heartbeat is asked whether there still is somebody to wait for."""


def count() -> int:
    """How many processes take part."""
    return int(jax.process_count())


def index() -> int:
    """Which of them this is; 0 makes folders and publishes."""
    return int(jax.process_index())


def is_first() -> bool:
    """Whether this is the process that makes folders and publishes; the only one is."""
    return index() == 0


def is_distributed() -> bool:
    """Whether `jax.distributed` was set up, if only with one process."""
    return bool(jax.distributed.is_initialized())


@functools.cache
def heartbeat() -> Heartbeat:
    """The heartbeat of this process, which begins with the first call."""
    made = Heartbeat(_client(), index=index())
    made.start()
    return made


class Channel:
    """A line of things done together, in the same order on every process."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        """Open the next line: every process opens its channels in the same order."""
        self._name = f"shardload/channel/{next(Channel._numbers)}"
        self._number = 0

    def together(self, do: Callable[[], T]) -> list[T]:
        """Do something on every process, and wait until all have.

        Args:
            do: The part of this process; what it returns must be JSON.

        Returns:
            What it returned on each process, in their order.

        Raises:
            ProcessLostError: When a process has ended or went silent.
            ShardloadError: Of the class that was raised where it failed first; on that process, the very error.
        """
        if count() == 1:
            return [do()]
        failure: BaseException | None = None
        try:
            word: dict[str, Any] = {"value": do()}
        except BaseException as error:  # the others must hear of Ctrl-C as well
            failure = error
            word = {"error": str(error), "kind": type(error).__name__, "errno": getattr(error, "errno", None)}
        said = self._exchange(json.dumps(word))
        if failure is not None:
            raise failure
        for process, heard in enumerate(said):
            if "error" in heard:
                _raise_from_elsewhere(process, heard)
        return [heard["value"] for heard in said]

    def first(self, do: Callable[[], T]) -> T:
        """Do something on process 0 only; every process gets its JSON, or its failure."""
        return self.together(do if is_first() else lambda: None)[0]  # type: ignore[return-value]

    def _exchange(self, word: str) -> list[dict[str, Any]]:
        beat, client = heartbeat(), _client()
        base = f"{self._name}/{self._number}"
        try:
            client.key_value_set(f"{base}/word/{index()}", word)
            if not is_first():
                self._number += 1
                return list(json.loads(_heard(client, f"{base}/all", beat, of=0)))
            words = [json.loads(_heard(client, f"{base}/word/{i}", beat, of=i)) for i in range(count())]
            client.key_value_set(f"{base}/all", json.dumps(words))
            if self._number:  # whoever gave this word has read the answer before it
                client.key_value_delete(f"{self._name}/{self._number - 1}")
        except jax.errors.JaxRuntimeError as error:
            raise ProcessLostError(
                "Process 0, which holds the coordination service of this run, cannot be reached, most likely as it has "
                f"ended: {error}. Steps saved before are untouched; start all processes again"
            ) from error
        self._number += 1
        return words


def _heard(client: Any, key: str, beat: Heartbeat, *, of: int) -> str:
    while True:
        try:
            return str(client.blocking_key_value_get(key, WAIT_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        beat.check(of)


def _raise_from_elsewhere(process: int, heard: dict[str, Any]) -> NoReturn:
    kind = getattr(errors, heard["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, ShardloadError)
    text = heard["error"] if known else f"{heard['kind']}: {heard['error']}"
    made = (kind if known and kind is not None else SaveError)(f"On process {process}: {text}")
    if heard["errno"] is not None and isinstance(made, OSError):
        made.errno = heard["errno"]
    raise made


def _client() -> Any:
    client = _distributed.global_state.client
    if client is None:
        raise ProcessLostError(
            "Several processes take part, but jax.distributed was not set up by jax.distributed.initialize(), so they "
            "cannot tell each other anything"
        )
    return client
