"""Write fixtures with PyTorch and transformers, from `cases`: the only module here that needs them.

    .venv-torch/bin/python -m transformers_cross.generate OUT [--only TEXT]

Each case is saved by ``save_pretrained``, edited as the case says, given the weights of `weights`, and loaded back by
``from_pretrained``: what that answers in float32 is the reference. Cases for the other version of transformers are left
alone, so that both can write into one folder, one after the other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from transformers_cross import edits, folders, inputs
from transformers_cross.cases import CASES, Case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
VERSION = int(transformers.__version__.partition(".")[0])
BASE_OUTPUTS = (
    "last_hidden_state", "pooler_output", "encoder_last_hidden_state", "logits_per_image", "logits_per_text",
    "pred_masks", "pred_boxes", "pred_logits", "presence_logits", "semantic_seg",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = parser.parse_args()
    wanted = [case for case in CASES if case.writer == VERSION and chosen.only in case.name]
    failed = 0
    for family in sorted({case.family for case in wanted}):
        fixtures = folders.read_family(family, chosen.out) if (chosen.out / f"{family}.json.gz").exists() else {}
        for case in (case for case in wanted if case.family == family):
            try:
                fixtures[case.name] = fixture(case)
            except Exception:
                failed += 1
                fixtures.pop(case.name, None)
                print(f"FAILED {case.name}\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
        folders.write_family(family, fixtures, chosen.out)
    print(f"{len(wanted) - failed} of {len(wanted)} written by transformers {transformers.__version__}")
    sys.exit(failed > 0)


def fixture(case: Case) -> dict[str, Any]:
    """All that is kept of one case."""
    torch.manual_seed(0)
    scratch = Path(tempfile.mkdtemp(prefix="transformers-cross-"))
    try:
        saved = save(case, scratch / "saved")
        for edit in case.edits:
            saved = edits.EDITS[edit](saved)
        made = {
            "written_by": f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}",
            "class": case.cls,
            **saved,
        }
        if case.reference:
            made |= reference(case, made, scratch / "rebuilt")
        return {key: value for key, value in made.items() if value or key in ("json", "files")}
    finally:
        shutil.rmtree(scratch)


def save(case: Case, folder: Path) -> dict[str, Any]:
    """What ``save_pretrained`` writes, without the values of weights."""
    cls = getattr(transformers, case.cls)
    model = cls(transformers.AutoConfig.for_model(case.family, **case.config)).to(DTYPES[case.dtype])
    randomise(model)
    # By their last part: transformers 5.23 saves one of ESM's with a star in the middle of its name.
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    buffers -= {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    model.save_pretrained(folder, max_shard_size="40KB" if case.sharded else "5GB")
    files: dict[str, dict[str, str]] = {}
    copies, exact, seen = {}, {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        files[path.name] = {}
        for name, (dtype, shape, blob) in read(path).items():
            files[path.name][name] = folders.describe(dtype, shape)
            if dtype in folders.weights.INTEGERS or name.rpartition(".")[2] in buffers:
                exact[name] = decode(blob, dtype)
            elif len(blob) > 8 and (first := seen.setdefault(blob, name)) != name:
                copies[name] = first
    jsons = {"config.json": json.loads((folder / "config.json").read_text())}
    return {"json": jsons, "files": files, "copies": copies, "exact": exact}


def randomise(model: torch.nn.Module) -> None:
    """No two weights alike, so that the same bytes under two names are one tensor."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))


def read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    rest = data[8 + size :]
    return {name: (t["dtype"], t["shape"], rest[slice(*t["data_offsets"])]) for name, t in header.items()}


def decode(blob: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":
        return (np.frombuffer(blob, "<u2").astype("<u4") << 16).view("<f4").tolist()
    kind = {**folders.weights.FLOATS, **folders.weights.INTEGERS}[dtype]
    return [x if kind != "bool" else int(x) for x in np.frombuffer(blob, kind).tolist()]


def reference(case: Case, made: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What PyTorch computes from the very folder that the fixture describes."""
    folders.build(made, folder)
    cls = getattr(transformers, case.cls)
    options = {} if case.family in NO_CHOICE_OF_ATTENTION else {"attn_implementation": "eager"}
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    model.eval()
    fed = inputs.of(case, made["json"]["config.json"])
    tensors = {name: torch.tensor(value) for name, value in inputs.expand(fed).items()}
    with torch.no_grad():
        found = answers(model, tensors, case.ask)
    said = {key: sorted(map(str, info[f"{key}_keys"])) for key in ("missing", "unexpected")}
    return {
        "inputs": fed,
        "outputs": {name: folders.sample(value) for name, value in found.items()},
        "pytorch": {key: names for key, names in said.items() if names},
    }


NO_CHOICE_OF_ATTENTION: set[str] = set()


def answers(model: Any, tensors: dict[str, torch.Tensor], ask: str) -> dict[str, np.ndarray]:
    """Outputs of the model itself and of the base model in it, as transformers names them."""
    found: dict[str, np.ndarray] = {}
    if ask == "patches and text":  # KerasHub's Qwen 3.5 has no positions in three dimensions outside of `generate`
        patches = {name: tensors.pop(name) for name in ("pixel_values", "image_grid_thw")}
        seen = model.model.visual(patches["pixel_values"], grid_thw=patches["image_grid_thw"])
        found["image_features"] = getattr(seen, "pooler_output", seen).numpy()
    base = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    base = base if isinstance(base, transformers.PreTrainedModel) and type(base).__name__.endswith("Model") else model
    for answer in (base(**tensors), model(**tensors)):
        for name in (*BASE_OUTPUTS, "logits"):
            value = getattr(answer, name, None)
            if isinstance(value, torch.Tensor):
                found.setdefault(name, value.float().numpy())
    if ask == "queries and text":  # KerasHub leaves out what stands for the image
        found = {"logits": found["logits"][:, 4:]}
    if type(model).__name__.startswith("PaliGemma"):  # and the vocabulary's end from the image's token on
        found = {"logits": found["logits"][:, 16:, :64]}
    assert found and all(np.isfinite(value).all() for value in found.values()), "no finite output"
    return found


if __name__ == "__main__":
    main()
