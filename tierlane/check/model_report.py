"""The report of `tierlane check model`: findings, suggestion, lines for people, a document for programs. Pure.

The suggestion is columns of the model's row, from measured batch times; the lines have a small plot.
"""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpu_pool.worker.service_time import ServiceTime
from tierlane.output import aligned, printable

ENOUGH = 0.9
"""The smallest batch with this part of the best throughput is full: what is larger makes everybody wait for little."""

LONGEST_RUN_MS = 1000.0
"""A batch that runs for longer leaves no time for another try before a request's 4 s are over."""

LONGEST_RATIO = 1.5
"""A model that takes longer than that for one input runs with larger time limits; its batches may take half as long again."""

LONGEST_WAIT_MS = 40.0  # The default of max_wait_ms.

MARKS = {True: "\u2713", False: "\u2717", None: "-"}
BAR = 40  # Columns of the longest bar.
WIDTH = 110


class Timed(NamedTuple):
    """Batches of `size` take `ms` milliseconds at the median."""

    size: int
    ms: float

    @property
    def items_per_s(self) -> float:
        return 1000 * self.size / max(self.ms, 0.001)


class Suggestion(NamedTuple):
    """Values of the columns of `models` by these names. A batch of n takes about `base_ms` + n x `item_ms`."""

    max_batch_size: int
    max_wait_ms: int
    rps_per_gpu: float
    base_ms: float
    item_ms: float


def suggest(timed: Sequence[Timed]) -> Suggestion | None:
    """What these times ask for; None where nothing was measured.

    The wait is at most the base: it is what a second request saves by coming along, so waiting longer never pays.
    """
    if not timed:
        return None
    longest_ms = max(LONGEST_RUN_MS, LONGEST_RATIO * min(timed).ms)
    short = [one for one in timed if one.ms <= longest_ms]
    best = max(one.items_per_s for one in short)
    full = min(one for one in short if one.items_per_s >= ENOUGH * best)
    service = ServiceTime()
    for size, ms in timed:
        service.record(size, ms)
    item_ms, base_ms = service.fit()
    wait_ms = round(min(base_ms, LONGEST_WAIT_MS))
    rate = float(f"{full.items_per_s:.3g}")  # More digits would claim what a few batches do not show.
    return Suggestion(full.size, wait_ms, rate, round(base_ms, 3), round(item_ms, 4))


class ModelFinding(NamedTuple):
    """`ok` is None if unknown; `advice` is what to do, "" for nothing."""

    name: str
    ok: bool | None
    said: str
    advice: str = ""


def holds(name: str, said: str) -> ModelFinding:
    """It is as it must be."""
    return ModelFinding(name, ok=True, said=said)


def fails(name: str, said: str, advice: str) -> ModelFinding:
    """It is not."""
    return ModelFinding(name, ok=False, said=said, advice=advice)


def undetermined(name: str, said: str) -> ModelFinding:
    """It could not be seen."""
    return ModelFinding(name, ok=None, said=said)


class Report(NamedTuple):
    """All that was found about one model."""

    spec: str
    version: str
    findings: list[ModelFinding]
    timed: list[Timed]
    suggestion: Suggestion | None

    @property
    def ok(self) -> bool:
        return all(finding.ok is not False for finding in self.findings)


def document(report: Report, written: str | None) -> dict[str, Any]:
    """For programs; `written` is the model whose row was set."""
    return {
        "spec": report.spec,
        "version": report.version,
        "ok": report.ok,
        "checks": [finding._asdict() for finding in report.findings],
        "sizes": [
            {"size": one.size, "p50_ms": round(one.ms, 3), "items_per_s": round(one.items_per_s, 1)}
            for one in report.timed
        ],
        "suggestion": report.suggestion._asdict() if report.suggestion else None,
        "written": written,
    }


def summary(report: Report) -> list[str]:
    """For people, after the findings: times and what they suggest."""
    lines = ["", *plot(report.timed)] if report.timed else []
    if (found := report.suggestion) is not None:
        row = {
            "max_batch_size": found.max_batch_size,
            "max_wait_ms": found.max_wait_ms,
            "rps_per_gpu": found.rps_per_gpu,
        }
        time = f"A batch of n takes about {found.base_ms:g} ms + n x {found.item_ms:g} ms."
        lines += ["", f"{time} Suggested for its row:", *aligned(((k, f"{v:g}") for k, v in row.items()), "  ")]
    return lines


def plot(timed: Sequence[Timed]) -> list[str]:
    """A table of times with throughput as bars."""
    best = max(one.items_per_s for one in timed)
    lines = [f"{'SIZE':>6}{'P50 MS':>12}{'ITEMS/S':>12}"]
    for one in timed:
        bar = "#" * max(1, round(BAR * one.items_per_s / best))
        lines.append(f"{one.size:>6}{one.ms:>12,.2f}{one.items_per_s:>12,.1f}  {bar}")
    return lines


def lines_of(finding: ModelFinding) -> list[str]:
    """One finding for people, and what to do."""
    lines = [f"  {MARKS[finding.ok]} {finding.name:<12} {printable(finding.said)}"]
    if finding.advice:
        lines += textwrap.wrap(finding.advice, WIDTH, initial_indent=" " * 17, subsequent_indent=" " * 17)
    return lines
