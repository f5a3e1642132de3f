"""Draw the charts of docs/ from its JSON files of measurements.

    python -m benchmarks.charts [--folder docs]          (make charts)

A test draws them again and compares, so that a chart never shows other numbers than its JSON file. Runs with
``--out`` write such files; performance-printed.json has what earlier runs printed as tables only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.drawing import Bar, Chart, Group, drawn

PRINTED = "performance-printed.json"
LOCAL = "performance-2026-11-24.json"
REMOTE = "performance-remote-2026-11-27.json"
GPU, GPU_LATER = "performance-gpu-2026-11-26.json", "performance-gpu-2026-11-27.json"
Found = dict[str, Any]


def seconds(label: str, value: float, kind: Any = "ours") -> Bar:
    """A bar of seconds."""
    return Bar(label, [value], f"{value:.2f} s" if value < 10 else f"{value:.1f} s", kind)


def rate(label: str, value: float, kind: Any = "ours") -> Bar:
    """A bar of GB/s."""
    return Bar(label, [value], f"{value:.2f} GB/s", kind)


def models(found: Found) -> Chart:
    """Seconds to build and load whole models."""
    names = {"gemma2-h5": "Gemma 2 shape, HDF5", "gemma3-hf": "Gemma 3 270M, safetensors"}
    groups = []
    for one in found["models"]["rows"]:
        name, dtype = one["name"].split()
        bars = [seconds("shardload", one["ours_s"]), seconds("Keras, KerasHub", one["peer_s"], "peer")]
        groups.append(Group(f"{names[name]}, {dtype}: {one['times_faster']} times faster", bars))
    return Chart("Build and load a whole model", "Eight CPU devices, two cores, page cache; lower is better", groups)


def prompt(found: Found) -> Chart:
    """Seconds from a folder to a tokenised prompt, and with a cold disk."""
    titles = {
        "ready": "To a tokenised prompt, one device",
        "ready, cached": "The same, with a warm compilation cache",
        "gemma3-hf cold": "To eight devices from a cold disk",
    }
    groups = [
        Group(
            f"{titles[one['name']]}: {one['ratio_median']:.1f} times faster",
            [seconds("shardload", one["a_s"]), seconds("KerasHub", one["b_s"], "peer")],
        )
        for one in found["models"]
    ]
    return Chart("From the folder of Gemma 3 270M", "Two cores; lower is better", groups)


def loaders(found: Found) -> Chart:
    """Rates of loaders of one safetensors file into sharded arrays."""
    names = {
        "mix, orbax": "Orbax v1",
        "mix, whole": "safe_open, whole tensors",
        "mix, slices": "safe_open, get_slice",
    }
    groups = [
        Group(
            f"{one['ratio_median']:.1f} times faster",
            [rate("shardload", one["a_gb_s"]), rate(names[one["name"]], one["b_gb_s"], "peer")],
        )
        for one in found["load_peers"]
    ]
    return Chart(
        "A safetensors file of 1 GB into sharded arrays",
        "bfloat16, tensor-parallel mix, eight CPU devices, two cores, page cache; higher is better",
        groups,
    )


def floor(found: Found) -> Chart:
    """Rates of transfers, and of plain copies of the same bytes."""
    groups = [
        Group(
            f"{one['name']}: {one['of_floor']} of the limit",
            [rate("shardload", one["ours_gb_s"]), rate("plain copy", one["floor_gb_s"], "limit")],
        )
        for one in found["transfer_floor"]["rows"]
    ]
    return Chart("Transfer against the physical limit", "1 GB, page cache, two cores; higher is better", groups)


def small_tensors(found: Found) -> Chart:
    """Times of loads of 20,000 small tensors, over those of a plain program."""
    bars = [
        Bar(one["name"], [one["ratio"]], f"{one['ratio']:.2f}  ({one['ours_s']:g} s)")
        for one in found["small_tensors"]["rows"]
    ]
    return Chart(
        "20,000 small tensors: time over a plain program's",
        "16 to 4,096 elements each, two busy cores; lower is better",
        [Group("", bars)],
        mark=(1.0, "as long as load_file, h5py, Orbax, gguf or load_weights"),
    )


def restoring(found: Found) -> Chart:
    """Rates of restores, against Orbax' best setting and its default."""
    groups = []
    for mesh in ("1x8 columns", "2x4 columns", "8x1 rows"):
        best, default, zstd = (
            next(one for one in found["restore_orbax"] if one["name"] == f"{mesh}, {way}")
            for way in ("best", "default", "zstd")
        )
        groups.append(
            Group(
                f"{mesh}: {best['ratio_median']:.1f} and {default['ratio_median']:.1f} times faster; "
                f"{zstd['ratio_median']:.2f} with zstd",
                [
                    rate("shardload, verified", best["a_gb_s"]),
                    rate("Orbax, uncompressed", best["b_gb_s"], "peer"),
                    rate("Orbax, default (zstd)", default["b_gb_s"], "peer"),
                    rate("shardload, Orbax' zstd", zstd["a_gb_s"]),
                ],
            )
        )
    return Chart("Restore a step of 1.07 GB", "Two cores, page cache; higher is better", groups)


