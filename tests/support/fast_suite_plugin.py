"""A pytest plugin that runs every test inside `shardload.fast`.

What became of each test is written as JSON to the file that KERAS_SUITE_RESULTS names.
"""

import json
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import pytest
from keras_modules import make_efficientnet_quick

import shardload

jax.config.update("jax_num_cpu_devices", 8)

make_efficientnet_quick()

results: dict[str, dict[str, dict]] = {}
calls: dict[str, list] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with shardload.fast() as report:
        try:
            return (yield)
        finally:
            calls[item.nodeid] = [{"call": call.call, "by": call.by, "why": call.why} for call in report]


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        file, _, name = report.nodeid.partition("::")
        results.setdefault(file, {})[name] = {
            "outcome": report.outcome,
            "why": str(getattr(crash, "message", "")),
            "calls": calls.get(report.nodeid, []),
        }


def pytest_sessionfinish():
    Path(os.environ["KERAS_SUITE_RESULTS"]).write_text(json.dumps(results))
