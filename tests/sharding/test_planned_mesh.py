import json
import subprocess
import sys

import pytest

from shardload.sharding.mesh import MeshSpec, planned_mesh

MESH = MeshSpec(("data", "model"), (2, 4))


def test_the_mesh_of_a_saved_plan_is_read_without_jax(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"mesh": {"axes": MESH.axes, "sizes": MESH.sizes}}))
    assert planned_mesh(file) == planned_mesh(str(file)) == MESH
    code = f"import sys; from shardload.sharding.mesh import planned_mesh; planned_mesh({str(file)!r}); "
    subprocess.run([sys.executable, "-c", code + "assert 'jax' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"mesh": "2x4"}', '{"mesh": {"axes": ["a"], "sizes": [0]}}', b"\xff"]
)
def test_what_is_no_plan_has_no_mesh(content, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert planned_mesh(file) is None
    assert planned_mesh(tmp_path / "none.json") is planned_mesh("search") is planned_mesh(None) is None
