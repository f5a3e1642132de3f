"""Try one call with shardload; if that fails, let Keras make it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from shardload.accelerating import presets, saved
from shardload.accelerating.filling import Filled, NotSupported
from shardload.errors import DamagedError, ShardloadError
from shardload.keras_bridge.entry_points import EntryCall, handlers, plain_keras, rewound_on_error
from shardload.reports.calls import CallReport, FastReport

_LOADS: Mapping[str, Callable[[EntryCall], Filled]] = {
    "model": saved.model_call,
    "weights": saved.weights_call,
    "preset": presets.preset_call,
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
