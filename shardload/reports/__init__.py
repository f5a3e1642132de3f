"""Reports of loads, of planned loads, and of calls inside `shardload.fast`."""

from shardload.reports.facts import (
    ByteCounts,
    Cast,
    DeviceUse,
    Fit,
    HostBytes,
    LayoutSummary,
    Mismatched,
    Outside,
    Stages,
)
from shardload.reports.report import LoadReport, PlanReport, Report
from shardload.sharding.layout import Fallback

__all__ = [
    "ByteCounts",
    "Cast",
    "DeviceUse",
    "Fallback",
    "Fit",
    "HostBytes",
    "LayoutSummary",
    "LoadReport",
    "Mismatched",
    "Outside",
    "PlanReport",
    "Report",
    "Stages",
]
