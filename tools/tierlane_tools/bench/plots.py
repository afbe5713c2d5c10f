"""Plots of a result and the report directory, drawn from the document alone: an old document can be drawn again.

matplotlib comes with the `plots` extra and is imported when a plot is drawn; without pyplot, which keeps windows. The
page shows the plots without anything from elsewhere.
"""
# ruff: noqa: PLC0415 - see above

from collections.abc import Callable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from tierlane_tools.bench.report import GENERATOR, Document, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SIZE = (8.0, 4.2)
DPI = 110
NINES = (0.5, 0.9, 0.99, 0.999, 0.9999)
COLOURS = {"enterprise": "#1b5e9b", "paid": "#2e8b57", "free": "#d07a1f"}

WIDTH = 120
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>tierlane bench</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 12px; line-height: 1.35 }}
img {{ max-width: 100% }}
</style>
<h1>tierlane bench</h1>
<p>{summary}</p>
<pre>{text}</pre>
{pictures}
<p>All figures are in <a href="result.json">result.json</a>.</p>
</html>
"""


class NoPlots(Exception):
    """Pictures cannot be drawn here; the message is one sentence."""


def require_plots() -> None:
    """Raise NoPlots where matplotlib is missing."""
    try:
        import matplotlib as mpl  # noqa: F401  # asked for, not used
    except ImportError:
        raise NoPlots("matplotlib is not installed; it is in the extra `plots` of tierlane-tools") from None


def draw_all(result: Document, directory: Path) -> list[tuple[str, str]]:
    """Draw what there is; returns (file name, what it shows) in the order of reading."""
    drawn = [
        _draw(directory, "percentiles.png", "Latency by percentile", result, _percentiles),
        _draw(directory, "histogram.png", "Latencies of all 200s", result, _histogram),
        _draw(directory, "timeline.png", "Answers a second over the run", result, _throughput),
        _draw(directory, "timeline-p99.png", "p99 of each second over the run", result, _p99),
        _draw(directory, "cpu.png", "CPU of a request by role", result, _cpu),
        _draw(directory, "batches.png", "Sizes of batches", result, _batches),
    ]
    return [picture for picture in drawn if picture]


def _draw(
    directory: Path, name: str, title: str, result: Document, fill: Callable[["Axes", Document], bool]
) -> tuple[str, str] | None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    if not fill(axes, result):
        return None
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    # Without the version of matplotlib in it, equal results are equal files.
    figure.savefig(directory / name, metadata={"Software": None})
    return name, title


def _percentiles(axes: "Axes", result: Document) -> bool:
    curves = {tier: _curve(figures["histogram_ms"]) for tier, figures in result["tiers"].items()}
    for tier, (shares, times) in curves.items():
        axes.plot([1 / (1 - share) for share in shares], times, label=tier, color=COLOURS.get(tier))
    axes.set_xscale("log")
    axes.set_xticks([1 / (1 - share) for share in NINES], [f"p{share * 100:g}" for share in NINES])
    axes.minorticks_off()
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    return _legend(axes, any(times for _, times in curves.values()))


def _curve(histogram: list[list[float]]) -> tuple[list[float], list[float]]:
    """The share of samples up to each bucket's end, the last one left out, since it is 1."""
    total, seen = sum(count for _, count in histogram), 0.0
    shares, times = [], []
    for upper, count in histogram:
        seen += count
        if seen < total:
            shares.append(seen / total)
            times.append(upper)
    return shares, times


def _histogram(axes: "Axes", result: Document) -> bool:
    found = False
    for tier, figures in result["tiers"].items():
        if steps := figures["histogram_ms"]:
            found = True
            axes.step([upper for upper, _ in steps], [count for _, count in steps], label=tier, color=COLOURS.get(tier))
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("answers")
    return _legend(axes, found)


def _throughput(axes: "Axes", result: Document) -> bool:
    steps = result["timeline"]
    at = [step["at_s"] for step in steps]
    for tier in result["tiers"]:
        rates = [step["tiers"][tier]["completed"] / step["length_s"] for step in steps]
        axes.plot(at, rates, label=tier, color=COLOURS.get(tier))
    failed = [sum(tier["failed"] for tier in step["tiers"].values()) / step["length_s"] for step in steps]
    axes.plot(at, failed, label="not 200", color="#b03030", linestyle="--")
    axes.set_xlabel("s")
    axes.set_ylabel("answers/s")
    axes.set_ylim(bottom=0)
    return _legend(axes, bool(steps))


def _p99(axes: "Axes", result: Document) -> bool:
    steps = result["timeline"]
    for tier in result["tiers"]:
        seen = [(step["at_s"], step["tiers"][tier]["p99_ms"]) for step in steps if step["tiers"][tier]["p99_ms"]]
        axes.plot([at for at, _ in seen], [p99 for _, p99 in seen], label=tier, color=COLOURS.get(tier))
    axes.set_xlabel("s")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    return _legend(axes, bool(steps))


def _cpu(axes: "Axes", result: Document) -> bool:
    costs = {role: (cost or 0.0) * 1000 for role, cost in result["cpu_seconds_per_1000"].items() if role != GENERATOR}
    below = 0.0
    for role, cost in sorted(costs.items(), key=lambda pair: -pair[1]):
        axes.barh("stack", cost, left=below, label=f"{role} {cost:.1f}")
        below += cost
    if echo := result["echo"]:
        axes.barh("bare echo", echo["cpu_us"], color="#888888", label=f"bare echo {echo['cpu_us']:.1f}")
    axes.set_xlabel("microseconds of CPU a request")
    return _legend(axes, bool(costs))


def _batches(axes: "Axes", result: Document) -> bool:
    batches = result["batches"]
    if not batches or not batches["sizes"]:
        return False
    axes.bar([int(size) for size in batches["sizes"]], list(batches["sizes"].values()), color="#1b5e9b")
    axes.set_xlabel(f"members, of {batches['max_batch_size'] or 'unknown'} at most")
    axes.set_ylabel("batches")
    return True


def _legend(axes: "Axes", found: bool) -> bool:  # noqa: FBT001  # handed through
    if found:
        axes.legend(frameon=False)
    return found


def write_report(directory: Path, result: Document) -> None:
    """Write everything to a directory that exists."""
    (directory / "result.json").write_bytes(json_text(result))
    (directory / "index.html").write_text(page(result, draw_all(result, directory)), "utf-8")


def json_text(result: Document) -> bytes:
    """The document, for people as well."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def page(result: Document, pictures: Sequence[tuple[str, str]]) -> str:
    """The page; `pictures` are (file name, what it shows)."""
    text = StringIO()
    show(Console(file=text, width=WIDTH, no_color=True), result)
    settings = result["settings"]
    load = (
        f"{settings['connections']} connections, closed loop"
        if settings["mode"] == "closed"
        else f"{settings['rate']:g} requests/s, {settings['arrivals']}"
    )
    verdict = "passed" if result["passed"] else "failed"
    summary = f"{load}, {result['duration_s']:.0f} s, begun at {result['started_at']}: {verdict}."
    images = "\n".join(f'<img src="{escape(name)}" alt="{escape(title)}">' for name, title in pictures)
    return _PAGE.format(summary=escape(summary), text=escape(text.getvalue()), pictures=images)
