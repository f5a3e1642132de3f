"""One of several processes that load together, of which one does something wrong; prints one JSON object a line.

python -m together_child COUNT INDEX PORT DEVICES MESH CALL SOURCE STAGE KIND VICTIM [OTHER]

The victim raises, is killed, stopped, sees OTHER instead of SOURCE, or is given another mesh, step or model: in its
``script``, which does not come to the call, or at a stage of its call. Of a load: ``before`` JAX starts, as ``headers``
are read, in mid-``transfer``, as it comes to an ``exchange`` of replicas, or at the ``end`` as initial values are
computed. Of a save: ``before`` the folder is
made, as it ``begin``s, as arrays are to ``write``, as the step is to ``publish``, or at the ``end``. Of a save to a
bucket, of the second step: in mid-``upload``, before the ``record`` is written, or once it is ``recorded``.
"""

import hashlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest

import shardload
from shardload.callbacks import checkpointer
from shardload.errors import MeshError, ProcessFailedError
from shardload.keras_bridge import abstraction
from shardload.loaders.orbax.saving import PendingSave
from shardload.pipeline import arrays, load, preparing, request
from shardload.pipeline.joint_arrays import ArraysRequest
from shardload.processes import Channel
from shardload.processes.joint_call import JointCall
from shardload.progress import Silent
from shardload.runs.digests import Checker
from shardload.runs.saver import StepSaver
from shardload.stores.local import LocalStore
from shardload.stores.uploads import Uploads
from shardload.transfer import exchange

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

WIDTH = 256
CALLS = ("load", "load_weights", "restore", "load_arrays")
STAGES = dict.fromkeys(CALLS, ("before", "headers", "transfer", "exchange", "end"))
STAGES["save"] = ("before", "begin", "write", "publish", "end")
WITH_REPLICAS = {"replicas": "broadcast", "layout": {".*/kernel": (None, "model")}}
OTHER_MESH = {"2x4": "4x2", "4x2": "2x4", "1x8": "8x1", "1x2": "2x1"}


class CannotError(Exception):
    """What the victim raises: nothing of shardload's."""


def go_wrong(kind):
    if kind == "kill":
        time.sleep(4)  # the others are in the call by now: before it, JAX would end them without a word of ours
    tell(wrong=kind)
    if kind == "raise":
        raise CannotError("the disk caught fire")
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    threading.Event().wait()  # a stop may reach another thread first, and this one must do nothing more


def at(call, stage, kind):
    """Have this process go wrong when it comes to a stage."""

    def first(original, *, where=lambda *_: True):
        def instead(*args, **kwargs):
            if where(*args):
                go_wrong(kind)
            return original(*args, **kwargs)

        return instead

    if stage == "before" and call == "save":
        checkpointer.Monitor = first(checkpointer.Monitor)
    elif stage == "before":
        request.check_backend = first(request.check_backend)
        ArraysRequest.check = first(ArraysRequest.check)
    if stage == "headers":  # of a source that was found; JAX runs by then
        preparing.prepare_load = first(preparing.prepare_load)
        arrays.plan_transfers = first(arrays.plan_transfers)
    if stage == "exchange":
        exchange.exchanged = first(exchange.exchanged)
    if stage == "end":
        if call != "save":
            abstraction.initialise = first(abstraction.initialise)
        JointCall.meet = first(JointCall.meet, where=lambda _, what: what == "the end")
    if stage == "begin":
        StepSaver.begin = first(StepSaver.begin)
    if stage == "write":
        PendingSave.result = first(PendingSave.result)
    if stage == "upload":
        # Of process 1, which has nothing to write of a model that is copied over the processes, its digests.
        Uploads.put = first(
            Uploads.put, where=lambda _, name, *__: re.match(r"1/pytree/|\.staging/1-.*/digests-1", name)
        )
    if stage == "record":
        Uploads.put = first(Uploads.put, where=lambda _, name, *__: name == "1/shardload/digests.json")
    if stage == "recorded":
        Uploads.delete = first(Uploads.delete, where=lambda _, names: str([*names]).startswith("['.staging/1-"))
    if stage == "publish":  # which process 0 does; the others wait for it
        Channel.first = first(Channel.first, where=in_worker)


def in_worker(*_):
    return threading.current_thread().name.startswith("shardload-step")


class Burning:
    """A progress at which the victim goes wrong when half is read."""

    def __init__(self, kind):
        self.kind, self.left = kind, 0

    def start(self, total_bytes, description):
        self.left = total_bytes // 2

    def advance(self, n_bytes):
        self.left -= n_bytes
        if self.kind is not None and self.left <= 0:
            go_wrong(self.kind)
        time.sleep(0.2)  # so that there is a middle

    def stop(self):
        pass


def model(seed=None):
    layers = [keras.layers.Dense(WIDTH, name=f"layer_{i}") for i in range(16)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dropout(0.1, seed=seed)])


def save_both(folder):
    """The sources of all calls, and others of the same shapes."""
    for name, seed in (("one", 1), ("other", 2)):
        (folder / name).mkdir()
        save(folder / name, seed)


