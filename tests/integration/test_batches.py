"""Files and batches with OpenAI's client: the states, results, errors and limits of `/v1/files` and `/v1/batches`."""

import asyncio
import random
from functools import partial
from typing import Any

import aiohttp
import openai
import pytest

from eventually import eventually
from gateway.batch_api.calls import identity_of, member_id
from gateway.batch_api.store import PIECE_BYTES
from integration.admin_fixtures import Admin
from integration.batch_fixtures import CHAT, BatchBench, StartBatches, bench, line, start_batches
from integration.gateway_fixtures import reverse, reverse_or_vector, tier
from integration.jobs_fixtures import customer_id
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.batches import audit_lines, purge_batches
from ledger.files import purge_files
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.request_id import created_at

__all__ = ["bench", "database_url", "db", "postgres_server", "start_batches"]


async def test_a_batch_of_each_endpoint_completes(bench: BatchBench) -> None:
    """Each custom_id once in the output file, in the form of its endpoint; a rejected body is a line of the error file.

    The requests of a list have ids that follow from that of its line, so that a line that is submitted again runs once.
    """
    ran: set[str] = set()

    def answer(member: ClaimedRequest) -> Outcome:
        ran.add(member.id)
        return reverse_or_vector(member)

    bench.stack.worker.answerer = answer
    embeddings = await bench.create(
        [
            line("one", "/v1/embeddings", model="tiny", input="a"),
            line("two", "/v1/embeddings", model="tiny", input=["a", "b"]),
        ],
        "/v1/embeddings",
    )
    messages = [{"role": "user", "content": "hello"}]
    chats = await bench.create([line(str(n), CHAT, model="tiny", messages=messages) for n in range(3)], CHAT)
    texts = await bench.create(
        [
            line("good"),
            line("unknown field", model="tiny", prompt="a", colour="red"),
            line("stream", prompt="a", model="tiny", stream=True),
        ],
        metadata={"order": "7"},
    )
    ended = [await bench.until(batch.id) for batch in (embeddings, chats, texts)]
    vectors, answers, outputs = [await bench.lines(batch.output_file_id) for batch in ended]
    errors = await bench.lines(ended[2].error_file_id)

    assert [batch.status for batch in ended] == ["completed"] * 3
    assert texts.status == "validating"
    assert ended[2].metadata == {"order": "7"}
    assert [(counts.total, counts.completed, counts.failed) for batch in ended if (counts := batch.request_counts)] == [
        (2, 2, 0),
        (3, 3, 0),
        (3, 1, 2),
    ]
    assert (ended[0].error_file_id, ended[0].errors) == (None, None)
    assert {each["custom_id"]: len(each["response"]["body"]["data"]) for each in vectors} == {"one": 1, "two": 2}
    of_lists = {each["custom_id"]: each["response"]["request_id"] for each in vectors}
    assert {member_id(of_lists["two"], 0), member_id(of_lists["two"], 1), of_lists["one"]} <= ran
    assert [each["custom_id"] for each in answers] == ["0", "1", "2"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert [each["response"]["body"]["choices"][0]["text"] for each in outputs] == ["doog"]
    assert {each["custom_id"]: each["response"]["body"]["error"]["param"] for each in errors} == {
        "unknown field": "colour",
        "stream": "stream",
    }
    assert {each["response"]["status_code"] for each in errors} == {400}
    rows = await bench.db.fetch("SELECT request_id FROM batch_lines WHERE NOT failed")
    assert len({row["request_id"] for row in rows}) == 6


async def test_a_batch_of_responses(bench: BatchBench) -> None:
    """A response of a batch is not stored; a line that needs a stored response is in the error file."""
    own = {"model": "tiny", "input": "hello"}
    created = await bench.create(
        [
            line("r", "/v1/responses", **own),
            line("background", "/v1/responses", **own, background=True),
            line("earlier", "/v1/responses", **own, previous_response_id=f"resp_{0:032x}"),
        ],
        "/v1/responses",
    )
    batch = await bench.until(created.id)
    written, errors = await bench.lines(batch.output_file_id), await bench.lines(batch.error_file_id)

    assert batch.status == "completed"
    assert ['"olleh"' in each["response"]["body"]["output"][0]["content"][0]["text"] for each in written] == [True]
    assert [(each["response"]["body"]["status"], each["response"]["body"]["store"]) for each in written] == [
        ("completed", False)
    ]
    assert {each["custom_id"]: each["response"]["body"]["error"]["param"] for each in errors} == {
        "background": "background",
        "earlier": "previous_response_id",
    }


async def test_faults_of_the_file_fail_the_batch(bench: BatchBench) -> None:
    """With the number of each bad line; no line runs."""
    lines: list[Any] = [line("a"), "no json", "", line("a"), line("b", "/v1/embeddings"), {"custom_id": "c"}]
    batch = await bench.until((await bench.create(lines)).id)
    empty = await bench.until((await bench.create([""])).id)

    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(fault.code, fault.line, fault.param) for fault in batch.errors.data or []] == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 4, "custom_id"),
        ("mismatched_url", 5, "url"),
        ("invalid_line", 6, "url"),
    ]
    assert empty.errors is not None
    assert [fault.code for fault in empty.errors.data or []] == ["empty_file"]
    assert bench.stack.worker.seen == []


