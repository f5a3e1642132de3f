"""A fake engine for the command line, and three ways to run it: in this process, in its own, or the real one."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import warm_start

from shardload.reports import ByteCounts, DeviceUse, HostBytes, LayoutSummary, LoadReport, PlanReport, Stages

COMMAND = (sys.executable, "-c", "import sys; from shardload.cli import main; sys.exit(main())")


def report(kind: Any = LoadReport, **extra: Any) -> Any:
    facts = {
        "source": "/models/fake.gguf", "format": "gguf", "mesh": "batch=1,model=2",
        "devices": (DeviceUse(0, "cpu", 50), DeviceUse(1, "cpu", 50)), "variables": 3, "parameters": 50,
        "weight_bytes": 100, "bytes": ByteCounts(100, 100),
        "seconds": Stages(build=0.1, plan=0.1, transfer=0.1, total=0.3), "host_bytes": HostBytes(1000, 10),
        "layout": LayoutSummary(2, 1),
    }  # fmt: skip
    return kind(**facts, **extra)


def loads(source: str, **options: Any) -> Any:
    return SimpleNamespace(model=None, report=report(), shares=())


SLOWLY = re.compile(r"^[^\n]+, \d[^\n]*(/s| so far| left)\n", re.MULTILINE)
"""Lines of progress, which a busy machine writes every ten seconds."""
HOMES = {
    "find": "shardload.console.completion.make_available",
    "check_prompt": "shardload.text.prompts.tokenizer_for_prompt",
    "load": "shardload.loading.run",
    "plan": "shardload.loading.plan",
    "generate": "shardload.text.generation.generate",
    "report": "shardload.loading.report",
    "convert": "shardload.converting.convert",
    "diff": "shardload.comparing.diff",
    "verify": "shardload.verifying.verify",
    "inspect": "shardload.resolve.opening.open_source",
    "synth": "shardload.console.checkpoint_commands.write_checkpoint",
}
"""The functions of the engine that commands use, and where they import them from."""


class Engine:
    """Fakes in place of the engine's functions: ``engine.load = function``."""

    def __init__(self, monkeypatch: Any = None) -> None:
        """Undo the fakes with ``monkeypatch``; without one, in a process of its own, fake whole modules."""
        object.__setattr__(self, "monkeypatch", monkeypatch)

    def __setattr__(self, name: str, fake: Any) -> None:
        home, _, own = HOMES[name].rpartition(".")
        if name == "load":
            given, fake = fake, lambda request, *, preprocessor: given(**vars(request))
        if self.monkeypatch is not None:
            self.monkeypatch.setattr(f"{home}.{own}", fake)
            return
        if home.startswith("shardload.console."):
            importlib.import_module(home)
        # Commands import the others on use: a module that is there already is not run.
        setattr(sys.modules.setdefault(home, _light(home)), own, fake)


def _light(home: str) -> Any:
    module: Any = ModuleType(home)
    module.LoadRequest = SimpleNamespace
    return module


def install(monkeypatch: Any = None) -> Engine:
    """Put the fakes where the commands look for the engine; returns the engine for further changes."""
    engine: Any = Engine(monkeypatch)
    engine.find = lambda source, *, weights=True: None
    engine.check_prompt = lambda source, prompt, *, max_new_tokens, format: None
    engine.load = loads
    engine.plan = lambda source, **options: report(PlanReport)
    engine.generate = lambda model, prompt, *, max_new_tokens, tokenizer: " Paris."
    engine.report = lambda model: report()
    return engine


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def error(self) -> str:
        """The only line of an error message, checked to be one."""
        lines = [line for line in self.stderr.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, self.stderr
        return lines[0]


def in_process(capfd: Any) -> Callable[..., Done]:
    """The command in this process, as a function of its arguments."""
    from shardload.cli import main

    def call(*arguments: str) -> Done:
        capfd.readouterr()
        return Done(main(arguments), *capfd.readouterr())

    return call


def environment(**changes: str) -> dict[str, str]:
    """The tests' own environment without what decides devices or width."""
    dropped = ("KERAS_BACKEND", "JAX_PLATFORMS", "COLUMNS", "FORCE_COLOR", "SHARDLOAD_TRACEBACK", "SHARDLOAD_HOME")
    return {k: v for k, v in os.environ.items() if k not in dropped} | changes


def run(command: tuple[str, ...], *, stdout: Any = subprocess.PIPE, **env: str) -> Done:
    """Run a command in its own process; ``env`` adds to the environment."""
    options: Any = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "timeout": 120}
    done = subprocess.run(command, check=False, env=environment(**env), **options)
    return Done(done.returncode, done.stdout, SLOWLY.sub("", done.stderr))


def shardload(*arguments: str, **env: str) -> Done:
    """Run the real command; on JAX and the CPU from the start, unless ``env`` says otherwise."""
    settings = {name: os.environ[name] for name in ("KERAS_BACKEND", "JAX_PLATFORMS")}
    done = warm_start.run([*COMMAND[1:], *arguments], timeout=120, env=environment(**(settings | env)))
    return Done(done.returncode, done.stdout, done.stderr)


def fake_command(setup: str, *arguments: str) -> tuple[str, ...]:
    """The command with a fake engine in its own process; ``setup`` is Python that may change it further."""
    start = "from cli_fakes import *; engine = install()"
    return (sys.executable, "-c", f"{start}\n{setup}\nfrom shardload.cli import main; sys.exit(main())", *arguments)


def with_fakes(setup: str, *arguments: str, **env: str) -> Done:
    """Run the command with a fake engine in its own process."""
    return run(fake_command(setup, *arguments), **env)
