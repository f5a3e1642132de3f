"""What a person sees who types the command: help, usage, results, failures, exit codes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_fakes import Done, environment, fake_command, in_process, install, loads, report, run, shardload, with_fakes

import shardload as package
from shardload.cli import main
from shardload.console import failures, streams
from shardload.errors import (
    LayoutError,
    LoadInterruptedError,
    MeshError,
    MissingExtraError,
    SourceError,
    SourceNotFoundError,
    UsageError,
)
from shardload.loading import LoadRequest
from shardload.reports import Fit, PlanReport

LOAD = ("load", "somewhere", "--mesh", "1x2", "--platform", "cpu")
IGNORE = ["--ignore", "score.*", "--ignore", "mtp.*"]


@pytest.fixture
def cli(capfd, monkeypatch):
    """The command with a fake engine, in this process."""
    call = in_process(capfd)
    call.engine = install(monkeypatch)
    return call


def test_version():
    assert shardload("--version").stdout == f"shardload {package.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag, cli):
    done = cli(flag)
    assert done.code == 0
    for command in ("load", "plan", "inspect", "synth", "sources"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", ["load", "plan", "inspect", "synth", "sources"])
def test_every_command_has_help_with_an_example(command, cli):
    done = cli(command, "-h")
    assert done.code == 0
    assert "$ shardload " in done.stdout or "$ SHARDLOAD_HOME" in done.stdout


@pytest.mark.slow
def test_help_imports_nothing_heavy():
    code = "import sys; from shardload.cli import main; main(['load', '--help']); "
    done = run((sys.executable, "-c", code + "print(sorted(sys.modules), file=sys.stderr)"))
    assert "'typer'" in done.stderr
    for heavy in ("'jax'", "'keras'", "'tensorflow'", "'keras_hub'", "'h5py'", "'tensorstore'", "'orbax'"):
        assert heavy not in done.stderr


def test_the_outermost_frame_imports_nothing_that_takes_time():
    code = "import shardload.cli, sys; print('typer' in sys.modules, 'rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False False\n"


def test_without_a_command_the_help_is_on_stderr_and_the_code_is_usage(cli):
    done = cli()
    assert (done.code, done.stdout) == (2, "") and "Usage: shardload" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lod",), "No such command 'lod'. Did you mean 'load'? Try: shardload --help"),
        (("load",), "Missing argument 'SOURCE'. Try: shardload load --help"),
        (("load", "x", "--bogus"), "No such option: --bogus. Try: shardload load --help"),
        (("load", "x", "--mesh", "1y8"), "--mesh: Cannot read the mesh '1y8'. Write sizes like 1x8"),
        (("load", "x", "--mesh", "2x2x2"), "has 3 axes; name them, for example data=2,fsdp=2,model=2"),
        (("load", "x", "--axes", "a,b"), "--axes names the axes of --mesh, which is missing"),
        (
            ("load", "x", "--dtype", "int9"),
            "'--dtype': 'int9' is not one of bfloat16, float16, float32 (or bf16, fp16, fp32)",
        ),
        (("load", "x", "--host-memory", "lots"), "Write it like 16GiB, 512MiB or 2GB"),
        (("load", "x", "--prompt", ""), "--prompt: The prompt is empty"),
        (("load", "x", "--max-new-tokens", "0"), "'--max-new-tokens': it must be greater than or equal to 1"),
        (("inspect", "x", "more"), "Unexpected argument: more. Try: shardload inspect --help"),
        (
            ("load", "x", "--layout", "autoo"),
            "'--layout': 'autoo' is not auto, replicated, keras_hub or search, and no file has that name. "
            "Did you mean 'auto'? Try: shardload load --help",
        ),
        (("plan", "x", "--layout", "missing.toml"), "'missing.toml' is not auto, replicated, keras_hub or search"),
        (("plan", "x", "--mesh", "1x2", "--axes", "a"), "--axes or --mesh: A mesh needs one name per axis, got a for"),
        (("load", "x", "--max-new-tokens", "8"), "It requires --prompt, which is missing"),
        (("plan", "x", "--device-memory", "0"), "must be positive"),
        (("plan", "x", "--device-memory", "16"), "16 means 16 bytes. Write 16GiB, or 16B if you mean bytes"),
        (("load", "x", "--host-memory", "2"), "2 means 2 bytes. Write 2GiB"),
        (("synth", "x", "--scale", "2"), "'--scale': 2 is not in the range from 0 (excluded) to 1"),
        (("synth", "x", "--scale", "0"), "'--scale': 0 is not in the range from 0 (excluded) to 1"),
        (("synth", "x", "--scale", "-1"), "'--scale': -1 is not"),
        (("synth", "x", "--scale", "nan"), "'--scale': nan is not"),
        (("synth", "x", "--seed", "-1"), "greater than or equal to 0"),
        (("synth", "x", "--seed", "4294967296"), "less than or equal to 4294967295"),
        (("load", "x", "--host-memory", "0"), "must be positive"),
    ],
)
def test_usage_errors(arguments, said, cli):
    done = cli(*arguments)
    assert (done.code, done.stdout) == (2, "") and said in done.error


def test_usage_errors_are_objects_for_programs(cli):
    done = cli("plan", "x", "--mesh", "nonsense", "--json")
    assert done.code == 2 and done.json["error"]["exit_code"] == 2
    assert "Cannot read the mesh 'nonsense'" in done.json["error"]["message"]


def test_load_prints_the_table_on_stdout_and_nothing_else(cli):
    done = cli(*LOAD)
    assert done.code == 0 and done.stdout.startswith("Source ")
    assert "2 variables sharded, 1 replicated" in done.stdout and "\x1b" not in done.stdout


def test_load_prints_generated_text_last_and_set_off(cli):
    done = cli(*LOAD, "--prompt", "The capital of France is")
    assert done.stdout.splitlines()[-3:] == ["", "─" * 40, "The capital of France is Paris."]


def test_generated_text_cannot_drive_the_terminal(cli):
    cli.engine.generate = lambda *a, **k: "\x1b]0;title\x07two\nlines"
    assert cli(*LOAD, "--prompt", "Say").stdout.endswith("Say\\x1b]0;title\\x07two\nlines\n")


def test_load_json_is_one_object(cli):
    found = cli(*LOAD, "--json").json
    assert found["source"] == "/models/fake.gguf" and "generated" not in found


def test_a_usage_error_after_a_result_is_an_object_too(capfd):
    assert main(["sources", "--json"]) == 0
    capfd.readouterr()
    assert main(["sources", "--jsn", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["type"] == "UsageError"


@pytest.mark.parametrize(
    "wrong", [["sorces"], ["sources", "--jsn"], ["synth"], ["synth", "x", "y"], ["synth", "x", "--scale", "much"]]
)
def test_a_wrong_command_line_is_a_usage_error_for_programs(capfd, wrong):
    assert main([*wrong, "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["type"] == "UsageError"


def test_load_json_carries_generated_text(cli):
    assert cli(*LOAD, "--json", "--prompt", "Say").json["generated"] == {"prompt": "Say", "text": " Paris."}


@pytest.mark.slow
def test_what_libraries_print_never_reaches_stdout():
    setup = """
