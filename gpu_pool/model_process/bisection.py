"""Bisection of a batch that raises: ever smaller parts are run again; everything except the bad item completes.

With one bad item among n it costs about 2 log2(n) more runs, with all bad 2n - 1; `time_left` limits that.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")


def run_apart(
    run: Callable[[Sequence[I]], list[R]],
    items: Sequence[I],
    *,
    blame: Callable[[BaseException], R],
    unfinished: Callable[[], R],
    time_left: Callable[[], bool],
    fatal: type[Exception],
) -> list[R]:
    """One result for each item, in order.

    A part that raises is run again in halves. The result of a single item that raises is `blame(error)`; of items for
    which no time was left, `unfinished()`. A `fatal` exception means that the model is lost, and is passed on.
    """
    if not time_left():
        return [unfinished() for _ in items]
    try:
        return run(items)
    except fatal:
        raise
    # A model that calls sys.exit() must not end the process.
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything
        if len(items) == 1:
            return [blame(error)]

    def run_half(half: Sequence[I]) -> list[R]:
        return run_apart(run, half, blame=blame, unfinished=unfinished, time_left=time_left, fatal=fatal)

    middle = len(items) // 2
    return run_half(items[:middle]) + run_half(items[middle:])
