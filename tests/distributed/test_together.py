"""Loads and saves by several processes: all of them succeed alike, or all end soon, for the same reason.

The whole table is in docs/performance/process-failures.md; `make test-together` makes it."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from bucket_server import bucket
from object_server import ObjectServer, served
from process_runs import Run, told_by
from progress_calls import Counted
from safetensors.numpy import save_file
from together_runs import DISAGREEMENTS, Case, make_sources, outcomes

import shardload
from shardload import processes as job_processes
from shardload.errors import (
    BackendError,
    DisagreementError,
    MeshError,
    MissingExtraError,
    ProcessFailedError,
    SaveError,
    UsageError,
)
from shardload.keras_bridge.recording import seeded
from shardload.loaders import open_manifest
from shardload.pipeline import filling, preparing, source_facts
from shardload.pipeline.request import LoadWeightsRequest
from shardload.processes import agreement, error_word, from_elsewhere, joint_call
from shardload.resolve.opening import OpenedSource
from shardload.runs.digests import find_damage
from shardload.runs.listing import list_steps
from shardload.sharding import devices
from shardload.sharding.mesh import MeshSpec

SHARE = [
    Case("load", "transfer", "kill", 1), Case("load_weights", "headers", "stop", 0),
    Case("restore", "end", "stop", 1), Case("load", "before", "kill", 0), Case("load_weights", "before", "raise", 0),
    Case("restore", "transfer", "raise", 1), Case("load", "end", "raise", 0), Case("load", "import", "raise", 1),
    Case("load", "script", "raise", 1), Case("load", "before", "content", 1), Case("restore", "before", "mesh", 1),
    Case("load_arrays", "headers", "kill", 1), Case("load_arrays", "transfer", "stop", 1),
    Case("load_arrays", "end", "raise", 0), Case("load_arrays", "before", "mesh", 1),
    Case("load", "exchange", "raise", 1), Case("load_arrays", "exchange", "kill", 1),
    Case("restore", "exchange", "stop", 1),
    Case("save", "write", "stop", 1), Case("save", "publish", "kill", 1), Case("save", "write", "raise", 0),
    Case("save", "publish", "raise", 1), Case("save", "before", "step", 1), Case("save", "before", "model", 1),
    *(Case(call, "before", kind) for call in ("checkpointer", "fit") for kind in DISAGREEMENTS[call]),
]  # fmt: skip
"""Of `together_runs.all_cases`, each stage, kind and call at least once; the quick ones run while the others wait."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.slow
def test_what_goes_wrong_on_one_ends_all_soon_with_the_cause(sources):
    found = list(outcomes(SHARE, sources, at_once=4))
    assert [(str(one.case), one.wrong) for one in found if one.wrong] == []


FROM_S3 = [
    Case("load", "headers", "kill", store="s3"), Case("restore", "transfer", "kill", store="s3"),
    Case("load_arrays", "transfer", "stop", 3, 4, store="s3"), Case("load", "transfer", "raise", 3, 4, store="s3"),
    Case("load", "transfer", "stall", store="s3"), Case("load_arrays", "headers", "replaced", store="s3"),
    Case("load", "before", "content", 3, 4, store="s3"), Case("restore", "before", "mesh", store="s3"),
    Case("restore", "headers", "stop", store="s3"), Case("load_weights", "exchange", "kill", 0, store="s3"),
    Case("restore", "exchange", "raise", store="s3"), Case("load_arrays", "end", "kill", store="s3"),
]  # fmt: skip
TO_S3 = [
    Case("save", stage, kind, victim, store="s3")
    for stage, kind, victim in [
        ("upload", "kill", 0), ("record", "stop", 0), ("recorded", "kill", 0),
        ("upload", "stop", 1), ("record", "kill", 0), ("recorded", "stop", 0),
    ]
]  # fmt: skip
"""All of them take two minutes; the first half runs without ``--every-mesh``, too."""


