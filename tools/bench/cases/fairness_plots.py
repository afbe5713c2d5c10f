"""The plots of fairness, from the stored figures: GPU time of saturated customers over time, and latency of a quiet one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases.saturated import APART_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (8.0, 3.6)


def draw_parts(path: Path, data: Mapping[str, Any]) -> None:
    """Draw the part of each customer while they start one after the other."""
    figure, axes = _new()
    _draw_parts(axes, data["equal"]["gpu_ms_by_second"])
    axes.set_xlabel(f"seconds; another customer starts every {APART_S:g} s")
    _save(figure, path)


def draw_kills(path: Path, data: Mapping[str, Any]) -> None:
    """Draw the part of each customer, and the time of each kill."""
    figure, axes = _new()
    _draw_parts(axes, data["kills"]["gpu_ms_by_second"])
    for kill in data["kills"]["kills"]:
        axes.axvline(kill["at_s"], color="#222222", linestyle=":")
        axes.text(kill["at_s"], 1.01, kill["role"], fontsize=8)
    axes.set_xlabel("seconds; lines: SIGKILL of a process")
    _save(figure, path)


def draw_quiet(path: Path, data: Mapping[str, Any]) -> None:
    """Draw the latency of each request of a quiet customer before and beside a flood."""
    found = data["quiet"]
    pairs = [point.split(":") for point in found["latencies"].split()]
    figure, axes = _new()
    axes.plot(
        [float(at) for at, _ in pairs], [float(ms) for _, ms in pairs], ".", label="requests of the quiet customer"
    )
    axes.axvline(found["flood_at_s"], color="#222222", linestyle=":", label="the flood starts")
    axes.axhline(found["law_p99_ms"], color="#b03030", linestyle="--", label="p99 by the law")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms")
    axes.set_xlabel("seconds")
    axes.legend(frameon=False)
    _save(figure, path)


def parts_by_second(series: Sequence[str]) -> list[list[float]]:
    """The part (0..1) of each customer in the GPU time of each second; 0 in a second without any."""
    customers = [[float(each) for each in text.split()] for text in series]
    totals = [sum(second) or 1.0 for second in zip(*customers, strict=True)]
    return [[each / total for each, total in zip(customer, totals, strict=True)] for customer in customers]


def _draw_parts(axes: "Axes", series: Sequence[str]) -> None:
    customers = parts_by_second(series)
    axes.stackplot(range(len(customers[0])), customers, step="post", linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_ylabel("part of the GPU time")


def _new() -> tuple[Any, "Axes"]:
    from matplotlib.figure import Figure  # noqa: PLC0415  # only where a plot is drawn

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    """Write an SVG file; equal figures are equal files."""
    from matplotlib import rc_context  # noqa: PLC0415  # only where a plot is drawn

    with rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
