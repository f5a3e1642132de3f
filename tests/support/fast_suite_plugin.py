"""A pytest plugin that runs every test inside `shardload.fast`.

What became of each test is written as JSON to the file that KERAS_SUITE_RESULTS names.
"""

import pytest
from keras_modules import keep, make_efficientnet_quick, write

import shardload

make_efficientnet_quick()

calls: dict[str, list] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with shardload.fast() as report:
        try:
            return (yield)
        finally:
            calls[item.nodeid] = [{"call": call.call, "by": call.by, "why": call.why} for call in report]


def pytest_runtest_logreport(report):
    keep(report, calls=calls.get(report.nodeid, []))


pytest_sessionfinish = write
