"""The public functions as users call them, for `mypy --strict`; never run. What must not pass has an ignore, and an
ignore that is not needed is an error too."""

from pathlib import Path

import jax
import keras
import numpy as np

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.loading import Loaded, LoadRequest, run
from shardload.typing import LayoutLike

model: keras.Model = shardload.load("gemma3_270m", mesh="1x8", layout="auto", dtype="bfloat16")
shardload.load(Path("model.keras"), mesh=(2, 4), axes="data,model", dtype=np.dtype("float32"))
shardload.load("gemma3_270m", mesh=jax.make_mesh((8,), ("model",)), layout=Path("rules.toml"), strict=False)
shardload.load("gemma3_270m", mesh=8, devices=jax.devices(), host_memory_bytes="512MiB", ignore=["score.*"])
shardload.load("gemma3_270m", mesh=1.5)  # type: ignore[arg-type]
shardload.load("gemma3_270m", layout=3)  # type: ignore[arg-type]
shardload.load("gemma3_270m", host_memory="1GiB")  # type: ignore[call-arg]

request = LoadRequest(source="gemma3_270m", mesh="1x8", dtype="bfloat16", ignore=["score.*"])
LoadRequest(source="gemma3_270m", mesh=1.5)  # type: ignore[arg-type]
LoadRequest(source="gemma3_270m", model=model)  # type: ignore[call-arg]
loaded: Loaded = run(request, preprocessor=False)
on_mesh: LayoutLike | None = request.placement.layout
unchecked: int | str | None = request.host_memory_bytes
budget: int | None = request.budget_bytes
request.placement.devices = ()  # type: ignore[misc]

report: shardload.LoadReport = shardload.load_weights(model, "model.weights.h5", names={"a": "dense/kernel"})
n_bytes: int = report.bytes.read
shardload.load_weights(model, b"model.weights.h5")  # type: ignore[arg-type]

with shardload.fast() as fast_report:
    model.load_weights("model.weights.h5")
why: str | None = fast_report.calls[0].why
fast_total: float = sum(call.seconds for call in fast_report)
with shardload.fast(strict=False):  # type: ignore[call-arg]
    pass

plan: shardload.PlanReport = shardload.plan("gemma2_27b", mesh="4x8", device_memory_bytes="16GiB")
plan.to_json()

restored: shardload.LoadReport = shardload.restore(model, Path("run"), step="best", mesh="2x4", fallback="previous")
shardload.restore(model, "run", step="newest")  # type: ignore[arg-type]

follower: shardload.Follower = shardload.follow(model, Path("run"), which="best", every_s=1, host_memory_bytes="1GiB")
adopted: int | None = follower.update()
with follower.held() as held:
    held_step: int | None = held
for each in follower:
    each_step: int = each
with follower as running:
    staleness_s: float | None = running.staleness_s
shardload.follow(model, "run", which="newest")  # type: ignore[arg-type]

with shardload.Checkpointer("run", max_to_keep=3, keep_best=1) as checkpointer:
    last = checkpointer.restore(model, optimizer=keras.optimizers.Adam(), mesh={"data": 2, "model": 4})
    number: int = last.step if last is not None else 0
    checkpointer.save(number + 1, model, metrics={"loss": 0.5}, metadata={"note": "mine"})
folder: Path | str = shardload.save(model, Path("run"), step=1, compression="zstd")
shardload.save(model, "run")  # type: ignore[call-arg]
shardload.load("gemma3_270m", layout={"dense/kernel": (None, "model")}, mesh={"data": 2.5})  # type: ignore[dict-item]

mesh = jax.make_mesh((8,), ("model",))
spec = jax.sharding.PartitionSpec("model")
arrays = shardload.load_arrays("gemma3_270m", lambda name, shape, dtype: spec, mesh=mesh, names={"a": "b"})
shardload.load_arrays("gemma3_270m", {"a": spec}, mesh="2x4")
shardload.load_arrays("gemma3_270m", {"a": spec}, names=3)  # type: ignore[arg-type]

converted: shardload.ConvertReport = shardload.convert("gemma2_9b", "gemma2-hf", to="safetensors", dtype="float32")
shardload.convert("gemma2_9b", "gemma2.onnx", to="onnx")  # type: ignore[arg-type]
saved: shardload.ConvertReport = shardload.save_as(model, Path("tuned"), to="preset", max_shard_bytes="2GiB")
shardload.save_as(model, "tuned.weights.h5", merge_lora=True, overwrite=True)
shardload.save_as(model, "tuned", to="orbax")  # type: ignore[arg-type]

tokenizer: shardload.Tokenizer = shardload.tokenizer("gemma3_270m", format="gguf")
ids: list[int] = tokenizer.encode("The capital of France is")
text: str = tokenizer.decode(ids)
one: str = shardload.generate(model, "The capital of France is", max_new_tokens=12)
several: list[str] = shardload.generate(model, ["One,", "Two,"], tokenizer=tokenizer)
shardload.generate(model, "One,", tokenizer=Path("gemma2-hf"))
shardload.generate(model, 1)  # type: ignore[call-overload]


@shardload.layout_rule(keras.layers.Dense)
def split(layer: keras.layers.Dense) -> dict[str, tuple[int, ...]]:
    return {"kernel": (1, 0)}


with shardload.abstract():
    model = keras.Sequential([keras.layers.Dense(1)])
names: list[str] = shardload.initialise(model)
found: shardload.LoadReport | None = shardload.report(model)

sharded: shardload.optimizers.SlotReport = shardload.shard_optimizer(model, axis=("model", "batch"))
shardload.shard_optimizer(model, axis=3)  # type: ignore[arg-type]
callback = OrbaxCheckpoint("run", save_best_only=True, monitor="val_loss", resume=True)
model.fit(shardload.data.resumable(None), callbacks=[callback])
for tensor in shardload.inspect("model.keras").tensors.values():
    size: int = tensor.size

try:
    shardload.load("nothing")
except shardload.errors.SourceNotFoundError as error:
    message: str = str(error)

distribution = shardload.AutoShardDistribution("data=2,model=4", layout="search")
built: keras.Model = distribution.build(lambda: model)
choice: shardload.parallel.LayoutChoice = distribution.choice(built)
shardload.AutoShardDistribution(1.5)  # type: ignore[arg-type]
wrapped = shardload.TensorParallelKeras(model, 8, device_ids=["gpu:0"], distributed_backend="jax")
world_size: int = wrapped.get_parallelism_info()["world_size"]
difference: float = wrapped.validate_tensor_parallelism_setup().max_difference
why_split: str = shardload.parallel.autoconfig(model, 8).variables[0].rule
