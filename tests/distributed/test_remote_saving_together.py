"""Several processes save one run to a bucket; another number of them goes on, on another mesh."""

import signal

import jax
import numpy as np
import pytest
from bucket_server import bucket
from orbax.checkpoint import v1 as ocp
from process_runs import Run, told_by

from shardload.runs.listing import list_steps
from shardload.verifying import verify

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("SHARDLOAD_STAGING", str(tmp_path / "staging"))
    with bucket(tmp_path / "bucket", monkeypatch) as found:
        yield found


def read_by_orbax(step):
    """All values of a step, read by plain Orbax."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = ocp.checkpointables_metadata(str(step)).metadata["pytree"]
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), stored)
    found = ocp.load_checkpointables(str(step), {"pytree": wanted})["pytree"]
    return [np.asarray(value).tobytes() for value in jax.tree.leaves(found)]


def test_a_killed_run_goes_on_with_other_processes_and_another_mesh(server, tmp_path):
    [whole, _] = told_by(2, 2, "2x2", "train", str(tmp_path / "local"))
    url, killed, staged = f"{server.s3}/run", [], []

    def kill(key):
        # In the middle of an upload: process 1 has sent a part of step 10.
        if key.startswith("run/10/pytree/") and "/c/" in key and not killed:
            killed.append(key)
            # One folder of each process: those of earlier steps are gone.
            staged.extend((tmp_path / "staging").glob("*/.staging/*"))
            for one in run.started:
                one.send_signal(signal.SIGKILL)

    server.on_put = kill
    with Run(2, 2, "2x2", "train", url) as run:
        outputs = [one.communicate(timeout=150)[0] for one in run.started]
    assert killed and len(staged) == 2, (outputs, staged)
    assert [info.step for info in list_steps(url)] == [4, 6, 8]
    assert any(name.startswith("run/10/") for name in server.names())
    assert {found.verdict for found in verify(url)} == {"verified"}

    [before] = told_by(1, 4, "1x4", "restore", url)
    assert before["step"] == 8
    together = told_by(4, 1, "4x1", "restore", url)
    assert {one["digest"] for one in together} == {before["digest"]}

    resumed = told_by(4, 1, "2x2", "resume", url)
    assert {(one["step"], one["digest"]) for one in resumed} == {(16, whole["digest"])}
    assert [info.step for info in list_steps(url)][-1] == 16
    assert read_by_orbax(server.folder / "run/16") == read_by_orbax(tmp_path / "local/16")
    assert not [name for name in server.names() if name.startswith("run/10/") or "/.staging/" in name]