async def test_cancel(bench: BatchBench) -> None:
    """Finished lines are in the output file, all others in the error file as batch_cancelled."""
    worker = bench.stack.worker
    worker.most = 5
    batch = await bench.create([line(str(number)) for number in range(600)])
    await bench.until(batch.id, "in_progress")
    await eventually(lambda: worker.seen, "some have run")
    worker.hold = True
    cancelling = await bench.client.batches.cancel(batch.id)
    ended = await bench.until(batch.id, timeout_s=30.0)
    outputs, errors = await bench.lines(ended.output_file_id), await bench.lines(ended.error_file_id)
    with pytest.raises(openai.BadRequestError, match="The batch is failed"):
        await bench.client.batches.cancel((await bench.until((await bench.create([""])).id)).id)

    assert (cancelling.status, ended.status) == ("cancelling", "cancelled")
    assert sorted(int(each["custom_id"]) for each in (*outputs, *errors)) == list(range(600))
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert 0 < len(outputs) < 600


async def test_lines_wait_for_limits_and_repeat_failed_runs(bench: BatchBench) -> None:
    """A line refused by a limit waits. One that fails by a lost worker is run again; with its own input's error, it fails."""
    bench.catalog.set(
        tiers=(tier("enterprise", 1, 0.05), tier("paid", 2, 0.25), tier("free", 3, 0.1, max_concurrency=7))
    )
    failed: set[str] = set()

    def unreliable(member: ClaimedRequest) -> Outcome:
        text = decode_payload(member.body).input
        if text == "poison":
            return Outcome(member.id, ErrorCode.POISON_REQUEST, -1, 0, "v1", "")
        if text not in failed and len(failed) < 20:
            failed.add(text)
            return Outcome(member.id, ErrorCode.GPU_TIMEOUT, -1, 0, "v1", "")
        return reverse(member)

    bench.stack.worker.answerer = unreliable
    batch = await bench.create([line(f"{number:03}") for number in range(60)] + [line("poison")])
    ended = await bench.until(batch.id)
    outputs, errors = await bench.lines(ended.output_file_id), await bench.lines(ended.error_file_id)

    assert ended.status == "completed"
    assert {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in outputs} == {
        f"{number:03}": f"{number:03}"[::-1] for number in range(60)
    }
    assert len(outputs) == 60
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("poison", 422)]
    assert len(failed) == 20


