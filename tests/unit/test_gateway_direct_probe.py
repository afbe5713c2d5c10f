"""The probe of workers' direct endpoints: who cannot be called is named before an outage, at a slow rate."""

from dataclasses import dataclass, field

import pytest

from direct_parts import FakeEndpoint
from gateway.direct.mode import DirectView
from gateway.direct.workers import FAILED_INTERVAL_S, HEALTHY_INTERVAL_S, DirectProbe
from gateway.operations.health_checks import health
from health_inputs import health_inputs
from scheduler.protocol.direct import Hello
from scheduler.protocol.pool_view import WorkerView


@dataclass
class Scene:
    """A probe whose clock is the test's."""

    workers: list[WorkerView] = field(default_factory=list)
    now: float = 0.0
    enabled: bool = True

    def __post_init__(self) -> None:
        self.probe = DirectProbe(lambda: self.workers, lambda: self.enabled, Hello("g1", "token"), lambda: self.now)

    async def looks(self, count: int, every_s: float = 1.0) -> list[str]:
        """So many looks; who is unreachable after them."""
        for _ in range(count):
            await self.probe.probe_next()
            self.now += every_s
        return [each.worker_id for each in self.probe.unreachable]


def worker(name: str, address: str, *, healthy: bool = True) -> WorkerView:
    return WorkerView(name, "ready", 0.0, 0, 10.0, healthy, 0.0, 0.0, "simulated", "v1", direct=address)


async def test_who_answers_is_probed_each_half_minute() -> None:
    """One connection, a hello, and its end; none at all while probes are not enabled."""
    async with FakeEndpoint() as endpoint:
        scene = Scene([worker("w1", endpoint.address)])
        scene.enabled = False
        assert await scene.looks(3) == []
        assert endpoint.hellos == []

        scene.enabled = True
        assert await scene.looks(int(HEALTHY_INTERVAL_S) + 1) == []

        assert [hello.token for hello in endpoint.hellos] == ["token"] * 2


async def test_an_address_that_nobody_has_is_named() -> None:
    """From the second failure on, by worker and address; it is forgotten with the worker, and once it answers."""
    async with FakeEndpoint() as endpoint:
        scene = Scene([worker("w1", "no-such-host.invalid:81"), worker("w2", endpoint.address)])
        assert await scene.looks(2) == []
        assert await scene.looks(2, FAILED_INTERVAL_S) == ["w1"]
        (unreachable,) = scene.probe.unreachable
        assert (unreachable.address, "no-such-host.invalid:81" in unreachable.why) == ("no-such-host.invalid:81", True)

        scene.workers = [worker("w1", endpoint.address), worker("w3", "no-such-host.invalid:81", healthy=False)]
        assert await scene.looks(4, FAILED_INTERVAL_S) == []


async def test_a_wrong_token_is_named() -> None:
    """The worker ends the connection without a welcome."""
    async with FakeEndpoint() as endpoint:
        endpoint.behaviour = "unfriendly"
        scene = Scene([worker("w1", endpoint.address)])

        assert await scene.looks(3, FAILED_INTERVAL_S) == ["w1"]

        assert "TIERLANE_DIRECT_TOKEN" in scene.probe.unreachable[0].why


@pytest.mark.parametrize("reachable", [True, False])
async def test_health_says_whom_and_what_to_do(*, reachable: bool) -> None:
    """Degraded, with worker, address and the setting."""
    scene = Scene([] if reachable else [worker("w1", "no-such-host.invalid:81")])
    await scene.looks(3, FAILED_INTERVAL_S)
    view = DirectView(
        active=False,
        for_s=0.0,
        workers=0,
        serves=False,
        waiting=0,
        spool_bytes=0,
        spool_problem=None,
        bad_lines=0,
        unreachable=scene.probe.unreachable,
    )

    _, document = health(health_inputs(observation=None, direct=view))

    said = " ".join(document["reasons"])
    assert ("w1" in said, "no-such-host.invalid:81" in said, "TIERLANE_DIRECT_ADVERTISE" in said) == (
        not reachable,
    ) * 3
    assert document["checks"]["direct:endpoints"][0]["status"] == ("pass" if reachable else "warn")
