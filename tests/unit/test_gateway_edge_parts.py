"""The parts of the edge that need no socket: deadline watches, routes, the parser check."""

import pytest
from aiohttp import http_parser

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest, Router
from gateway.http.server import check_parser
from gateway.http.sse import ProgressTimers
from scheduler.errors import StartError


def test_a_watch_gives_back_what_is_due_in_order() -> None:
    """An item that waits keeps its first deadline; one that was stopped never expires."""
    watch: ProgressTimers[str] = ProgressTimers(5.0)
    watch.start("a", 0.0)
    watch.start("b", 1.0)
    watch.start("a", 2.0)
    watch.start("c", 2.0)
    watch.stop("b")

    assert watch.expired(4.9) == []
    assert watch.expired(5.0) == ["a"]
    assert watch.expired(100.0) == ["c"]
    assert len(watch) == 0


async def answer(call: RoutedRequest) -> HttpResponse:
    return HttpResponse(200, call.tail.encode())


@pytest.mark.parametrize(
    ("path", "found", "tail"),
    [
        ("/livez", True, ""),
        ("/livez?x=1", True, ""),
        ("http://gateway:8080/livez?x=1", True, ""),
        ("http://gateway", False, ""),
        ("//livez", False, ""),
        ("*", False, ""),
        ("/livez/", False, ""),
        ("/", False, ""),
        ("", False, ""),
        ("/requests/req_1", True, "req_1"),
        ("/requests/req_1?x=/y", True, "req_1"),
        ("/requests/", False, ""),
        ("/requests", False, ""),
        ("/requests/a/b", False, ""),
    ],
)
def test_paths_are_exact_or_have_one_last_segment(path: str, found: bool, tail: str) -> None:
    """Query, scheme and host are ignored; nothing else is."""
    routes = Router()
    routes.add("GET", "/livez", answer)
    routes.add("GET", "/requests/{id}", answer)

    result = routes.find(path)

    assert (result is not None) is found
    assert result is None or (result[1] == tail and set(result[0]) == {"GET"})


def test_the_pure_python_parser_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed aiohttp passes; without its C parser, or when it is old, the gateway does not start."""
    check_parser()
    with monkeypatch.context() as patched:
        patched.setattr(http_parser, "HttpRequestParser", http_parser.HttpRequestParserPy)
        with pytest.raises(StartError, match="C parser"):
            check_parser()
    monkeypatch.setattr("aiohttp.__version__", "3.14.2")
    with pytest.raises(StartError, match="too old"):
        check_parser()
