"""What all fuzz tests share: how many cases, what opening a file may cost, and how bytes get damaged.

Each format meets 200 cases in `make check`, 100 in the fast tests and 20,000 at night; ``SHARDLOAD_FUZZ_CASES=50000``
asks for more.
Cases are the same every time.
"""

from __future__ import annotations

import collections
import itertools
import os
import select
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardload.errors import ShardloadError
from shardload.loaders import open_manifest
from shardload.manifest import Extent

FAST_CASES = 100
FULL_CASES = int(os.environ.get("SHARDLOAD_FUZZ_CASES", "200"))
PEAK_FLOOR_BYTES = 64 << 10
"""A traceback with its frames, a few dozen objects of the manifest itself; 16 KiB in most cases."""
RESIDENT_FLOOR_BYTES = 1 << 20
"""libhdf5's cache of object headers has 1 MiB here, and `malloc` takes memory by 132 KiB."""
PATIENCE = 60
"""Seconds after which a file counts as one that makes us hang: far more than any takes on a slow, busy machine."""


class Format:
    """Bytes opening may allocate for each byte of the files: text becomes Python objects, which are larger.

    The factors are those of the densest files that can be made, rounded up: `test_fuzz_loaders.py` holds them.
    """

    SAFETENSORS = 12
    """``"a":"",`` in ``__metadata__``, 10 bytes: two strings, an entry in a dict that doubles as it grows."""
    GGUF = 12
    """A tensor's entry, 50 bytes: its `TensorInfo` twice, a `Tensor`, a shape, two names, a place in two dicts."""
    JSON = 21
    """``"ab":"c",`` in an index, 10 bytes: pairs for finding keys given twice, then a dict of them, and the keys'
    memo of Python's parser. Hugging Face's entries have 100 bytes: factor 4."""
    HDF5 = 6
    """A dataset of one number, 300 bytes: the name, a `Tensor` and its place, and about 1 KB in libhdf5."""


def number(request, fast, full):
    """How many cases to try: few where slow tests are left out."""
    return fast if "not slow" in request.config.option.markexpr else full


def fuzz(*, share=1, fast=FAST_CASES, **strategies):
    """Run a test body on many examples; ``share`` of a format's cases where several tests share them."""

    def decorate(body):
        def test(tmp_path, request):
            cases = number(request, fast, round(FULL_CASES * share))
            ends = collections.Counter()

            @settings(
                max_examples=cases, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
            )
            @given(**strategies)
            def run(**drawn):
                ends[body(tmp_path, **drawn) is None] += 1

            run()
            assert sum(ends.values()) >= cases * 0.9  # Hypothesis stops early where it has tried everything
            assert min(ends[True], ends[False]) >= cases // 100  # neither all refused nor all opened

        return test

    return decorate


def check(path, *, factor, **options):
    """Open a path; whatever happens must be what we promise."""
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    allowed = PEAK_FLOOR_BYTES + factor * size
    started = time.thread_time()
    manifest, peak = measured(path, options)
    if peak > allowed:  # unless it was the import of a module on first use
        manifest, peak = measured(path, options)
    assert peak <= allowed, f"{peak} bytes allocated for a file of {size}"
    assert time.thread_time() - started < PATIENCE
    if manifest is not None:
        check_places(manifest)
    return manifest


def measured(path, options):
    """The manifest, or `None` where there is an error of ours, and the most that Python allocated."""
    tracemalloc.start()
    try:
        return open_manifest(path, **options), tracemalloc.get_traced_memory()[1]
    except ShardloadError as error:
        assert str(error)
        return None, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def put(path, content):
    """Write a file anew and return it: some file systems flush what is overwritten to the disk, which takes longer."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


def check_places(manifest):
    """Every extent lies in its file, none over another."""
    spans = collections.defaultdict(list)
    for path, size in manifest.files.items():
        assert size == path.local_path().stat().st_size
    # Names of one stored tensor share its storage.
    for tensor in {id(tensor.storage): tensor for tensor in manifest.tensors.values()}.values():
        if isinstance(tensor.storage, Extent):
            start, stop = tensor.storage.offset, tensor.storage.offset + tensor.nbytes
            assert 0 <= start <= stop <= manifest.files[tensor.storage.path]
            if tensor.nbytes:
                spans[tensor.storage.path].append((start, stop))
        else:
            assert tensor.stored_bytes <= sum(manifest.files[path] for path in tensor.storage.reader.paths)
    for found in spans.values():
        found.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))


class Child:
    """`fuzz_child` at work, or another; a file that crashes it or makes it hang fails the test that sent it."""

    def __init__(self, script="fuzz_child.py"):
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def grown_by_opening(self, path):
        """Bytes by which opening raised its resident peak."""
        return int(self.ask(path))

    def ask(self, about):
        """The line that comes back for a line."""
        self._process.stdin.write(f"{about}\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], PATIENCE)[0], f"{about} makes it hang"
        answer = self._process.stdout.readline()
        assert answer, f"{about} ended the process: {self._process.wait()}"
        return answer

    def close(self):
        self._process.kill()
        self._process.communicate()


big = st.one_of(st.integers(-2, 20), st.integers(-(2**70), 2**70))
scalars = st.one_of(st.none(), st.booleans(), big, st.floats(), st.text(max_size=5))
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@st.composite
def damaged(draw, raw, *, hot=None):
    """``raw`` after a few flips, overwritten runs, splices, cuts or insertions; mostly in its first ``hot`` bytes."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(0, 4))):
        reach = len(data) if hot is None or draw(st.integers(0, 9)) == 0 else min(hot, len(data))
        at = draw(st.integers(0, max(0, reach - 1)))
        match draw(st.sampled_from(["flip", "byte", "run", "number", "splice", "cut", "trim", "insert"])):
            case "flip":
                data[at : at + 1] = bytes(b ^ (1 << draw(st.integers(0, 7))) for b in data[at : at + 1])
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "run":
                data[at : at + 8] = bytes([draw(st.sampled_from([0, 127, 128, 255]))]) * len(data[at : at + 8])
            case "number":
                data[at : at + 8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1)))
            case "splice":
                source = draw(st.integers(0, max(0, reach - 1)))
                count = draw(st.integers(1, 64))
                data[at : at + count] = data[source : source + count]
            case "cut":
                del data[at : at + draw(st.integers(1, len(data) or 1))]
            case "trim":
                del data[len(data) - draw(st.integers(0, min(200, len(data)))) :]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


@st.composite
def changed(draw, document):
    """A JSON document with up to three of its values, at any depth, replaced by anything or taken out."""
    document = {**document}
    for _ in range(draw(st.integers(0, 3))):
        inner = document
        key = draw(st.sampled_from(sorted(inner)))
        while isinstance(inner[key], dict) and inner[key] and draw(st.booleans()):
            inner[key] = inner = {**inner[key]}
            key = draw(st.sampled_from(sorted(inner)))
        if draw(st.booleans()):
            inner[key] = draw(anything)
        elif len(inner) > 1:
            del inner[key]
    return document
