"""Each fenced block of README and docs is valid in its language.

Blocks of Python are run by test_docs_examples.py, those with commands by test_docs_console.py.
"""

import configparser
import json
import re
import subprocess
import tomllib

import pytest
import yaml
from page_blocks import PAGES, blocks

TEXT = {"", "text", "console"}
"""Languages without a grammar."""
DOCKERFILE = re.compile(r"(FROM|COPY|RUN|ENV|USER|ENTRYPOINT|CMD|WORKDIR) .+")


def check_bash(text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def check_ini(text):
    text = text if text.startswith("[") else f"[Service]\n{text}"
    assert configparser.RawConfigParser(strict=False).read_string(text) is None


def check_dockerfile(text):
    lines = text.replace("\\\n", " ").splitlines()
    assert lines[0].startswith("FROM ") and all(DOCKERFILE.fullmatch(line) for line in lines)


def check_python(text):
    compile(text, "block", "exec")


CHECKS = {
    "bash": check_bash,
    "dockerfile": check_dockerfile,
    "ini": check_ini,
    "json": json.loads,
    "py": check_python,
    "python": check_python,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}


@pytest.mark.parametrize("language", CHECKS)
def test_blocks_are_valid(language):
    found = [(page, text) for page, named, text in blocks() if named == language]
    assert found
    for page, text in found:
        try:
            CHECKS[language](text)
        except Exception as error:
            error.add_note(f"{page}:\n{text}")
            raise


def test_each_language_is_checked():
    assert {language for _, language, _ in blocks()} == CHECKS.keys() | TEXT


def test_each_block_of_python_begins_as_those_that_are_run():
    """Not indented, and without a title."""
    run = sum(len(re.findall(r"^```python\n", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert run == sum(language == "python" for _, language, _ in blocks())
