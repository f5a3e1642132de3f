"""What devices and reader threads hold at any moment, watched from outside."""

import functools
import gc
import subprocess
import sys
import weakref

import jax

import shardload.transfer.byte_source
import shardload.transfer.workers
from shardload.mapping.assign import Assigner

_BUFFERS = {}
"""Where the arrays seen before lie, by their ids: other tests leave thousands, and asking takes 5 µs each."""


def buffers_of(array):
    """Device, address and bytes of each shard."""
    seen, found = _BUFFERS.get(id(array), (lambda: None, ()))
    if seen() is not array:
        shards = [(s.device.id, s.data) for s in array.addressable_shards]
        found = [(device, data.unsafe_buffer_pointer(), data.nbytes) for device, data in shards]
        _BUFFERS[id(array)] = weakref.ref(array), found
    return found


def held():
    """Bytes of distinct live buffers per device."""
    buffers = {d.id: {} for d in jax.devices()}
    for array in jax.live_arrays():
        for device, address, n_bytes in buffers_of(array):
            buffers[device][address] = n_bytes
    return {device: sum(sizes.values()) for device, sizes in buffers.items()}


class Sampling:
    """Progress that looks at what devices hold, and remembers the most and how often it looked."""

    def __init__(self):
        gc.collect()
        self.before = held()
        self.samples = []

    def start(self, total_bytes, description):
        self.look()

    def advance(self, n_bytes):
        self.look()

    def stop(self):
        self.look()

    def look(self):
        now = held()
        self.samples.append({device: now[device] - self.before[device] for device in now})

    def most(self, device=0):
        return max(sample[device] for sample in self.samples)


def watch(monkeypatch):
    """Samples at every block read, every array that is ready and every layer or variable that is assigned."""
    found = Sampling()

    def watched(original):
        @functools.wraps(original)
        def call(*args):
            found.look()
            result = original(*args)
            found.look()
            return result

        return call

    for name in ("starting", "ready", "finish"):
        monkeypatch.setattr(Assigner, name, watched(getattr(Assigner, name)))
    return found


_PROGRAM = r"""
import gc, os, re, sys
os.environ["KERAS_BACKEND"] = "jax"
sys.modules["tensorflow"] = None
import jax
jax.config.update("jax_num_cpu_devices", 8)
import shardload

def number(name, file="status"):
    return int(re.search(name + r":\s+(\d+)", open("/proc/self/" + file).read())[1])

def peak():  # not ru_maxrss: exec hands a process its parent's, and a test run's is larger than any of these
    return number("VmHWM") << 10

def forget_peak():
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    return number("VmRSS") << 10
"""


def numbers_of_a_process(program, *arguments):
    """What a program prints that can ask for its own `number`s, its `peak` and to `forget_peak`."""
    command = [sys.executable, "-c", _PROGRAM + program, *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    return map(int, found.stdout.split())


def scratch_taken(monkeypatch):
    """Host memory that reader threads really take, in bytes, none of it counted as given back."""
    taken, original = [], shardload.transfer.workers.memory

    def memory(n_bytes):
        taken.append(n_bytes)
        return original(n_bytes)

    for module in (shardload.transfer.workers, shardload.transfer.byte_source):
        monkeypatch.setattr(module, "memory", memory)
    return taken
