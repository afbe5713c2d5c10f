"""How many CPU threads a model gets where nobody says: those of the host, shared by its workers; `tiny` gets one."""

import os

from tierlane.batch_sizes import is_tiny


def default_torch_threads(backend: str, workers: int = 1) -> int:
    """The number for the backend of `--backend`, where so many workers share the host.

    The matrices of `tiny` are so small that its threads wait for each other most of the time: on two busy cores 64 steps of 16
    rows took 7.2 s with two threads, and 0.9 s with one.
    """
    return 1 if is_tiny(backend) else max(1, (os.cpu_count() or 1) // workers)
