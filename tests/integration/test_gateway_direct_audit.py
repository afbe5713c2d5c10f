"""What direct mode answered is in the audit: whoever dies, whatever the disk says, and whoever leaves."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from direct_parts import endpoints
from eventually import eventually
from gateway.direct.spool import Spool, SpoolError, from_line, to_line
from gateway.inference.recovery import Pair
from integration.direct_mode_fixtures import (
    Outage,
    audit_of,
    back,
    direct_already,
    direct_stack,
    outage,
    told,
    told_at_last,
)
from integration.gateway_fixtures import running_stack
from pool import Pool
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord
from scheduler.request_id import new_request_id

__all__ = ["outage"]  # pytest finds the fixture by its name here.


def pair() -> Pair:
    request_id = new_request_id()
    return (
        AcceptedRecord(request_id, "customer", "key", "free", "tiny", "gw-dead", 5, ""),
        EndedRecord(request_id, "completed", "", 1, 12.5, 1.0, 2.0, "", 3, "w1", 1, 5, 5, "direct", True),
    )


async def test_a_gateway_that_stops_meanwhile_leaves_its_spool_to_the_next(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Redis is away when it stops; the next gateway of the directory merges, and the files are gone."""
    async with endpoints("serve") as direct_workers:
        async with direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
            outage.begin()
            _, document, _ = await stack.infer({"input": "abc"}, "enterprise")
        assert len(list((tmp_path / "spool").glob("g1.log*"))) == 1
        outage.end()
        async with running_stack(client, redis_url, worker=False, gateway_id="g2", data_dir=tmp_path) as stack:
            await eventually(lambda: not list((tmp_path / "spool").glob("g1.*")), "the files are merged")
            _, ended = await audit_of(pool, document["request_id"])
            assert ("completed", "", "direct", True) in told(ended)


async def test_bad_lines_are_set_aside_and_stop_nothing(
    pool: Pool, client: Redis, redis_url: str, tmp_path: Path
) -> None:
    """A dead gateway left 600 pairs with a torn line, a damaged one and a tail: all pairs arrive, three lines wait apart."""
    pairs = [pair() for _ in range(600)]
    lines = [to_line(each) for each in pairs]
    lines.insert(300, lines[5][:40] + b"\n")
    lines.insert(100, lines[7].replace(b"1 ", b"1 0", 1))
    spool = Spool(tmp_path / "spool", "gw-dead", 1 << 20)
    spool.open()
    spool.close()
    (tmp_path / "spool" / "gw-dead.log").write_bytes(b"".join(lines) + lines[0][:50])
    async with running_stack(client, redis_url, worker=False, data_dir=tmp_path) as stack:
        await eventually(lambda: not list((tmp_path / "spool").glob("gw-dead.log*")), "the file is merged")
        _, ended = await pool.audit()
        assert {each.id for each in ended} == {each.id for _, each in pairs}
        assert stack.gateway.direct.view().bad_lines == 3
        assert len((tmp_path / "spool" / "gw-dead.bad").read_bytes().splitlines()) == 3


async def test_the_living_are_left_alone(client: Redis, redis_url: str, tmp_path: Path) -> None:
    """Another gateway of the same directory holds its lock: its file stays."""
    other = Spool(tmp_path / "spool", "gw-alive", 1 << 20)
    other.open()
    other.append([pair()])
    async with running_stack(client, redis_url, worker=False, data_dir=tmp_path) as stack:
        merge = stack.gateway.direct._parts.audit._merge
        await eventually(lambda: merge._dead_at > 0, "it has looked for the dead")
        assert (tmp_path / "spool" / "gw-alive.log").exists()
    other.close()


