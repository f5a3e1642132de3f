"""Charts show the numbers of their JSON files, in both colour schemes, and in words."""

import re
from pathlib import Path

import pytest

from benchmarks.charts import CHARTS, chart
from benchmarks.drawing import WIDTH, Bar, Chart, Group, drawn
from benchmarks.rekls_training import Run, svg

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_those_of_their_numbers(name):
    assert drawn(chart(DOCS, name)) == (DOCS / "charts" / f"{name}.svg").read_text(), "run: make charts"


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_tells_its_numbers_in_words_and_has_colours_for_the_dark(name):
    shown, drawing = chart(DOCS, name), drawn(chart(DOCS, name))
    assert f">{shown.title}</title>" in drawing.replace("&apos;", "'") and "(prefers-color-scheme: dark)" in drawing
    assert all(f"{bar.label} {bar.text}" in shown.description for bar in shown.bars)


def test_every_chart_is_drawn_from_numbers_and_shown_with_words():
    shown = [
        found for page in PAGES for found in re.findall(r"!\[([^\]]*)\]\([./]*charts/([\w-]+)\.svg\)", page.read_text())
    ]
    assert {path.stem for path in (DOCS / "charts").iterdir()} == CHARTS.keys() == {name for _, name in shown}
    assert [(words, name) for words, name in shown if not re.search(r"\d", words)] == []


def test_curves_of_training_have_words_and_colours_for_the_dark():
    runs = [
        Run(name, 0.01, seed, (3.0,) * 20 + (2.0 + seed,) * 30, 1.0) for name in ("REKLS", "AdamW") for seed in (0, 1)
    ]
    drawing = svg(runs)
    assert "REKLS: 2.000, 3.000; AdamW: 2.000, 3.000</desc>" in drawing and "(prefers-color-scheme: dark)" in drawing
    style = (DOCS / "rekls-training.svg").read_text().partition("</style>")[0]
    assert "AdamW: 1.719, 1.832, 1.834</desc>" in style and "(prefers-color-scheme: dark)" in style


def widths(drawing, kind):
    return [float(width) for width in re.findall(rf'<rect class="{kind}"[^>]* width="([\d.]+)" height="15"/>', drawing)]


def test_bars_are_as_long_as_their_numbers_on_one_scale():
    bars = [Bar("ours", [1.0, 3.0], "4"), Bar("theirs", [8.0], "8", "peer"), Bar("least", [2.0], "2", "limit")]
    drawing = drawn(Chart("Title", "conditions", [Group("one", bars[:1]), Group("two", bars[1:])], legend=("a", "b")))
    (first,), (second,) = widths(drawing, "ours"), widths(drawing, "later")
    (peer,), (limit,) = widths(drawing, "peer"), widths(drawing, "limit")
    assert (second / first, peer / first, limit / first) == pytest.approx((3, 8, 2), rel=0.01)


def test_a_mark_scales_bars_that_are_shorter():
    shown = Chart("Title", "conditions", [Group("", [Bar("ours", [0.5], "0.5")])], mark=(1.0, "limit"))
    x = float(re.search(r'<line class="mark" x1="([\d.]+)"', drawn(shown))[1])
    left = float(re.search(r'<rect class="ours" x="([\d.]+)"', drawn(shown))[1])
    assert widths(drawn(shown), "ours")[0] == pytest.approx((x - left) / 2, rel=0.01)


@pytest.mark.parametrize("name", CHARTS)
def test_what_a_chart_shows_is_inside_of_it(name):
    ends = re.findall(r'<rect class="\w+" x="([\d.]+)"[^>]* width="([\d.]+)"', drawn(chart(DOCS, name)))
    assert ends and all(float(x) + float(width) <= WIDTH for x, width in ends)