def save(folder, seed):
    """What each call loads: a ``.keras`` file, weights, and the steps of a run."""
    keras.utils.set_random_seed(seed)
    built = model()
    built.save(folder / "load.keras")
    built.save_weights(folder / "load_weights.weights.h5")
    built.compile("sgd", "mse")
    saver = shardload.callbacks.OrbaxCheckpoint(folder / "restore", "loss", mode="max", max_to_keep=None)
    x = np.ones((8, WIDTH), "float32")
    built.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=[saver])


def source_of(folder, call):
    names = dict.fromkeys(("load", "local", "save", "checkpointer", "fit"), "load.keras")
    names |= dict.fromkeys(("load_weights", "load_arrays", "local_arrays"), "load_weights.weights.h5")
    return f"{folder}/{names.get(call, 'restore')}"


def alone(source, *, index):
    """Each on its own devices, one of them more often."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()).reshape(1, -1), ("batch", "model"))
    for _ in range(2 - index):
        made = shardload.load(source, mesh=mesh)
    with shardload.abstract():
        other = model(seed=1)
    shardload.load_weights(other, source, devices=jax.local_devices(), strict=False)
    shardload.load_weights(other, source, strict=False)  # where it lives
    assert digest(other.trainable_variables) == digest(made.trainable_variables)
    return other


class LongTransfer(Silent):
    """Lets a transfer take so long that heartbeats, one a second, tell what other processes said meanwhile."""

    def start(self, total_bytes, description):
        time.sleep(2.5)


def fall_back(source, *, sees_damage, **options):
    """Restore the newest step, in which one process finds damage; then the best, the same one, as the loss rises."""
    if sees_damage:
        of_step = Checker.of_step

        def damaged(folder):
            checker = of_step(folder)
            compare = checker.saved.compare
            if folder.name == "2":
                checker.saved.compare = lambda n, unit, found: compare(n, unit, "" if "/d/" in n else found)
            return checker

        Checker.of_step = damaged
    with shardload.abstract():
        made = model(seed=1)
    options |= {"items": "weights", "strict": False, "fallback": "previous", "progress": LongTransfer()}
    report = shardload.restore(made, source, **options)
    latest, notes = digest(made.weights), report.notes
    report = shardload.restore(made, source, step="best", **options)
    tell(loaded=[latest, digest(made.weights)], notes=[notes, report.notes])


def by_columns(name, shape):
    return jax.sharding.PartitionSpec(None, "model") if len(shape) == 2 else jax.sharding.PartitionSpec()


class Arrays:
    """Loaded arrays, with what of a model the tests look at."""

    def __init__(self, arrays):
        self.variables = self.weights = [SimpleNamespace(path=n, value=a) for n, a in arrays.items()]


def local_arrays(source, *, index):
    """Each on its own devices, by each kind of targets that name these alone; one of the processes more often."""
    own = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(own).reshape(1, -1), ("batch", "model"))
    made = shardload.load_arrays(source, by_columns, mesh=mesh)
    for _ in range(1 - index):
        copies = shardload.load_arrays(source, own[0])
        targets = {name: np.empty(array.shape, array.dtype) for name, array in copies.items()}
        plain = shardload.load_arrays(source, targets)
        assert all(np.array_equal(plain[name], made[name]) for name in made)
    if index:
        with pytest.raises(MeshError, match="none of the 4 devices of this process"):  # process 0 is not asked
            shardload.load_arrays(source, jax.devices()[0])
    # A function without a mesh is a call of all: each may load a copy of its own in it.
    copies = shardload.load_arrays(source, lambda name, shape: own[1])
    assert all(array.devices() == {own[1]} and np.array_equal(array, made[name]) for name, array in copies.items())
    return Arrays(made)


def save_step(source, *, folder, mesh, kind, progress):
    """A model on the mesh; or, where the models are to differ, one of each process, which process 0 would store."""
    if kind == "model":
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4 + jax.process_index())])
    else:
        made = shardload.load(source, mesh=mesh)
    if kind == "again":
        fail_once(made, folder)
    if str(folder).startswith("s3://"):
        shardload.save(made, folder, step=0)
    step = 2 if kind == "step" and jax.process_index() else 1
    path = shardload.save(made, folder, step=step, metrics={"loss": jax.process_index()})
    tell(saved=str(path))
    return made


def save_in_a_loop(folder, kind):
    """One of the processes wants to keep, or to save, something else."""
    differs = jax.process_index()
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4 + (differs if kind == "model" else 0))])
    kept = shardload.Checkpointer(folder, max_to_keep=1 + differs if kind == "keep" else None)
    items = {"own": {"kept": np.arange(1 + differs)}} if kind == "item" else None
    kept.save(1 + differs if kind == "step" else 1, made, checkpointables=items)
    kept.wait()
    return made


def fit(folder, kind):
    """One of the processes passes other arguments to its callback."""
    differs = jax.process_index()
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    made.compile("sgd", "mse")
    folder = f"{folder}-{differs}" if kind == "folder" else folder
    saver = shardload.callbacks.OrbaxCheckpoint(
        folder, save_freq=1 + differs if kind == "frequency" else 1, verbose=differs
    )
    made.fit(np.ones((8, 4)), np.ones((8, 4)), batch_size=4, verbose=0, callbacks=[saver])
    return made


def fail_once(made, folder):
    """One process fails before it opens the channel of its writer: in the next call, the two must meet all the same."""
    found = checkpointer.Monitor
    if jax.process_index():
        checkpointer.Monitor = lambda *_, **__: go_wrong("raise")
    with pytest.raises((ProcessFailedError, CannotError), match="the disk caught fire"):
        shardload.save(made, folder, step=1)
    checkpointer.Monitor = found


def run(call, source, **options):
    if call == "load":
        return shardload.load(source, **options)
    if call == "save":
        return save_step(source, **options)
    if call in ("checkpointer", "fit"):
        return (fit if call == "fit" else save_in_a_loop)(options["folder"], options["kind"])
    if call == "load_arrays":
        return Arrays(shardload.load_arrays(source, by_columns, **options))
    with shardload.abstract():
        made = model(seed=1)
    if call == "load_weights":
        shardload.load_weights(made, source, **options, strict=False)
    else:
        shardload.restore(made, source, **options, items="weights", strict=False)
    return made


def before_a_load(opened, *, uses_jax):
    """Have the files counted that are opened for headers; one process may have used JAX before."""
    if uses_jax:
        keras.layers.Dropout(0.1)  # starts JAX, which waits for the others, and takes a name that they use for another
    count_opened(opened)


def count_opened(found):
    """Have the files that are opened for headers counted."""
    opened, really = [], LocalStore.open
    LocalStore.open = lambda self, key: (opened.append(key), really(self, key))[1]
    together = load.open_together

    def counted(*given, **options):
        opened.clear()
        source = together(*given, **options)
        found.extend(key for key in opened if Path(key).exists())
        return source

    load.open_together = arrays.open_together = counted


def replace_before_opening(name, bucket):
    """Have an object replaced by an equal one, which has another ETag, before this process opens it, as the last."""
    together = load.open_together

    def instead(call, opener, **options):
        def replaced():
            tell(wrong="replaced")
            (bucket / f"{name}.new").write_bytes((bucket / name).read_bytes())
            (bucket / f"{name}.new").replace(bucket / name)
            return opener()

        return together(call, replaced, **options)

    load.open_together = arrays.open_together = instead


def tell(**what):
    sys.stdout.write(json.dumps({"at": time.time(), **what}) + "\n")
    sys.stdout.flush()


def digest(variables):
    """Of what this process holds."""
    found = hashlib.sha256()
    for variable in variables:
        for shard in variable.value.addressable_shards:
            found.update(np.ascontiguousarray(shard.data).tobytes())
    return found.hexdigest()


def main(*arguments):
    count, index, port, devices, mesh, call, folder, stage, kind, victim = arguments[:10]
    index, is_victim = int(index), index == victim
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), index)
    if is_victim and kind in ("raise", "kill", "stop"):
        at(call, stage, kind)
    if is_victim and kind == "content":
        folder = arguments[10]
    if is_victim and kind == "replaced":
        replace_before_opening(source_of(folder, call).removeprefix("s3://bucket/"), Path(os.environ["BUCKET_FOLDER"]))
    if is_victim and kind == "stall":
        os.environ |= {"AWS_ENDPOINT_URL": os.environ["STALLING_URL"], "SHARDLOAD_REMOTE_TIMEOUT": "4"}
    if is_victim and kind == "mesh":
        mesh = OTHER_MESH[mesh]
    if is_victim and stage == "script":
        go_wrong(kind)
    opened = []
    if stage == "none":
        before_a_load(opened, uses_jax=call == "load" and not index)
    progress = Burning(kind if is_victim and stage == "transfer" and kind in ("raise", "kill", "stop") else None)
    random.seed(index)
    before = random.getstate()
    began = time.time()
    tell(pid=os.getpid())
    source = source_of(folder, call)
    if call == "fallback":
        fall_back(source, sees_damage=is_victim, mesh=mesh)
        return
    options = {"mesh": mesh, "progress": progress}
    if stage == "exchange":
        options |= WITH_REPLICAS if call != "load_arrays" else {"replicas": "broadcast"}
    if call in ("save", "checkpointer", "fit"):
        options |= {"folder": f"{folder}/saved-{port}", "kind": kind}
    try:
        alone_in = {"local": alone, "local_arrays": local_arrays}.get(call)
        made = alone_in(source, index=index) if alone_in else run(call, source, **options)
    except Exception as error:
        tell(error=str(error), kind=type(error).__name__, s=time.time() - began, seeds=random.getstate() == before)
        raise
    if alone_in:
        tell(loaded=digest(made.weights))
        return
    tell(
        state=digest(v for v in made.variables if "seed" in v.path),
        opened=len(opened),
        s=time.time() - began,
        seeds=random.getstate() == before,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
