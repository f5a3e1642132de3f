"""Write fixtures of quantised folders with the libraries themselves, from `quantised.CASES`.

    .venv-torch/bin/python -m transformers_cross.quantise OUT [--only TEXT]

A plain folder is saved as in `generate`, and quantised. Codes and scales are kept as bytes, all else is drawn from
names; of the weights that the library makes of them, dtypes and digests are kept.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformers_cross import folders, generate, quantised, quantisers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = parser.parse_args()
    assert {case.variant for case in quantised.CASES} == set(quantisers.QUANTISERS)
    wanted = [case for case in quantised.CASES if chosen.only in case.name]
    out, failed = chosen.out / quantised.FIXTURES.name, 0
    for family in sorted({case.family for case in wanted}):
        fixtures = folders.read_family(family, out) if (out / f"{family}.json.gz").exists() else {}
        for case in (case for case in wanted if case.family == family):
            try:
                fixtures[case.name] = fixture(case)
            except Exception:
                failed += 1
                fixtures.pop(case.name, None)
                print(f"FAILED {case.name}\n{traceback.format_exc(limit=-6)}", file=sys.stderr)
        folders.write_family(family, fixtures, out)
    print(f"{len(wanted) - failed} of {len(wanted)} quantised folders written")
    sys.exit(failed > 0)


def fixture(case: Any) -> dict[str, Any]:
    """All that is kept of one quantised folder."""
    torch.manual_seed(0)
    package, quantise = quantisers.QUANTISERS[case.variant]
    scratch = Path(tempfile.mkdtemp(prefix="transformers-cross-"))
    try:
        plain = folders.build(generate.save(case, scratch / "saved"), scratch / "plain")
        meant = quantise(plain, scratch / "out")
        files, stored = _stored(scratch / "out")
        return {
            "written_by": quantisers.written_by(package),
            "json": {"config.json": json.loads((scratch / "out" / "config.json").read_text())},
            "files": files,
            "stored": stored,
            "weights": {name: quantised.digest(_array(value)) for name, value in sorted(meant.items())},
        }
    finally:
        shutil.rmtree(scratch)


def _stored(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The tensors of each file, described, and the bytes of those that are not drawn from their names."""
    files: dict[str, dict[str, str]] = {}
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        files[path.name] = {}
        for name, (dtype, shape, blob) in generate.read(path).items():
            files[path.name][name] = folders.describe(dtype, shape)
            drawn = dtype in folders.weights.FLOATS or dtype == "BF16"
            values = folders.weights.values(name, tuple(shape)) if drawn else None
            if values is None or folders.weights.to_bytes(values, dtype) != blob:
                stored[name] = base64.b64encode(blob).decode()
    return files, stored


def _array(value: torch.Tensor) -> np.ndarray:
    """The same bits, as NumPy has them; bfloat16 as float32, which holds it exactly."""
    value = value.detach().cpu().contiguous()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


if __name__ == "__main__":
    main()
