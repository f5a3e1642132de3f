"""Look at folders, try them, and write the table of the documentation.

    python -m transformers_cross table                       write the documentation's table from expected.toml
    python -m transformers_cross try [TEXT] [--kerashub]     load folders whose name contains TEXT, a line of JSON each
    python -m transformers_cross build "CASE" FOLDER         write one folder, to look at it
    python -m transformers_cross show "CASE"                 print one fixture

From ``tests``, or with it on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# KerasHub imports TensorFlow where it finds it, and nothing here needs it.
sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]
sys.modules.setdefault("tensorflow_text", None)  # type: ignore[arg-type]

from transformers_cross import folders, running, table  # noqa: E402
from transformers_cross.cases import CASES, Case  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("table")
    trying = commands.add_parser("try")
    trying.add_argument("text", nargs="?", default="")
    trying.add_argument("--kerashub", action="store_true")
    building = commands.add_parser("build")
    building.add_argument("case")
    building.add_argument("folder", type=Path)
    commands.add_parser("show").add_argument("case")
    for command in (trying, building):
        command.add_argument("--fixtures", type=Path, default=folders.FIXTURES)
    chosen = parser.parse_args()
    match chosen.command:
        case "table":
            table.PAGE.write_text(table.page(table.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        case "try":
            for case in (case for case in CASES if chosen.text in case.name):
                print(json.dumps(attempt(case, chosen.fixtures, kerashub=chosen.kerashub)), flush=True)
        case "build":
            folders.build(_fixture(chosen.case, chosen.fixtures), chosen.folder)
        case "show":
            print(json.dumps(_fixture(chosen.case, folders.FIXTURES), indent=2))


def attempt(case: Case, fixtures: Path, *, kerashub: bool) -> dict[str, object]:
    """What becomes of one folder."""
    fixture = folders.read_family(case.family, fixtures)[case.name]
    with tempfile.TemporaryDirectory(prefix="transformers-cross-") as scratch:
        folder = folders.build(fixture, Path(scratch) / "folder")
        tries: dict[str, Callable[[], running.Outcome]] = {"ours": lambda: running.ours(fixture, folder, case.mesh)}
        if kerashub:
            tries["kerashub"] = lambda: running.kerashubs(fixture, folder)
        return {"case": case.name, **{who: _outcome(attempt) for who, attempt in tries.items()}}


def _outcome(attempt: Callable[[], running.Outcome]) -> list[object]:
    try:
        found = attempt()
    except Exception:  # whatever it is, the next folder is tried
        return ["crash", traceback.format_exc(limit=-3)]
    return [found.kind, float(f"{found.error:.2g}"), found.detail]


def _fixture(name: str, fixtures: Path) -> dict[str, object]:
    family = name.partition(", ")[0]
    found: dict[str, object] = folders.read_family(family, fixtures)[name]
    return found


if __name__ == "__main__":
    main()
