"""Whether PostgreSQL accepts new connections: a server whose postmaster hangs still serves the sessions that exist."""

from ledger.postgres import AWAY, closing, connect, place_of, reason
from scheduler.fault_log import LoggedFaults
from scheduler.tasks import Loop, next_tick

PROBE_EVERY_S = 3.0
PROBE_TIMEOUT_S = 2.0


class ConnectionProbe:
    """Opens a connection to `database_url` every three seconds, and closes it. "": there is no PostgreSQL to probe."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self.problem: str | None = None
        """Why the last connection could not be opened, as a sentence; None if it could."""

    def loops(self) -> dict[str, Loop]:
        """The loops to run, by name."""
        return {"connection probe": self.run} if self._url else {}

    async def run(self) -> None:
        """Probe; never returns."""
        while True:
            await next_tick(PROBE_EVERY_S)
            with LoggedFaults("the probe of PostgreSQL failed"):
                await self.probe()

    async def probe(self) -> None:
        """Open one connection and update `problem`."""
        try:
            connection = await connect(
                self._url,
                name="tierlane-probe",
                connect_timeout_s=PROBE_TIMEOUT_S,
                statement_timeout_ms=round(1000 * PROBE_TIMEOUT_S),
            )
        except AWAY as error:
            why = f"no response within {PROBE_TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else reason(error)
            self.problem = f"PostgreSQL at {place_of(self._url)} does not accept new connections: {why}."
        else:
            self.problem = None
            async with closing(connection):
                pass
