"""Admission of jobs: the gateway's own, but nobody waits for the result, so being let in ends the waiting."""

from gateway.inference.admission import ENTERED, Admitter
from gateway.inference.pending import Waiter
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict


class JobAdmitter(Admitter):
    """Gives each waiter its verdict as the outcome. Its calls go out under the name of the jobs' own gateway."""

    def _judged(self, waiter: Waiter, verdict: Verdict) -> None:
        waiter.verdict = verdict
        entered = verdict.outcome in ENTERED
        waiter.accepted = entered
        if entered and (waiter.gone or waiter.future.done()):  # The client left while the call was under way.
            self._cancels.add(waiter.id, ErrorCode.CANCELLED)
        waiter.finish(verdict)
