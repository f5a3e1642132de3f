"""Devices that a caller names: in any sequence or array, and refused in the caller's terms."""

import jax
import numpy as np
import pytest

import shardload
from shardload.errors import UsageError
from shardload.sharding.devices import not_started, resolve_devices

WRONG = {
    "none": lambda: [],
    "an empty array": lambda: np.array([], dtype=object),
    "one device": lambda: jax.devices()[0],
    "names": lambda: ["cpu:0", "cpu:1"],
    "an array of names": lambda: np.array(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("mesh", [None, "1x2"])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_list_of_devices_is_refused(what, mesh):
    with pytest.raises(UsageError, match=r"Cannot use devices=.*: expected a list of devices such as jax\.devices"):
        resolve_devices(mesh, devices=WRONG[what]())
    with pytest.raises(UsageError, match="Cannot use devices="):
        shardload.AutoShardDistribution(mesh, devices=WRONG[what]())


def test_an_array_of_devices_is_a_list_of_them_in_mesh_order():
    devices = jax.devices()[:4][::-1]
    assert resolve_devices(devices=np.array(devices)).devices == tuple(devices)
    for shape in [(4,), (2, 2)]:
        assert resolve_devices("2x2", devices=np.array(devices).reshape(shape)).devices == tuple(devices)
    found = resolve_devices(devices=np.array(devices).reshape(2, 2))
    assert (str(found.mesh), found.devices) == ("batch=1,model=4", tuple(devices))


def test_a_process_that_does_not_come_is_the_cause_of_a_timeout(monkeypatch):
    error = RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:topology/1")
    assert "set JAX_PLATFORMS=cpu" in str(not_started(error))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert "it waits for every process: one of them has ended" in str(not_started(error))
