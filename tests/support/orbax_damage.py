"""Ways to damage a checkpoint's folder: its JSON, its OCDBT stores, any bytes, and which files there are.

Everything is drawn by Hypothesis, so cases are the same every time.
"""

import contextlib
import copy
import json
import os
import re
import shutil
import struct

import tensorstore as ts
from fuzzing import anything, damaged
from hypothesis import strategies as st

from shardload.errors import ShardloadError
from shardload.runs.digest_list import canonical_json, hash_of
from shardload.runs.digests import DIGESTS_FILE, Digests

DEEP = "[" * 2000 + "]" * 2000
NUMBERS = [0, -1, 1, 3, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, True]
FLOATS = [0.5, -0.0, 1e308, float("nan"), float("inf")]
TEXTS = ["", "a", "0", "-1", "\0", "../x", "/etc/passwd", "c", "/", ".", "é\u202e", "\ud800", "x" * 300, "NaN", "<f4"]
TEXTS += ["float32", "bfloat16", "|O", "<M8[s]", "int4", "zstd", "blosc", "gzip", "crc32c", "sharding_indexed", "bytes"]
CODECS = [
    {"name": "bytes"},
    {"name": "transpose", "configuration": {"order": [1, 0]}},
    {"name": "crc32c"},
    {"id": "zstd"},
]
CODECS += [{"name": "gzip", "configuration": {"level": 99}}, {"name": "zstd", "configuration": {"level": 2**70}}]
CODECS += [
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": -1},
    {"name": 5},
    {"name": "bytes", "configuration": 5},
]
WAYS = ["swap", "copy", "empty", "remove", "folder", "link", "loop", "absent", "pipe", "sparse", "file", "move", "name"]
hostile = st.one_of(
    st.sampled_from([*NUMBERS, *FLOATS, None, *TEXTS, [], {}, [[]], [[[]]], [1] * 40, [0], [-1], [2**63], *CODECS]),
    st.lists(st.sampled_from([*NUMBERS, *CODECS]), max_size=4),
    anything,
)


def places(document, found):
    """Every container in a document with each of its keys or indices."""
    for key in document if isinstance(document, dict) else range(len(document)):
        found.append((document, key))
        if isinstance(document[key], (dict, list)):
            places(document[key], found)
    return found


@st.composite
def mangled(draw, raw):
    """A JSON document with some of its values replaced, moved, repeated or taken out."""
    document = json.loads(raw)
    for _ in range(draw(st.integers(1, 3))):
        if not (found := places(document, [])):
            break
        inside, key = draw(st.sampled_from(found))
        change(draw, inside, key, found)
    text = json.dumps(document)
    if draw(st.integers(0, 9)) == 0:
        names = re.findall(r'"[^"\\]{1,30}": ', text) or ['"a": ']
        text = text.replace(
            "{", "{" + draw(st.sampled_from(names)) + draw(st.sampled_from(["1,", DEEP + ",", "1e999,"])), 1
        )
    return text.encode("utf-8", "surrogatepass")


def change(draw, inside, key, found):
    value = inside[key]
    match draw(
        st.sampled_from(["replace", "replace", "replace", "near", "wrap", "remove", "twice", "other", "rename"])
    ):
        case "replace":
            inside[key] = copy.deepcopy(draw(hostile))  # Hypothesis gives the same list again
        case "near" if isinstance(value, (int, float)):
            inside[key] = draw(
                st.sampled_from([value + 1, value - 1, value * 2, -value, value * 1e-3 if abs(value) < 1e300 else 0.5])
            )
        case "wrap":
            inside[key] = draw(st.sampled_from([[value], {"name": value}, [value, value], str(value)[:200]]))
        case "remove":
            del inside[key]
        case "twice" if isinstance(inside, list):
            inside.append(value)
        case "rename" if isinstance(inside, dict):
            inside[draw(st.sampled_from(TEXTS))] = inside.pop(key)
        case _:
            other, where = draw(st.sampled_from(found))
            inside[key] = json.loads(json.dumps(other[where]))


def hurt(draw, folder):
    """Damage something in a step's folder, once or twice; what it was."""
    done = []
    for _ in range(draw(st.integers(1, 2))):
        done.append(hurt_once(draw, folder))
        if done[-1] in ("stored", "files"):  # files then have random names, or are pipes TensorStore would wait for
            break
    return done


def hurt_once(draw, folder):
    """Damage something; which kind of damage it was."""
    files = sorted(path for path in folder.rglob("*") if is_small(path))
    stores = [path for path in files if path.name == "manifest.ocdbt"]
    nodes = [path for path in files if path in stores or path.read_bytes().startswith(b"\x0c\xdb\x20\xde")]
    jsons = [path for path in files if path.read_bytes().startswith(b"{")]
    ways = ["json"] * 5 * bool(jsons) + ["bytes", "bytes", "files"] * bool(files)
    way = draw(st.sampled_from(ways + ["stored"] * 5 * bool(stores) + ["node"] * 3 * bool(nodes) or ["nothing"]))
    match way:
        case "json":
            hurt_json(draw, draw(st.sampled_from(jsons)))
        case "stored":
            hurt_stored(draw, draw(st.sampled_from(stores)).parent)
        case "node":
            hurt_node(draw, draw(st.sampled_from(nodes)))
        case "bytes":
            path = draw(st.sampled_from(files))
            put(path, draw(damaged(path.read_bytes())))
        case "files":
            hurt_files(draw, folder, files)
    return way