@pytest.mark.parametrize("fault", ["disk", "full"])
async def test_what_cannot_be_noted_is_not_answered(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path, fault: str
) -> None:
    """503, and no worker sees it; health says why; when there is room again it serves again."""
    changes = {"spool_max_bytes": 100} if fault == "full" else {}
    async with (
        endpoints("serve") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers, **changes) as stack,
    ):
        blocker = tmp_path / "spool" / "g1.log"
        if fault == "disk":
            blocker.mkdir()
        outage.begin()
        answers = [await stack.infer(tier_name="enterprise") for _ in range(3)]
        assert {(code, each["error"]["code"]) for code, each, _ in answers} == {(503, "no_capacity")}
        assert {each["error"]["message"] for _, each, _ in answers} == {
            "This gateway cannot record further requests while Redis is not available; try again soon."
        }
        assert direct_workers[0].batches == []

        async def told() -> list[str]:
            _, health = await stack.internal("/internal/health")
            return [each for each in health["reasons"] if "spool" in each.lower()]

        (reason,) = await eventually(told, "health, which may be a second old, tells of the spool", 3.0)
        if fault == "full":
            assert reason.startswith("The spool is full")
            return
        assert reason.startswith("The spool cannot be written")
        for path in (tmp_path / "spool").glob("g1.log*"):
            shutil.rmtree(path)

        async def serves() -> bool:
            return (await stack.infer(tier_name="enterprise"))[0] == 200

        await eventually(serves, "it serves again", 3.0)


async def test_a_spool_that_fills_up_refuses_before_anything_runs(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """What a worker ran is answered and in the audit, to the last byte; who is refused then has not run."""
    async with (
        endpoints("serve") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers, spool_max_bytes=64_000) as stack,
    ):
        outage.begin()
        asking = [stack.infer({"input": f"n{n}"}, "enterprise") for n in range(200)]
        answers = await asyncio.gather(*asking)
        good = [each["request_id"] for code, each, _ in answers if code == 200]
        bad = [(code, each["error"]["code"]) for code, each, _ in answers if code != 200]
        assert good
        assert bad
        assert set(bad) == {(503, "no_capacity")}
        assert sorted(i for batch in direct_workers[0].batches for i in batch) == sorted(good)
        assert stack.gateway.direct.view().spool_bytes <= 64_000
        outage.end()
        await back(stack)
        accepted, ended = await pool.audit()

        assert {each.id for each in accepted} == {each.id for each in ended} == set(good)


async def test_a_retried_request_begins_once(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """Three workers lost with it: one beginning on the disk, then its pair."""
    async with (
        endpoints("hang up") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers) as stack,
    ):
        outage.begin()
        _, document, _ = await stack.infer(tier_name="enterprise")
        assert len(direct_workers[0].batches) == 3
        notes = [from_line(line) for line in (tmp_path / "spool" / "g1.log").read_bytes().splitlines(keepends=True)]

        assert [note and (note[0].id, note[1] and note[1].error_code) for note in notes] == [
            (document["error"]["request_id"], None),
            (document["error"]["request_id"], "worker_lost"),
        ]


