"""Run the loading functions of Keras and KerasHub through shardload: ``with shardload.fast(): …``.

    call in a program ─► Keras' own function ─► interception ─► build as Keras, without values ─► fill ─► return
                         checks, errors         keras_bridge     Keras' and KerasHub's own code   pipeline
                                                                       │ what fails or is unsupported
                                                                       └─► Keras makes the call, the report says why

So the model, its names, its seeds and all errors are Keras' own; shardload only reads the weights and places them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from shardload.accelerating import entry_calls
from shardload.accelerating.entry_calls import Filled, NotSupported
from shardload.errors import DamagedError, ShardloadError, suggests_arguments
from shardload.keras_bridge.entry_points import EntryCall, calls_to, handlers, plain_keras, rewound_on_error
from shardload.pipeline.arguments import check_backend
from shardload.reports.calls import CallReport, FastReport

_LOADS: Mapping[str, Callable[[EntryCall], Filled]] = {
    "model": entry_calls.model_call,
    "weights": entry_calls.weights_call,
    "preset": entry_calls.preset_call,
}
_NO_WEIGHTS = {
    "layer": "it has no weights",
    "legacy": "it is an HDF5 file of Keras 2 (.h5)",
}
SHOWN = 300
"""Characters of an error that the report keeps."""


@dataclass(frozen=True, slots=True)
class Accelerated:
    """Makes the calls of one `shardload.fast` block, and reports them."""

    report: FastReport

    def __call__(self, call: EntryCall) -> Any:
        """Make a call; return and raise what Keras would."""
        # Before `plain_keras`, inside of which no block is open. Blocks nest, and each reports the call.
        reports = [handler.report for handler in handlers() if isinstance(handler, Accelerated)]
        began = time.perf_counter()
        filled, why, raised = None, None, None
        try:
            # shardload itself calls Keras; without this, those calls would come back here.
            with plain_keras():
                filled, why = _attempt(call)
                return call.original() if filled is None else filled.result
        except BaseException as error:
            raised = _shown(error)
            raise
        finally:
            load = filled.report if filled else None
            ended = CallReport(
                call=call.text,
                by="keras" if why else "shardload",
                why=why,
                seconds=time.perf_counter() - began,
                read_bytes=load.bytes.read if load else None,
                error=raised,
                load=load,
            )
            for report in reports:
                report.add(ended)


def _attempt(call: EntryCall) -> tuple[Filled | None, str | None]:
    """Return the result of a call made by shardload, or why Keras is to make it.

    Raises:
        DamagedError: As Keras would load the damaged bytes.
    """
    if (load := _LOADS.get(call.kind)) is None:
        return None, _NO_WEIGHTS[call.kind]
    if keras.config.is_nnx_enabled():
        return None, "Keras uses Flax NNX's variables"
    # Keras starts with the names and seeds that it would have had without the attempt.
    try:
        with rewound_on_error():
            return load(call), None
    except DamagedError:
        raise
    except NotSupported as reason:
        return None, str(reason)
    except Exception as error:
        # User code builds models and may raise anything; if it does so again for Keras, that error is the right one.
        return None, _shown(error)


def _shown(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
    kind = type(error).__name__
    return text if isinstance(error, ShardloadError) and text else f"{kind}: {text}" if text else kind


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
