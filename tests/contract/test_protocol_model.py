"""The queue protocol under random histories (protocol_machine.py): the invariants (protocol_laws.py) hold after every step, and
at the end each request has one end. Seeded bugs in the scripts show that violations are found.
"""

from collections.abc import Callable, Collection, Sequence
from inspect import isfunction
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test

import scheduler.redis_client.scripts
from contract.protocol_machine import Protocol
from contract.slot_machine import SlotProtocol
from tierlane_local.embedded.redis import EmbeddedRedis

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
    return TRUE_SOURCE(name).replace("local visits_left = 64\n", "local visits_left = 2\n")


@pytest.fixture(autouse=True)
def few_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "local visits_left = 2\n" in short_source("share")
    monkeypatch.setattr(scheduler.redis_client.scripts, "source", short_source)


def without_rule(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which other rules may call, but which is none itself."""

    def called(*args: Any, **changes: Any) -> Any:
        return method(*args, **changes)

    return called


def search(
    server: EmbeddedRedis, how: settings, rules: Collection[str] = (), machine: type[Protocol] = Protocol
) -> None:
    """Run histories of these rules (none: of all)."""
    kept, methods = {*rules, "a_busy_pool", "laws", "slots_agree"}, vars(Protocol) | vars(machine)
    others = {n: without_rule(m) for n, m in methods.items() if isfunction(m) and n not in kept} if rules else {}
    run_state_machine_as_test(type(machine.__name__, (machine,), {"url": server.url} | others), settings=how)


@pytest.mark.timeout(300)  # Half a minute on an idle machine.
@pytest.mark.parametrize("machine", [Protocol, SlotProtocol])
def test_random_histories(redis_server: EmbeddedRedis, machine: type[Protocol]) -> None:
    """Each accepted request has one end, one record and one reply; with slots also if requests start and end one by one."""
    search(redis_server, SEARCH, machine=machine)


VIOLATION = (AssertionError, FlakyFailure)
"""A violation that depends on the server's clock may not occur again when hypothesis repeats the history."""

ALL = ("admit", "adopt", "cancel", "claim", "expire", "fail", "finish", "form_batch", "reap")
ENDED = "id, row, account, state, code, run[USED], cost or batch.served_from and 0 or run[COST]"
ADOPTED = "id, row, account, result[2], result[3], result[5] or -1, (result[6] or -1) >= 0 and result[6] or nil"
BUGS = {
    "no_fencing": (["finish"], " or batch.token ~= token", ""),
    "bare_pop": (
        ["form_batch"],
        "call('LPUSH', list, unpack(ids))",
        "",
    ),
    "pubsub_only": (ALL[2:], "  set_terminal(id, state, code, reply)\n", "  set_terminal(id, state, code)\n"),
    "no_retry_budget": (["reap", "fail"], "losses > rule.max_losses", "false"),
    "no_pool_budget": (["reap", "fail"], "math.min(wanted, math.floor(tokens))", "wanted"),
    "claim_without_lease": (
        ["claim"],
        "batch.worker = worker_id\nlease(batch, lease_ms)\n",
        "batch.worker = worker_id\n",
    ),
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
    "our_failures_are_charged": (ALL[2:], "total.windows[window] = (total.windows[window] or 0) + sign", ""),
    "a_reservation_stays": (ALL[2:], "give(name .. ' ' .. number, units - final)", ""),
    "who_left_is_paid_back": (ALL[2:], "cancelled = true, context", "context"),
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


def seed(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], right: str, wrong: str) -> None:
    """Replace one line of these scripts."""
    true_source = scheduler.redis_client.scripts.source
    assert {name: true_source(name).count(right) for name in names} == dict.fromkeys(names, 1)

    def source(name: str) -> str:
        return true_source(name).replace(right, wrong) if name in names else true_source(name)

    monkeypatch.setattr(scheduler.redis_client.scripts, "source", source)


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Each of these changes of one line violates an invariant."""
    seed(monkeypatch, *BUGS[bug])

    with pytest.raises(VIOLATION):
        search(redis_server, settings(SEARCH, max_examples=400, phases=[Phase.generate]), RULES.get(bug, ()))


REPORT = "slots.report(worker_id, free, slot_count, #outcomes / SIZE)"
SLOT_BUGS = {
    "a_part_without_fencing": (["finish_part"], " and batch.token == owned[2]", ""),
    "a_stale_outcome_counts": (["finish_part"], " and row[BATCH] == batch.id then\n    end_member", " then end_member"),
    "an_end_frees_no_slot": (["finish_part"], REPORT, REPORT.replace("#outcomes / SIZE", "0")),
    "a_drained_worker_comes_back": (["finish_part"], "  if change and not was_free then return false end\n", ""),
    "a_claim_takes_no_slot": (["claim"], "free - #out", "free"),
    "a_claimed_batch_waits_for_ever": (["claim"], "if batch.slots then slots.claimed(batch.id) end\ncall", "call"),
    "more_leave_than_are_free": (
        ["form_batch"],
        "local left, bounded = math.min(room[1], room[3])",
        "local left, bounded = 9",
    ),
    "an_empty_batch_stays": (["finish_part"], "if batch and is_empty(batch) then", "if false then"),
    "a_lost_run_stays_in_its_batch": (
        ["finish_part"],
        "  leave_batch(id, row)\n  if not losses then return end",
        "  if not losses then return end",
    ),
    "a_lost_one_joins_others": (["finish_part"], "if batch.losses > 0 then -- it stays alone", "if false then --"),
    "a_loss_is_not_counted": (["finish_part"], "'losses', 1)", "'losses', 0)"),
    "who_left_runs_again": (
        ["reap", "finish_part"],
        "if batch.slots and ends_as_left(id, row, batch, NO_RUN) then return end",
        "",
    ),
    "who_left_is_handed_back": (["finish_part"], "string.find(code, '^[-!]')", "false"),
    "withdrawn_is_forgotten": (["finish_part"], "'withdrawn', '1')", "'withdrew', '1')"),
}
SLOT_RULES = {
    "a_part_without_fencing": ("take", "end_some"),
    "a_stale_outcome_counts": ("take", "one_of_several_returns"),
    "a_lost_run_stays_in_its_batch": ("take", "one_of_several_returns"),
    "a_lost_one_joins_others": ("take", "end_some", "form", "pop", "claim"),
    "a_loss_is_not_counted": ("take", "one_of_several_returns"),
    "withdrawn_is_forgotten": ("take", "end_some", "form", "pop", "claim"),
    "who_left_runs_again": ("take", "a_running_one_is_left", "restarts", "leases_run_out", "pop", "claim"),
    "who_left_is_handed_back": ("take", "a_running_one_is_left", "one_of_several_returns"),
    "a_claim_takes_no_slot": ("take", "form", "pop", "claim", "beats"),
    "an_end_frees_no_slot": ("take", "end_some", "beats"),
    "a_drained_worker_comes_back": ("take", "end_some", "beats"),
}


@pytest.mark.parametrize("bug", SLOT_BUGS)
def test_a_seeded_bug_of_slots_is_found(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """As above, in a pool whose workers have slots."""
    seed(monkeypatch, *SLOT_BUGS[bug])

    with pytest.raises(VIOLATION):
        search(
            redis_server,
            settings(SEARCH, max_examples=400, phases=[Phase.generate]),
            SLOT_RULES.get(bug, ()),
            SlotProtocol,
        )
