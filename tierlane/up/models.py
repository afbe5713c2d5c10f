"""Finding the model processes: a worker starts its own, so `up` looks among the worker's descendants."""

import psutil

# Helper processes of Python's multiprocessing, which are not models.
HELPERS = ("resource_tracker", "forkserver")


def model_processes(worker_pid: int) -> list[psutil.Process]:
    """Return the model processes of a worker, oldest first; none when it is gone."""
    try:
        children = psutil.Process(worker_pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child for child in children if not _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return not command or any(helper in command for helper in HELPERS)
