"""What is shown while the load runs: a bar on a terminal, nothing anywhere else."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tierlane.bench.histogram import Histogram
from tierlane.bench.load import Load
from tierlane.bench.tally import TierTally

REFRESH_S = 0.5


class Progress:
    """Follows a load on `console`; silent where that is no terminal."""

    def __init__(self, console: Console, total_s: float) -> None:
        self._console = console
        self._total_s = total_s

    async def follow(self, load: Load, measured: Sequence[TierTally]) -> None:
        """Show the load until cancelled."""
        if not self._console.is_terminal:
            return
        # Drawn by us, because rich's own thread would take the processor when it likes.
        with _bar(self._console) as bar, suppress(asyncio.CancelledError):
            task = bar.add_task("", total=self._total_s)
            at_s, answers = 0.0, 0
            while True:
                now_s, now_answers = load.elapsed_s(), load.answers
                rate = (now_answers - answers) / max(now_s - at_s, REFRESH_S)
                at_s, answers = now_s, now_answers
                bar.update(task, completed=min(now_s, self._total_s), description=_figures(rate, measured))
                bar.refresh()
                await asyncio.sleep(REFRESH_S)

    def say(self, sentence: str) -> None:
        """Show one line."""
        if self._console.is_terminal:
            self._console.print(sentence, highlight=False)


def _bar(console: Console) -> RichProgress:
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return RichProgress(*columns, console=console, auto_refresh=False, transient=True)


def _figures(rate: float, measured: Sequence[TierTally]) -> str:
    ok = sum(tally.ok for tally in measured)
    errors = sum(tally.failures + tally.missing for tally in measured)
    if not ok + errors:
        return f"{rate:.0f}/s, warm-up"
    p95 = Histogram.merged(tally.latency for tally in measured).quantile(0.95)
    return f"{rate:.0f}/s, {ok} ok, {errors} errors, p95 {(p95 or 0) * 1000:.0f} ms"
