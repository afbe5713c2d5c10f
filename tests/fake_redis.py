"""A fake of Admissions and Terminations, for unit tests of their callers."""

import asyncio
from collections.abc import Callable, Sequence

from customer_limits import remaining
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.admission import Submission, TierLimit, Verdict
from scheduler.protocol.cancellation import Cancellation, Cancelled
from scheduler.protocol.replies import Reply
from scheduler.states import Admission

ACCEPTED = Verdict(Admission.ACCEPTED, remaining(5.0, 100), depth=1)


class FakeRedis:
    """Returns a fixed verdict; `gate` delays calls until it is set, and the first `failures` calls fail."""

    def __init__(self, failures: int = 0, verdict: Verdict = ACCEPTED) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = failures
        self.verdict = verdict
        self.meanwhile: Callable[[], None] = lambda: None  # Called during each admission.
        self.admitted: list[list[str]] = []
        self.total_ms: list[int] = []
        self.cancelled: list[list[tuple[str, ErrorCode] | tuple[str, ErrorCode, bool]]] = []
        self.told: list[str] = []  # Requests whose clients received the code.
        self.redis_ms: list[int] = []
        self.customer_limits: dict[str, Reply] = {}

    async def admit(
        self,
        tiers: Sequence[TierLimit],
        capacity_rps: float,
        submissions: Sequence[Submission],
        redis_ms: int = 0,
        run_ms: int = 0,
    ) -> list[Verdict]:
        self.admitted.append([submission.id for submission in submissions])
        self.total_ms += [submission.total_ms for submission in submissions]
        self.redis_ms.append(redis_ms)
        self.meanwhile()
        await self._answer()
        return [self.verdict for _ in submissions]

    async def cancel(self, requests: Sequence[Cancelled]) -> list[Reply | None]:
        cancellations = [Cancellation(*each) for each in requests]
        self.cancelled.append(
            [(each.id, each.code, True) if each.running else (each.id, each.code) for each in cancellations]
        )
        await self._answer()
        self.told += [each.id for each in cancellations if each.delivered]
        return [self.customer_limits.get(each.id) for each in cancellations]

    async def _answer(self) -> None:
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise RedisUnavailable("away")
