"""The lines that a run shows."""

from rich.console import Console

from tierlane_tools.chaos.history import FaultEvent


class RunDisplay:
    """Lines on `console`, none when `quiet`."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet

    def show(self, line: str) -> None:
        """Show a line."""
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def fault(self, at_s: float, event: FaultEvent) -> None:
        """Show an event of a fault; `at_s`: seconds since the load began."""
        tail = f"  (not injected: {event.error})" if event.error else f"  {event.details}" if event.details else ""
        self.show(f"{at_s:6.1f} s  {event.what:<5}  {event.name:<18} {event.target}{tail}")
