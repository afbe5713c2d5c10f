"""The dashboard: its session cookie, its protection from other sites, its events, cordons, and its files."""

import re
from hashlib import sha256
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.static import SHARED
from gateway.operations.action_bodies import CordonBody
from gateway.operations.actions import check_healthy_left
from gateway.operations.dashboard.diff import config_changes, state_changes
from gateway.operations.dashboard.downsampling import COARSE_MS, downsampled
from gateway.operations.dashboard.history import MAX_KEPT, read_point
from gateway.operations.dashboard.history_points import HistoryPoint, PoolHistoryPoint, TierHistoryPoint, main_events
from gateway.operations.dashboard.page import ASSETS
from gateway.operations.dashboard.state import (
    DashboardEvent,
    DashboardState,
    GpuState,
    HealthReason,
    TierState,
    WorkerState,
    capacity_by_worker,
    problems,
)
from gateway.operations.session import LASTS_S, check_same_site, issue, left_s, presented, set_cookie
from integration.gateway_fixtures import model, tier
from ledger.catalog.snapshot import Snapshot
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.history import KEEP_MS, STEP_MS
from scheduler.protocol.pool_view import Observation, WorkerView

TOKEN, NOW = "the-service-token", 1_000_000.0
COOKIE = issue(TOKEN, NOW)
UNTIL, SIGNATURE = COOKIE.split(".")


@pytest.mark.parametrize(
    ("value", "now", "left"),
    [
        (COOKIE, NOW, LASTS_S),
        (COOKIE, NOW + 3600, LASTS_S - 3600),
        (COOKIE, NOW + LASTS_S, 0),
        (issue("another", NOW), NOW, 0),
        (f"{int(UNTIL) + 1}.{SIGNATURE}", NOW, 0),
        (f"{UNTIL}.{SIGNATURE[:-1]}", NOW, 0),
        (f"{UNTIL}.", NOW, 0),
        (f"{UNTIL}.ü", NOW, 0),
        (f"{'9' * 13}.{SIGNATURE}", NOW, 0),
        ("٣.x", NOW, 0),
        (".", NOW, 0),
        ("", NOW, 0),
        (TOKEN, NOW, 0),
    ],
)
def test_only_a_signed_cookie_is_accepted_until_it_expires(value: str, now: float, left: float) -> None:
    """Any other value has no time left, and raises nothing."""
    assert left_s(TOKEN, value, now) == left


def test_without_a_service_token_no_cookie_is_accepted() -> None:
    """Not even one that was signed with an empty token."""
    assert left_s("", issue("", NOW), NOW) == 0


def test_the_cookie_is_kept_from_scripts_and_other_sites() -> None:
    """It does not contain the service token, expires in the browser too, and is found by its whole name."""
    header = set_cookie(COOKIE, lasts_s=LASTS_S, secure=True)

    assert TOKEN not in header
    assert set(header.split("; ")[1:]) == {
        "Path=/internal/dashboard", "Max-Age=43200", "HttpOnly", "SameSite=Strict", "Secure",
    }  # fmt: skip
    assert "Secure" not in set_cookie(COOKIE, lasts_s=LASTS_S, secure=False)
    assert presented(f"a=b; tierlane_session={COOKIE}; c=d") == COOKIE
    assert presented(f"xtierlane_session={COOKIE}") == ""


BEARER = ("Authorization", "Bearer x")
SAME_ORIGIN, CROSS_SITE = ("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Site", "cross-site")
ORIGIN, EVIL = ("Origin", "http://tierlane.example:8080"), ("Origin", "http://evil.example")


@pytest.mark.parametrize(
    ("pairs", "accepted"),
    [
        ([SAME_ORIGIN], True),
        ([SAME_ORIGIN, ("Origin", "https://behind.a.proxy")], True),
        ([ORIGIN], True),
        ([("Origin", "https://Tierlane.Example:8080")], True),
        ([BEARER], True),
        ([BEARER, ORIGIN], True),
        ([], False),
        *[([("Sec-Fetch-Site", site)], False) for site in ("cross-site", "same-site", "none", "", "Same-Origin")],
        ([SAME_ORIGIN, CROSS_SITE], False),
        ([CROSS_SITE, ORIGIN], False),
        *[([("Origin", origin)], False) for origin in ("http://tierlane.example", "null", "", "http://[")],
        ([EVIL], False),
        ([ORIGIN, EVIL], False),
        ([BEARER, EVIL], False),
        ([BEARER, CROSS_SITE], False),
    ],
)
def test_actions_of_other_sites_are_rejected(pairs: list[tuple[str, str]], accepted: bool) -> None:
    """Also with a token. A request without the headers of a browser needs a token."""
    headers = CIMultiDictProxy(CIMultiDict([("Host", "tierlane.example:8080"), *pairs]))
    if accepted:
        check_same_site(headers)
        return
    with pytest.raises(RequestError) as error:
        check_same_site(headers)
    assert error.value.code is ErrorCode.CROSS_SITE