import os
def noisy(source, **options):
    print("from Python")
    os.write(1, b"from C++\\n")
    return loads(source)
engine.load = noisy
"""
    done = with_fakes(setup, *LOAD, "--json")
    assert done.json["format"] == "gguf" and "from Python" in done.stderr
    assert "from C++" in done.stderr


def test_options_arrive_as_typed(cli):
    seen = {}
    cli.engine.load = lambda source, **options: seen.update(options, source=source) or loads(source)
    off = ("--no-strict", "--no-compile")
    arguments = (*off, "--atomic", "--format", "gguf", "--ignore-config", "rope_scaling", "--step", "8", *IGNORE)
    cli(*LOAD, "--dtype", "bf16", "--host-memory", "2GiB", *arguments)
    assert str(seen.pop("mesh")) == "batch=1,model=2"
    assert type(seen.pop("progress")).__name__ == "LineProgress"
    expected = LoadRequest(
        source="somewhere", layout="auto", dtype="bfloat16", host_memory_bytes=2 << 30, strict=False,
        ignore=["score.*", "mtp.*"], atomic=True, compile=False, step=8, format="gguf",
        ignore_config=("rope_scaling",),
    )  # fmt: skip
    assert LoadRequest(**seen) == expected


def test_a_step_is_a_number_latest_or_best(cli):
    done = cli(*LOAD, "--step", "newest")
    assert done.code == 2 and "'newest' is not a number, latest or best" in done.stderr


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 1)])
def test_a_plan_that_does_not_fit_exits_with_1(fits, code, cli):
    cli.engine.plan = lambda *a, **k: report(PlanReport, fits=Fit(10, 20, fits, "1x4"))
    done = cli("plan", "x", "--mesh", "1x2", "--device-memory", "16GiB", "--json")
    assert (done.code, done.json["fits"]["smallest_mesh"], done.stderr) == (code, "1x4", "")


def test_a_plan_needs_no_devices(cli):
    done = cli("plan", "x", "--mesh", "64x64")
    assert (done.code, done.stderr) == (0, "")


@pytest.fixture
def failing(cli):
    """Run the command with an engine that raises."""

    def call(error: BaseException, *arguments: str) -> Done:
        cli.engine.plan = Mock(side_effect=error)
        return cli("plan", "x", *arguments)

    return call


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SourceNotFoundError("No such name: x. Try gemma3_270m."), "Error: No such name: x. Try gemma3_270m."),
        (MissingExtraError("gguf", extra="gguf", needed_for="Reading x"), "pip install 'shardload[gguf]'"),
        (
            ModuleNotFoundError("No module named 'grain'", name="no_grain"),
            "'no-grain', which is not installed. Install",
        ),
        (
            ImportError("cannot import name 'x' from 'keras_hub'", name="keras_hub"),
            "--force-reinstall 'shardload[hub]'",
        ),
        (ModuleNotFoundError("No module named 'keras.x'", name="keras.x"), "--force-reinstall shardload"),
        (ImportError("libcuda.so.1: cannot open shared object"), "to import a package: libcuda.so.1: cannot open"),
        (ModuleNotFoundError("No module named", name="shardload.x"), "This is a bug in shardload"),
        (PermissionError(errno.EACCES, "no", "/models/x"), "no: /models/x. Check its owner"),
        (OSError(errno.ENOSPC, "full", "/models/x"), "full: /models/x. Free some space, or choose another disk."),
        (OSError(errno.EIO, "Input/output error", "/models/x"), "Input/output error: /models/x."),
        (OSError("strange"), "OSError: strange."),
        (MemoryError(), "(ulimit -v). Try --dtype bfloat16"),
        (RuntimeError("RESOURCE_EXHAUSTED: 12 bytes"), "A device ran out of memory: RESOURCE_EXHAUSTED: 12 bytes."),
        (ValueError("two\nlines"), "Unexpected ValueError: two lines. This is a bug in shardload or in a library"),
        (KeyError(), "Unexpected KeyError: no message."),
        (ValueError("x" * 5000), "SHARDLOAD_TRACEBACK=1"),
        (MeshError("a\x1b[31mb"), "Error: a\\x1b[31mb"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_failures_are_one_paragraph(error, said, failing):
    done = failing(error)
    assert (done.code, done.stdout) == (1, "") and said in done.error
    assert len(done.stderr) < 1000


def test_a_usage_error_found_late_has_its_code_too(failing):
    assert failing(UsageError("The seed must be positive.")).code == 2


def test_failures_are_objects_for_programs(failing):
    done = failing(LayoutError("Rule 3 matches nothing."), "--json")
    assert done.code == 1
    assert done.json == {"error": {"type": "LayoutError", "message": "Rule 3 matches nothing.", "exit_code": 1}}
    assert done.error == "Error: Rule 3 matches nothing."


def test_a_traceback_is_shown_on_request_only(failing, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_TRACEBACK", "1")
    done = failing(KeyError("gone"))
    assert done.code == 1 and "Traceback (most recent call last)" in done.stderr
    assert done.stderr.rstrip().endswith("that output.")


def test_notes_on_an_exception_are_told(failing):
    error = SourceError("Bad header.")
    error.add_note("While reading shard 2.")
    assert failing(error).error == "Error: Bad header. While reading shard 2."


def interrupted(setup: str, *arguments: str, number: int = signal.SIGINT) -> tuple[int, str, str]:
    """Run with fakes and press Ctrl-C, or send another signal, as soon as stderr says ``ready``."""
    command = fake_command(setup, *arguments)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment(), **pipes) as process:
        for line in iter(process.stderr.readline, ""):  # "" at the end, if the command failed
            if "ready" in line:
                break
        time.sleep(0.1)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


SLOW = """
import time
def slow(*arguments, **options):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
engine.plan = slow
"""


def test_ctrl_c_is_one_line():
    assert interrupted(SLOW, "plan", "x") == (130, "", "Interrupted.\n")


def test_ctrl_c_is_an_object_for_programs():
    code, stdout, _ = interrupted(SLOW, "plan", "x", "--json")
    assert code == 130
    assert '"exit_code": 130' in stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "gpt2_base", "https://bucket/out", "--to", "orbax", "--json"],
        ["synth", "gpt2_base", "--directory", "https://bucket/out", "--json"],
        ["plan", "gpt2_base", "--mesh", "1x2", "--save-plan", "https://bucket/out.json", "--json"],
        ["plan", "gpt2_base", "--mesh", "1x2", "--svg", "https://bucket/out.svg", "--json"],
    ],
)
def test_a_url_to_write_to_is_quoted_as_typed_before_anything_is_imported(arguments):
    program = "import sys; from shardload.cli import main; code = main(sys.argv[1:])"
    program += "; print('keras' in sys.modules); sys.exit(code)"
    done = run((sys.executable, "-c", program, *arguments))
    told, _, imported = done.stdout.rstrip().rpartition("\n")
    assert "Cannot write to https://bucket/out" in json.loads(told)["error"]["message"]
    assert (done.code, imported) == (2, "False")


ENDING = """
import atexit, os, signal, sys
from shardload import cli

