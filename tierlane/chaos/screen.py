"""What is shown while it runs: a line for each fault, and a bar on a terminal. The table at the end is the report's."""

import asyncio
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tierlane.chaos.load import Load
from tierlane.chaos.plan import FaultEvent

REFRESH_S = 0.5
OK = "200"


class Screen:
    """Lines on `console`; silent when `quiet`. The bar is drawn on a terminal only, and lines go above it."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet

    def say(self, sentence: str) -> None:
        """Show one line."""
        if not self._quiet:
            self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def fault(self, at_s: float, event: FaultEvent) -> None:
        """Show that a fault began, ended or could not be done; `at_s`: seconds since the load began."""
        tail = f"  (not done: {event.error})" if event.error else f"  {event.details}" if event.details else ""
        self.say(f"{at_s:6.1f} s  {event.what:<5}  {event.name:<18} {event.target}{tail}")

    async def follow(self, load: Load, duration_s: float) -> None:
        """Show the load's progress until cancelled."""
        if self._quiet or not self._console.is_terminal:
            return
        # Drawn by us, because rich's own thread would take the processor when it likes.
        with _bar(self._console) as bar, suppress(asyncio.CancelledError):
            task = bar.add_task("", total=duration_s)
            for step in range(int(duration_s / REFRESH_S) + 1):
                bar.update(task, completed=step * REFRESH_S, description=_figures(load))
                bar.refresh()
                await asyncio.sleep(REFRESH_S)


def _bar(console: Console) -> RichProgress:
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return RichProgress(*columns, console=console, auto_refresh=False, transient=True)


def _figures(load: Load) -> str:
    succeeded = load.counts[OK]
    return f"{load.sent} sent, {succeeded} succeeded, {sum(load.counts.values()) - succeeded} not"
