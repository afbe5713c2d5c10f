"""Checks of single settings. Each takes a value of the right type, raises ValueError, and returns the value to use.

The text of the error follows the name of the variable, as in "TIERLANE_POOLS: must be ...". Only the standard library
is imported here, because the declarations name these functions and `--help` must be quick.
"""
# ruff: noqa: PLC0415 - see above

import re
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pydantic import SecretStr

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 256  # Of a bearer token that gateways read (gateway/auth/authenticator.py).
REDIS_SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
DATABASE_SCHEMES = ("postgresql://", "postgres://", "postgresql+asyncpg://")
MAX_WORKERS = 256


def redis_url(value: str) -> str:
    """Check the scheme, and the hosts of a URL of Sentinel or a cluster; empty is not set."""
    if value and not value.startswith(REDIS_SCHEMES):
        raise ValueError("must begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://")
    if "+sentinel://" in value or "+cluster://" in value:
        from scheduler.errors import StartError
        from scheduler.redis_client import cluster, sentinel  # Load the Redis client, which takes long.

        try:
            (sentinel if "+sentinel://" in value else cluster).parse(value.partition("#")[0])
        except StartError as error:
            raise ValueError(str(error)) from None
    return value


def database_url(value: str) -> str:
    """Check the scheme, and that the end of the password can be found; empty is not set."""
    if value and not value.startswith(DATABASE_SCHEMES):
        raise ValueError("must begin with postgresql:// or postgres://")
    if value:
        from ledger.postgres import VALID_URL, is_valid_url

        if not is_valid_url(value):
            raise ValueError(f"must be {VALID_URL}")
    return value


def token(value: "SecretStr") -> "SecretStr":
    """Check a token; empty is not set."""
    text = value.get_secret_value()
    if text and not is_token(text):
        raise ValueError(
            f"must have {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable ASCII characters, without white space at its ends"
        )
    return value


def direct_token(value: "SecretStr") -> "SecretStr":
    """Check a token of direct calls, which is normally derived by a command that takes an empty service token as well."""
    if value.get_secret_value():
        from scheduler.protocol.direct import is_from_empty_token

        if is_from_empty_token(value.get_secret_value()):
            raise ValueError("must follow from TIERLANE_SERVICE_TOKEN, which was empty when this one was computed")
    return token(value)


def is_token(text: str) -> bool:
    """Whether a text can be sent as a bearer token and guessed by nobody: blanks are a key that everybody knows."""
    return (
        MIN_TOKEN_CHARS <= len(text) <= MAX_TOKEN_CHARS
        and text.isascii()
        and text.isprintable()
        and text == text.strip()
    )


def log_format(value: str) -> str:
    """Replace `auto` by the format that suits stdout, so that no role finds `auto`."""
    return ("console" if sys.stdout.isatty() else "json") if value == "auto" else value


def origins(value: str) -> str:
    """Check a list of CORS origins."""
    from gateway.host_lists import origin_list

    origin_list(value)
    return value


def issuer(value: str) -> str:
    """Check the URL of an issuer; empty is not set."""
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
        raise ValueError("must be https://HOST or https://HOST/PATH, as in the provider's metadata")
    return value


def group_roles(value: str) -> str:
    """Check roles of groups; empty is not set."""
    if value:
        parse_group_roles(value)
    return value


def parse_group_roles(text: str) -> dict[str, str]:
    """Group -> role. Raises ValueError."""
    pairs = [each.strip().rpartition("=") for each in text.split(",") if each.strip()]
    for group, _, role in pairs:
        if not group or role not in ("viewer", "operator", "admin"):
            raise ValueError("must be GROUP=viewer, GROUP=operator or GROUP=admin, separated by commas")
    if len({group for group, _, _ in pairs}) < len(pairs):
        raise ValueError("must name each group once")
    return {group: role for group, _, role in pairs}


def networks(value: str) -> str:
    """Check a list of networks."""
    from gateway.auth.client_address import networks_of

    networks_of(value)
    return value


def callback_hosts(value: str) -> str:
    """Check a list of hosts."""
    from gateway.host_lists import host_list

    host_list(value)
    return value


def webhook_url(value: str) -> str:
    """Check the URL of a receiver of webhooks; empty is not set."""
    from gateway.jobs.callback_url import is_webhook_url

    if value and not is_webhook_url(value):
        raise ValueError("must be an http or https URL in ASCII, without user, password and fragment")
    return value


def callback_secret(value: "SecretStr") -> "SecretStr":
    """Check a secret of Standard Webhooks; empty is not set."""
    from gateway.jobs.webhook_security import secret_bytes

    if value.get_secret_value():
        secret_bytes(value.get_secret_value())
    return value


def direct_host(value: str) -> str:
    """Replace an empty text by `off`, which an environment variable can also say: an empty variable counts as not set."""
    return value or "off"


def header_value(value: "SecretStr") -> "SecretStr":
    """Check that the text fits into an HTTP header."""
    text = value.get_secret_value()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be printable ASCII without spaces")
    return value


def traces_endpoint(value: str) -> str:
    """Check a URL without user, password, query and fragment; remove a slash at its end."""
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("must begin with http:// or https:// and name a host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must be an address alone; what it wants to be shown goes into OTEL_EXPORTER_OTLP_HEADERS")
    return value.rstrip("/")


def worker_bounds(value: str) -> str:
    """Check the smallest and largest number of workers; empty is not set."""
    if value:
        parse_bounds(value)
    return value


def parse_bounds(text: str) -> tuple[int, int]:
    """Return the two numbers of `--autoscale MIN:MAX`. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_WORKERS:
        raise ValueError(f"must be MIN:MAX, whole numbers with 1 <= MIN <= MAX <= {MAX_WORKERS}")
    return int(match[1]), int(match[2])
