"""Run the loading functions of Keras and KerasHub through shardload: ``with shardload.fast(): …``.

    call in a program ─► Keras' own function ─► interception ─► build as Keras, without values ─► fill ─► return
                         checks, errors         keras_bridge     Keras' and KerasHub's own code   pipeline
                                                                       │ what fails or is unsupported
                                                                       └─► Keras makes the call, the report says why

So the model, its names, its seeds and all errors are Keras' own; shardload only reads the weights and places them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardload.accelerating.attempt import Accelerated
from shardload.errors import suggests_arguments
from shardload.keras_bridge.entry_points import calls_to
from shardload.pipeline.arguments import check_backend
from shardload.reports.calls import FastReport

__all__ = ["FastReport", "fast"]


@suggests_arguments
@contextmanager
def fast() -> Iterator[FastReport]:
    """Make Keras and KerasHub load through shardload inside the block; the program stays as it is.

    ``from_preset`` of KerasHub's models, ``model.load_weights``, ``keras.saving.load_model`` and
    ``keras.models.load_model`` keep their arguments, return values and errors, and use the distribution that is set in
    Keras. What shardload does not support, or cannot load, goes to Keras, and the report says why.

    The block affects the code that runs in it, including tasks and threads that copy its context
    (``asyncio.to_thread``); other threads see plain Keras. Blocks nest: a call appears in the report of each.

    Yields:
        The report, which grows with each call.

    Raises:
        BackendError: When Keras does not run on JAX.
        DamagedError: From a call that loads a training step whose bytes differ from the saved ones; Keras would load
            them.
    """
    check_backend()
    report = FastReport()
    with calls_to(Accelerated(report)):
        yield report
