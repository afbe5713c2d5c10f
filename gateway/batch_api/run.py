"""The run of one batch, by the gateway that owns it: check the file, submit lines a window at a time, write their ends.

A line exists three times: in the input file, as a row once its request has an id, and as a request in Redis. The row is
committed before the request is admitted, so whichever process dies, the next owner finds the ids that were submitted, admits
them again (admission ignores an id that Redis still has), and reads their results. What Redis has lost is admitted again. A row
ends once, so the output has each line once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from gateway.batch_api.calls import LineCall, error_line
from gateway.batch_api.lines import (
    ENVELOPE_BYTES,
    FileCheck,
    FileLine,
    LineSource,
    is_final,
    line_not_run,
    read_line,
)
from gateway.batch_api.store import new_id
from gateway.config import BatchConfig
from gateway.http.response import encode_json
from gateway.inference.admission import ENTERED
from gateway.inference.entry import Entry
from gateway.jobs.service import Jobs, JobServing
from ledger import batches, files
from ledger.batches import BatchRow, KnownLine, LineEnd
from ledger.catalog.snapshot import Identity
from ledger.jobs import JobSession, StoreUnavailable
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id
from scheduler.states import Admission

T = TypeVar("T")
log = structlog.get_logger("gateway")

POLL_S, MAX_POLL_S = 0.02, 0.25
SCAN_EVERY_S = 1.0  # All submitted lines are read, not only the oldest ones.
READ_LINES = 32  # Read at a time; the next ones follow if most of these have ended.
ADMITTED_LINES = 64  # Of a call, so that interactive requests are admitted in between.
YIELD_LINES = 16  # Built or read before other tasks of the gateway get their turn.
WRITTEN_LINES, WRITTEN_BYTES = 256, 1 << 20
MAX_BYTES = 4 << 20  # Of the bodies of one batch in memory.
STALE_ID_S = 60.0  # A refused line gets another id then, because the audit takes the creation time from it.
KNOWN_LINES = 1024  # Rows of a batch that another gateway ran are read so many at a time.
COVERED_S = 5.0  # The lines of this time are in Redis, so that GPUs have work until another gateway continues a batch.
LEAST_WINDOW, RATE_KEPT = 256, 0.8
RETRY_S = 0.5  # After PostgreSQL or Redis was not available.
MAX_WAIT_S = 30.0  # After a refusal.
LAST_S = 10.0  # Time for running lines to end once the batch is cancelled or has expired.
STORED_KEEP_MS = 2000


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the runs of all batches use. `jobs_of`: the jobs of a place. `most_body_bytes`: of the body of a line.

    `identity`: of a customer and key, None while it may send nothing. `count` is called with an outcome and the number of lines that ended with it.
    """

    config: BatchConfig
    session: JobSession
    entry: Entry
    jobs_of: Callable[[str], Jobs]
    most_body_bytes: int
    identity: Callable[[str, str], Identity | None]
    count: Callable[[str, int], None]


class Line:
    """A line that has not ended. Times are monotonic seconds."""

    __slots__ = (
        "before",
        "body",
        "call",
        "cancelled",
        "custom_id",
        "end",
        "issued",
        "lost",
        "number",
        "request_id",
        "runs",
        "since",
    )

    def __init__(self, number: int, custom_id: str, body: bytes, request_id: str, now: float) -> None:
        self.number = number
        self.custom_id = custom_id
        self.body = body
        self.request_id = request_id  # "": it has none.
        self.before = ""  # The id that the next one replaces.
        self.issued = now
        self.call: LineCall | None = None  # Set while Redis has its submissions.
        self.since = now  # Not to be submitted before.
        self.runs = 0  # That failed.
        self.lost = False  # Redis has lost it: no limit is checked again.
        self.cancelled = False
        self.end: LineEnd | None = None


