"""docs/peers.md, from the raw data of `make peers` and a template, so that the page cannot differ from the data."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cases.continuous_setup import medians
from cases.outcome import over

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tools" / "bench" / "peers" / "results" / "gateways.json"
TEMPLATE = ROOT / "tools" / "bench" / "peers" / "page.md"
PAGE = ROOT / "docs" / "peers.md"
DIRECT, OURS, OVERHEAD = "direct", "tierlane", "overhead"
MORE, MORE_MS = 1.1, 5.0
"""Tierlane is worse where its time is more than so many times another gateway's, and by more than so many milliseconds."""
LESS = 0.97
"""And where its tokens/s or goodput are less than this part of another's."""
MOST_BUSY = 0.7
"""Generator and engine alone use less of two processors."""
NOT_RUN = "not run"
KEPT = " (still sent 15 s after all clients had left; started again)"
COMPARABLE = 0.9
"""A gateway whose goodput is less than this part of Tierlane's has no better times: it refuses or delays the others."""


def render(document: Mapping[str, Any]) -> str:
    """The page."""
    tables = {scenario["name"]: summary(document, scenario["name"]) for scenario in document["scenarios"]}
    sections = [
        f"### {scenario['title']}\n\n{table(document, scenario['name'], tables[scenario['name']])}"
        for scenario in document["scenarios"]
    ]
    lines = [line for scenario in document["scenarios"] for line in worse(document, scenario, tables[scenario["name"]])]
    parts = {
        "measured": _measured(document),
        "gateways": _gateways(document),
        "scenarios": "\n\n".join(sections),
        "worse": "\n".join(lines) or "Nowhere, within the limits.",
    }
    text = TEMPLATE.read_text("utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def _measured(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    rounds = document["rounds"]
    turns = "in one round" if rounds == 1 else f"medians of {rounds} rounds"
    busy = [run["machine_busy"] for run in document["runs"] if run["gateway"] == DIRECT and run.get("machine_busy")]
    disturbed = (
        f" **Other work used the machine**: without a gateway its processors were {median(busy):.0%} busy, so gateways that need "
        "much CPU are slower here than alone, and only figures of one table are to be compared."
        if busy and median(busy) > MOST_BUSY
        else ""
    )
    return (
        f"Measured on {document['date']}: {machine['processor']}, {machine['memory']}, {machine['system']}, Python "
        f"{machine['Python']}; {document['seconds']:.0f} s for each run, {turns}.{disturbed}"
    )


def _gateways(document: Mapping[str, Any]) -> str:
    rows = [("Gateway", "Set up", "Cannot"), ("---",) * 3]
    for each in document["gateways"]:
        setup = f"{each['setup']}. **Not measured**: {each['failed']}" if each["failed"] else each["setup"]
        rows.append((each["title"], setup, each["cannot"]))
    return _markdown(rows)


def summary(document: Mapping[str, Any], scenario: str) -> dict[str, dict[str, Any]]:
    """The figures of each gateway in a scenario: medians over the rounds, counts added up. One without figures has `failed`."""
    found: dict[str, dict[str, Any]] = {}
    for gateway in document["gateways"]:
        name = gateway["name"]
        runs = [run for run in document["runs"] if run["scenario"] == scenario and run["gateway"] == name]
        good = [run for run in runs if "failed" not in run]
        if not good:
            found[name] = {"failed": gateway["failed"] or next((run["failed"] for run in runs), NOT_RUN)}
            continue
        loads = {load: medians([run["loads"][load] for run in good]) for load in good[0]["loads"]}
        refused, errors = (
            sum((Counter(load[kind]) for load in loads.values()), Counter()) for kind in ("refused", "errors")
        )
        answers = sum(load["answers"] for run in good for load in run["loads"].values())
        found[name] = {
            **{kind: median(run[kind] for run in good) for kind in ("tokens_per_s", "goodput_per_s", "cpu_ms")},
            "refused": sum(refused.values()) / max(1, answers + sum(refused.values()) + sum(errors.values())),
            "errors": dict(errors),
            "unanswered": sum(run["unanswered"] for run in good),
            "kept": sum(run["idle_after_s"] is None for run in good),
            "loads": loads,
        }
    return found


def table(document: Mapping[str, Any], scenario: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """One scenario in Markdown: tokens/s and goodput as parts of the tokens/s without a gateway."""
    loads = next((list(each["loads"]) for each in found.values() if "loads" in each), [])
    if not loads and all(each["failed"] == NOT_RUN for each in found.values()):
        return "Not run in this measurement."
    headers = ["Gateway", "tokens/s", "goodput", "refused", "errors", "unanswered"]
    headers += [f"{load}: first token p50, p99" for load in loads] + ["CPU"] * (scenario == OVERHEAD)
    rows: list[Sequence[str]] = [headers, ["---", *["---:"] * (len(headers) - 1)]]
    base = found.get(DIRECT, {}).get("tokens_per_s")
    for gateway in document["gateways"]:
        each = found[gateway["name"]]
        if "failed" in each:
            rows.append([gateway["title"], each["failed"], *[""] * (len(headers) - 2)])
            continue
        rows.append(
            [
                gateway["title"],
                _part(each["tokens_per_s"], base),
                _part(each["goodput_per_s"], base),
                f"{each['refused']:.1%}",
                ", ".join(f"{count} x {code}" for code, count in sorted(each["errors"].items())) or "0",
                f"{each['unanswered']}{KEPT if each['kept'] else ''}",
                *(_first(each["loads"][load]) for load in loads),
                *([f"{each['cpu_ms']:.2f} ms"] if scenario == OVERHEAD else []),
            ]
        )
    return _markdown(rows)


def _part(value: float, base: float | None) -> str:
    part = over(value, base)
    return f"{value:,.0f}" if part is None else f"{part:.2f}"


def _first(load: Mapping[str, Any]) -> str:
    values = [load[f"first_p{percent}_ms"] for percent in (50, 99)]
    return ", ".join("-" if value is None else f"{value:,.0f}" for value in values) + " ms"


def worse(
    document: Mapping[str, Any], scenario: Mapping[str, str], found: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """A line for each figure of a scenario in which another gateway is better than Tierlane."""
    ours = found.get(OURS, {"failed": ""})
    if "failed" in ours:
        return
    titles = {each["name"]: each["title"] for each in document["gateways"]}
    others = {
        titles[name]: each
        for name, each in found.items()
        if name not in (DIRECT, OURS)
        and "failed" not in each
        and each["goodput_per_s"] >= COMPARABLE * ours["goodput_per_s"]
    }
    figures: list[tuple[str, str, float | None, Mapping[str, float | None]]] = []
    for load, own in ours["loads"].items():
        for percent in (50, 99):
            kind = f"first_p{percent}_ms"
            label = f"{load}, first token p{percent}"
            figures.append((label, "ms", own[kind], {name: each["loads"][load][kind] for name, each in others.items()}))
    if scenario["name"] == OVERHEAD:
        figures.append(
            ("CPU of a request", "ms", ours["cpu_ms"], {name: each["cpu_ms"] for name, each in others.items()})
        )
    for label, unit, value, several in figures:
        known = {name: other for name, other in several.items() if other is not None}
        if value is None or not known:
            continue
        best = min(known, key=lambda name: known[name])
        if value > MORE * known[best] and (value > known[best] + MORE_MS or scenario["name"] == OVERHEAD):
            yield f"* {scenario['title']}; {label}: {value:,.1f} {unit}, {best} {known[best]:,.1f} {unit}"
    for label, kind in (("tokens/s", "tokens_per_s"), ("goodput", "goodput_per_s")):
        best = max(others, key=lambda name: others[name][kind], default="")
        if best and ours[kind] < LESS * others[best][kind]:
            yield f"* {scenario['title']}; {label}: {ours[kind]:,.0f}, {best} {others[best][kind]:,.0f}"
    least = min(others, key=lambda name: others[name]["refused"], default="")
    if least and ours["refused"] > others[least]["refused"] + 1 - LESS:
        yield f"* {scenario['title']}; refused: {ours['refused']:.1%}, {least} {others[least]['refused']:.1%}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
