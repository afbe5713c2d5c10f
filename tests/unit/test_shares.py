"""The parts of a customer's limits in its cells: the policy, and the bookkeeping of what may be in force."""

import itertools
import random

import pytest

from identities import identity
from ratelimit.limits import REQUEST_BUCKET, Bucket, effective, usable_spread, values
from scheduler.cells.allotter import is_quorum
from scheduler.cells.division import OVER, Division, Ends, SharedCustomer
from scheduler.cells.shares import (
    LEAST,
    WHOLE,
    LeasedPart,
    grants,
    least_part,
    parts_by_demand,
    raised,
    smoothed,
    steady,
)
from scheduler.protocol.limits import REMOVED, Grant, GrantState, Parts, PartsOrder, PartsState

CELLS = ("default", "east", "north", "west")
RATE, BURST, CONCURRENCY = 1000.0, 2000.0, 500
NONE = (0, 0, 0)


@pytest.mark.parametrize(
    ("demand", "parts"),
    [
        # no demand: even parts
        ({"a": 0, "b": 0, "c": 0, "d": 0}, {"a": 2500, "b": 2500, "c": 2500, "d": 2500}),
        # all demand in one cell: the others keep a tenth of an even part
        ({"a": 3000, "b": 0, "c": 0, "d": 0}, {"a": 9106, "b": 297, "c": 297, "d": 297}),
        # in proportion to the demand, above and below the limit
        ({"a": 2000, "b": 1000}, {"a": 6468, "b": 3531}),
        ({"a": 20, "b": 10}, {"a": 6264, "b": 3735}),
        # one cell has everything
        ({"a": 0}, {"a": 10_000}),
    ],
)
def test_parts_follow_the_demand(demand: dict[str, float], parts: dict[str, int]) -> None:
    """The sum is never above the whole, and no cell has less than the least part."""
    least = least_part(len(demand), BURST, CONCURRENCY)
    found = parts_by_demand(demand, least)

    assert found == parts
    assert sum(found.values()) <= WHOLE
    assert min(found.values()) >= least


def test_the_parts_of_any_demand_leave_less_than_a_tenth_unused() -> None:
    """At three times the limit, however uneven: a cell's part is used up to its demand."""
    draw = random.Random(25)
    for count in (2, 4, 16, 64):
        least = least_part(count, 1e6, 1e6)
        for _ in range(200):
            raw = [draw.expovariate(1) ** draw.choice([0, 1, 4]) for _ in range(count)]
            demand = {str(cell): 3 * RATE * part / sum(raw) for cell, part in enumerate(raw)}
            found = parts_by_demand(demand, least)
            used = sum(min(demand[cell], RATE * part / WHOLE) for cell, part in found.items())
            assert sum(found.values()) <= WHOLE
            assert used >= (1 - LEAST) * RATE * 0.98


@pytest.mark.parametrize(
    ("cells", "burst", "concurrency", "least"),
    [
        (4, 1e6, 1e6, 250),  # a tenth of an even part
        (4, 1e6, 0, 250),  # no concurrency limit
        (4, 40, 1e6, 500),  # half of it is one request
        (4, 1e6, 40, 500),
        (4, 12, 12, 1668),
        (64, 1e6, 1e6, 16),
    ],
)
def test_the_least_part(cells: int, burst: float, concurrency: int, least: int) -> None:
    """Half of it, which holds after a lease, admits a request."""
    found = least_part(cells, burst, concurrency)

    assert found == least
    assert found // 2 * burst / WHOLE >= 1
    assert cells * found <= WHOLE


@pytest.mark.parametrize(
    ("burst", "concurrency", "spread", "usable"), [(100, 100, 4, 4), (11, 100, 4, 3), (100, 5, 4, 1), (1, 1, 64, 1)]
)
def test_a_customer_uses_as_many_cells_as_its_limits_allow(
    burst: float, concurrency: int, spread: int, usable: int
) -> None:
    """Each of them must be able to admit a request with half of an even part."""
    assert usable_spread(values(burst=burst, max_concurrency=concurrency), spread) == usable


def test_a_reduced_limit_leaves_each_cell_a_request() -> None:
    """Also with a twentieth of its even part; the rate is reduced all the same."""
    limits = effective(identity(requests_per_second=100.0, burst=500.0, spread=4), 0.01)
    assert (limits.buckets[0].rate, limits.buckets[0].size) == (1.0, 80.0)

    small = effective(identity(requests_per_second=100.0, burst=50.0, spread=4), 0.01)
    assert small.buckets[0].size == 50.0


