"""What `tierlane check model` prints: lines for people with a small plot, a document for programs. Pure: lines out."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from tierlane.check.finding import Finding, passed
from tierlane.check.suggestion import Suggestion, Timed
from tierlane.output import aligned, printable

MARKS = {True: "\u2713", False: "\u2717", None: "-"}
BAR = 40  # Columns of the longest bar.
WIDTH = 110


class Report(NamedTuple):
    """All that was found about one model."""

    spec: str
    version: str
    findings: list[Finding]
    timed: list[Timed]
    suggestion: Suggestion | None

    @property
    def ok(self) -> bool:
        return passed(self.findings)


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
    if report.suggestion is not None:
        lines += ["", *_suggested(report.suggestion)]
    return lines


def plot(timed: Sequence[Timed]) -> list[str]:
    """A table of times with throughput as bars."""
    best = max(one.items_per_s for one in timed)
    lines = [f"{'SIZE':>6}{'P50 MS':>12}{'ITEMS/S':>12}"]
    for one in timed:
        bar = "#" * max(1, round(BAR * one.items_per_s / best))
        lines.append(f"{one.size:>6}{one.ms:>12,.2f}{one.items_per_s:>12,.1f}  {bar}")
    return lines


def lines_of(finding: Finding) -> list[str]:
    """One finding for people, and what to do."""
    lines = [f"  {MARKS[finding.ok]} {finding.name:<12} {printable(finding.said)}"]
    if finding.advice:
        lines += textwrap.wrap(finding.advice, WIDTH, initial_indent=" " * 17, subsequent_indent=" " * 17)
    return lines


def _suggested(suggestion: Suggestion) -> list[str]:
    said = f"A batch of n takes about {suggestion.base_ms:g} ms + n x {suggestion.item_ms:g} ms. Suggested for its row:"
    values = (
        ("max_batch_size", f"{suggestion.max_batch_size}"),
        ("max_wait_ms", f"{suggestion.max_wait_ms}"),
        ("rps_per_gpu", f"{suggestion.rps_per_gpu:g}"),
    )
    return [said, *aligned(values, "  ")]
