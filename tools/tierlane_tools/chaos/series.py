"""Several seeds, one run after the other: a row for each, and the whole table of runs with violations.

The JSON file is written after each run, so an interrupted series keeps its results.
"""

import gc
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierlane_local.embedded import EmbeddedServerError
from tierlane_local.up.data_dir import StackError
from tierlane_tools.chaos.options import Options
from tierlane_tools.chaos.report import Document
from tierlane_tools.chaos.run import MIN_WIDTH, PASSED, VIOLATED, RunResult, run_and_check, writable, write

COLUMNS = ("seed", "sent", "accepted", "completed", "faults", "excused", "recovery", "drained", "wall", "verdict")


@dataclass(frozen=True)
class Summary:
    """One run in one row. `breaches`: violations by invariant; `excused`: by excuse; times in seconds, None unknown.

    `error`: why the run did not start or finish.
    """

    seed: int
    passed: bool
    sent: int = 0
    accepted: int = 0
    completed: int = 0
    faults: int = 0
    breaches: Mapping[str, int] = field(default_factory=dict)
    excused: Mapping[str, int] = field(default_factory=dict)
    verdicts: Mapping[str, str] = field(default_factory=dict)
    recovery_worst_s: float | None = None
    not_recovered: int = 0
    drained_s: float | None = None
    wall_s: float | None = None
    error: str = ""

    def __str__(self) -> str:
        """The line that is shown after the run."""
        if self.error:
            return f"seed {self.seed}: {self.error}"
        violated = ", ".join(f"{name} {count}" for name, count in self.breaches.items())
        outcome = "passed" if self.passed else f"failed ({violated})"
        return f"seed {self.seed}: {outcome}, {self.sent} sent, {self.accepted} accepted, {self.wall_s or 0.0:.0f} s"


def run_series(options: Options) -> int:
    """Run every seed of `options.seeds`; return the worst exit code. Raises ChaosUsageError.

    Ctrl-C ends the current run and the series, which is reported, but has not passed.
    """
    if options.json:
        writable(options.json)
    console = Console(width=max(MIN_WIDTH, Console().width))
    rows: list[Summary] = []
    documents: list[Document] = []
    for seed in options.seeds:
        keep = options.keep / f"seed-{seed}" if options.keep else None
        row, result = _run_one(replace(options, seed=seed, seeds=(), json=None, keep=keep, quiet=True))
        rows.append(row)
        if result is not None and not result.verdicts.hold:
            result.show()
        if not options.quiet:
            console.print(str(row), highlight=False, markup=False, soft_wrap=True)
        if result is not None:
            documents.append(result.document)
        if options.json:
            write(options.json, series_document(options.seeds, rows, documents))
        if result is not None and result.info.interrupted:
            break
        del result
        gc.collect()  # Now, because during the next run it would be a stall of this tool.
    console.print(summary_table(rows))
    return PASSED if _passed(options.seeds, rows) else VIOLATED


def _run_one(options: Options) -> tuple[Summary, RunResult | None]:
    began = time.monotonic()
    try:
        result = run_and_check(options)
    except (StackError, EmbeddedServerError) as error:
        return Summary(options.seed, passed=False, error=f"cannot start: {error}"), None
    wall_s = round(time.monotonic() - began, 1)
    return summary_of(result.document, wall_s), result


def summary_of(document: Document, wall_s: float | None = None) -> Summary:
    """The row of a run, from its document."""
    verdicts = document["verdicts"]
    excused: Counter[str] = Counter()
    for verdict in verdicts:
        excused.update(verdict["explained"])
    healed = [one["seconds"] for one in document["recoveries"]]
    return Summary(
        seed=document["seed"],
        passed=document["passed"] and not document["interrupted"],
        sent=document["requests"],
        accepted=document["audit"]["rows"],
        completed=sum(one["count"] for one in document["audit"]["outcomes"] if one["status"] == "completed"),
        faults=sum(one["what"] == "start" and not one["error"] for one in document["faults"]),
        breaches={one["name"]: one["count"] for one in verdicts if not one["holds"]},
        excused=dict(sorted(excused.items())),
        verdicts={one["name"]: _word(one) for one in verdicts},
        recovery_worst_s=max((seconds for seconds in healed if seconds is not None), default=None),
        not_recovered=healed.count(None),
        drained_s=document["drained_s"],
        wall_s=wall_s,
        error="interrupted" if document["interrupted"] else "",
    )


def _word(verdict: Mapping[str, object]) -> str:
    if not verdict["measured"]:
        return "not measured"
    if verdict["limit"] is None:
        return "figure"
    return "holds" if verdict["holds"] else f"BROKEN {verdict['count']}"


def series_document(seeds: Sequence[int], rows: Sequence[Summary], documents: Sequence[Document] = ()) -> Document:
    """The document of a series so far: its rows, then each run in full. It has passed only when all `seeds` have."""
    return {
        "passed": _passed(seeds, rows),
        "seeds": list(seeds),
        "rows": [asdict(row) for row in rows],
        "runs": list(documents),
    }


def _passed(seeds: Sequence[int], rows: Sequence[Summary]) -> bool:
    return [row.seed for row in rows if row.passed] == list(seeds)


def summary_table(rows: Sequence[Summary]) -> Table:
    """The table of a series."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        left = column in ("excused", "verdict")
        shown.add_column(column, justify="left" if left else "right", overflow="fold")
    for row in rows:
        *cells, verdict = _cells(row)
        shown.add_row(*map(escape, cells), f"[{'green' if row.passed else 'red'}]{escape(verdict)}[/]")
    return shown


def markdown(rows: Sequence[Summary]) -> str:
    """The table of a series in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)]) + "\n"


def _cells(row: Summary) -> list[str]:
    counts = [row.seed, row.sent, row.accepted, row.completed, row.faults]
    violated = ", ".join(f"{count} {name}" for name, count in row.breaches.items())
    return [
        *map(str, counts),
        ", ".join(f"{count} {excuse}" for excuse, count in row.excused.items()),
        _seconds(row.recovery_worst_s) + (f" ({row.not_recovered} never)" if row.not_recovered else ""),
        _seconds(row.drained_s),
        _seconds(row.wall_s),
        "passed" if row.passed else f"FAILED: {violated or row.error}",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
