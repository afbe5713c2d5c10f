"""Admission of jobs in one pool: the verdict is the outcome, and calls use the gateway id that all jobs share."""

from gateway.inference.admission import ENTERED, AdmissionBatcher
from gateway.inference.pending import PendingRequest
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict


class JobAdmitter(AdmissionBatcher):
    """The admission batcher of jobs."""

    def _judged(self, pending: PendingRequest, verdict: Verdict) -> None:
        pending.verdict = verdict
        entered = verdict.outcome in ENTERED
        pending.accepted = entered
        if entered and (pending.gone or pending.done):  # The client left during the call.
            self._cancellations.add(pending.id, ErrorCode.CANCELLED)
        pending.finish(verdict)
