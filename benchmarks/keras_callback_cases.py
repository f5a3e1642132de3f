"""What a checkpoint callback should do, as cases that either callback can be put to.

A case gets a side (Keras' callback and its way of loading, or ours), a maker of models and an empty folder. It
returns if the side does what a user would expect, and raises otherwise. Nothing in a case knows which side it has:
the same lines run against both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from benchmarks.keras_callback_models import Made
from benchmarks.keras_callback_tools import chain, damaged, eight_devices, every_assignment, full_disk, live_bytes


class Failed(Exception):  # noqa: N818  # the verdict of a case
    """The side did not do what it should."""


@dataclass(frozen=True, slots=True)
class Side:
    """One callback, and how its checkpoints come back."""

    name: str
    callback: Callable[..., Any]
    restore: Callable[[Any, Path], Any]
    """Fill a model that stands."""
    rebuild: Callable[[Path], Any]
    """A model from the checkpoint alone."""
    data: Callable[[Any], Any]
    """A Grain dataset as ``fit`` takes it."""


def expect(found: Any, message: str) -> None:
    """Fail the case unless ``found``."""
    if not found:
        raise Failed(message)


def values(variables: Any) -> list[np.ndarray[Any, Any]]:
    """The values now, copied."""
    return [np.array(v.value) for v in variables]


def share_equal(one: list[Any], other: list[Any]) -> str:
    """How many of the arrays are the same, as "3 of 8"."""
    same = sum(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=False))
    return f"{same} of {max(len(one), len(other))}"


def expect_same(one: Any, other: Any, what: str) -> None:
    """Fail the case unless both have the same values, bit for bit."""
    one, other = values(one), values(other)
    share = share_equal(one, other)
    expect(share == f"{len(one)} of {len(one)}", f"{share} {what} restored, and no error")


def trained(side: Side, made: Made, folder: Path, *, epochs: int = 1, **options: Any) -> Any:
    """A model that was trained with the side's callback, all its saves done."""
    model = made.model(seed=1)
    callback = side.callback(folder, **options)
    made.fit(model, callback, epochs=epochs)
    return model


# ---- what comes back ----------------------------------------------------------------------------------


def weights_into_a_fresh_model(side: Side, made: Made, folder: Path) -> None:
    """In the process that trained: layers of the second model are named dense_2, dense_3."""
    model, fresh = trained(side, made, folder), made.model(seed=2)
    side.restore(fresh, folder)
    expect_same(model.weights, fresh.weights, "weights")


def weights_in_a_fresh_session(side: Side, made: Made, folder: Path) -> None:
    """Names begin anew, as they do in a new process."""
    keras.backend.clear_session()
    model = trained(side, made, folder)
    keras.backend.clear_session()
    fresh = made.model(seed=2)
    side.restore(fresh, folder)
    expect_same(model.weights, fresh.weights, "weights")


def a_model_from_the_checkpoint_alone(side: Side, made: Made, folder: Path) -> None:
    """The configuration is in the checkpoint, and so are the weights."""
    model = trained(side, made, folder)
    rebuilt = side.rebuild(folder)
    expect(rebuilt.weights, "the model has no weights at all, and no error")
    expect_same(model.weights, rebuilt.weights, "weights")


def the_optimizer_named_adam_1(side: Side, made: Made, folder: Path) -> None:
    """A second Adam in one process is named adam_1."""
    model, fresh = trained(side, made, folder), made.model(seed=2)
    side.restore(fresh, folder)
    expect_same(model.optimizer.variables, fresh.optimizer.variables, "optimizer variables")


def the_optimizer_in_a_fresh_session(side: Side, made: Made, folder: Path) -> None:
    """Names begin anew, as they do in a new process."""
    keras.backend.clear_session()
    model = trained(side, made, folder)
    keras.backend.clear_session()
    fresh = made.model(seed=2)
    side.restore(fresh, folder)
    expect_same(model.optimizer.variables, fresh.optimizer.variables, "optimizer variables")


def an_uncompiled_model(side: Side, made: Made, folder: Path) -> None:
    """For inference, nobody compiles."""
    keras.backend.clear_session()
    model = trained(side, made, folder)
    keras.backend.clear_session()
    fresh = made.model(seed=2, compiled=False)
    side.restore(fresh, folder)
    expect_same(model.weights, fresh.weights, "weights")


