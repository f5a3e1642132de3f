"""The commands of README and docs: the command line of shardload accepts each.

Blocks are found by their commands, so that they may move from page to page.
"""

import re
import shlex

import pytest
from page_blocks import ROOT, shown_commands

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


def test_files_of_the_repository_that_commands_name_exist():
    named = {word for one in SHOWN for word in re.findall(r"(?<!\S)(?:tests|examples|benchmarks)/\S+", one.line)}
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []
