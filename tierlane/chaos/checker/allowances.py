"""What a fault excuses, and whom, and for how long: windows of time made from the events of the history.

A fault excuses only what it can cause. Which verdict asks for which excuse is written in `checker`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from tierlane.chaos.faults.catalogue import BLOW, BY_NAME
from tierlane.chaos.faults.server_clock import CLOCK_STEPS, ClockStep, SteppedClock, read_step
from tierlane.chaos.history import Answered, Event, FaultRecord, Invoked, Stalled, What

STAMP_S = 0.25  # A fault is stamped about when it is done, not at the same instant.
RESTART_S = 20.0  # A killed gateway is back by then, or its absence is no longer the kill's doing.
SERVER_S = 5.0  # A killed Redis or PostgreSQL is back by then.
LEAVE_S = 10.0  # A gateway that was told to end answers for a while, so its first answers do not say that it is back.
READ_S = 0.1  # A gateway that is stopped may not have read what was sent so shortly before.
RESUME_S = 0.25  # A gateway that goes on has what came meanwhile to look at first.
SETTLE_S = 6.0  # A gateway trusts Redis again after 5 s without a fault, and leaves direct mode then.
RESEND_S = 3.0  # By then a gateway has noticed an empty Redis and sent again what it remembers.
AUDIT_S = 2.0  # By then an auditor has written what ended, where PostgreSQL is there.
CATCH_UP_S = 10.0  # And by then after PostgreSQL has come back.
GATEWAY_LOOK_S = 0.25  # So often a gateway looks at the clock of Redis.
LEAST_FOR_A_RUN_S = 3.4  # Who has waited for so long may have less time left than a slow run takes, and is ended.
CALL_S = 0.25  # After which a call of Redis counts as lost.
ANSWER_S = 4.1
RUN_S = 4.05

LOSSES = frozenset({"kill-redis", "flushall"})
REDIS_FAULTS = frozenset({"stop-redis", "client-kill-normal", "client-pause", "redis-disk-full"}) | LOSSES
PROXY_FAULTS = frozenset({"delay", "drop-requests", "drop-replies", "cut", "refuse"})
POSTGRES_FAULTS = frozenset({"kill-postgres", "stop-postgres", "pg-terminate", "pg-lock", "pg-disk-full"})
HIDDEN = POSTGRES_FAULTS | {
    "kill-worker",
    "kill-model",
    "kill-scheduler",
    "term-worker",
    "term-scheduler",
    "script-flush",
    "client-kill-pubsub",
    "hostile-client",
}
"""What no request of a customer may feel: the work of a killed worker is done again while there is time."""
EVERYBODY = ""


@dataclass(frozen=True)
class FaultWindow:
    """A fault was there from `begin` to `end`; `whom` it hit, EVERYBODY for all; `step_s` moved the clock of Redis."""

    begin: float
    end: float
    whom: str
    name: str
    step_s: float = 0.0

    def overlaps(self, begin: float, end: float) -> bool:
        """Whether it was there at any time from `begin` to `end`."""
        return self.begin <= end and begin <= self.end

    def hits(self, whom: str) -> bool:
        """Whether it hit this one."""
        return self.whom in (EVERYBODY, whom)

    def meets(self, begin: float, end: float, whom: str) -> bool:
        """Both."""
        return self.hits(whom) and self.overlaps(begin, end)


def windows(events: Iterable[Event]) -> list[FaultWindow]:
    """Each fault that was done, in order of begin. One without a heal lasts for ever, but a blow is over at once."""
    begun: dict[tuple[str, str], list[FaultRecord]] = defaultdict(list)
    found: list[FaultWindow] = []
    for event in events:
        if not isinstance(event, FaultRecord) or event.error:
            continue
        waiting = begun[event.name, event.target]
        if event.what == What.START:
            waiting.append(event)
        elif waiting:
            found.append(_window(waiting.pop(0), event.at))
    found += [_window(fault, None) for several in begun.values() for fault in several]
    return sorted(found, key=lambda window: window.begin)


def _window(start: FaultRecord, healed: float | None) -> FaultWindow:
    kind = BY_NAME.get(start.name)
    blow = kind is not None and kind.length_s == BLOW
    end = healed if healed is not None else start.at if blow else float("inf")
    if start.name in ("kill-redis", "kill-postgres", "pg-disk-full"):
        end += SERVER_S  # Healed means that it may come back, not that it has.
    step_s = read_step(start.details) if start.name in CLOCK_STEPS else 0.0
    return FaultWindow(start.at, end, start.target, start.name, step_s)


def _steps(windows: Iterable[FaultWindow]) -> Iterable[ClockStep]:
    """Each of these windows has one at its begin, and at its end the way back."""
    for window in windows:
        if window.step_s:
            yield ClockStep(window.begin, window.step_s)
            yield ClockStep(window.end, -window.step_s)


def _counts(event: Event) -> TypeGuard[Stalled]:
    return isinstance(event, Stalled) and event.at - event.since >= CALL_S


def _stall(event: Stalled) -> FaultWindow:
    return FaultWindow(event.since, event.at, EVERYBODY, "this tool stood still")


class Allowances:
    """The faults of one run, asked by what they can cause. Gateways have the names that the load gives them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.windows = windows(events)
        gateways = {event.gateway for event in events if isinstance(event, Invoked)}
        # Behind a single address may be many gateways, and nobody knows which one took a request.
        self._one_address = len(gateways) <= 1
        answers = _first_answers(events)
        self._gone = self._until_back("kill-gateway", STAMP_S, answers)
        self._leaving = self._until_back("term-gateway", LEAVE_S, answers)
        self._frozen = [self._renamed(w) for w in self.windows if w.name == "stop-gateway"]
        self.clock = SteppedClock(_steps(self.windows), STAMP_S)
        # The proxies are in this tool: while it stands still for as long as a call may take, nobody has Redis.
        self._stalls = [] if self._one_address else [_stall(event) for event in events if _counts(event)]
        self._losses = [w for w in self.windows if w.name in LOSSES]
        self._redis = [w for w in map(self._at_redis, self.windows) if w is not None]
        self._postgres = [w for w in self.windows if w.name in POSTGRES_FAULTS or w.whom.endswith(">postgres")]

    def _renamed(self, window: FaultWindow) -> FaultWindow:
        whom = EVERYBODY if self._one_address else window.whom
        return FaultWindow(window.begin, window.end, whom, window.name)

    def _until_back(self, name: str, at_least_s: float, answers: Mapping[str, Sequence[float]]) -> list[FaultWindow]:
        """These ends of gateways, each until the gateway was seen to answer again after `at_least_s`."""
        found = []
        for window in self.windows:
            if window.name == name:
                times, least = answers.get(window.whom, []), window.begin + at_least_s
                after = bisect_right(times, least)
                back = times[after] if after < len(times) else least + RESTART_S
                end = max(window.end, min(back, least + RESTART_S))
                found.append(self._renamed(FaultWindow(window.begin, end, window.whom, name)))
        return found

    def _at_redis(self, window: FaultWindow) -> FaultWindow | None:
        """The window as one in which Redis does not serve somebody, or None."""
        client, arrow, server = window.whom.partition(">")
        if window.name in REDIS_FAULTS:
            whom = EVERYBODY
        elif window.name == "spool-full":
            whom = window.whom
        elif window.name in PROXY_FAULTS and arrow and server == "redis":
            whom = client
        else:
            return None
        return self._renamed(FaultWindow(window.begin, window.end, whom, window.name))

    def gone(self, gateway: str, sent: float, ended: float) -> bool:
        """Whether the gateway was killed while it had the request, or had not come back when it was sent."""
        return any(w.meets(sent - STAMP_S, ended + STAMP_S, gateway) for w in self._gone)

    def leaving(self, gateway: str, at: float) -> bool:
        """Whether the gateway was told to end, and may not be back: it takes nothing new, but owes what it has taken."""
        return any(w.meets(at, at + STAMP_S, gateway) for w in self._leaving)

    def answer_due(self, gateway: str, sent: float) -> float:
        """Until when the gateway must have answered: it has 4.1 s from when it could read the request.

        While it is stopped it cannot answer either; then it has RESUME_S from when it goes on.
        """
        due = self._readable(gateway, sent) + ANSWER_S
        for window in self._frozen:
            if window.meets(due - RESUME_S, due, gateway):
                due = max(due, window.end + RESUME_S)
        return due

    def run_due(self, gateway: str, sent: float) -> float:
        """Until when a run of the request may begin.

        A gateway ends what is overdue by its own clock. Where it was killed, only the clock of Redis does.
        """
        due = self._readable(gateway, sent) + RUN_S
        if self.clock and self.gone(gateway, sent, due):
            due += self.clock.backward(sent, due)
        return due

    def clock_ran_ahead(self, sent: float, ended: float) -> bool:
        """Whether a step forwards took what was left of the time of the request.

        Also one shortly before it: until its next look a gateway tells Redis an earlier time than the request's.
        """
        step_s = self.clock.forward(sent - GATEWAY_LOOK_S, ended)
        return step_s > 0 and ended - sent + step_s >= LEAST_FOR_A_RUN_S

    def _readable(self, gateway: str, sent: float) -> float:
        for window in self._frozen:
            if window.meets(sent, sent + READ_S, gateway):
                sent = window.end
        return sent

    def redis_lost(self, begin: float, end: float) -> bool:
        """Whether Redis lost everything in between."""
        # What is lost is lost at the blow; that the server is away for a while is another excuse.
        return any(begin - STAMP_S <= w.begin <= end + STAMP_S for w in self._losses)

    def redis_unsure(self, gateway: str, begin: float, end: float) -> bool:
        """Whether this gateway may not have had a true word from Redis in between."""
        return any(w.meets(begin - SETTLE_S, end + STAMP_S, gateway) for w in (*self._redis, *self._stalls))

    def frozen(self, gateway: str, begin: float, end: float) -> bool:
        """Whether the gateway was stopped in between."""
        return any(w.meets(begin - RESUME_S, end, gateway) for w in self._frozen)

    def audit_lost(self, gateway: str, sent: float, ended: float) -> bool:
        """Whether both witnesses of the request were lost before PostgreSQL had it: Redis, and then its gateway."""
        last = ended + AUDIT_S
        for window in self._redis:  # What went past Redis comes to it when it is back.
            if window.meets(sent - SETTLE_S, ended, gateway):
                last = max(last, window.end + RESEND_S + AUDIT_S)
        for window in self._postgres:
            if window.overlaps(sent, last):
                last = max(last, window.end + CATCH_UP_S)
        for loss in self._losses:
            if not sent - STAMP_S <= loss.begin <= last:
                continue
            told = (
                loss.end + RESEND_S + sum(w.end - w.begin for w in self._frozen if w.meets(loss.begin, last, gateway))
            )
            if any(sent - STAMP_S <= w.begin <= told and w.hits(gateway) for w in self._gone):
                return True
        return False

    def felt(self, gateway: str, begin: float, end: float) -> bool:
        """Whether a fault that a request may feel was there for this gateway in between, or shortly before."""
        for window in (*self.windows, *self._stalls):
            hidden = window.name in HIDDEN or window.whom.endswith(">postgres")
            elsewhere = window.name in ("kill-gateway", "stop-gateway", "term-gateway") and not self._renamed(
                window
            ).hits(gateway)
            if not (hidden or elsewhere or window.step_s) and window.overlaps(begin - SETTLE_S, end + STAMP_S):
                return True
        return False

    def at(self, begin: float, end: float) -> list[FaultWindow]:
        """Every fault that was there in between, for a timeline."""
        return [w for w in self.windows if w.overlaps(begin, end)]


def _first_answers(events: Sequence[Event]) -> dict[str, list[float]]:
    """For each gateway the times of sending of tries that it answered, in order."""
    sent: dict[tuple[str, int], Invoked] = {}
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if isinstance(event, Invoked):
            sent[event.nonce, event.turn] = event
        elif isinstance(event, Answered) and (invoked := sent.get((event.nonce, event.turn))):
            times[invoked.gateway].append(invoked.at)
    return {gateway: sorted(several) for gateway, several in times.items()}
