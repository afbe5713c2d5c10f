"""`Prefer` as RFC 7240 has it, and what a job's body may be."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.request import prefers_async
from gateway.jobs.submit import read_job
from scheduler.errors import RequestError

URL = "https://example.com/hook"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["respond-async"], True),
        (["Respond-Async"], True),
        (["respond-async, wait=10"], True),
        (["wait=10,respond-async"], True),
        (["respond-async; a=b"], True),
        (['respond-async=""'], True),
        (["wait=10", "respond-async"], True),
        (['respond-async="x"', "respond-async"], False),  # the first of two counts
        (["respond-async=1"], False),
        (["respond-asynchronously"], False),
        (["wait=respond-async"], False),
        ([""], False),
        ([",;=,"], False),
        ([], False),
    ],
)
def test_the_preference(lines: list[str], wanted: bool) -> None:
    """Found among others; never an error."""
    headers = CIMultiDictProxy(CIMultiDict([("Prefer", line) for line in lines]))

    assert prefers_async(headers) is wanted


@pytest.mark.parametrize(
    ("raw", "text", "url"),
    [
        (b'{"input": "a"}', "a", None),
        (b'{"input": "callback_url"}', "callback_url", None),
        (b'{"input": "a", "callback_url": null}', "a", None),
        (b'{"input": "a", "callback_url": "https://example.com/hook", "model": "m"}', "a", URL),
        (b'{"input": "a", "callback\\u005furl": "https://example.com/hook"}', "a", URL),
    ],
)
def test_a_body(raw: bytes, text: str, url: str | None) -> None:
    """The same as of who waits, and the URL where there is one."""
    body, found = read_job(raw, 1000)

    assert (body.input, found) == (text, url)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"input": "a", "callback_url": 7}', "callback_url"),
        (b'{"input": "a", "callback_url": "x", "callback_url": "y"}', "callback_url"),
        (b'{"input": "", "callback_url": "x"}', "input"),
        (b'{"input": "a", "callback_url": "x", "parameters": {"a": 1, "a": 2}}', "a"),
        (b'{"input": "a", "callback_url": "x", "parameters": {"a": {}}}', "parameters"),
        (b'{"input": "a", "callback": "x"}', "callback"),
        (b'{"callback_url": "x"}', "input"),
    ],
)
def test_a_bad_body(raw: bytes, param: str) -> None:
    """Every rule for who waits holds for a job, with the field named."""
    with pytest.raises(RequestError) as error:
        read_job(raw, 1000)

    assert error.value.param == param
