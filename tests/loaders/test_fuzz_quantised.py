"""Damaged quantised folders, as the libraries wrote them: weights that can be read, or one of our errors; never more.

Headers, tensors and the configuration are damaged. What opens keeps the promises of `fuzzing`, and each of its weights
can be read: tensors that do not fit together were refused before.
"""

import functools
import json
import math
import re
import struct

from fuzzing import Format, changed, check, damaged, fuzz, put
from hypothesis import strategies as st
from transformers_cross import folders, quantised

from shardload.errors import ShardloadError
from shardload.loaders.quantised import require_known
from shardload.manifest import Extent

SEEDS = [case.name for case in quantised.CASES if case.family in ("llama", "gpt_oss", "qwen3_5_moe")]
CODES = 3
"""Bytes that opening may allocate for each byte of a small tensor that it reads: as stored, and twice as numbers."""
DTYPES = [("U8", 1), ("I8", 1), ("I32", 4), ("I64", 8), ("F16", 2), ("BF16", 2), ("F32", 4), ("F8_E4M3", 1)]
DTYPES += [("F8_E8M0", 1), ("BOOL", 1)]


@functools.cache
def fixture_of(name):
    return folders.read_family(name.partition(", ")[0], quantised.FIXTURES)[name]


def folder_of(name, tmp_path):
    """Configuration and file of a seed, written once."""
    folder = tmp_path / name
    if not folder.exists():
        folders.build(fixture_of(name), folder)
    return json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()


def opened(tmp_path, config, raw):
    """The manifest, if all of its weights can be read; `None` if it was refused."""
    (folder := tmp_path / "damaged").mkdir(exist_ok=True)
    put(folder / "config.json", json.dumps(config).encode("utf-8", "surrogatepass"))
    put(folder / "model.safetensors", raw)
    manifest = check(folder, factor=Format.JSON + CODES)
    if manifest is None:
        return None
    try:
        require_known(manifest)
    except ShardloadError as error:
        assert str(folder) in str(error)
        return None
    for tensor in manifest.tensors.values():
        if not isinstance(tensor.storage, Extent):
            rows = tensor.storage.reader.read_rows(0, tensor.rows)
            assert (rows.shape, rows.dtype) == (tensor.shape, tensor.dtype)
    return manifest


@fuzz(share=0.2, name=st.sampled_from(SEEDS), data=st.data())
def test_damaged_files(tmp_path, name, data):
    config, raw = folder_of(name, tmp_path)
    return opened(tmp_path, config, data.draw(damaged(raw, hot=8 + int.from_bytes(raw[:8], "little"))))


@fuzz(share=0.3, name=st.sampled_from(SEEDS), data=st.data())
def test_changed_settings(tmp_path, name, data):
    config, raw = folder_of(name, tmp_path)
    settings = config["quantization_config"]
    if "config_groups" in settings and data.draw(st.booleans()):
        (group, entries), *_ = settings["config_groups"].items()
        weights = data.draw(changed(entries["weights"]))
        settings = {**settings, "config_groups": {group: {**entries, "weights": weights}}}
    else:
        settings = data.draw(changed(settings))
    return opened(tmp_path, {**config, "quantization_config": settings}, raw)


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["drop", "shorten", "turn", "reshape", "retype", "bytes", "other", "empty"]),
        st.integers(0, 255),
        st.integers(0, 255),
    ),
    max_size=2,
)
"""What to do, to which tensor, and how."""


def inconsistent(tensors, edits):
    """Tensors of which one is left out, shorter, of another shape or dtype, or has bytes of its own or of another."""
    found, names = dict(tensors), sorted(name for name in tensors if "_proj" in name)
    for edit, which, how in edits:
        name = names[which % len(names)]
        dtype, shape, blob = tensors[name]
        match edit:
            case "drop":
                found.pop(name, None)
            case "shorten":
                rows = how % shape[0] if shape else 0
                found[name] = dtype, [rows, *shape[1:]], blob[: len(blob) // (shape or [1])[0] * rows]
            case "turn":
                found[name] = dtype, shape[::-1], blob
            case "reshape":
                found[name] = dtype, [1, *shape], blob
            case "retype":
                other, size = DTYPES[how % len(DTYPES)]
                found[name] = other, shape, (blob * 8)[: math.prod(shape) * size]
            case "bytes":
                found[name] = dtype, shape, bytes([how]) * len(blob)
            case "other":
                found[name] = tensors[names[how % len(names)]]
            case "empty":
                found[name] = dtype, [*shape[:-1], 0], b""
    return found


def as_file(tensors):
    header, at = {}, 0
    for name, (dtype, shape, blob) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(blob)]}
        at += len(blob)
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + b"".join(blob for *_, blob in tensors.values())


def tensors_in(raw):
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    places = {name: slice(*(start + at for at in entry["data_offsets"])) for name, entry in header.items()}
    return {name: (entry["dtype"], entry["shape"], raw[places[name]]) for name, entry in header.items()}


NOT_NEEDED = re.compile(r"bias|norm|input_(global_)?scale|input_activation|activation_scale|weight_format|rotary")
"""Tensors of a layer that are no parts of its codes, and what quantises activations."""


def is_needed(name, config):
    """Whether the weight that a tensor is a part of cannot be computed without it."""
    settings = config["quantization_config"]
    in_order = settings["quant_method"] == "gptq" and not settings.get("desc_act")
    return not NOT_NEEDED.search(name) and not (in_order and name.endswith(".g_idx"))


@fuzz(share=0.2, name=st.sampled_from(SEEDS), which=st.integers(0, 255))
def test_a_missing_tensor(tmp_path, name, which):
    config, raw = folder_of(name, tmp_path)
    tensors = tensors_in(raw)
    floats = ("F32", "F16", "BF16")
    plain = {name for name, (dtype, *_) in tensors.items() if name.endswith(".weight") and dtype in floats}
    names = sorted(name for name in tensors if "_proj" in name and name not in plain)
    gone = names[which % len(names)]
    del tensors[gone]
    found = opened(tmp_path, config, as_file(tensors))
    assert (found is None) == is_needed(gone, config), gone
    return found


@fuzz(share=0.5, name=st.sampled_from(SEEDS), edits=EDITS)
def test_inconsistent_tensors(tmp_path, name, edits):
    config, raw = folder_of(name, tmp_path)
    return opened(tmp_path, config, as_file(inconsistent(tensors_in(raw), edits)))
