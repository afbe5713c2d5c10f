"""The invariant of batches: every line ends once, with its own output, and the counts of its batch agree.

Lines that the endpoint rejects are in the error file. Any other line is there only with an error that its input may cause each
time, after five runs. A batch, once created, must be found, and end, whatever happens to the processes and to Redis.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from gateway.batch_api.lines import MAYBE_ITS_OWN
from tierlane_tools.chaos.checker.case import Case
from tierlane_tools.chaos.checker.results import InvariantFinding, Violation
from tierlane_tools.chaos.history import BatchCreated, BatchEnded, BatchFault

COMPLETED = "completed"


def lines_end_once(case: Case) -> InvariantFinding:
    """Batches that have not ended, lines that are missing, doubled or wrong, and calls that failed."""
    created = [event for event in case.events if isinstance(event, BatchCreated)]
    ended = {event.batch: event for event in case.events if isinstance(event, BatchEnded)}
    violations = [Violation(event.detail) for event in case.events if isinstance(event, BatchFault)]
    for batch in created:
        violations += [Violation(f"{batch.batch}: {problem}") for problem in _problems(batch, ended)]
    lines = sum(len(event.outputs) + len(event.errors) for event in ended.values())
    failed = sum(len(event.errors) for event in ended.values())
    shown = f"{len(created)} batches, {lines} lines, {failed} of them in error files"
    return InvariantFinding(violations, measured=bool(created or violations), shown=shown)


def _problems(batch: BatchCreated, ends: Mapping[str, BatchEnded]) -> Iterator[str]:
    end = ends.get(batch.batch)
    if end is None:
        yield "It has not ended."
        return
    if end.status != COMPLETED:
        yield f"It is {end.status}."
    counts = end.total, end.completed, end.failed
    found = len(batch.valid) + len(batch.invalid), len(end.outputs), len(end.errors)
    if counts != found:
        yield f"Its counts (total, completed, failed) are {counts}, its lines {found}."
    # Lines that are not exactly once in one of the files.
    seen = Counter(line.custom_id for line in (*end.outputs, *end.errors))
    for custom_id in (*batch.valid, *batch.invalid):
        if (count := seen.pop(custom_id, 0)) != 1:
            yield f"The line {custom_id!r} is {count} times in its files."
    yield from (f"The line {custom_id!r} is not of its input." for custom_id in seen)
    # Outputs of other lines, and lines that are in the wrong file.
    invalid = set(batch.invalid)
    for line in end.outputs:
        if line.text != line.custom_id[::-1] or line.custom_id in invalid:
            yield f"The output of line {line.custom_id!r} is {line.text!r}."
    for line in end.errors:
        if line.custom_id not in invalid and line.text not in MAYBE_ITS_OWN:
            yield f"The line {line.custom_id!r} failed with {line.text}."
