"""Batches during the faults: each batch customer uploads a file, creates a batch, and reads its files when it has ended.

One batch of a customer follows the other until `stop`. Calls are repeated at other gateways until one succeeds, the creation
with its Idempotency-Key, and once more afterwards: it must return the same batch. A line's prompt is its `custom_id`, and the
model reverses it. A few lines have no prompt, which the endpoint rejects.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import aiohttp
import msgspec

from tierlane_tools.chaos.history import BatchCreated, BatchEnded, BatchFault, BatchLine, History, LoadCustomer, Target

LINES, REJECTED_LINES = 150, 3
ENDPOINT = "/v1/completions"
FINAL = frozenset({"completed", "failed", "expired", "cancelled"})
TEMPORARY = frozenset({429, 503, 504})  # A client repeats the call.
POLL_S = 0.5
CALL_S = 6.0
PATIENCE_S = 60.0  # Of a call, and of a batch after `stop`.
OK_STATUS = 200
PAGE = 100


class _GaveUp(Exception):
    """The batch API did not do its part; it is recorded."""


class _LineCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class _Batch(msgspec.Struct):
    """The used fields of a batch."""

    id: str
    status: str
    request_counts: _LineCounts
    output_file_id: str | None = None
    error_file_id: str | None = None


class BatchLoad:
    """The batches of one run."""

    def __init__(self, target: Target, seed: int, history: History) -> None:
        """The same seed uses the gateways in the same order."""
        self._target = target
        self._history = history
        self._random = Random(f"{seed}/batches")
        self._stop_at: float | None = None
        self._timeout = aiohttp.ClientTimeout(total=CALL_S)

    def stop(self) -> None:
        """Create no more batches; `run` returns when the last ones have ended."""
        self._stop_at = self._stop_at or time.monotonic()

    async def run(self) -> None:
        """Create batches and wait for their ends; all are in the history afterwards."""
        async with aiohttp.ClientSession(timeout=self._timeout) as session, asyncio.TaskGroup() as group:
            for customer in self._target.batch_customers:
                group.create_task(_Batches(self, session, customer).run(), name=f"batches of {customer.name}")

    @property
    def stopped(self) -> bool:
        """Whether no more batches are to be created."""
        return self._stop_at is not None

    @property
    def over(self) -> bool:
        """Whether all batches should have ended."""
        return self._stop_at is not None and time.monotonic() > self._stop_at + PATIENCE_S

    @property
    def model(self) -> str:
        """The model of the lines."""
        return self._target.model

    def gateway(self) -> str:
        """The URL of any gateway."""
        return self._random.choice(self._target.http_urls)

    def add(self, event: BatchCreated | BatchEnded | BatchFault) -> None:
        """Add an event to the history."""
        self._history.add(event)


class _Batches:
    """The batches of one customer, one after the other."""

    def __init__(self, load: BatchLoad, session: aiohttp.ClientSession, customer: LoadCustomer) -> None:
        self._load = load
        self._session = session
        self._customer = customer
        self._created: set[str] = set()

    async def run(self) -> None:
        try:
            while not self._load.stopped:
                await self._one()
            path = f"/v1/batches?limit={PAGE}"
            page = await self._call("GET", path, dict)
            listed = [batch["id"] for batch in page["data"]]
            while page["has_more"]:
                page = await self._call("GET", f"{path}&after={page['last_id']}", dict)
                listed += [batch["id"] for batch in page["data"]]
            if sorted(listed) != sorted(self._created):
                self._fault(f"{len(self._created)} batches were created, {len(listed)} are listed.")
        except _GaveUp as error:
            self._fault(str(error))

    def _fault(self, detail: str) -> None:
        self._load.add(BatchFault(at=time.monotonic(), detail=f"{self._customer.name}: {detail}"))

    async def _one(self) -> None:
        name = secrets.token_hex(6)
        valid = tuple(f"{name} {number}" for number in range(LINES - REJECTED_LINES))
        invalid = tuple(f"{name} rejected {number}" for number in range(REJECTED_LINES))
        content = input_file(self._load.model, valid, invalid)
        file_id = (await self._call("POST", "/v1/files", lambda: {"data": _form(content)}))["id"]
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = await self._create(body, name)
        self._created.add(batch.id)
        self._load.add(
            BatchCreated(at=time.monotonic(), batch=batch.id, customer=self._customer.id, valid=valid, invalid=invalid)
        )
        if (again := (await self._create(body, name)).id) != batch.id:
            self._fault(f"Its Idempotency-Key created {batch.id} and {again}.")
        while batch.status not in FINAL:
            if self._load.over:
                raise _GaveUp(f"{batch.id} is still {batch.status}, with {batch.request_counts}.")
            await asyncio.sleep(POLL_S)
            batch = await self._batch("GET", f"/v1/batches/{batch.id}", dict)
        counts = batch.request_counts
        outputs = await self._lines(batch.output_file_id)
        errors = await self._lines(batch.error_file_id)
        self._load.add(
            BatchEnded(
                at=time.monotonic(),
                batch=batch.id,
                status=batch.status,
                total=counts.total,
                completed=counts.completed,
                failed=counts.failed,
                outputs=outputs,
                errors=errors,
            )
        )

    async def _create(self, body: dict[str, str], key: str) -> _Batch:
        return await self._batch("POST", "/v1/batches", lambda: {"json": body, "headers": {"Idempotency-Key": key}})

    async def _batch(self, method: str, path: str, given: Callable[[], dict[str, Any]]) -> _Batch:
        return msgspec.convert(await self._call(method, path, given), _Batch)

    async def _lines(self, file_id: str | None) -> tuple[BatchLine, ...]:
        if file_id is None:
            return ()
        content = await self._bytes("GET", f"/v1/files/{file_id}/content", dict)
        return tuple(map(_read_line, content.splitlines()))

    async def _call(self, method: str, path: str, given: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._bytes(method, path, given))
        return found

    async def _bytes(self, method: str, path: str, given: Callable[[], dict[str, Any]]) -> bytes:
        """The body of a 200. Raises _GaveUp after any other response that is not temporary, or after PATIENCE_S."""
        deadline, problem = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < deadline:
            options = given()
            headers = {"Authorization": f"Bearer {self._customer.key}", **options.pop("headers", {})}
            try:
                async with self._session.request(
                    method, self._load.gateway() + path, headers=headers, **options
                ) as response:
                    body = await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = type(error).__name__
            else:
                if response.status == OK_STATUS:
                    return body
                problem = f"{response.status} {body[:200].decode(errors='replace')}"
                if response.status not in TEMPORARY:
                    raise _GaveUp(f"{method} {path} got {problem}.")
            await asyncio.sleep(POLL_S)
        raise _GaveUp(f"{method} {path} did not succeed within {PATIENCE_S:.0f} s: {problem}.")


def _form(content: bytes) -> aiohttp.FormData:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="lines.jsonl", content_type="application/jsonl")
    return form


def input_file(model: str, valid: Sequence[str], invalid: Sequence[str]) -> bytes:
    """The input file of a batch, with its invalid lines in between."""
    bodies = {custom_id: {"model": model, "prompt": custom_id} for custom_id in valid}
    bodies |= {custom_id: {"model": model} for custom_id in invalid}
    lines = [
        json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": bodies[custom_id]})
        for custom_id in sorted(bodies, key=lambda each: each[::-1])
    ]
    return "\n".join(lines).encode()


def _read_line(raw: bytes) -> BatchLine:
    line = json.loads(raw)
    response = line["response"]
    if response is None:
        return BatchLine(line["custom_id"], line["error"]["code"])
    body = response["body"]
    choices = body.get("choices")
    return BatchLine(line["custom_id"], choices[0]["text"] if choices else str(body["error"].get("code")))
