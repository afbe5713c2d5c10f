"""The job of every peer, configured by the environment that run.py sets."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import os
from collections.abc import Sequence

PORT = int(os.environ["PEER_PORT"])
BATCH = int(os.environ["PEER_BATCH"])
GPUS = int(os.environ["PEER_GPUS"])
SERVICE_S = int(os.environ["PEER_SERVICE_MS"]) / 1000
WINDOW_MS = int(os.environ["PEER_WINDOW_MS"])
WINDOW_S = WINDOW_MS / 1000


def reversed_all(inputs: Sequence[str]) -> list[str]:
    """The outputs of a batch, which takes `SERVICE_S` seconds."""
    return [text[::-1] for text in inputs]