def worker(name: str, rps: float = 0.0, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.5, 1, rps, 50.0, "simulated", "v1", age_ms=10.0, healthy=healthy)


def observation(*workers: WorkerView) -> Observation:
    return Observation(0, {}, list(workers), [], 0, 0, 0, 0)


POOLS = [observation(worker("a"), worker("b"), worker("c", healthy=False)), observation(worker("x"))]


@pytest.mark.parametrize(
    ("name", "healthy_left", "code"),
    [
        ("a", 1, None),
        ("a", 0, None),
        ("a", 2, ErrorCode.CHANGED_MEANWHILE),
        ("c", 2, None),
        ("c", 3, ErrorCode.CHANGED_MEANWHILE),
        ("x", 1, ErrorCode.CHANGED_MEANWHILE),
        ("y", 0, ErrorCode.NOT_FOUND),
    ],
)
def test_a_cordon_is_rejected_if_fewer_workers_remain_than_confirmed(
    name: str, healthy_left: int, code: ErrorCode | None
) -> None:
    """The other healthy workers of the same pool count; more than confirmed are accepted."""
    body = CordonBody(name, healthy_left)
    if code is None:
        check_healthy_left(body, POOLS)
        return
    with pytest.raises(RequestError) as error:
        check_healthy_left(body, POOLS)
    assert error.value.code is code


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], {}),
        ([worker("a"), worker("b")], {"a": 45.0, "b": 45.0}),
        ([worker("a", 200.0), worker("b", 100.0), worker("c")], {"a": 40.0, "b": 20.0, "c": 30.0}),
        ([worker("a", 200.0), worker("b", 100.0, healthy=False)], {"a": 90.0}),
        ([worker("a", healthy=False)], {}),
    ],
)
def test_the_capacity_is_divided_among_healthy_workers(workers: list[WorkerView], expected: dict[str, float]) -> None:
    """By their measured rates; a worker without one counts as the mean."""
    assert capacity_by_worker(90.0, workers) == expected


FREE = TierState("free", 0.1, 0, 0.0, 10.0, 10.0, 0.0, 10.0, 10.0, 1.0, 1.0, None, None, None)
REDUCED = replace(FREE, limit_ratio=0.4)
ONE = WorkerState("gpu-1", "default", "ready", True, 0.5, 1, 100, 10.0, 5.0, "tiny", "v1", None)
TWO = replace(ONE, id="gpu-2")
ILL = replace(TWO, healthy=False)
PAUSING = replace(TWO, status="paused", healthy=False, pausing=True)
AT_MS = 50_000


def document(**changed: Any) -> DashboardState:
    """A healthy system with these changes."""
    fields: dict[str, Any] = dict.fromkeys(DashboardState.__struct_fields__, 0)
    fields |= {"at_ms": AT_MS, "gateway": "g1", "status": "healthy", "reasons": [], "redis_problem": None}
    fields |= {"tiers": [FREE], "workers": [ONE, TWO], "gateways": ["g1"], "events": []}
    return DashboardState(**fields | changed)


