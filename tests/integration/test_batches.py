"""Files and batches with OpenAI's client: the states, results, errors and limits of `/v1/files` and `/v1/batches`."""

import asyncio
from typing import Any

import openai
import pytest

from eventually import eventually
from integration.batch_fixtures import CHAT, BatchBench, StartBatches, bench, line, start_batches
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["bench", "database_url", "db", "postgres_server", "start_batches"]


async def test_a_batch_of_each_endpoint_completes(bench: BatchBench) -> None:
    """Each custom_id once in the output file, in the form of its endpoint; a rejected body is a line of the error file."""
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
    with pytest.raises(openai.BadRequestError, match="completed|cancelled"):
        await bench.client.batches.cancel((await bench.until((await bench.create([""])).id)).id)

    assert (cancelling.status, ended.status) == ("cancelling", "cancelled")
    assert sorted(int(each["custom_id"]) for each in (*outputs, *errors)) == list(range(600))
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert 0 < len(outputs) < 600