def test_small_changes_of_demand_change_no_part() -> None:
    """Because a bucket whose part is lowered loses tokens."""
    now = {"a": 6000, "b": 4000}

    assert steady(now, {"a": 6200, "b": 3800}) == now
    assert steady(now, {"a": 6201, "b": 3799}) == {"a": 6201, "b": 3799}
    assert steady({"a": WHOLE}, {"b": WHOLE}) == {"b": WHOLE}


def test_parts_do_not_oscillate() -> None:
    """A steady demand with noise of a tenth changes the parts at most twice in 45 s, once they follow it."""
    draw = random.Random(25)
    demand = {"a": 0.0, "b": 0.0}
    parts: dict[str, int] = {}
    history = []
    for _ in range(60):
        arrivals = {"a": round(2000 * draw.uniform(0.9, 1.1)), "b": round(1000 * draw.uniform(0.9, 1.1))}
        demand = {cell: smoothed(before, arrivals[cell], 1.0) for cell, before in demand.items()}
        parts = steady(parts, parts_by_demand(demand, 500))
        history.append(parts["a"])

    assert sum(one != other for one, other in itertools.pairwise(history[15:])) <= 2
    assert history[15:] == pytest.approx([6468] * 45, abs=300)


@pytest.mark.parametrize(
    ("free", "lacking", "added"),
    [
        (100, {"a": 30, "b": 0}, {"a": 30}),
        (100, {"a": 150, "b": 50}, {"a": 75, "b": 25}),
        (1, {"a": 2, "b": 2}, {}),
        (0, {"a": 2}, {}),
        (-50, {"a": 2}, {}),
    ],
)
def test_parts_are_raised_by_what_is_free(free: int, lacking: dict[str, int], added: dict[str, int]) -> None:
    """In proportion to what they lack, and never by more."""
    assert raised(free, lacking) == added


@pytest.mark.parametrize(
    ("amount", "spent", "reserved", "granted"),
    [
        (100, {"a": 10, "b": 30}, 0, {"a": 55, "b": 45}),
        (100, {"a": 10, "b": 30}, 20, {"a": 40, "b": 40}),
        (41, {"a": 10, "b": 30}, 0, {"a": 11, "b": 30}),  # the last unit is in the cell with the most demand
        (40, {"a": 10, "b": 30}, 0, {"a": 10, "b": 30}),
        (30, {"a": 10, "b": 30}, 0, {"a": 10, "b": 30}),  # lowered below what was spent
    ],
)
def test_grants(amount: int, spent: dict[str, int], reserved: int, granted: dict[str, int]) -> None:
    """What was spent, and a part of the rest: together the whole quota."""
    found = grants(amount, spent, reserved, {"a": 7500, "b": 2500})

    assert found == granted
    assert sum(found.values()) + reserved == amount or amount < sum(spent.values())


def test_what_may_be_in_force() -> None:
    """A call without a reply counts with the larger part until it is over for certain; then half of that holds."""
    part = LeasedPart()
    part.acknowledged(3000, 13.0)
    part.sent(1000, 11.0, 14.0)
    assert [part.held(now) for now in (11.0, 13.5, 14.0)] == [3000, 3000, 1500]

    part.acknowledged(1000, 14.0)
    assert (part.share, part.held(12.0)) == (1000, 1000)
    part.sent(5001, 20.0, 23.0)
    assert [part.held(now) for now in (20.0, 23.0)] == [5001, 2501]


@pytest.mark.parametrize(
    ("cells", "result"),
    [
        ((), False),
        (("default", "east"), True),
        (("north", "west"), False),
        (("east", "north", "west"), True),
        (("gone", "east", "north"), False),
    ],
)
def test_most_cells(cells: tuple[str, ...], result: bool) -> None:
    """Of an even number of cells, half of them with the default one."""
    assert is_quorum(cells, CELLS) is result


def test_two_quorums_have_a_cell_in_common() -> None:
    """So that two allotters cannot be active."""
    for size in range(1, 6):
        every = ("default", *"bcdef"[: size - 1])
        sets = [set(c) for n in range(size + 1) for c in itertools.combinations(every, n) if is_quorum(c, every)]
        assert all(one & other for one in sets for other in sets)


# The division of one customer


LEASE = Ends(9.0, 39.0)


def division(**changes: object) -> Division:
    """Of a customer of four cells."""
    customer = SharedCustomer("c1", CELLS, (Bucket(REQUEST_BUCKET, RATE, BURST),), CONCURRENCY)
    found = Division(customer._replace(**changes))  # type: ignore[arg-type]
    found.plan(CELLS)
    return found


