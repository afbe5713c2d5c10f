"""The bodies of dashboard actions, and of their responses.

Each body contains the state that the operator confirmed; an action is rejected if the state has changed.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.http.validation import PRINTABLE
from ledger.dead_letters import LetterSelection

MAX_DEAD_LETTERS = 10_000
"""Of one action."""

MAX_NUMBER = 2**63 - 1
MAX_WORKER_CHARACTERS = 200
MAX_REASON_CHARACTERS = 500

Worker = Annotated[str, Meta(min_length=1, max_length=MAX_WORKER_CHARACTERS, pattern=PRINTABLE)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS, pattern=PRINTABLE)]
Healthy = Annotated[int, Meta(ge=0, le=1_000_000)]
Count = Annotated[int, Meta(ge=1, le=MAX_DEAD_LETTERS)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Name = Annotated[str, Meta(max_length=200, pattern=PRINTABLE)]


class CordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`healthy_left`: the number of healthy workers that remain in the pool, as the operator confirmed."""

    worker: Worker
    healthy_left: Healthy
    reason: Reason = ""


class UncordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The worker that may claim batches again."""

    worker: Worker


class Cordoned(msgspec.Struct, frozen=True):
    """The new state. `changed` is false if it was the same before."""

    worker: str
    cordoned: bool
    changed: bool


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`count` dead letters up to number `up_to`; only those of a tier, model or error code, if given."""

    count: Count
    up_to: Number
    tier: Name | None = None
    model: Name | None = None
    error_code: Name | None = None

    def selection(self) -> LetterSelection:
        """The selected dead letters."""
        return LetterSelection(self.tier, self.model, self.error_code, self.up_to)


class RequeueBody(PurgeBody, forbid_unknown_fields=True, frozen=True):
    """`count` dead letters that can be requeued, with a number above `after`."""

    after: Number = 0


class Purged(msgspec.Struct, frozen=True):
    """The number of deleted dead letters. `warning`: a step that failed, or ""."""

    purged: int
    warning: str


class Rerun(msgspec.Struct, frozen=True):
    """A dead letter, its new request, and the result: `completed`, an error code, or null if there was none in time."""

    request_id: str
    requeued_as: str
    ended: str | None


class Requeued(msgspec.Struct, frozen=True):
    """At most 32 reruns with their results. `left` more remain: send another request with this `count` and `after`."""

    reruns: list[Rerun]
    left: int
    after: int
    warning: str
