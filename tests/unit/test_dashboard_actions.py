"""What an action of the page for on-call is judged by: where it comes from, what is left of a pool, what a worker adds."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.operations.action_requests import CordonBody
from gateway.operations.actions import check_healthy_left
from gateway.operations.session import check_same_site
from gateway.operations.state import capacity_by_worker
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.pool_view import Observation, WorkerView

HOST = ("Host", "tierlane.example:8080")
TOKEN = ("Authorization", "Bearer x")
OURS = ("Sec-Fetch-Site", "same-origin")


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict([HOST, *pairs]))


@pytest.mark.parametrize(
    "pairs",
    [
        [OURS],
        [OURS, ("Origin", "https://behind.a.proxy")],
        [("Origin", "http://tierlane.example:8080")],
        [("Origin", "https://Tierlane.Example:8080")],
        [TOKEN],
        [TOKEN, ("Origin", "http://tierlane.example:8080")],
    ],
)
def test_what_comes_from_our_page_or_a_program(pairs: list[tuple[str, str]]) -> None:
    """A browser says so; a program has the token and says nothing."""
    check_same_site(headers(*pairs))


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        *([("Sec-Fetch-Site", site)] for site in ("cross-site", "same-site", "none", "", "Same-Origin")),
        [OURS, ("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "cross-site"), ("Origin", "http://tierlane.example:8080")],
        *(
            [("Origin", origin)]
            for origin in (
                "http://tierlane.example",
                "http://evil.example",
                "null",
                "",
                "http://[",
                "tierlane.example:8080",
            )
        ),
        [("Origin", "http://tierlane.example:8080"), ("Origin", "http://evil.example")],
        [TOKEN, ("Origin", "http://evil.example")],
        [TOKEN, ("Sec-Fetch-Site", "cross-site")],
    ],
)
def test_what_comes_from_another_page(pairs: list[tuple[str, str]]) -> None:
    """Or from a browser that does not say; a token does not help where a page of another site sends it."""
    with pytest.raises(RequestError) as refused:
        check_same_site(headers(*pairs))
    assert refused.value.code is ErrorCode.CROSS_SITE


def worker(name: str, rps: float = 0.0, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.5, 1, 10.0, healthy, rps, 50.0, "simulated", "v1")


def look(*workers: WorkerView) -> Observation:
    return Observation(0, {}, list(workers), [], 0, 0, 0, 0)


POOLS = [look(worker("a"), worker("b"), worker("c", healthy=False)), look(worker("x"))]


@pytest.mark.parametrize(
    ("name", "healthy_left", "code"),
    [
        ("a", 1, None),
        ("a", 0, None),
        ("a", 2, ErrorCode.CHANGED_MEANWHILE),
        ("c", 2, None),
        ("c", 3, ErrorCode.CHANGED_MEANWHILE),
        ("x", 0, None),
        ("x", 1, ErrorCode.CHANGED_MEANWHILE),
        ("y", 0, ErrorCode.NOT_FOUND),
    ],
)
def test_what_a_pool_is_left_with(name: str, healthy_left: int, code: ErrorCode | None) -> None:
    """Its other healthy workers count, those of other pools do not; more than was confirmed is no harm."""
    body = CordonBody(name, healthy_left)
    if code is None:
        check_healthy_left(body, POOLS)
        return
    with pytest.raises(RequestError) as refused:
        check_healthy_left(body, POOLS)
    assert refused.value.code is code


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], {}),
        ([worker("a")], {"a": 90.0}),
        ([worker("a"), worker("b")], {"a": 45.0, "b": 45.0}),
        ([worker("a", 200.0), worker("b", 100.0)], {"a": 60.0, "b": 30.0}),
        ([worker("a", 200.0), worker("b", 100.0), worker("c")], {"a": 40.0, "b": 20.0, "c": 30.0}),
        ([worker("a", 200.0), worker("b", 100.0, healthy=False)], {"a": 90.0}),
        ([worker("a", healthy=False)], {}),
    ],
)
def test_what_each_worker_adds_to_a_capacity_of_90(workers: list[WorkerView], expected: dict[str, float]) -> None:
    """Its measured part, the mean where it is not measured, nothing where it is not healthy; together all of it."""
    assert capacity_by_worker(90.0, workers) == expected