class Late:  # goes when Python unloads its modules
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {number})

sys.argv = ["shardload", *{arguments}]
if {late}:
    sys.late = Late()
    sys.exit(cli.main())
code = cli.main()
atexit.register(os.kill, os.getpid(), {number})
sys.exit(code)
"""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("arguments", "code"), [(["sources", "--json"], 0), (["steps", "/no/such/run", "--json"], 1)])
def test_a_signal_after_the_result_changes_neither_result_nor_exit_code(arguments, code, number, late):
    done = run((sys.executable, "-c", ENDING.format(arguments=arguments, number=int(number), late=late)))
    assert done.code == code and ("error" in json.loads(done.stdout)) == bool(code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_other_signals_are_one_line_and_an_object(number, command):
    code, stdout, stderr = interrupted(SLOW.replace("plan", command), command, "x", "--json", number=number)
    message = f"Terminated by {number.name}."
    assert (code, stderr) == (128 + number, f"{message}\n")
    assert json.loads(stdout) == {"error": {"type": "KeyboardInterrupt", "message": message, "exit_code": code}}


def test_an_ignored_signal_stays_ignored():
    setup = SLOW.replace("time.sleep(60)", "time.sleep(1); raise ValueError") + "\nimport signal\n"
    setup += "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
    code, _, stderr = interrupted(setup, "plan", "x", number=signal.SIGHUP)
    assert code == 1 and "ValueError" in stderr


@pytest.mark.slow
def test_ctrl_c_works_where_the_exception_would_be_swallowed():
    setup = """
