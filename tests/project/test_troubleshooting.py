"""The pages of messages: each heading is a message that is really raised, and the index of all of them is complete.

    ### `does not divide into … parts`            words of the message
    `LayoutError`: a dim that …                   who says it: a class of shardload.errors,
    From **JAX**: …                               or another program, whose words are looked up or produced here
    **Fix:** …

``python tests/project/test_troubleshooting.py`` writes the index of all messages.
"""

import ast
import functools
import mmap
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from orbax.checkpoint import v1
from page_blocks import slug
from process_runs import free_port
from quoted_messages import classes_near, is_said, pattern, texts_in
from safetensors.numpy import load_file

from shardload import errors

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
ENTRY = HOW_TO / "troubleshooting.md"
PAGES = sorted(HOW_TO.glob("troubleshooting-*.md"))
BEGIN, END = "<!-- messages -->\n", "<!-- end of messages -->\n"
OURS = ("shardload", "shardload's command line", "the server")
MADE_ELSEWHERE = {
    "`No space left on device`": "the system's words at the end of many messages",
    "`Permission denied`": "the same",
    "`No token was sent`": "advice of stores/tokens.py at the end of an error of stores/answers.py",
    "`The server refused the token`": "the same",
}
"""Messages → why no module both contains them and names their class."""
CITED = {
    "`Killed`, `OOMKilled` or exit code 137: the system ended the process",
    "`The TPU is already in use by process with pid …`",
    "`NCCL operation … failed: unhandled system error`",
}
"""Messages of others that no installed package contains: the page links to where they are documented."""
IN_PACKAGES = {
    "`Unable to allocate … for an array with shape …`": "numpy/_core/_exceptions.py",
    "`implies that array axis … is partitioned … times, but the dimension size is …`": "jax/_src/sharding.py",
    "`CUDA-enabled jaxlib is not installed. Falling back to …`": "jax/_src/xla_bridge.py",
    "`Involuntary full rematerialization`": "jaxlib/libjax_common.so",
    "`Very slow compile?`": "jaxlib/libjax_common.so",
    "`Expected any non-tensor type, but got a tensor instead`": "tensorflow/python/framework/tensor_util.py",
    "`jax.distributed.initialize() must be called before any JAX calls`": "jax/_src/distributed.py",
    "`Terminating process because the JAX distributed service detected fatal errors`": "jaxlib/libjax_common.so",
    "`The following tasks are unhealthy (stopped sending heartbeats)`": "jaxlib/libjax_common.so",
    "`Barrier timed out`": "jaxlib/libjax_common.so",
    "`Fetching value for …jax.Array… that spans non-addressable`": "jax/_src/array.py",
    "`Unknown preset identifier. A preset must be a one of:`": "keras_hub/src/utils/preset_utils.py",
    "`Destination … already exists`": "orbax/checkpoint/experimental/v1/_src/saving/path_utils.py",
    "`is not compatible with the stored shape`": "orbax/checkpoint/_src/serialization/serialization.py",
    "`Access to model … is restricted`, `Cannot access gated repo for url …`": "huggingface_hub",
}
"""Messages of others → the file, as installed, that contains their words; of a package, its files of errors."""


@functools.cache
def sections():
    """(page, heading) → text, for each message."""
    found = {}
    for page in PAGES:
        for part in re.split(r"^(?=#{2,3} )", page.read_text(), flags=re.MULTILINE):
            heading, _, text = part.partition("\n")
            if heading.startswith("### "):
                assert (page, heading) not in found
                found[page.name, heading.removeprefix("### ")] = text.strip()
    return found


def told_by(text):
    """The classes of shardload.errors, or the other programs, that say a message."""
    sentence = re.sub(r"\([^)]*\)", "", text.partition(":")[0])
    classes = re.findall(r"`(\w+)`", sentence)
    return classes or re.findall(r"\*\*(.+?)\*\*", sentence)


def words(heading):
    """What is quoted in a heading, and is to be found in order."""
    return re.findall(r"`([^`]+)`", heading)


def of_ours():
    for key, text in sections().items():
        found = told_by(text)
        if found[0] in OURS or found[0] in errors.__all__:
            yield *key, found


def test_each_message_says_who_raises_it_and_what_to_do():
    for (page, heading), text in sections().items():
        assert told_by(text), (page, heading)
        assert re.match(r"(`\w+`|From \*\*)", text), (page, heading)
        assert "**Fix:**" in text or text.endswith("the same."), (page, heading)


def test_each_quoted_message_is_in_the_package():
    assert len(list(of_ours())) > 80
    unsaid = [(page, heading) for page, heading, _ in of_ours() if not all(map(is_said, words(heading)))]
    assert unsaid == []


def test_a_message_that_nobody_says_is_found():
    assert not is_said("The moon … is made of green cheese")


def test_messages_are_of_the_classes_that_are_named():
    wrong = [
        (heading, name)
        for _, heading, classes in of_ours()
        for name in classes
        if name in errors.__all__ and heading not in MADE_ELSEWHERE
        if not any(name in classes_near(quoted) for quoted in words(heading))
    ]
    assert wrong == []


