"""One of several processes that load together, each byte once; prints one JSON object a line.

python -m replicas_child COUNT INDEX PORT DEVICES MESH DO FOLDER [REPLICAS]
"""

import math
import re
import sys
from pathlib import Path

import jax
import keras
import ml_dtypes
import numpy as np
import remote_mix
import together_child
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from together_child import tell
from transfer_harness import manifest_of

import shardload
from shardload.manifest import View
from shardload.processes import Channel
from shardload.sharding.devices import resolve_devices
from shardload.sharding.layout import Layout
from shardload.transfer import exchange
from shardload.transfer.load_plan import Binding
from shardload.transfer.owners import plan_owners, process_numbers
from shardload.transfer.placement import jax_mesh
from shardload.transfer.planning import plan_transfers

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [*map(np.dtype, ("int8", "float16", "float32")), np.dtype(ml_dtypes.float8_e4m3fn)]
SPECS = {
    "replicated": ((), ()), "columns": ((), ("model",)), "rows": (("model",), ()),
    "both": (("batch",), ("model",)), "joined": ((), ("batch", "model")), "batch": ((), ("batch",)),
}  # fmt: skip
SHAPE = (256, 512)


def tensors(parts):
    """Arrays of random bits, most floats among them odd ones: NaNs with payloads, denormals, infinities."""
    rng = np.random.default_rng(3)
    wanted = [(BFLOAT16, spec) for spec in SPECS] + [(dtype, "columns") for dtype in DTYPES]
    shapes = {f"{d.name}.{spec}": (d, SHAPE) for d, spec in wanted}
    shapes |= dict.fromkeys(("odd.rows", "turned.rows"), (BFLOAT16, (33 * parts, 1024)))  # 33 rows for each part
    return {name: rng.integers(0, 256, math.prod(shape) * d.itemsize, np.uint8).view(d).reshape(shape)
            for name, (d, shape) in shapes.items()}  # fmt: skip