async def test_lines_count_in_the_quotas_of_the_key_of_their_batch(bench: BatchBench) -> None:
    """Lines beyond a quota wait, and their use is noted for alerts; a revoked key keeps its quotas."""
    quotas = ((f"1day@{bench.catalog.keys['free'].id}", 3),)
    bench.catalog.set(key={"quotas": quotas})
    batch = await bench.create([line(str(number)) for number in range(5)])
    await eventually(
        lambda: bench.db.fetchval("SELECT count(*) = 3 FROM batch_lines WHERE output IS NOT NULL"), "three lines ended"
    )
    await bench.client.batches.cancel(batch.id)
    ended = await bench.until(batch.id)
    bench.catalog.set(key={"quotas": quotas, "revoked": True})
    later = identity_of(bench.stack.gateway.entry.catalog, customer_id("free"), bench.catalog.keys["free"].id)

    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (3, 2)
    assert len(bench.stack.worker.seen) == 3
    assert later is not None
    assert later.quotas == quotas
    serving = bench.stack.gateway.jobs.serving
    assert serving is not None
    assert [use.left.quotas[0][0] for use in serving.quota_uses.take()] == [0]


async def test_open_lines_expire(start_batches: StartBatches) -> None:
    """At the end of the window open lines become lines of the error file, and the batch is expired."""
    async with start_batches(batches={"total_s": 2.0, "window": 4}) as bench:
        bench.stack.worker.hold = True
        ended = await bench.until((await bench.create([line(str(n)) for n in range(9)])).id, timeout_s=30.0)
        errors = await bench.lines(ended.error_file_id)

    assert (ended.status, ended.output_file_id) == ("expired", None)
    assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in errors] == [
        (str(n), None, "batch_expired") for n in range(9)
    ]


async def test_files(bench: BatchBench) -> None:
    """A file is returned as it was sent, listed in pages, and deleted, unless a batch reads it; others' files are unknown."""
    client = bench.client
    raw = random.Random(7).randbytes(3 * PIECE_BYTES + 5)
    large = await client.files.create(file=("../a/large.bin", raw), purpose="batch")
    small = [await bench.upload([line(str(number))]) for number in range(3)]
    pages = await client.files.list(limit=2, order="asc")
    everything = [file.id async for file in client.files.list(limit=2, order="asc")]
    content = await client.files.content(large.id)
    bench.stack.worker.hold = True
    batch = await bench.create([line("a")])
    await bench.until(batch.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    bench.stack.worker.hold = False
    await bench.until(batch.id)
    short = await client.files.create(
        file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    deleted = await client.files.delete(large.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(large.id)
    other = client.with_options(api_key=bench.stack.catalog.keys["paid"].text)
    with pytest.raises(openai.NotFoundError):
        await other.files.retrieve(small[0])
    with pytest.raises(openai.NotFoundError):
        await other.batches.retrieve(batch.id)

    assert (large.filename, large.bytes, large.purpose, large.status) == ("large.bin", len(raw), "batch", "processed")
    assert content.content == raw
    assert ([file.id for file in pages.data], pages.has_more) == ([large.id, small[0]], True)
    assert everything == [large.id, *small]
    assert (short.expires_at or 0) - short.created_at == 3600
    assert deleted.deleted
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
    await purge_files(bench.db)
    assert await bench.db.fetchval("SELECT count(*) FROM files WHERE id = $1", large.id) == 1  # It is purged in parts.
    await purge_files(bench.db)
    assert await bench.db.fetchval("SELECT count(*) FROM file_chunks WHERE file_id = $1", large.id) == 0
    assert await bench.db.fetchval("SELECT count(*) FROM files WHERE id = $1", large.id) == 0


async def test_expired_batches_are_purged(bench: BatchBench) -> None:
    """With their lines and files, in parts; other batches are kept."""
    old, kept = [await bench.until((await bench.create([line("a"), line("b")])).id) for _ in range(2)]
    await bench.db.execute("UPDATE batches SET expires_at = now() WHERE id = $1", old.id)
    await bench.db.execute("UPDATE files SET expires_at = now() WHERE batch_id = $1", old.id)
    for _ in range(2):
        await purge_files(bench.db)
        await purge_batches(bench.db)
    with pytest.raises(openai.NotFoundError):
        await bench.client.batches.retrieve(old.id)

    assert [each.id async for each in bench.client.batches.list()] == [kept.id]
    assert len(await bench.lines(kept.output_file_id)) == 2
    assert await bench.db.fetchval("SELECT count(*) FROM batch_lines") == 2
    assert await bench.db.fetchval("SELECT count(*) FROM files WHERE batch_id IS NOT NULL") == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"purpose": "fine-tune", "file": b"{}"}, 400, "purpose"),
        ({"purpose": "batch"}, 400, "file"),
        ({"file": b"{}"}, 400, "purpose"),
        ({"purpose": "batch", "file": b""}, 400, "file"),
        ({"purpose": "batch", "file": b"x" * 2001}, 413, "file"),
        ({"purpose": "batch", "colour": "red", "file": b"{}"}, 400, "colour"),
        ({"purpose": "batch", "file": b"x" * 1500}, 429, "file"),
    ],
)
async def test_rejected_uploads(start_batches: StartBatches, fields: dict[str, Any], status: int, param: str) -> None:
    """The error names the field, and nothing of the file is kept."""
    async with start_batches(batches={"max_file_bytes": 2000, "max_stored_bytes": 1400}) as bench:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in fields.items():
            form.add_field(name, value, filename="a" if name == "file" else None)
        async with bench.stack.http.post(
            f"{bench.stack.url}/v1/files", data=form, headers=bench.stack.key()
        ) as response:
            error = (await response.json())["error"]
        left = await bench.client.files.list()

    assert (response.status, error["param"]) == (status, param)
    assert left.data == []


