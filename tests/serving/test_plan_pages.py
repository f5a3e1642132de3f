"""Plans for a mesh that a viewer chooses: as a page, as JSON, and refused where there is none."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import served

from shardload.serving.site.plan_view import asked_mesh, command_of, plan_lines
from shardload.synth import synth


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = tmp_path_factory.mktemp("planned")
    synth("gemma2_9b", scale=0.01, directory=made)
    save_file({"x": np.zeros(4)}, made / "alone.safetensors")
    with served("--root", made) as found:
        yield found


NAME = "gemma2_9b-x0.01"


@pytest.fixture(scope="module")
def plan(server):
    status, _, body = server.get(f"/api/v1/checkpoints/{NAME}/plan?mesh=2x4")
    assert status == 200, body
    return json.loads(body)


def test_a_plan_as_json_is_what_the_command_says(plan):
    assert (plan["source"], plan["mesh"], len(plan["devices"])) == (NAME, "batch=2,model=4", 8)
    assert plan["hosts"]["hosts"] == 8 and plan["hosts"]["read"] < plan["bytes"]["read"]
    assert "127.0.0.1" not in json.dumps(plan)


def test_the_page_shows_each_device_and_what_it_costs(server, plan):
    status, headers, body = server.get(f"/ui/plans/{NAME}?mesh=2x4&variable=token_embedding/embeddings")
    page = body.decode()
    assert status == 200 and "unsafe" not in headers["Content-Security-Policy"] and " style=" not in page
    assert [int(n) for n in re.findall(r"device (\d+)</span>", page)] == list(range(8))
    # Devices along the batch have the same part of the vocabulary.
    assert re.findall(r"part \d of 4</span><br>[^<]+", page) == 2 * [
        f"part {i + 1} of 4</span><br>{640 * i}:{640 * (i + 1)} \u00d7 all" for i in range(4)
    ]
    assert page.count('<th scope="row">') == 2 + len(plan["layout"]["variables"])
    for text in ("66.1 KiB of 262.6 KiB", "15 variables", "9 variables, 576 B", "by each device on a host of its own"):
        assert text in page


def test_without_a_mesh_the_page_asks_for_one(server):
    status, _, body = server.get(f"/ui/plans/{NAME}")
    assert status == 200 and b'name="mesh"' in body and b"mesh=1x8" in body and b'class="mesh"' not in body


MESHES = [
    "0x4",
    "1x",
    "x",
    "-1",
    "2x4x8",
    "a=b",
    "9" * 30,
    "1x99999",
    "<b>",
    "2x4 --layout=search",
    "1" * 500,
    "1e3",
    "%00",
]


@pytest.mark.parametrize("mesh", MESHES)
def test_hostile_meshes_are_refused_before_anything_runs(server, mesh):
    status, _, body = server.get(f"/ui/plans/{NAME}?mesh={mesh.replace(' ', '%20').replace('<', '%3C')}")
    assert status == 400 and b'class="refusal"' in body and b"<b>" not in body
    status, _, body = server.get(f"/api/v1/checkpoints/{NAME}/plan?mesh={mesh.replace(' ', '%20')}")
    assert status == 400 and json.loads(body)["error"].endswith(".")


def test_a_checkpoint_without_a_model_cannot_be_planned_and_says_so(server):
    status, _, body = server.get("/ui/plans/alone.safetensors?mesh=1x2")
    assert status == 422 and b'class="refusal"' in body and b"alone.safetensors" in body
    assert server.get("/ui/plans/missing?mesh=1x2")[0] == 404


def test_of_very_many_variables_the_first_are_shown_and_the_page_says_where_all_are(plan):
    first, *_ = plan["layout"]["variables"]
    variables = [{**first, "name": f"v{number}"} for number in range(4100)]
    many = {**plan, "source": "run/2", "layout": {**plan["layout"], "variables": variables}}
    page = "\n".join(plan_lines(many, asked_mesh("2x4"), chosen="v4050", hidden={}))
    assert len(re.findall(r'<th scope="row">v\d+</th>', page)) == 4000
    assert page.count("<option") == 4002 and "<option selected>v4050<" in page and "part 1 of 4" in page
    assert "Only the first 4,000 of 4,100 variables are shown" in page
    assert 'href="/api/v1/checkpoints/run/2/plan?mesh=batch%3D2%2Cmodel%3D4"' in page
    page = "\n".join(plan_lines(plan, asked_mesh("2x4"), chosen="", hidden={}))
    assert "Only the first" not in page


def test_many_devices_are_shown_in_part_and_in_a_chart(plan):
    mesh = asked_mesh("4x32")
    assert command_of(mesh) == ("plan", "--mesh=batch=4,model=32", "--hosts=128")
    many = {**plan, "mesh": "batch=4,model=32", "devices": [{**plan["devices"][0], "id": i} for i in range(128)]}
    page = "\n".join(plan_lines(many, mesh, chosen="", hidden={}))
    assert page.count("</span> 66.1 KiB") == 4 * 16 and "Only the first of 128 devices" in page
    assert "device × 128" in page  # noqa: RUF001


def test_names_in_plans_never_become_markup(plan):
    hostile = "<img src=x onerror=alert(1)>\x1b[1m"
    layout = {**plan["layout"], "variables": [{**plan["layout"]["variables"][0], "name": hostile, "reason": hostile}]}
    page = "\n".join(
        plan_lines(
            {**plan, "layout": layout, "notes": [hostile]}, asked_mesh("2x4"), chosen=hostile, hidden={"step": '"><b>'}
        )
    )
    assert "<img" not in page and "\x1b" not in page and "<b>" not in page and page.count("part 1 of 4") == 2
