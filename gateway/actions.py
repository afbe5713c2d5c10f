"""The actions of the page for on-call, put together; what each does stands in the modules that are imported here.

They are few and rare, and everything about them is made for safety rather than speed: who may is asked first, then whether
the page itself asks, then what exactly, and nothing is done that PostgreSQL does not record.
"""

from gateway.action_door import ActionDoor
from gateway.cordon_actions import CordonActions
from gateway.desk import Connect, Desk
from gateway.letter_actions import LetterActions
from gateway.logged_in import LoggedIn
from gateway.pools import Pools
from gateway.routes import Routes

WORKERS = "/internal/dashboard/workers"
LETTERS = "/internal/dashboard/dead-letters"


class Actions:
    """Those of one gateway; without `connect` all are refused."""

    def __init__(self, logged_in: LoggedIn, connect: Connect | None, pools: Pools) -> None:
        self._door = ActionDoor(logged_in)
        desk = Desk(connect)
        self._cordons = CordonActions(self._door, desk, pools)
        self._letters = LetterActions(self._door, desk, pools)

    def add_to(self, routes: Routes) -> None:
        """Each is described in gateway/action_doors.py."""
        routes.add("POST", f"{WORKERS}/cordon", self._cordons.cordon)
        routes.add("POST", f"{WORKERS}/uncordon", self._cordons.uncordon)
        routes.add("GET", LETTERS, self._letters.groups)
        routes.add("POST", f"{LETTERS}/requeue", self._letters.requeue)
        routes.add("POST", f"{LETTERS}/purge", self._letters.purge)

    async def close(self) -> None:
        """Let what is under way end, but not for long."""
        await self._door.close()
