"""Plans as pictures and pages: memory against the limit and what is split where, in the terminal, as SVG and HTML."""

import base64
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from shardload.layout_search.plan_parts import Decision, DeviceBytes, PlannedExchange, PlannedVariable
from shardload.parallel import LayoutPlan
from shardload.reports import TIMES
from shardload.sharding.mesh import MeshSpec

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def variable(path, shape, spec, stored=()):
    nbytes = 2
    for n in shape:
        nbytes *= n
    return PlannedVariable(path, shape, nbytes, spec, stored, True, "")


@pytest.fixture
def plan():
    blocks = [variable(f"block_{i}/up/kernel", (512, 2048), ((), ("model",))) for i in range(3)]
    table = variable("table/embeddings", (4096, 512), (("model", "batch"), ()), stored=("batch",))
    return LayoutPlan(
        model="lm <small>", mesh=MeshSpec(("batch", "model"), (2, 4)), batch_axes=("batch",), training=True,
        inputs="int32[8, 16]", variables=(table, *blocks), device=DeviceBytes(2 * MIB, 2 * MIB, 4 * MIB, 4 * MIB),
        device_memory_bytes=16 * MIB, step_s=0.001, exchanges=(), decisions=(), constants={"flops_per_s": 1e14},
    )  # fmt: skip


def bars(text):
    return {line.split()[0]: line[14:].split("|")[0] for line in text.splitlines() if "|" in line}


def test_each_bar_begins_where_the_one_above_ends_and_the_limit_is_the_border(plan):
    found = bars(str(plan))
    assert {name: (bar.find("█"), bar.count("█")) for name, bar in found.items() if name != "free"} == {
        "weights": (0, 5),
        "gradients": (5, 5),
        "slots": (10, 10),
        "activations": (20, 10),
    }
    assert found["free"] == " " * 30 + "." * 10
    assert "per device: 12.0 MiB of 16.0 MiB (75 %)" in str(plan)


def test_without_a_limit_the_bars_fill_the_width(plan):
    text = str(replace(plan, device_memory_bytes=None))
    assert bars(text)["activations"].endswith("█") and "free" not in bars(text)
    assert "per device: 12.0 MiB\n" in text


def test_layouts_name_the_axes_of_each_dim_and_bytes_on_each_device(plan):
    lines = str(plan).splitlines()
    assert "  block_*/up/kernel x3  (512, 2048/model)          1.5 MiB" in lines
    assert "  table/embeddings      (4096/model+batch, 512)  512.0 KiB  gathered over batch for use" in lines


def test_a_terminal_without_unicode_gets_ascii(plan):
    assert plan.summary(ascii_only=True).isascii()


def test_the_svg_is_well_formed_and_its_bar_has_the_widths_of_the_parts(plan):
    root = ElementTree.fromstring(plan.to_svg())
    found = {t.text: r for r in root.iter(f"{SVG}rect") if (t := r.find(f"{SVG}title")) is not None}
    wide = {name: float(found[name].get("width")) for name in found if name.split()[0] in ("weights", "slots", "free")}
    assert wide == {"weights 2.0 MiB": 114.0, "slots 4.0 MiB": 228.0, "free 4.0 MiB": 228.0}
    assert float(root.find(f"{SVG}line[@class='limit']").get("x1")) == 24 + 912


def test_the_svg_says_what_is_split_and_stays_in_its_frame(plan):
    root = ElementTree.fromstring(plan.to_svg())
    text = [t.text for t in root.iter(f"{SVG}text")]
    assert {"lm <small> on batch=2,model=4, training", "2048 ÷4", "4096 ÷8", "512", "batch ÷2"} <= set(text)
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    right, bottom = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width")) <= right
        assert float(box.get("y", 0)) + float(box.get("height")) <= bottom


def test_an_svg_of_a_plan_over_its_limit_shows_the_limit_inside_the_bar(plan):
    root = ElementTree.fromstring(replace(plan, device_memory_bytes=6 * MIB).to_svg())
    assert float(root.find(f"{SVG}line[@class='limit']").get("x1")) == 24 + 456


def cells(page, name):
    rows = re.findall('<tr[^>]*><th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL)
    return next(re.sub("<[^>]+>", "|", row) for head, row in rows if re.sub("<[^>]+>", "", head) == name)


def test_the_page_has_a_bar_for_each_device_with_its_parts_and_the_limit(plan):
    page = plan.to_html()
    assert "<h1>Layout plan of lm &lt;small&gt; on batch=2,model=4, training</h1>" in page
    assert page.count('<rect class="p3"') == 8 and "12.0 MiB" in cells(page, "device 7  batch=1, model=3")
    assert '<li><span class="swatch p2"></span>slots 4.0 MiB</li>' in page
    assert "the mark is the limit, 16.0 MiB, of which 75 % are used" in page


def test_equal_devices_of_a_large_mesh_share_a_bar(plan):
    page = replace(plan, mesh=MeshSpec(("batch", "model"), (64, 64)), variables=()).to_html()
    assert "12.0 MiB each" in cells(page, f"device {TIMES} 4,096")


def test_the_page_gives_the_decisions_about_each_variable_and_what_the_opposite_costs(plan):
    dims = tuple(f"block_{i}/up/kernel[1]" for i in range(3))
    plan = replace(plan, decisions=(Decision("model", True, 2048, dims, 2e-3),))
    found = cells(plan.to_html(), "block_1/up/kernel")
    assert "axis &#x27;model&#x27; splits the 2048 of" in found and "the opposite takes +2.000 ms per step" in found
    assert "opposite" not in cells(plan.to_html(), "table/embeddings")


def test_the_page_says_what_is_stored_split_only_and_lists_collectives_and_notes(plan):
    exchanges = (PlannedExchange("all-reduce", "model", 6, 3 * MIB, 0.0015),)
    page = replace(plan, exchanges=exchanges, notes=("no <cache>",)).to_html()
    found = cells(page, "table/embeddings")
    assert "4096 |÷4 model| |÷2 batch|" in found and "stored split over batch, and gathered for use" in found
    assert '<span class="axis a0 stored" title="stored split, gathered for use">' in page
    assert "1.500 ms for 3.0 MiB" in cells(page, "6 all-reduces over model")
    assert "<dt>Note</dt><dd>no &lt;cache&gt;</dd>" in page


def test_a_notebook_shows_the_picture_with_a_text_alternative(plan):
    shown = ElementTree.fromstring(plan._repr_html_().replace(">", "/>"))
    assert shown.tag == "img" and shown.get("alt") == "Layout plan of lm <small> on batch=2,model=4"
    kind, _, data = shown.get("src").partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(data).decode() == plan.to_svg()
