"""Dead letters on the page for on-call: counted, run again, deleted, always exactly those that were seen, always on record."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from integration.dashboard_bench import act, acting_stack, browser, groups, record
from integration.dlq_bench import customer, letter
from integration.gateway_fixtures import Stack
from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
PURGE = "/dead-letters/purge"
REQUEUE = "/dead-letters/requeue"
DLQ = Keys().dlq


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker that breaks on "bad", and PostgreSQL."""
    async with acting_stack(client, redis_url, database_url) as running:
        running.worker.answerer = answer
        yield running


def answer(member: ClaimedRequest) -> Outcome:
    text = decode_payload(member.body).input
    return Outcome(member.id, "poison_request" if text == "bad" else "", 1.5, 3, "v1", text[::-1])


async def seen(stack: Stack, group: int | None = None) -> dict[str, Any]:
    """What the page would send to purge: all of them, or one group."""
    _, said = await groups(stack)
    if group is None:
        return {"count": said["count"], "up_to": said["up_to"]}
    chosen = said["groups"][group]
    return {name: chosen[name] for name in ("count", "tier", "model", "error_code")} | {"up_to": said["up_to"]}


async def left(db: Connection) -> set[str]:
    return {row[0] for row in await db.fetch("SELECT request_id FROM dead_letters")}


async def test_they_are_counted_by_tier_model_and_cause(stack: Stack, db: Connection) -> None:
    """The largest group first; what cannot be run again is counted apart; with nothing there all is zero."""
    assert (await groups(stack))[1] == {"up_to": 0, "count": 0, "requeueable": 0, "groups": []}
    acme = await customer(db)
    for changes in ({}, {"body": None}, {"requeued_as": "req_" + "0" * 32}):
        noted = {"requeued_at": await db.fetchval("SELECT now()")} if "requeued_as" in changes else {}
        await letter(db, customer_id=acme, **changes, **noted)
    await letter(db, customer_id=None, tier=None, model=None, error_code="poison_request")
    await letter(db, customer_id=acme, tier="free", model="gone", error_code="poison_request")

    status, said = await groups(stack)

    assert (status, said["count"], said["requeueable"]) == (200, 5, 1)
    assert said["up_to"] == await db.fetchval("SELECT max(id) FROM dead_letters")
    assert [tuple(each[name] for name in ("tier", "model", "error_code", "count", "requeueable"))
            for each in said["groups"]] == [
        ("paid", "tiny", "worker_lost", 3, 1), ("", "", "poison_request", 1, 0), ("free", "gone", "poison_request", 1, 0),
    ]  # fmt: skip


async def test_purge_deletes_what_was_seen(stack: Stack, db: Connection) -> None:
    """One group, and not the letter that came since; off the list in Redis; on record with every id."""
    old = [await letter(db) for _ in range(3)]
    other = await letter(db, error_code="poison_request")
    body = await seen(stack, 0)
    late = await letter(db)
    await stack.redis.lpush(DLQ, *old, other, late)

    status, said = await act(stack, PURGE, body, browser(stack))

    assert (status, said) == (200, {"purged": 3, "warning": ""})
    assert await left(db) == {other, late}
    assert {each.decode() for each in await stack.redis.lrange(DLQ, 0, -1)} == {other, late}
    assert await record(db, "dead_letters") == [
        ("dashboard (127.0.0.1)", f"paid tiny worker_lost up to {body['up_to']}", {"count": 3, "request_ids": sorted(old)}, None)
    ]  # fmt: skip


async def test_those_without_a_tier_are_a_group_of_their_own(stack: Stack, db: Connection) -> None:
    """Not to be mixed up with any tier."""
    nobodys = await letter(db, tier=None, model=None)
    mine = await letter(db)
    _, said = await groups(stack)

    body = {"count": 1, "up_to": said["up_to"], "tier": "", "model": "", "error_code": "worker_lost"}
    assert (await act(stack, PURGE, body))[1]["purged"] == 1
    assert await left(db) == {mine}
    assert (await record(db, "dead_letters"))[0][2]["request_ids"] == [nobodys]


