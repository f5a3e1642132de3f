"""Steps without Orbax or JAX: a few files that look like one, for tests of what does not care about their content."""

import json
import random
from pathlib import Path

from shardload.runs.digests import Digests
from shardload.runs.publish import Staging

MIB = 1 << 20


def fill(folder: Path, *, step: int = 0, n_bytes: int = 2 * MIB + 5, **record) -> None:
    """Write files like those of a step into ``folder``, all but the digests."""
    data = folder / "pytree" / "d"
    data.mkdir(parents=True)
    (data / "big").write_bytes(random.Random(step).randbytes(n_bytes))
    (data / "empty").touch()
    (folder / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {}}')
    (folder / "shardload").mkdir()
    (folder / "shardload" / "step.json").write_text(json.dumps({"step": step, "saved_unix_s": 1e9 + step, **record}))


def save_step(root: Path, step: int, **options) -> Path:
    """A published step."""
    staging = Staging.begin(root, step)
    fill(staging.path, step=step, **options)
    Digests.compute(staging.path).write(staging.path)
    return staging.publish()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def flip(path, *, offset=0, bit=0):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
