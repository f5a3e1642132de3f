"""The command tree that `shardload --help` shows: names and order of the functions that are its commands."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from shardload.console import cache_commands, checkpoint_commands, commands, serve_commands, streams

_HELP = ["-h", "--help"]
app = typer.Typer(
    name="shardload",
    help="""Load any checkpoint straight into a sharded Keras model on JAX.

    Examples:

    $ shardload load gemma3_270m --mesh 1x8 --prompt "The capital of France is"

    $ shardload plan gemma2_27b --mesh 4x8 --device-memory 16GiB

    $ shardload inspect model.safetensors

    Exit codes:

    0 done, 1 failed, 2 usage, 130 interrupted, 141 stdout closed early, 143 SIGTERM, 129 SIGHUP
    """,
    epilog="`shardload COMMAND --help` shows the options of a command.",
    rich_markup_mode=None,
    # Exceptions belong to `shardload.cli.main`, which reports them in one paragraph.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": _HELP},
)

app.command("load")(commands.load)
app.command("plan")(commands.plan)
app.command("inspect")(checkpoint_commands.inspect)
app.command("synth")(checkpoint_commands.synth)
app.command("sources")(checkpoint_commands.sources)
app.command("steps")(checkpoint_commands.steps)
app.command("verify")(checkpoint_commands.verify)
app.command("diff")(checkpoint_commands.diff)
app.command("convert")(commands.convert)
app.command("serve")(serve_commands.serve)
app.add_typer(cache_commands.cache_app, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        from shardload import __version__

        streams.Results(sys.stdout).text(f"shardload {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def without_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Say what to type when no command was given."""
    del version
    # resilient_parsing: a shell asks for completions, and reads stdout.
    if context.invoked_subcommand is None and not context.resilient_parsing:
        # Not results, so not on stdout, where typer prints help.
        with contextlib.redirect_stdout(sys.stderr):
            typer.echo(context.get_help())
        raise typer.Exit(2)


def _with_examples_on_lines(text: str) -> str:
    """Return a help text whose examples are not joined into paragraphs and wrapped, so that they can be copied."""
    begin, found, rest = text.partition("Examples:\n")
    if not found:
        return text
    lines = rest.strip().splitlines()
    examples = [line for line in lines if line.startswith("$ ")]
    others = "\n".join(line for line in lines if not line.startswith("$ ")).strip()
    unwrapped = "\n".join(f"  {line}" for line in examples)
    return f"{begin}\b\nExamples:\n{unwrapped}\n\n{others}"


def command() -> Any:
    """Return the command tree as one function, which parses the arguments and runs the command that they name."""
    tree: Any = typer.main.get_command(app)
    # typer's help shows the type <bool> after a flag, as if it took a value.
    nested = (inner for each in tree.commands.values() for inner in getattr(each, "commands", {}).values())
    for each in (tree, *tree.commands.values(), *nested):
        # The parameter --help is created here, once, with the names that this context has.
        context = typer.Context(each, help_option_names=_HELP)
        each.help = _with_examples_on_lines(each.help or "")
        for parameter in each.get_params(context):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return tree
