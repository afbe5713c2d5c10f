"""Find the item that breaks a batch by running ever smaller parts apart; everything else completes.

Pure recursion over a `run` callable. With one bad item among n it costs about 2 log2(n) more runs, with all bad
2n - 1; `time_left` bounds that.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

I = TypeVar("I")  # noqa: E741 - an item; the letter that a reader expects
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

    What raises as a whole is run again in halves. A single item that raises is answered by `blame`, one for which
    no time was left by `unfinished`. A `fatal` exception says that the model itself is lost, and passes through.
    """
    if not time_left():
        return [unfinished() for _ in items]
    try:
        return run(items)
    except fatal:
        raise
    # SystemExit too: a model that calls sys.exit() must not take the batch and the process with it.
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything; every item gets its answer
        if len(items) == 1:
            return [blame(error)]

    def run_half(half: Sequence[I]) -> list[R]:
        return run_apart(run, half, blame=blame, unfinished=unfinished, time_left=time_left, fatal=fatal)

    middle = len(items) // 2
    return run_half(items[:middle]) + run_half(items[middle:])