def fewer_devices(side: Side, made: Made, folder: Path) -> None:
    """Trained on 1x8, restored in a process that has one device."""
    keras.backend.clear_session()
    with eight_devices():
        model = trained(side, made, folder / "run")
    weights = values(model.weights)
    expect(max(len(v.value.sharding.device_set) for v in model.weights) == 8, "it was not spread over 8 devices")
    np.savez(folder / "expected.npz", *weights)
    child = [sys.executable, "-m", "benchmarks.keras_callback", "--child", side.name, made.name, str(folder)]
    done = subprocess.run(child, capture_output=True, text=True, check=False, env=os.environ | {"TQDM_DISABLE": "1"})
    told = (done.stderr or done.stdout).strip().splitlines() or ["?"]
    expect(done.returncode == 0, next((line for line in reversed(told) if "Error" in line), told[-1]))


def peak_memory(side: Side, made: Made, folder: Path) -> None:
    """What is live on all devices at most, beside the state itself, while a model that stands is filled."""
    keras.backend.clear_session()
    trained(side, made, folder)
    keras.backend.clear_session()
    fresh = made.model(seed=2)
    made.fit(fresh)
    state = sum(v.value.nbytes for v in [*fresh.weights, *fresh.optimizer.variables])
    before = live_bytes()
    peak = before
    with every_assignment(live_bytes) as seen:
        side.restore(fresh, folder)
        peak = max([before, *seen])
    expect(peak - before < 0.5 * state, f"{1 + (peak - before) / state:.1f} times the state is live while loading")


# ---- saving -------------------------------------------------------------------------------------------


def a_second_fit_with_the_same_callback(side: Side, made: Made, folder: Path) -> None:
    """What was trained second is what is restored."""
    model, callback = made.model(seed=1), side.callback(folder)
    made.fit(model, callback)
    made.fit(model, callback)
    expect_latest(side, made, folder, model)


def a_second_fit_with_a_new_callback(side: Side, made: Made, folder: Path) -> None:
    """As when a script is started again."""
    model = made.model(seed=1)
    made.fit(model, side.callback(folder))
    made.fit(model, side.callback(folder))
    expect_latest(side, made, folder, model)


