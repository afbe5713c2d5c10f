"""What the actions of the page for on-call take and say, decoded and checked in one step.

Each carries what the operator saw, so that what is done is what was confirmed.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from ledger.letter_groups import Seen

MOST_LETTERS = 10_000
"""That one action may be about."""

MOST_NUMBER = 2**63 - 1
MAX_WORKER_CHARACTERS = 200
MAX_REASON_CHARACTERS = 500

PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*(?![\s\S])"
"""Without control characters: PostgreSQL keeps no NUL, and its tables refuse the others. (`$` would let
a line feed at the end pass.)
"""

Worker = Annotated[str, Meta(min_length=1, max_length=MAX_WORKER_CHARACTERS, pattern=PLAIN)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS, pattern=PLAIN)]
Healthy = Annotated[int, Meta(ge=0, le=1_000_000)]
Count = Annotated[int, Meta(ge=1, le=MOST_LETTERS)]
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
Name = Annotated[str, Meta(max_length=200, pattern=PLAIN)]


class CordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`healthy_left`: how many healthy workers the pool was said to be left with."""

    worker: Worker
    healthy_left: Healthy
    reason: Reason = ""


class UncordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Which worker may claim again."""

    worker: Worker


class Cordoned(msgspec.Struct, frozen=True):
    """How it is now; `changed` is false where it was so before."""

    worker: str
    cordoned: bool
    changed: bool


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`count` letters up to number `up_to`, of one tier, model and cause each, or of any where it is left out."""

    count: Count
    up_to: Number
    tier: Name | None = None
    model: Name | None = None
    error_code: Name | None = None

    def seen(self) -> Seen:
        """Which letters these are."""
        return Seen(self.tier, self.model, self.error_code, self.up_to)


class RequeueBody(PurgeBody, forbid_unknown_fields=True, frozen=True):
    """`count` letters that can be run again, with a number above `after`."""

    after: Number = 0


class Purged(msgspec.Struct, frozen=True):
    """How many were deleted. `warning`: what could not be done besides, "" where all was."""

    purged: int
    warning: str


class Rerun(msgspec.Struct, frozen=True):
    """A letter, the new request made of it, and its end: `completed`, an error code, or null where none was seen in time."""

    request_id: str
    requeued_as: str
    ended: str | None


class Requeued(msgspec.Struct, frozen=True):
    """At most 32 were begun, and are ended. `left` more are to come: ask again with this `count` and `after`."""

    reruns: list[Rerun]
    left: int
    after: int
    warning: str
