"""The limits of a request to a backend in one line, as `tierlane up` and `tierlane check` print them."""

from typing import TYPE_CHECKING

from scheduler.request_limits import ENDPOINT, LANGUAGE_MODEL, RequestLimits

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


def limits_line(backend: str, of_backend: RequestLimits, settings: "Settings") -> str:
    """One sentence without a name. `of_backend`: the limits before the settings."""
    limits = settings.request_limits(of_backend)
    text = "" if limits.input_bytes == limits.body_bytes else f", a text {_size(limits.input_bytes)}"
    return (
        f"a request may wait {_time(limits.queue_ms)} (max_queue_ms), {_output(backend, of_backend, settings)} and take "
        f"{_time(limits.total_ms)} in all; its body may have {_size(limits.body_bytes)}{text}"
    )


def _output(backend: str, of_backend: RequestLimits, settings: "Settings") -> str:
    """The part about a run: an answer is bounded by its first token and its pauses, a batch by its length."""
    if backend.startswith(ENDPOINT):
        first, silence = _time(settings.endpoint_first_token_ms), _time(settings.endpoint_silence_ms)
        return f"get its first token after {first}, pause for {silence}"
    if of_backend == LANGUAGE_MODEL:
        return f"make no progress for {_time(settings.gpu_timeout_ms)}"
    return f"run for {_time(settings.gpu_timeout_ms)}"


def _time(ms: float) -> str:
    return f"{ms / 1000:,g} s"


def _size(count: int) -> str:
    return f"{count / (1 << 20):g} MiB" if count >= 1 << 20 else f"{count / 1024:g} KiB"
