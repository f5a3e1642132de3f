import builtins
import json
import math
import re
from dataclasses import replace

import pytest
from report_facts import load_report, plan_report

from shardload.reports import (
    TIMES,
    ByteCounts,
    Cast,
    DeviceUse,
    Fallback,
    Fit,
    HostBytes,
    LayoutSummary,
    Outside,
    Stages,
    VariableUse,
    fold,
    printable,
)

ISSUE_KEYS = [
    "source", "format", "mesh", "devices", "variables", "parameters", "weight_bytes", "bytes", "seconds",
    "throughput_gb_s", "host_bytes", "layout", "missing", "unused", "cast",
]  # fmt: skip


def key_fallbacks(n: int = 18) -> tuple[Fallback, ...]:
    name = "decoder_block_{}/attention/key/kernel"
    return tuple(Fallback(name.format(i), "(-, model)", "(-, -)", "1 head does not divide by 8") for i in range(n))


def test_json_has_the_promised_keys_in_order():
    assert list(load_report().to_json())[: len(ISSUE_KEYS)] == ISSUE_KEYS
    assert list(load_report().to_json())[len(ISSUE_KEYS) :] == [
        "mismatched", "computed", "initialised", "outside", "dtypes", "notes", "cluster", "cache",
    ]  # fmt: skip


def test_json_nests_as_promised():
    variable = VariableUse("a", "A", "int8", (4, 2), (2, 2), (("model",), ()), 8, 4, "row")
    layout = LayoutSummary(190, 46, key_fallbacks(1), (variable,))
    found = load_report(layout=layout, cast=(Cast("a", "float32", "bfloat16"),)).to_json()
    assert list(found["devices"][0]) == ["id", "platform", "bytes"]
    assert list(found["bytes"]) == ["needed", "read"]
    assert list(found["seconds"]) == ["imports", "build", "plan", "transfer", "warm_up", "other", "total", "ready"]
    assert list(found["host_bytes"]) == ["budget", "peak_staging"]
    assert list(found["layout"]) == ["sharded", "replicated", "fallbacks", "variables"]
    assert list(found["layout"]["variables"][0]) == [
        "name", "tensor", "dtype", "shape", "shard_shape", "spec", "bytes", "device_bytes", "reason",
    ]  # fmt: skip
    assert list(found["layout"]["fallbacks"][0]) == ["variable", "wanted", "got", "why"]
    assert found["cast"] == [{"variable": "a", "stored": "float32", "loaded": "bfloat16"}]


def test_json_survives_strict_parsers():
    report = load_report(seconds=Stages(build=math.nan, plan=math.inf, transfer=0.0, total=0.1))
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    stages = {
        "imports": None,
        "build": None,
        "plan": None,
        "transfer": 0.0,
        "warm_up": None,
        "other": 0.1,
        "total": 0.1,
    }
    stages["ready"] = None
    assert found["seconds"] == stages and found["throughput_gb_s"] is None


def test_throughput_counts_needed_bytes_only():
    assert load_report().throughput_gb_s == pytest.approx(0.476)


@pytest.mark.parametrize("transfer", [None, 0.0, math.nan])
def test_throughput_without_a_transfer_is_not_a_number(transfer):
    assert load_report(seconds=Stages(build=0.1, plan=0.1, transfer=transfer, total=0.2)).throughput_gb_s is None


def test_a_plan_adds_whether_it_fits():
    facts = {"device_memory": 16 << 30, "per_device_max": 20 << 30, "fits": False, "smallest_mesh": "1x16"}
    report = plan_report(fits=Fit(**facts))
    assert report.to_json()["fits"] == facts
    assert "no, weights take 20.0 GiB of 16.0 GiB on the fullest device (125.0 %)" in str(report)
    assert "Smallest mesh that fits: 1x16" in str(report)


def test_a_plan_without_device_memory_says_nothing_about_fitting():
    assert plan_report().to_json()["fits"] is None and "Fits" not in str(plan_report())


def test_the_table_says_what_went_where():
    text = str(load_report())
    for part in ("/models/gemma3.gguf (gguf)", "batch=1,model=8 (8 cpu devices)", "268.1 M parameters", "511.4 MiB"):
        assert part in text
    assert re.search(r"cpu 7 +63\.9 MiB +█+", text)
    assert "190 variables sharded, 46 replicated" in text


