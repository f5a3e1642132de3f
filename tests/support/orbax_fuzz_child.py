"""Does to each step that comes in by a line what a user would, and answers with what came of it, a line of JSON.

A process of its own: what crashes TensorStore or makes it hang has the folder that did, and its resident peak counts.
"""

import contextlib
import gc
import hashlib
import io
import json
import pathlib
import sys
import time
import traceback

import conftest  # noqa: F401 - the same devices as in the tests
import numpy as np
import orbax_seeds
import tensorstore as ts
from fuzz_child import status

import shardload
from shardload.cli import main
from shardload.errors import ShardloadError
from shardload.keras_bridge.variables import has_value, value_of
from shardload.mapping.state_tree import state_tree_of
from shardload.runs.listing import list_steps
from shardload.transfer.read_tensor import read_tensor
from shardload.verifying import verify


class Outcome(dict):
    """What came of each thing done: an error of ours, another one with its traceback, or a result."""

    def __init__(self):
        self["unexpected"] = {}
        self["ended"] = {}
        self["seconds"] = {}
        self["grown"] = {}

    def do(self, name, action):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before, started = status("VmRSS"), time.thread_time()
        try:
            found = action()
            self["ended"][name] = "done"
            return found
        except ShardloadError as error:
            self["ended"][name] = f"{type(error).__name__}: {error}"
        except Exception:
            self["ended"][name] = "unexpected"
            self["unexpected"][name] = traceback.format_exc()[-2500:]
        finally:
            self["seconds"][name] = round(time.thread_time() - started, 2)
            self["grown"][name] = status("VmHWM") - before
        return None


def hash_of(array):
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def examine(root, step, *, quick, strict=False):
    """Everything a user does with checkpoints, except changing them."""
    found = Outcome()
    manifest = found.do("inspect", lambda: shardload.inspect(step))
    found["declared"] = max((t.nbytes for t in manifest.tensors.values()), default=0) if manifest else 0
    if manifest:
        found["tensors"] = {name: facts(found, manifest, name) for name in manifest.tensors}
    verdicts = found.do("verify", lambda: verify(step))
    found["verdict"] = verdicts[0].verdict if verdicts else None
    found.do("steps", lambda: list_steps(root))
    found.do("load_weights", lambda: shardload.load_weights(MODEL, step, strict=False))
    forget()
    report = found.do("restore", lambda: shardload.restore(MODEL, root, step=int(step.name), strict=strict))
    found["restored"] = state() if report else None
    if not quick:
        found.do("plan", lambda: shardload.plan(step))
        found.do("root", lambda: shardload.inspect(root))
        found.do("latest", lambda: shardload.restore(MODEL, root, strict=False, fallback="previous"))
        for words in (["steps", str(root)], ["inspect", str(step)], ["verify", str(step), "--json"]):
            command(found, words)
    return found


def examine_remote(url):
    """What can be done with a step at an address."""
    found = Outcome()
    manifest = found.do("inspect", lambda: shardload.inspect(url))
    found["declared"] = max((t.nbytes for t in manifest.tensors.values()), default=0) if manifest else 0
    del manifest
    found.do("steps", lambda: list_steps(url))
    verdicts = found.do("verify", lambda: verify(url))
    found["verdict"] = verdicts[0].verdict if verdicts else None
    found.do("load_weights", lambda: shardload.load_weights(MODEL, url))
    forget()
    found["restored"] = state() if found.do("restore", lambda: shardload.restore(MODEL, url)) else None
    return found


def facts(found, manifest, name):
    """Shape, dtype and content of a tensor, and whether TensorStore reads the same."""
    tensor = manifest.tensors[name]
    if tensor.nbytes > 1 << 24:
        return list(tensor.shape), str(tensor.dtype), None
    value = found.do("read", lambda: read_tensor(manifest, name))
    if value is None:
        return list(tensor.shape), str(tensor.dtype), None
    wrong = value.shape != tensor.shape or value.dtype != tensor.dtype
    with contextlib.suppress(ValueError, RuntimeError, OSError, TypeError, OverflowError, NotImplementedError):
        wrong = wrong or not same(reference(manifest, name), value)
    if wrong:
        found["unexpected"][f"content of {name}"] = f"{value!r:.300} is not what TensorStore reads"
    return list(tensor.shape), str(tensor.dtype), hash_of(value)


def reference(manifest, name):
    """What Orbax would have: the array as TensorStore opens it by itself."""
    item = pathlib.Path(manifest.metadata["item"])
    stored = ".".join(manifest.metadata["tree"][name])
    is_ocdbt = (item / "manifest.ocdbt").exists()
    base = (
        {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{stored}/"} if is_ocdbt else f"file://{item}/{stored}/"
    )
    store = ts.KvStore.open(base).result()
    driver = "zarr3" if store.read("zarr.json").result().state == "value" else "zarr"
    return ts.open({"driver": driver, "kvstore": base}, open=True).result().read().result()


def same(expected, value):
    return (expected.shape, expected.dtype, expected.tobytes()) == (value.shape, value.dtype, value.tobytes())


def forget():
    """What was restored before must not pass for what is restored now."""
    for leaf in state_tree_of(MODEL).leaves:
        leaf.variable.assign(np.zeros(leaf.shape, leaf.dtype))


def state():
    values = {leaf.path: leaf.variable for leaf in state_tree_of(MODEL).leaves}
    return {"/".join(path): hash_of(np.asarray(value_of(v))) for path, v in values.items() if has_value(v)}


def command(found, words):
    """The command line; what it prints may not be a traceback or a report of a bug."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    if code not in (0, 1) or "bug in shardload" in err.getvalue() + out.getvalue():
        found["unexpected"]["shardload " + words[0]] = f"{code}: {err.getvalue()}"
    found["ended"]["shardload " + words[0]] = "done" if not code else f"told: {err.getvalue()}"


MODEL = None

if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    MODEL = orbax_seeds.model_of(seed=1)
    for line in sys.stdin:
        asked = json.loads(line)
        if "url" in asked:
            answer = examine_remote(asked["url"])
        else:
            where = pathlib.Path(asked["root"]), pathlib.Path(asked["step"])
            answer = examine(*where, quick=asked["quick"], strict=asked["strict"])
        gc.collect(1)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
