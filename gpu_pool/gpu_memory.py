"""What the driver's counts of broken memory mean for a worker that begins, and for one that runs. Pure.

The count of uncorrectable errors is the driver's volatile one: it is set back when the driver is loaded or the GPU is reset, and
by no new process. So a worker compares with the count that it began with. An error since then may be in what its model holds:
the GPU is out for this worker. One from before is history: from Ampere's data center GPUs on the driver lets nobody have that
page again, and the reset that remaps its row can wait for a quiet hour. Older GPUs retire a page only with that reset: until
then it may be given to anybody.
"""

from typing import NamedTuple

ECC = "its memory had an error that ECC cannot correct since this worker began"
WANTS_RESET = "a broken page of its memory is in use until the GPU is reset"
BEFORE = "uncorrectable errors of its memory from before this worker began"
TO_REMAP = "a row of its memory is remapped at the next reset: it can wait for a quiet hour"
NOT_REMAPPED = "a row of its memory could not be remapped: have it replaced"


class Counts(NamedTuple):
    """What the driver says; what a GPU does not have is 0 or False.

    `errors`: uncorrectable, since the driver was loaded. `retiring`: a page's retirement waits for a reset. `remapping`,
    `not_remapped`: a row's remapping does, or failed once.
    """

    errors: int = 0
    retiring: bool = False
    remapping: bool = False
    not_remapped: bool = False


def fault_of(began: Counts, now: Counts) -> str:
    """Why the GPU must get no more work from this worker, or ""."""
    if now.errors > began.errors:
        return ECC
    return WANTS_RESET if now.retiring else ""


def note_of(now: Counts) -> str:
    """What the one who looks after the machine should know, or ""; the most urgent of it."""
    if now.not_remapped:
        return NOT_REMAPPED
    if now.remapping:
        return TO_REMAP
    return BEFORE if now.errors else ""
