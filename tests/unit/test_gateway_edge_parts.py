"""The parts of the edge that need no socket: deadline watches, routes, the parser check."""

import ast
import inspect
from types import ModuleType

import pytest
from aiohttp import http_parser, web, web_protocol

from gateway.http import connection, server
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


@pytest.mark.parametrize(
    ("module", "ours", "base"),
    [
        (connection, connection.EdgeConnection, web_protocol.RequestHandler),
        (server, server.EdgeServer, web.Server),
    ],
)
def test_the_private_members_of_aiohttp_exist(module: ModuleType, ours: type, base: type) -> None:
    """An upgrade that moves a private member fails here; the gateway uses them in these two modules only."""
    defined = {*vars(ours), *getattr(ours, "__slots__", ())}
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    known = {*dir(base), *(name for each in base.__mro__ for name in getattr(each, "__slots__", ()))}
    known |= {
        target for line in inspect.getsource(base).split("self.")[1:] for target in [line.split(" ")[0].split(":")[0]]
    }

    assert used - defined - known == set()
    assert used - defined
    assert hasattr(web_protocol, "_ErrInfo")
