"""Fits and conversions on disks in trouble, and what came of each: one line of JSON per scenario.

python -m disk_child FOLDER SCENARIO...

The troubles are real ones: full and read-only file systems (tmpfs, in a mount namespace of this process), a user who
may not write, folders that another process moves and removes.
"""

import asyncio
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import conftest  # noqa: F401  # eight devices, before Keras is imported
import keras
from callback_models import Batches, X, compiled, fit

from shardload import cli
from shardload.callbacks import OrbaxCheckpoint
from shardload.converting import conversion
from shardload.converting.publishing import ConversionFolder
from shardload.synth import synth

PAGE = 4096
NOBODY = 65534
N_TENSORS = 24
"""Of the model that is converted."""


class Somebody:
    """Another process, of whoever started this one: what it does to a folder, it does from outside."""

    def __init__(self):
        self._shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def does(self, command):
        self._shell.stdin.write(f"{command}; echo done $?\n")
        self._shell.stdin.flush()
        answer = self._shell.stdout.readline()
        assert answer == "done 0\n", (command, answer)


def wide():
    """A model whose step takes 0.8 MB."""
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(256) for _ in range(2)), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model


def command(*arguments):
    """Exit code and output of ``shardload …``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(a) for a in arguments])
    return code, out.getvalue() + err.getvalue()


def held(root):
    """The steps as ``shardload steps`` lists them, those that ``shardload verify`` complains of, and what is staged."""
    code, out = command("steps", root, "--json")
    steps = [info["step"] for info in json.loads(out)["steps"]] if code == 0 else out
    bad = [step for step in steps if command("verify", root / str(step))[0] != 0] if code == 0 else []
    return {"steps": steps, "bad": bad, "staged": names_in(root / ".staging")}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@functools.cache
def _shared():
    return compiled()


def untrained():
    """A model that was compiled before: compiling takes longer than all else here."""
    _shared().optimizer.iterations.assign(0)
    return _shared()


def attempt(root, model, *, at=(), epochs=1, batch_size=4, look=None, callback=None, **named):
    """What one ``fit`` came to."""
    batches, error = Batches(at), None
    try:
        callback = callback or OrbaxCheckpoint(root, **{"save_freq": 1, "max_to_keep": None, **named})
        fit(model, callback, batches, epochs=epochs, batch_size=batch_size)
    except Exception as caught:
        error = {"type": type(caught).__name__, "text": str(caught), "errno": getattr(caught, "errno", None)}
    return {"error": error, "batches": batches.done, **held(look or root)}


def tmpfs(folder, options):
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    return folder


def refill(disk, free_bytes=0):
    """The rest of a disk but so much, by somebody else: there is more in ``/dev/zero`` than fits."""
    somebody.does(f"cat /dev/zero > {disk}/filler 2>&-; truncate -s -{free_bytes} {disk}/filler")


# ---- a full disk --------------------------------------------------------------------------------


def full(base):
    root = tmpfs(base / "full", "size=2m") / "run"
    first = attempt(root, wide())
    somebody.does(f"rm -r {root}/1")
    return {"first": first, "again": attempt(root, wide(), resume=True, max_to_keep=1)}


def full_in_places(base):
    """So little room that it ends in the middle of this file or that one, counted in pages and in inodes."""
    disk, found = tmpfs(base / "places", "size=4m,nr_inodes=300"), []
    before = attempt(disk / "run", untrained(), batch_size=len(X))
    for pages in range(0, 28, 4):
        refill(disk, pages * PAGE)
        found.append(attempt(disk / "run", untrained(), batch_size=len(X)))
        somebody.does(f"rm {disk}/filler")
    for count in range(0, 45, 4):
        (disk / "filler").mkdir()
        for i in range(os.statvfs(disk).f_favail - count):
            (disk / "filler" / str(i)).touch()
        found.append(attempt(disk / "run", untrained(), batch_size=len(X)))
        somebody.does(f"rm -r {disk}/filler")
    return {
        "before": before,
        "tries": found,
        "again": attempt(disk / "run", compiled(), resume=True, epochs=2, max_to_keep=3),
    }


def other_disk(base):
    """The staging folder on a disk of its own: no rename leads from one to the other."""
    root = base / "two"
    tmpfs(root / ".staging", "size=4m")
    first = attempt(root, untrained())
    somebody.does(f"umount {root}/.staging")
    return {"first": first, "again": attempt(root, compiled(), resume=True)}


def read_only(base):
    disk = tmpfs(base / "ro", "size=4m")
    found = {"between": spoilt(disk, f"mount -o remount,ro {disk}"), "start": attempt(disk, untrained())}
    somebody.does(f"mount -o remount,rw {disk}")
    return {**found, "again": attempt(disk, compiled(), resume=True)}


# ---- a folder this user may not write to --------------------------------------------------------


def become_ordinary(base):
    """Root may write anywhere. What is imported on first use is imported before, for root's own Python."""
    if os.geteuid() != 0:
        return
    attempt(base / "warm", untrained(), resume=True, max_to_keep=1)
    os.chown(base, NOBODY, NOBODY)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def denied_at_start(base):
    become_ordinary(base)
    (base / "closed").mkdir(mode=0o555)
    return {
        "itself": attempt(base / "closed", untrained()),
        "above": attempt(base / "closed" / "run", untrained(), look=base),
    }