@pytest.mark.slow
def test_what_goes_wrong_on_one_that_reads_from_an_object_store(sources, monkeypatch):
    with served(sources[0].parent, monkeypatch), closing(ObjectServer(sources[0].parent)) as stalling:
        # The server that one process asks sends the beginning of a file, and then nothing.
        stalling.stalled |= dict.fromkeys(stalling.names(), 1000)
        monkeypatch.setenv("STALLING_URL", stalling.root)
        monkeypatch.setenv("BUCKET_FOLDER", str(sources[0].parent))
        found = list(outcomes(FROM_S3, sources, at_once=4))
    assert [(str(one.case), one.wrong) for one in found if one.wrong] == []


@pytest.mark.slow
def test_what_goes_wrong_on_one_that_saves_to_a_bucket(request, sources, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_STAGING", str(tmp_path))
    with bucket(sources[0].parent, monkeypatch):
        cases = TO_S3 if request.config.getoption("--every-mesh") else TO_S3[:3]
        found = list(outcomes(cases, sources, at_once=3))
    assert [(str(one.case), one.wrong) for one in found if one.wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("call", ["load", "local", "load_arrays", "local_arrays"])
def test_a_load_by_all_is_alike_and_one_by_each_alone_waits_for_nobody(call, sources):
    first, second = told_by(2, 4, "2x4", call, sources[0], "none", "none", 9, module="together_child")
    if not call.startswith("local"):
        assert first["seeds"] and second["seeds"]  # nothing was drawn from the user's generators, which differ
        assert first["state"] == second["state"]
        assert first["opened"] and not second["opened"]  # process 0 hands out what it read of the headers
    else:
        assert first["loaded"] == second["loaded"]  # 0 loads twice, 1 once


@pytest.mark.slow
def test_a_step_saved_by_all_after_a_save_that_failed_on_one(sources):
    with Run(2, 4, "2x4", "save", sources[0], "none", "again", 9, module="together_child") as run:
        first, second = run.finish()
    assert first["state"] == second["state"]
    folder = sources[0] / f"saved-{run.port}"
    (step,) = list_steps(folder)
    assert (step.step, step.metrics) == (1, {"loss": 0.0})  # those of process 0
    assert find_damage(step.path) == []
    for saved, before in zip(
        shardload.load(folder).weights, shardload.load(sources[0] / "load.keras").weights, strict=True
    ):
        assert np.array_equal(saved, before)


@pytest.mark.slow
def test_where_one_finds_damage_all_fall_back_to_the_same_step(sources):
    first, second = told_by(2, 4, "2x4", "fallback", sources[0], "none", "none", 1, module="together_child")
    assert first["loaded"] == second["loaded"]
    for of_first, of_second in zip(first["notes"], second["notes"], strict=True):  # of the latest, and of the best
        assert of_first[0].startswith("step 2 is damaged and was passed over: On process 1: Step 2 is damaged")
        assert all(any(note.startswith("step 1") for note in notes) for notes in (of_first, of_second))


class Side:
    """A `JointCall` of two threads."""

    def __init__(self, index, barrier, words):
        self.index, self.barrier, self.words = index, barrier, words

    def together(self, do, what):
        self.words[self.index] = do()
        self.barrier.wait(10)
        said = list(self.words)
        self.barrier.wait(10)
        return said

    def first(self, do, what):
        return self.together(do if self.index == 0 else lambda: None, what)[0]


def compared(*facts):
    """What each of two processes raises that know these facts."""
    barrier, words = threading.Barrier(2), [None, None]

    def side(index):
        known = enumerate(facts[index])
        topics = [agreement.Topic(f"topic {i}", lambda one=one: one, "Pass the same") for i, one in known]
        try:
            agreement.require(Side(index, barrier, words), topics)
        except DisagreementError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(side, (0, 1)))


def test_processes_of_the_same_mind_go_on():
    assert compared([{"a": "1"}, {"b": "2"}], [{"a": "1"}, {"b": "2"}]) == [None, None]


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ({"a": "1", "b": "3"}, "b: process 0 has 2, process 1 has 3. Pass the same"),
        ({"a": "1"}, "b: process 0 has 2, process 1 has none"),
        ({"a": "1", "b": "2", "c": "4"}, "c: process 0 has none, process 1 has 4"),
    ],
)
def test_the_first_difference_is_named_on_all(mine, expected):
    for said in compared([{}, {"a": "1", "b": "2"}], [{}, mine]):
        assert f"disagree about topic 1. {expected}" in said


