"""Read and write the JSON files of plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardload.errors import LayoutError, UsageError, WriteError
from shardload.stores.local import local_target
from shardload.typing import PathLike


def read_plan(path: PathLike) -> Any:
    """Return the JSON in a file.

    Raises:
        LayoutError: When there is no such file, it cannot be read, or it is not JSON.
        UsageError: When ``path`` is not a path.
    """
    file = _checked(path, to="read the plan")
    try:
        return json.loads(file.read_text())
    except FileNotFoundError as error:
        raise LayoutError(f"Cannot read the plan {str(file)!r}: there is no such file") from error
    except OSError as error:
        raise LayoutError(
            f"Cannot read the plan {str(file)!r}: {error.strerror}, expected the file that LayoutPlan.save wrote"
        ) from error
    except ValueError as error:
        raise LayoutError(f"Cannot read the plan {str(file)!r}: it is not JSON ({error})") from error


def write_plan(path: PathLike, data: Any) -> None:
    """Write a plan as JSON, and the folders that its path lacks.

    Raises:
        UsageError: When ``path`` is not a path, or a URL.
        WriteError: When the file cannot be written.
    """
    file = local_target(_checked(path, to="write the plan"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise WriteError(
            f"Cannot write the plan {str(file)!r}: {error.strerror}. Use the path of a file in a folder that can be "
            "written to"
        ) from error


def _checked(path: Any, *, to: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"Cannot {to} {path!r:.60}: expected the path of a file")
    return Path(path)