def learn(of: Division, cell: str, parts: Parts, *, open_requests: int = 0, ends: Ends = LEASE) -> None:
    """A reply to a call that set these parts."""
    order = PartsOrder("c1", (), parts)
    of.learned(cell, order, PartsState(parts, 3000, open_requests, 0, []), 1000, ends)


def lowered(of: Division, cell: str, now: float = 1.0) -> Parts | None:
    """What is sent to a cell first."""
    order = of.lowering(cell, now, NONE, CELLS)
    return None if order is None else order.parts


def test_parts_begin_with_nothing_and_are_raised_by_what_is_free() -> None:
    """Cells that answer get their parts; the others' stay free."""
    of = division()
    for cell in CELLS[:3]:
        assert lowered(of, cell) == Parts(0, 0, 0)
        learn(of, cell, Parts(0, 0, 0))
    orders = of.raising(1.0, NONE, CELLS[:3])

    assert {cell: order.parts for cell, order in orders.items()} == dict.fromkeys(CELLS[:3], Parts(2500, 2500, 2500))


def test_nothing_is_raised_before_another_cell_has_lowered_its_part() -> None:
    """With a call that failed, its larger part counts until its lease is over; its concurrency for longer."""
    of = division()
    learn(of, "default", Parts(7000, 7000, 2500))
    for cell in CELLS[1:]:
        learn(of, cell, Parts(1000, 1000, 2500), ends=Ends(20.0, 50.0))
    order = of.lowering("default", 1.0, NONE, CELLS)
    assert order is not None
    assert order.parts == Parts(2500, 2500, 2500)
    of.sent("default", order, 1.0, Ends(4.0, 34.0))

    assert of.raising(1.0, NONE, CELLS[1:]) == {}
    later = of.raising(9.0, NONE, CELLS[1:])
    assert {cell: order.parts for cell, order in later.items()} == dict.fromkeys(CELLS[1:], Parts(2166, 1000, 2500))


def test_open_requests_count_although_their_part_was_lowered() -> None:
    """The concurrency of others is not raised before they have ended."""
    of = division()
    learn(of, "default", Parts(2500, 2500, 2500), open_requests=350)
    for cell in CELLS[1:]:
        learn(of, cell, Parts(1000, 1000, 2500))

    parts = of.raising(1.0, NONE, CELLS)["east"].parts
    assert parts == Parts(2500, 1000, 2500)
    assert of.held(1.0) == (5500, 10_000, 10_000)


def test_cells_that_have_not_answered_count_with_what_is_reserved() -> None:
    """An allotter that begins does not know what they have."""
    of = division()
    for cell in CELLS[:3]:
        learn(of, cell, Parts(1000, 1000, 1000))

    assert of.raising(1.0, (7000, 7000, 7000), CELLS[:3]) == {}
    assert of.raising(1.0, (6700, 6700, 6700), CELLS[:3])["east"].parts == Parts(1100, 1100, 1100)


def test_a_lease_that_has_ended_is_half_as_large() -> None:
    """Until it is raised again by what is free."""
    of = division()
    order = PartsOrder("c1", (), None)
    of.learned("default", order, PartsState(Parts(6000, 6000, 2500), 0, 0, 0, []), 1000, OVER)

    assert of.held(1.0) == (3000, 3000, 2500)
    assert lowered(of, "default") == Parts(2500, 2500, 2500)


def test_one_cell_again() -> None:
    """The others are lowered to nothing, then it gets everything, and then no cell has parts."""
    of = division(cells=("default",), shared=False)
    for cell in CELLS:
        learn(of, cell, Parts(2500, 2500, 2500))
    assert [lowered(of, cell) for cell in CELLS[:2]] == [Parts(2500, 2500, 2500), Parts(0, 0, 0)]
    for cell in CELLS[1:]:
        learn(of, cell, Parts(0, 0, 0))
    assert of.raising(1.0, NONE, CELLS)["default"].parts == Parts(WHOLE, WHOLE, WHOLE)
    learn(of, "default", Parts(WHOLE, WHOLE, WHOLE))

    assert {lowered(of, cell) for cell in CELLS} == {REMOVED}


def test_a_cell_that_is_closed_uses_nothing() -> None:
    """Its part is free at once."""
    of = division(cells=CELLS[:3])
    for cell in CELLS:
        learn(of, cell, Parts(2500, 2500, 2500))
    assert of.raising(1.0, NONE, CELLS) == {}
    of.forget("west")

    assert of.raising(1.0, NONE, CELLS)["east"].parts == Parts(3333, 3333, 3333)