async def test_what_ran_and_could_not_be_noted_is_noted_later_as_it_was_told(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails between its run and its answer: 503, and that is in the audit once the disk is well."""
    monkeypatch.setattr("gateway.direct.spool_tasks.RETRY_S", 0.1)

    def refuse(entries: object, reserve: int) -> None:
        raise SpoolError("The spool cannot be written: Input/output error.")

    async with direct_already(client, redis_url, tmp_path, outage) as (stack, door):
        spool = stack.gateway.direct._parts.audit.spool
        door.seconds = 0.2
        asking = asyncio.create_task(stack.infer(tier_name="enterprise"))
        await eventually(lambda: len(door.batches) == 2, "the worker has it")
        with monkeypatch.context() as patch:
            patch.setattr(spool, "append", refuse)
            status, document, _ = await asking
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        outage.end()
        await back(stack)
        await eventually(
            lambda: not stack.gateway.direct._completion._unwritten and not spool.reserved, "its end is written"
        )
        ends = await told_at_last(pool, stack, document["error"]["request_id"])

        assert ends == {("failed", "no_capacity", "direct", True)}


async def test_what_is_under_way_while_its_beginning_is_merged_ends_as_ever(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Redis is back while a worker runs it: its beginning goes first, its end later, and its client gets the output."""
    async with direct_already(client, redis_url, tmp_path, outage) as (stack, door):
        door.seconds = 0.7
        asking = asyncio.create_task(stack.infer({"input": "abc"}, "enterprise"))
        await eventually(lambda: len(door.batches) == 2, "the worker has it")
        request_id = door.batches[1][0]
        outage.end()
        await eventually(lambda: not stack.gateway.direct.view().spool_bytes, "its beginning is merged")
        accepted, ended = await audit_of(pool, request_id)
        assert ([each.id for each in accepted], ended, asking.done()) == ([request_id], [], False)
        assert (await asking)[1]["output"] == "cba"
        ends = await told_at_last(pool, stack, request_id)

        assert ends == {("completed", "", "direct", True)}


async def test_a_client_that_leaves_is_noted_as_cancelled(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """It never hears an answer, and the audit does not say that it did; nothing stays behind."""
    async with direct_already(client, redis_url, tmp_path, outage) as (stack, door):
        door.behaviour = "silent"
        asking = asyncio.create_task(stack.infer(tier_name="paid"))
        await eventually(lambda: len(door.batches) == 2, "the worker has it")
        request_id = door.batches[1][0]
        asking.cancel()
        await eventually(lambda: len(stack.gateway.direct._completion) == 0, "it is noted")
        outage.end()
        ends = await told_at_last(pool, stack, request_id)

        assert ends == {("failed", "cancelled", "direct", False)}


async def test_the_deadline_is_kept_and_noted(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """A worker that is too slow: 504 in time, in the audit as told."""
    async with direct_already(client, redis_url, tmp_path, outage, total_ms=900) as (stack, door):
        door.seconds = 5.0
        began = time.monotonic()
        status, document, _ = await stack.infer(tier_name="enterprise")
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        assert 0.7 < time.monotonic() - began < 1.0
        outage.end()
        ends = await told_at_last(pool, stack, document["error"]["request_id"])

        assert ends == {("failed", "deadline_exceeded", "direct", True)}


async def test_who_waits_too_long_in_the_room_is_told_so(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Busy workers: `queue_timeout` after the tier's queue age, as through Redis."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(key={"max_queue_ms": 300})
        outage.begin()
        await stack.infer(tier_name="enterprise")
        direct_workers[0].behaviour = "busy"
        status, document, _ = await stack.infer(tier_name="free")
        assert (status, document["error"]["code"]) == (504, "queue_timeout")
        outage.end()
        ends = await told_at_last(pool, stack, document["error"]["request_id"])

        assert ends == {("failed", "queue_timeout", "direct", True)}


async def test_what_redis_accepted_waits_for_redis_where_no_worker_serves_it(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Taken over, not served, left to Redis: when Redis is back in time its worker's answer is the answer."""
    async with (
        endpoints("hang up") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers) as stack,
    ):
        asking = asyncio.create_task(stack.infer({"input": "abc"}))
        await eventually(lambda: [w.accepted for w in stack.gateway.pending_requests.all()] == [True], "it is accepted")
        outage.begin()
        await eventually(lambda: len(direct_workers[0].batches) == 3, "it was tried three times")
        (pending,) = stack.gateway.pending_requests.all()
        await eventually(lambda: not pending.direct, "it is left to Redis")
        assert not asking.done()
        outage.end()

        async def answered() -> bool:
            await stack.worker.turn()
            return asking.done()

        await eventually(answered, "Redis serves it")
        assert (await asking)[1]["output"] == "cba"


async def test_a_gateway_that_drains_meanwhile_serves_and_notes_what_it_holds(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """What a worker can serve is served; the rest is told to go elsewhere; the next gateway merges both."""
    async with endpoints("serve") as direct_workers:
        changes = {"drain_timeout_s": 0.5}
        async with direct_stack(client, redis_url, tmp_path, direct_workers, **changes) as stack:
            outage.begin()
            await stack.infer(tier_name="enterprise")
            direct_workers[0].seconds = 0.2
            served = asyncio.create_task(stack.infer(tier_name="enterprise"))
            await eventually(lambda: len(direct_workers[0].batches) == 2, "the worker has one")
            left = asyncio.create_task(stack.infer(tier_name="free"))
            await eventually(lambda: len(stack.gateway.direct._completion) == 2, "the other waits")
            direct_workers[0].behaviour = "silent"
            await stack.gateway.drain()
            (status, first, _), (code, second, _) = await served, await left
            assert (status, code, second["error"]["code"]) == (200, 503, "draining")
        outage.end()
        async with running_stack(client, redis_url, worker=False, gateway_id="g2", data_dir=tmp_path):
            await eventually(lambda: not list((tmp_path / "spool").glob("g1.*")), "the files are merged")
        _, ended = await audit_of(pool, first["request_id"])
        assert told(ended) == {("completed", "", "direct", True)}
        _, ended = await audit_of(pool, second["error"]["request_id"])
        assert told(ended) == {("failed", "draining", "direct", True)}