def pair(dtype="float32"):
    """Two layers of the same shapes, whose names Keras numbers on and on."""
    first, second = keras.layers.Dense(4, dtype=dtype), keras.layers.Dense(4, dtype=dtype)
    return keras.Sequential([keras.Input((4,)), first, keras.layers.Dropout(0.1), second])


def job_of(model, source, **options):
    request = LoadWeightsRequest(model=model, source=source, strict=False, **options)
    opened = OpenedSource(open_manifest(str(source)), None, ())
    options = {"layout": "auto", "matching": request.matching, "budget_bytes": None}
    return preparing.prepare_load(opened, model, devices.resolve_devices("1x1"), **options).validated()


def differing(*jobs):
    """What of two jobs is not the same."""
    mine, other = (filling.topics(job) for job in jobs)
    return [a.what for a, b in zip(mine, other, strict=True) if a.facts() != b.facts()]


def test_names_that_keras_numbers_are_no_difference(tmp_path):
    first, source = pair(), tmp_path / "x.weights.h5"
    first.save_weights(source)
    keras.layers.Dropout(0.1), keras.layers.Dense(1)
    second = pair()
    assert not {v.path for v in first.variables} & {v.path for v in second.variables}
    assert differing(job_of(first, source), job_of(second, source)) == []
    shallow = keras.Sequential(first.layers[:1])
    assert differing(job_of(first, source), job_of(shallow, source)) == ["the model", "the layout"]


def test_tensors_that_go_to_other_variables_are_a_difference_that_is_named(tmp_path):
    ones = np.ones((4, 4), np.float32)
    write(tmp_path / "x.safetensors", a=ones, b=ones)
    jobs = []
    for order in ("ab", "ba"):
        model = pair()
        names = dict(zip(order, (model.layers[0].kernel.path, model.layers[2].kernel.path), strict=True))
        jobs.append(job_of(model, tmp_path / "x.safetensors", names=names))
    assert differing(*jobs) == ["the model"]
    topic = next(one for one in filling.topics(jobs[0]) if one.what == "the model")
    assert topic.titles()["Variable 0"] == jobs[0].model.layers[0].kernel.path


def test_another_dtype_is_not_another_model(tmp_path):
    source = tmp_path / "x.weights.h5"
    pair().save_weights(source)
    assert differing(job_of(pair(), source), job_of(pair("float16"), source))[0] == "the dtype"  # told first, and alone


