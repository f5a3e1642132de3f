"""Use Keras in another thread: it keeps names of layers, dtype policies and distributions per thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keras.src.backend.common import global_state

T = TypeVar("T")


class InThread(Generic[T]):
    """A function that runs in a new thread with the settings and name counters of this one.

    Args:
        function: Called without arguments, at once.
        name: The thread's name in debuggers and profiles.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._result: T
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        # A threading.local has other attributes in each thread, so copy them here and set them there. Counters of
        # names are dicts, which are shared by reference: both threads count in the same one.
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
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for the function; return its result, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