def spoilt(root, command, *, after=2, **named):
    """A ``fit`` in which somebody does something once step ``after`` is saved."""
    callback = OrbaxCheckpoint(root, **{"save_freq": 1, "max_to_keep": None, **named})

    def then():
        callback.wait_until_finished()
        somebody.does(command)

    return attempt(root, untrained(), callback=callback, at={after: then})


def denied_in_between(base):
    become_ordinary(base)
    found = {}
    for name, path in (("root", base / "root"), ("staging", base / "staging" / ".staging")):
        found[name] = spoilt(base / name, f"mkdir -p {path}; chmod 555 {path}")  # none is left between two saves
        somebody.does(f"chmod 777 {path}")
        found[f"{name} again"] = attempt(base / name, compiled(), resume=True)
    return found


def older_denied(base):
    become_ordinary(base)
    a, b, c = (base / name for name in "abc")
    found = {
        "all stay": spoilt(a, f"chmod 000 {a}/1"),
        "not to be listed": spoilt(b, f"chmod 000 {b}/1", max_to_keep=2),
        "not to be removed": spoilt(c, f"chmod 555 {c}/1/pytree", max_to_keep=2),
    }
    somebody.does(f"chmod 755 {a}/1 {b}/1 {c}/.staging/*/step/pytree")
    return {**found, "a": held(a), "b": held(b), "c": attempt(c, compiled(), resume=True)}


# ---- folders that go away -----------------------------------------------------------------------


class Waiting:
    """A checkpointable that keeps its step from being finished until ``go`` is set."""

    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            await asyncio.to_thread((path / "x").write_text, "x")
            self.started.set()
            await asyncio.to_thread(self.go.wait)

        return write()

    async def load(self, directory):
        raise NotImplementedError


def cut(root, command):
    """A ``fit`` in which somebody does something while step 2 is being written."""
    item = Waiting()
    callback = OrbaxCheckpoint(root, save_freq=1, max_to_keep=None, checkpointables=lambda: {"item": item})

    def first():
        item.go.set()
        callback.wait_until_finished()
        item.started.clear()
        item.go.clear()

    def then():
        try:
            assert item.started.wait(60)
            somebody.does(command)
        finally:
            item.go.set()

    return attempt(root, untrained(), callback=callback, at={1: first, 2: then})


def gone(base):
    """The folder of the steps, after step 2 was saved."""
    r, away = base / "r", base / "away"
    commands = {
        "removed": f"rm -r {r}",
        "emptied": f"rm -r {r} && mkdir {r}",
        "linked": f"mv {r} {away} && mkdir {base}/other && ln -s {base}/other {r}",
        "moved": f"mv {r} {away}",
        "moved and linked": f"mv {r} {away} && ln -s {away} {r}",
    }
    found = {}
    for name, command in commands.items():
        found[name] = {**spoilt(r, command), "left": names_in(r), "away": held(away)}
        somebody.does(f"rm -rf {r} {away}")
    return found


