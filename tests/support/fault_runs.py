"""Loads from an object store that fails at random: each is bit-exact, or raises one of our errors with the cause, soon.

python -m fault_runs [--n 1000] [--seed 0] [--at-once 4] [--only TEXT] [--verbose]

A seed stands for a format, a call, a kind of address and a plan of faults (`faulty_server`). Requests of different
threads may come in another order the next time, so that other requests meet these faults.
"""

import argparse
import faulthandler
import gc
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import gguf_pairs
import jax
import keras
import numpy as np
import test_load_from_stores as written
import test_load_from_urls as written_too
from faulty_server import FINAL, PASSING
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import ShardloadError
from shardload.verifying import verify

WINDOW_S = 2.0
LIMIT_S = 30.0
"""A load makes several requests after each other, each of which may be repeated for the window."""
FILES = ("safetensors_file", "weights_h5", "compressed_h5", "sharded_h5", "keras_archive", "zipped_again")
FOLDERS = ("plain_orbax", "orbax_without_ocdbt", "step")
MODELS = ("folder", "sharded", "gguf", "preset")
CALLS = {
    "load": ("keras_archive", *MODELS), "load_weights": FILES,
    "load_arrays": (*FILES, *FOLDERS, "folder", "sharded", "gguf"), "restore": ("step",),
    "verify": (*FILES, *FOLDERS, *MODELS),
}  # fmt: skip
CASES = [(call, name) for call, names in CALLS.items() for name in names]
CASES += [("restore", "step"), ("load_arrays", "step")] * 2
"""Calls and formats, in turn."""
_KEPT = ("MainThread", "event-loop-of-stores", "shardload-faults", "asyncio_")
"""Threads that may be there after a load."""
CAUSES = {
    "403": "may not be read", "expired": "may not be read|ExpiredToken", "429": "429", "500": "500", "503": "503",
    "404": "[Tt]here is no|lacks|missing|not found|does not exist|changed while the files",
    "no ranges": "ignores range|could not be read",
    "page": "web page|log in|ignores range", "replaced": "changed|took its place|damaged|do not fit",
}  # fmt: skip
"""Kind of fault → what an error says, if all faults were of this kind."""


def model(seed):
    inputs = keras.Input((256,))
    hidden = keras.layers.Dense(512, name="one")(inputs)
    built = keras.Model(inputs, keras.layers.Dense(128, name="two")(hidden))
    if seed is not None:
        rng = np.random.default_rng(seed)
        built.set_weights([rng.normal(size=v.shape).astype("float32") for v in built.weights])
    return built


def sharded_h5(folder, built):
    built.save_weights(folder / "model.weights.json", max_shard_size=6e-4)
    return folder


WRITERS = {name: getattr(written, name, None) or getattr(written_too, name) for name in (*FILES, *FOLDERS)}
WRITERS["sharded_h5"] = sharded_h5


