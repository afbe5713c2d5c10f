"""The queue protocol under random histories (protocol_machine.py): the invariants (protocol_laws.py) hold after every step, and
at the end each request has one end. Seeded bugs in the scripts show that violations are found.
"""

from collections.abc import Callable, Collection
from inspect import isfunction
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import scheduler.redis_client.scripts
from contract.protocol_machine import Protocol
from tierlane.embedded.redis import EmbeddedRedis

SEARCH = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


TRUE_SOURCE = scheduler.redis_client.scripts.source


def short_source(name: str) -> str:
    """A call ends at most two followers, so that short histories leave some."""
    return TRUE_SOURCE(name).replace("PROMOTED_KEEP_MS = 64,", "PROMOTED_KEEP_MS = 2,")


@pytest.fixture(autouse=True)
def few_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PROMOTED_KEEP_MS = 2," in short_source("share")
    monkeypatch.setattr(scheduler.redis_client.scripts, "source", short_source)


def without_rule(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which other rules may call, but which is none itself."""

    def called(*args: Any, **changes: Any) -> Any:
        return method(*args, **changes)

    return called


def search(server: EmbeddedRedis, how: settings, rules: Collection[str] = ()) -> None:
    """Run histories of these rules (none: of all)."""
    kept = {*rules, "a_busy_pool", "laws"}
    others = {n: without_rule(m) for n, m in vars(Protocol).items() if isfunction(m) and n not in kept} if rules else {}
    run_state_machine_as_test(type("Protocol", (Protocol,), {"url": server.url} | others), settings=how)


def test_random_histories(redis_server: EmbeddedRedis) -> None:
    """Each accepted request has one end, one record and one reply."""
    search(redis_server, SEARCH)


ALL = ("admit", "adopt", "cancel", "claim", "expire", "fail", "finish", "form_batch", "reap")
ENDED = "id, row, account, state, code, run[USED], cost or batch.served_from and 0 or run[COST], attempts(batch) > 0"
ADOPTED = "id, row, account, result[2], result[3], -1, nil, row[STATE] == 'processing'"
BUGS = {
    "no_fencing": (["finish"], " or batch.token ~= ARGV[3]", ""),
    "bare_pop": (
        ["form_batch"],
        "call('LPUSH', list, unpack(ids))",
        "",
    ),
    "pubsub_only": (ALL[2:], "set_terminal(id, state, code, 'reply', reply)", "set_terminal(id, state, code)"),
    "no_retry_budget": (["reap", "fail"], "losses > rule.max_losses", "false"),
    "no_pool_budget": (["reap", "fail"], "math.min(wanted, math.floor(tokens))", "wanted"),
    "claim_without_lease": (["claim"], "lease(batch, tonumber(ARGV[5]))", ""),
    "reap_pushes_unseen": (["reap"], "if call('LPOS', P .. 'batch_queue', id) then", "if false then"),
    "end_without_compare": (["cancel"], "if is_open(row) and (", "if (true or "),
    "release_forgets_the_batch": (["release"], "  delete_batch(batch)\nend\nwake()", "end\nwake()"),
    "release_mixes_suspects": (["release"], "batch.losses > 0", "false"),
    "suspects_stay_together": (["reap", "fail"], "if losses > 1 then return count end", ""),
    "a_half_is_lost": (["reap", "fail"], "for n = count, 1, -1 do", "for n = count, 2, -1 do"),
    "no_letter": (["reap", "fail", "finish"], "dead_letters[#dead_letters + 1] = {'d'", "local _ = {'d'"),
    "again_is_judged": (["admit"], "if rare and rare[3] then return 'accepted', 0, 'nothing' end", ""),
    "an_end_keeps_its_lease": (ALL[2:], f"  refund({ENDED})\n", ""),
    "adopt_keeps_the_lease": (["adopt"], f"    refund({ADOPTED})\n", ""),
    "our_failures_are_charged": (ALL[2:], "total.windows[window] = (total.windows[window] or 0) + 1", ""),
    "a_reservation_stays": (ALL[2:], "give(name .. ' ' .. number, units - final)", ""),
    "who_left_is_paid_back": (ALL[2:], "invalid_request = true, cancelled = true}", "invalid_request = true}"),
    "a_key_runs_twice": (["admit"], "then return 'in_progress', row[1] end", "then return nil end"),
    "adopt_leaves_it_in_flight": (["adopt"], "then leave_batch(id, row) end", "then end"),
    "adopt_overwrites": (["adopt"], "if is_open(row) then", "if row[STATE] then"),
    "riders_are_not_told": (
        ["finish"],
        "if result then has_more = finalize_followers(id, result)",
        "if result then has_more = false",
    ),
    "riders_have_no_heir": (["cancel"], "else has_more = promote_follower(id, hash, losses) end", "end"),
    "nobody_owes_the_others": (["finish"], "call('ZADD', P .. 'sharing', now, id)", ""),
    "a_lifted_one_stands_twice": (["cancel"], "if call('HDEL', key, 'lifted') == 1 and", "if false and"),
    "a_lifted_one_stands_for_its_key": (["cancel"], "ipairs(removed == 0 and", "ipairs(false and"),
    "a_kept_answer_has_no_end": (["admit"], "if #cached_outcomes == 0 then return end", "if true then return end"),
    "a_kept_answer_is_taken_for_queued": (["admit"], "how == 'cached' and 'completed' or", ""),
    "waiting_is_forgotten": (["form_batch"], "    if #ids > 0 then\n", "    if true then\n"),
    "keys_are_not_counted": (["expire"], "backlogs.remove(name, of_keys)", ""),
}


RULES = {
    "no_retry_budget": ("submit", "poison"),
    "no_pool_budget": ("submit", "a_wave_of_losses"),
    "reap_pushes_unseen": ("submit", "form", "leases_run_out"),
    "end_without_compare": ("take", "finish", "cancel"),
    "release_forgets_the_batch": ("take", "let_go_by"),
    "release_mixes_suspects": ("submit", "poison"),
    "suspects_stay_together": ("submit", "poison"),
    "a_half_is_lost": ("submit", "poison"),
    "no_letter": ("submit", "poison"),
    "again_is_judged": ("submit", "redis_comes_back_empty"),
    "adopt_keeps_the_lease": ("submit", "answer_past_redis"),
    "adopt_leaves_it_in_flight": ("take", "answer_past_redis"),
    "adopt_overwrites": ("take", "cancel", "answer_past_redis"),
    "who_left_is_paid_back": ("submit", "cancel"),
    "nobody_owes_the_others": ("submit_same", "a_shared_run", "share"),
    "a_lifted_one_stands_twice": ("a_shared_run",),
    "a_lifted_one_stands_for_its_key": ("a_shared_run",),
    "a_kept_answer_has_no_end": ("a_shared_run",),
    "a_kept_answer_is_taken_for_queued": ("a_shared_run",),
    "a_key_runs_twice": ("submit_with_key", "pop"),
    "riders_are_not_told": ("a_shared_run",),
    "riders_have_no_heir": ("a_shared_run",),
    "waiting_is_forgotten": ("submit", "a_crowd"),
    "keys_are_not_counted": ("a_crowd", "form", "time_is_up"),
}
"""The rules that show a bug, where histories of all rules do so too, but after many more steps."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Each of these changes of one line violates an invariant."""
    names, right, wrong = BUGS[bug]
    true_source = scheduler.redis_client.scripts.source
    assert {name: true_source(name).count(right) for name in names} == dict.fromkeys(names, 1)

    def source(name: str) -> str:
        return true_source(name).replace(right, wrong) if name in names else true_source(name)

    monkeypatch.setattr(scheduler.redis_client.scripts, "source", source)

    with pytest.raises(AssertionError):
        search(redis_server, settings(SEARCH, max_examples=400, phases=[Phase.generate]), RULES.get(bug, ()))
