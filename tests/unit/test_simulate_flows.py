"""The aggregated mode of simulations, compared with the mode that simulates each request."""

from typing import Any

import pytest

from tierlane_tools.simulate.flows import FlowSimulation
from tierlane_tools.simulate.run import RequestSimulation
from tierlane_tools.simulate.scenario import DEFAULTS, merged, scenario_from

POOL: dict[str, Any] = {
    "gpus": 10,
    "duration_s": 8,
    "warmup_s": 3,
    "costs": {"batch_ms": 100},
    "model": {"max_batch_size": 8},
    "customers": {
        "acme": {"tier": "enterprise", "rate": 160},
        "shop": {"tier": "paid", "count": 3, "rate": 40},
        "crowd": {"tier": "free", "count": 10, "rate": 12},
    },
}


def both(**fields: Any) -> list[dict[str, Any]]:
    """The documents of both modes."""
    scenario = scenario_from(merged(merged(DEFAULTS, POOL), fields))
    modes = (RequestSimulation(scenario), FlowSimulation(scenario))
    return [mode.run().document(scenario.warmup_s, scenario.ends_s) for mode in modes]


@pytest.mark.parametrize("crowd", [12.0, 30.0, 120.0], ids=["half", "full", "flood"])
def test_the_modes_agree(crowd: float) -> None:
    """At half load, full load and in a flood: goodput, rejected, busy GPUs and p50 within 10 %, p99 of what is not rejected 20 %."""
    requests, flows = both(customers={"crowd": {"rate": crowd}})

    assert flows["gpus"]["busy"] == pytest.approx(requests["gpus"]["busy"], rel=0.1)
    for one, other in zip(requests["classes"], flows["classes"], strict=True):
        assert other["completed"] == pytest.approx(one["completed"], rel=0.1)
        assert other["refused"] == pytest.approx(one["refused"], rel=0.1, abs=0.02 * one["arrivals"])
        assert other["p50_ms"] == pytest.approx(one["p50_ms"], rel=0.1)
        if one["refused"] < 0.01 * one["arrivals"]:
            assert other["p99_ms"] == pytest.approx(one["p99_ms"], rel=0.2)


def test_own_limits_agree() -> None:
    """Customers over their own limits, and one that is not."""
    limits = {"requests_per_second": 10, "burst": 10}
    requests, flows = both(customers={"crowd": {"rate": 25, "limits": limits}, "acme": {"limits": {"burst": 50}}})

    for one, other in zip(requests["classes"], flows["classes"], strict=True):
        assert other["refused_by_code"].keys() == one["refused_by_code"].keys()
        assert other["refused"] == pytest.approx(one["refused"], rel=0.1)


def test_cells_agree() -> None:
    """Load that jumps into one of three cells: where the workers are at the end, and what is completed."""
    customers = {
        "shop": None,
        "crowd": {"rate": [[0, 10], [5, 120]], "cells": ["cell-3"]},
        "acme": {"count": 16, "rate": 10},
    }
    requests, flows = both(gpus=30, cells={"count": 3}, customers=customers)

    workers = [document["timeline"]["cells"]["cell-3"]["workers"][-1] for document in (requests, flows)]
    assert workers[1] == pytest.approx(workers[0], abs=2)
    assert min(workers) > 14
    for one, other in zip(requests["classes"], flows["classes"], strict=True):
        assert other["completed"] == pytest.approx(one["completed"], rel=0.1)


def test_a_lost_cell_and_lost_gpus() -> None:
    """Customers of the other cell are as before; no request disappears; workers stay where the cell was lost."""
    changes = [{"at_s": 5, "cell": "cell-1", "state": "lost"}, {"at_s": 8, "gpus": 16}]
    customers = {"shop": {"cells": ["cell-1"]}, "acme": {"cells": ["cell-2"]}, "crowd": {"rate": 6}}
    requests, flows = both(gpus=20, cells={"count": 2, "outage_s": 1}, customers=customers, changes=changes)

    for document in (requests, flows):
        acme, shop, _ = document["classes"]
        assert (acme["refused"], acme["failed"]) == (0, 0)
        assert acme["p95_ms"] < 150
        assert shop["p99_ms"] > 500
        assert all(each["unfinished"] < 0.02 * each["arrivals"] for each in document["classes"])
        last = [each["workers"][-1] for each in document["timeline"]["cells"].values()]
        assert sum(last) == 16


def test_a_large_system_is_a_question_of_seconds() -> None:
    """Ten cells, 100,000 requests/s and 10,000 GPUs: all of them are counted, and equal seeds give equal results."""
    fields = {
        "gpus": 10_000,
        "duration_s": 2,
        "warmup_s": 1,
        "cells": {"count": 10},
        "customers": {"shop": {"count": 3000, "rate": 30}, "crowd": {"count": 5000, "rate": 2}},
    }
    scenario = scenario_from(merged(merged(DEFAULTS, POOL), fields))

    one, same = (FlowSimulation(scenario).run().document(1, 3) for _ in range(2))

    assert one == same
    assert one["requests"] == pytest.approx(2 * scenario.offered() / 3, rel=0.01)
    assert sum(each["workers"][-1] for each in one["timeline"]["cells"].values()) == 10_000
