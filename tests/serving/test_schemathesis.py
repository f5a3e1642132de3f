"""Requests that schemathesis makes up from the description of the addresses: `make schemathesis` runs this."""

import json
import subprocess

import pytest
from safetensors.numpy import save_file
from serving import served

EXAMPLES = 1500
SETTINGS = """
request-timeout = 180
[parameters]
"path.path" = "{}"
"query.mesh" = "1x2"
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "3xx", "403", "404", "412", "416", "422"]
use_after_free.enabled = false
"""
"""A condition that does not hold, a range past the end, a checkpoint without a model, and a form of another page are
requests of the right form. Each new mesh takes a process of its own. A job that was cancelled is still there."""


@pytest.mark.parametrize("path", ["models/model.safetensors", "models/", "models", "missing"])
def test_made_up_requests_are_answered_as_described(request, tmp_path, path):
    program = request.config.getoption("--schemathesis")
    if not program:
        pytest.skip("needs --schemathesis: run make schemathesis")
    (tmp_path / "root" / "models").mkdir(parents=True)
    (tmp_path / "root" / "other").mkdir()
    save_file({}, tmp_path / "root" / "models" / "model.safetensors")
    (tmp_path / "schemathesis.toml").write_text(SETTINGS.format(path))
    with served("--root", tmp_path / "root", "--log-json") as server:
        command = [program, "run", f"{server.address}/openapi.json", "--max-examples", str(EXAMPLES)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert server.process.poll() is None
        descriptors = server.descriptors()
        server.end()
    logged = [json.loads(line) for line in server.log if line.startswith("{")]
    statuses = [facts["status"] for facts in logged if "status" in facts]  # the others are about jobs
    assert len(statuses) > 1000 and max(statuses) < 500 and descriptors < 30