class Service:
    """The key-value store of a run, of which each thread is a process."""

    def __init__(self):
        self.words, self.news = {}, threading.Condition()
        self.me = threading.local()

    def key_value_set(self, key, word, allow_overwrite=False):
        with self.news:
            self.words[key] = word
            self.news.notify_all()

    def key_value_delete(self, prefix):
        pass

    def blocking_key_value_get(self, key, wait_ms):
        with self.news:
            if self.news.wait_for(lambda: key in self.words, wait_ms / 1000):
                return self.words[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    def found(self, prefix):
        return {key.removeprefix(prefix): word for key, word in self.words.items() if key.startswith(prefix)}

    def run(self, *programs):
        """What each process raises."""

        def run(index):
            self.me.index, self.me.calls = index, itertools.count()
            ignored = SimpleNamespace(append=lambda *_: None, remove=lambda *_: None)
            beat = SimpleNamespace(lost=None, found=self.found, each_beat=ignored)
            for name in ("ask", "forget", "check", "abandon"):
                setattr(beat, name, lambda *_: None)
            self.me.beat = beat
            try:
                programs[index]()
            except Exception as error:
                return error
            return None

        with ThreadPoolExecutor(len(programs)) as pool:
            return list(pool.map(run, range(len(programs))))


@pytest.fixture
def service(monkeypatch):
    made = Service()
    monkeypatch.setattr(job_processes, "run_client", lambda: made)
    monkeypatch.setattr(job_processes, "patiently", lambda request, beat: request())
    monkeypatch.setattr(job_processes, "heartbeat", lambda: made.me.beat)
    monkeypatch.setattr(job_processes, "are_several", lambda: True)
    monkeypatch.setattr(job_processes, "count", lambda: 2)
    monkeypatch.setattr(job_processes, "index", lambda: made.me.index)
    # Each process counts its own calls.
    monkeypatch.setattr(joint_call.JointCall, "numbers", iter(lambda: next(made.me.calls), None))
    monkeypatch.setattr(joint_call, "exit_recorder", lambda: SimpleNamespace(begin=int, note=str, rest=int))
    return made


def restore(**options):
    return lambda: shardload.restore("no model", "nowhere", **options)


def load_weights(**options):
    return lambda: shardload.load_weights("no model", "nowhere", **options)


def load(**options):
    return lambda: shardload.load("/nowhere/x.keras", **options)


def load_arrays(**options):
    return lambda: shardload.load_arrays("/nowhere/x.safetensors", lambda name, shape: None, **options)


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        (restore(), load_weights(), "the call. function: process 0 has 'restore', process 1 has 'load_weights'"),
        (load_weights(), load(), "the call. function: process 0 has 'load_weights', process 1 has 'load'"),
        (restore(step=1), restore(step=2), "the arguments. step: process 0 has 1, process 1 has 2"),
        (restore(step=1), restore(step="latest"), "step: process 0 has 1, process 1 has 'latest'"),
        (restore(), restore(items="weights"), "items: process 0 has 'all', process 1 has 'weights'"),
        (restore(), restore(strict=False), "strict: process 0 has True, process 1 has False"),
        (restore(), restore(atomic=True), "atomic: "),
        (restore(), restore(fallback="previous"), "fallback: "),
        (restore(), restore(rename={"a": "b"}), "rename['a']: process 0 has none, process 1 has 'b'"),
        (restore(names={"a": "b"}), restore(names={"a": "c"}), "names['a']: process 0 has 'b', process 1 has 'c'"),
        (load_weights(), load_weights(ignore_config=["a"]), "ignore_config: process 0 has [], process 1 has ['a']"),
        (load(), load(ignore=["a", "b"]), "ignore: "),
        (load(), load(task=False), "task: "),
        (load(), load(compile=False), "compile: "),
        (load(), load(safe_mode=False), "safe_mode: "),
        (
            load_arrays(),
            load_weights(),
            "the call. function: process 0 has 'load_arrays', process 1 has 'load_weights'",
        ),
        (load_arrays(strict=False), load_arrays(), "strict: process 0 has False, process 1 has True"),
        (load_arrays(names={"a": "b"}), load_arrays(), "names['a']: process 0 has 'b', process 1 has none"),
        (load(), load(custom_objects={"A": int}), "custom_objects['A']: process 0 has none, process 1 has type"),
    ],
)
def test_calls_that_differ_end_on_all_before_anything_else(service, mine, other, expected):
    for error in service.run(mine, other):
        assert type(error) is DisagreementError and expected in str(error)


def test_arguments_that_mean_the_same_may_be_written_otherwise(service):
    mine = restore(step=1, names={"a": "b", "c": "d"}, host_memory_bytes=1, progress=object())
    other = restore(step=np.int64(1), names={"c": "d", "a": "b"}, host_memory_bytes=2)
    assert [type(error) for error in service.run(mine, other)] == [UsageError, UsageError]  # of the model


def test_jax_starts_while_others_do_not_come_and_only_then():
    started = threading.Event()

    def start():
        started.set()
        raise MeshError("no devices")  # whoever starts JAX next says so

    with job_processes.starting_meanwhile(start, 60):
        pass
    assert not started.is_set()
    with job_processes.starting_meanwhile(start, 0.01):
        assert started.wait(10)


def test_processes_at_different_meetings_never_pair(service):
    def at(what):
        return lambda: joint_call.JointCall().together(lambda: {"step": 1}, what)

    for error in service.run(at("the choice of the step"), at("the start of JAX")):
        assert type(error) is DisagreementError
        assert "process 0 at 'the choice of the step', process 1 at 'the start of JAX'" in str(error)


def write(path, **tensors):
    save_file(tensors, path)
    return open_manifest(str(path))


