"""A builder of histories and evidence for tests of the chaos checker: requests, responses, audit rows, runs and faults."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierlane_tools.chaos.checker.checker import check
from tierlane_tools.chaos.checker.evidence import AuditRow, Evidence, ModelRun
from tierlane_tools.chaos.checker.leftovers import Leftovers
from tierlane_tools.chaos.checker.results import InvariantResult, InvariantResults
from tierlane_tools.chaos.history import (
    Answered,
    BatchCreated,
    BatchEnded,
    BatchLine,
    Event,
    FaultEvent,
    FaultPhase,
    Invoked,
    Stalled,
    Stray,
    Unanswered,
)

CUSTOMER = "11111111-1111-1111-1111-111111111111"
OTHER_CUSTOMER = "22222222-2222-2222-2222-222222222222"


def nonce_of(number: int) -> str:
    return f"{number:016x}"


def trace_of(number: int, turn: int = 0) -> str:
    return f"{number:030x}{turn:02x}"


def id_of(number: int, turn: int = 0) -> str:
    return "req_" + trace_of(number, turn)


@dataclass
class RecordedRun:
    """One run. It begins with a correct request at each of two gateways, so that the checker knows both."""

    events: list[Event] = field(default_factory=list)
    rows: list[AuditRow] = field(default_factory=list)
    runs: list[ModelRun] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)

    def __post_init__(self) -> None:
        self.complete(901, 0.0, gateway="gateway-1")
        self.complete(902, 0.0, gateway="gateway-2")

    def send(
        self,
        number: int,
        at: float,
        *,
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

    def answer(self, number: int, at: float, status: int = 200, code: str = "", **changes: Any) -> None:
        turn = changes.pop("turn", 0)
        sent = next((e.at for e in self.events if isinstance(e, Invoked) and e.nonce == nonce_of(number)), at)
        fields = {
            "id": id_of(number, turn),
            "owner": nonce_of(number) if status == 200 else "",
            "replayed": False,
        }
        self.events.append(
            Answered(
                at=at,
                nonce=nonce_of(number),
                turn=turn,
                seconds=at - sent,
                status=status,
                code=code,
                **fields | changes,
            )
        )

    def no_answer(self, number: int, at: float, kind: str, *, gateway: str = "gateway-1") -> None:
        self.events.append(Unanswered(at=at, nonce=nonce_of(number), turn=0, kind=kind, gateway=gateway))

    def row(self, number: int, status: str = "completed", code: str = "", *, turn: int = 0, **changes: Any) -> None:
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

    def run(self, number: int, at: float, process: str = "model", takes_s: float = 0.05) -> None:
        self.runs.append(ModelRun(nonce_of(number), at, process, takes_s))

    def complete(self, number: int, at: float, *, gateway: str = "gateway-1", key: str = "") -> None:
        """Add a request that is sent, run, answered and audited as it should be."""
        self.send(number, at, gateway=gateway, key=key)
        self.run(number, at + 0.05)
        self.answer(number, at + 0.1)
        self.row(number)

    def serve(self, number: int, customer: str, sent: float, began: float, cost_ms: float = 50.0) -> None:
        """Add a request of a customer that waits until `began`, with its GPU time."""
        self.send(number, sent, customer=customer)
        self.run(number, began)
        self.answer(number, began + 0.06)
        self.row(number, customer=customer, cost_ms=cost_ms)

    def batch(self, valid: Sequence[str] = ("a", "b"), invalid: Sequence[str] = ("c",), **changes: Any) -> None:
        """Add a batch and its end, as it should be but for `changes`; without an end if `status` is None."""
        self.events.append(
            BatchCreated(at=1.0, batch="batch_1", customer=CUSTOMER, valid=tuple(valid), invalid=tuple(invalid))
        )
        end: dict[str, Any] = {
            "status": "completed",
            "total": len(valid) + len(invalid),
            "completed": len(valid),
            "failed": len(invalid),
            "outputs": tuple(BatchLine(custom_id, custom_id[::-1]) for custom_id in valid),
            "errors": tuple(BatchLine(custom_id, "invalid_request") for custom_id in invalid),
        }
        if changes.get("status", "") is not None:
            self.events.append(BatchEnded(at=2.0, batch="batch_1", **end | changes))

    def fault(
        self, name: str, target: str, begin: float, end: float | None = None, *, error: str = "", details: str = ""
    ) -> None:
        self.events.append(
            FaultEvent(at=begin, name=name, target=target, what=FaultPhase.START, details=details, error=error)
        )
        if end is not None:
            self.events.append(FaultEvent(at=end, name=name, target=target, what=FaultPhase.HEAL))

    def stall(self, since: float, until: float) -> None:
        self.events.append(Stalled(at=until, since=since))

    def stray(self, at: float) -> None:
        self.events.append(Stray(at=at, gateway="gateway-1", detail="Unexpected bytes."))

    def leftovers(self, **fields: Any) -> None:
        self.evidence = replace(self.evidence, leftovers=Leftovers(**fields))

    def results(self) -> InvariantResults:
        evidence = replace(self.evidence, rows=tuple(self.rows), runs=tuple(self.runs))
        return check(sorted(self.events, key=lambda event: event.at), evidence)

    def result(self, name: str) -> InvariantResult:
        return next(result for result in self.results().all if result.name == name)

    def violations(self) -> dict[str, int]:
        """The number of violations of each invariant that does not hold."""
        return {result.name: result.count for result in self.results().all if not result.holds}

    def excused(self) -> dict[str, int]:
        """The number of excused cases by excuse."""
        return {excuse: n for result in self.results().all for excuse, n in result.explained.items()}
