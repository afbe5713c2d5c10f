"""The id of a response, which has the hexadecimal digits of the id of its request."""

import re

from scheduler.request_id import PREFIX

RESPONSE_PREFIX = "resp_"
RESPONSE_ID_PATTERN = r"^resp_[0-9a-f]{32}$"


def response_id(request_id: str) -> str:
    """The id of the response to a request."""
    return RESPONSE_PREFIX + request_id.removeprefix(PREFIX)


def request_id_of(response: str) -> str | None:
    """The id of the request that a response answers; None for a text that is not the id of a response."""
    return PREFIX + response.removeprefix(RESPONSE_PREFIX) if re.fullmatch(RESPONSE_ID_PATTERN, response) else None