# Quotas


def learn_quota(of: Division, cell: str, state: GrantState) -> None:
    """A reply with the state of the quota."""
    parts = Parts(2500, 2500, 2500)
    of.learned(
        cell, PartsOrder("c1", (), parts, [Grant("1day", 100)]), PartsState(parts, 3000, 0, 0, [state]), 1000, LEASE
    )


def granted(orders: dict[str, PartsOrder]) -> dict[str, int]:
    """The grants in orders."""
    return {cell: order.grants[0].grant for cell, order in orders.items()}


def test_grants_move_to_the_cells_that_spend() -> None:
    """First the others shrink, to no less than what they have spent."""
    of = division(quotas=(("1day", 100),))
    for cell, spent in zip(CELLS, (25, 5, 0, 0), strict=True):
        learn_quota(of, cell, GrantState(7, spent, 25))
    assert of.raising(1.0, NONE, CELLS) == {}

    first = {cell: of.lowering(cell, 1.0, NONE, CELLS) for cell in CELLS}
    assert granted({cell: order for cell, order in first.items() if order}) == {
        "default": 25,
        "east": 22,
        "north": 17,
        "west": 19,
    }
    for cell, state in zip(CELLS, ((25, 25), (6, 22), (0, 17), (0, 19)), strict=True):
        learn_quota(of, cell, GrantState(7, *state))
    assert granted(of.raising(1.0, NONE, CELLS)) == {"default": 41}


def lose(of: Division, cell: str, now_ms: int) -> None:
    """A reply of a cell that has lost its data."""
    order = PartsOrder("c1", (), None, [Grant("1day", 100)])
    of.learned(cell, order, PartsState(None, 0, 0, 0, [GrantState(7, 0, 0)]), now_ms, OVER)


def test_a_cell_that_does_not_answer_keeps_its_grant() -> None:
    """One that has not begun the window counts with its part of it."""
    of = division(quotas=(("1day", 100),))
    for cell in CELLS[:2]:
        learn_quota(of, cell, GrantState(7, 0, 0))
    learn_quota(of, "north", GrantState(6, 90, 90))
    learn_quota(of, "west", GrantState(7, 10, 40))

    assert granted(of.raising(1.0, NONE, CELLS[:2])) == {"default": 17, "east": 18}


@pytest.mark.parametrize(("after_ms", "lost"), [(1000, 10), (60_000, 40)])
def test_what_a_cell_spent_before_it_lost_its_data_is_spent(after_ms: int, lost: int) -> None:
    """All that it was granted, if it did not answer for a while before."""
    of = division(quotas=(("1day", 100),))
    for cell in CELLS[:3]:
        learn_quota(of, cell, GrantState(7, 0, 0))
    learn_quota(of, "west", GrantState(7, 10, 40))
    lose(of, "west", 1000 + after_ms)

    assert sum(granted(of.raising(1.0, NONE, CELLS)).values()) == 100 - lost
    assert of.unaudited


@pytest.mark.parametrize(("window", "units", "left"), [(7, 30, 70), (7, 5, 90), (6, 100, 90)])
def test_what_only_the_audit_has_is_spent(window: int, units: int, left: int) -> None:
    """So it is after all cells lost their data. The audit may know less than the cells."""
    of = division(quotas=(("1day", 100),))
    for cell in CELLS:
        learn_quota(of, cell, GrantState(7, 10 if cell == "west" else 0, 10 if cell == "west" else 0))
    of.audited({"1day": (window, units)})

    orders = of.raising(1.0, NONE, CELLS)
    more = sum(order.grants[0].grant for cell, order in orders.items() if cell != "west")
    west = orders["west"].grants[0].grant - 10 if "west" in orders else 0
    assert more + west == left
    assert not of.unaudited


def test_what_cells_were_granted_that_have_not_answered() -> None:
    """At most what the others were not granted, in the window that had begun; also if that is more than an even part."""
    of = division(quotas=(("1day", 100),))
    for cell in CELLS[:2]:
        learn_quota(of, cell, GrantState(7, 10, 12))
    of.reserve_grants()
    assert of.raising(1.0, (0, 0, 5000), CELLS[:2]) == {}

    for cell in CELLS[:2]:
        learn_quota(of, cell, GrantState(8, 0, 25))
    assert of.raising(1.0, (0, 0, 5000), CELLS[:2]) == {}
    for cell in CELLS[2:]:
        learn_quota(of, cell, GrantState(8, 0, 0))
    of.all_known()
    assert sum(granted(of.raising(1.0, NONE, CELLS)).values()) == 50
