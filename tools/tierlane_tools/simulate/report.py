"""Shows the result of a simulation: tables, a JSON file, and plots (SVG) that are equal for equal results.

matplotlib comes with the `plots` extra and is imported when a plot is drawn, without pyplot, which keeps windows.
"""
# ruff: noqa: PLC0415 - see above

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tierlane.output import Column, aligned, print_rows
from tierlane_tools.simulate.results import Document
from tierlane_tools.simulate.scenario import ScenarioError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (8.0, 4.2)
COLOURS = {"enterprise": "#1b5e9b", "paid": "#2e8b57", "free": "#d07a1f"}

MOST_CLASSES = 20
"""Classes of a tier in the table, those with the most requests; recorded requests have one for each customer."""
MOST_CELLS = 12
"""Cells in the table; of more, those with the highest and the lowest load."""

_COLUMNS = (
    Column("tier", "TIER", whole=True),
    Column("class", "CUSTOMERS", whole=True),
    Column("arrivals", "ARRIVED"),
    Column("completed", "COMPLETED"),
    Column("refused", "REFUSED"),
    Column("refused_share", "%"),
    Column("failed", "FAILED"),
    Column("p50_ms", "P50 MS"),
    Column("p95_ms", "P95 MS"),
    Column("p99_ms", "P99 MS"),
    Column("gpu_share", "GPU %"),
    Column("fairness", "FAIRNESS"),
)
_FIRST_TOKEN = Column("first_token_p95_ms", "FIRST P95")
"""Only of engines with slots."""
_CELL_COLUMNS = (
    Column("cell", "CELL", whole=True),
    Column("arrivals", "ARRIVED"),
    Column("workers", "WORKERS"),
    Column("busy", "BUSY %"),
    Column("p50_ms", "P50 MS"),
    Column("p99_ms", "P99 MS"),
)


def show(result: Document) -> None:
    """Print the tables."""
    rows = []
    for name, tier in result["tiers"].items():
        classes = [each for each in result["classes"] if each["tier"] == name]
        rows.append(_row(tier, "all" if len(classes) > 1 else classes[0]["class"], tier["fairness"]))
        if len(classes) > 1:
            shown = (
                sorted(classes, key=lambda each: -each["arrivals"])[:MOST_CLASSES]
                if len(classes) > MOST_CLASSES
                else classes
            )
            rows += [_row(each, each["class"], None) for each in shown]
    first = (_FIRST_TOKEN,) if any(row["first_token_p95_ms"] is not None for row in rows) else ()
    print_rows("table", (*_COLUMNS, *first), rows, "requests")
    typer.echo()
    for line in aligned(_facts(result)):
        typer.echo(line)
    if len(result["cells"]) > 1:
        cells = [{"cell": name, **each, "busy": round(100 * each["busy"], 1)} for name, each in result["cells"].items()]
        if len(cells) > MOST_CELLS:
            cells.sort(key=lambda row: -row["arrivals"])
            cells = cells[: MOST_CELLS // 2] + cells[-MOST_CELLS // 2 :]
        typer.echo()
        print_rows("table", _CELL_COLUMNS, cells, "cells")


def _row(figures: Mapping[str, Any], name: str, fairness: float | None) -> dict[str, Any]:
    arrivals = figures["arrivals"]
    return {
        "first_token_p95_ms": None,
        **figures,
        "class": name,
        "refused_share": round(100 * figures["refused"] / arrivals, 1) if arrivals else None,
        "gpu_share": round(100 * figures["gpu_share"], 1),
        "fairness": fairness,
    }


def _facts(result: Document) -> list[tuple[str, str]]:
    gpus = result["gpus"]
    facts = [
        ("seed", f"{result['seed']}"),
        ("measured", f"{result['requests']:,} requests in {result['measured_s']:g} s"),
        ("GPUs busy", f"{100 * gpus['busy']:.1f} %, {gpus['mean_batch']:g} requests per batch"),
    ]
    if gpus["moves"]:
        facts.append(("moves of workers", f"{gpus['moves']:,}"))
    for field, title in (("refused_by_code", "refused"), ("failed_by_code", "failed")):
        for name, tier in result["tiers"].items():
            if tier[field]:
                facts.append(
                    (f"{title}, {name}", ", ".join(f"{code} {count:,}" for code, count in tier[field].items()))
                )
    for name, tier in result.get("recorded", {}).items():
        others = "".join(f", {count:,} {code}" for code, count in tier["others"].items())
        times = ", ".join(f"{p} {tier[p + '_ms'] or 0:g} ms" for p in ("p50", "p95", "p99"))
        facts.append((f"recorded, {name}", f"{tier['completed']:,} completed{others}; {times}"))
    return [*facts, *result.get("notes", {}).items()]


def write_json(path: Path, result: Document) -> None:
    """Everything that was measured."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def require_plots() -> None:
    """Raise ScenarioError where matplotlib is missing."""
    try:
        import matplotlib as mpl  # noqa: F401  # asked for, not used
    except ImportError as error:
        reason = "matplotlib is not installed; it is in the extra `plots` of tierlane-tools"
        raise ScenarioError(f"--plots: {reason}.") from error


def draw(directory: Path, result: Document) -> list[str]:
    """Draw the plots; returns their names."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    plots: list[tuple[str, str, Callable[[Axes, Document], None]]] = [
        ("rates.svg", "Requests/s by tier: arrived (dashed), completed", _rates),
        ("refused.svg", "Refused requests/s by tier", _refused),
        ("p99.svg", "p99 of the response time by tier", _p99),
        ("busy.svg", "GPUs that are busy", _busy),
    ]
    if len(result["cells"]) > 1:
        plots.append(("workers.svg", "Workers of each cell", _workers))
    for name, title, fill in plots:
        # Equal results are equal files: no random ids, no date.
        with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.add_subplot()
            fill(axes, result)
            axes.set_title(title, loc="left")
            axes.set_xlabel("s")
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(directory / name, format="svg", metadata={"Date": None, "Creator": None})
    return [name for name, _, _ in plots]


