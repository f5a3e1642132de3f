"""What a restore from an object store says when the store, the network or the step are not as they should be."""

import shutil
import time

import keras
import numpy as np
import pytest
from object_server import BUCKET, served
from remote_runs import build, same, state, train
from saved_steps import save_step

import shardload
from shardload.cli import main
from shardload.errors import (
    DamagedError,
    MismatchError,
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
    UsageError,
)
from shardload.runs.digest_list import Digests, FileDigest
from shardload.runs.listing import list_steps
from shardload.stores.remote import RemoteStore
from shardload.verifying import verify

WIDTH = 320
"""Kernels of 800 KiB: data files of 4.7 MiB."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    model = train(folder / "run", width=WIDTH, epochs=2, monitor="loss")
    save_step(model, folder / "zipped", 1, compression="zstd")
    (folder / "foreign" / "3").mkdir(parents=True)
    (folder / "foreign" / "3" / "_CHECKPOINT_METADATA").write_text("{}")
    return folder, model


@pytest.fixture
def store(objects, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "2")
    with served(objects[0], monkeypatch) as server:
        yield server


def data_file(objects, step=2):
    found = max((objects[0] / "run" / str(step) / "pytree").rglob("d/*"), key=lambda p: p.stat().st_size)
    return found.relative_to(objects[0]).as_posix()


def flipped(at):
    return lambda data: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def expect(error, url, *words, **options):
    """A restore fails with one paragraph that says all of ``words``, and leaves the model as it was."""
    target = build(WIDTH, compiled=False)
    before = state(target)
    with pytest.raises((error, shardload.errors.LoadInterruptedError)) as caught:
        shardload.restore(target, url, atomic=True, **options)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "shardload-copy-" not in text and "[http_response" not in text
    assert all(np.array_equal(a, b) for a, b in zip(state(target), before, strict=True))
    causes = [caught.value, caught.value.__cause__]
    assert any(isinstance(cause, error) for cause in causes), causes
    return text


DAMAGE = {
    "from byte 3145728": lambda store, name: store.tampered.update({name: flipped(4_000_000)}),
    "was truncated": lambda store, name: store.tampered.update({name: lambda data: data[:-100_000]}),
    "is missing": lambda store, name: store.status.update({name: 404}),
}


@pytest.mark.parametrize("scheme", ["http", "s3", "gs"])
@pytest.mark.parametrize("said", DAMAGE)
def test_damage_of_data_is_named(objects, store, scheme, said):
    name = data_file(objects)
    DAMAGE[said](store, name)
    expect(DamagedError, f"{getattr(store, scheme)}/run", "Step 2 is damaged", name, said, step=2)


def test_the_step_before_is_taken_if_asked_for(objects, store):
    store.tampered[data_file(objects)] = flipped(4_000_000)
    report = shardload.restore(build(WIDTH), store.s3 + "/run", fallback="previous")
    assert report.source == store.s3 + "/run/1" and "step 2 is damaged" in report.notes[0]
    expect(DamagedError, store.s3 + "/run", "Step 1 is the newest before it: pass step=1")


@pytest.mark.parametrize("name", ["pytree/_METADATA", "shardload/structure.json", "shardload/digests.json"])
def test_a_flipped_bit_of_a_small_file(store, name):
    store.tampered[f"run/2/{name}"] = flipped(40)
    expect(DamagedError, store.s3 + "/run", "Step 2 is damaged", f"{store.s3}/run/2/{name}")


def test_a_b_tree_node_is_checked_like_everything(objects, store):
    node = min((objects[0] / "run/2/pytree/d").iterdir()).relative_to(objects[0]).as_posix()
    store.tampered[node] = flipped(100)
    expect(DamagedError, store.s3 + "/run", "Step 2 is damaged", node)


@pytest.mark.parametrize("scheme", ["http", "s3", "gs"])
def test_no_permission(store, scheme):
    store.status["*"] = 403
    way_out = {"http": "copy it", "s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}[scheme]
    expect(TransferError, f"{getattr(store, scheme)}/run", "may not be read", way_out, step=2)


def test_no_permission_for_one_object_is_not_damage(objects, store):
    store.status[data_file(objects)] = 403
    assert "is damaged" not in expect(TransferError, store.s3 + "/run", "may not be read", data_file(objects))


def test_errors_of_the_server_are_tried_again_and_told(objects, store):
    name = data_file(objects)
    store.status[name] = 500
    expect(TransferError, store.s3 + "/run", name, "cannot be read", "times in", "AWS_ENDPOINT_URL")
    assert sum(key == name for _, key, _, _ in store.requests) >= 3


def test_a_server_that_is_down(objects, store):
    store.close()
    expect(TransferError, store.http + "/run", "cannot be read", "Check the address, the network", step=2)
    expect(TransferError, store.s3 + "/run", "cannot be read", "AWS_ENDPOINT_URL", step=2)


@pytest.mark.parametrize("what", ["digests", "small", "data", "all", "all, without ranges"])
def test_a_web_page_in_place_of_a_file_is_no_damage(objects, store, what):
    store.ignores_ranges = what.endswith("ranges")
    files = {"digests": "shardload/digests.json", "small": "shardload/structure.json"}
    name = data_file(objects) if what == "data" else f"run/2/{files[what]}" if what in files else "*"
    store.paged.add(name)
    page = "" if name == "*" else f"{store.http}/{name} cannot be read: "
    said = f"{page}the server sent a web page, expected the file. It may be a page to log in"
    assert "damage" not in expect(TransferError, f"{store.http}/run/2", said, "copy it to this machine")


def test_a_redirect_to_a_page_to_log_in(objects, store):
    store.moved["run/2/shardload/digests.json"] = 302, f"{store.http}/login"
    store.paged.add("login")
    expect(TransferError, f"{store.http}/run/2", "sent a web page, expected the file")


@pytest.mark.parametrize(("scheme", "came"), [("http", 100), ("s3", 0)])
def test_a_server_that_stalls_is_asked_again(objects, store, scheme, came):
    name = data_file(objects)
    store.stalled[name] = came
    said = "it sent nothing for too long", " times in ", "SHARDLOAD_REMOTE_TIMEOUT=SECONDS waits longer"
    expect(TransferError, f"{getattr(store, scheme)}/run/2", name, *said)
    assert sum(key == name for _, key, _, _ in store.requests) >= 2


def test_a_server_that_ignores_ranges(store):
    store.ignores_ranges = True
    words = "the server ignores range requests", "Copy it to this machine first"
    expect(TransferError, store.http + "/run", *words, step=2, host_memory_bytes="16MiB")


def test_a_server_that_hangs_is_waited_for_once(objects, store, monkeypatch):
    for name in (path for path in store.names() if path.startswith("run/2/") and not path.endswith(".json")):
        store.stalled[name] = 0
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"sent (nothing for too long|less than)"):
        verify(store.http + "/run/2")
    # 1 s for each of the threads before.
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_status_that_is_repeated_is_told_at_last(store, status):
    store.status["*"] = status
    expect(TransferError, store.http + "/run", f"HTTP status {status}", " times in ", step=2)


def test_a_server_that_is_down_is_told(store):
    store.close()
    expect(TransferError, store.http + "/run", "Connection refused", " times in ", step=2)


def move_step(objects, store, status):
    """Answer requests for step 2 with a redirect to the same bytes at another address."""
    for name in (path for path in store.names() if path.startswith("run/2/")):
        store.moved[name] = (status, f"/{BUCKET}/{name.replace('run/2', 'elsewhere', 1)}?signature=a%2Fb")
        target = objects[0] / name.replace("run/2", "elsewhere", 1)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.hardlink_to(objects[0] / name)


@pytest.mark.parametrize("url", ["ftp://host/run", "az://bucket/run"])
def test_other_urls_are_no_paths(url):
    for call in (lambda: shardload.restore(build(WIDTH), url), lambda: list_steps(url)):
        with pytest.raises(UnsupportedError, match=r"Cannot read .*://.*, expected a path, or an address at s3://"):
            call()


def test_the_scheme_may_have_capitals(objects, store):
    target = build(WIDTH)
    shardload.restore(target, store.http.replace("http://", "HTTP://") + "/run", step=2)
    assert same(target, objects[1])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(objects, store, status):
    move_step(objects, store, status)
    target = build(WIDTH)
    shardload.restore(target, store.http + "/run", step=2)
    assert same(target, objects[1])


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("ftp://host/file", "it redirects to an address that is not encrypted, or not HTTP"),
        ("file:///etc/passwd", "HTTP status 302"),
        ("", "redirects too often"),
        ("http://[1/", "HTTP status 302"),
        ("digests.json", "it redirects too often"),
    ],
)
def test_redirects_that_are_not_followed(store, location, words):
    store.moved["run/2/shardload/digests.json"] = (302, location)
    expect(TransferError, store.http + "/run", words, "run/2/shardload/digests.json", step=2)


def test_no_password_is_sent_or_told(objects, store, monkeypatch):
    host = store.root.removeprefix("http://")
    name = "run/1/shardload/digests.json"
    store.moved["elsewhere/digests.json"] = (302, f"http://user:secret@{host}/{BUCKET}/{name}")
    assert RemoteStore(store.http).requests.size("elsewhere/digests.json") == store.size(name)
    assert not any("Authorization" in headers for headers in store.headers)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:secret@{host}")
    store.status["*"] = 403
    told = expect(TransferError, store.s3 + "/run", f"(at http://…@{host}) may not be read", step=2)
    assert "secret" not in told


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Cannot write to https://me:secret@host/a: no", "Cannot write to https://…@host/a: no"),
        ("ftp://secret@host, webdav://me:a@b@c/d", "ftp://…@host, webdav://…@c/d"),
        ("'https://host/a?X-Signature=secret' and more", "'https://host/a?…' and more"),
        (
            "hf://org/name@v1/sub, s3://bucket/a@b, me@host, ./a?b",
            "hf://org/name@v1/sub, s3://bucket/a@b, me@host, ./a?b",
        ),
    ],
)
def test_addresses_are_told_without_what_is_secret_in_them(text, shown):
    assert str(UsageError(text)) == str(TransferError(text)) == shown


@pytest.mark.parametrize("scheme", ["http", "s3", "gs"])
def test_an_error_says_the_status_and_the_address(store, scheme):
    store.status["*"] = 503
    address = f"(at {store.root})" if scheme != "http" else store.root
    expect(TransferError, f"{getattr(store, scheme)}/run", "HTTP status 503", address, step=2)


@pytest.mark.parametrize("scheme", ["http", "s3", "gs"])
@pytest.mark.parametrize("size", [0, 3])
def test_a_file_that_is_no_checkpoint(objects, store, scheme, size):
    (objects[0] / "m.weights.h5").write_bytes(bytes(size))
    url = f"{getattr(store, scheme)}/m.weights.h5"
    for call in (shardload.load, shardload.inspect):
        with pytest.raises(SourceError, match=f"^{url} (is empty|has the ending of a keras-h5 file, but begins)"):
            call(url)
    assert [found.verdict for found in verify(url)] == ["damaged"]
    with pytest.raises(SourceNotFoundError, match=f"^Cannot find steps at {url}: it is a file, expected the folder"):
        list_steps(url)


def test_nothing_there(objects, store):
    expect(SourceNotFoundError, store.s3 + "/nowhere", "There is nothing at s3://bucket/nowhere")
    expect(SourceNotFoundError, "s3://other/run", "There is no bucket s3://other")
    expect(SourceNotFoundError, store.s3 + "/run", "has no step 7. It has 2 steps: 1, 2", step=7)
    expect(SourceNotFoundError, store.http + "/run", f"There is no step at {store.http}/run/7", step=7)
    expect(SourceNotFoundError, store.http + "/run/7", f"There is no step at {store.http}/run/7")
    expect(UsageError, store.http + "/run", "Cannot find step 'newest'", step="newest")
    for url in (store.s3 + "/nowhere", store.http + "/nowhere"):
        with pytest.raises(SourceNotFoundError, match=f"There is no file {url}. Check the address"):
            verify(url)
    (objects[0] / "preset").mkdir(exist_ok=True)
    (objects[0] / "preset" / "config.json").write_text("{}")
    for root in (store.s3, store.http):
        with pytest.raises(SourceError, match=r"preset/config.json should describe a model"):
            shardload.load(root + "/preset")


def test_http_lists_nothing(store):
    expect(UnsupportedError, store.http + "/run", "shows no list of steps there", f"({store.http}/run/100)")


def test_http_with_index_pages_lists_steps(store):
    store.has_index = True
    assert [(info.step, info.ours) for info in list_steps(store.http + "/run")] == [(1, True), (2, True)]
    assert [(info.step, info.ours) for info in list_steps(store.http + "/foreign")] == [(3, False)]
    assert [found.verdict for found in verify(store.http + "/run")] == ["verified", "verified"]


def test_foreign_steps_are_told_apart(store):
    for url in (store.s3 + "/foreign", store.s3 + "/foreign/3", store.http + "/foreign/3"):
        expect(SourceError, url, "foreign/3 should contain a folder with a tree of arrays")
    assert [info.ours for info in list_steps(store.s3 + "/foreign")] == [False]
    assert [found.verdict for found in verify(store.s3 + "/foreign")] == ["damaged"]


def test_damage_of_a_compressed_step(objects, store):
    name = max((objects[0] / "zipped/1/pytree").rglob("d/*"), key=lambda p: p.stat().st_size)
    name = name.relative_to(objects[0]).as_posix()
    store.tampered[name] = flipped(2_500_000)
    expect(DamagedError, store.s3 + "/zipped", "Step 1 is damaged", name, "from byte 2097152")
    assert [verdict.verdict for verdict in verify(store.s3 + "/zipped")] == ["damaged"]


def test_a_step_without_digests_is_damaged(store):
    store.status["run/2/shardload/digests.json"] = 404
    expect(DamagedError, store.s3 + "/run", "digests.json is missing")
    assert [info.problems is None for info in list_steps(store.s3 + "/run")] == [True, False]
    assert [verdict.verdict for verdict in verify(store.s3 + "/run")] == ["verified", "damaged"]
    expect(DamagedError, store.s3 + "/run/2", "Step 2 at s3://bucket/run/2 is damaged: shardload/digests.json")


@pytest.mark.parametrize("place", ["run", "run/2"])
def test_a_list_of_steps_shows_what_the_sizes_of_files_tell(objects, store, place):
    name = data_file(objects)
    file, whole = objects[0] / name, (objects[0] / name).read_bytes()
    file.write_bytes(whole[:-1])
    try:
        info = list_steps(f"{store.s3}/{place}")[-1]
    finally:
        file.write_bytes(whole)
    assert info.problems.startswith(f"{name.removeprefix('run/2/')} was truncated: it has {len(whole) - 1} bytes")
    assert store.sent_of("/d/") == 0
    assert list_steps(f"{store.s3}/{place}")[-1].problems is None


def test_verify_names_all_that_is_wrong(objects, store):
    store.tampered[data_file(objects, step=1)] = lambda data: flipped(10)(flipped(3_500_000)(data))
    store.status["run/1/orbax.checkpoint"] = 404
    (objects[0] / "run/1/extra").write_text("more")
    (objects[0] / "run/1/.DS_Store").write_text("of Finder")
    try:
        problems = verify(store.s3 + "/run/1")[0].problems
    finally:
        (objects[0] / "run/1/extra").unlink()
        (objects[0] / "run/1/.DS_Store").unlink()
    assert len(problems) == 3 and "extra is unexpected" in problems[0]
    assert ["from byte 0" in problems[1], "from byte 3145728" in problems[2]] == [True, True]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:secret@127.0.0.1:1/run", "may not contain a user"),
        ("s3://", "names no bucket"),
        ("s3://bucket/a/../b", "not a name in a store"),
    ],
)
def test_addresses_that_cannot_be_used(url, words):
    with pytest.raises((UnsupportedError, SourceError), match=words) as caught:
        list_steps(url)
    assert "secret" not in str(caught.value)


def forged(folder, files):
    """A step whose digests list whatever is asked for."""
    (folder / "shardload").mkdir(parents=True)
    Digests(files).write(folder)


@pytest.mark.slow
def test_hostile_lists_of_files(objects, store):
    huge, large = FileDigest(1 << 40, ("0" * 16,) * 4), FileDigest(65 << 20, ("0" * 16,) * 65)
    for files, words in (
        ({"../../escape": FileDigest(0, ())}, "leads out of the step's folder"),
        ({"shardload/step.json": huge}, "one digest per MiB"),
        ({"pytree/_METADATA": large}, "the limit is 67108864"),
        ({f"pytree/{k}": FileDigest(1, ("0" * 16,)) for k in range(20_000)}, "20,000 small files"),
        ({"pytree/\udcff": FileDigest(1, ("0" * 16,))}, "not valid Unicode"),
    ):
        forged(objects[0] / "forged" / "1", files)
        with pytest.raises((DamagedError, TransferError, UnsafeSourceError, UnsupportedError), match=words):
            shardload.restore(build(WIDTH), store.s3 + "/forged")
        shutil.rmtree(objects[0] / "forged")
    assert store.sent_of("forged/1/pytree") == 0


def test_a_list_of_files_too_large_is_not_fetched(objects, store):
    store.tampered["run/2/shardload/digests.json"] = lambda data: data + bytes(33 << 20)
    expect(UnsafeSourceError, store.s3 + "/run", "digests.json should have at most 33554432 bytes")
    assert store.sent_of("run/2/shardload/digests.json") <= 4 << 20  # a slow answer is asked for again


def test_another_format_is_insisted_on(store):
    with pytest.raises(SourceNotFoundError, match=r"s3://bucket/run should contain a \.gguf file, but contains 1, 2"):
        shardload.load(store.s3 + "/run", format="gguf")
    with pytest.raises(UsageError, match="a path on this machine"):
        shardload.callbacks.OrbaxCheckpoint("http://127.0.0.1:1/run")


def test_a_model_that_does_not_fit_is_told_the_address(store):
    with pytest.raises(MismatchError, match=r"^s3://bucket/run/2 does not fit the model"):
        shardload.load_weights(build(8), store.s3 + "/run")
    with pytest.raises(MismatchError, match="s3://bucket/run/2"):
        shardload.restore(build(8), store.s3 + "/run")


def test_the_command_line_says_it_in_one_paragraph(objects, store, capfd):
    store.status[data_file(objects)] = 403
    assert main(["load", store.s3 + "/run"]) == 1
    text = capfd.readouterr().err
    assert text.startswith("Error: ") and "Traceback" not in text


def test_the_model_still_works_after_a_failure(objects, store):
    target = build(WIDTH)
    store.tampered[data_file(objects)] = flipped(4_000_000)
    with pytest.raises(ShardloadError):
        shardload.restore(target, store.s3 + "/run")
    store.reset()
    shardload.restore(target, store.s3 + "/run")
    assert same(target, objects[1])
    keras.utils.clear_session()


def test_answers_cut_short_are_asked_for_again(objects, store):
    name = data_file(objects)
    store.cut[name] = 2
    target = build(WIDTH)
    shardload.restore(target, store.s3 + "/run")
    assert same(target, objects[1]) and not store.cut[name]
    store.cut[name] = 1000
    expect(TransferError, store.s3 + "/run", name, "cannot be read")
