"""The model of fair queueing in simulations: literal orders, costs that are settled, quiet customers."""

import pytest

from tierlane_tools.simulate.fair_queue import FairQueue, QueuedRequest


def request(customer: int, arrived_s: float = 0.0) -> QueuedRequest:
    return QueuedRequest(customer, arrived_s, arrived_s + 2, arrived_s + 4, 10.0)


def queue_of(customers: str, places: int = 0, weights: dict[int, float] | None = None) -> FairQueue:
    """A queue with requests of these customers, in order."""
    queue = FairQueue(places, lambda _: True)
    for customer in map(int, customers):
        queue.push(request(customer), (weights or {}).get(customer, 1.0))
    return queue


def leave(queue: FairQueue, places: int) -> str:
    taken, _, _ = queue.take(places, alone=True)
    return "".join(str(each.customer) for each in taken)


@pytest.mark.parametrize(
    ("customers", "places", "weights", "order"),
    [
        ("1112", 4, {}, "1112"),  # in the places of the queue, in order of arrival
        ("11112222", 0, {}, "12121212"),
        ("1111222", 2, {}, "1112122"),  # two places, then in turns
        ("111111222222", 0, {1: 2.0}, "121211211222"),
        ("111123", 0, {}, "123111"),
    ],
)
def test_order(customers: str, places: int, weights: dict[int, float], order: str) -> None:
    """Customers with a backlog take turns, by weight; the requests of each leave in order."""
    queue = queue_of(customers, places, weights)

    assert leave(queue, len(customers)) == order
    assert (queue.depth, queue.weights) == (0, 0)


def test_settled_costs_change_the_order() -> None:
    """A customer whose requests cost three times as much gets a third of the places."""
    queue = queue_of("12" * 30)
    counts = {1: 0, 2: 0}
    for _ in range(20):
        taken, _, _ = queue.take(2, alone=True)
        for each in taken:
            counts[each.customer] += 1
        queue.settle([(each, 30.0 if each.customer == 1 else 10.0) for each in taken], 0.0)

    assert counts[2] / counts[1] == pytest.approx(3, rel=0.35)


def test_a_quiet_customer_leaves_in_a_batch_of_its_own() -> None:
    """It has no backlog and less than its share: its batch leaves first, as long as empty places have time left."""
    queue = queue_of("11111111")
    assert leave(queue, 4) == "1111"

    urgent = queue.push(request(2), 1.0)
    taken, quiet_only, first = queue.take(4, alone=True)

    assert (urgent, quiet_only, first) == (True, True, True)
    assert [each.customer for each in taken] == [2]


def test_quiet_customers_wait_for_one_batch_when_empty_places_cost_too_much() -> None:
    """Then others fill their batch."""
    queue = queue_of("1111" * 5)
    taken, _, _ = queue.take(4, alone=True)
    queue.settle([(each, 10.0) for each in taken], 1.0)  # Half a batch of empty places: more than 2 %.
    queue.push(request(2), 1.0)

    assert leave(queue, 4) == "1111"
    taken, quiet_only, first = queue.take(4, alone=True)
    assert taken[0].customer == 2
    assert (len(taken), quiet_only, first) == (4, False, True)


def test_requests_that_may_not_run_take_no_place() -> None:
    """They have ended; others get their places."""
    queue = FairQueue(2, lambda each: each.customer != 1)
    for customer in (1, 2, 1, 3, 3):
        queue.push(request(customer), 1.0)

    assert leave(queue, 2) == "23"
    assert leave(queue, 2) == "3"
    assert queue.depth == 0


def test_expired_requests_are_dropped_at_the_heads() -> None:
    """Of the tier queue and of each backlog."""
    ended: list[int] = []
    queue = FairQueue(1, lambda each: ended.append(each.customer) is None and False)
    for customer, at in ((1, 0.0), (2, 0.0), (3, 5.0), (2, 5.0)):
        queue.push(request(customer, at), 1.0)

    queue.drop_expired(3.0)

    assert (ended, queue.depth, queue.in_backlogs, queue.weights) == ([1, 2], 2, 2, 2)
