"""What holds for the requests of a backend: the time of its model beside cap and deadline, and its limits in one line."""

import math

from ratelimit.request_limits import ENDPOINT, LANGUAGE_MODEL, SERVERS, RequestLimits
from tierlane.settings.model import Settings

ROOM = 2.0
"""The suggested cap, as a multiple of the measured time: larger batches and longer texts take longer."""

ROUND_MS = 1000


def shortfall(model: str, ms: float, timeout_ms: float, total_ms: float) -> str:
    """Why a model that takes `ms` for a batch of one cannot be served within cap and deadline; "" if it can."""
    over = [
        f"{name} = {limit:,.0f}"
        for name, limit in (("TIERLANE_GPU_TIMEOUT_MS", timeout_ms), ("TIERLANE_TOTAL_REQUEST_MS", total_ms))
        if ms > limit
    ]
    if not over:
        return ""
    return f"{model} takes {ms:,.0f} ms for a batch of one request, over {' and '.join(over)}"


def advice(ms: float, timeout_ms: float) -> str:
    """The settings with which a model that takes `ms` can be served, as a sentence. `timeout_ms`: the cap now."""
    cap = max(math.ceil(ROOM * round(ms) / ROUND_MS) * ROUND_MS, round(timeout_ms))
    return (
        f"Set TIERLANE_GPU_TIMEOUT_MS={cap} and TIERLANE_TOTAL_REQUEST_MS={cap + ROUND_MS}, or use a faster device or a "
        "smaller model."
    )


def limits_line(backend: str, of_backend: RequestLimits, settings: Settings) -> str:
    """What holds for a request to this backend, as a list without an end. `of_backend`: the limits before the settings."""
    limits = settings.request_limits(of_backend)
    run = [f"run {_time(settings.gpu_timeout_ms)}"]
    if backend.startswith(ENDPOINT):
        first, silence = settings.endpoint_first_token_ms, settings.endpoint_silence_ms
        run = [f"first token {_time(first)}", f"silence {_time(silence)}"]
    elif backend.startswith(SERVERS):
        run = []
    elif of_backend == LANGUAGE_MODEL:
        run = [f"silence {_time(settings.gpu_timeout_ms)}"]
    sizes = [f"body {_size(limits.body_bytes)}"]
    if limits.input_bytes < limits.body_bytes:
        sizes.append(f"text {_size(limits.input_bytes)}")
    waits = [f"wait {_time(limits.queue_ms)} (max_queue_ms)"]
    return ", ".join([*waits, *run, f"total {_time(limits.total_ms)}", *sizes])


def _time(ms: float) -> str:
    return f"{ms / 1000:,g} s"


def _size(count: int) -> str:
    return f"{count / (1 << 20):g} MiB" if count >= 1 << 20 else f"{count / 1024:g} KiB"
