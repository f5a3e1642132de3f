"""Reports as pages of HTML: what they show, and that nothing that a checkpoint says becomes markup."""

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from report_facts import load_report, plan_report

import shardload
from shardload.reports import (
    TIMES,
    Cast,
    ClusterBytes,
    DeviceUse,
    Fallback,
    Fit,
    HostReads,
    LayoutSummary,
    ReadReason,
    SharedReads,
    VariableUse,
)

HOSTILE = """</script><script>alert(1)</script><img src=x onerror="alert('2')">"""


class Parsed(HTMLParser):
    """The elements of a page, the text in each kind, and the rows of its tables."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.rows = [], Counter(), [], Counter(), []
        self.feed(page)
        assert self.open == []  # every element is closed

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "input", "wbr", "rect"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text[self.open[-1] if self.open else ""] += 1
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, name):
        return next(row for row in self.rows if row and row[0] == name)


def used(name="dense/kernel", *, spec=((), ("model",)), reason="column", tensor="dense.weight"):
    shard = tuple(n // (8 if axes else 1) for n, axes in zip((512, 2048), spec, strict=True))
    return VariableUse(name, tensor, "bfloat16", (512, 2048), shard, spec, 2 << 20, 2 * shard[0] * shard[1], reason)


def page_of(*variables, fallbacks=(), **changes):
    return load_report(layout=LayoutSummary(1, 1, fallbacks, variables), **changes).to_html()


def test_each_variable_is_a_row_with_its_dims_bytes_and_reason():
    found = Parsed(page_of(used(), used("dense_1/kernel", spec=((), ()), reason="rule .*kernel")))
    name, dtype, dims, whole, each, why = found.row("dense/kernel")
    assert (name, dtype, dims) == ("dense/kernel", "bfloat16", f"512 {TIMES} 2048 ÷8 model")
    assert (whole, each) == ("2.0 MiB", "256.0 KiB")
    assert f"columnlayout (-, model): each device has 512 {TIMES} 256 of 512 {TIMES} 2048" in why
    assert "copied from the tensor dense.weight" in why
    assert "layout (-, -): each device has the whole variable" in found.row("dense_1/kernel")[-1]


def test_a_reason_opens_to_the_fallback_the_cast_and_how_hosts_read():
    fallback = Fallback("dense/kernel", "(-, model)", "(-, -)", "3 heads do not divide by 8; replicated")
    shared = SharedReads(1, 8, 7, 1, True, (ReadReason("dense/kernel", "broadcast", "it is large"),))
    layout = LayoutSummary(0, 1, (fallback,), (used(reason="heads out"),))
    casts = (Cast("dense/kernel", "float32", "bfloat16"),)
    report = plan_report(layout=layout, cast=casts, hosts=HostReads(8, 1, 8, 8, 64, 1, 1, shared))
    why = Parsed(report.to_html()).row("dense/kernel")[-1]
    assert why.startswith("heads out: 3 heads do not divide by 8; replicated")
    assert "its rule asks for the layout (-, model)" in why and "stored as float32, loaded as bfloat16" in why
    assert "each byte is read by one host, and others get it from there: it is large" in why


def test_numbers_are_sorted_by_value():
    attributes = Parsed(page_of(used())).attributes
    assert [value for tag, name, value in attributes if name == "data-value"] == ["1048576", "2097152", "262144"]


def test_devices_stages_and_the_rest_of_the_report_are_shown():
    found = Parsed(page_of(used()))
    assert found.row("cpu 7  batch=0, model=7")[2] == "63.9 MiB"
    assert found.row("transfer")[2] == "500 ms" and found.row("build")[2] == "120 ms"
    text = page_of(used(), notes=("a note",))
    assert "<h1>Load of /models/gemma3.gguf on batch=1,model=8</h1>" in text
    assert "<dt>Disk</dt><dd>228.9 MiB read for 227.0 MiB needed (+0.8 %)</dd>" in text
    assert "<dt>Notes</dt><dd>a note</dd>" in text


def test_a_plan_says_so_and_marks_the_memory_of_a_device():
    fits = Fit(device_memory=128 << 20, per_device_max=67_000_000, fits=True, smallest_mesh=None)
    text = plan_report(fits=fits).to_html()
    assert "<h1>Plan of " in text and "the mark is the memory of a device, 128.0 MiB" in text
    assert text.count('<rect class="limit" x="994.0"') == 8


def test_processes_that_loaded_together_have_bars():
    cluster = ClusterBytes(300, 300, 1.0, (100, 200), (200, 100), 1)
    assert Parsed(page_of(cluster=cluster)).row("process 1")[2] == "200 B read, 100 B received"


def test_many_equal_devices_share_a_bar_and_a_large_page_stays_small():
    devices = (*(DeviceUse(i, "tpu", 100) for i in range(4095)), DeviceUse(4095, "tpu", 50))
    variables = (used(f"model/decoder_block_{i}/attention/key/kernel") for i in range(1200))
    text = page_of(*variables, devices=devices, mesh="batch=64,model=64")
    found = Parsed(text)
    assert found.row(f"tpu {TIMES} 4,095")[2] == "100 B each" and found.row(f"tpu {TIMES} 1")[2] == "50 B each"
    assert len(found.rows) > 1200 and len(text.encode()) < 2 << 20


def test_what_a_checkpoint_says_is_text():
    variable = used(HOSTILE, reason=HOSTILE, tensor=HOSTILE)
    names = dict.fromkeys(("missing", "unused", "notes"), (HOSTILE,))
    found = Parsed(page_of(variable, source=HOSTILE, format=HOSTILE, **names, cast=(Cast(HOSTILE, HOSTILE, "int8"),)))
    plain = Parsed(page_of(used()))
    assert found.tags["script"] == 1 and found.tags["img"] == 0
    assert {name for _, name, _ in found.attributes} == {name for _, name, _ in plain.attributes}
    assert found.row(HOSTILE)[5].startswith(HOSTILE)
    assert "\\x1b[2J" in page_of(used("\x1b[2J")) and "\x1b" not in page_of(used("\x1b[2J"))


def test_a_page_stands_alone():
    text = page_of(used())
    found = Parsed(text)
    assert not {"link", "img", "iframe", "object", "base"} & found.tags.keys()
    assert not [a for a in found.attributes if a[1] in ("src", "href", "action", "style") or a[1].startswith("on")]
    assert "://" not in text and "@import" not in text and "url(" not in text


def test_the_policy_allows_the_style_and_the_script_of_the_page_and_nothing_else():
    text = page_of(used())
    policy = next(v for _, name, v in Parsed(text).attributes if name == "content" and v.startswith("default-src"))
    hashes = {}
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    sources = {part.split()[0]: part.split()[1:] for part in policy.split(";")}
    assert sources["default-src"] == ["'none'"]
    assert {tag: sources[f"{tag}-src"] for tag in hashes} == {tag: [f"'sha256-{h}'"] for tag, h in hashes.items()}


def test_a_page_can_be_read_without_script_and_by_a_screen_reader():
    text = page_of(used())
    assert re.search(r'<p id="search" hidden><label>Search <input type="search"', text) and 'role="status"' in text
    attributes = Parsed(text).attributes
    assert attributes.count(("th", "scope", "col")) == 6 and ("th", "scope", "row") in attributes
    assert ("html", "lang", "en") in attributes and "prefers-color-scheme: dark" in text


def test_a_report_without_variables_has_a_page():
    assert Parsed(load_report(devices=()).to_html()).tags["table"] == 2


def test_each_role_of_auto_layouts_is_explained():
    source = "".join(path.read_text() for path in (Path(shardload.__file__).parent / "layouts").glob("*.py"))
    roles = set(re.findall(r'Wants\("([a-z ]+)"', source)) | set(re.findall(r'rule = "([a-z ]+)"', source))
    assert {"column", "vocabulary", "vector"} <= roles
    for role in roles:
        assert f"<li>{role}: " in page_of(used(reason=role)), role
