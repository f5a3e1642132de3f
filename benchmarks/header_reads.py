"""What the second and later processes of a load do to get the headers of a checkpoint that process 0 has read.

`open_source` on a Hugging Face folder with many shards, whose values take no room on the disk: as a process alone opens
it, and from the notes of another process, in turn. Reported are seconds, files opened, and the characters of the notes.

    python -m benchmarks.header_reads [--shards 191] [--tensors 1137] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shardload.resolve.opening import open_source
from shardload.stores.header_reads import noting, replaying
from shardload.stores.local import LocalStore


def write_folder(folder: Path, shards: int, tensors: int) -> None:
    """Write shards with the headers of a large model; each tensor is 16 MB of a hole in the file."""
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, Any] = {}
        for number in range(shard, tensors, shards):
            start = 16_777_216 * len(header)
            entry = {"dtype": "BF16", "shape": [4096, 2048], "data_offsets": [start, start + 16_777_216]}
            header[f"model.layers.{number // 9}.self_attn.part_{number % 9}.weight"] = entry
        weight_map |= dict.fromkeys(header, name)
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 16_777_216 * len(header))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def main() -> int:
    """Measure, and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shards", type=int, default=191)
    parser.add_argument("--tensors", type=int, default=1137)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    opened: list[str] = []
    original = LocalStore.open

    def counted(self: LocalStore, key: str) -> Any:
        opened.append(key)
        return original(self, key)

    LocalStore.open = counted  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {"alone": [], "from notes": []}
    files = dict.fromkeys(seconds, 0)
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), given.shards, given.tensors)
        with noting() as notes:
            manifest = open_source(name, None).manifest
        packed = notes.pack(manifest.location) or ""
        for way in list(seconds) * given.rounds:
            opened.clear()
            began = time.perf_counter()
            if way == "alone":
                open_source(name, None)
            else:
                with replaying(packed):
                    open_source(name, None)
            seconds[way].append(time.perf_counter() - began)
            files[way] = sum(Path(key).exists() for key in opened)
    medians = {way: round(statistics.median(found), 4) for way, found in seconds.items()}
    result = {"shards": given.shards, "tensors": given.tensors, "characters": len(packed), "files": files, "s": medians}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