@pytest.mark.parametrize(
    ("before", "now", "events"),
    [
        ({}, {}, []),
        ({}, {"workers": [ONE, replace(TWO, cordoned=True)]}, [("news", "gpu-2 was cordoned.")]),
        (
            {},
            {"workers": [ONE, replace(TWO, cordoned=True, cordon="by Ann: ECC")]},
            [("news", "gpu-2 was cordoned by Ann: ECC.")],
        ),
        ({}, {"status": "degraded", "reasons": ["A reason."]}, [("bad", "Status is degraded: A reason.")]),
        ({"status": "down"}, {}, [("good", "Status is healthy.")]),
        ({}, {"workers": [ONE, replace(ILL, status="cordoned")]}, [("news", "gpu-2 is cordoned.")]),
        (
            {},
            {"workers": [ONE, replace(ILL, status="down", gpu=GpuState(0.0, 0, 0, 0, "Xid 79"))]},
            [("bad", "gpu-2 is down, Xid 79.")],
        ),
        (
            {"workers": [ONE, replace(TWO, model_pid=7)]},
            {"workers": [ONE, replace(TWO, model_pid=8)]},
            [("bad", "gpu-2's model process restarted.")],
        ),
        ({}, {"workers": [ONE, replace(TWO, model_pid=8)]}, []),
        ({}, {"workers": [ONE, PAUSING]}, []),
        ({"workers": [ONE, PAUSING]}, {}, []),
        ({"workers": [ONE, PAUSING]}, {"workers": [ONE, replace(ILL, status="away")]}, [("bad", "gpu-2 is away.")]),
        ({"workers": [ONE, ILL]}, {}, [("good", "gpu-2 is serving.")]),
        ({"workers": [ONE]}, {}, [("news", "gpu-2 joined: ready.")]),
        ({}, {"workers": [ONE]}, [("news", "gpu-2 left.")]),
        ({"workers": [ONE, ILL]}, {"workers": [ONE]}, [("news", "gpu-2 was removed.")]),
        ({}, {"tiers": [replace(FREE, limit_ratio=0.95)]}, []),
        ({}, {"tiers": [REDUCED]}, [("bad", "Limits of free are reduced to 40%.")]),
        ({"tiers": [REDUCED]}, {"tiers": [replace(FREE, limit_ratio=0.3)]}, []),
        ({"tiers": [REDUCED]}, {}, [("good", "Limits of free are nearly restored.")]),
        ({}, {"dlq": 2}, [("bad", "2 new dead letters, 2 in total.")]),
        ({"dlq": 2}, {}, [("news", "2 dead letters removed, 0 remain.")]),
        # Workers are not compared while Redis does not respond.
        ({}, {"redis_problem": "timeout.", "workers": []}, [("bad", "Redis is not available: timeout.")]),
        ({"redis_problem": "timeout.", "workers": []}, {}, [("good", "Redis is available again.")]),
        ({}, {"gateways": [f"gateway-2-{'0' * 32}"]}, [("news", "gateway-2 joined."), ("news", "g1 left.")]),
    ],
)
def test_events_between_two_states(before: dict[str, Any], now: dict[str, Any], events: list[tuple[str, str]]) -> None:
    """Each change of interest to an operator is one event."""
    found = list(state_changes(document(**before), document(**now)))

    assert [(event.level, event.text) for event in found] == events
    assert {event.at_ms for event in found} <= {AT_MS}


@pytest.mark.parametrize("before", [TWO, PAUSING])
def test_a_lost_worker_is_an_event_at_its_last_heartbeat(before: WorkerState) -> None:
    """Also after a pause."""
    silent = replace(ILL, status=before.status, age_ms=1200)
    (event,) = state_changes(document(workers=[ONE, before]), document(workers=[ONE, silent]))

    assert (event.at_ms, event.level) == (AT_MS - 1200, "bad")
    assert event.text.startswith("gpu-2 was lost")


CHECK: Any = {
    "output": "gpu-2 was lost.",
    "status": "warn",
    "code": "gpu_lost",
    "action": "Restart it.",
    "runbook": "/r",
}


def test_each_reason_has_the_action_of_its_check() -> None:
    """In the order of the reasons; a reason that no check reports has none."""
    health: Any = {"reasons": ["Pool big: gpu-2 was lost.", "Other."], "checks": {"gpu:gpu-2": [CHECK], "redis": [{}]}}

    assert problems(health) == [
        HealthReason("gpu:gpu-2", "Pool big: gpu-2 was lost.", "gpu_lost", "Restart it.", "/r"),
        HealthReason("", "Other.", "", "", ""),
    ]


def test_configuration_changes_are_events() -> None:
    """One for each tier or model."""
    tiers = (tier("free", 1, 0.1), tier("paid", 2, 0.1))
    before = Snapshot(1, tiers, {}, {}, {"tiny": model()}, ())
    now = replace(before, tiers=(tier("free", 1, 0.2),), models={"tiny": model(), "big": model()})

    assert [event.text for event in config_changes(before, now, AT_MS)] == [
        "Configuration: tier free was changed.",
        "Configuration: tier paid was deleted.",
        "Configuration: model big was added.",
    ]
    assert list(config_changes(now, now, AT_MS)) == list(config_changes(None, now, AT_MS)) == []