def test_the_table_says_what_it_cost():
    text = str(load_report())
    assert "228.9 MiB read for 227.0 MiB needed (+0.8 %)" in text
    assert "123.0 MiB peak staging of 2.0 GiB" in text
    assert re.search(r"transfer +500 ms +█+ 0\.48 GB/s", text)


def test_a_text_has_no_colour_codes_and_no_trailing_blanks(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = str(load_report(layout=LayoutSummary(1, 1, key_fallbacks())))
    assert "\x1b" not in text and text == "\n".join(line.rstrip() for line in text.splitlines())


def test_the_same_fallback_of_all_layers_is_one_line():
    text = str(load_report(layout=LayoutSummary(190, 46, key_fallbacks())))
    assert f"decoder_block_*/attention/key/kernel {TIMES}18" in text
    assert text.count("1 head does not divide by 8") == 1


def test_the_same_variable_with_two_reasons_is_two_lines():
    other = (Fallback("decoder_block_9/attention/key/kernel", "(-, model)", "(model, -)", "too small"),)
    text = str(load_report(layout=LayoutSummary(190, 46, key_fallbacks(3) + other)))
    assert f"decoder_block_*/attention/key/kernel {TIMES}3" in text and "too small" in text


@pytest.mark.parametrize("field", ["missing", "unused", "computed", "initialised"])
def test_every_list_is_shown_folded_and_cut_with_a_count(field):
    letters = "abcdefghijklmnopqrst"
    text = str(load_report(**{field: tuple(f"{c}/vars_{i}" for c in letters for i in range(3))}))
    assert field.capitalize() in text and f"a/vars_* {TIMES}3" in text
    assert "… and 24 more (--json lists all)" in text


def test_what_is_outside_the_model_is_shown_with_its_reason():
    buffers = tuple(Outside(f"h.{i}.attn.bias", "a buffer: the causal mask") for i in range(12))
    report = load_report(outside=(*buffers, Outside("score.weight", "part of a head")))
    text = str(report)
    assert "13, no part of the model" in text and "a buffer: the causal mask" in text and "part of a head" in text
    assert f"h.*.attn.bias {TIMES}12" in text
    assert report.to_json()["outside"][-1] == {"tensor": "score.weight", "reason": "part of a head"}


def test_casts_are_counted_by_dtypes():
    casts = tuple(Cast(f"layer_{i}/kernel", "float32", "bfloat16") for i in range(30))
    assert f"float32 → bfloat16  30 variables: layer_*/kernel {TIMES}30" in str(load_report(cast=casts))


def test_notes_are_shown():
    assert "loading gemma2_9b" in str(load_report(notes=("gemma2_7b was never released; loading gemma2_9b",)))


def test_256_devices_become_three_lines():
    text = str(load_report(devices=tuple(DeviceUse(i, "tpu", 1000 + i) for i in range(256))))
    assert "256 tpu devices" in text
    assert all(word in text for word in ("least (tpu 0)", "median (tpu 128)", "most (tpu 255)"))
    assert len(text.splitlines()) < 25


def test_nothing_at_all_is_still_a_table():
    empty = load_report(
        devices=(), variables=0, parameters=0, weight_bytes=0, bytes=ByteCounts(0, 0),
        seconds=Stages(build=None, plan=None, transfer=None, total=0.0), host_bytes=HostBytes(0, 0),
        layout=LayoutSummary(0, 0),
    )  # fmt: skip
    assert "no device" in str(empty) and str(replace(empty, devices=(DeviceUse(0, "cpu", 0),)))


def test_control_characters_of_a_checkpoint_never_reach_the_terminal():
    text = str(load_report(source="/a\x1b[31m", missing=("\x1b]0;title\x07",), notes=("[red]markup[/red]\r",)))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) and "[red]markup[/red]\\r" in text


def test_names_fold_by_numbers_that_differ():
    names = [f"llama3/block_{i}/kernel" for i in range(12)] + ["llama3/final_norm/scale"]
    assert [str(f) for f in fold(names)] == [f"llama3/block_*/kernel {TIMES}12", "llama3/final_norm/scale"]


def test_names_that_differ_in_words_stay_apart():
    assert [f.count for f in fold(["a_1/x", "a_1/y", "a_2/x"])] == [2, 1]


def test_printable_keeps_what_people_write():
    assert printable("Kölner Dom 模型.gguf") == "Kölner Dom 模型.gguf"
    assert printable("a\nb", keep="\n") == "a\nb"


def test_text_in_a_notebook_is_the_same(monkeypatch):
    known = str(load_report())
    # As Jupyter has it.
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    assert known and str(load_report()) == known
