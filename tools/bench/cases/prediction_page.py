"""The tables of docs/simulate.md that compare predictions with runs, from the raw data of `make predictions`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tools" / "bench" / "predictions" / "results.json"
PAGE = ROOT / "docs" / "simulate.md"
BEGIN, END = "<!-- Written by `make predictions`. -->", "<!-- End of the written part. -->"
TOLERANCE = 0.1
LEAST_PART = 0.01
"""A smaller difference of refused or failed requests is none."""
SHOWN = (
    ("refused", "refused"),
    ("failed", "failed"),
    ("goodput/s", "goodput_per_s"),
    ("first token p50", "first_p50_ms"),
    ("first token p99", "first_p99_ms"),
    ("response p50", "p50_ms"),
    ("response p99", "p99_ms"),
)


def updated(page: str, document: Mapping[str, Any]) -> str:
    """The page with the tables of a comparison."""
    before, _, others = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{section(document)}\n\n{END}{others.partition(END)[2]}"


def misses(kind: str, predicted: float | None, ran: float | None) -> bool:
    """Whether a prediction is more than TOLERANCE off."""
    if predicted is None or ran is None:
        return predicted is not ran
    difference = abs(predicted - ran)
    if kind in ("refused", "failed") and difference <= LEAST_PART:
        return False
    return difference > TOLERANCE * abs(ran)


def section(document: Mapping[str, Any]) -> str:
    """The tables of a comparison in Markdown; predictions that miss are bold."""
    machine, costs = document["machine"], document["cost_ms"]
    tables, judged = list[str](), list[bool]()
    for scenario in document["scenarios"]:
        rows = [["Predicted; run", *(title for title, _ in SHOWN)], ["---", *("---:" for _ in SHOWN)]]
        for name, predicted in scenario["predicted"].items():
            ran, cells = scenario["run"][name], list[str]()
            for _, kind in SHOWN:
                judged.append(misses(kind, predicted[kind], ran[kind]))
                text = f"{_text(kind, predicted[kind])}; {_text(kind, ran[kind])}"
                cells.append(f"**{text}**" if judged[-1] else text)
            rows.append([f"{name}, {ran['requests']:,} requests", *cells])
        tables.append(f"{scenario['title']}; processors {scenario['machine_busy'] or 0:.0%} busy:")
        tables.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    intro = (
        f"Measured on {document['date']}: {machine['processor']}, {machine['memory']}, Python {machine['Python']}; "
        f"{document['seconds']:.0f} s for each scenario. Beyond queue and engine a first token took {costs:.1f} ms at 0.3 of the "
        f"capacity, measured before the predictions. {judged.count(False)} of {len(judged)} figures are predicted within 10 % "
        "(refused and failed: or within one per cent of the requests); the others are bold."
    )
    return "\n\n".join([intro, *tables])


def _text(kind: str, value: float | None) -> str:
    if value is None:
        return "-"
    if kind in ("refused", "failed"):
        return f"{value:.1%}"
    if kind == "goodput_per_s":
        return f"{value:.2f}"
    return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"