def test_every_public_class_of_errors_is_treated():
    treated = {name for text in sections().values() for name in told_by(text)}
    assert errors.__all__ and {*errors.__all__} - treated == {"ShardloadError"}
    assert "`ShardloadError`" in ENTRY.read_text()


# ---- messages of others --------------------------------------------------------------------------


def of_others():
    ours = {heading for _, heading, _ in of_ours()}
    return [heading for _, heading in sections() if heading not in ours]


def is_in_file(path, quoted):
    if path.suffix == ".py":
        texts = map(texts_in, ast.walk(ast.parse(path.read_text())))
        return any(pattern(quoted).search(text) for text in texts)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parts = [part.strip() for part in re.split(r"…|\d+", quoted) if part.strip()]
        return all(content.find(part.encode()) >= 0 for part in parts)


@pytest.mark.parametrize("heading", IN_PACKAGES)
def test_an_installed_package_contains_its_message(heading):
    site, name = Path(jax.__file__).parents[1], IN_PACKAGES[heading]
    paths = [site / name] if "/" in name else [site / name / "errors.py", site / name / "utils" / "_http.py"]
    assert all(any(is_in_file(path, quoted) for path in paths) for quoted in words(heading))


def model_of(*units, build=True):
    layers = [keras.layers.Dense(n) for n in units]
    return keras.Sequential([keras.Input((4,)), *layers] if build else layers)


def use_donated_array(folder):
    x = jax.numpy.zeros(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x + 1


def set_devices_late(folder):
    jax.devices()
    jax.config.update("jax_num_cpu_devices", 5)


def load_pointer(folder):
    (folder / "a.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 12345\n"
    )
    load_file(folder / "a.safetensors")


def load_no_hdf5(folder):
    (folder / "a.weights.h5").write_text("<html>")
    model_of(8).load_weights(folder / "a.weights.h5")


def load_other_weights(folder, *units, **options):
    model_of(8).save_weights(folder / "a.weights.h5")
    model_of(*units, **options).load_weights(folder / "a.weights.h5")


def load_other_tree(folder):
    v1.save(folder / "a", {"a": np.zeros(4)})
    v1.load(folder / "a", {"b": jax.ShapeDtypeStruct((4,), "float32")})


def wait_for_another_process(folder):
    code = f"import jax; jax.distributed.initialize('127.0.0.1:{free_port()}', 2, 0, initialization_timeout=1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, check=False)
    assert done.returncode == -signal.SIGABRT  # 134 to a shell
    raise RuntimeError(done.stderr)


PRODUCED = {
    "`RESOURCE_EXHAUSTED: Out of memory allocating … bytes`": lambda folder: jax.numpy.zeros(1 << 46, "float32"),
    "`DEADLINE_EXCEEDED: Deadline Exceeded`, `RPC: /…CoordinationService/RegisterTask`": wait_for_another_process,
    "`jax_num_cpu_devices config should be updated before backends are initialized`": set_devices_late,
    "`Number of devices … must be >= the product of mesh_shape`": lambda folder: jax.make_mesh((1 << 20,), ("a",)),
    "`Array has been deleted with shape=…`": use_donated_array,
    "`Error while deserializing header: header too large`": load_pointer,
    "`Unable to synchronously open file (file signature not found)`": load_no_hdf5,
    "`objects could not be loaded`": lambda folder: load_other_weights(folder, 8, 3),
    "`The shape of the target variable and the shape of the target value`": lambda folder: load_other_weights(
        folder, 9
    ),
    "`You are loading weights into a model that has not yet been built`": lambda folder: load_other_weights(
        folder, 8, build=False
    ),
    "`User-provided restore item and on-disk value metadata tree structures do not match`": load_other_tree,
    "`Checkpoint path should be absolute`": lambda folder: v1.save("relative", {"a": np.zeros(4)}),
}
"""Messages of others → what makes them; it gets an empty folder."""


@pytest.mark.parametrize("heading", PRODUCED)
def test_a_message_of_others_is_what_they_say(heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as raised:  # of any library
        PRODUCED[heading](tmp_path)
    assert all(pattern(quoted).search(str(raised.value)) for quoted in words(heading)), raised.value


def test_every_message_of_others_is_looked_up_produced_or_cited():
    known = [*IN_PACKAGES, *PRODUCED, *CITED]
    assert sorted(of_others()) == sorted(known)
    texts = {heading: text for (_, heading), text in sections().items()}
    assert [heading for heading in CITED if "](https://" not in texts[heading]] == []


# ---- the index -----------------------------------------------------------------------------------


def index():
    lines = []
    for page in PAGES:
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"### {title}\n\n")
        lines += [f"* [{heading}]({name}#{slug(heading)})\n" for name, heading in sections() if name == page.name]
        lines.append("\n")
    return "".join(lines)


def test_the_index_has_every_message():
    assert BEGIN + index() + END in ENTRY.read_text(), f"run python {Path(__file__).name}, which writes it"


if __name__ == "__main__":
    text = ENTRY.read_text()
    ENTRY.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + index() + END, text, flags=re.DOTALL))
    sys.stdout.write(index())