def saving(found: Found) -> Chart:
    """Seconds until a step is complete, and for which a save blocks training."""
    rows = {(one["name"], one["peer"]): one for one in found["save_orbax"]["rows"]}
    groups = []
    for name, words in (("save, float32, random", "Random float32"), ("save, bfloat16, weights", "bfloat16 weights")):
        default, plain, file = (
            rows[name, peer] for peer in ("Orbax, default (zstd)", "Orbax, uncompressed", "one file + fsync")
        )
        groups.append(
            Group(
                f"{words}: {math.ceil(100 * default['ratio_median']) / 100:.2f} of the time of Orbax' default",
                [
                    seconds("shardload, verified", default["ours_s"]),
                    seconds("Orbax, default (zstd)", default["theirs_s"], "peer"),
                    seconds("Orbax, uncompressed", plain["theirs_s"], "peer"),
                    seconds("one file and fsync", file["theirs_s"], "limit"),
                ],
            )
        )
    return Chart("Save a step of 1.07 GB, until it is durable", "Eight CPU devices, two cores; lower is better", groups)


def blocking(found: Found) -> Chart:
    """Milliseconds for which a save blocks training."""
    groups = []
    for one in found["save_orbax"]["rows"]:
        if not one["name"].startswith("blocking"):
            continue
        ours, copy = (1e3 * one[key] for key in ("ours_s", "theirs_s"))
        bars = [Bar("shardload", [ours], f"{ours:.0f} ms"), Bar("np.copyto", [copy], f"{copy:.0f} ms", "limit")]
        groups.append(Group(one["name"].removeprefix("blocking, "), bars))
    return Chart("How long a save blocks training", "1.07 GB on CPU devices, one process; lower is better", groups)


def quantised_folders(found: Found) -> Chart:
    """Seconds of loads of quantised folders into bfloat16."""
    bars = [
        Bar(f"{one['name']}, {one['stored_gb']:.2f} GB", [one["wall_s"]], f"{one['wall_s']:.2f} s")
        for one in found["quantised_folders"]["rows"]
    ]
    return Chart(
        "Load quantised folders into bfloat16",
        "A Llama of 1.26 GB in bfloat16 onto eight CPU devices, two cores, page cache; lower is better",
        [Group("", bars)],
    )


def quantised_loading(found: Found) -> Chart:
    """Seconds of loads that quantise, of loads that do not, and of Keras' quantisation after a load."""
    groups = [
        Group(
            f"{one['name']}: {one['times_as_long']:.1f} times faster than Keras",
            [
                seconds("quantised while loading", one["ours_s"]),
                seconds("load, quantize()", one["keras_s"], "peer"),
                seconds("load in bfloat16", one["plain_s"], "limit"),
            ],
        )
        for one in found["quantised_loading"]["rows"]
    ]
    return Chart("Quantise while loading", "Eight CPU devices, two cores, page cache; lower is better", groups)


def addresses(found: Found) -> Chart:
    """Rates of loads from an address, as a part of the rate of a plain download."""
    bars = []
    for one in found["stores"]:
        if one["arguments"]["what"] != "load":
            continue
        limit, late = one["arguments"]["mb_s"], one["arguments"]["latency_ms"]
        label = f"{limit:.0f} MB/s" if limit else "no limit"
        load = one["results"]["load"]
        written = f"{load['rate_over_floor']:.2f}  ({load['gb_s']:.2f} GB/s)"
        bars.append(Bar(label + (f", {late:.0f} ms late" if late else ""), [load["rate_over_floor"]], written))
    return Chart(
        "Load from an address: part of a plain download's rate",
        "1 GB by rows onto eight CPU devices; server and client share two cores; higher is better",
        [Group("", bars)],
        mark=(1.0, "plain download"),
    )


