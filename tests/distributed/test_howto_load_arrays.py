"""The script of the how-to that loads arrays in two processes, run as its reader would."""

import os
import re
from pathlib import Path

import warm_start
from process_runs import free_port

from shardload.synth import synth

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "start-several-processes.md").read_text()
(SCRIPT,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_two_processes_load_arrays(tmp_path):
    Path(synth("gemma2_2b", format="safetensors", scale=0.02, directory=tmp_path)).rename(tmp_path / "gemma2-hf")
    assert SCRIPT.count("localhost:9173") == 1
    script = SCRIPT.replace("9173", str(free_port()))
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    started = [warm_start.start(["-c", script, i], cwd=tmp_path, env=env) for i in range(2)]
    try:
        done = [one.communicate(timeout=150) for one in started]
    finally:
        for one in started:
            one.kill()
    width = int(done[0][0].split()[-1])
    half = width // 2
    assert [out for out, _ in done] == [
        f"process 0: columns 0 to {half} of {width}\n",
        f"process 1: columns {half} to {width} of {width}\n",
    ], done
