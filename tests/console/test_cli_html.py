"""Pages of `shardload inspect --html` and `diff --html`: they stand alone, and have the numbers of `--json`."""

from pathlib import Path

import numpy as np
import pytest
from cli_fakes import in_process
from html_pages import ParsedPage
from safetensors.numpy import save_file

from shardload.reports.name_table import MOST_ROWS

HOSTILE = """</script><script>alert(1)</script><img src=x onerror="alert('2')">"""


@pytest.fixture
def cli(capfd):
    return in_process(capfd)


def checkpoint(path, **changed):
    layers = {f"model.layers.{i}.{name}": np.ones((4, 8), np.float32) for i in range(3) for name in ("up", "down")}
    save_file({"model.embed": np.ones((16, 4), np.float16), HOSTILE: np.ones(3, np.int8), **layers, **changed}, path)
    return str(path)


@pytest.fixture
def page(cli, tmp_path):
    def written(*arguments, code=0):
        file = tmp_path / "page.html"
        done = cli(*arguments, "--html", str(file), "--json")
        assert done.code == code and f"note: wrote {file}\n" in done.stderr
        return done.json, ParsedPage(file.read_text("utf-8"))

    return written


def test_the_page_of_a_checkpoint_has_the_numbers_of_the_object(page, tmp_path):
    told, found = page("inspect", checkpoint(tmp_path / "a.safetensors"))
    assert {row[0] for row in found.leaves} == {tensor["name"] for tensor in told["tensors"]}
    for tensor in told["tensors"]:
        cells = found.leaf(tensor["name"])
        assert cells[1:] == [
            tensor["dtype"],
            " × ".join(map(str, tensor["shape"])),  # noqa: RUF001
            *found.shown_bytes(tensor["bytes"]),
            f"offset {tensor['offset']}",
        ]
    assert sum(found.values("bar")) == told["bytes"] and sum(found.values("shape")) == told["parameters"]
    assert found.group("layers.")[2:4] == ["192 parameters", "768 B"]


def test_only_tensors_that_match_are_in_the_page(page, tmp_path):
    told, found = page("inspect", checkpoint(tmp_path / "a.safetensors"), "--match", "*up")
    assert len(found.leaves) == len(told["tensors"]) == 3
    assert "3 of 8 tensors match *up: 3 tensors, 96 parameters, 384 B" in found.text


def test_the_page_of_a_checkpoint_in_several_files_names_them(page, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    )
    save_file({"a": np.ones(2, np.float32)}, folder / "one.safetensors")
    save_file({"b": np.ones(4, np.float32)}, folder / "two.safetensors")
    told, found = page("inspect", str(folder))
    assert found.leaf("a")[4] == "one.safetensors" and found.leaf("b")[4] == "two.safetensors"
    for path, size in told["files"].items():
        assert found.row(Path(path).name)[-1] == found.shown_bytes(size)[0]


def test_the_page_of_a_difference_has_the_numbers_of_the_object(page, tmp_path):
    first = checkpoint(tmp_path / "a.safetensors")
    changed = {"model.layers.0.up": np.full((4, 8), 1.5, np.float32), "model.embed": np.ones((4, 4), np.float16)}
    second = checkpoint(tmp_path / "b.safetensors", **changed, more=np.ones(5, np.float32))
    told, found = page("diff", first, second, code=1)
    assert len(found.leaves) == len(told["differences"]) == 3
    for difference in told["differences"]:
        largest = "" if difference["largest"] is None else f"{difference['largest']:.4g}"
        shown = [
            *(difference[key] for key in ("name", "what", "first", "second")),
            f"{difference['elements']:,}",
            largest,
        ]
        assert found.leaf(difference["name"]) == shown
    assert found.row("equal")[-1] == "6 tensors" and found.row("model.layers.0.up")[-1] == "0.5"


def test_equal_checkpoints_have_a_page_without_a_table(page, tmp_path):
    first = checkpoint(tmp_path / "a.safetensors")
    told, found = page("diff", first, first)
    assert told["equal"] == 8 and "8 tensors equal, 0 not" in found.text and found.leaves == []


def test_differences_that_are_not_finite_are_ranked_first(page, tmp_path):
    sizes = {"model.layers.0.up": np.inf, "model.layers.1.up": np.nan, "model.layers.1.down": 2, "model.layers.2.up": 5}
    first = checkpoint(tmp_path / "a.safetensors")
    changed = {name: np.full((4, 8), 1 + size, np.float32) for name, size in sizes.items()}
    told, found = page("diff", first, checkpoint(tmp_path / "b.safetensors", **changed), code=1)
    texts = ["inf", "nan", "2", "5"]
    assert {d["name"]: d["largest"] for d in told["differences"]} == dict(zip(sizes, ["inf", "nan", 2, 5], strict=True))
    assert [found.leaf(name)[5] for name in sizes] == texts
    assert [cells[2] for cells in found.bars("Largest differences")] == ["nan", "inf", "5", "2"]
    assert "bars of nan and inf are full" in found.text
    assert found.group("1.")[5] == "nan" and found.group("model.layers.")[5] == "nan"
    values = {attributes.get("data-value") for row in found.rows for _, attributes in row}
    assert {"Infinity", "NaN", "2.0", "5.0"} <= values and "inf" not in values  # as JavaScript reads numbers


