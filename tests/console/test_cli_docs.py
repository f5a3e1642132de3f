"""The reference says everything the command line can do, and nothing it cannot."""

import re
from pathlib import Path

import pytest
from report_facts import load_report, plan_report

from shardload.console.app import command

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CLI = "".join(page.read_text() for page in (REFERENCE / "cli.md", *sorted((REFERENCE / "cli").glob("*.md"))))
OVERVIEW = CLI.partition("\n## ")[0]
SECTIONS = {part.split("\n")[0]: part for part in CLI.split("\n## ")}
COMMANDS = command().commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_section_and_its_place_in_the_list(name):
    assert f"shardload {name}" in SECTIONS and re.search(rf"^\| \[`shardload {name}\b", OVERVIEW, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_names_exactly_the_options_there_are(name):
    section = SECTIONS[f"shardload {name}"]
    table = "\n".join(line for line in section.splitlines() if line.startswith("| `--"))
    named = set(re.findall(r"`(--[a-z-]+)", "\n".join(row.split("|")[1] for row in table.splitlines())))
    declared = (o for p in COMMANDS[name].params for o in (*p.opts, *p.secondary_opts))
    assert named == {option for option in declared if option.startswith("--")} - {"--help"}


@pytest.mark.parametrize("option", [o for p in command().params for o in p.opts if o.startswith("--")])
def test_every_option_of_the_program_is_named(option):
    assert option in CLI


@pytest.mark.parametrize("variable", ["SHARDLOAD_TRACEBACK", "SHARDLOAD_KEEP_TENSORFLOW", "SHARDLOAD_HOME"])
def test_every_variable_is_named(variable):
    assert f"| `{variable}`" in CLI


def test_every_key_of_a_report_is_explained():
    keys = {*load_report().to_json(), *plan_report().to_json()}
    explained = set(re.findall(r"^\| `(\w+)` \|", (REFERENCE / "report.md").read_text(), re.MULTILINE))
    assert explained == keys | {"generated", "processes"}


def test_examples_name_commands_that_exist():
    for line in CLI.splitlines():
        if match := re.match(r"^(?:\w+=\S+ )?shardload (\w+)", line):
            assert match[1] in COMMANDS, line