def bindings(manifest, mesh):
    """Each tensor as it is, transposed and in heads, each in turn."""
    found = []
    for number, tensor in enumerate(manifest.tensors.values()):
        spec, (rows, columns) = SPECS[tensor.name.partition(".")[2]], tensor.shape
        views = [
            (View.whole(tensor), spec),
            (View(tensor.name, 0, (columns, rows), (1, columns)), spec),
            (View(tensor.name, 0, (rows, 16, columns // 16), (columns, columns // 16, 1)), (*spec, ())),
        ]
        view, spec = views[number % 3]
        if not rows % 33:
            view, spec = views[0] if tensor.name == "odd.rows" else (views[1][0], ((), ("model",)))
        found.append(Binding(tensor.name, view, tensor.dtype, Layout(mesh, spec)))
    return found


def read_chars():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def transfer(mesh, folder, placement):
    """Load through plan and transfer alone, and compare each shard; ``placement`` is "upload" as on accelerators."""
    if placement == "upload":
        exchange.share_memory = lambda devices: False
    on = resolve_devices(mesh)
    values = tensors(on.mesh.axis_size("model"))
    manifest = manifest_of(Path(folder) / f"{jax.process_index()}.bin", values)
    wanted = bindings(manifest, on.mesh)
    plan = plan_owners(manifest, wanted, process_of=process_numbers(on.devices), replicas="broadcast")
    found = {}
    channel = Channel("exchanges")
    positions = [i for i, d in enumerate(on.devices) if d.process_index == jax.process_index()]
    reads = plan_transfers(manifest, plan.bindings(wanted), host_memory_bytes=None, positions=positions,
                           uploads=placement == "upload")  # fmt: skip
    options = {"devices": on.devices, "meet": lambda _: channel.together(lambda: None), "on_ready": found.__setitem__}
    before = read_chars()
    stats = exchange.execute_together(reads, manifest, plan, wanted, placement=placement, **options)
    read = read_chars() - before
    wrong = [b.name for b in wanted if not same(found[b.name], as_seen(values[b.name], b.view), b.layout, on)]
    strategies = {b.name: c.strategy for b, c in zip(wanted, plan.choices, strict=True)}
    tell(read=stats.read_bytes, planned=reads.read_bytes, chars=read, wrong=wrong, strategies=strategies,
         whole=manifest.nbytes, predicted=sum(c.read_bytes for c in plan.choices))  # fmt: skip


def as_seen(value, view):
    return np.lib.stride_tricks.as_strided(value, view.shape, [t * value.itemsize for t in view.strides])


def same(array, value, layout, on):
    boxes = dict(zip(on.devices, layout.bounds(value.shape), strict=True))
    pairs = ((np.asarray(s.data), value[boxes[s.device].slices]) for s in array.addressable_shards)
    return array.dtype == value.dtype and all(a.tobytes() == np.ascontiguousarray(b).tobytes() for a, b in pairs)


LAYOUT = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


def saved(folder):
    """A model whose kernels are split by columns and by rows, and that has variables whole on each device."""
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(512, 128, name="tokens")(inputs)
    x = keras.layers.Dense(1024, name="up")(x)
    x = keras.layers.Dense(128, name="down")(x)
    model = keras.Model(inputs, keras.layers.LayerNormalization()(x))
    model.save(folder / "model.keras")
    return folder / "model.keras"


def load(mesh, source, replicas):
    """Load together, and alone onto one device, and compare the values."""
    model = shardload.load(source, mesh=mesh, layout=LAYOUT, replicas=replicas)
    report = shardload.report(model)
    alone = shardload.load(source, devices=jax.local_devices()[:1])
    pairs = [(one, np.asarray(other.value)) for one, other in zip(model.weights, alone.weights, strict=True)]
    wrong = [one.path for one, value in pairs for shard in one.value.addressable_shards
             if np.asarray(shard.data).tobytes() != value[shard.index].tobytes()]  # fmt: skip
    tell(wrong=wrong, report=report.to_json(), whole=shardload.report(alone).bytes.needed)


def quantised(mesh, source, mode):
    """Quantise while loading together, both ways, and compare with what Keras quantises after a load alone."""
    wrong, ratios = [], []
    alone = shardload.load(source, devices=jax.local_devices()[:1])
    kernels = (keras.layers.Dense, keras.layers.Embedding)
    alone.quantize(mode, filters=lambda layer: isinstance(layer, kernels))
    for way in ("read", "broadcast"):
        model = shardload.load(source, mesh=mesh, layout=LAYOUT, replicas=way, quantize=mode)
        pairs = [(one, np.asarray(other.value)) for one, other in zip(model.weights, alone.weights, strict=True)]
        wrong += [one.path for one, value in pairs for shard in one.value.addressable_shards
                  if np.asarray(shard.data).tobytes() != value[shard.index].tobytes()]  # fmt: skip
        ratios.append(shardload.report(model).cluster.ratio)
    specs = {one.path: list(one.value.sharding.spec) for one in model.weights}
    tell(wrong=wrong, ratios=ratios, specs=specs)


def restore(mesh, folder, _):
    """Restore a step together, by verified bytes, both ways, and load its weights; compare the values."""
    found, ratios = [], []
    for way in ("read", "broadcast"):
        for atomic in (False, True):
            with shardload.abstract():
                model = together_child.model(seed=1)
            options = {
                "mesh": mesh,
                "layout": {".*/kernel": (None, "model")},
                "strict": False,
                "replicas": way,
            }
            report = shardload.restore(model, Path(folder) / "restore", items="weights", atomic=atomic, **options)
            found.append(together_child.digest(model.weights))
            ratios.append([report.cluster.exchanged, report.cluster.ratio])
            report = shardload.load_weights(model, Path(folder) / "load_weights.weights.h5", **options, atomic=atomic)
            ratios.append([report.cluster.exchanged, report.cluster.ratio])
    tell(same=len(set(found)) == 1, ratios=ratios)


def arrays(mesh, folder, replicas):
    """Load arrays together onto a mesh, and compare each shard."""
    path, on = Path(folder) / "arrays.safetensors", resolve_devices(mesh)
    values = tensors(on.mesh.axis_size("model"))
    if jax.process_index() == 0:
        save_file(values, path)
    Channel("written").together(lambda: None)
    specs = {name: PartitionSpec(*(axes or None for axes in SPECS[name.partition(".")[2]])) for name in values}
    for _ in range(2):  # the first time, modules are imported
        before = read_chars()
        found = shardload.load_arrays(path, specs, mesh=jax_mesh(on.mesh, on.devices), replicas=replicas)
        read = read_chars() - before
    wrong = [name for name, value in values.items() for shard in found[name].addressable_shards
             if np.asarray(shard.data).tobytes() != np.ascontiguousarray(value[shard.index]).tobytes()
             or found[name].sharding.spec != specs[name]]  # fmt: skip
    tell(wrong=wrong, chars=read, whole=sum(value.nbytes for value in values.values()))


def stored(mesh, folder, address):
    """Load arrays and a model from an object store, each byte once, and compare all shards with local copies."""
    on = resolve_devices(mesh)
    values = tensors(8)
    specs = {name: PartitionSpec(*(axes or None for axes in SPECS[name.partition(".")[2]])) for name in values}
    placed = jax_mesh(on.mesh, on.devices)
    found = shardload.load_arrays(f"{address}/arrays.safetensors", specs, mesh=placed, replicas="broadcast")
    wrong = [name for name, value in values.items() for shard in found[name].addressable_shards
             if np.asarray(shard.data).tobytes() != np.ascontiguousarray(value[shard.index]).tobytes()]  # fmt: skip
    model = shardload.load(f"{address}/model.keras", mesh=mesh, layout=LAYOUT, replicas="broadcast")
    alone = shardload.load(f"{folder}/model.keras", devices=jax.local_devices()[:1])
    pairs = [(one, np.asarray(other.value)) for one, other in zip(model.weights, alone.weights, strict=True)]
    wrong += [one.path for one, value in pairs for shard in one.value.addressable_shards
              if np.asarray(shard.data).tobytes() != value[shard.index].tobytes()]  # fmt: skip
    tell(wrong=wrong, exchanged=shardload.report(model).cluster.exchanged)


def remote(mesh, url, replicas):
    """Load a file at an address together, and compare each shard; who serves it counts the bytes."""
    values = {n: v.T if remote_mix.turned(n, v.shape) else v for n, v in remote_mix.tensors().items()}
    options = {"mesh": mesh, "transpose": remote_mix.turned, "replicas": replicas}
    found = shardload.load_arrays(f"{url}/model.safetensors", remote_mix.mix, **options)
    wrong = [name for name, value in values.items() for shard in found[name].addressable_shards
             if np.asarray(shard.data).tobytes() != np.ascontiguousarray(value[shard.index]).tobytes()]  # fmt: skip
    tell(wrong=wrong, needed=sum(value.nbytes for value in values.values()))


def main(count, index, port, devices, mesh, do, folder, replicas="broadcast"):  # noqa: PLR0917
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    sys.modules.setdefault("tensorflow", None)  # Keras imports it where it is; it is not needed
    calls = (transfer, load, quantised, arrays, restore, stored, remote)
    {call.__name__: call for call in calls}[do](mesh, folder, replicas)


if __name__ == "__main__":
    main(*sys.argv[1:])
