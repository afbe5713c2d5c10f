"""The report of a run: a JSON document, and the table of invariants."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.chaos.checker.evidence import Evidence
from tierlane_tools.chaos.checker.results import InvariantResults
from tierlane_tools.chaos.history import Answered, Event, Invoked, RunInfo, Unanswered

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Document = dict[str, Any]


def document(info: RunInfo, events: Sequence[Event], evidence: Evidence, verdicts: InvariantResults) -> Document:
    """The document of one run."""
    outcomes = Counter((row.status, row.code) for row in evidence.rows)
    return {
        "passed": verdicts.hold,
        "seed": info.seed,
        "duration_s": info.duration_s,
        "rate": info.rate,
        "shape": info.shape,
        "interrupted": info.interrupted,
        "drained_s": info.drained_s,
        "took_s": dict(info.took_s),
        "versions": info.versions,
        "notes": list(info.notes),
        "verdicts": [asdict(verdict) for verdict in verdicts.all],
        "schedule": list(info.schedule),
        "faults": [msgspec.structs.asdict(event) for event in info.events],
        "recoveries": [
            {"name": one.event.name, "target": one.event.target, "seconds": one.seconds} for one in info.recoveries
        ],
        **_figures(events),
        "audit": {
            "rows": len(evidence.rows),
            "outcomes": [{"status": status, "code": code, "count": n} for (status, code), n in outcomes.most_common()],
            "modes": dict(Counter(row.mode for row in evidence.rows).most_common()),
            "retried": sum((row.attempts or 0) > 1 for row in evidence.rows),
            "dead_letters": len(evidence.dead_letters),
            "runs": None if evidence.runs is None else len(evidence.runs),
        },
    }


def _figures(events: Sequence[Event]) -> Document:
    tries = {(event.nonce, event.turn): event for event in events if isinstance(event, Invoked)}
    answers = [event for event in events if isinstance(event, Answered)]
    counts = Counter((event.status, event.code) for event in answers)
    silent = Counter(event.kind for event in events if isinstance(event, Unanswered))
    times: dict[str, Histogram] = {}
    for event in answers:
        invoked = tries.get((event.nonce, event.turn))
        if invoked is not None and event.status == 200:
            times.setdefault(invoked.tier, Histogram()).record(event.seconds)
    tiers: Document = {}
    for tier, histogram in sorted(times.items()):
        tiers[tier] = {"completed": histogram.count}
        for name, share in QUANTILES.items():
            tiers[tier][f"{name}_ms"] = round((histogram.quantile(share) or 0.0) * 1000, 1)
    return {
        "requests": len({nonce for nonce, _ in tries}),
        "tries": len(tries),
        "answers": [{"status": status, "code": code, "count": n} for (status, code), n in counts.most_common()],
        "replayed": sum(event.replayed for event in answers),
        "without_answer": dict(silent.most_common()),
        "tiers": tiers,
    }


def show(console: Console, info: RunInfo, verdicts: InvariantResults) -> None:
    """Print the table, then every violation with the timeline of its request. `console` decides on colours."""
    console.print(table(verdicts))
    for verdict in verdicts.all:
        if not verdict.holds:
            console.print(f"\n[red]{escape(verdict.name)}[/]: {verdict.count}, none allowed", highlight=False)
            for example in verdict.examples:
                head = f"  {example.says}  {example.request} {example.row}".rstrip()
                for line in (head, *(f"    {line}" for line in example.timeline)):
                    console.print(line, highlight=False, markup=False)
    if not verdicts.hold:
        for line in info.schedule:
            console.print(line, highlight=False, markup=False)
    for note in info.notes:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False)
    outcome = "[green]passed[/]" if verdicts.hold else "[red]failed[/]"
    console.print(f"{outcome}, seed {info.seed}", highlight=False)


def table(verdicts: InvariantResults) -> Table:
    """The table of invariants."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("invariant", "count", "verdict", "excused", "description"):
        shown.add_column(column, justify="right" if column in ("count", "excused") else "left", overflow="fold")
    for verdict in verdicts.all:
        excused = sum(verdict.explained.values())
        if not verdict.measured:
            outcome = "[dim]not measured[/]"
        elif verdict.limit is None:
            outcome = "[dim]figure[/]"
        else:
            outcome = "[green]holds[/]" if verdict.holds else "[red]BROKEN[/]"
        excuses = ", ".join(f"{count} {excuse}" for excuse, count in verdict.explained.items())
        description = [verdict.says, verdict.shown, f"excused: {excuses}" if excuses else ""]
        shown.add_row(
            verdict.name,
            "-" if not verdict.measured or verdict.limit is None else str(verdict.count),
            outcome,
            str(excused or ""),
            escape("; ".join(filter(None, description))),
        )
    return shown
