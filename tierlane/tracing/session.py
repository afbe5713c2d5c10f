"""The traces of one process, from its start to its end: where they are wanted, and what is lacking where they cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler.errors import StartError
from scheduler.tracing import Spans

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

NOT_INSTALLED = (
    "TIERLANE_TRACES_ENDPOINT is set, but OpenTelemetry is not installed: pip install 'tierlane[tracing]', or unset it."
)


@contextmanager
def spans_of(settings: "Settings", role: str, name: str) -> Iterator[Spans | None]:
    """Whom to tell of spans for as long as the block lasts; None where nobody wants them.

    At the end of the block what is left is sent, within a bound. Raises StartError where the packages are missing.
    """
    if not settings.traces_endpoint:
        yield None
        return
    try:
        from tierlane.roles.tracing import OtlpSpans  # noqa: PLC0415 - takes 150 ms and 20 MB
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("opentelemetry", "google", "requests")):
            raise
        raise StartError(NOT_INSTALLED) from None
    spans = OtlpSpans(settings.traces_endpoint, role, name)
    try:
        yield spans
    finally:
        spans.close()
