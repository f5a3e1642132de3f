"""Damaged steps: ours, those of Keras' own callback, and of plain Orbax in every way it stores arrays.

Whatever a folder holds, looking at it, loading, planning, verifying, listing and restoring end with a result or one of
our errors, in bounded time and memory (`orbax_fuzz_child` does that, `orbax_damage` the damage). And what comes back is
right: a step of ours that restores is bit-equal to the one that was saved; one without digests has the shapes, dtypes
and values that TensorStore itself reads from the same files.
"""

import functools
import json
import shutil

import orbax_seeds
import pytest
from fuzzing import PATIENCE, Child, fuzz
from hypothesis import strategies as st
from object_server import ObjectServer
from orbax_damage import hurt, sign

RESIDENT_BYTES = 64 << 20
"""Of any one call, beside three times the largest tensor: staging buffers, compiled transfers, digests' threads."""
INSPECT_RESIDENT_BYTES = 24 << 20
"""Headers alone: thread pools of TensorStore, and 20 times a folder of 100 KB."""
child = None


@pytest.fixture(autouse=True, scope="module")
def _child():
    global child  # noqa: PLW0603 - Hypothesis runs bodies that take no fixtures
    child = Child("orbax_fuzz_child.py")
    yield
    child.close()


@functools.cache
def seed(home, name):
    """The root of an undamaged seed and what its latest step holds."""
    root = home / "seeds" / name
    root.mkdir(parents=True)
    orbax_seeds.write(name, root)
    ask(root, latest(root), quick=False)  # imports and compiles, which counts for nothing
    return root, ask(root, latest(root), quick=False)


def latest(root):
    return max((path for path in root.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def ask(root, step, *, quick):
    strict = "ours" in (root.name, root.parent.name)  # others call an optimizer adam_1, or save more than the model has
    return json.loads(child.ask(json.dumps({"root": str(root), "step": str(step), "quick": quick, "strict": strict})))


def damaged(home, name, draw, *, is_signed=False):
    """Damage a copy of a seed and use it; what came of it."""
    root, done = hurt_copy(home, name, draw, is_signed=is_signed)
    found = ask(root, latest(root), quick=draw(st.integers(0, 3)) > 0)
    check(found, done)
    assert found["grown"]["inspect"] < INSPECT_RESIDENT_BYTES, (done, found["grown"])
    return found


def hurt_copy(home, name, draw, *, is_signed):
    source = seed(home, name)[0]
    shutil.rmtree(home / "case", ignore_errors=True)
    root = shutil.copytree(source, home / "case" / name / "root")
    done = hurt(draw, latest(root))
    if is_signed:
        sign(draw, latest(root))
    return root, done


def check(found, done):
    """Only errors of ours, and neither time nor memory without end."""
    assert not found["unexpected"], (done, *found["unexpected"].items())
    assert max(found["seconds"].values()) < PATIENCE, (done, found["seconds"])
    most = RESIDENT_BYTES + 3 * found["declared"]
    assert max(found["grown"].values()) < most, (done, found["grown"], found["declared"])


@pytest.mark.slow
def test_undamaged_seeds_are_taken(tmp_path):
    for name in orbax_seeds.SEEDS:
        _, good = seed(tmp_path, name)
        assert not good["unexpected"]
        assert good["tensors"]
        others = {said for did, said in good["ended"].items() if did != "plan" or name in ("ours", "keras")}
        assert others == {"done"}, good["ended"]


@fuzz(share=0.06, fast=15, data=st.data())
def test_a_step_of_ours(tmp_path, data):
    good = seed(tmp_path, "ours")[1]
    found = damaged(tmp_path, "ours", data.draw)
    assert found["restored"] in (None, good["restored"]), "restored something else than was saved"
    assert found["verdict"] != "verified" or found["tensors"] == good["tensors"]
    return found["restored"]


@fuzz(share=0.06, fast=15, data=st.data())
def test_a_step_of_ours_whose_digests_are_right(tmp_path, data):
    """Somebody made new digests of the damage: all that comes after they were compared sees it."""
    return damaged(tmp_path, "ours", data.draw, is_signed=True)["restored"]


@fuzz(share=0.06, fast=15, data=st.data())
def test_a_step_of_keras(tmp_path, data):
    return damaged(tmp_path, "keras", data.draw)["restored"]


@fuzz(share=0.06, fast=20, data=st.data())
def test_plain_orbax(tmp_path, data):
    name = data.draw(st.sampled_from(orbax_seeds.SEEDS[2:]))
    return damaged(tmp_path, name, data.draw).get("tensors")


@fuzz(share=0.02, fast=5, data=st.data(), is_signed=st.booleans())
def test_a_remote_step_of_ours(tmp_path, data, is_signed):
    good = seed(tmp_path, "ours")[1]
    root, done = hurt_copy(tmp_path, "ours", data.draw, is_signed=is_signed)
    server = ObjectServer(root)
    try:
        found = json.loads(child.ask(json.dumps({"url": f"{server.http}/{latest(root).name}"})))
    finally:
        server.close()
    check(found, done)
    assert is_signed or found["restored"] in (None, good["restored"])
    return found["restored"]