def _times(result: Document, values: Sequence[object]) -> list[float]:
    return [(number + 1) * result["timeline"]["step_s"] for number in range(len(values))]


def _rates(axes: "Axes", result: Document) -> None:
    for tier, steps in result["timeline"]["tiers"].items():
        at = _times(result, steps["arrived_rps"])
        axes.plot(at, steps["arrived_rps"], color=COLOURS.get(tier), linestyle="--", linewidth=0.8)
        axes.plot(at, steps["completed_rps"], color=COLOURS.get(tier), label=tier)
    axes.set_ylabel("requests/s")
    axes.legend(frameon=False)


def _refused(axes: "Axes", result: Document) -> None:
    for tier, steps in result["timeline"]["tiers"].items():
        axes.plot(_times(result, steps["refused_rps"]), steps["refused_rps"], color=COLOURS.get(tier), label=tier)
    axes.set_ylabel("requests/s")
    axes.legend(frameon=False)


def _p99(axes: "Axes", result: Document) -> None:
    for tier, steps in result["timeline"]["tiers"].items():
        at = _times(result, steps["p99_ms"])
        known = [(time, p99) for time, p99 in zip(at, steps["p99_ms"], strict=True) if p99 is not None]
        axes.plot([time for time, _ in known], [p99 for _, p99 in known], color=COLOURS.get(tier), label=tier)
    axes.set_ylabel("ms")
    axes.legend(frameon=False)


def _busy(axes: "Axes", result: Document) -> None:
    busy = result["timeline"]["busy"]
    axes.plot(_times(result, busy), [100 * part for part in busy], color="#1b5e9b")
    axes.set_ylabel("%")
    axes.set_ylim(top=105)


def _workers(axes: "Axes", result: Document) -> None:
    for cell, steps in result["timeline"]["cells"].items():
        axes.plot(_times(result, steps["workers"]), steps["workers"], label=cell, linewidth=0.9)
    axes.set_ylabel("workers")
    if len(result["cells"]) <= MOST_CELLS:
        axes.legend(frameon=False, ncols=2)