def cluster(found: Found) -> Chart:
    """Bytes that processes read together, over the bytes of the checkpoint, both ways."""
    groups = []
    for one in found["replicas"]:
        if one["store"] == "disk":
            continue
        bars = []
        for way, words, kind in (("broadcast", "each byte once", "ours"), ("read", "each what it needs", "peer")):
            ratio, wall_s = one[way]["sent_ratio"], one[way]["wall_s"]
            bars.append(Bar(words, [ratio], f"{ratio:.3f}  ({wall_s:.1f} s)", kind))  # type: ignore[arg-type]
        shape, _, mesh = one["shape"].partition(":")
        processes = shape.partition("x")[0]
        groups.append(Group(f"{processes} processes on {mesh}: {one['times_faster']:.2f} times faster", bars))
    return Chart(
        "Bytes from storage over bytes of the checkpoint",
        "Gemma 3 270M, a store that sends 100 MB/s to all together, two cores; lower is better",
        groups,
        mark=(1.0, "each byte once"),
    )


def served(found: Found) -> Chart:
    """Rates of loads from `shardload serve`."""
    kinds = {"plain download": "limit", "load of the file itself": "limit"}
    bars = [rate(one["name"], one["gb_s"], kinds.get(one["name"], "ours")) for one in found["served"]["rows"]]
    return Chart(
        "Load from shardload serve on the same machine",
        "1 GB by rows onto eight CPU devices; server and client share two cores; higher is better",
        [Group("", bars)],
    )


def ready(found: Found) -> Chart:
    """Seconds from the call of ``load`` to the first result on eight CPU devices."""
    groups = []
    for rows in found["ready"]:
        for disk in ("warm disk", "cold disk"):
            chosen = [row for row in rows if row["way"].startswith(disk)]
            bars = [
                Bar(
                    "with warm_up" if row["way"].endswith("warm_up") else "without",
                    [row["load_s"], row["first_s"]],
                    f"{row['ready_s']:.1f} s",
                )
                for row in chosen
            ]
            groups.append(Group(f"{chosen[0]['call']}, {disk}", bars))
    return Chart(
        "Time to the first result on CPU devices",
        "Gemma 3 270M onto eight devices, two idle cores; lower is better",
        groups,
        legend=("load", "first call"),
    )


def gpu_ready(found: Found) -> Chart:
    """Seconds from the call of ``load`` to the first result on a GPU."""
    bars = {}
    for way, runs in found["ready"].items():
        load, whole = (statistics.median(run[key] for run in runs) for key in ("load_s", "ready_s"))
        name = "with warm_up" if way.startswith("warm_up") else "without"
        bars[way] = Bar(name, [load, whole - load], f"{whole:.1f} s")
    groups = [
        Group("Nothing compiled before", [bars["plain"], bars["warm_up"]]),
        Group("Programs in the cache", [bars["plain, compiled before"], bars["warm_up, compiled before"]]),
    ]
    return Chart(
        "Time to the first result on one GPU",
        "Gemma 2 2B, 5.2 GB, predict, NVIDIA H200; lower is better",
        groups,
        legend=("load", "first call"),
    )


def gpu_token(found: Found) -> Chart:
    """Seconds from the call to the first token of ``generate`` on a GPU."""
    bars = []
    for side, name in (("ours", "shardload"), ("peer", "KerasHub")):
        load, whole = (statistics.median(run[key] for run in found["token"][side]) for key in ("load_s", "ready_s"))
        bars.append(Bar(name, [load, whole - load], f"{load:.1f} s of {whole:.1f} s"))
    return Chart(
        "To the first token on one GPU",
        "Gemma 2 2B, 5.2 GB, nothing compiled before, NVIDIA H200; lower is better",
        [Group("", bars)],
        legend=("load", "compile and run the first step"),
    )


def gpu_loading(found: Found) -> Chart:
    """Rates of loads onto a GPU."""
    rows = found["gpu_loading"]["rows"]
    bars = [
        Bar(one["name"], [one["gb_s"]], f"{one['gb_s']:g} GB/s", "ours" if "cpu_s" in one else "limit") for one in rows
    ]
    return Chart(
        "Load 5.2 GB onto one GPU",
        "KerasHub preset in the page cache, NVIDIA H200, 16 CPU cores; higher is better",
        [Group("", bars)],
    )


def gpu_saving(found: Found) -> Chart:
    """Seconds for which a save blocks, and until its step is complete, on a GPU."""
    bars = []
    for part, words in (("saving", "pinned memory"), ("saving, not pinned", "copies by Orbax")):
        blocked, whole = (statistics.median(found[part][key]) for key in ("blocked_s", "published_s"))
        bars.append(Bar(words, [blocked, whole - blocked], f"{blocked:.2f} s of {whole:.1f} s"))
    return Chart(
        "Save 5.2 GB from one GPU",
        "NVIDIA H200; lower is better",
        [Group("", bars)],
        legend=("training waits", "in the background"),
    )


