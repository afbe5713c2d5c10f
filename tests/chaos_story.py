"""Histories made by hand for the checker: a request with its tries, answers, rows and runs in one line each."""

from dataclasses import dataclass, field, replace
from typing import Any

from tierlane.chaos.checker.case import InvariantResult, InvariantResults
from tierlane.chaos.checker.checker import check
from tierlane.chaos.checker.evidence import AuditRow, Evidence, Leftovers, ModelRun
from tierlane.chaos.history import Answered, Event, FaultRecord, Invoked, Stalled, Stray, Unanswered

CUSTOMER = "11111111-1111-1111-1111-111111111111"
OTHER = "22222222-2222-2222-2222-222222222222"
GATEWAYS = ("gateway-1", "gateway-2")


def nonce_of(number: int) -> str:
    return f"{number:016x}"


def trace_of(number: int, turn: int = 0) -> str:
    return f"{number:030x}{turn:02x}"


def id_of(number: int, turn: int = 0) -> str:
    return "req_" + trace_of(number, turn)


@dataclass
class RequestTimeline:
    """One run; two quiet requests of two gateways are in it from the beginning, so that the gateways have names."""

    events: list[Event] = field(default_factory=list)
    rows: list[AuditRow] = field(default_factory=list)
    runs: list[ModelRun] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)

    def __post_init__(self) -> None:
        self.whole(901, 0.0, gateway="gateway-1")
        self.whole(902, 0.0, gateway="gateway-2")

    def sent(
        self,
        number: int,
        at: float,
        turn: int = 0,
        gateway: str = "gateway-1",
        key: str = "",
        customer: str = CUSTOMER,
    ) -> None:
        self.events.append(
            Invoked(
                at=at,
                nonce=nonce_of(number),
                turn=turn,
                trace=trace_of(number, turn),
                gateway=gateway,
                tier="free",
                customer=customer,
                key=key,
            )
        )

    def answered(self, number: int, at: float, status: int = 200, code: str = "", **changes: Any) -> None:
        turn = changes.pop("turn", 0)
        sent = next((e.at for e in self.events if isinstance(e, Invoked) and e.nonce == nonce_of(number)), at)
        answer = Answered(
            at=at,
            nonce=nonce_of(number),
            turn=turn,
            seconds=at - sent,
            status=status,
            code=code,
            id=changes.pop("id", id_of(number, turn)),
            owner=changes.pop("owner", nonce_of(number) if status == 200 else ""),
            replayed=changes.pop("replayed", False),
        )
        assert not changes
        self.events.append(answer)

    def silent(self, number: int, at: float, kind: str, turn: int = 0, gateway: str = "gateway-1") -> None:
        self.events.append(Unanswered(at=at, nonce=nonce_of(number), turn=turn, kind=kind, gateway=gateway))

    def row(self, number: int, status: str = "completed", code: str = "", turn: int = 0, **changes: Any) -> None:
        row = AuditRow(
            id=id_of(number, turn),
            trace=trace_of(number, turn),
            customer=CUSTOMER,
            tier="free",
            status=status,
            code=code,
            created_ms=0.0,
            attempts=1,
            worker_id="worker-1",
        )
        self.rows.append(replace(row, **changes))

    def ran(self, number: int, at: float, process: str = "model", takes_s: float = 0.05) -> None:
        self.runs.append(ModelRun(nonce_of(number), at, process, takes_s))

    def whole(self, number: int, at: float, gateway: str = "gateway-1", key: str = "") -> None:
        """A request as it should be."""
        self.sent(number, at, gateway=gateway, key=key)
        self.ran(number, at + 0.05)
        self.answered(number, at + 0.1)
        self.row(number)

    def fault(
        self, name: str, target: str, begin: float, end: float | None = None, error: str = "", details: str = ""
    ) -> None:
        self.events.append(FaultRecord(at=begin, name=name, target=target, what="start", details=details, error=error))
        if end is not None:
            self.events.append(FaultRecord(at=end, name=name, target=target, what="heal"))

    def stall(self, since: float, until: float) -> None:
        self.events.append(Stalled(at=until, since=since))

    def stray(self, at: float) -> None:
        self.events.append(Stray(at=at, gateway="gateway-1", detail="Bytes that nobody asked for."))

    def left(self, **what: Any) -> None:
        self.evidence = replace(self.evidence, leftovers=Leftovers(**what))

    def judged(self) -> InvariantResults:
        evidence = replace(self.evidence, rows=tuple(self.rows), runs=tuple(self.runs))
        return check(sorted(self.events, key=lambda event: event.at), evidence)

    def broken(self) -> dict[str, int]:
        """The laws that are broken, with the number of offences."""
        return {verdict.name: verdict.count for verdict in self.judged().all if not verdict.holds}

    def verdict(self, name: str) -> InvariantResult:
        return next(verdict for verdict in self.judged().all if verdict.name == name)

    def excused(self) -> dict[str, int]:
        """What was excused, by excuse."""
        return {excuse: n for verdict in self.judged().all for excuse, n in verdict.explained.items()}
