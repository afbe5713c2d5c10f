"""The webhook secrets of a customer: which are valid, and their rotation.

A secret has a number, from which it is derived (gateway/jobs/webhook_security.py); none is stored. After a rotation the
earlier ones stay valid for a time, in which callbacks are signed with each.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from scheduler.errors import TierlaneError

LEAST_GRACE, GRACE, MOST_GRACE = timedelta(hours=1), timedelta(days=1), timedelta(days=7)
MOST_VALID = 5
"""Valid secrets of a customer, which bounds the signatures of a callback and, with LEAST_GRACE, the rotations of a day."""


class TooManySecrets(TierlaneError):
    """So many secrets are valid that there can be no further one for `wait_ms`. The message is a sentence."""

    def __init__(self, message: str, wait_ms: int) -> None:
        super().__init__(message)
        self.wait_ms = wait_ms


class WebhookSecrets(NamedTuple):
    """Columns of a customer: the newest secret, and the oldest that is valid as well until a time; None: there is none."""

    webhook_secret: int
    webhook_secret_oldest: int | None
    webhook_secret_until: datetime | None

    def valid(self, now: datetime) -> Sequence[int]:
        """The numbers of the valid secrets, the newest first. `now`: of PostgreSQL's clock."""
        oldest = self.webhook_secret_oldest
        if oldest is None or self.webhook_secret_until is None or self.webhook_secret_until <= now:
            oldest = self.webhook_secret
        return range(self.webhook_secret, oldest - 1, -1)

    def current(self, now: datetime) -> "WebhookSecrets":
        """Without the earlier ones if they are not valid."""
        return self if len(self.valid(now)) > 1 else WebhookSecrets(self.webhook_secret, None, None)

    def rotated(self, grace: timedelta, now: datetime) -> "WebhookSecrets":
        """The columns with one more secret; all that are valid stay valid for `grace` from now. Raises TooManySecrets."""
        valid = self.valid(now)
        if len(valid) >= MOST_VALID and self.webhook_secret_until is not None:
            at = f"{self.webhook_secret_until:%Y-%m-%d %H:%M:%S} UTC"
            wait_ms = int((self.webhook_secret_until - now) / timedelta(milliseconds=1))
            raise TooManySecrets(
                f"{MOST_VALID} webhook secrets are valid: the next rotation is possible at {at}.", wait_ms
            )
        return WebhookSecrets(self.webhook_secret + 1, valid[-1], now + grace)