def cache(found: Found) -> Chart:
    """Rates of loads from a store with and without a cache, and from a local file."""
    names = (
        ("without", "without a cache", "peer"),
        ("first", "first start", "ours"),
        ("second", "second start", "ours"),
        ("local", "local file", "limit"),
    )
    groups = []
    for one in found["stores"]:
        if one["arguments"]["what"] == "cache":
            title = "Cold disk" if one["arguments"]["cold"] else "In the page cache"
            groups.append(Group(title, [rate(name, one["results"][key]["gb_s"], kind) for key, name, kind in names]))
    return Chart(
        "With a cache of what was read from a store",
        "0.5 GB from a store of 300 MB/s, 20 ms late; server and client share two cores; higher is better",
        groups,
    )


def following(found: Found) -> Chart:
    """Seconds from the beginning of a save until a replica has swapped the step in."""
    rows = found["following"]["rows"]
    groups = []
    for mesh in ("1x8", "2x4"):
        bars = [
            Bar(one["way"], [one["s"]], f"{one['s']:.2f} s ({one['low']:.2f} to {one['high']:.2f})")
            for one in rows
            if one["mesh"] == mesh
        ]
        groups.append(Group(f"A replica on {mesh}", bars))
    return Chart(
        "Follow a trainer: age of a step when it is swapped in",
        "100 MB of weights, all on two busy cores; lower is better",
        groups,
    )


def training(found: Found) -> Chart:
    """CPU-seconds of training under shardload's layouts, over those of other layouts."""
    rows = found["parallel_training"]["rows"]
    groups = []
    for model, hand in (("blocks", "Megatron's map by hand"), ("Gemma", "KerasHub's map")):
        for against, words in (("map by hand", hand), ("data parallelism", "data parallelism")):
            bars = [
                Bar(
                    one["layout"], [one["cpu_ratio"]], f"{one['cpu_ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
                )
                for one in rows
                if (one["model"], one["against"]) == (model, against)
            ]
            groups.append(Group(f"{model}, against {words}", bars))
    return Chart(
        "Training: CPU time of a layout over that of another",
        "Keras' fit with Adam, eight simulated devices, 2x4, two cores; lower is better",
        groups,
        mark=(1.0, "as long as the other"),
    )


def planning(found: Found) -> Chart:
    """Seconds to plan, and the target of each."""
    groups = [
        Group(
            one["name"],
            [
                Bar("took", [one["wall_s"]], f"{one['wall_s']:.1f} s"),
                Bar("target", [one["target_s"]], f"{one['target_s']} s", "limit"),
            ],
        )
        for one in found["planning"]["rows"]
    ]
    return Chart("Plan layouts", "From headers, two cores, a slow hour; lower is better", groups)


def layouts(found: Found) -> Chart:
    """MiB that are exchanged under a map by hand, and under the searched layout."""
    groups = []
    for one in found["layouts"]["rows"]:
        bars = [Bar("search", [one["search_mib"]], f"{one['search_mib']:,} MiB")]
        if "hand_mib" in one:
            bars.append(Bar("map by hand", [one["hand_mib"]], f"{one['hand_mib']:,} MiB", "peer"))
        groups.append(Group(one["model"] + (": the map raises" if len(bars) == 1 else ""), bars))
    return Chart(
        "Exchanged per device and step, searched and by hand",
        "Two layers, forward and backward, as compiled for 2x4; lower is better",
        groups,
    )


def stacked_layers(found: Found) -> Chart:
    """Rates of loads into stacked arrays."""
    stack, reading = found["stacked_layers"]["rows"]
    groups = [
        Group(
            f"{stack['times_faster']} times faster",
            [rate("shardload", stack["ours_gb_s"]), rate("np.stack", stack["peer_gb_s"], "peer")],
        ),
        Group(
            f"{reading['times_faster']} of the limit",
            [rate("shardload", reading["ours_gb_s"]), rate("reading alone", reading["peer_gb_s"], "limit")],
        ),
    ]
    return Chart(
        "Load layers into stacked arrays", "0.98 GB onto eight CPU devices, two busy cores; higher is better", groups
    )


def cold_disk(found: Found) -> Chart:
    """Rates of loads from a cold disk, through the page cache and past it."""
    bars = [rate(one["name"], one["gb_s"]) for one in found["cold_disk"]["rows"]]
    conditions = "Onto eight CPU devices, two busy cores; higher is better"
    return Chart("Load 1 GB from a cold disk", conditions, [Group("", bars)])


