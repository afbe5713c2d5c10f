"""The dashboard as a page: accessibility, size of the first view, charts, views that explain, wall mode."""

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from browser.test_dashboard import LEVEL, WORKERS, log_in
from chromium import Tab, chromium
from eventually import eventually
from gateway.operations.dashboard.history_points import history_point
from gateway.operations.dashboard.state import DashboardEvent
from integration.dashboard_fixtures import acting_stack
from integration.gateway_fixtures import LiteralCatalog, Stack, model
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.snapshot import Customer
from scheduler.protocol.history import WEEK
from scheduler.protocol.pool_view import GpuReading, WorkerReport

__all__ = ["database_url", "db", "postgres_server"]

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

AXE = (Path(__file__).parent / "axe.min.js").read_text("utf-8")
BUDGET_BYTES = 300_000
ELSEWHERE = WorkerReport(
    *("far", "failed", 0.0, 0, 0.0, 0.0, "simulated", "v1"),
    gpu=GpuReading(0.5, 1, 2, 50, 0, name="NVIDIA H100", address="00000000:3B:00.0"),
    model_pid=4712,
    host="node-1",
    pid=4711,
)
NONE = "\N{EN DASH}"
HOSTILE = "<img src=x onerror=alert(1)>"
TRANSFERRED = (
    "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    ".reduce((sum, each) => sum + each.transferSize, 0)"
)


def named(catalog: LiteralCatalog, name: str) -> None:
    """Add a customer of tier free with this name."""
    snapshot = catalog.snapshot
    assert snapshot is not None
    free = snapshot.tier("free")
    rows = {
        "customer-free": Customer("customer-free", name, "free", suspended=False, limits=free.limits, max_queue_ms=1)
    }
    catalog.set(key={"customer_name": name})
    catalog.snapshot = type(snapshot)(2, snapshot.tiers, rows, catalog.snapshot.keys, snapshot.models, ())


async def violations(tab: Tab) -> list[str]:
    """The rules of axe-core that the page violates, with the first place of each."""
    await tab.value(f"window.axe ? true : (0, eval)({json.dumps(AXE)}), true")
    found = await tab.value("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
    assert found is not None, tab.faults
    return [f"{each['id']}: {each['nodes'][0]['html'][:150]}" for each in found]


async def resize(tab: Tab, width: int, height: int, *, dark: bool = False) -> None:
    size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])


async def opened(tab: Tab) -> None:
    await log_in(tab)
    await tab.until(f"({LEVEL} === 'healthy' || {LEVEL} === 'degraded') && {WORKERS} > 0", "the first state")


async def served(stack: Stack, tab: Tab) -> None:
    """Send requests until the page shows the customer."""

    async def shown() -> Any:
        await stack.infer()
        return await tab.value("document.querySelector('#customers a')?.textContent")

    assert await eventually(shown, "the customer") == HOSTILE


async def test_no_state_violates_a_rule_of_axe(
    client: Redis, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    """Login, healthy, phone, dark, wall, degraded, and a customer whose name is hostile; no page is wider than its screen.

    Title and header name the installation.
    """
    catalog = LiteralCatalog()
    named(catalog, HOSTILE)
    async with (
        acting_stack(client, redis_url, database_url, catalog=catalog, installation="prod-eu") as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab,
    ):
        await resize(tab, 1400, 900)
        await tab.until("!!document.getElementById('token')", "the login form")
        found = {"login": await violations(tab)}
        await opened(tab)
        await served(stack, tab)
        assert re.fullmatch("(HEALTHY|DEGRADED) · prod-eu · Tierlane", await tab.value("document.title"))
        assert await tab.value("document.getElementById('installation').innerText") == "prod-eu"
        for name, (width, height, dark) in {
            "healthy": (1400, 900, False),
            "dark": (1400, 900, True),
            "phone": (390, 844, False),
        }.items():
            await resize(tab, width, height, dark=dark)
            found[name] = await violations(tab)
            assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), name
        await resize(tab, 1400, 900)
        await tab.value("document.querySelector('#customers a').click(); true")
        text = await tab.until(
            "document.querySelector('#details-body h3') && document.getElementById('details').textContent",
            "the customer",
        )
        assert HOSTILE in text
        assert "requests_per_second" in text
        assert "Share of GPU time" in text
        found["customer"] = await violations(tab)
        await tab.value("location.hash = 'worker=worker-1'; true")
        await tab.until(
            "document.getElementById('details').textContent.includes('Events of the last hour')", "the worker"
        )
        facts = await tab.value("document.querySelector('#details .facts').innerText")
        assert facts.split("\n") == ["Host", "not reported", "GPU", "none reported"]
        await stack.worker.presence.worker_beat(ELSEWHERE)
        await tab.value("location.hash = 'worker=far'; true")
        await tab.until("document.querySelector('#details .facts')?.innerText.includes('node-1')", "its host", 5.0)
        facts = await tab.value("document.querySelector('#details .facts').innerText")
        assert facts.split("\n") == [
            *("Host", "node-1", "Process", "4711", "Model process", "4712", "GPU", "NVIDIA H100, 00000000:3B:00.0"),
        ]
        found["worker"] = await violations(tab)
        await stack.worker.heartbeat("worker-2")
        await tab.value("location.hash = ''; true")
        await tab.until(f"{LEVEL} === 'degraded'", "a lost worker", 5.0)
        found["degraded"] = await violations(tab)
        await resize(tab, 1920, 1080)
        await tab.call("Page.navigate", url=f"{stack.url}/internal/dashboard?wall")
        await tab.until(f"document.body?.className === 'wall' && {WORKERS} > 0", "wall mode")
        found["wall"] = await violations(tab)
        assert await tab.value("document.documentElement.scrollHeight <= innerHeight && scrollX + scrollY === 0")

        assert {name: rules for name, rules in found.items() if rules} == {}
        assert tab.faults == []


