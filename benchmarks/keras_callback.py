"""What fails with keras.callbacks.OrbaxCheckpoint and does not with ours: a table, each cell really run.

    python -m benchmarks.keras_callback [--only TEXT] [--side keras|shardload] [--json]

Keras' checkpoints come back through `model.load_weights` and `keras.saving.load_model`, ours through
`shardload.restore` and `shardload.load`. The exit code is 1 if a case fails with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell of the table."""

    case: str
    model: str
    side: str
    failure: str | None
    """Why it fails; ``None``: it passes."""


def sides() -> dict[str, Any]:
    """Keras' and ours."""
    import keras

    import shardload
    from benchmarks.keras_callback_cases import Side
    from shardload.callbacks import OrbaxCheckpoint

    return {
        "keras": Side(
            "keras",
            lambda folder, **named: keras.callbacks.OrbaxCheckpoint(str(folder), **named),
            _load_weights,
            lambda folder: keras.saving.load_model(str(folder)),
            _generator,
        ),
        "shardload": Side(
            "shardload",
            OrbaxCheckpoint,
            shardload.restore,
            shardload.load,
            _resumable,
        ),
    }


def _load_weights(model: Any, folder: Path) -> None:
    """As Keras would have it, and with the slots there already, which it does not make."""
    if getattr(model, "optimizer", None) is not None:
        model.optimizer.build(model.trainable_variables)
    model.load_weights(str(folder))


def _resumable(dataset: Any) -> Any:
    from shardload.data import resumable

    return resumable(dataset)


def _generator(dataset: Any) -> Iterator[Any]:
    """Keras' ``fit`` takes no Grain dataset; a generator over it is what is left."""
    yield from iter(dataset)


def cells(only: str, chosen: Sequence[str]) -> Iterator[Verdict]:
    """Run every case that contains ``only`` in its title or model, for each side."""
    from benchmarks.keras_callback_cases import RUN, STATE
    from benchmarks.keras_callback_models import BUILDERS, WAYS, Made

    todo = [(title, case, Made(kind, way)) for title, case in STATE.items() for kind in BUILDERS for way in WAYS]
    todo += [(title, case, Made(kind)) for title, case in RUN.items() for kind in BUILDERS]
    for title, case, made in todo:
        if only in f"{title} {made.name}":
            for side in (sides()[name] for name in chosen):
                yield Verdict(title, made.name, side.name, failure_of(case, side, made))


def failure_of(case: Any, side: Any, made: Any) -> str | None:
    """Why a case fails, in one line."""
    import keras

    with tempfile.TemporaryDirectory(prefix="shardload-bench-", ignore_cleanup_errors=True) as folder:
        keras.backend.clear_session()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case(side, made, Path(folder))
        except Exception as error:
            if "--trace" in sys.argv:
                traceback.print_exc()
            kind = type(error).__name__
            first = str(error).strip().split("\n", 1)[0]
            return first if kind == "Failed" else f"{kind}: {first}"
    return None


def child(side: str, name: str, folder: Path) -> int:
    """In a process with one device: restore and compare."""
    import numpy as np

    from benchmarks.keras_callback_cases import Failed, share_equal, values
    from benchmarks.keras_callback_models import Made

    model = Made.of_name(name).model(seed=2)
    sides()[side].restore(model, folder / "run")
    with np.load(folder / "expected.npz") as stored:
        expected = [stored[key] for key in stored.files]
    share = share_equal(expected, values(model.weights))
    if share != f"{len(expected)} of {len(expected)}":
        raise Failed(f"Error: {share} weights restored")
    return 0


def show(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Print a line for each cell as soon as it is known; returns them all."""
    print(f"{'case':<38}{'model':<18}{'side':<11}verdict")
    found = []
    for v in verdicts:
        found.append(v)
        told = "passes" if v.failure is None else f"fails: {v.failure[:110]}"
        print(f"{v.case:<38}{v.model:<18}{v.side:<11}{told}", flush=True)
    for side in sorted({v.side for v in found}):
        cells = [v for v in found if v.side == side]
        print(f"{side}: {sum(v.failure is not None for v in cells)} of {len(cells)} fail")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--side", action="append", choices=["keras", "shardload"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", action="store_true", help="print the whole error of each failure")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ["KERAS_BACKEND"] = "jax"
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]  # keras-hub would import it
    sys.modules.setdefault("tensorflow_text", None)  # type: ignore[arg-type]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if options.child else 8)
    if options.child:
        side, name, folder = options.child
        return child(side, name, Path(folder))
    verdicts = cells(options.only, options.side or ["keras", "shardload"])
    if options.json:
        found = list(verdicts)
        print(json.dumps([asdict(v) for v in found]))
    else:
        found = show(verdicts)
    return int(any(v.failure is not None and v.side == "shardload" for v in found))


if __name__ == "__main__":
    sys.exit(main())
