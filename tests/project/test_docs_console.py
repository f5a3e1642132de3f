"""The commands of README and docs: the command line of shardload accepts each, and each is run, or says why not.

Blocks are found by their commands, so that they may move from page to page.
"""

import contextlib
import io
import re
import shlex
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import keras
import numpy as np
import page_world
import pytest
import warm_start
import yaml
from bucket_server import bucket
from page_blocks import FENCE, ROOT, blocks, shown_commands
from page_outputs import NUMBERS, UNSTABLE, difference, is_as_shown
from serving import served

from benchmarks import pictures
from shardload.callbacks import OrbaxCheckpoint
from shardload.cli import main
from shardload.console.app import command

SHOWN = shown_commands()
FILES = re.compile(r"[\w-]+\.(?:toml|json|pem)|tokens")
"""Values of options that must be files when they are parsed."""
OPERATORS = {"|", "||", "&&", "&", ";", ">"}


def calls(line):
    """The words after ``shardload`` of each call in a line of a shell."""
    lexer = shlex.shlex(re.sub(r"\$\{?\w+\}?", "1", line), posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    words = list(lexer)
    starts = [i for i, word in enumerate(words) if re.fullmatch("(.*/bin/)?shardload", word)]
    for start in starts:
        rest = words[start + 1 :]
        ends = [i for i, word in enumerate(rest) if word in OPERATORS]
        yield rest[: ends[0]] if ends else rest


LINES = sorted({one.line for one in SHOWN if re.search(r"(^|[/ ])shardload [a-z]", one.line)})


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_accepts_what_a_page_shows(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in calls(line.removesuffix('"') if line.count('"') % 2 else line):
        for word in filter(FILES.fullmatch, words):
            (tmp_path / word).touch()
        parse(words)


def containers(found):
    """The containers anywhere in an object of Kubernetes."""
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from containers(value)
    if isinstance(found, dict):
        yield from found.get("containers", ())


def words_of_settings():
    """The words after ``shardload`` that objects of Kubernetes and units of systemd start."""
    for _, language, text in blocks():
        if language == "yaml":
            for one in containers(list(yaml.safe_load_all(text))):
                match [*one.get("command", ()), *one.get("args", ())]:
                    case ["shardload", *words]:
                        yield words
        for line in re.findall(r"^ExecStart=(.*)$", text if language == "ini" else "", re.MULTILINE):
            yield from calls(line)


def test_the_command_line_accepts_what_settings_start():
    found = list(words_of_settings())
    assert {words[0] for words in found} == {"load", "serve"}
    for words in found:
        parse(words)


def parse(words):
    """Parse as the program does, without running the command."""
    tree = command()
    for each in (tree, *tree.commands.values()):
        for inner in (each, *getattr(each, "commands", {}).values()):
            inner.callback = None
    tree.main(words, prog_name="shardload", standalone_mode=False)


@pytest.mark.parametrize("words", [["laod", "x"], ["load", "x", "--mehs", "1x8"], ["plan", "x", "--hosts", "abc"]])
def test_a_wrong_command_line_is_refused(words):
    with pytest.raises(Exception, match=r"laod|mehs|valid integer"):
        parse(words)


@pytest.mark.parametrize("name", command().commands)
def test_examples_in_the_help_are_accepted_and_on_lines_of_their_own(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, printed = on_terminal([name, "--help"])
    examples = [line for line in printed if line.startswith("    $ ")]
    assert code == 0 and examples and sum("$ " in line for line in printed) == len(examples)
    for words in (words for line in examples for words in calls(line.strip().removeprefix("$ "))):
        parse(words)


def test_files_of_the_repository_that_commands_name_exist():
    named = {word for one in SHOWN for word in re.findall(r"(?<!\S)(?:tests|examples|benchmarks)/\S+", one.line)}
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


# ---- what is run ---------------------------------------------------------------------------------

NOT_RUN = {
    r"^make ": "makes an environment first; test_docs.py compares the targets with those of the Makefile",
    r"\bpip install": "installs packages",
    r"^git clone ": "needs a network",
    r"^python3? -m venv": "makes an environment",
    r"^(\.\./)?\.venv/|^cd tests$": "runs tests, or a tool of the tests",
    r"^kubectl ": "needs a cluster",
    r"^gcloud ": "needs an account in a cloud",
    r"^(install|systemctl) ": "needs a machine that may be changed",
    r"^(until )?curl ": "needs a server; tests/serving asks one the same",
    r"^(cat|chmod|export) ": "prepares the shell",
    r"^python -c .*> tokens": "prepares a file",
    r"^shardload serve ": "runs until it is stopped; tests/serving starts it with each of these options",
    r"https://(host1|models\.example):": "needs a server with a certificate; tests/serving has one",
    r"--coordinator-address|--distributed": "needs several machines; test_recipes.py starts several processes",
    r"^kill -KILL %1": "ends what the shell started",
    r"^python examples/": "test_examples.py runs each example",
    r"^shardload synth gemma2_7b &&": "writes 18 GB",
    r"^shardload load gemma2_27b ": "needs 51 GB of memory",
    r"^shardload plan gemma2_9b .* --train ": "searches for a minute; tests/layout_search plans training steps",
    r"^shardload convert checkpoints/400 .* --merge-lora ": "needs a step of LoRA; another page converts one",
}
"""What is not run here, by a pattern of its line, and why."""


def reasons(line):
    return [pattern for pattern in NOT_RUN if re.search(pattern, line)]


LONG = re.compile("405b")
"""In commands that take half a minute: they are run once."""


def is_run(one, before):
    is_again = LONG.search(one.line) and any(one.line == other.line for other in before)
    return not (one.is_script or reasons(one.line) or is_again)


RUN = [one for i, one in enumerate(SHOWN) if is_run(one, SHOWN[:i])]
COMPARED = {
    "python train.py 1x8 run &": "test_the_tutorial_on_training",
    "shardload convert run/4 tuned --to safetensors": "test_the_page_on_lora",
    "shardload verify run": "test_the_page_on_saving",
}
"""Where the output of pages is compared: how one command of the page begins, and the test."""


def page_of(start):
    """The commands of the first page that shows output, and has a command that begins so."""
    page = next(one.page for one in SHOWN if one.line.startswith(start) and (one.output or start.endswith("&")))
    return [one for one in SHOWN if one.page == page]


def test_no_reason_is_stale():
    used = {pattern for one in SHOWN for pattern in reasons(one.line)}
    assert NOT_RUN.keys() - used == set()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return page_world.make(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def server(world):
    with served("--root", world) as found:
        yield found.address


@pytest.fixture
def here(world, tmp_path, monkeypatch):
    """A folder with these checkpoints, which is the root of checkpoints, and which a bucket has as well."""
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path))
    monkeypatch.setenv("SHARDLOAD_CACHE", str(tmp_path / "cache"))
    with bucket(world, monkeypatch) as objects:
        yield {"https://host/models": objects.http, "/mnt/nvme": str(tmp_path), "synth gemma2_9b": SMALL}


SMALL = "synth gemma2_9b --scale 0.02"
SERVERS = ("http://host:8600", "http://127.0.0.1:8600")


def on_terminal(words):
    """The exit code of a command, and what it writes to a terminal."""
    terminal = io.StringIO()
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        code = main(words)
    return code, terminal.getvalue().splitlines()


def pages_to_run():
    long = {one.page for one in RUN if LONG.search(one.line)}
    pages = sorted({one.page for one in RUN if not one.output})
    return [pytest.param(page, marks=pytest.mark.slow if page in long else ()) for page in pages]


@pytest.mark.parametrize("page", pages_to_run())
def test_the_commands_of_a_page_run(page, here, request):
    rules = [text for _, _, text in FENCE.findall((ROOT / page).read_text()) if "[[rule]]" in text]
    Path("rules.toml").write_text(rules[0] if rules else "")
    for one in [one for one in RUN if one.page == page and not one.output]:
        if any(address in one.line for address in SERVERS):
            here |= dict.fromkeys(SERVERS, request.getfixturevalue("server"))
        line = one.line
        for name, stand_in in here.items():
            line = line.replace(name, stand_in)
        for words in calls(line):
            code, printed = on_terminal(words)
            assert code == 0, "\n".join([line, *printed])


# ---- what pages show -----------------------------------------------------------------------------


def assert_shown(one, printed, *, unstable=UNSTABLE):
    found = is_as_shown(one.output, printed, unstable=unstable)
    assert found, f"{one.page}: {one.line}\n{difference(one.output, printed, unstable=unstable)}"


def python_of(shown):
    """The first block of Python on the page of these commands."""
    found = FENCE.findall((ROOT / shown[0].page).read_text())
    return next(text for _, language, text in found if language == "python")


def lines_of(picture):
    """The text of a picture of a terminal, without its first line, which is the command."""
    lines = defaultdict(str)
    for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "y" in text.attrib:
            lines[float(text.get("y"))] += text.text.replace("\xa0", " ")
    return [re.sub(r"\S+/(?=\S+\.gguf)", "", lines[y]) for y in sorted(lines)][1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.COMMANDS)
def test_pictures_show_what_commands_print(name, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    command = pictures.COMMANDS[name]
    stored, drawn = (
        (ROOT / f"docs/pictures/{name}.svg").read_text(),
        pictures.terminal(command, pictures.printed(command)),
    )
    shown, printed = lines_of(stored), lines_of(drawn)
    assert len(shown) > 10 and is_as_shown(shown, printed), difference(shown, printed)


def test_pictures_show_commands_of_pages():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for name, line in pictures.COMMANDS.items():
        assert line in pages and f"pictures/{name}.svg)" in pages


KILLED = """
class Killed(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0 and self.model.optimizer.iterations == 80 and mesh == "1x8" and directory == "run":
            checkpoint.wait_until_finished()
            sys.stdout.flush()
            os.kill(os.getpid(), 9)
"""


def test_other_output(tmp_path, monkeypatch):
    """Of commands that are about a folder ``run`` with two steps, of a model for any numbers."""
    pages = {page_of(start)[0].page for start in COMPARED}
    assert set(COMPARED.values()) <= globals().keys()
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).random((64, 64), np.float32)
    saver = OrbaxCheckpoint("run", monitor="val_loss", max_to_keep=2)
    model.fit(x, x[:, :8], epochs=2, validation_split=0.25, verbose=0, callbacks=[saver])
    for one in RUN:
        if one.output and one.page not in pages:
            [words] = calls(one.line)
            assert_shown(one, on_terminal(words)[1], unstable=NUMBERS)


@pytest.mark.slow
def test_the_tutorial_on_training(tmp_path, monkeypatch):
    """With a tenth of the batches, so that numbers are others, and killed when the page kills it."""
    shown = page_of("python train.py 1x8 run &")
    program = python_of(shown)
    for old, new in {
        "save_freq=50": "save_freq=5",
        "steps_per_epoch=100": "steps_per_epoch=10",
        "\ncheckpoint =": f"{KILLED}\ncheckpoint =",
        "callbacks=[checkpoint]": "callbacks=[checkpoint, Killed()]",
    }.items():
        assert old in program
        program = program.replace(old, new)
    monkeypatch.chdir(tmp_path)
    sums = []
    for one in shown:
        match shlex.split(one.line.replace("/2000", "/200")):
            case ["python", "train.py", *words]:
                done = warm_start.run(["-c", program, *words[:2]])
                assert done.returncode == (-9 if words[-1] == "&" else 0), done.stderr
                printed = done.stdout.splitlines()
                sums += [line for line in printed if line.startswith("sum of the kernel")]
            case ["shardload", *words]:
                printed = on_terminal(words)[1]
            case _:
                continue
        assert_shown(one, printed, unstable=NUMBERS)
    assert len(sums) == 2


@pytest.mark.slow
def test_the_page_on_lora(here):
    """With a small model, so that numbers are others."""
    shown = page_of("shardload convert run/4 tuned --to safetensors")
    Path("run").unlink()
    exec(python_of(shown), {})  # our own page
    for one in shown:
        if one.output:
            [words] = calls(one.line)
            assert_shown(one, on_terminal(words)[1], unstable=NUMBERS)


def test_the_page_on_saving(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).random((256, 64), "float32")
    best = OrbaxCheckpoint("run", monitor="val_loss", max_to_keep=2, keep_best=1)
    model.fit(x, x[:, :8], epochs=3, validation_split=0.25, verbose=0, callbacks=[best])
    for one in page_of("shardload verify run"):
        if one.output:
            [words] = calls(one.line)
            assert_shown(one, on_terminal(words)[1], unstable=NUMBERS)