def test_files_of_other_content_are_told_apart_whatever_their_paths(tmp_path):
    zeros, ones = np.zeros((64, 64), np.float32), np.ones((64, 64), np.float32)
    (tmp_path / "elsewhere").mkdir()
    first = write(tmp_path / "a.safetensors", x=ones, y=ones)
    same = write(tmp_path / "elsewhere" / "b.safetensors", x=ones, y=ones)
    other = write(tmp_path / "c.safetensors", x=ones, y=zeros)
    assert source_facts.source_facts(first) == source_facts.source_facts(same) == source_facts.source_facts(other)
    assert source_facts.content_facts(first, None) == source_facts.content_facts(same, None)
    found = source_facts.content_facts(other, None)
    differ = [key for key, text in source_facts.content_facts(first, None).items() if found[key] != text]
    assert differ[0] == "The first bytes of tensor 'y'"
    cast = write(tmp_path / "d.safetensors", x=ones, y=ones.astype(np.float16))
    assert source_facts.source_facts(first) != source_facts.source_facts(cast)


def test_looking_at_content_is_bounded(tmp_path):
    many = write(tmp_path / "many.safetensors", **{f"t{i}": np.ones(300, np.float32) for i in range(2000)})
    assert len(source_facts.content_facts(many, None)) <= source_facts.SPOTS


@pytest.mark.parametrize(
    "error",
    [
        BackendError("torch"),
        MissingExtraError("gguf", extra="gguf", needed_for="GGUF"),
        MeshError("no"),
        SaveError(28, "x"),
    ],
)
def test_an_error_of_ours_keeps_its_class_and_words_elsewhere(error):
    found = from_elsewhere(3, error_word(error), foreign=ProcessFailedError)
    assert type(found) is type(error)
    assert str(found) == f"On process 3: {error}"


def test_another_error_names_its_kind():
    found = from_elsewhere(3, error_word(KeyError("x")), foreign=ProcessFailedError)
    assert type(found) is ProcessFailedError and str(found) == "On process 3: KeyError: 'x'"


def mesh_of(processes, each, sizes):
    class Device:
        platform = "cpu"

        def __init__(self, number):
            self.id, self.process_index = number, number // each

    spec = MeshSpec.parse(sizes)
    return devices.MeshDevices(spec, tuple(Device(i) for i in range(processes * each))[: spec.size])


@pytest.mark.parametrize(
    ("processes", "each", "sizes"),
    [(2, 4, "2x4"), (2, 4, "1x8"), (2, 4, "4x2"), (4, 2, "8x1"), (3, 2, "3x2"), (8, 1, "2x4")],
)
def test_a_mesh_of_equal_blocks_is_shared(monkeypatch, processes, each, sizes):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    devices.check_shares(mesh_of(processes, each, sizes))


@pytest.mark.parametrize(
    ("processes", "each", "sizes", "what"),
    [
        (3, 2, "2x3", "do not form a block"),
        (2, 3, "1x4", "process 0 has 3, process 1 has 1"),
        (2, 4, "1x4", "process 0 has 4, process 1 has 0"),
    ],
)
def test_a_mesh_that_divides_processes_unevenly_is_refused(monkeypatch, processes, each, sizes, what):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(MeshError, match=f"cannot be shared evenly by {processes} processes: .*{what}"):
        devices.check_shares(mesh_of(processes, each, sizes))


def drawn():
    return random.random(), np.random.random(), float(keras.random.uniform(()))


@pytest.mark.parametrize("fails", [False, True])
def test_seeds_are_drawn_alike_and_the_users_generators_go_on(fails):
    keras.utils.set_random_seed(3)
    drawn()
    expected = [drawn(), drawn()]
    keras.utils.set_random_seed(3)
    drawn()
    found = [drawn()]
    inside = []
    for _ in range(2):
        with pytest.raises(ValueError, match="fails") if fails else seeded(11):
            if not fails:
                inside.append(drawn())
                continue
            with seeded(11):
                inside.append(drawn())
                raise ValueError("fails")
    assert inside[0] == inside[1]
    assert [*found, drawn()] == expected


def test_progress_says_which_process_counts(monkeypatch):
    monkeypatch.setattr(job_processes, "index", lambda: 2)
    monkeypatch.setattr(job_processes, "count", lambda: 4)
    counted = Counted()
    joint_call.Watched(counted, lambda: None).start(8, "Loading x")
    joint_call.Alone().watched(counted).start(8, "Loading x")
    assert [stage for stage, _, _ in counted.stages] == ["Loading x on process 2 of 4", "Loading x"]