async def test_rejected_batches(start_batches: StartBatches) -> None:
    """The error names the field; a customer has so many open batches at most; too many lines fail the batch."""
    async with start_batches(batches={"max_open": 1, "max_lines": 3}) as bench:
        client, file_id = bench.client, await bench.upload([line("a")])
        good: dict[str, Any] = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        found = {}
        for wrong in ({"endpoint": "/v1/messages"}, {"completion_window": "1h"}, {"metadata": {"a": "b" * 513}}):
            with pytest.raises(openai.BadRequestError) as raised:
                await client.batches.create(**good | wrong)
            found |= dict.fromkeys(wrong, raised.value.param)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.batches.create(**good | {"input_file_id": "file-1"})
        many = await bench.until((await bench.create([line(str(number)) for number in range(4)])).id)
        bench.stack.worker.hold = True
        await client.batches.create(**good)
        with pytest.raises(openai.RateLimitError, match="1 open batches"):
            await client.batches.create(**good)

    assert found == {name: name for name in found}
    assert unknown.value.param == "input_file_id"
    assert many.errors is not None
    assert [fault.code for fault in many.errors.data or []] == ["too_many_lines"]


async def test_an_idempotency_key_creates_one_batch(bench: BatchBench) -> None:
    """Also of two requests at a time; another body is rejected, and another customer's key is its own."""
    file_id = await bench.upload([line("a")])
    create = partial(
        bench.client.batches.with_raw_response.create,
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_headers={"Idempotency-Key": "order-7"},
    )
    first, second = await asyncio.gather(create(), create())
    again = await create()
    with pytest.raises(openai.UnprocessableEntityError):
        await create(metadata={"a": "b"})

    assert {each.parse().id for each in (first, second, again)} == {again.parse().id}
    assert sorted(each.headers.get("Idempotent-Replayed", "") for each in (first, second)) == ["", "true"]
    assert again.headers["Idempotent-Replayed"] == "true"
    assert len([each async for each in bench.client.batches.list()]) == 1


