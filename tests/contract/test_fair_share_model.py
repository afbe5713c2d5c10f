"""The fair queue under random histories (fair_machine.py), with the real scripts; seeded bugs show that an unfair share is found."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import scheduler.redis_client.scripts
from contract.fair_machine import FairShare
from tierlane_local.embedded.redis import EmbeddedRedis

SEARCH = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def search(server: EmbeddedRedis, how: settings) -> None:
    run_state_machine_as_test(type("FairShare", (FairShare,), {"url": server.url}), settings=how)


def test_shares_are_fair(redis_server: EmbeddedRedis) -> None:
    """Whatever customers come, leave and cost: of two with a backlog, none is ahead by more than a quantum of each."""
    search(redis_server, SEARCH)


BUGS = {
    "idle_time_is_saved": ("admit", "math.max(fair.v, math.min(flow.tag", "math.max(0, math.min(flow.tag"),
    "weights_are_ignored": (
        "form_batch",
        "local step, others = flow.cost / flow.weight",
        "local step, others = flow.cost",
    ),
    "tags_are_not_saved": ("form_batch", "if #fields > 0 then", "if false then"),
    "failed_work_is_charged": ("cancel", "sum.others + 1 end", "sum.others end"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Each of these changes of one line makes shares unfair."""
    name, right, wrong = BUGS[bug]
    true_source = scheduler.redis_client.scripts.source
    assert true_source(name).count(right) == 1

    def source(script: str) -> str:
        return true_source(script).replace(right, wrong) if script == name else true_source(script)

    monkeypatch.setattr(scheduler.redis_client.scripts, "source", source)

    with pytest.raises(AssertionError):
        search(redis_server, settings(SEARCH, max_examples=200, phases=[Phase.generate]))
