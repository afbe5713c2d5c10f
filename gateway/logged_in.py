"""Who may see and use the page for on-call: a browser with its cookie, or whoever sends the service token."""

import time
from collections.abc import Callable

from gateway.auth.authenticator import Doorman
from gateway.http.router import Call
from gateway.operations.session import LASTS_S, issue, left_s, presented


class LoggedIn:
    """The check of one gateway. `wall` is seconds since the epoch."""

    def __init__(self, service_token: str, doorman: Doorman, wall: Callable[[], float] = time.time) -> None:
        self._token = service_token
        self._doorman = doorman
        self._wall = wall

    def check(self, call: Call) -> float:
        """Seconds that the caller may look. Raises RequestError for who has neither cookie nor token."""
        left = self.left_s(call)
        if not left:
            self._doorman.check_service(call, self._token)
        return left or LASTS_S

    def issue(self, call: Call) -> str:
        """A cookie's value for who sends the token. Raises RequestError; wrong tokens have to wait as at every door."""
        self._doorman.check_service(call, self._token)
        return issue(self._token, self._wall())

    def left_s(self, call: Call) -> float:
        """Seconds that the caller's cookie holds still; 0 without one."""
        return left_s(self._token, presented(call.headers.get("Cookie", "")), self._wall())
