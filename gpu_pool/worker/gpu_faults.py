"""Memory faults of a GPU, from the driver's counts. Pure.

The count of uncorrectable memory errors is the driver's volatile one: it is reset when the driver is loaded or the GPU
is reset, not by a new process. So the worker compares with the count at its start. A newer error may be in memory of
its model: the GPU is out of service for this worker. An older one is a note: data center GPUs from Ampere on do not
allocate that page again, and the reset that remaps its row can wait. Older GPUs retire a page only with that reset, and
may allocate it until then.
"""

from typing import NamedTuple

ECC = "uncorrectable memory error since the worker started"
NEEDS_RESET = "a faulty memory page stays in use until the GPU is reset"
EARLIER_ERRORS = "uncorrectable memory errors from before the worker started"
TO_REMAP = "a memory row will be remapped at the next GPU reset: reset it at a quiet time"
NOT_REMAPPED = "a memory row could not be remapped: replace the GPU"


class FaultCounts(NamedTuple):
    """What the driver reports; unsupported values are 0 or False.

    `errors`: uncorrectable, since the driver was loaded. `retiring`: a page retirement waits for a reset. `remapping`:
    a row remapping waits for a reset. `not_remapped`: a row remapping failed.
    """

    errors: int = 0
    retiring: bool = False
    remapping: bool = False
    not_remapped: bool = False


def fault_of(began: FaultCounts, now: FaultCounts) -> str:
    """Why the GPU must get no more work from this worker, or ""."""
    if now.errors > began.errors:
        return ECC
    return NEEDS_RESET if now.retiring else ""


def note_of(now: FaultCounts) -> str:
    """The most urgent information for the operator, or ""."""
    if now.not_remapped:
        return NOT_REMAPPED
    if now.remapping:
        return TO_REMAP
    return EARLIER_ERRORS if now.errors else ""
