"""A list of inputs in one body: as many requests, which enter together or not at all. How many they may be, and their names."""

from typing import Any, NamedTuple

from multidict import CIMultiDictProxy

from gateway.http.request import check_text, invalid
from ratelimit.effective import Effective
from scheduler.errors import RequestError
from scheduler.protocol.admission import MAX_SUBMISSIONS


class Member(NamedTuple):
    """One of them, as a request that asks."""

    request_id: str
    headers: CIMultiDictProxy[str]
    remote: str | None


def texts_of(field: str, given: str | list[Any], max_bytes: int, not_text: str) -> list[str]:
    """The texts of a field that may hold one or several. Raises RequestError, which says `not_text` where one is none."""
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise invalid(field, f"`{field}` must not be empty.")
    if any(not isinstance(each, str) for each in texts):
        raise invalid(field, not_text)
    for each in texts:
        check_text(field, each, max_bytes)
    return texts


def check_size(field: str, count: int, limits: Effective) -> None:
    """Raises RequestError, naming `field`, for more than could ever enter in one moment, by the base limits."""
    most = MAX_SUBMISSIONS
    why = "of one call"
    for limit, words in ((limits.told_burst, "of this key's burst"), (limits.max_concurrency, "of its concurrency")):
        if 0 < limit < most:
            most, why = int(limit), words
    if count > most:
        raise _too_many(field, count, most, why)


def _too_many(field: str, count: int, most: int, why: str) -> RequestError:
    return invalid(field, f"`{field}` holds {count} texts, which enter together: {most} is the most {why}.")


def member_key(key: str, place: int) -> str:
    """The Idempotency-Key of one of them. The first has the client's own, by which another body is found out.

    No client can send the others': a key holds no space.
    """
    return f"{key} {place}" if place else key