def put(path, raw):
    path.unlink()
    path.write_bytes(raw)


def is_small(path):
    """Whether it is a file, and none that was made huge."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20


def hurt_json(draw, path):
    raw = path.read_bytes()
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        document = json.loads(raw)
        if path.name == "_strings.json" and "config" in document and draw(st.booleans()):  # JSON within JSON
            document["config"] = draw(mangled(document["config"])).decode("utf-8", "surrogatepass")
            raw = json.dumps(document).encode()
        else:
            raw = draw(mangled(raw))
    put(path, raw)


def hurt_stored(draw, item):
    """Metadata, chunks or names of arrays within an OCDBT store, whose checksums then are right."""
    with contextlib.suppress(ValueError, RuntimeError, OSError, RecursionError):
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
        keys = sorted(store.list().result())
        values = {key: store.read(key).result().value for key in keys}
        headers = [key for key in keys if key.endswith((b"/.zarray", b"/zarr.json"))]
        for _ in range(draw(st.integers(1, 2))):
            key = draw(st.sampled_from(headers if headers and draw(st.integers(0, 3)) else keys))
            match draw(st.sampled_from(["json", "json", "json", "bytes", "rename", "remove", "swap"])):
                case "json" if key in headers:
                    store[key] = draw(mangled(values[key]))
                case "remove":
                    store.delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
                case "rename":
                    store[key + draw(st.sampled_from([b"/0", b"\xff", b"/c/9", b"/c/00", b".", b"\0"]))] = values[key]
                case "swap":
                    store[key] = values[draw(st.sampled_from(keys))]
                case _:
                    store[key] = draw(damaged(values[key]))


def hurt_node(draw, path):
    """Bytes of a manifest or a B-tree node, with the length and checksum that such bytes should have."""
    raw = path.read_bytes()
    if path.name == "manifest.ocdbt" and draw(st.booleans()):
        with contextlib.suppress(ValueError, TypeError, OverflowError, RuntimeError, RecursionError):
            said = ts.ocdbt.dump(ts.KvStore.open(f"file://{path.parent}/").result()).result()
            put(path, ts.ocdbt.undump_manifest(json.loads(draw(mangled(json.dumps(said))))))
        return
    body = draw(damaged(raw[12:-4], hot=600))
    head = raw[:4] + struct.pack("<Q", len(body) + 16)
    put(path, head + body + struct.pack("<I", crc32c(head + body)))


def hurt_files(draw, folder, files):
    """Which files and folders there are."""
    path, other = draw(st.sampled_from(files)), draw(st.sampled_from(files))
    folders = [p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()]
    match draw(st.sampled_from(WAYS)):
        case "swap":
            a, b = path.read_bytes(), other.read_bytes()
            put(path, b)
            put(other, a)
        case "copy":
            put(path, other.read_bytes())
        case "empty":
            put(path, b"")
        case "remove":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "link" | "loop" | "absent" as way:
            path.unlink()
            path.symlink_to({"link": "/etc/hostname", "loop": path, "absent": "/nowhere"}[way])
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "sparse":
            os.truncate(path, draw(st.sampled_from([1 << 24, 1 << 40])))
        case "file" if folders:
            where = draw(st.sampled_from(folders))
            shutil.rmtree(where)
            where.write_bytes(b"{}")
        case "move" if folders:
            where = draw(st.sampled_from(folders))
            outside = folder.parent.parent / f"outside-{folder.parent.name}"
            shutil.rmtree(outside, ignore_errors=True)
            where.rename(outside)
            where.symlink_to(outside)
        case _:
            path.with_name(draw(st.sampled_from(["x\udcff", "é", "zarr.json", ".zarray", "9", "c"]))).write_bytes(b"{}")


def sign(draw, step):
    """Make digests of what is there now; some of them with entries that are no digests, or of what is not there."""
    if any(path.is_file() and path.stat().st_size > 1 << 30 for path in step.rglob("*")):
        return
    with contextlib.suppress(ShardloadError, OSError, UnicodeError, RecursionError):
        Digests.compute(step).write(step)
        path = step / DIGESTS_FILE
        if draw(st.integers(0, 9)) == 0:
            body = json.loads(draw(mangled(path.read_bytes())))
            body.pop("self", None)
            put(path, canonical_json(body | {"self": hash_of(canonical_json(body))}))


def _table():
    for byte in range(256):
        found = byte
        for _ in range(8):
            found = found >> 1 ^ (0x82F63B78 if found & 1 else 0)
        yield found


TABLE = tuple(_table())


def crc32c(raw):
    """As OCDBT has it at the end of its nodes."""
    found = 0xFFFFFFFF
    for byte in raw:
        found = TABLE[(found ^ byte) & 255] ^ found >> 8
    return found ^ 0xFFFFFFFF
