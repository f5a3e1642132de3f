"""What goes wrong when several processes load together, and how that ends: a table of it, measured.

python -m together_runs [--processes 2 4 8] [--at-once 2] [--only TEXT] [--from-s3]
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from object_server import BUCKET, served
from process_runs import ROOT, Run, told
from together_child import CALLS, STAGES

from shardload.runs.digests import find_damage
from shardload.runs.listing import list_steps
from shardload.verifying import verify

LIMIT_S = 30.0
STARTING_S = 240.0
"""For the processes to import and meet, on a machine that does other things."""
MESHES = {2: (4, "2x4"), 4: (2, "4x2"), 8: (1, "4x2")}
"""Number of processes → devices of each, and the mesh."""

DISAGREEMENTS = {
    "save": {"step": "arguments. step", "model": "model"},
    "checkpointer": {"step": "step", "model": "model", "item": "items of the step", "keep": "arguments. max_to_keep"},
    "fit": {"frequency": "arguments. save_freq", "folder": "arguments. directory"},
}
"""Of calls that save: what one process has of its own → what all say that they disagree about."""


@dataclass(frozen=True)
class Case:
    call: str
    stage: str
    kind: str
    victim: int = 1
    processes: int = 2
    store: str = "disk"
    """Or ``s3``: then the folder of the sources must be served."""

    def __str__(self):
        where = "" if self.store == "disk" else f", from {self.store}"
        return f"{self.processes} processes, {self.call}, {self.stage}, {self.kind}, process {self.victim}{where}"

    @property
    def cause(self):
        """What every other process has to say, as a regular expression."""
        if self.stage in ("import", "script"):
            return f"Process {self.victim} has ended while others waited for it"
        if self.kind == "raise":
            # In the thread that writes a step, it is the reason why the step cannot be saved.
            step = r"(Cannot save step 1 to \S+: )?" if self.call == "save" else ""
            return f"On process {self.victim}: {step}CannotError: the disk caught fire"
        if self.kind == "stall":
            return rf"(On process {self.victim}: .*)?cannot be read: it sent nothing for too long"
        if self.kind == "replaced":
            return "disagree about the source. The version of file 0|changed while it was read: another version"
        if self.kind in DISAGREEMENTS.get(self.call, ()):
            return f"disagree about the {DISAGREEMENTS[self.call][self.kind]}"
        if self.kind in ("content", "mesh"):
            meshes = "meshes" if self.call == "load_arrays" else "mesh"  # a target may have its own
            return f"disagree about the {'source' if self.kind == 'content' else meshes}"
        if self.victim:
            return rf"Process {self.victim} \("
        return "Process 0, which runs the coordination service"

    @property
    def is_killed_first(self):
        """Whether process 0 was killed: the others lose the coordination service, or hear of its end before that."""
        return self.kind == "kill" and not self.victim


@dataclass
class Outcome:
    case: Case
    seconds: float
    """From what went wrong to the end of the last process."""
    said: str
    """By one of the others."""
    wrong: list[str] = field(default_factory=list)


def all_cases(processes, store):
    victims = (0, 1) if processes == 2 else (0, processes - 1)
    # Of saves to a bucket, tests have the stages.
    stages = [(call, stage) for call in STAGES for stage in STAGES[call] if store == "disk" or call != "save"]
    for (call, stage), kind, victim in itertools.product(stages, ("raise", "kill", "stop"), victims):
        if processes == 2 or victim or kind != "raise":
            yield Case(call, stage, kind, victim, processes, store)
    for call, kind in itertools.product(CALLS, ("content", "mesh")):
        yield Case(call, "before", kind, victims[1], processes, store)
    if store == "disk":
        yield Case("load", "import", "raise", victims[1], processes)
        yield Case("load", "script", "raise", victims[1], processes)
        for call, kinds in DISAGREEMENTS.items():
            for kind in kinds:
                yield Case(call, "before", kind, victims[1], processes)


def make_sources(folder):
    """The files of all calls, and others of the same shapes; in a process of their own, as this one may use threads."""
    code = "import sys, pathlib; import together_child as c; c.save_both(pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT, env=env)
    return folder / "one", folder / "other"


def outcome(case, sources):
    devices, mesh = MESHES[case.processes]
    one, other = sources if case.store == "disk" else [f"s3://{BUCKET}/{folder.name}" for folder in sources]
    words = (case.call, one, case.stage, case.kind, case.victim, other)
    module = "ends_early_child" if case.stage == "import" else "together_child"
    with Run(case.processes, devices, mesh, *words, module=module) as run:
        others = [one for i, one in enumerate(run.started) if i != case.victim or case.kind not in ("kill", "stop")]
        outputs = {one: _read(one) for one in others}
        ended = time.time()
        victim = run.started[case.victim]
        if victim not in outputs:
            victim.kill()
            outputs[victim] = victim.communicate(timeout=60)[0]
    found = judged(case, [outputs[one] for one in run.started], [one.returncode for one in run.started], ended)
    if case.call == "save":
        found.wrong += (half_saved if case.store == "disk" else half_uploaded)(case, f"{one}/saved-{run.port}")
    return found


def half_saved(case, folder):
    """What is wrong with the steps that are there: only what was published may be, and whole."""
    steps = list_steps(folder) if Path(folder).exists() else []
    wrong = [f"step {info.step} is damaged" for info in steps if find_damage(info.path)]
    # Process 0 goes on where it learns after the publishing that another was lost.
    if steps and (case.stage not in ("publish", "end") or (case.stage == "publish" and not case.victim)):
        wrong.append(f"the steps {[info.step for info in steps]} are listed")
    return wrong


def half_uploaded(case, url):
    """What is wrong with the steps in a bucket, of which 0 was saved before: 1 is there once its record is."""
    verdicts = {int(found.path.rpartition("/")[2]): found.verdict for found in verify(url)}
    expected = dict.fromkeys([0, 1] if case.stage == "recorded" else [0], "verified")
    return [] if verdicts == expected else [f"the steps are {verdicts}, expected {expected}"]


def _read(one):
    try:
        return one.communicate(timeout=STARTING_S)[0]
    except subprocess.TimeoutExpired:
        one.kill()
        return one.communicate(timeout=60)[0] + "\ndid not end"


def judged(case, outputs, codes, ended):
    events = [told(output) for output in outputs]
    began = [event["at"] for one in events for event in one if "pid" in event]
    wrong = [event["at"] for one in events for event in one if "wrong" in event]
    found = Outcome(case, ended - (wrong[0] if wrong else max(began)), "")
    for i, (output, code) in enumerate(zip(outputs, codes, strict=True)):
        if i == case.victim and case.kind in ("raise", "kill", "stop"):
            continue
        # A killed process 0 leaves the others no time to raise: what is said then is said by the process beside them.
        last = next((event["error"] for event in reversed(events[i]) if "error" in event), "")
        said = last or "\n".join(line for line in output.splitlines() if line.startswith("shardload: "))
        found.said = found.said or said
        if not re.search(case.cause, said) and not (case.is_killed_first and "process 0 has ended" in said):
            found.wrong.append(f"process {i} said {said!r}, and not {case.cause!r}: {output[-2000:]}")
        if not code:
            found.wrong.append(f"process {i} ended well")
        if "stack trace" in output and (case.kind, case.victim) != ("kill", 0):
            found.wrong.append(f"process {i} was aborted: {output[-2000:]}")
        if any(event.get("seeds") is False for event in events[i] if case.call == "load"):
            found.wrong.append(f"process {i} drew from the user's generator")
    if not wrong and case.kind in ("raise", "kill", "stop"):
        found.wrong.append(f"nothing went wrong: {outputs[case.victim][-2000:]}")
    if found.seconds > LIMIT_S:
        found.wrong.append(f"it took {found.seconds:.1f} s")
    return found


def outcomes(cases, sources, *, at_once):
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda case: outcome(case, sources), cases)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose title contains this")
    parser.add_argument("--from-s3", action="store_true", help="read from a server of this machine that speaks S3")
    given = parser.parse_args()
    store = "s3" if given.from_s3 else "disk"
    cases = [case for n in given.processes for case in all_cases(n, store) if given.only in str(case)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        sources = make_sources(Path(folder))
        with served(Path(folder), patch) if given.from_s3 else nullcontext():
            for found in outcomes(cases, sources, at_once=given.at_once):
                failed += bool(found.wrong)
                case, said = found.case, found.said.splitlines()[0] if found.said else ""
                row = (case.processes, case.call, case.stage, case.kind, case.victim, f"{found.seconds:.1f}", said)
                print("| " + " | ".join(map(str, row)) + " |", *found.wrong, sep="\n    ", flush=True)  # noqa: T201
    print(json.dumps({"rows": len(cases), "failed": failed}))  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
