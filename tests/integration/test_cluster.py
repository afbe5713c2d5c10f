"""A cluster: all keys in one slot; every kind of client follows the slot to another server; nothing is half done."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from eventually import eventually
from gateway.inference.pending import PendingRequests
from gateway.inference.responses import ResponseSubscriber
from integration.cluster_fixtures import CLUSTER_PASSWORD, Cluster, cluster, cluster_client
from integration.gateway_fixtures import running_stack
from pool import TIERS, Pool
from scheduler.errors import RedisUnavailable
from scheduler.protocol.ready_batches import ReadyBatches
from scheduler.protocol.replies import Results
from scheduler.redis_client.cluster import parse
from scheduler.redis_client.connections import (
    blocking_client,
    bounded,
    check_server,
    command_client,
    pipelined,
    server_url,
    subscriber_client,
)
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.cluster import HOST, free_ports
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["cluster", "cluster_client"]


async def can_write(client: Redis, keys: Keys) -> bool:
    """Whether a write succeeds."""
    try:
        async with bounded():
            await client.set(f"{keys.prefix}canary", "1", px=60_000)
    except RedisUnavailable:
        return False
    return True


async def test_calls_use_the_replica_that_takes_over(cluster: Cluster, cluster_client: Redis) -> None:
    """When the primary of the slot is killed: commands and scripts, blocking reads and subscriptions."""
    await check_server(cluster_client)
    keys = Keys.at(cluster.url)
    pool = Pool(cluster_client, keys)
    assert await pool.states(await pool.queue(1)) == ["queued"]
    blocking, listening = blocking_client(cluster.url), subscriber_client(cluster.url)
    ready, pending_requests = ReadyBatches(blocking, keys, 0.2), PendingRequests()
    channel = keys.responses("g1")
    subscriber = ResponseSubscriber(listening, channel, pending_requests, Results(cluster_client, keys))
    loop = asyncio.create_task(subscriber.run())
    await eventually(subscriber.subscribed.is_set, "subscribed to the first primary")
    assert await ready.pop() is None

    lost = await cluster.signal_owner(signal.SIGKILL)

    assert not await can_write(cluster_client, keys)
    await eventually(lambda: can_write(cluster_client, keys), "a write on the next primary", 20.0)
    assert await cluster.faults.owner() != lost
    assert await pool.states(await pool.queue(1)) == ["queued"]

    async def pushed_and_popped() -> bool:
        try:
            async with bounded():
                await cluster_client.lpush(keys.batch_queue, "b1")
            return await ready.pop() == "b1"
        except RedisUnavailable:
            return False

    async def is_received() -> bool:
        async with bounded():
            await cluster_client.publish(channel, b"junk")
        return bool(subscriber.malformed)

    await eventually(pushed_and_popped, "a pop on the next primary", 10.0)
    await eventually(is_received, "a message of the next primary is received", 10.0)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await blocking.aclose()
    await listening.aclose()


async def test_a_killed_server_restarts_after_its_replica_took_over(cluster: Cluster, cluster_client: Redis) -> None:
    """It is started at once, as by a supervisor: no key is lost, and it becomes a replica."""
    await cluster_client.set(f"{Keys.at(cluster.url).prefix}canary", "1")
    await cluster_client.execute_command("WAIT", 1, 1000)

    lost = await cluster.signal_owner(signal.SIGKILL)
    await eventually(lambda: not cluster.nodes[lost].alive, "the server has ended")
    await cluster.nodes[lost].start()

    owner = await cluster.faults.owner()
    assert owner != lost
    assert await cluster.command(owner, "GET", f"{Keys.at(cluster.url).prefix}canary") == b"1"
    await cluster.form()
    assert (await cluster.command(lost, "INFO", "replication"))["role"] == "slave"


async def test_a_slot_that_moves_key_by_key(cluster: Cluster, cluster_client: Redis) -> None:
    """Between its first and its last key every script fails before it writes; then the first script succeeds."""
    keys = Keys.at(cluster.url)
    pool = Pool(cluster_client, keys)
    await pool.queue(20, queue_ms=60_000, total_ms=60_000)  # The move may take seconds.
    faults = cluster.faults
    source, target = await faults.owner(), await faults.other_primary()
    await faults.begin_move(source, target)
    assert await faults.move_keys(source, target, 5) == 5

    for script in (pool.queue(1), pool.form([("free", 5)]), pool.gateway_lives("g1")):
        with pytest.raises(RedisUnavailable):
            await script
    await faults.end_move(source, target)

    assert (await pool.batches.form("after", [("free", 30)], 1000, TIERS)).size == 20
    await eventually(lambda: can_write(cluster_client, keys), "commands go to the new primary")


async def test_the_server_that_moved_names_is_asked_first(cluster: Cluster) -> None:
    """The first call of a client succeeds although the server that it knows has not learned of the new primary."""
    faults = cluster.faults
    source, target = await faults.owner(), await faults.other_primary()
    target_id = await faults.command(target, "CLUSTER", "MYID")
    # Servers tell each other what they forget; the source must not hear it.
    await faults.command(source, "DEBUG", "DROP-CLUSTER-PACKET-FILTER", -2)
    stale = []
    for number in set(range(len(cluster.nodes))) - {source, target}:
        with suppress(ResponseError):  # A replica of the target cannot forget it.
            await faults.command(number, "CLUSTER", "FORGET", target_id.decode())  # It ignores the target for a minute.
            stale.append(number)
    assert len(stale) == 3
    await faults.begin_move(source, target)
    await faults.end_move(source, target)

    for host, port in [parse(cluster.url).nodes[number] for number in stale]:
        client = command_client(f"redis+cluster://:{CLUSTER_PASSWORD}@{host}:{port}")
        assert await pipelined(client).call(("SET", f"{Keys.at(cluster.url).prefix}canary", "1")) == b"OK"
        await client.aclose()


async def test_a_gateway_on_a_cluster(cluster: Cluster, cluster_client: Redis) -> None:
    """A request is served through the cluster."""
    async with running_stack(cluster_client, cluster.url) as stack:
        assert (await stack.infer())[0] == 200


async def test_cluster_mode_is_detected(tmp_path: Path) -> None:
    """A plain URL of such a server gets the scheme of a cluster; that of another server, or of none, is unchanged."""
    port, bus_port = free_ports(2)
    options = ["--port", str(port), "--bind", HOST, "--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
    server = EmbeddedRedis(tmp_path, tmp_path / "s", ephemeral=True, extra_args=options)
    await server.start()
    try:
        assert await server_url(f"redis://{HOST}:{port}") == f"redis+cluster://{HOST}:{port}"
    finally:
        await server.stop()
    assert await server_url(f"redis://{HOST}:{port}") == f"redis://{HOST}:{port}"


async def test_without_a_server_the_cluster_is_unavailable() -> None:
    """A call fails within its bound."""
    client = command_client(f"redis+cluster://{HOST}:1,{HOST}:2")

    assert not await can_write(client, Keys.at("redis+cluster://"))

    await client.aclose()
