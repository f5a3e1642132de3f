"""Reports with plausible numbers."""

from shardload.reports import ByteCounts, DeviceUse, HostBytes, LayoutSummary, LoadReport, PlanReport, Stages


def facts(**changes):
    return {
        "source": "/models/gemma3.gguf", "format": "gguf", "mesh": "batch=1,model=8",
        "devices": tuple(DeviceUse(i, "cpu", 67_000_000) for i in range(8)), "variables": 236,
        "parameters": 268_098_176, "weight_bytes": 536_196_352, "dtypes": ("bfloat16",),
        "bytes": ByteCounts(needed=238_000_000, read=240_000_000),
        "seconds": Stages(build=0.12, plan=0.07, transfer=0.5, total=0.7),
        "host_bytes": HostBytes(budget=2 << 30, peak_staging=123 << 20), "layout": LayoutSummary(190, 46),
    } | changes  # fmt: skip


def load_report(**changes) -> LoadReport:
    return LoadReport(**facts(**changes))


def plan_report(**changes) -> PlanReport:
    seconds = Stages(build=0.12, plan=0.07, transfer=None, total=0.2)
    return PlanReport(**facts(**({"seconds": seconds} | changes)))
