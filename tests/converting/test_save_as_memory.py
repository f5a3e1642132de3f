"""The memory of a process that saves a model, as the system counts it; and saves by several processes."""

import re
import subprocess
import sys

import numpy as np
import pytest
from conversions import same
from process_runs import Run, told

import shardload
from shardload.synth import synth

MIB = 1 << 20

_CHILD = """
import gc, os, re, sys
os.environ["KERAS_BACKEND"] = "jax"
sys.modules["tensorflow"] = None
import jax
jax.config.update("jax_num_cpu_devices", 8)
import shardload

small, large, folder, to, budget = sys.argv[1:]

def number(pattern):
    return int(re.search(pattern, open("/proc/self/status").read())[1]) << 10

shardload.save_as(shardload.load(small, mesh="1x8"), folder + "/small", to=to)  # what is imported and warmed up once
model = shardload.load(large, mesh="1x8")
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
resident = number(r"VmRSS:\\s+(\\d+)")
report = shardload.save_as(model, folder + "/large", to=to, host_memory_bytes=int(budget))
print(number(r"VmHWM:\\s+(\\d+)") - resident, report.n_bytes, max(v.value.nbytes for v in model.variables))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "preset"])
def test_a_process_grows_by_the_budget_and_not_by_a_tensor(to, tmp_path):
    small, large = (synth("gemma2_9b", scale=scale, directory=tmp_path) for scale in (0.02, 0.24))
    budget = 16 * MIB
    child = [sys.executable, "-c", _CHILD, small, large, tmp_path, to, budget]
    found = subprocess.run(list(map(str, child)), capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    growth, n_bytes, largest = map(int, found.stdout.split())
    assert largest > budget + 32 * MIB
    assert n_bytes > 300 * MIB
    assert growth <= budget + 32 * MIB


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return synth("gemma2_9b", scale=0.02, directory=tmp_path_factory.mktemp("preset"))


def values(model):
    return [np.asarray(v.value).tobytes() for v in model.variables]


def saved_by_two(do, preset, folder):
    """The exit codes, and what each process told."""
    with Run(2, 4, "1x8", do, preset, folder, module="save_as_child") as run:
        outputs = [one.communicate(timeout=150)[0] for one in run.started]
    codes = [one.returncode for one in run.started]
    events = [told(output) for output in outputs]
    assert all(one and one[0]["spread"] > 10 for one in events), outputs
    return codes, events


@pytest.mark.slow
def test_two_processes_write_their_own_shards(preset, tmp_path):
    codes, events = saved_by_two("all", preset, tmp_path)
    assert codes == [0, 0]
    assert events[0][-1]["tensors"] == events[1][-1]["tensors"]
    shardload.convert(preset, tmp_path / "converted", to="safetensors")
    assert same(tmp_path / "converted", tmp_path / "safetensors")
    assert same(preset, tmp_path / "preset")
    assert same(preset, tmp_path / "alone")
    shardload.convert(preset, tmp_path / "converted.weights.h5")
    one, two = (shardload.load(tmp_path / f"{name}.weights.h5") for name in ("converted", "one"))
    assert values(one) == values(two.backbone)
    assert (
        shardload.inspect(tmp_path / "lora").tensors.keys()
        == shardload.inspect(tmp_path / "safetensors").tensors.keys()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "match"),
    [
        ("raise", "ProcessFailedError: On process 1: ValueError: the cable was cut"),
        ("kill", "ProcessLostError: Process 1"),
        ("disagree", "disagree about the arguments. dtype: process 0 has 'float32', process 1 has 'float16'"),
        ("apart", "WriteError: On process 1: .*Give a folder that all processes share"),
    ],
)
def test_what_goes_wrong_on_one_process_leaves_nothing(do, match, preset, tmp_path):
    codes, events = saved_by_two(do, preset, tmp_path)
    assert 0 not in codes
    assert re.search(match, events[0][-1]["error"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
