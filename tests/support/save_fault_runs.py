"""Saves to a bucket that fails at random, or whose process is killed: each step is complete, or not there.

python -m save_fault_runs [--n 400] [--seed 0] [--at-once 4] [--only TEXT] [--verbose]

A seed stands for a call of `save_fault_child`, a kind of address, and a plan of faults (`faulty_server`). While the
process saves, the bucket is listed through a door at which nothing fails; after it, everything is read there, and a run
without faults goes on.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import gguf_pairs
import jax
import numpy as np
import warm_start
from bucket_server import BucketServer
from fault_runs import digest as digest_of
from fault_runs import given_seeds, run_at_once, run_seeds
from faulty_server import WRITE_FINAL, WRITE_PASSING, WriteFaults
from process_runs import told
from safetensors.numpy import load_file, save_file
from save_fault_child import TARGETS, digest, loss_of, model

import shardload
from shardload.errors import ShardloadError
from shardload.runs.listing import steps_of_run
from shardload.runs.ownership import OWNER_FILE

WINDOW_S = 4.0
HERE = Path(__file__).parent
SCHEMES = ("s3", "gs")
LIMIT_S = 120.0
"""A run makes several saves, each of which may fail after the window."""
STEPS = ("loop", "alone", "fit")
CASES = [
    ("loop", ""), ("fit", ""), ("alone", ""), ("loop", ""), ("save_as", "weights"), ("convert", "folder"), ("loop", ""),
    ("fit", ""), ("save_as", "shards"), ("convert", "step"), ("convert", "weights"),
]  # fmt: skip
"""Calls, and what they write, in turn."""
CAUSES = {
    "403": "403|AccessDenied", "expired": "ExpiredToken", "429": "429", "500": "500", "503": "503",
    "page": "web page|Header missing", "timed out": "RequestTimeout",
}  # fmt: skip
"""Kind of fault → what an error says, if all faults were of this kind."""


def rows(name, shape):
    return jax.sharding.PartitionSpec()


def read(url):
    """All arrays of a checkpoint, as a digest."""
    arrays = shardload.load_arrays(url, rows, mesh="1x1")
    return digest_of((name, arrays[name]) for name in sorted(arrays))


def sources(root):
    """Two versions of a Hugging Face folder, for `convert`."""
    (root / "made").mkdir(parents=True)
    _, folder = gguf_pairs.write(root / "made", "llama", "Q8_0")
    for version in (1, 2):
        (root / str(version)).mkdir()
        for path in folder.iterdir():
            (root / str(version) / path.name).write_bytes(path.read_bytes())
        tensors = {n: v + np.asarray(version, v.dtype) for n, v in load_file(folder / "model.safetensors").items()}
        save_file(tensors, root / str(version) / "model.safetensors", metadata={"format": "pt"})


def plan_of(rng, seed):
    kinds, rate, first, kill = WRITE_PASSING, rng.choice([0.05, 0.2, 0.5]), rng.choice([0, 0, rng.randrange(80)]), None
    match rng.choice(["passing", "one kind", "any", "kill", "kill"]):
        case "one kind":
            kinds, rate = [rng.choice([*WRITE_FINAL, *WRITE_PASSING])], rng.choice([0.1, 0.5, 1.0])
            first = rng.randrange(80)
        case "any":
            kinds, rate = [*WRITE_PASSING, *WRITE_FINAL], rng.choice([0.05, 0.2])
        case "kill":
            rate, kill = rng.choice([0.0, 0.0, 0.1]), (rng.randrange(1, 150), rng.choice(["before", "after"]))
    return {
        "seed": seed, "kinds": list(kinds), "rate": rate, "first": first, "sticks": rng.random() < 0.3, "kill": kill,
        "pages": rng.choice([1, 5, 50, 1000]),
    }  # fmt: skip


def options_of(rng, call):
    steps = list(range(1, rng.choice([2, 3, 4, 5])))
    options = {}
    if call in ("loop", "fit"):
        options |= {"max_to_keep": rng.choice([None, 1, 2]), "save_on_background": rng.random() < 0.5}
        if rng.random() < 0.3:
            options |= {"keep_best": 1, "mode": "min", "monitor": "loss"}
    return steps, options


@dataclass
class Outcome:
    seed: int
    title: str
    faults: list
    said: str
    seconds: float
    wrong: list[str] = field(default_factory=list)


class Watch(threading.Thread):
    """Looks at a place through the door at which nothing fails, again and again."""

    def __init__(self, look):
        super().__init__(daemon=True)
        self.look, self.seen, self.ended = look, [], threading.Event()
        self.start()

    def run(self):
        while not self.ended.wait(0.3):
            self.seen.append(self.look())

    def end(self):
        self.ended.set()
        self.join()
        return self.seen


class FaultySaves:
    """Saves to a server that fails; a context manager."""

    def __enter__(self):
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        sources(self.folder / "sources")
        self.expected, self._child = {}, None
        for name in ("bucket", "staging"):
            (self.folder / name).mkdir()
        self._before = dict(os.environ)
        self._stack.callback(self._reset)
        self.server = BucketServer(self.folder / "bucket")
        self._stack.callback(self.server.close)
        common = {"SHARDLOAD_STAGING": str(self.folder / "staging")}
        os.environ |= self.server.environment(self.server.back_door()) | common | {"SHARDLOAD_REMOTE_TIMEOUT": "20"}
        self.environment = {**os.environ, **self.server.environment(), "SHARDLOAD_REMOTE_TIMEOUT": str(WINDOW_S)}
        self.environment |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        return self

    def _reset(self):
        os.environ.clear()
        os.environ.update(self._before)

    def __exit__(self, *error):
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
        self._stack.close()

    def title(self, seed):
        return " ".join((*CASES[seed % len(CASES)], random.Random(seed).choice(SCHEMES)))

    def run(self, seed):
        run = StepsRun if CASES[seed % len(CASES)][0] in STEPS else FileRun
        return run(self, seed).outcome()

    def lasting_child(self):
        """A process that does one job after the other."""
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "save_fault_child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE,
                env=self.environment,
            )  # fmt: skip
        return self._child


class Run:
    """What a seed stands for: a job for a child, and how what it did is judged."""

    def __init__(self, faulty, seed):
        self.faulty, self.seed, self.server = faulty, seed, faulty.server
        self.rng = rng = random.Random(seed)
        self.url = f"{rng.choice(SCHEMES)}://bucket/run-{seed}"
        self.call, self.name = call, _ = CASES[seed % len(CASES)]
        self.plan = plan_of(rng, seed)
        self.killed = None
        self.wrong, self.events = [], []
        self.steps, self.options = options_of(rng, call)
        self.goes_on = rng.choice(["no", "next", "again"])

    def outcome(self):
        began = time.monotonic()
        faults = self.save()
        seconds = time.monotonic() - began
        self.judge_errors({kind for kind, _ in faults.done})
        try:
            self.judge()
        except Exception as error:
            self.wrong.append("afterwards: " + "".join(traceback.format_exception(error)))
        shutil.rmtree(self.server.folder / f"run-{self.seed}", ignore_errors=True)
        if seconds > LIMIT_S:
            self.wrong.append(f"it took {seconds:.1f} s")
        said = next((e.get("error") or e.get("said") for e in self.events if "kind" in e), None)
        said = f"killed ({self.killed})" if self.killed else said or "as expected"
        return Outcome(self.seed, self.faulty.title(self.seed), faults.done, said, seconds, self.wrong)

    def save(self):
        """Have the child save while requests fail, and look meanwhile; return the faults that there were."""
        number = self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        started = []

        def kill():
            self.killed = signal.Signals(number).name
            os.kill(started[0], number)
            self.server.released.wait(1.0)

        job = {"url": self.url, "call": self.call, "seed": self.seed, "steps": self.steps, "options": self.options}
        job["goes_on"] = self.goes_on
        self.server.released.clear()
        self.server.fault = faults = WriteFaults(self.server, self.plan, kill)
        watch = Watch(self.look)
        output = self.killable(json.dumps(job), started) if self.plan["kill"] else self.lasting(json.dumps(job))
        self.server.fault = None
        self.server.released.set()
        self.seen = watch.end()
        self.events = told(output)
        if self.killed is None and (not self.events or "ended" not in self.events[-1]):
            self.wrong.append(f"it did not end well: {output[-3000:]}")
        return faults

    def lasting(self, job):
        child, lines = self.faulty.lasting_child(), []
        timer = threading.Timer(1.5 * LIMIT_S, child.kill)
        timer.start()
        child.stdin.write(job + "\n")
        child.stdin.flush()
        for line in child.stdout:
            lines.append(line)
            if line.startswith('{"ended"'):
                break
        timer.cancel()
        if (self.server.folder / f"run-{self.seed}" / OWNER_FILE).exists():
            child.communicate("")  # it may own the folder until it ends, as after a failed `fit`
        return "".join(lines)

    def killable(self, job, started):
        words = ["-m", "save_fault_child", job]
        child = warm_start.start(words, stderr=subprocess.STDOUT, env=self.faulty.environment, cwd=HERE)
        started.append(child.pid)
        try:
            return child.communicate(timeout=1.5 * LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            return child.communicate(timeout=60)[0] + "it hung"

    def judge_errors(self, kinds):
        for event in self.events:
            if "kind" not in event:
                continue
            said = event.get("error") or event["said"]
            if not event["ours"]:
                self.wrong.append(f"not an error of ours: {event['kind']}: {said}")
            if kinds <= {"late"} and not self.killed:
                self.wrong.append(f"an error without a fault: {said}")
            exists = event["kind"] == "StepExistsError"  # after an error that is judged by itself
            if len(kinds) == 1 and not exists and not re.search(CAUSES.get(*kinds, ""), said):
                self.wrong.append(f"not the cause: {said}")


class StepsRun(Run):
    """Of calls that save steps."""

    def __init__(self, faulty, seed):
        super().__init__(faulty, seed)
        self.correct = set()  # steps that have been read

    def look(self):
        try:
            return [(info.step, info.ours, info.problems) for info in steps_of_run(self.url)]
        except ShardloadError as error:
            return [(None, False, f"{type(error).__name__}: {error}")]

    def judge(self):
        given = {e["step"]: e for e in self.events if "step" in e}
        saved = {step for e in self.events for step in e.get("saved", ())}
        saved |= {e["failed"] for e in self.events if e.get("said", "").startswith(f"Step {e.get('failed')} is saved")}
        for step, ours, problems in {one for seen in self.seen for one in seen}:
            if not ours or problems or step not in given:
                self.wrong.append(f"step {step} was listed meanwhile: {problems}")
        listed = self.complete(given)
        self.judge_removed(given, saved, set(listed))
        self.go_on(listed, given)

    def complete(self, given):
        """The steps that are listed, each of which must be what was given to its save."""
        found = steps_of_run(self.url)
        for info in found:
            if info.step in self.correct:
                continue
            self.correct.add(info.step)
            one = model(0)
            shardload.restore(one, self.url, step=info.step)
            if info.step not in given or digest(one) != given[info.step]["digest"]:
                self.wrong.append(f"WRONG BITS in step {info.step}")
        return [info.step for info in found]

    def judge_removed(self, given, saved, listed):
        keep = self.options.get("max_to_keep")
        best = min((given[s]["loss"], s) for s in saved)[1] if saved else None
        for step in saved - listed:
            if keep is None or sum(other > step for other in listed) < keep:
                self.wrong.append(f"step {step} is gone; there are {sorted(listed)}")
            if (
                self.options.get("keep_best")
                and step == best
                and all(given[o]["loss"] > given[best]["loss"] for o in listed)
            ):
                self.wrong.append(f"step {step} is gone, the best; there are {sorted(listed)}")

    def go_on(self, listed, given):
        """A run that resumes: it finds the latest step, saves another one, and removes what was left."""
        with shardload.Checkpointer(self.url, **self.options) as saver:
            one = model(0)
            info = saver.restore(one)
            if (info.step if info else None) != max(listed, default=None):
                self.wrong.append(f"resumed at {info and info.step}; there are {listed}")
            step = max(given, default=0) + 1
            one = model([self.seed, step])
            given[step] = {"digest": digest(one), "loss": loss_of(self.seed, step)}
            saver.save(step, one, metrics={"loss": given[step]["loss"]})
        after = self.complete(given)
        self.judge_removed(given, {*listed, step}, set(after))
        names = [n for n in self.server.names() if n.startswith(f"run-{self.seed}/")]
        if left := [n for n in names if n.split("/")[1] not in map(str, after)]:
            self.wrong.append(f"left in the bucket: {left}")
        if left := [*(self.faulty.folder / "staging").glob("*/*/*")]:
            self.wrong.append(f"left on this machine: {left}")


class FileRun(Run):
    """Of calls that write a checkpoint, and then another one in its place."""

    def __init__(self, faulty, seed):
        super().__init__(faulty, seed)
        self.steps = [1, 2]
        self.options = {"name": self.name, "source": str(faulty.folder / "sources")}
        self.target = f"{self.url}/{TARGETS[self.name][0]}"
        if (key := (self.call, self.name)) not in faulty.expected:
            faulty.expected[key] = [self.local(version) for version in (1, 2)]
        self.expected = faulty.expected[key]

    def local(self, version):
        to, options = TARGETS[self.name]
        place = str(self.faulty.folder / f"{self.call}-{self.name}-{version}" / to)
        Path(place).parent.mkdir()
        if self.call == "save_as":
            shardload.save_as(model([version]), place, **options)
        else:
            shardload.convert(self.options["source"] + f"/{version}", place, **options)
        return read(place)

    def look(self):
        try:
            return self.expected.index(read(self.target)) + 1
        except ShardloadError:
            return None
        except ValueError:
            return "WRONG BITS"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def judge(self):
        if bad := {one for one in self.seen if isinstance(one, str)}:
            self.wrong.append(f"read meanwhile: {bad}")
        saved = [step for e in self.events for step in e.get("saved", ())]
        found = self.look()
        if isinstance(found, str):
            self.wrong.append(f"read afterwards: {found}")
        begun = [e["step"] for e in self.events if "step" in e]
        if saved and begun[-1] == saved[-1] and found != saved[-1]:
            self.wrong.append(f"what was saved is not there: {found}, expected {saved[-1]}")
        _, options = TARGETS[self.name]
        try:
            if self.call == "save_as":
                shardload.save_as(model([2]), self.target, overwrite=True, **options)
            else:
                shardload.convert(self.options["source"] + "/2", self.target, overwrite=True, **options)
        except ShardloadError as error:
            # What a failed or killed one left may be no checkpoint: its user is told to remove it.
            if found is not None or "it is not a checkpoint. Remove it yourself" not in str(error):
                raise
        else:
            if (now := self.look()) != 2:
                self.wrong.append(f"written once more, it is {now}")


def main():
    given = given_seeds(400)
    if given.at_once > 1:
        return run_at_once("save_fault_runs", given)
    sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed
    with FaultySaves() as faulty:
        counts = run_seeds(faulty, given)
    print(json.dumps(counts))  # noqa: T201
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