import time
def stubborn(*arguments, **options):
    print("ready", file=sys.stderr, flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            pass
engine.load = stubborn
"""
    assert interrupted(setup, *LOAD) == (130, "", "Interrupted.\n")


@pytest.mark.slow
def test_ctrl_c_lets_a_writer_tidy_up():
    setup = """
import time
def _xla_gc_callback():
    print("ready", file=sys.stderr, flush=True)
    time.sleep(0.5)
def writes(*arguments, **options):
    try:
        try:
            try:
                _xla_gc_callback()  # JAX's, which swallows whatever is raised in it
            except KeyboardInterrupt:
                pass
            time.sleep(60)
        finally:
            print("tidied up", file=sys.stderr)
    except BaseException as error:
        error.add_note("The finished part is kept.")
        raise
engine.synth = writes
"""
    end = "The finished part is kept.\n"
    assert interrupted(setup, "synth", "x") == (130, "", f"tidied up\nInterrupted. {end}")
    found = interrupted(setup, "synth", "x", number=signal.SIGTERM)
    assert found == (143, "", f"tidied up\nTerminated by SIGTERM. {end}")


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (False, "Nothing was written. Start the same conversion again."),
        (True, "The finished part of an earlier run is in {}. Start the same conversion again to continue."),
    ],
)
def test_ctrl_c_before_a_conversion_writes_says_how_to_go_on(tmp_path, left, told):
    home = tmp_path / ".out.converting"
    if left:
        home.mkdir()
    setup = SLOW.replace("plan", "convert")
    message = f"Interrupted. {told.format(home)}"
    code, stdout, stderr = interrupted(setup, "convert", "x", str(tmp_path / "out"), "--to", "orbax", "--json")
    assert (code, stderr) == (130, f"{message}\n")
    assert json.loads(stdout)["error"]["message"] == message


def test_ctrl_c_waits_until_a_compiled_module_is_imported():
    # Raised in such code, it aborted the process (enums of JAX's modules) or became an ImportError (optree).
    setup = """
import time
class ExtensionFileLoader:  # as importlib's, whose name the handler looks for
    def exec_module(self, module):
        time.sleep(0.5)
        print("imported", file=sys.stderr)
def imports(*arguments, **options):
    print("ready", file=sys.stderr, flush=True)
    try:
        ExtensionFileLoader().exec_module(None)
    except KeyboardInterrupt:
        raise ImportError("install optree")
    time.sleep(60)
engine.inspect = imports
"""
    assert interrupted(setup, "inspect", "x") == (130, "", "imported\nInterrupted.\n")
    assert {"create_module", "exec_module"} <= vars(ExtensionFileLoader).keys()


def test_ctrl_c_after_the_results_adds_no_second_object(monkeypatch, capfd):
    monkeypatch.setattr(streams, "flush_stdout", Mock(side_effect=KeyboardInterrupt))
    assert main(["sources", "--json"]) == 130
    output = capfd.readouterr()
    assert "sources" in json.loads(output.out) and output.err.endswith("Interrupted.\n")


def test_ctrl_c_that_became_an_error_of_ours_is_still_an_interruption():
    error = LoadInterruptedError("3 of 5 variables hold new values.")
    error.__cause__ = KeyboardInterrupt()
    failure = failures.failure_of(error)
    assert (failure.exit_code, failure.message) == (130, "Interrupted. 3 of 5 variables hold new values.")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plan", "x"), ("plan", "x", "--json"), ("--help",)])
def test_a_reader_that_left_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    done = run(fake_command("", *arguments), stdout=write)
    os.close(write)
    assert (done.code, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plan", "x"), ("plan", "x", "--json"), ("--version",)])
def test_a_full_disk_under_stdout_is_told(arguments):
    with Path("/dev/full").open("w") as full:
        done = run(fake_command("", *arguments), stdout=full)
    assert done.code == 1
    assert done.error.startswith("Error: Cannot write the result to stdout: No space left")


def in_a_shell(redirection: str, *arguments: str) -> Done:
    return run(("bash", "-c", f'"$@" {redirection}', "bash", *fake_command("", *arguments)))


def test_a_closed_stdout_is_told_before_any_work():
    done = in_a_shell(">&-", "plan", "x")
    assert (done.code, done.stderr) == (1, "Error: Cannot write the result to stdout: it is closed.\n")


@pytest.mark.slow
def test_a_closed_stderr_loses_notes_and_nothing_else():
    done = in_a_shell("2>&-", *LOAD)
    assert done.code == 0 and done.stdout.startswith("Source ")


@pytest.mark.slow
def test_an_ascii_terminal_gets_an_ascii_table():
    done = with_fakes("", *LOAD, "--prompt", "Köln", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.code == 0 and "####" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["-" * 40, "K\\xf6ln Paris."]


def test_help_shows_flags_without_a_type(cli):
    for arguments in (("--help",), ("load", "-h"), ("convert", "--help")):
        done = cli(*arguments)
        assert done.code == 0 and "--help" in done.stdout
        assert "bool" not in done.stdout
