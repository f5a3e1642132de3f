"""Charts show the numbers of their JSON files, in both colour schemes, and in words."""

import re
from pathlib import Path

import pytest

from benchmarks.charts import CHARTS, chart
from benchmarks.drawing import drawn
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
