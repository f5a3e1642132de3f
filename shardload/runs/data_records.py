"""Positions of data iterators in a step: shardload/iterator.json, one record per process, or one for all if equal."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from shardload import processes
from shardload.errors import DamagedError, SourceError, SourceNotFoundError, UsageError
from shardload.keras_bridge.caller import warn_caller
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.runs.step import StepInfo
from shardload.stores.json_files import read_object
from shardload.units import is_function, plural

VERSION = 1


def iterator_record(source: Any) -> dict[str, Any]:
    """Return the position of a data iterator as JSON: from its ``get_state()``, a callable, or the value itself."""
    state = source.get_state() if hasattr(source, "get_state") else source() if is_function(source) else source
    if isinstance(state, bytes):
        return {"version": VERSION, "state_base64": base64.b64encode(state).decode()}
    try:
        held = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Cannot save the state of data_iterator: {error}. Expected bytes or JSON") from error
    # Tuples become lists and number keys become strings, which set_state might accept and misread.
    if held != state:
        raise UsageError(
            f"Cannot save the state of data_iterator: a round trip through JSON turns {_shortened(state)} into "
            f"{_shortened(held)}. Use lists instead of tuples and strings as keys, or bytes"
        )
    return {"version": VERSION, "state": held}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} …"


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the records of all processes; equal records are stored once."""
    return records[0] if all(record == records[0] for record in records) else {"processes": records}


def data_records(info: StepInfo) -> list[dict[str, Any]]:
    """Return the data records: one per process, one for all if they are equal, or none."""
    path = Path(info.path) / OWN_FOLDER / "iterator.json"
    try:
        found = read_object(path)
    except SourceNotFoundError:
        return []
    except SourceError as error:
        raise DamagedError(f"Step {info.step}: {error}") from error
    records = found.get("processes", [found])
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DamagedError(f"Step {info.step}: {path} should contain one object, or a list of them for its processes")
    for record in records:
        if "state_base64" in record:
            try:
                record["state"] = base64.b64decode(record["state_base64"], validate=True)
            except (TypeError, ValueError) as error:
                raise DamagedError(
                    f"Step {info.step}: {path} should contain the iterator's state in base64, but has "
                    f"{record['state_base64']!r:.80}"
                ) from error
    return records


def of_this_process(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return this process' record; ``None`` if each process had its own and their number has changed."""
    if len(records) == 1:
        return records[0]
    return records[processes.index()] if len(records) == processes.count() else None


def set_position(source: Any, records: list[dict[str, Any]], info: StepInfo) -> bool:
    """Set the position of a user's own source; return whether the step stores one."""
    record = of_this_process(records)
    if record is None and any("state" in one for one in records):
        warn_caller(
            f"Cannot restore the position of data_iterator: step {info.step} stores one for each of "
            f"{plural(len(records), 'process')}, but this run has {processes.count()}. The data starts where "
            "data_iterator is now"
        )
    if record is None or "state" not in record:
        return False
    # A function or a JSON value as ``data_iterator`` only gives positions.
    if hasattr(source, "set_state") or hasattr(source, "get_state"):
        check_settable(source, "data_iterator")
        source.set_state(record["state"])
    return True


def restore_iterator(source: Any, info: StepInfo) -> None:
    """Set the position of a data source to the one that a step stores; warn if it stores none for this process."""
    records = data_records(info)
    if not set_position(source, records, info) and not any("state" in one for one in records):
        warn_caller(f"Step {info.step} stores no position of a data iterator, so this one stays where it is.")


def check_settable(source: Any, argument: str) -> None:
    """Raise unless the position of a data source can be set."""
    if not hasattr(source, "set_state"):
        raise UsageError(
            f"Cannot restore the position of {argument}: {type(source).__name__} has no set_state(state). Pass an "
            "object that has one"
        )