def test_an_infinite_difference_is_above_finite_ones(page, tmp_path):
    first = checkpoint(tmp_path / "a.safetensors")
    changed = {f"model.layers.0.{name}": np.full((4, 8), n, np.float32) for name, n in (("up", np.inf), ("down", 2))}
    _, found = page("diff", first, checkpoint(tmp_path / "b.safetensors", **changed), code=1)
    assert found.group("model.layers.0.")[5] == "inf"


def test_bars_of_the_largest_float64_have_a_width(page, tmp_path):
    first = checkpoint(tmp_path / "a.safetensors", w=np.zeros(2), v=np.zeros(2))
    second = checkpoint(tmp_path / "b.safetensors", w=np.full(2, 1.2e308), v=np.full(2, 0.6e308))
    _, found = page("diff", first, second, code=1)
    assert [cells[2] for cells in found.bars("Largest differences")] == ["1.2e+308", "6e+307"]
    widths = [value for tag, name, value in found.attributes if (tag, name) == ("rect", "width")]
    assert {"1000.0", "500.0"} <= {*widths} and "inf" not in widths


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_ends_of_lines_in_names_are_shown(command, page, tmp_path):
    names = ("new\nline", "new line")
    first, second = (
        checkpoint(tmp_path / f"{n}.safetensors", **dict.fromkeys(names, np.float32([n]))) for n in range(2)
    )
    _, found = page(command, first, *([second] if command == "diff" else []), code=int(command == "diff"))
    assert found.leaf("new\\nline") and found.leaf("new line") and "new\nline" not in found.text


def test_one_parameter_is_singular(page, tmp_path):
    _, found = page("inspect", checkpoint(tmp_path / "a.safetensors", **{"x.a": np.zeros(1), "x.b": np.zeros(0)}))
    assert found.group("x.")[2] == "1 parameter"


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_a_page_stands_alone_and_names_are_text(command, page, tmp_path):
    first = checkpoint(tmp_path / "a.safetensors")
    second = checkpoint(tmp_path / "b.safetensors", **{HOSTILE: np.zeros(3, np.int8)})
    _, found = page(command, first, *([second] if command == "diff" else []), code=int(command == "diff"))
    assert found.tags["script"] == 1 and found.leaf(HOSTILE)
    assert not {"link", "img", "iframe", "object", "base"} & found.tags.keys()
    assert not [a for a in found.attributes if a[1] in ("src", "href", "action", "style") or a[1].startswith("on")]
    assert "://" not in found.page.replace("file://", "") and "url(" not in found.page


def test_very_many_tensors_share_rows_and_the_page_says_so(page, tmp_path):
    experts = {f"layers.{i}.experts.{e}.up": np.zeros(2, np.int8) for i in range(50) for e in range(200)}
    told, found = page("inspect", checkpoint(tmp_path / "a.safetensors", **experts))
    assert len(told["tensors"]) == 10_008 and len(found.leaves) < 20 and len(found.page) < 1 << 16
    assert found.leaf("layers.*.experts.*.up ×10,000")[3] == "19.5 KiB"  # noqa: RUF001
    assert "10,008 tensors in 5 rows: those that differ only in numbers share a row." in found.text
    assert sum(found.values("bar")) == told["bytes"]


def test_of_very_many_names_the_largest_are_listed(page, tmp_path):
    letters = "abcdefghijklmnopqrst"
    words = [a + b + c for a in letters for b in letters for c in letters]
    told, found = page(
        "inspect", checkpoint(tmp_path / "a.safetensors", **{word: np.zeros(2, np.int8) for word in words})
    )
    assert len(told["tensors"]) == 8008 and len(found.leaves) == MOST_ROWS
    assert "Only the largest 4,000 rows are listed; --json lists everything." in found.text
    assert found.leaf("model.embed")[1] == "float16"


def test_names_without_numbers_share_no_row_and_the_page_does_not_say_so(page, tmp_path):
    letters = "abcdefghijklmnopqr"
    words = [a + b + c for a in letters for b in letters for c in letters]
    save_file({word: np.zeros(2, np.int8) for word in words}, tmp_path / "a.safetensors")
    _, found = page("inspect", str(tmp_path / "a.safetensors"))
    assert len(found.leaves) == MOST_ROWS and "share a row" not in found.text
    assert "5,832 tensors. Only the largest 4,000 rows are listed; --json lists everything." in found.text


@pytest.mark.parametrize("command", [("inspect",), ("diff", "SAME")])
def test_a_page_that_cannot_be_written_is_an_error(command, cli, tmp_path):
    source = checkpoint(tmp_path / "a.safetensors")
    arguments = [source if part == "SAME" else part for part in (command[0], source, *command[1:])]
    done = cli(*arguments, "--html", str(tmp_path / "page.htm"))
    assert done.code == 2 and "does not end in .html" in done.stderr
    done = cli(*arguments, "--html", str(tmp_path / "no" / "page.html"))
    assert done.code == 2 and "is not a file in an existing folder" in done.stderr
    (tmp_path / "full.html").symlink_to("/dev/full")
    done = cli(*arguments, "--html", str(tmp_path / "full.html"))
    assert done.code == 1 and "full.html': No space left on device." in done.error
    (tmp_path / "old.html").write_text("old")
    assert cli(*arguments, "--html", str(tmp_path / "old.html")).code == 0
    assert (tmp_path / "old.html").read_text().startswith("<!DOCTYPE html>")
