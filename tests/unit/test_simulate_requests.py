"""Simulations request by request: virtual time, literal response times, limits, lost GPUs, cells, determinism."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tierlane_tools.simulate.events import Arrival, EventLoop
from tierlane_tools.simulate.recorded import from_file
from tierlane_tools.simulate.results import Figures
from tierlane_tools.simulate.run import RequestSimulation
from tierlane_tools.simulate.scenario import DEFAULTS, ScenarioError, SimulationScenario, merged, scenario_from

COSTS = {"batch_ms": 50, "dispatch_ms": 1, "call_ms": 2}


def scenario(**fields: Any) -> SimulationScenario:
    base = {"gpus": 1, "duration_s": 3, "warmup_s": 0, "costs": COSTS, "customers": {"acme": {"tier": "paid"}}}
    return scenario_from(merged(merged(DEFAULTS, base), fields))


def run(arrivals: list[Arrival], **fields: Any) -> dict[str, Any]:
    """The document of a run with these arrivals."""
    given = scenario(**fields)
    return document(given, RequestSimulation(given, arrivals).run())


def document(given: SimulationScenario, figures: Figures) -> dict[str, Any]:
    return figures.document(given.warmup_s, given.ends_s)


def test_calls_are_made_in_order_of_time() -> None:
    """Those of one time in the order in which they were added; later ones than the end are not made."""
    loop, made = EventLoop(), list[tuple[float, str]]()

    def note(name: str) -> None:
        made.append((loop.now, name))

    loop.at(2.0, note, "c")
    loop.at(1.0, note, "a")
    loop.at(1.0, note, "b")
    loop.at(9.0, note, "late")
    loop.at(2.0, lambda: loop.after(0.5, note, "d"))
    loop.run(3.0)

    assert made == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.5, "d")]
    assert loop.now == 3.0


@pytest.mark.parametrize(
    ("times", "p50_ms", "p99_ms"),
    [
        # an idle GPU: 1 ms until it runs, 50 ms, and 2 ms for the call
        ([1.0], 53, 53),
        # the second one arrives while the first runs, for 41 ms more
        ([1.0, 1.01], 53, 94),
        # the third one joins the batch of the second
        ([1.0, 1.01, 1.03], 74, 94),
        # two GPUs would be needed: a batch has two places, so the fourth one waits for the end of the second run
        ([1.0, 1.01, 1.03, 1.04], 74, 115),
    ],
)
def test_response_times(times: list[float], p50_ms: float, p99_ms: float) -> None:
    """Wait, run and overhead."""
    found = run([Arrival(time, 0, 10.0) for time in times], model={"max_batch_size": 2})["classes"][0]

    assert found["completed"] == len(times)
    assert found["p50_ms"] == pytest.approx(p50_ms, rel=0.01)
    assert found["p99_ms"] == pytest.approx(p99_ms, rel=0.01)


def test_a_bucket_rejects_as_the_real_one() -> None:
    """A burst of 3 and 2 requests/s: of ten at once three are accepted, and two in each further second."""
    limits = {"requests_per_second": 2, "burst": 3}
    arrivals = [Arrival(0.5, 0, 10.0)] * 10 + [Arrival(1.6, 0, 10.0)] * 10 + [Arrival(2.7, 0, 10.0)] * 10

    found = run(arrivals, customers={"acme": {"limits": limits}})["classes"][0]

    assert (found["arrivals"], found["completed"], found["refused"]) == (30, 3 + 2 + 2, 23)
    assert found["refused_by_outcome"] == {"customer_limit": 23}
    assert found["refused_by_code"] == {"rate_limit_exceeded": 23}


def test_concurrency_and_quotas_reject() -> None:
    """Two at a time, and five in an hour."""
    fields = {"limits": {"max_concurrency": 2}, "quotas": {"1hour": 5}}
    arrivals = [Arrival(second / 2, 0, 10.0) for second in range(1, 5) for _ in range(3)]

    found = run(arrivals, customers={"acme": fields})["classes"][0]

    assert found["refused_by_outcome"] == {"concurrency": 2, "quota": 5}
    assert found["refused_by_code"] == {"quota_exceeded": 5, "rate_limit_exceeded": 2}


def test_a_rejected_request_is_sent_again_after_its_retry_after() -> None:
    """A class with `retries`: each request is served in the end."""
    fields = {"limits": {"requests_per_second": 2, "burst": 1}, "retries": 5}

    found = run([], customers={"acme": {**fields, "rate": 1.0}}, duration_s=20)["classes"][0]

    assert found["completed"] < found["arrivals"]
    assert found["completed"] + found["refused"] == found["arrivals"]
    assert found["refused"] > 0


def test_no_gpu() -> None:
    """Requests wait for two seconds for a GPU that was lost, then they are rejected."""
    arrivals = [Arrival(1 + n / 10, 0, 10.0) for n in range(60)]

    found = run(arrivals, gpus=1, duration_s=8, changes=[{"at_s": 1.0, "gpus": 0}])["classes"][0]

    assert found["completed"] == 0
    assert found["refused_by_code"]["no_capacity"] > 20
    assert found["failed_by_code"]["queue_timeout"] > 10
    assert found["refused"] + found["failed"] + found["unfinished"] == 60


def test_a_lost_gpu_delays_its_batch_by_a_lease() -> None:
    """Its requests run on the other GPU 600 ms later."""
    found = run([Arrival(1.0, 0, 10.0)], gpus=2, changes=[{"at_s": 1.02, "gpus": 1}], seed=4)["classes"][0]

    assert found["completed"] == 1
    assert found["p50_ms"] in (pytest.approx(53, rel=0.02), pytest.approx(673, rel=0.02))


FLOOD = {
    "gpus": 4,
    "duration_s": 4,
    "warmup_s": 1,
    "model": {"max_batch_size": 8},
    "customers": {
        "acme": {"tier": "enterprise", "rate": 60},
        "flood": {"tier": "free", "count": 3, "rate": 250},
    },
}


def test_equal_seeds_give_equal_results() -> None:
    """Another seed gives others."""
    one, same, other = (run([], **FLOOD, seed=seed) for seed in (1, 1, 2))

    assert one == same
    assert one["classes"] != other["classes"]


def test_a_flood_of_free_leaves_enterprise_alone() -> None:
    """Nothing is lost: every request completed or was rejected. Enterprise waits for less than a run, and free customers share."""
    found = run([], **FLOOD)

    acme, flood = found["classes"][:2]
    assert (acme["refused"], acme["failed"], acme["unfinished"]) == (0, 0, 0)
    assert acme["p99_ms"] < 2 * 53
    assert flood["completed"] + flood["refused"] + flood["failed"] == flood["arrivals"]
    assert flood["refused"] > 0.3 * flood["arrivals"]
    assert found["tiers"]["free"]["fairness"] > 0.98
    assert 0.85 < found["gpus"]["busy"] <= 1


def test_workers_move_to_the_cell_with_the_load() -> None:
    """All load is in one of four cells: within a second nearly all workers serve it."""
    found = run(
        [],
        gpus=12,
        duration_s=3,
        cells={"count": 4},
        model={"max_batch_size": 4},
        customers={
            "acme": None,
            "hot": {
                "tier": "enterprise",
                "cells": ["cell-2"],
                "rate": [[0, 10], [1, 800]],
            },
        },
    )

    workers = found["timeline"]["cells"]["cell-2"]["workers"]
    step_s = found["timeline"]["step_s"]
    assert workers[0] == 3
    assert workers[int(2 / step_s)] >= 11
    assert sum(each["workers"][-1] for each in found["timeline"]["cells"].values()) == 12


def test_limits_follow_from_all_cells() -> None:
    """300 of 320 requests/s in one of two cells whose workers stay: more than 80 % of its own capacity, less than of both."""
    fields = {"acme": None, "hot": {"tier": "paid", "cells": ["cell-1"], "rate": 300}}

    cells = {"count": 2, "move_ms": 20_000}
    found = run([], gpus=8, duration_s=10, cells=cells, model={"max_batch_size": 4}, customers=fields)

    assert found["cells"]["cell-1"]["workers"] == 4
    assert found["classes"][0]["refused"] == 0


def test_a_draining_cell_loses_its_customers_and_its_workers() -> None:
    """Without a lost request."""
    customers = {"acme": None, "many": {"tier": "paid", "count": 20, "rate": 4}}
    changes = [{"at_s": 1, "cell": "cell-1", "state": "draining"}]

    found = run([], gpus=8, duration_s=3, cells={"count": 2}, customers=customers, changes=changes)

    each = found["classes"][0]
    assert (each["refused"], each["failed"], each["unfinished"]) == (0, 0, 0)
    assert found["timeline"]["cells"]["cell-1"]["workers"][-1] == 0
    assert found["timeline"]["cells"]["cell-2"]["workers"][-1] == 8


def test_a_lost_cell_and_lost_gpus() -> None:
    """Customers of the other cell are as before; those of the lost one wait for the outage; no request disappears."""
    found = run(
        [],
        gpus=20,
        duration_s=8,
        warmup_s=3,
        cells={"count": 2, "outage_s": 1},
        model={"max_batch_size": 8},
        costs={"batch_ms": 100},
        customers={
            "acme": {"tier": "enterprise", "rate": 160, "cells": ["cell-2"]},
            "shop": {"tier": "paid", "count": 3, "rate": 40, "cells": ["cell-1"]},
        },
        changes=[{"at_s": 5, "cell": "cell-1", "state": "lost"}, {"at_s": 8, "gpus": 16}],
    )

    acme, shop = found["classes"]
    assert (acme["refused"], acme["failed"]) == (0, 0)
    assert acme["p95_ms"] < 150
    assert shop["p99_ms"] > 500
    assert all(each["unfinished"] < 0.02 * each["arrivals"] for each in (acme, shop))
    assert sum(each["workers"][-1] for each in found["timeline"]["cells"].values()) == 16


def test_arrivals_of_a_file(tmp_path: Path) -> None:
    """Columns at_s, customer and words; the last one may be missing."""
    path = tmp_path / "arrivals.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["at_s", "customer"], ["0.5", "acme"], ["0.25", "acme"]])

    assert from_file(path, scenario()) == [Arrival(0.25, 0, 10.0), Arrival(0.5, 0, 10.0)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("time,customer\n1,acme\n", "must begin with a line of the columns at_s, customer, words"),
        ("at_s,customer\n1,globex\n", "line 2 of .* names the customer 'globex'; add it to customers"),
        ("at_s,customer,words\n1,acme,none\n", "line 2 of .* must have numbers in at_s and words"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    """With its line."""
    path = tmp_path / "arrivals.csv"
    path.write_text(text, "utf-8")

    with pytest.raises(ScenarioError, match=sentence):
        from_file(path, scenario())


ENGINE = {"slots": 2, "step_ms": 10, "step_item_ms": 5, "dispatch_ms": 0, "call_ms": 0}


@pytest.mark.parametrize(
    ("arrivals", "p50_ms", "p99_ms"),
    [
        # alone: 10 words in steps of 15 ms
        ([(1.0, 10)], 150, 150),
        # both run from 1.0 on in steps of 20 ms; from 1.2 on the longer one has 10 steps of 15 ms left
        ([(1.0, 10), (1.0, 20)], 200, 350),
        # the third one waits for the slot of the first, until 1.2, and runs beside the second
        ([(1.0, 10), (1.0, 20), (1.0, 10)], 400, 400),
    ],
)
def test_requests_in_slots_start_and_end_one_by_one(
    arrivals: list[tuple[float, float]], p50_ms: float, p99_ms: float
) -> None:
    """By steps whose time depends on how many run."""
    found = run([Arrival(at_s, 0, words) for at_s, words in arrivals], costs=ENGINE)["classes"][0]

    assert (found["p50_ms"], found["p99_ms"]) == (pytest.approx(p50_ms, rel=0.07), pytest.approx(p99_ms, rel=0.07))


def test_first_words_come_at_the_end_of_a_step() -> None:
    """The second request arrives in a step of 15 ms that ends at 1.015, and has its first word after one of 20 ms."""
    found = run([Arrival(1.0, 0, 10), Arrival(1.005, 0, 10)], costs=ENGINE)["classes"][0]

    assert (found["first_token_p50_ms"], found["first_token_p99_ms"]) == (
        pytest.approx(15, rel=0.02),
        pytest.approx(30, rel=0.02),
    )


@pytest.mark.parametrize(
    ("at_s", "p50_ms"),
    [
        # in the middle of the fifth step: five steps of 15 ms, and five of 60 ms
        (1.070, 375),
        # before the first step
        (0.5, 600),
        # after the end
        (1.5, 150),
    ],
)
def test_a_slower_engine_changes_the_steps_that_begin_then(at_s: float, p50_ms: float) -> None:
    """The present step ends as before."""
    changes = [{"at_s": at_s, "slower": 4}]
    found = run([Arrival(1.0, 0, 10)], costs=ENGINE, changes=changes)["classes"][0]

    assert found["p50_ms"] == pytest.approx(p50_ms, rel=0.02)


def test_slower_batches() -> None:
    """Those that begin after the change: 1 ms until they run, 50 or 150 ms, and 2 ms for the call."""
    changes = [{"at_s": 1.5, "slower": 3}]
    found = run([Arrival(1.0, 0, 10), Arrival(2.0, 0, 10)], changes=changes)["classes"][0]

    assert (found["p50_ms"], found["p99_ms"]) == (pytest.approx(53, rel=0.01), pytest.approx(153, rel=0.01))


def test_users_send_the_next_request_after_the_last_response() -> None:
    """Four users of an engine with two slots: two run, in steps of 20 ms, and a response of ten words comes every 100 ms."""
    found = run([], customers={"acme": {"users": 4, "words": 10}}, costs=ENGINE, duration_s=10, warmup_s=2)["classes"][
        0
    ]

    assert found["arrivals"] == pytest.approx(100, abs=4)
    assert found["completed"] == found["arrivals"]
    assert found["p50_ms"] == pytest.approx(400, rel=0.06)


def test_users_come_and_leave() -> None:
    """One user all the time, a second one for a second; requests take 150 ms alone, and 200 ms side by side."""
    fields = {"users": [[0, 1], [1, 2], [2, 1]], "words": 10}
    found = run([], customers={"acme": fields}, costs=ENGINE, duration_s=3)

    arrived = found["timeline"]["tiers"]["paid"]["arrived_rps"]
    assert [sum(arrived[n : n + 4]) / 4 for n in (0, 4, 8)] == pytest.approx([7, 10, 7], abs=1)


def test_a_rejected_user_waits_for_its_retry_after() -> None:
    """Two requests/s, though answers take 150 ms: the others are rejected, and the user does not spin."""
    fields = {"users": 1, "words": 10, "limits": {"requests_per_second": 2, "burst": 1}}
    found = run([], customers={"acme": fields}, costs=ENGINE, duration_s=20)["classes"][0]

    assert found["completed"] == pytest.approx(40, abs=3)
    assert found["refused"] <= 2 * found["completed"]


def test_a_killed_engine_breaks_off_streams_and_the_rest_runs_again() -> None:
    """Two engines with one slot each: the stream that has begun fails if its engine is the killed one, and the other engine serves
    what comes later.
    """
    costs, changes = ENGINE | {"slots": 1}, [{"at_s": 1.1, "killed": 1}]
    arrivals = [Arrival(1.0, 0, 20), Arrival(1.0, 0, 20), Arrival(1.2, 0, 10), Arrival(1.3, 0, 10)]
    found = run(arrivals, gpus=2, costs=costs, changes=changes)["classes"][0]

    assert found["failed_by_code"] == {"worker_lost": 1}
    assert (found["completed"], found["refused"]) == (3, 0)


def test_a_request_without_words_survives_its_killed_engine() -> None:
    """It is in its first step when the engine ends, and runs again at once."""
    costs, changes = ENGINE | {"slots": 1}, [{"at_s": 1.01, "killed": 1}]
    arrivals = [Arrival(1.0, 0, 10), Arrival(1.0, 0, 10)]
    found = run(arrivals, gpus=2, costs=costs, changes=changes)["classes"][0]

    assert (found["completed"], found["failed"]) == (2, 0)
    assert found["p99_ms"] == pytest.approx(300, rel=0.02)  # After the other one, on its engine.


def test_slots_are_learnt_from_the_engine() -> None:
    """A worker that begins with eight slots keeps an engine of 64 busy after some seconds, and leaves few requests waiting in it."""
    costs = {"slots": 64, "step_ms": 12, "step_item_ms": 0.15, "dispatch_ms": 2}
    fields = {"users": 100, "words": 80, "words_spread": 1.0, "limits": {"max_concurrency": 1000}}
    model = {"total_ms": 60_000}
    known, learnt = (
        run(
            [],
            customers={"acme": fields},
            costs=costs | {"learn_slots": learns},
            model=model,
            duration_s=20,
            warmup_s=6,
        )
        for learns in (False, True)
    )

    whole = known["classes"][0]["completed"]
    assert learnt["classes"][0]["completed"] == pytest.approx(whole, rel=0.05)


def test_a_flooded_engine_serves_tiers_and_customers_in_their_order() -> None:
    """At three times the capacity, of answers of very different lengths: enterprise is served whole, the free customer below its
    share nearly whole, slots are never left free, and the engine's time is charged once, also while it empties at the end.
    """
    customers = {
        "acme": None,
        "corp": {"tier": "enterprise", "rate": 4, "words": 80, "words_spread": 1.0},
        "light": {"tier": "free", "rate": 40, "words": 20},
        "heavy": {"tier": "free", "rate": 40, "words": 120, "words_spread": 1.0},
    }
    costs = ENGINE | {"slots": 64, "step_ms": 12, "step_item_ms": 0.15}
    given = scenario(customers=customers, costs=costs, model={"total_ms": 60_000}, duration_s=60, warmup_s=10)
    found = document(given, RequestSimulation(given).run())
    corp, light, heavy = found["classes"]

    assert corp["completed"] == corp["arrivals"]
    assert light["completed"] >= 0.95 * light["arrivals"]
    assert heavy["completed"] < 0.6 * heavy["arrivals"]
    assert 0.93 * 60 < sum(each["gpu_s"] for each in found["classes"]) <= 60