class BatchRun:
    """The run of one batch. `clock` is monotonic seconds."""

    def __init__(self, row: BatchRow, parts: RunParts, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._row = row
        self._clock = clock
        self._status = row.status
        self._deadline = clock() + row.left_s
        self._resumed = row.total > 0
        self._total = row.total
        self._lines: dict[int, Line] = {}
        self._bytes = 0
        self._source = self._new_source()
        self._read: list[FileLine] = []  # Of the last slice, until their rows were read.
        self._buffer: deque[tuple[FileLine, str]] = deque()  # Lines with their request ids.
        self._exhausted = False
        self._known_rows: dict[int, KnownLine] = {}
        self._known_to = 0
        self._window = self._room = min(parts.config.window, LEAST_WINDOW)
        self._rate = 0.0  # Lines/s that ended lately.
        self._ended = 0  # Lines since the last scan.
        self._scanned_at = clock()
        self._not_before = 0.0
        self._poll_s = POLL_S
        self._scan_at = 0.0
        self._give_up_at: float | None = None
        self._deleted = False

    def note(self, status: str) -> None:
        """The status in PostgreSQL, as a statement found it."""
        if self._status != "cancelling":
            self._status = status

    async def run(self) -> None:
        """Run the batch to its end, or until it is deleted. PostgreSQL and Redis may be unavailable meanwhile."""
        while True:
            try:
                if not self._total and not await self._validate():
                    return
                await self._work()
                await self._finish()
            except (StoreUnavailable, RedisUnavailable) as error:
                log.info("a batch waits", batch=self._row.id, reason=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    @property
    def _code(self) -> str:
        """Why open lines end without a run: a code of NOT_RUN, "" while they are run."""
        if self._status == "cancelling":
            return "batch_cancelled"
        return "batch_expired" if self._clock() >= self._deadline else ""

    async def _db(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        return await self._parts.session.run(operation)

    def _new_source(self) -> LineSource:
        file_id = self._row.input_file_id
        most = self._parts.most_body_bytes + ENVELOPE_BYTES
        return LineSource(lambda number: self._db(lambda c: files.read_chunk(c, file_id, number)), most)

    async def _validate(self) -> bool:
        """Check the file. Returns whether the batch is to be run."""
        config, batch_id = self._parts.config, self._row.id
        most = self._parts.most_body_bytes + ENVELOPE_BYTES
        check, source = FileCheck(self._row.endpoint, config.max_lines, most), self._new_source()
        while not check.full and (lines := await source.lines()) is not None:
            for line in lines:
                check.add(line)
            await asyncio.sleep(0)
        if faults := check.end():
            text = encode_json(faults).decode()
            await self._db(lambda c: batches.fail_batch(c, batch_id, text, config.kept_s))
            return False
        status = await self._db(lambda c: batches.start_batch(c, batch_id, check.total))
        self._status, self._total = status or "", check.total
        return status is not None

    async def _work(self) -> None:
        while not self._deleted:
            await self._fill()
            for line in self._lines.values():  # Lines in a cell that was closed are submitted again, in another one.
                if line.call is not None and line.call.jobs.left:
                    line.call, line.lost = None, True
            if not self._lines and self._exhausted:
                return
            if self._code:
                await self._end_open(self._code)
            else:
                await self._submit()
            submitted = self._submitted
            if submitted:
                await asyncio.sleep(self._poll_s)
            else:  # Until lines may be submitted.
                waits = not self._code and any(line.end is None for line in self._lines.values())
                await asyncio.sleep(min(MAX_POLL_S, max(POLL_S, self._not_before - self._clock())) if waits else 0.0)
            ended = await self._collect()
            slow = ended * 8 < submitted
            self._poll_s = min(MAX_POLL_S, self._poll_s * 1.4) if slow else max(POLL_S, self._poll_s * 0.7)
            await self._write()

    async def _fill(self) -> None:
        """Read lines until the window is full."""
        while len(self._lines) < self._window and self._bytes < MAX_BYTES and not self._exhausted:
            if self._buffer:
                line, request_id = self._buffer.popleft()
                found = read_line(line.raw)
                body = bytes(found.body)
                self._bytes += len(body)
                self._lines[line.number] = Line(line.number, found.custom_id, body, request_id, self._clock())
                continue
            if not self._read:
                read = await self._source.lines()
                self._exhausted, self._read = read is None, read or []
            if self._read:
                known = await self._known(self._read)
                for each in self._read:
                    row = known.get(each.number)
                    if row is None or not row.ended:
                        self._buffer.append((each, row.request_id if row else ""))
                self._read = []

    async def _known(self, lines: Sequence[FileLine]) -> dict[int, KnownLine]:
        """The rows of these lines. A batch that no other gateway ran has none."""
        if not self._resumed:
            return {}
        if lines[-1].number > self._known_to:
            batch_id, first = self._row.id, lines[0].number
            last = max(lines[-1].number, first + KNOWN_LINES - 1)
            self._known_rows = await self._db(lambda c: batches.known_lines(c, batch_id, first, last))
            self._known_to = last
        return self._known_rows

    async def _submit(self) -> None:
        """Submit lines as far as the window and the limits allow."""
        now = self._clock()
        identity = self._parts.identity(self._row.customer_id, self._row.api_key_id)
        if now < self._not_before:
            return
        if identity is None:
            self._not_before = now + RETRY_S
            return
        waiting = [
            line for line in self._lines.values() if line.call is None and line.end is None and line.since <= now
        ]
        chosen = waiting[: max(0, self._room - self._submitted)]
        chosen = await self._issue(chosen)
        calls: dict[JobServing, list[tuple[Line, LineCall]]] = {}
        for at, line in enumerate(chosen):
            if (call := self._call(line, identity)) is not None:
                calls.setdefault(call.jobs, []).append((line, call))
            if at % YIELD_LINES == YIELD_LINES - 1:
                await asyncio.sleep(0)
        for jobs, group in calls.items():
            await self._admit(jobs, group, identity.tier)

    @property
    def _submitted(self) -> int:
        return sum(line.call is not None for line in self._lines.values())

    async def _issue(self, lines: Iterable[Line]) -> list[Line]:
        """Give lines the ids of their requests, and commit them. Returns the lines that may be submitted."""
        now, given = self._clock(), list(lines)
        issued = [line for line in given if not line.request_id or (now - line.issued > STALE_ID_S and not line.lost)]
        if not issued:
            return given
        rows = [(line.number, line.request_id or line.before, new_request_id()) for line in issued]
        found = await self._db(lambda c: batches.begin_lines(c, self._row.id, rows))
        for line, (number, before, _) in zip(issued, rows, strict=True):
            line.request_id, line.before, line.issued = found.get(number, ""), "", now
            if not line.request_id and not before:  # Another owner has ended it.
                self._remove(line)
        return [line for line in given if line.request_id]

    def _call(self, line: Line, identity: Identity) -> LineCall | None:
        """The call of a line; None if it has ended, because its body is rejected, or has to wait."""
        now, parts = self._clock(), self._parts
        call = LineCall(self._row.endpoint, line.request_id, identity, now)
        left_ms = max(1000, int((self._deadline - now) * 1000))
        try:
            call.build(line.body, parts.entry, parts.jobs_of, left_ms, again=line.lost)
        except RequestError as error:
            if is_final(error, 0):
                self._end(line, error_line(line.request_id, line.custom_id, error), failed=True)
            else:
                line.since = self._clock() + RETRY_S
            return None
        except Exception as error:  # noqa: BLE001  # one line must not stop the batch
            log_fault("a line of a batch cannot be built", error, request_id=line.request_id)
            fault = RequestError(ErrorCode.INTERNAL_ERROR)
            self._end(line, error_line(line.request_id, line.custom_id, fault), failed=True)
            return None
        return call

    async def _admit(self, jobs: JobServing, group: Sequence[tuple[Line, LineCall]], tier: str) -> None:
        now, limits = self._clock(), jobs.limits()
        if jobs.problem(now) is not None or tier not in {each.name for each in limits.tiers}:
            self._wait(now + RETRY_S)
            return
        for some in calls_of(group):
            submissions = [each for _, call in some for each in call.submissions]
            verdicts = await jobs.admissions.admit(*limits[:2], submissions, *limits[2:])
            for submission, verdict in zip(submissions, verdicts, strict=True):
                if submission.group.limits.quotas:
                    jobs.quota_uses.note(submission.group, verdict)
            refused_ms, at = 0, 0
            for line, call in some:
                own = verdicts[at : at + len(call.submissions)]
                at += len(call.submissions)
                refusal = next((verdict for verdict in own if verdict.outcome not in ENTERED), None)
                if refusal is not None and refusal.outcome is Admission.ELSEWHERE and not refused_ms:
                    jobs.ask(call.submissions[0])
                if refusal is None:
                    line.call, line.lost = call, False
                else:
                    refused_ms = max(refused_ms, refusal.retry_after_ms, 1)
            if refused_ms:
                self._wait(self._clock() + min(MAX_WAIT_S, max(POLL_S, refused_ms / 1000)))
                return
        self._room = min(self._window, self._room + max(8, self._room // 4))

    def _wait(self, until: float) -> None:
        """Submit nothing before this time (monotonic seconds), and then few lines at first."""
        self._not_before, self._room = until, max(1, self._submitted)

    async def _end_open(self, code: str) -> None:
        """End the lines that Redis does not have. Cancel the others; those that are running get a little time to end."""
        now = self._clock()
        if self._give_up_at is None:
            self._give_up_at = now + LAST_S
        identity = self._parts.identity(self._row.customer_id, self._row.api_key_id)
        for line in [line for line in self._lines.values() if line.end is None]:
            if line.call is None and line.request_id and not line.cancelled and identity is not None:
                line.call = self._call(line, identity)  # Its result may be in Redis.
            if line.end is None and (line.call is None or now >= self._give_up_at):
                self._end_not_run(line, code)
        for jobs, lines in self._by_pool(line for line in self._lines.values() if not line.cancelled).items():
            ids = [each.id for line in lines if line.call is not None for each in line.call.submissions]
            for start in range(0, len(ids), WRITTEN_LINES):
                await jobs.terminations.cancel(
                    [(request_id, ErrorCode.CANCELLED) for request_id in ids[start : start + WRITTEN_LINES]]
                )
            for line in lines:
                line.cancelled = True

    def _by_pool(self, lines: Iterable[Line]) -> dict[JobServing, list[Line]]:
        """The submitted ones of these lines that have not ended."""
        found: dict[JobServing, list[Line]] = {}
        for line in lines:
            if line.call is not None and line.end is None:
                found.setdefault(line.call.jobs, []).append(line)
        return found

    async def _collect(self) -> int:
        """Read the ends of submitted lines from Redis, the oldest first. Returns how many have ended."""
        now, ended = self._clock(), 0
        whole = now >= self._scan_at or bool(self._code)
        if now >= self._scan_at:
            # Size the window by the lines that end in COVERED_S. After a fault it gets smaller slowly.
            self._rate = max(RATE_KEPT * self._rate, self._ended / max(SCAN_EVERY_S, now - self._scanned_at))
            self._ended, self._scanned_at = 0, now
            self._window = min(self._parts.config.window, max(LEAST_WINDOW, int(COVERED_S * self._rate)))
        if whole:
            self._scan_at = now + SCAN_EVERY_S
        for jobs, lines in self._by_pool(self._lines.values()).items():
            for start in range(0, len(lines), READ_LINES):
                some = lines[start : start + READ_LINES]
                found = await self._read_ends(jobs, some)
                ended += found
                if found < len(some) // 2 and not whole:
                    break
        self._ended += ended
        return ended

    async def _read_ends(self, jobs: JobServing, lines: Sequence[Line]) -> int:
        calls = [(line, line.call) for line in lines if line.call is not None]
        statuses = await jobs.statuses.fetch([each.id for _, call in calls for each in call.submissions])
        at = ended = 0
        for line, call in calls:
            own = statuses[at : at + len(call.submissions)]
            at += len(call.submissions)
            if any(not status.state for status in own):
                line.call, line.lost = None, True
                continue
            if not all(status.ended for status in own):
                continue
            ended += 1
            call.remember(own)
            found = call.outcome(line.custom_id, own, line.runs)
            if found.line:
                self._end(line, found.line, failed=found.failed)
                continue
            line.call, line.before, line.request_id = None, line.request_id, ""
            line.runs += found.ran
            line.since = self._clock() + min(MAX_WAIT_S, RETRY_S * 2 ** min(line.runs, 10))
            if self._code:
                self._end_not_run(line, self._code)
        return ended

    def _end_not_run(self, line: Line, code: str) -> None:
        line.request_id = line.request_id or line.before or new_request_id()
        self._end(line, line_not_run(line.request_id, line.custom_id, code), failed=True)

    def _end(self, line: Line, text: bytes, *, failed: bool) -> None:
        line.end = LineEnd(line.number, line.request_id, text, failed)

    async def _write(self) -> None:
        """Commit the ends of lines, then release their rows in Redis."""
        for some in written_together([line for line in self._lines.values() if line.end is not None]):
            ends = [line.end for line in some if line.end is not None]
            status = await self._db(lambda c, ends=ends: batches.end_lines(c, self._row.id, ends))  # type: ignore[misc]
            self._deleted = status is None
            self.note(status or self._status)
            for line in some:
                self._remove(line)
            failed = sum(end.failed for end in ends)
            self._parts.count("failed", failed)
            self._parts.count("completed", len(ends) - failed)
            pools: dict[JobServing, list[str]] = {}
            for line in some:
                if line.call is not None:
                    pools.setdefault(line.call.jobs, []).extend(each.id for each in line.call.submissions)
            with suppress(RedisUnavailable):  # Redis then keeps their replies, and its memory, for longer.
                for jobs, ids in pools.items():
                    await jobs.terminations.stored(ids, STORED_KEEP_MS)

    def _remove(self, line: Line) -> None:
        del self._lines[line.number]
        self._bytes -= len(line.body)

    async def _finish(self) -> None:
        """All lines have ended: end the batch, with its files."""
        if self._deleted:
            return
        batch_id, kept_s = self._row.id, self._parts.config.kept_s
        final = "expired" if self._code == "batch_expired" and self._give_up_at is not None else "completed"
        if final == "completed":
            await self._db(lambda c: batches.finalize_batch(c, batch_id))
        names = new_id("file-"), new_id("file-")
        status = await self._db(lambda c: batches.end_batch(c, batch_id, final, names, kept_s))
        log.info("a batch has ended", batch=batch_id, status=status, lines=self._total)


def calls_of(group: Sequence[tuple[Line, LineCall]]) -> Iterable[Sequence[tuple[Line, LineCall]]]:
    """Parts that are admitted together."""
    start, count = 0, 0
    for at, (_, call) in enumerate(group):
        if at > start and (at - start == ADMITTED_LINES or count + len(call.submissions) > ADMITTED_LINES):
            yield group[start:at]
            start, count = at, 0
        count += len(call.submissions)
    if start < len(group):
        yield group[start:]


def written_together(lines: Sequence[Line]) -> Iterable[Sequence[Line]]:
    """Parts that are written by one statement, since outputs may be large."""
    start, size = 0, 0
    for at, line in enumerate(lines):
        length = 0 if line.end is None else len(line.end.output)
        if at > start and (at - start == WRITTEN_LINES or size + length > WRITTEN_BYTES):
            yield lines[start:at]
            start, size = at, 0
        size += length
    if start < len(lines):
        yield lines[start:]
