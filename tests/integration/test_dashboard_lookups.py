"""The dashboard's views of a customer and of a request."""

import json
from typing import Any

from redis.asyncio import Redis

from gateway.operations.session import COOKIE, issue
from integration.dashboard_fixtures import acting_stack, call
from integration.dead_letter_fixtures import customer
from integration.gateway_fixtures import SERVICE_TOKEN
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.follower import Catalog
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import GatewayStats
from scheduler.request_id import new_request_id

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


async def test_a_customer_and_its_requests_are_explained(
    client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """By name or id: the share of GPU time, limits with what is left, failed requests, and rejections; all with the cookie."""
    acme, other = await customer(db, "acme/1"), await customer(db, "other")
    failed, ran = new_request_id(), new_request_id()
    for request_id, owner, status, error_code in (
        (failed, acme, "failed", "worker_lost"),
        (ran, other, "completed", None),
    ):
        await db.execute(
            "INSERT INTO requests (id, created_at, customer_id, model, status, error_code, completed_at, cost_ms) "
            "VALUES ($1, now(), $2, 'tiny', $3, $4, now(), 50)",
            request_id, owner, status, error_code,
        )  # fmt: skip
    catalog: Any = Catalog(database_url)
    await catalog.start()
    try:
        async with acting_stack(client, redis_url, database_url, catalog=catalog) as stack:
            cookie = {"Cookie": f"{COOKIE}={issue(SERVICE_TOKEN, 4e9)}"}
            status, _, text = await call(stack, "/customers/acme%2F1", **cookie)
            found = json.loads(text)
            assert (status, found["id"], found["not_read"]) == (200, acme, [])
            assert (found["gpu"]["gpu_ms"], found["gpu"]["total_gpu_ms"], found["gpu"]["failed"]) == (50.0, 100.0, 1)
            assert [(each["id"], each["error_code"]) for each in found["failed"]] == [(failed, "worker_lost")]
            assert found["messages"]["worker_lost"]
            rate = next(each for each in found["limits"] if each["limit"] == "burst")
            assert 0 < rate["left"] <= rate["effective"] == rate["base"]
            assert (
                found["rejections"],
                json.loads((await call(stack, f"/customers/{acme}", **cookie))[2])["name"],
            ) == ([], "acme/1")
            assert (await call(stack, "/customers/nobody", **cookie))[0] == 404
            assert (await call(stack, "/customers/acme%2F1"))[0] == 401

            rejected = new_request_id()
            rejection = RejectionRecord(
                id=rejected, customer_id=acme, key_id="k", tier="paid", code="queue_full", outcome="queue_full"
            )
            stats = GatewayStats("g2", 0.0, {})
            await stack.worker.presence.gateway_beat(stats, [rejection])
            _, _, text = await call(stack, f"/requests/{rejected}", **cookie)
            assert (json.loads(text)["rejection"]["code"], json.loads(text)["customer"]) == ("queue_full", "acme/1")
            assert (await call(stack, f"/requests/{new_request_id()}", **cookie))[0] == 404
    finally:
        await catalog.stop()