@pytest.mark.parametrize(("changed", "told"), [(1, "there are more now"), (-1, "there are 1 now")])
async def test_another_count_than_was_confirmed_changes_nothing(
    stack: Stack, db: Connection, changed: int, told: str
) -> None:
    """More than was shown would be deleted, or somebody has deleted some already: it is refused, with the figures."""
    await letter(db)
    second = await letter(db)
    body = await seen(stack)
    if changed > 0:
        await letter(db, id=-1)  # With a lower number, but committed only now.
    else:
        await db.execute("DELETE FROM dead_letters WHERE request_id = $1", second)
    before = await left(db)

    for path, done in ((PURGE, "deleted"), (REQUEUE, "requeued")):
        status, said = await act(stack, path, body)
        assert (status, said["error"]["code"], said["error"]["param"]) == (409, "changed_meanwhile", "count")
        found = told if path == PURGE else "there are 0 now"  # Their customer is not known, so none can run again.
        assert (
            said["error"]["message"]
            == f"2 dead letters were confirmed, but {found}; none was {done}. Reload and try again."
        )
    assert await left(db) == before
    assert await record(db, "dead_letters") == []


async def test_requeue_runs_the_confirmed_ones_again(stack: Stack, db: Connection) -> None:
    """Each is told with its end; on record as what; off the list in Redis; what fails again is a letter of its own."""
    acme = await customer(db)
    good, bad = await letter(db, customer_id=acme), await letter(db, customer_id=acme, text="bad")
    await stack.redis.lpush(DLQ, good, bad)
    body = await seen(stack)

    status, said = await act(stack, REQUEUE, body, browser(stack))

    ends = {each["request_id"]: each["ended"] for each in said["reruns"]}
    assert (status, ends) == (200, {good: "completed", bad: "poison_request"})
    assert (said["left"], said["after"], said["warning"]) == (0, body["up_to"], "")
    names = {each["request_id"]: each["requeued_as"] for each in said["reruns"]}
    assert dict(await db.fetch("SELECT request_id, requeued_as FROM dead_letters")) == names
    assert await stack.redis.lrange(DLQ, 0, -1) == [names[bad].encode()]
    assert await record(db, "dead_letters") == [
        ("dashboard (127.0.0.1)", f"all up to {body['up_to']}",
         {"count": 2, "requeued_as": None}, {"count": 2, "requeued_as": names}),
    ]  # fmt: skip
    again, refused = await act(stack, REQUEUE, body)
    assert (again, refused["error"]["code"]) == (409, "changed_meanwhile")
    assert stack.gateway.pending_requests.refused_replies == 0


async def test_many_are_requeued_by_and_by(stack: Stack, db: Connection) -> None:
    """Thirty-two at a time, each time from where the last one ended, so that the page can go on to the end."""
    acme = await customer(db)
    ids = {await letter(db, customer_id=acme) for _ in range(40)}
    body = await seen(stack)

    _, first = await act(stack, REQUEUE, body)
    assert (len(first["reruns"]), first["left"]) == (32, 8)
    _, second = await act(stack, REQUEUE, body | {"count": first["left"], "after": first["after"]})

    assert (len(second["reruns"]), second["left"], second["after"]) == (8, 0, body["up_to"])
    assert {each["request_id"] for each in first["reruns"] + second["reruns"]} == ids
    assert {each["ended"] for each in first["reruns"] + second["reruns"]} == {"completed"}
    assert len(await record(db, "dead_letters")) == 2


