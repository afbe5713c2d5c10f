"""Failpoints: the numbered gaps between two effects in which a crash could split them, each with a name.

A test puts a file of that name into the armed directory; the process that comes to the gap first removes the file and
kills itself, as power loss would. In production nothing is armed, and a failpoint is one look at a boolean. Only the
composition root arms them, and a model process, which is told by its supervisor.
"""

import os
import signal
from pathlib import Path

FAILPOINTS = {
    # Gateway
    "admit_unasked": "1: the request waits here, Redis has not been asked",
    "admit_unheard": "2: Redis has admitted it, the verdict has not been handled",
    "reply_unwritten": "3: the reply has resolved the waiter, the client has not been answered",
    "loss_seen": "4: Redis lost requests and the gateway knows, none is submitted again yet",
    "spool_unanswered": "5: the disk has the audit of a direct answer, the client has not been answered",
    "spool_unremoved": "6: the spool's pairs are in Redis, their file is still there",
    # Scheduler
    "wake_popped": "7: the wake token is gone, nobody has looked",
    "form_undone": "8: the batch is decided, not formed",
    "form_unnoted": "9: the batch is formed, the credit that it spent is not remembered",
    "reaped": "10: lost batches have been given back, nothing after it was done",
    "audit_taken": "11: outbox entries are in the auditor's list, nothing is written",
    "audit_uncommitted": "12: the rows are written, the transaction is open",
    "audit_undropped": "13: the rows are committed, the entries are still in the auditor's list",
    # Worker
    "batch_popped": "14: the batch id is popped, not claimed",
    "batch_claimed": "15: the batch is claimed, its run has not begun",
    "batch_ran": "16: the model has answered, Redis has not been told",
    "batch_finished": "17: Redis has been told, the lease's task still runs",
    "loss_untold": "18: the model process is lost, its batch has not been given back",
    "drain_unreleased": "19: the worker drains, its batch has not been handed back",
    "answer_unsent": "20: the model process has computed the answer, and not sent it",
    "drain_popped": "21: the worker drains, the batch id that it popped is not pushed back",
    "ends_unnoted": "22: Redis was told of ends again, the gateway still has them on its list",
    "direct_unanswered": "23: a direct batch has run, the gateway has not been told",
    "direct_unsent": "24: the disk has the accepted records of a direct batch, no worker was called",
    "riders_untold": "25: a run has ended, not all who ride on it have been told",
}
"""Name -> number, and what has happened and what has not."""

_armed = False
_directory = Path()


def arm(directory: Path) -> None:
    """From now on a file `<directory>/<name>` kills the process that passes that failpoint first."""
    global _armed, _directory
    _armed, _directory = True, directory


def armed_directory() -> str:
    """Where the files are looked for; "" where nothing is armed."""
    return str(_directory) if _armed else ""


def failpoint(name: str) -> None:
    """Die here, if a test has asked for it."""
    if _armed:
        _die_if_asked(name)


def _die_if_asked(name: str) -> None:
    try:
        (_directory / name).unlink()  # Of several processes exactly one succeeds.
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
