"""Use Keras in another thread: it keeps names of layers, dtype policies and distributions per thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keras.src.backend.common import global_state

T = TypeVar("T")


class InThread(Generic[T]):
    """A function that runs in a thread of its own, which shares the settings and name counters of this thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._result: T
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        # The attributes of a threading.local are those of the thread that reads them. Counters of names are dicts,
        # so that both threads count on in the same one.
        state = dict(vars(global_state.GLOBAL_STATE_TRACKER))
        settings = dict(vars(global_state.GLOBAL_SETTINGS_TRACKER))

        def run() -> None:
            vars(global_state.GLOBAL_STATE_TRACKER).update(state)
            vars(global_state.GLOBAL_SETTINGS_TRACKER).update(settings)
            try:
                self._result = context.run(function)
            except BaseException as error:  # raised again in `result`
                self._error = error

        # A daemon: if the load fails meanwhile, Python can exit without waiting for the function.
        self._thread = threading.Thread(target=run, name="shardload-text", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for the function; return its result, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