async def test_without_a_healthy_worker_nothing_is_requeued(
    client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """It would only die again, of waiting."""
    await letter(db, customer_id=await customer(db))
    async with acting_stack(client, redis_url, database_url, worker=False) as stack:
        body = await seen(stack)
        await stack.worker.heartbeat(status="down")
        status, said = await act(stack, REQUEUE, body)

    assert (status, said["error"]["code"]) == (503, "no_capacity")
    assert said["error"]["message"] == "No worker of pool default is healthy, so nothing was requeued."
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None
    assert await record(db, "dead_letters") == []


async def test_a_full_redis_takes_the_note_back(stack: Stack, db: Connection) -> None:
    """Nothing was queued, so nothing was requeued; the record has both."""
    await letter(db, customer_id=await customer(db))
    body = await seen(stack)
    stack.worker.hold = True
    await stack.redis.config_set("maxmemory", 1)
    try:
        status, said = await act(stack, REQUEUE, body)
    finally:
        await stack.redis.config_set("maxmemory", 0)

    assert (status, said["error"]["code"]) == (503, "no_capacity")
    assert said["error"]["message"] == "Redis has no memory left for 1 of them; these were not changed."
    assert await db.fetchval("SELECT requeued_as FROM dead_letters") is None
    noted, taken_back = await record(db, "dead_letters")
    assert taken_back[2:] == ({"requeued_as": noted[3]["requeued_as"]}, {"requeued_as": None})


async def test_of_two_operators_one_is_told(
    stack: Stack, client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """At two gateways, at the same moment: each letter runs once."""
    acme = await customer(db)
    for _ in range(3):
        await letter(db, customer_id=acme)
    body = await seen(stack)
    async with acting_stack(client, redis_url, database_url, worker=False, gateway_id="g2") as other:
        both = await asyncio.gather(act(stack, REQUEUE, body), act(other, REQUEUE, body))

    assert sorted(status for status, _ in both) == [200, 409]
    assert len(await record(db, "dead_letters")) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PURGE, {"up_to": 1}, "count"),
        (PURGE, {"count": 1}, "up_to"),
        (PURGE, {"count": 0, "up_to": 1}, "count"),
        (PURGE, {"count": 10_001, "up_to": 1}, "count"),
        (PURGE, {"count": 1, "up_to": 2**63}, "up_to"),
        (PURGE, {"count": 1, "up_to": 1, "tier": "a\x00"}, "tier"),
        (PURGE, {"count": 1, "up_to": 1, "after": 1}, "after"),
        (REQUEUE, {"count": 1, "up_to": 1, "after": -1}, "after"),
        (REQUEUE, {"count": "1", "up_to": 1}, "count"),
    ],
)
async def test_a_body_that_cannot_be_meant(stack: Stack, path: str, body: Any, param: str) -> None:
    """400, and the field by name."""
    status, said = await act(stack, path, body)

    assert (status, said["error"]["code"], said["error"]["param"]) == (400, "invalid_request", param)


@pytest.mark.parametrize("path", [PURGE, REQUEUE])
async def test_strangers_and_other_pages_do_nothing(stack: Stack, db: Connection, path: str) -> None:
    """401 and 403, and every letter is there."""
    await letter(db, customer_id=await customer(db))
    body = await seen(stack)

    assert (await act(stack, path, body, {"Origin": stack.url}))[0] == 401
    assert (await act(stack, path, body, browser(stack, **{"Sec-Fetch-Site": "cross-site"})))[0] == 403
    async with stack.http.get(f"{stack.url}/internal/dashboard/dead-letters") as answer:
        assert answer.status == 401
    assert await db.fetchval("SELECT count(*) FROM dead_letters WHERE requeued_as IS NULL") == 1


async def test_without_postgresql_all_is_refused(client: Redis, redis_url: str) -> None:
    """In one sentence; nothing of it is done in Redis alone."""
    await client.lpush(DLQ, "req_x")
    away = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"
    async with acting_stack(client, redis_url, away) as stack:
        looked, not_known = await groups(stack)
        answers = [await act(stack, path, {"count": 1, "up_to": 1}) for path in (PURGE, REQUEUE)]

    assert (looked, not_known["error"]["code"]) == (503, "catalog_unavailable")
    assert [(status, said["error"]["code"]) for status, said in answers] == [(503, "catalog_unavailable")] * 2
    assert all(said["error"]["message"].endswith("so nothing was changed.") for _, said in answers)
    assert await client.lrange(DLQ, 0, -1) == [b"req_x"]


async def test_with_redis_away_purge_is_done_and_requeue_is_refused(
    tmp_path: Path, database_url: str, db: Connection
) -> None:
    """PostgreSQL is the truth: what is purged is gone, and it is told that health still counts it; nothing can be queued."""
    await letter(db, customer_id=await customer(db))
    server = EmbeddedRedis(tmp_path, tmp_path / "redis.sock", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    try:
        async with acting_stack(client, server.url, database_url, worker=False) as stack:
            body = await seen(stack)
            await server.stop()
            requeued = await act(stack, REQUEUE, body)
            noted = await db.fetchval("SELECT requeued_as FROM dead_letters")
            purged = await act(stack, PURGE, body)
    finally:
        await client.aclose()
        await server.stop()

    assert (requeued[0], requeued[1]["error"]["code"]) == (503, "no_capacity")
    assert requeued[1]["error"]["message"].endswith(", so nothing was requeued.")
    assert noted is None
    assert purged == (200, {"purged": 1, "warning": "Redis is not responding, so health still counts them."})
    assert [new for _, _, _, new in await record(db, "dead_letters")] == [None]