def row_of(at_ms: int, rate: float, depth: int, ratio: float = 1.0) -> HistoryPoint:
    tiers = [TierHistoryPoint("free", depth, 0.0, rate, rate, 0.0, ratio, None, rate, None)]
    events = [DashboardEvent(at_ms, "news", f"at {at_ms}")]
    return HistoryPoint(at_ms, "healthy", rate, 50.0, tiers, events, [PoolHistoryPoint("big", rate, 9.0, tiers)])


def test_old_points_are_merged_and_very_old_ones_dropped() -> None:
    """Rates are means; depth, limits and response times are the worst; merging twice changes nothing."""
    now_ms = KEEP_MS + COARSE_MS
    points = [row_of(at_ms, at_ms / STEP_MS % 2, at_ms, 1 / (1 + at_ms)) for at_ms in range(0, now_ms, STEP_MS)]
    kept = downsampled(points, now_ms)

    assert len(kept) <= MAX_KEPT + COARSE_MS // STEP_MS
    assert kept[-1] is points[-1]
    assert kept[0].at_ms > now_ms - KEEP_MS
    assert (kept[1].at_ms, kept[1].demand_rps) == (kept[0].at_ms + COARSE_MS, 0.5)
    assert (kept[1].tiers[0].depth, kept[1].tiers[0].limit_ratio) == (kept[1].at_ms, 1 / (1 + kept[1].at_ms))
    assert (kept[1].tiers[0].p95_ms, len(kept[1].events)) == (1.0, COARSE_MS // STEP_MS)
    assert (kept[1].of_pool("big").capacity_rps, kept[1].of_pool("").capacity_rps) == (9.0, 50.0)
    assert all(one is other for one, other in zip(downsampled(kept, now_ms), kept, strict=True))


def test_points_of_older_versions_are_read() -> None:
    """They have no failure rates and no pools, and their events no kind and no pool."""
    tiers = [["free", 1, 0.0, 1.0, 1.0, 0.0, 1.0, None, None, None]]
    stored = msgspec.msgpack.encode([AT_MS, "healthy", 1.0, 2.0, tiers, [[AT_MS, "news", "g1 joined."]]])

    assert read_point(stored) == HistoryPoint(
        AT_MS,
        "healthy",
        1.0,
        2.0,
        [TierHistoryPoint("free", 1, 0.0, 1.0, 1.0, 0.0, 1.0, None, None, None)],
        [DashboardEvent(AT_MS, "news", "g1 joined.")],
    )
    assert read_point(b"\x00") is None


UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""uPlot 1.6.32 of the npm registry: dist/uPlot.iife.min.js and dist/uPlot.min.css."""


def test_all_files_are_shipped_and_the_library_is_unchanged() -> None:
    """The files are those that its pages name, and those that it shares with other pages. With the licence of the library."""
    static = files("gateway").joinpath("static", "dashboard")
    pages = "".join(static.joinpath(name).read_text("utf-8") for name in ("page.html", "login.html"))
    others = "".join(
        static.parent.joinpath(*path).read_text("utf-8") for path in (("admin", "page.html"), ("landing.html",))
    )
    own, shared = [set(re.findall(r'assets/([^"]+)"', each)) for each in (pages, others)]

    assert own | set(SHARED) == set(ASSETS)
    assert set(SHARED) <= own | shared
    assert {name: sha256(static.joinpath(name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT
    assert "MIT License" in static.joinpath("uplot-LICENSE.txt").read_text("utf-8")


def test_scripts_write_text_and_no_markup() -> None:
    """The name of a worker cannot become an element of the page."""
    static = files("gateway").joinpath("static", "dashboard")
    scripts = [name for name in ASSETS if name.endswith(".js") and name != "uplot.js"]
    banned = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage")

    assert len(scripts) >= 4
    assert [(n, word) for n in scripts for word in banned if word in static.joinpath(n).read_text("utf-8")] == []


def test_merged_points_keep_the_main_events() -> None:
    """Lost workers, outages and changes of the status before those of limits, of one kind the newest, in their order."""
    kinds = ("limits", "loss", "limits", "redis", "status", "limits", "loss")
    events = [DashboardEvent(at_ms, "bad", "", kind) for at_ms, kind in enumerate(kinds)]

    kept = {most: [event.at_ms for event in main_events(events, most)] for most in (1, 4, 5, 7)}

    assert kept == {1: [6], 4: [1, 3, 4, 6], 5: [1, 3, 4, 5, 6], 7: [*range(7)]}
