"""The actions of the page for on-call, put together; what each does stands in the modules that are imported here.

They are few and rare, and everything about them is made for safety rather than speed: who may is asked first, then whether
the page itself asks, then what exactly, and nothing is done that PostgreSQL does not record.
"""

from gateway.action_door import ActionDoor
from gateway.desk import Connect, Desk
from gateway.letter_actions import LetterActions
from gateway.logged_in import LoggedIn
from gateway.operations.actions import CordonActions
from gateway.pools import Pools


class Actions:
    """Those of one gateway; without `connect` all are refused."""

    def __init__(self, logged_in: LoggedIn, connect: Connect | None, pools: Pools) -> None:
        self._door = ActionDoor(logged_in)
        desk = Desk(connect)
        self.cordons = CordonActions(self._door, desk, pools)
        self.letters = LetterActions(self._door, desk, pools)

    async def close(self) -> None:
        """Let what is under way end, but not for long."""
        await self._door.close()