def parts_of_rows(found: Found) -> Chart:
    """Milliseconds to read parts of rows from a cold disk, with their gaps and without."""
    groups = [
        Group(
            one["name"],
            [
                Bar(f"{way} them", [one[f"{way}_ms"]], f"{one[f'{way}_ms']} ms", kind)  # type: ignore[arg-type]
                for way, kind in (("reading", "ours"), ("skipping", "peer"))
            ],
        )
        for one in found["strided_reads"]["rows"]
    ]
    return Chart("Read parts of rows from a cold disk", "128 MiB, one thread; lower is better", groups)


def converting(found: Found) -> Chart:
    """Seconds to convert a checkpoint from one format to the next."""
    bars = [
        Bar(one["name"], [one["s"]], f"{one['s']} s, {one['peak_gib']} GiB of memory")
        for one in found["convert"]["rows"]
    ]
    return Chart("Convert 18.5 GB", "Gemma 2 9B's architecture, two cores; lower is better", [Group("", bars)])


def saving_memory(found: Found) -> Chart:
    """Memory of training by plans that save it, over that of the plan that does not."""
    rows = found["saving_memory"]["rows"]
    groups = [
        Group(
            model,
            [
                Bar(one["plan"], [one["memory_ratio"]], f"{one['memory_ratio']:.2f}, CPU {one['cpu_ratio']:.2f}")
                for one in rows
                if one["model"] == model
            ],
        )
        for model in dict.fromkeys(one["model"] for one in rows)
    ]
    return Chart(
        "Memory of plans: recomputed, sequences",
        "Over a plan that recomputes nothing and keeps sequences whole, eight simulated devices; lower is better",
        groups,
        mark=(1.0, "nothing saved"),
    )


def rekls_time(found: Found) -> Chart:
    """Times of training steps with REKLS over those with AdamW."""
    bars = []
    for one in found["rekls_steps"]:
        if one["peer"] == "AdamW":
            every = one["name"].rpartition(" ")[2]
            label = "every step" if every == "1" else f"every {every} steps"
            bars.append(Bar(label, [one["ratio_median"]], f"{one['ratio_median']:.1f} times as long"))
    return Chart(
        "Training with REKLS over AdamW, by decompositions",
        "A Gemma of two layers, width 192, one device, two idle cores; lower is better",
        [Group("", bars)],
        mark=(1.0, "AdamW"),
    )


CHARTS: dict[str, tuple[str, Callable[[Found], Chart]]] = {
    "addresses": (REMOTE, addresses),
    "blocking": (LOCAL, blocking),
    "cache": (REMOTE, cache),
    "cluster": (REMOTE, cluster),
    "cold-disk": (PRINTED, cold_disk),
    "converting": (PRINTED, converting),
    "floor": (PRINTED, floor),
    "following": (PRINTED, following),
    "gpu-loading": (PRINTED, gpu_loading),
    "gpu-ready": (GPU_LATER, gpu_ready),
    "gpu-saving": (GPU_LATER, gpu_saving),
    "gpu-token": (GPU, gpu_token),
    "layouts": (PRINTED, layouts),
    "loaders": (LOCAL, loaders),
    "models": (PRINTED, models),
    "parts-of-rows": (PRINTED, parts_of_rows),
    "planning": (PRINTED, planning),
    "prompt": (LOCAL, prompt),
    "quantised-folders": (PRINTED, quantised_folders),
    "quantised-loading": (PRINTED, quantised_loading),
    "ready": (REMOTE, ready),
    "rekls-time": (LOCAL, rekls_time),
    "restoring": (LOCAL, restoring),
    "saving": (LOCAL, saving),
    "saving-memory": (PRINTED, saving_memory),
    "served": (PRINTED, served),
    "small-tensors": (PRINTED, small_tensors),
    "stacked-layers": (PRINTED, stacked_layers),
    "training": (PRINTED, training),
}
"""Name of a chart → the file with its numbers, and the function that reads them."""


def chart(folder: Path, name: str) -> Chart:
    """Return a chart with the numbers of its JSON file in ``folder``."""
    source, read = CHARTS[name]
    return read(json.loads((folder / source).read_text(encoding="utf-8")))


def main() -> None:
    """Draw all charts."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    (folder / "charts").mkdir(exist_ok=True)
    for name in CHARTS:
        (folder / "charts" / f"{name}.svg").write_text(drawn(chart(folder, name)), encoding="utf-8")


if __name__ == "__main__":
    main()
