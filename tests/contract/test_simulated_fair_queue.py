"""The model of fair queueing in `tierlane simulate` serves customers as the scripts do."""

from collections import Counter
from random import Random

import pytest

from contract.test_fair_queue import WIDE
from pool import Pool, done
from tierlane_tools.simulate.fair_queue import FairQueue, QueuedRequest

CUSTOMERS = {"a": (1.0, 10.0), "b": (2.0, 10.0), "c": (1.0, 40.0), "d": (0.5, 5.0)}
"""Weight and cost of a request in ms."""
SIZE = 4


@pytest.mark.parametrize("seed", range(6))
async def test_the_model_serves_as_the_scripts_do(pool: Pool, seed: int) -> None:
    """Random arrivals in bursts: after each batch, each customer has had the same number of requests served, but for one batch."""
    random, names = Random(seed), list(CUSTOMERS)
    model = FairQueue(WIDE[0].places, lambda _: True)
    owner: dict[str, str] = {}
    served, modelled = Counter[str](), Counter[str]()
    await pool.gateway_stays("g1")
    for step in range(60):
        if step < 40:
            name = random.choice(names)
            count = random.choice((1, 1, 5, 30))
            fields = {"customer_id": name, "weight": CUSTOMERS[name][0], "total_ms": 600_000, "queue_ms": 600_000}
            submissions = [pool.submission(**fields) for _ in range(count)]
            await pool.admit(submissions, WIDE)
            owner |= {each.id: name for each in submissions}
            for _ in range(count):
                model.push(QueuedRequest(names.index(name), 0.0, 600.0, 600.0, 1.0), CUSTOMERS[name][0])
        await pool.form([("free", SIZE)])
        if not (batch_id := await pool.pop()):
            break
        batch = await pool.batches.claim(batch_id, "w1", f"token-{step}")
        assert batch is not None
        outcomes = [done(each.id)._replace(cost_ms=CUSTOMERS[owner[each.id]][1]) for each in batch.requests]
        assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0
        served.update(owner[each.id] for each in batch.requests)
        taken, quiet_only, _ = model.take(SIZE, alone=True)
        empty = 1 - len(taken) / SIZE if quiet_only else 0.0
        model.settle([(each, CUSTOMERS[names[each.customer]][1]) for each in taken], empty)
        modelled.update(names[each.customer] for each in taken)

        differences = {name: modelled[name] - served[name] for name in names}
        assert {name: each for name, each in differences.items() if abs(each) > SIZE} == {}

    assert sum(served.values()) > 100
