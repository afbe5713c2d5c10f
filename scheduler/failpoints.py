"""Failpoints: named points between two effects at which a test can crash a process.

A test puts a file with the name of a failpoint into the armed directory. The first process that reaches the failpoint
removes the file and kills itself with SIGKILL. In production failpoints are not armed and cost one check of a boolean. Only
the entry points of roles arm them, and a model process, for its supervisor.
"""

import os
import signal
from pathlib import Path

FAILPOINTS = {
    # Gateway
    "admit_unasked": "1: the request waits here, admission was not called",
    "admit_unprocessed": "2: Redis has admitted it, the verdict was not processed",
    "reply_unwritten": "3: the reply was received, the client has no response",
    "loss_seen": "4: a loss of requests in Redis was detected, none is resubmitted yet",
    "spool_unanswered": "5: the audit of a direct request is on disk, the client has no response",
    "spool_unremoved": "6: the spool's pairs are in Redis, their file is still there",
    # Scheduler
    "wake_popped": "7: the wake token was popped, the queues were not read",
    "form_undone": "8: the batch is decided, not formed",
    "form_unnoted": "9: the batch is formed, the credit that it used is not stored",
    "reaped": "10: lost batches were returned, the rest of the pass was not done",
    "audit_taken": "11: outbox entries are in the auditor's list, nothing is written",
    "audit_uncommitted": "12: the rows are written, the transaction is open",
    "audit_undropped": "13: the rows are committed, the entries are still in the auditor's list",
    # Worker
    "batch_popped": "14: the batch id is popped, not claimed",
    "batch_claimed": "15: the batch is claimed, its run has not started",
    "batch_ran": "16: the model has returned its outputs, Redis does not have them",
    "batch_finished": "17: Redis has the outputs, the lease's task still runs",
    "loss_unreported": "18: the model process is lost, its batch was not returned",
    "drain_unreleased": "19: the worker drains, its batch was not returned",
    "answer_unsent": "20: the model process has computed the outputs and not sent them",
    "drain_popped": "21: the worker drains, the batch id that it popped was not pushed back",
    "resent_records_kept": "22: audit records were sent to Redis again, the gateway still has them on its list",
    "direct_unanswered": "23: a direct batch has run, the gateway does not have its results",
    "direct_unsent": "24: the accepted records of a direct batch are on disk, no worker was called",
    "followers_unnotified": "25: a run has ended, not all of its followers have",
}
"""Name -> number, what has happened, and what has not."""

_armed = False
_directory = Path()


def arm(directory: Path) -> None:
    """Arm failpoints: a file `<directory>/<name>` kills the first process that reaches that failpoint."""
    global _armed, _directory
    _armed, _directory = True, directory


def armed_directory() -> str:
    """The directory of the files; "" if failpoints are not armed."""
    return str(_directory) if _armed else ""


def failpoint(name: str) -> None:
    """Kill this process if a test has armed this failpoint."""
    if not _armed:
        return
    try:
        (_directory / name).unlink()  # Succeeds in exactly one process.
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