def expect_latest(side: Side, made: Made, folder: Path, model: Any) -> None:
    """Compared through plain Orbax: restoring is another case."""
    from orbax.checkpoint import v1 as ocp

    newest = max((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    stored = ocp.load_checkpointables(str(newest), {"pytree": None})["pytree"]
    expect(holds(stored, values(model.weights)), "the newest step does not hold what was trained last")


def holds(stored: Any, weights: list[Any]) -> bool:
    """Whether a state tree has all these values among its variables, each as often."""
    tree = {name: stored[name] for name in ("trainable_variables", "non_trainable_variables") if name in stored}
    found = Counter(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return not Counter(w.tobytes() for w in weights) - found


def a_full_disk(side: Side, made: Made, folder: Path) -> None:
    """The only save of ``fit`` fails in the background; ``fit`` should not return as if it had not."""
    model, callback = made.model(seed=1), side.callback(folder)
    made.fit(model)
    with full_disk():
        try:
            made.fit(model, callback)
        except Exception as error:
            cause = "".join(str(e) for e in chain(error))
            expect("File too large" in cause or "os_error_code='27'" in cause, f"the cause is not told: {error}")
            return
    raise Failed("fit returned without an error, and nothing was saved")


def a_relative_path(side: Side, made: Made, folder: Path) -> None:
    """``directory="run"``."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        model = trained(side, made, Path("run"))
    finally:
        os.chdir(before)
    expect_latest(side, made, folder / "run", model)


def one_flipped_bit(side: Side, made: Made, folder: Path) -> None:
    """Eight places in the largest file, one after the other."""
    keras.backend.clear_session()
    trained(side, made, folder)
    keras.backend.clear_session()
    fresh, unseen = made.model(seed=2), 0
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = path.read_bytes()
    for place in range(1, 9):
        with damaged(path, whole, len(whole) * place // 9), suppress(Exception):
            side.restore(fresh, folder)
            unseen += 1
    expect(not unseen, f"{unseen} of 8 flipped bits restored without an error")


# ---- the run ------------------------------------------------------------------------------------------


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Which epochs were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(epoch)


def the_epoch(side: Side, made: Made, folder: Path) -> None:
    """Two of three epochs were trained, then the script is started again."""
    keras.backend.clear_session()
    trained(side, made, folder, epochs=2)
    keras.backend.clear_session()
    model, epochs = made.model(seed=2), Epochs()
    side.restore(model, folder)
    made.fit(model, side.callback(folder), epochs, epochs=3)
    expect(epochs.seen == [2], f"epochs {epochs.seen} were trained instead of [2]")


def the_best_value(side: Side, made: Made, folder: Path) -> None:
    """A later, worse run should not take the place of the best one."""
    model = trained(side, made, folder, monitor="loss", save_best_only=True)
    weights = values(model.weights)
    worse = made.model(seed=3)
    for variable in worse.trainable_variables:
        variable.assign(variable + 3)
    with suppress(Exception):
        made.fit(worse, side.callback(folder, monitor="loss", save_best_only=True))
    kept = [p for p in folder.iterdir() if p.name.isdigit()]
    from orbax.checkpoint import v1 as ocp

    for path in kept:
        if holds(ocp.load_checkpointables(str(path), {"pytree": None})["pytree"], weights):
            expect(len(kept) == 1, "the worse run was saved as a better one")
            return
    raise Failed("the best step was replaced by a worse one")


def metadata(side: Side, made: Made, folder: Path) -> None:
    """A note of the user's, stored with the step."""
    trained(side, made, folder, metadata={"commit": "4f2a91c"})
    texts = [p.read_text(errors="ignore") for p in folder.rglob("*") if p.is_file() and p.stat().st_size < 1 << 16]
    expect(any("4f2a91c" in text for text in texts), "it is nowhere in the checkpoint")


def the_data(side: Side, made: Made, folder: Path) -> None:
    """Stopped after three of five batches: the next two are trained, not the first five."""
    import grain

    def run(model: Any, *callbacks: Any) -> list[int]:
        source = Rows(made)
        dataset = grain.MapDataset.source(source).shuffle(seed=4).map(source.example).batch(4)
        batches = Batches()
        model.fit(side.data(dataset), epochs=1, verbose=0, shuffle=False, callbacks=[*callbacks, batches])
        return batches.trained

    keras.backend.clear_session()
    model = made.model(seed=1)
    stop = Batches(stop_after=3)
    run(model, side.callback(folder, save_freq=1), stop)
    keras.backend.clear_session()
    model = made.model(seed=2)
    side.restore(model, folder)
    found = run(model, side.callback(folder, save_freq=1))
    expect(len(found) == 2, f"after batch 3 of 5, {len(found)} were trained in the same epoch")


class Rows:
    """Twenty examples of a made model's data."""

    def __init__(self, made: Made) -> None:
        x, y = made.data()
        self.x, self.y = jax.tree.map(lambda a: np.concatenate([a, a, a])[:20], (x, y))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index

    def example(self, index: int) -> Any:
        return jax.tree.map(lambda a: a[index], (self.x, self.y))


class Batches(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts batches; may end ``fit``."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.stop_after = stop_after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trained.append(batch)
        if len(self.trained) == self.stop_after:
            self.model.stop_training = True


Case = Callable[[Side, Made, Path], None]

STATE: dict[str, Case] = {
    "weights, into a fresh model": weights_into_a_fresh_model,
    "weights, in a fresh session": weights_in_a_fresh_session,
    "optimizer, auto-named adam_1": the_optimizer_named_adam_1,
    "optimizer, in a fresh session": the_optimizer_in_a_fresh_session,
    "an uncompiled model": an_uncompiled_model,
    "a model from the checkpoint alone": a_model_from_the_checkpoint_alone,
    "a second fit, same callback": a_second_fit_with_the_same_callback,
    "a second fit, new callback": a_second_fit_with_a_new_callback,
}
"""For every model and every way to train it."""

RUN: dict[str, Case] = {
    "trained on 1x8, restored on 1 device": fewer_devices,
    "memory while loading": peak_memory,
    "an asynchronous write error": a_full_disk,
    "goes on with the next epoch": the_epoch,
    "goes on with the next batch": the_data,
    "the best value of an earlier run": the_best_value,
    "metadata": metadata,
    "a relative path": a_relative_path,
    "one flipped bit": one_flipped_bit,
}
"""For every model, with Adam."""
