"""Requests that wait for the limits of their customers: who is asked, how often, and what ends the wait."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from customer_limits import in_force
from gateway.cells import Homes
from gateway.inference.pending import Outcome, PendingRequest
from gateway.limits.handover import HELD_S, MAX_HELD, Handover
from ledger.catalog.snapshot import CellRow
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.admission import Residence, Submission, SubmissionGroup, Verdict
from scheduler.protocol.handover import MAX_CUSTOMERS, ArrivingLimits, Left, Wanted
from scheduler.states import Admission

NOTHING = msgspec.Raw(b"\x90")


class FakeScripts:
    """The scripts of one cell. `newer`: the version of the catalog that decided last."""

    def __init__(self) -> None:
        self.newer = 0
        self.is_away = False
        self.is_home = False
        self.asked: list[Mapping[str, Wanted]] = []
        self.known: frozenset[str] = frozenset()
        self.arrived: list[ArrivingLimits] = []
        self.calls = 0

    async def leave(self, version: int, customers: Mapping[str, Wanted]) -> dict[str, Left]:
        self.asked.append(dict(customers))
        if self.is_away:
            raise RedisUnavailable("away")
        return {
            each: Left(self.newer if self.newer > version else 0, NOTHING, self.known, self.is_home)
            for each in customers
        }

    async def arrive(self, version: int, arrivals: Sequence[ArrivingLimits]) -> list[int]:
        self.calls += 1
        if self.is_away:
            raise RedisUnavailable("away")
        refused = self.newer if self.newer > version else 0
        self.arrived += [] if refused else arrivals
        return [refused] * len(arrivals)


class World:
    """The place of the default cell, beside `west`. `submitted`: the requests that were admitted again."""

    def __init__(self, *rows: CellRow) -> None:
        self.now = 0.0
        self.age_s = 0.0
        self.own, self.west = FakeScripts(), FakeScripts()
        snapshot = SimpleNamespace(version=5, cells=rows, customers={})
        self.catalog: Any = SimpleNamespace(snapshot=snapshot, age_s=lambda: self.age_s)
        self.submitted: list[str] = []
        self.ends: dict[str, Outcome] = {}
        self.handover, other = self._handover(self.own, "default"), self._handover(self.west, "west")
        self.others: dict[str, Handover] = {"west": other}
        self.west_answers = True

    def _handover(self, scripts: Any, cell: str) -> Handover:
        answers = (lambda: self.west_answers) if cell == "west" else (lambda: True)
        return Handover(
            scripts,
            self.catalog,
            cell,
            homes=Homes(self.catalog),
            others=lambda: self.others,
            answers=answers,
            clock=lambda: self.now,
        )

    def hold(self, customer_id: str = "c1", key_rate: float = 0.0, key: str = "", **changes: Any) -> PendingRequest:
        """Keep one request."""
        limits = in_force(key_rate=key_rate, key_burst=key_rate)
        submission = Submission(
            id=f"req_{len(self.ends)}-{customer_id}",
            group=SubmissionGroup("free", customer_id, "key", "tiny", limits),
            nonce="",
            input_bytes=1,
            total_ms=4000,
            queue_ms=2000,
            idempotency=key,
            body=b"",
        )
        pending = PendingRequest(submission, self.now, lambda outcome: self.ends.update({submission.id: outcome}))
        for name, value in changes.items():
            setattr(pending, name, value)
        self.handover.hold(pending, self._submit)
        return pending

    def _submit(self, pending: PendingRequest) -> bool:
        self.submitted.append(pending.id)
        return True

    def home(self, cell: str, spread: int = 1) -> None:
        """Set the home of the customer c1."""
        self.catalog.snapshot.customers["c1"] = SimpleNamespace(cell=cell, spread=spread)


WEST, DRAINING = CellRow("west", None, "open", 1.0), CellRow("west", None, "draining", 1.0)


@pytest.fixture
def world() -> World:
    """The customer has its home in the default cell."""
    found = World(WEST)
    found.home("default")
    return found


async def test_the_limits_of_many_customers_arrive_in_few_calls() -> None:
    """With the limits of the keys that have their own."""
    world = World(DRAINING)
    for number in range(MAX_CUSTOMERS + 1):
        world.hold(f"customer-{number}", key_rate=2.0 if number == 1 else 0.0)

    await world.handover.turn()
    await world.handover.turn()

    assert (len(world.west.asked), world.own.calls) == (2, 2)
    assert len(world.own.arrived) == len(world.submitted) == MAX_CUSTOMERS + 1
    assert [each.customer_id for each in world.own.arrived if each.keys] == ["customer-1"]
    assert world.west.asked[0]["customer-1"] == Wanted(("key",))
    assert len(world.handover) == 0


async def test_a_request_is_submitted_in_the_cell_that_is_its_home_now(world: World) -> None:
    """Once that cell is served; nothing is asked for it."""
    pending = world.hold()
    world.home("west")
    others, world.others = world.others, {}
    await world.handover.turn()
    assert not pending.done

    world.others = others
    await world.handover.turn()

    assert pending.outcome == Verdict(Admission.ELSEWHERE)
    assert (world.west.asked, world.own.calls) == ([], 0)


async def test_the_home_by_a_newer_catalog_is_followed(world: World) -> None:
    """Without waiting for that catalog, if nothing else has to arrive there."""
    world.west.newer, world.west.is_home = 7, True
    plain = world.hold()
    await world.handover.turn()
    keyed = world.hold(key="key")
    await world.handover.turn()

    assert plain.outcome == Verdict(Admission.ELSEWHERE, stored_id="west")
    assert (keyed.outcome, world.submitted) == (None, [])


async def test_an_older_catalog_waits_for_the_newer_one(world: World) -> None:
    """Whichever cell knows it. If none arrives, the newest catalog there is counts after three seconds."""
    for scripts in (world.west, world.own):
        world.age_s = 10.0
        scripts.newer = 7
        world.hold()
        await world.handover.turn()
        world.now += 4.0
        await world.handover.turn()
        assert world.submitted == []

        world.age_s = 0.5
        await world.handover.turn()
        assert len(world.submitted) == 1
        world.submitted.clear()
        scripts.newer = 0


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_cell_that_does_not_respond_leaves_empty_buckets(world: World, is_known: bool) -> None:
    """A cell that is known to be lost is not even asked."""
    world.west.is_away, world.west_answers = True, not is_known
    world.hold()

    await world.handover.turn()

    assert [each.is_empty for each in world.own.arrived] == [True]
    assert len(world.west.asked) == (not is_known)
    assert len(world.submitted) == 1


async def test_a_lost_cell_that_was_hardly_the_former_home_changes_nothing() -> None:
    """An open cell that comes after the home in the order of cells; otherwise a lost cell would concern all customers."""
    world = World(WEST)
    ids = [f"customer-{number}" for number in range(20)]
    here = [each for each in ids if Homes(world.catalog).now(each)[1] == ("default",)]
    world.west.is_away = True
    for each in here:
        world.hold(each)

    await world.handover.turn()

    assert 0 < len(here) < len(ids)
    assert [each.is_empty for each in world.own.arrived] == [False] * len(here)


async def test_a_request_whose_key_another_cell_knows_is_submitted_there(world: World) -> None:
    """All others here, with the mark that the other cells were asked."""
    known, new = world.hold(key="known"), world.hold(key="new")
    world.west.known = frozenset({"known"})

    await world.handover.turn()

    assert known.outcome == Verdict(Admission.ELSEWHERE, stored_id="west")
    assert (world.submitted, new.submission.group.home) == ([new.id], Residence.ASKED)


async def test_without_redis_admission_decides(world: World) -> None:
    """It rejects the requests, or direct mode serves them."""
    world.hold()
    world.own.is_away = True

    await world.handover.turn()

    assert len(world.submitted) == 1


async def test_a_customer_of_several_cells_does_not_wait(world: World) -> None:
    """Its next admission does not check its home."""
    pending = world.hold()
    world.home("default", spread=2)

    await world.handover.turn()

    assert (pending.submission.group.home, len(world.submitted), world.own.calls) == (Residence.SPREAD, 1, 0)


async def test_nothing_is_asked_for_requests_that_ended(world: World) -> None:
    """By their clients, their deadlines, or direct mode. A job ends after five seconds."""
    world.hold(gone=True)
    world.hold(cancelled=True)
    taken = world.hold(direct=True)
    waiting = world.hold("c2")
    world.now = HELD_S + 1

    await world.handover.turn()

    assert (waiting.outcome, taken.outcome, len(world.handover)) == (ErrorCode.NO_CAPACITY, None, 0)
    assert (world.west.asked, world.submitted) == ([], [])


async def test_the_list_is_bounded(world: World) -> None:
    """What does not fit can be retried."""
    for number in range(MAX_HELD):
        world.hold(f"customer-{number % 100}")
    assert world.hold().outcome is ErrorCode.NO_CAPACITY
