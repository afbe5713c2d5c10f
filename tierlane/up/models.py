"""Finding the model processes: a worker starts its own, so `up` looks among the worker's descendants."""

import psutil

from tierlane.child_process import still_runs

# Helper processes of Python's multiprocessing, which are not models.
HELPERS = ("resource_tracker", "forkserver")


class ModelProcesses:
    """The model processes of all workers, as last seen. Asking is cheap while nothing has changed."""

    def __init__(self) -> None:
        """Know of none."""
        self._seen: dict[str, tuple[int, list[psutil.Process]]] = {}

    def of_worker(self, name: str, pid: int) -> list[psutil.Process]:
        """Return the model processes of the worker `name` that runs as `pid`, oldest first."""
        seen_pid, models = self._seen.get(name, (0, []))
        # Looking for children reads about every process of the machine, so only a loss is a reason to look again.
        if seen_pid != pid or not models or not all(still_runs(model) for model in models):
            models = _models_of(pid)
            self._seen[name] = (pid, models)
        return models


def _models_of(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child for child in children if still_runs(child) and not _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return not command or any(helper in command for helper in HELPERS)