def gone_while_saving(base):
    r, away = base / "cut", base / "kept"
    commands = {
        "staging": f"until rm -rf {r}/.staging 2>&-; do :; done",
        "step": f"until rm -rf {r}/.staging/* 2>&-; do :; done",
        "item": f"rm -r {r}/.staging/*/*/item",
        "root": f"until rm -rf {r} 2>&-; do :; done",
        "moved": f"mv {r} {away}",
        "replaced": f"mv {r} {away} && mkdir -p {r}",
    }
    found = {}
    for name, command in commands.items():
        found[name] = {**cut(r, command), "away": held(away)}
        if name in ("staging", "step", "item"):
            found[f"{name} again"] = attempt(r, untrained(), resume=True)
        somebody.does(f"rm -rf {r} {away}")
    return found


def older_spoilt(base):
    r = {name: base / f"older_{name}" for name in ("removed", "digests", "bytes", "json", "last")}
    return {
        "removed": spoilt(r["removed"], f"rm -r {r['removed']}/1", max_to_keep=2),
        "digests": spoilt(r["digests"], f"rm {r['digests']}/1/shardload/digests.json", max_to_keep=2),
        "json": spoilt(r["json"], f"echo x > {r['json']}/1/shardload/step.json", max_to_keep=2),
        "bytes": spoilt(r["bytes"], f"echo x >> {r['bytes']}/2/pytree/manifest.ocdbt"),
        "the only one": spoilt(r["last"], f"rm -r {r['last']}/2", max_to_keep=1),
    }


# ---- conversions --------------------------------------------------------------------------------


def converted(source, target, to):
    code, out = command("convert", source, target, "--to", to)
    return {"code": code, "out": out, "names": names_in(target.parent)}


@contextlib.contextmanager
def full_after(disk, count, *, pages=0):
    """Somebody fills the disk once so many tensors were copied; -1: before any file is made."""
    noted, room, left = ConversionFolder.note_done, conversion.check_room, [count]

    def fill_after_the_check(*arguments):
        room(*arguments)
        if count < 0:
            refill(disk, pages * PAGE)

    def note_done(self, name, digest):
        noted(self, name, digest)
        left[0] -= 1
        if left[0] == 0:
            refill(disk)

    ConversionFolder.note_done, conversion.check_room = note_done, fill_after_the_check
    try:
        yield
    finally:
        ConversionFolder.note_done, conversion.check_room = noted, room


def conversions(base):
    source, found = synth("gemma2_9b", scale=0.02, directory=base), {}
    disk = tmpfs(base / "disk", "size=100m")
    for to, count, pages in [
        *((to, -1, pages) for to in ("h5", "safetensors", "orbax") for pages in (0, 5)),
        *((to, 3, 0) for to in ("h5", "safetensors", "orbax")),
        ("orbax", N_TENSORS, 0),
    ]:
        with full_after(disk, count, pages=pages):
            first = converted(source, disk / "out", to)
        somebody.does(f"rm -f {disk}/filler")
        again = converted(source, disk / "out", to)
        same = command("diff", disk / "out", base / to)[0] if (base / to).exists() else None
        found[f"{to} {count} {pages}"] = {"first": first, "again": again, "same": same}
        somebody.does(f"rm -rf {base}/{to} && cp -r {disk}/out {base}/{to} && rm -r {disk}/out")
    found["small"] = {"first": converted(source, tmpfs(base / "small", "size=1m") / "out", "h5")}
    return found


DISK = (full, full_in_places, other_disk, read_only)
USER = (denied_at_start, denied_in_between, older_denied)
FOLDER = (gone, gone_while_saving, older_spoilt)
SCENARIOS = {f.__name__: f for f in (*DISK, *USER, *FOLDER, conversions)}

if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sharding info not provided")
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    somebody = Somebody()
    for name in sys.argv[2:]:  # an exception ends all: what came before it is out
        sys.stdout.write(json.dumps({name: SCENARIOS[name](Path(sys.argv[1]))}) + "\n")
        sys.stdout.flush()
