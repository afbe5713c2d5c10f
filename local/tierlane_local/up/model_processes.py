"""The model processes of the workers of a stack."""

from contextlib import suppress

import psutil

from tierlane_local.child_process import still_runs

# Helper processes of Python's multiprocessing, which are not model processes.
HELPERS = ("resource_tracker", "forkserver")


class ModelProcesses:
    """The model processes of all workers, cached while they run. A worker starts them as its children."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, list[psutil.Process]]] = {}

    def of_worker(self, name: str, pid: int) -> list[psutil.Process]:
        """The model processes of the worker `name` with the process id `pid`, oldest first."""
        seen_pid, models = self._seen.get(name, (0, []))
        # Listing children reads all processes of the machine, so it is repeated only after a process has ended.
        if seen_pid != pid or not models or not all(still_runs(model) for model in models):
            models = []
            with suppress(psutil.Error):
                children = psutil.Process(pid).children(recursive=True)
                models = [child for child in children if still_runs(child) and not _is_helper(child)]
            self._seen[name] = (pid, models)
        return models


def _is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return not command or any(helper in command for helper in HELPERS)