def write_all(root, seed):
    """Each format in a folder of its own; return where each is below ``root``."""
    built, places = model(seed), {}
    for name in (*FILES, *FOLDERS):
        (root / name).mkdir(parents=True)
        places[name] = WRITERS[name](root / name, built)
    (root / "llama").mkdir()
    file, folder = gguf_pairs.write(root / "llama", "llama", "Q8_0")
    tensors = {
        name: value + np.asarray(seed, value.dtype) for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = root / "llama" / "sharded"
    plain.mkdir()
    for path in folder.iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    written.sharded_folder(plain)
    shardload.load(folder, task=False).save_to_preset(root / "llama" / "preset")
    places |= {"gguf": file, "folder": folder, "sharded": plain, "preset": root / "llama" / "preset"}
    return {name: path.relative_to(root).as_posix() for name, path in places.items()}


def called(call, source):
    """What a call returns, as bytes that may be compared; of `verify`, its verdicts."""
    if call == "verify":
        return [(verdict.verdict, verdict.problems) for verdict in verify(source)]
    if call == "load_arrays":
        arrays = shardload.load_arrays(source, written_too.rows, mesh="1x8")
        return digest((name, arrays[name]) for name in sorted(arrays))
    if call == "load":
        made = shardload.load(source, task=False, mesh="2x4")
    else:
        made = model(None)
        if call == "restore":
            shardload.restore(made, source, items="weights", mesh="2x4")
        else:
            shardload.load_weights(made, source, mesh="2x4")
    return digest((str(i), v.value) for i, v in enumerate(made.weights))


def digest(pairs):
    found = hashlib.sha256()
    for name, value in pairs:
        found.update(name.encode() + np.asarray(value).tobytes())
    return found.hexdigest()


@dataclass
class Outcome:
    seed: int
    title: str
    faults: list
    said: str
    seconds: float
    wrong: list[str] = field(default_factory=list)


class Faulty:
    """Loads from a server that fails; a context manager."""

    def __enter__(self):
        self._stack = ExitStack()
        self._before = set(threading.enumerate())  # of other tests of this process
        self.folder = folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.places = write_all(folder / "good", 1)
        write_all(folder / "other", 2)
        self.expected = {
            (call, name): [called(call, str(folder / which / self.places[name])) for which in ("good", "other")]
            for call, name in dict.fromkeys(CASES)
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "faulty_server", folder / "good", folder / "other"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip
        self._stack.callback(self._server.communicate, "")
        told = json.loads(self._server.stdout.readline())
        self.roots = {"http": told.pop("http"), "s3": "s3://bucket", "gs": "gs://bucket"}
        os.environ |= told | {"SHARDLOAD_REMOTE_TIMEOUT": str(WINDOW_S)}
        return self

    def __exit__(self, *error):
        for name in ("SHARDLOAD_REMOTE_TIMEOUT", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
            os.environ.pop(name, None)
        self._stack.close()

    def _ask(self, **what):
        self._server.stdin.write(json.dumps(what) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def title(self, seed):
        return " ".join((*CASES[seed % len(CASES)], random.Random(seed).choice(list(self.roots))))

    def run(self, seed):
        rng = random.Random(seed)
        call, name = CASES[seed % len(CASES)]
        scheme = rng.choice(list(self.roots))
        url = f"{self.roots[scheme]}/{self.places[name]}"
        plan = plan_of(rng, seed, is_verified=name == "step")
        self._ask(plan=plan | {"has_index": scheme == "http"})
        found, seconds = in_time(lambda: called(call, url))
        faults = self._ask(report=True)["faults"]
        outcome = Outcome(seed, self.title(seed), faults, text_of(found), seconds)
        outcome.wrong = list(self._judge(call, name, {kind for kind, _ in faults}, found, seconds))
        return outcome

    def _judge(self, call, name, kinds, found, seconds):
        good, other = self.expected[call, name]
        if found is None:
            yield f"it hung: {stacks()}"
        elif isinstance(found, BaseException):
            if not isinstance(found, ShardloadError):
                yield "not an error of ours: " + "".join(traceback.format_exception(found))
            if kinds <= {"late"}:
                yield "an error without a fault"
            if len(kinds) == 1 and not re.search(CAUSES.get(*kinds, ""), str(found)):
                yield "not the cause"
        elif call == "verify":
            if found != good and not kinds & set(FINAL):
                yield f"the verdict is {found}, expected {good}"
        elif found != good and not (found == other and "replaced" in kinds):
            yield "WRONG BITS"
        if seconds > LIMIT_S:
            yield f"it took {seconds:.1f} s"
        left = [thread.name for thread in threads(self._before)]
        if left:
            yield f"threads are left: {left}"


def plan_of(rng, seed, *, is_verified):
    final = [kind for kind in FINAL if is_verified or kind != "lying range"]  # nothing but digests can tell
    match rng.choice(["passing", "one kind", "one kind", "any"]):
        case "passing":
            kinds, rate, first = PASSING, rng.choice([0.1, 0.3, 0.7]), 0
        case "one kind":
            kinds, rate, first = [rng.choice([*final, *PASSING])], rng.choice([0.3, 1.0]), rng.randrange(20)
        case "any":
            kinds, rate, first = [*PASSING, *final], rng.choice([0.1, 0.4]), rng.randrange(10)
    plan = {"seed": seed, "kinds": list(kinds), "rate": rate, "first": first, "sticks": rng.random() < 0.5}
    return plan | {"pages": rng.choice([1, 5, 1000])}


def in_time(do):
    """What ``do`` returns or raises, ``None`` if it hangs; and how long it took."""
    found = []

    def run():
        try:
            found.append(do())
        except BaseException as error:
            found.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=run, name="shardload-faults", daemon=True)
    thread.start()
    thread.join(1.5 * LIMIT_S)
    return (found[0] if found else None), time.monotonic() - began


def threads(before):
    """Those that are new and still there, after some time to end."""
    for _ in range(20):
        found = [t for t in threading.enumerate() if t not in before and not t.name.startswith(_KEPT)]
        if not found:
            break
        time.sleep(0.05)
    return found


def stacks():
    """Where all threads are."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def sockets():
    """How many this process has."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except FileNotFoundError:
            continue
    return sum(link.startswith("socket:") for link in links)


def text_of(found):
    return f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else "as expected"


def given_seeds(n):
    """What the command says: which seeds to run, by default ``n``, and how."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=n)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="run each n-th seed")
    parser.add_argument("--at-once", type=int, default=1, help="so many processes, each of which has its own server")
    parser.add_argument("--only", default="", help="titles that contain this")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def run_seeds(faulty, given):
    """Run seeds one after the other, and print those that failed; return counts."""
    counts = {"runs": 0, "faults": 0, "kinds": Counter(), "ends": Counter(), "slowest_s": 0.0, "failed": []}
    for seed in range(given.seed, given.seed + given.n, given.every):
        if given.only not in faulty.title(seed):
            continue
        found = faulty.run(seed)
        kinds = Counter(kind for kind, _ in found.faults)
        counts["runs"] += 1
        counts["faults"] += sum(kinds.values())
        counts["kinds"].update(kinds)
        counts["ends"][found.said.partition(":")[0]] += 1
        counts["slowest_s"] = max(counts["slowest_s"], round(found.seconds, 1))
        if given.verbose or found.wrong:
            row = f"{seed} {found.title} {found.seconds:.1f} s {dict(kinds)}: {found.said}"
            print(row, *found.wrong, sep="\n    ", flush=True)  # noqa: T201
        counts["failed"] += [seed] if found.wrong else []
    return counts


def run_at_once(module, given):
    """Run parts of the seeds in several processes, and print the sum of their counts; return the exit code."""
    words = [sys.executable, "-m", module, "--only", given.only, *(["--verbose"] if given.verbose else [])]
    parts = [
        subprocess.Popen(
            [*words, *map(str, ("--n", given.n - part, "--seed", given.seed + part, "--every", given.at_once))],
            stdout=subprocess.PIPE, text=True,
        )
        for part in range(given.at_once)
    ]  # fmt: skip
    total = {}
    for part in parts:
        *rows, last = part.communicate()[0].splitlines() or ['{"failed": ["all of a part"]}']
        print(*rows, sep="\n", end="\n" if rows else "", flush=True)  # noqa: T201
        for name, found in json.loads(last).items():
            if isinstance(found, dict):
                total[name] = Counter(total.get(name, {})) + Counter(found)
            elif name == "slowest_s":
                total[name] = max(total.get(name, 0.0), found)
            else:
                total[name] = total.get(name, type(found)()) + found
    print(json.dumps(total))  # noqa: T201
    return max(part.returncode for part in parts)


def main():
    given = given_seeds(1000)
    if given.at_once > 1:
        return run_at_once("fault_runs", given)
    sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed
    jax.config.update("jax_num_cpu_devices", 8)
    with Faulty() as faulty:
        faulty.run(0), gc.collect()
        before = sockets()
        counts = run_seeds(faulty, given)
        gc.collect()
        for _ in range(100):  # a request that was given up is let go of when its answer ends
            if (after := sockets()) <= before + 2:
                break
            time.sleep(0.1)
    print(json.dumps(counts | {"sockets": [before, after]}))  # noqa: T201
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
