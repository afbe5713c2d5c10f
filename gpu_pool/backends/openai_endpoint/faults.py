"""Why an endpoint cannot be used: a sentence for the operator, and its cause, one of a fixed list."""

from enum import StrEnum
from typing import Self


class FaultCause(StrEnum):
    """The cause in heartbeats, by which faults are grouped."""

    KEY_REJECTED = "key_rejected"  # 401, 403 or 407.
    MODEL_MISSING = "model_missing"  # The endpoint has no model, or not the one that is named.
    LOADING = "loading"
    OVERLOADED = "overloaded"  # It asks for a pause.
    REFUSED = "connection_refused"
    HOST_UNKNOWN = "host_unknown"
    TLS = "tls"
    UNREACHABLE = "unreachable"  # Any other reason for which there is no connection.
    TIMEOUT = "timeout"  # It does not accept the connection, or does not respond, in time.
    CLOSED = "connection_closed"
    STATUS = "error_status"  # Any other status than those above.
    WRONG_SERVER = "wrong_server"  # It redirects, is not HTTP, or has no API that is supported.
    OTHER = "other"


class EndpointFault(str):
    """A sentence without text of the server, which is passed on as the reason. `str(fault)` is the sentence alone."""

    __slots__ = ("cause",)

    cause: FaultCause

    def __new__(cls, sentence: str, cause: FaultCause) -> Self:
        fault = super().__new__(cls, sentence)
        fault.cause = cause
        return fault


def cause_of(reason: str) -> str:
    """The cause of a reason; "" without one."""
    return (reason.cause if isinstance(reason, EndpointFault) else FaultCause.OTHER).value if reason else ""