async def test_a_gateway_of_one_pool_runs_its_own_batches(start_batches: StartBatches) -> None:
    """Those that were created at gateways of another pool are left to them, since it has none of their models."""
    async with start_batches(only_own=True) as bench:
        first, other = await bench.create([line("a")]), "batch_" + "0" * 32
        await bench.until(first.id, "completed")
        await bench.db.execute(
            """
            INSERT INTO batches (id, customer_id, api_key_id, endpoint, input_file_id, pool, deadline)
            SELECT $2, customer_id, api_key_id, endpoint, input_file_id, 'other', deadline
            FROM batches WHERE id = $1
            """,
            first.id,
            other,
        )
        await bench.until((await bench.create([line("b")])).id, "completed")
        left = await bench.db.fetchrow("SELECT owner, status FROM batches WHERE id = $1", other)

    assert tuple(left) == (None, "validating")


async def test_operators(bench: BatchBench, database_url: str) -> None:
    """`tierlane batch` lists, shows and cancels batches of all customers."""
    admin = Admin(database_url)
    bench.stack.worker.hold = True
    done = await bench.until((await bench.create(["no json"])).id)
    batch = await bench.until((await bench.create([line("a")], metadata={"a": "b"})).id, "in_progress")
    rows = await admin.json("batch", "list")
    shown = await admin.json("batch", "show", batch.id)
    counted = await bench.stack.http.get(f"{bench.stack.url}/metrics")
    page = await counted.text()
    await admin.done("batch", "cancel", batch.id)
    ended = await bench.until(batch.id)
    fault = await admin.fault(1, "batch", "cancel", done.id)

    assert [(row["id"], row["customer"], row["status"], row["total"]) for row in rows] == [
        (batch.id, "free", "in_progress", 1),
        (done.id, "free", "failed", 0),
    ]
    assert [row["id"] for row in await admin.json("batch", "list", "--open")] == []
    assert await admin.done("batch", "list", "--customer", "paid") == "No batches.\n"
    assert rows[1]["errors"][0]["line"] == 1
    assert "tierlane_open_batches" in page
    assert "tierlane_batch_lines_total" in page
    assert (shown["metadata"], shown["owner"]) == ({"a": "b"}, "g1")
    assert ended.status == "cancelled"
    assert "so it cannot be cancelled" in fault
    assert "invalid_json_line" in await admin.done("batch", "show", done.id)
    assert "There is no batch" in await admin.fault(1, "batch", "show", "batch_1")


async def test_lost_audit_rows_are_written(bench: BatchBench) -> None:
    """If neither Redis nor the gateway has the records of a line, its row follows from the batch; a rejected line has none."""
    bench.stack.worker.answerer = lambda member: reverse(member)._replace(output='\0\\"model":"x","total_tokens":7')
    lines = [line('a\0\\u0000"model":"x"'), line("b"), line("poison"), line("bad", prompt=1)]
    batch = await bench.until((await bench.create(lines)).id)
    await bench.until((await bench.create([line("c")])).id)
    found = await bench.db.fetch("SELECT request_id FROM batch_lines ORDER BY request_id")
    ids = [row["request_id"] for row in found]
    opened = "INSERT INTO requests (id, created_at, status, tier, model, endpoint) VALUES ($1, $2, 'queued', 'free', 'tiny', $3)"
    for request_id in (ids[1], ids[3]):
        await bench.db.execute(opened, request_id, created_at(request_id), batch.endpoint)
    missing = [await audit_lines(bench.db, after_s) for after_s in (60.0, 0.0, 0.0)]
    audited = await bench.db.fetch(
        "SELECT id, status, http_status, tier, model, endpoint, error_code, tokens_used FROM requests ORDER BY id"
    )

    assert missing == [0, 5, 0]
    assert [tuple(row)[1:] for row in audited] == [
        *[
            ("completed", 200, "free", "tiny", "/v1/completions", None, tokens)
            for tokens in (len(lines[0]["custom_id"]), 1, 6)
        ],
        ("failed", 400, "free", "tiny", "/v1/completions", "invalid_request", None),
        ("completed", 200, "free", "tiny", "/v1/completions", None, 1),
    ]
    assert {row["id"] for row in audited} == set(ids)
