"""The records of one batch by request id: accepted, ended, dead letters.

A request has two records, accepted and ended, which may arrive in either order, apart, or repeatedly. The records of one
batch are folded here; rows of different batches are merged by `merge_requests` in ledger/sql/audit.sql.
"""

from collections.abc import Iterable

from scheduler.errors import ErrorCode
from scheduler.protocol.audit_records import AcceptedRecord, DeadLetterRecord, EndedRecord, Record
from scheduler.states import State


class Folded:
    """Records by request id, in the order of their arrival.

    `delivered` are ends reported by gateways that equal a recorded end. They change a row only if an earlier batch has
    written another end, which they outweigh.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.accepted: dict[str, AcceptedRecord] = {}
        self.ended: dict[str, EndedRecord] = {}
        self.letters: dict[str, DeadLetterRecord] = {}
        self.delivered: dict[str, EndedRecord] = {}
        self.add(records)

    def __bool__(self) -> bool:
        return bool(self.accepted or self.ended or self.letters)

    def add(self, records: Iterable[Record]) -> None:
        """Add records. Of two records of one kind the first is kept, except if the second `outweighs` it."""
        accept, end = self.accepted.setdefault, self.ended.setdefault
        for record in records:
            if isinstance(record, EndedRecord):
                first = end(record.id, record)
                if first is record:
                    continue
                if outweighs(record, first):
                    self.ended[record.id] = record
                elif record.delivered and not first.delivered:
                    self.delivered.setdefault(record.id, record)
            elif isinstance(record, AcceptedRecord):
                accept(record.id, record)
            else:
                self.letters.setdefault(record.id, record)


def outweighs(new: EndedRecord, old: EndedRecord) -> bool:
    """Whether an end replaces an earlier one: it was delivered to the client, and the earlier one was not.

    A delivered 504 also replaces a delivered result: direct mode records a result before it sends it, and sends a 504 instead
    if the disk takes too long. In all other cases the first end is kept.
    """
    if not new.delivered or (new.state == old.state and new.error_code == old.error_code):
        return False
    return not old.delivered or (old.state == State.COMPLETED and new.error_code == ErrorCode.DEADLINE_EXCEEDED)
