"""Saves to a bucket in a process of its own; says before each what is saved, and after it how that ended.

python -m save_fault_child [JSON]     a job of `save_fault_runs`; without one, jobs are lines on standard input
"""

import hashlib
import json
import sys
from pathlib import Path

import keras
import numpy as np

import shardload
from shardload.errors import ShardloadError
from shardload.runs import ownership
from shardload.stores import uploads

sys.modules.setdefault("tensorflow", None)  # Keras and KerasHub import it where it is; it is not needed

WIDTH = 32
TARGETS = {
    "weights": ("model.weights.h5", {}), "shards": ("model.weights.json", {"max_shard_bytes": "2KiB"}),
    "step": ("step", {"to": "orbax"}),
    "folder": ("folder", {"to": "safetensors", "max_shard_bytes": "100KiB"}),
}  # fmt: skip
"""What `shardload.convert` and `shardload.save_as` write: the name, and options."""


def tell(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def model(seed):
    layers = [keras.layers.Dense(WIDTH, name="one"), keras.layers.Dense(WIDTH, name="two")]
    built = keras.Sequential([keras.Input((WIDTH,)), *layers])
    built.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    built.optimizer.build(built.trainable_variables)
    rng = np.random.default_rng(seed)
    for variable in [*built.weights, *built.optimizer.variables]:
        if variable.shape:
            variable.assign(rng.normal(size=variable.shape).astype("float32"))
    return built


def digest(one):
    found = hashlib.sha256()
    for variable in [*one.weights, *one.optimizer.variables]:
        found.update(np.ascontiguousarray(np.asarray(variable.value)).tobytes())
    return found.hexdigest()


def loss_of(seed, step):
    return float(np.random.default_rng([seed, step]).random())


def failed(step, error):
    tell(failed=step, said=str(error), kind=type(error).__name__, ours=isinstance(error, ShardloadError))


def loop(url, *, seed, steps, options, goes_on):
    """A loop of the user's own, which may go on after an error, or save the same step again."""
    waiting = []

    def done():
        tell(saved=list(waiting))
        waiting.clear()

    with shardload.Checkpointer(url, **options) as saver:
        for step in steps:
            one = model([seed, step])
            tell(step=step, digest=digest(one), loss=loss_of(seed, step))
            for is_last in (False, True):
                try:
                    saver.wait()
                    done()
                    saver.save(step, one, metrics={"loss": loss_of(seed, step)})
                    waiting.append(step)
                except Exception as error:
                    failed(waiting.pop() if waiting else step, error)
                    if goes_on == "no":
                        raise
                    if is_last or goes_on == "next":
                        break
                else:
                    break
        saver.wait()
        done()


def alone(url, *, seed, steps, options, goes_on):
    """`shardload.save` for each step."""
    for step in steps:
        one = model([seed, step])
        tell(step=step, digest=digest(one), loss=loss_of(seed, step))
        try:
            shardload.save(one, url, step=step, metrics={"loss": loss_of(seed, step)})
        except Exception as error:
            failed(step, error)
            if goes_on == "no":
                raise
        else:
            tell(saved=[step])


class Tells(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        tell(step=epoch + 1, digest=digest(self.model), loss=float(logs["loss"]))


def fit(url, *, seed, steps, options, goes_on):
    one = model([seed, 0])
    x = np.random.default_rng(seed).random((8, WIDTH), np.float32)
    saver = shardload.callbacks.OrbaxCheckpoint(url, **options)
    one.fit(x, x, batch_size=8, epochs=len(steps), verbose=0, callbacks=[Tells(), saver])
    if not saver.preempted:  # by SIGTERM, which ends it early
        tell(saved=[*steps])


def written(write):
    """Write a checkpoint; if there is another one, first that one, and then this in its place."""

    def run(url, *, seed, steps, options, goes_on):
        for number, step in enumerate(steps):
            tell(step=step)
            write(url, step, overwrite=number > 0, **options)
            tell(saved=[step])

    return run


@written
def save_as(url, step, *, name, overwrite, source):
    to, options = TARGETS[name]
    shardload.save_as(model([step]), f"{url}/{to}", overwrite=overwrite, **options)


@written
def convert(url, step, *, name, overwrite, source):
    to, options = TARGETS[name]
    shardload.convert(str(Path(source) / str(step)), f"{url}/{to}", overwrite=overwrite, **options)


CALLS = {"loop": loop, "alone": alone, "fit": fit, "save_as": save_as, "convert": convert}


def run(job):
    try:
        CALLS[job.pop("call")](job.pop("url"), **job)
    except Exception as error:
        tell(error=str(error), kind=type(error).__name__, ours=isinstance(error, ShardloadError))
    tell(ended=True)


def main(*given):
    ownership.BEAT_S = 2.0
    uploads.SINGLE_REQUEST_BYTES = uploads.PART_BYTES = 64 << 10  # longer files go in parts
    for job in given or sys.stdin:
        run(json.loads(job))


if __name__ == "__main__":
    main(*sys.argv[1:])