async def test_the_first_view_is_small(client: Redis, redis_url: str, database_url: str, tmp_path: Path) -> None:
    """All files and the first data, with an hour of history of three tiers, are under the budget."""
    async with (
        acting_stack(client, redis_url, database_url) as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab,
    ):
        await opened(tab)
        history = stack.gateway.snapshots.history
        (last,) = [(await stack.gateway.snapshots.current()).state]
        for step in range(1800, 0, -1):
            history._append(
                type(last)(
                    **{name: getattr(last, name) for name in last.__struct_fields__}
                    | {"at_ms": last.at_ms - step * 2000}
                )
            )
        data = len(stack.gateway.snapshots.opening())
        await tab.call("Network.enable")
        await tab.call("Network.setCacheDisabled", cacheDisabled=True)
        began = time.monotonic()
        await tab.value("window.before = true; location.reload(); true")
        await tab.until(
            f"!window.before && {WORKERS} > 0 && document.querySelectorAll('canvas').length === 6", "the view"
        )
        took_ms = (time.monotonic() - began) * 1000
        files = await tab.value(TRANSFERRED)

        assert 50_000 < files + data < BUDGET_BYTES
        print(f"first view: {files} bytes of files, {data} bytes of data, {took_ms:.0f} ms")


async def test_charts_share_the_cursor_the_range_and_the_axis(
    client: Redis, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    """Arrow keys move the cursor of all charts; range, axis and pool are kept in the address. A pool has its own workers."""
    catalog = LiteralCatalog()
    catalog.set(models=(model(), model("big", pool="big")))
    async with (
        acting_stack(client, redis_url, database_url, catalog=catalog) as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab,
    ):
        await resize(tab, 1400, 900)
        await opened(tab)
        legend = (
            "[...document.querySelectorAll('.chart .u-legend tr:first-child .u-value')].map(each => each.textContent)"
        )
        await tab.until(
            f"{legend}.length === 6 && {legend}.every(each => each.includes(':'))", "the latest values", 10.0
        )
        await tab.value("document.getElementById('load').focus(); true")
        key = {"key": "ArrowLeft", "code": "ArrowLeft", "windowsVirtualKeyCode": 37}
        await tab.call("Input.dispatchKeyEvent", type="keyDown", **key)
        cursors = "[...document.querySelectorAll('.u-cursor-x')].map(each => each.style.transform)"
        await tab.until(f"new Set({cursors}).size === 1 && {cursors}[0] !== 'translate(-10px, 0px)'", "one cursor")

        await tab.value("document.querySelector('[data-range=\"60\"]').click(); true")
        await tab.value("document.querySelector('[data-axis=log]').click(); true")
        assert await tab.value("location.search") == "?range=60&axis=log"
        pressed = "[...document.querySelectorAll('#toolbar [aria-pressed=true]')].map(each => each.textContent)"
        assert await tab.value(pressed) == ["60 min", "Log"]
        choose = (
            "const pool = document.getElementById('pool'); pool.value = 'big'; pool.dispatchEvent(new Event('change'))"
        )
        await tab.until("document.getElementById('pool').options.length === 3", "all pools and two pools")
        await tab.value(f"{choose}; true")
        await tab.until(f"{WORKERS} === 0", "no worker of that pool")
        assert await tab.value("location.search") == "?range=60&axis=log&pool=big"
        assert tab.faults == []


async def test_errors_are_shown_by_code_and_tier_and_workers_by_cause(
    client: Redis, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    """Errors of the last minute, the most frequent first, with a link to the description; a cause that workers share is one line."""
    async with (
        acting_stack(client, redis_url, database_url) as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab,
    ):
        await opened(tab)
        assert await tab.value("document.getElementById('no-errors').innerText") == "None."
        for tier_name, body in (
            ("free", {"input": ""}),
            ("free", {"input": ""}),
            ("paid", {"input": "x", "model": "no"}),
        ):
            assert (await stack.infer(body, tier_name))[0] in (400, 404)
        cells = "[...document.querySelectorAll('#errors tr')].map((row) => [...row.children].map((each) => each.textContent))"
        await tab.until(f"{cells}.length === 3", "both codes", 5.0)
        assert await tab.value(cells) == [
            ["Code", "enterprise", "paid", "free", "all"],
            ["invalid_request", NONE, NONE, "2", "2"],
            ["model_not_found", NONE, "1", NONE, "1"],
        ]
        assert (await tab.value("document.querySelector('#errors tbody a').href")).endswith(
            "/docs#error-invalid_request"
        )
        for number in range(2, 6):
            await stack.worker.heartbeat(f"worker-{number}", "failed")
        causes = "document.getElementById('causes').innerText"
        await tab.until(f"{causes} === '4 workers: failed'", "the cause", 5.0)
        for number in (11, 12, 9):
            await stack.worker.presence.worker_beat(
                replace(ELSEWHERE, id=f"far-{number}", status="away", gpu=None, reason="No key.")
            )
        both = "4 workers: failed\\n3 workers: away: No key."
        await tab.until(f"{causes} === '{both}'", "both causes", 5.0)
        tiles = await tab.value(
            "[...document.querySelectorAll('.worker.ill')].map((each) => each.innerText.split('\\n')[0])"
        )
        assert tiles == ["far-9", "far-11", "far-12", "worker-2", "worker-3", "worker-4", "worker-5"]
        assert not await tab.value("document.getElementById('workers').innerText.includes('No key.')")
        await tab.value("location.hash = 'worker=far-9'; true")
        await tab.until("document.getElementById('details').innerText.includes('No key.')", "the view of one")
        await tab.value("location.hash = ''; true")
        reasons = await tab.value("document.getElementById('reasons').textContent")
        assert "4 of 8 GPUs are not healthy: 4 workers are failed, last seen" in reasons
        assert "3 of 8 GPUs are not healthy: 3 workers are away (No key), last seen" in reasons
        assert await violations(tab) == []
        assert tab.faults == []


async def test_the_charts_show_days(client: Redis, redis_url: str, database_url: str, tmp_path: Path) -> None:
    """24 hours and 7 days, from the points of five minutes; success rates and events are those of the range, events with their day."""
    async with (
        acting_stack(client, redis_url, database_url) as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard?range=10080") as tab,
    ):
        await resize(tab, 1400, 900)
        await log_in(tab)
        await tab.until("document.querySelectorAll('.worker').length > 0", "the first state")
        history = stack.gateway.snapshots.history
        latest = (await stack.gateway.snapshots.current()).state
        tiers = [replace(tier, out_rps=9.0, failed_rps=1.0) for tier in latest.tiers]
        for step in range(WEEK.max_points, 0, -1):
            at_ms = latest.at_ms - step * WEEK.step_ms
            events = [DashboardEvent(at_ms, "bad", "gpu-9 was lost.", "loss")] if step == 600 else []
            history.week._points[at_ms // WEEK.step_ms] = msgspec.msgpack.encode(
                history_point(replace(latest, at_ms=at_ms, tiers=tiers), events)
            )
        await tab.value("document.querySelector('[data-range=\"10080\"]').click(); true")
        await tab.until("Past.within(7 * 864e5).length > 2000", "the week", 10.0)
        assert await tab.value("document.querySelector('#tiers tbody').textContent.includes('90.00 %')")
        event = "[...document.querySelectorAll('#events li')].find((each) => each.textContent.includes('gpu-9'))"
        assert re.match(r"\d+ \w{3,4} \d\d:\d\d:\d\d", await tab.value(f"{event}.querySelector('time').textContent"))
        assert await tab.value("location.search") == "?range=10080"
        assert await violations(tab) == []

        await tab.value("document.querySelector('[data-range=\"1440\"]').click(); true")
        await tab.until("Past.within(864e5)[0].at > Date.now() - 864e5 - 6e5", "the last day")
        assert not await tab.value(f"{event} !== undefined")
        assert await tab.value("document.querySelectorAll('canvas').length") == 6
        assert tab.faults == []


FLOOD = """
    const reason = (n) => ({
      check: 'x', code: 'x', reason: `worker-${n}: batches of \\`shout:shout\\` take ${n},000 ms, over \\`TIERLANE_GPU_TIMEOUT_MS\\``,
      action: 'Add workers, or lower the limits of the top customers with `tierlane customer set`.',
      runbook: 'docs/runbooks/TierlaneOverloaded.md' });
    const flood = (state) => ({ ...state, status: 'degraded', problems: Array.from({ length: 14 }, (_, n) => reason(n + 1)),
      healthy_gpus: 2048, total_gpus: 2048, capacity_rps: 75.7, capacity_evidence: 'probing', in_rps: 12345, out_rps: 123456,
      slots: 4096, running: 4096, batches: { lines: 1234567, batches: 12 },
      tiers: state.tiers.map((tier) => ({ ...tier, p50_ms: 203.2, p95_ms: 256, p99_ms: 1149.4, in_rps: 12.5 })) });
    const changed = (part, name, change) => { const own = part[name]; part[name] = (...given) => own(...change(given)); };
    changed(StatusPanel, 'showStatus', ([state]) => [flood(state)]);
    changed(StatusPanel, 'showFigures', ([state, figures]) => [flood(state), flood(figures)]);
    changed(Tiers, 'show', ([figures, points]) => [flood(figures), points]);
    changed(Events, 'show', ([events]) => [[...events, [Date.now(), 'bad', 'Status is degraded: batches of `shout:shout` take 9,000 ms.', 'status']]]);
    true
"""
OVERPRINTED = """
    [...document.querySelectorAll('#kpis > div')].filter((box) => [...box.children].some((each) => {
      const range = document.createRange();
      range.selectNodeContents(each);
      return range.getBoundingClientRect().right > box.getBoundingClientRect().right + 8;
    })).map((box) => box.textContent)
"""
SIZES = {
    "360": (360, 740),
    "1024": (1024, 768),
    "1280": (1280, 720),
    "1600": (1600, 900),
    "phone": (390, 844),
    "wall": (1920, 1080),
}


async def test_a_flood_of_reasons_leaves_the_figures_readable(
    client: Redis, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    """The header takes a quarter of the screen, no figure runs into the next one, and code is not shown with backticks.

    Percentiles are bounds: they come from the buckets of a histogram.
    """
    async with (
        acting_stack(client, redis_url, database_url) as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab,
    ):
        await opened(tab)
        found = {}
        for name, (width, height) in SIZES.items():
            await resize(tab, width, height)
            if name == "wall":
                await tab.call("Page.navigate", url=f"{stack.url}/internal/dashboard?wall")
                await tab.until(f"document.body?.className === 'wall' && {WORKERS} > 0", "wall mode")
            if name in ("360", "wall"):
                await tab.value(FLOOD)
            await tab.until("document.querySelectorAll('#reasons li').length === 14", "the reasons")
            header = await tab.value("document.getElementById('status').getBoundingClientRect().height / innerHeight")
            found[name] = (
                header <= 0.25,
                await tab.value(OVERPRINTED),
                await tab.value("document.body.innerText.includes('`')"),
                await tab.value("document.documentElement.scrollWidth <= innerWidth"),
            )
            if name == "phone":
                assert await violations(tab) == []

        assert found == dict.fromkeys(SIZES, (True, [], False, True))
        cells = await tab.value(
            "[...document.querySelectorAll('#tiers tbody tr:first-child td')].map(each => each.textContent)"
        )
        assert cells[7:10] == ["≤ 203 ms", "≤ 256 ms", "≤ 1.1 s"]
        assert tab.faults == []
