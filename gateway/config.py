"""What a gateway, its jobs and its JWT verification are configured with: plain values, with units in their names.

Nothing here reads settings. JWT values that would let wrong tokens in are refused at start.
"""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from scheduler.autoscale import ScaleRules
from scheduler.errors import StartError
from scheduler.protocol.admission import REPLAYS, ReplayLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The composition root fills this in. Without a secret no callbacks are taken, nor where a customer has no hosts."""

    database_url: str = field(repr=False)
    total_ms: int = 600_000  # From taking a job in to its end.
    kept_ms: int = 600_000  # How long its result can be read after that.
    callback_hosts: tuple[str, ...] = ()  # Of customers without a list of their own: see gateway/host_lists.py.
    callback_secret: bytes = field(default=b"", repr=False)  # Of which each customer's own is made.
    shared_signature: bool = False  # Whether it signs itself as well, as it did before customers had their own.
    private_addresses: bool = False  # Whether callbacks may go to addresses that are not public.


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The composition root fills this in; every default is the one that the documentation names."""

    gateway_id: str
    redis_url: str
    service_token: str
    direct_token: str = ""  # For workers' direct endpoints; "": the one that follows from the service token.
    host: str = "127.0.0.1"
    port: int = 8080
    reuse_port: bool = True
    pool: str = "default"
    only_own: bool = False  # Serve no other pool that the catalog names.
    default_model: str | None = None  # What a request without `model` gets; None: the pool's only enabled model.

    total_ms: int = 4000
    gone_ms: int = 1000  # A worker that was silent for so long does not count; the same in every role of the pool.
    max_body_bytes: int = 262_144
    max_input_bytes: int = 131_072  # UTF-8 bytes of `input`.
    body_memory_bytes: int = 128 << 20  # Of bodies that are being read: in all, of one customer, of one key.
    customer_body_memory_bytes: int = 32 << 20
    key_body_memory_bytes: int = 16 << 20
    direct: bool = True  # Call the workers' direct endpoints while Redis is away; needs `data_dir`.
    data_dir: Path | None = None  # Holds the audit spool; gateways may share it.
    spool_max_bytes: int = 64 << 20
    metrics_dir: Path | None = None  # Where the gateways of a host sum their counters; None: each tells its own.
    request_log: bool = False  # One line for each call of a customer.
    cors_origins: tuple[str, ...] = ()  # Whose pages may call the API of customers; "*" alone: all of them.
    auth_failures: str = "30/minute"  # Of one address, in the notation of `limits`; "off": no end.
    scale: ScaleRules = field(default_factory=ScaleRules)  # By which the size of each pool is advised.
    silent_s: float = 1.0  # After so long without a scheduler's pass gateways do its work.
    reap_ms: int = 100  # Between two passes of a scheduler.
    jobs: JobConfig | None = None  # None: no asynchronous jobs are served.
    replays: ReplayLimits = REPLAYS  # What is kept for those who send an Idempotency-Key again.
    max_pending: int = 4096  # Requests that wait for the next admission call; more are refused at once.

    header_timeout_s: float = 5.0  # From the first byte of a request to the end of its headers.
    body_timeout_s: float = 10.0
    write_timeout_s: float = 5.0  # How long a client may leave our answer unread.
    idle_timeout_s: float = 75.0
    max_connections: int = 10_000
    backlog: int = 1024

    drain_ms: int = 2000  # Not ready, but still serving, so that load balancers notice first.
    drain_timeout_s: float = 4.0  # Then what is still waiting gets this long before it is answered 503.


ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""What may be allowed. HS256 and its like are missing for good: a JWKS is public, and so would be their secret."""

DEFAULT_ALGORITHMS = ("RS256", "ES256", "EdDSA")
LONGEST_TOKEN = 8000
"""Bytes. With its name and scheme it just fits into a header line of 8190, the longest that the HTTP parser takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """Which tokens are taken. Raises StartError for values that make no sense or that open too much.

    At least one of `issuer` and `audience` must be given: one identity provider signs with the same keys for many
    parties, and a good signature alone does not say that a token was meant for us. The audience says so, and is the
    better one; issuer alone is for providers with keys of their own for each client, whose tokens may lack `aud`.
    """

    jwks: str  # Path of a file, or URL, of the key set.
    issuer: str | None = None  # What `iss` must be.
    audience: str | None = None  # What `aud` must be or hold.
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    customer_claim: str = "sub"  # The claim that names the customer, by its name or id.
    leeway_s: float = 10.0  # How far the clocks of the issuer and of this machine may be apart.
    refresh_s: float = 300.0  # Between looks at a URL; a file is looked at every two seconds.
    keep_s: float = 86_400.0  # How long the last good key set is used while its source is away.
    max_token_bytes: int = LONGEST_TOKEN
    max_cached: int = 10_000  # Verified tokens that are remembered; about 500 bytes each.

    def __post_init__(self) -> None:
        _check_source(self.jwks)
        _check_algorithms(self.algorithms)
        if not self.issuer and not self.audience:
            raise StartError(
                "TIERLANE_JWT_JWKS is set: set TIERLANE_JWT_AUDIENCE or TIERLANE_JWT_ISSUER too, so that only tokens for us count."
            )
        if not self.customer_claim:
            raise StartError(
                "TIERLANE_JWT_CUSTOMER_CLAIM is empty: name the claim that holds the customer, such as sub."
            )
        if not (0 <= self.leeway_s <= 300 and 1 <= self.refresh_s <= 86_400 and self.keep_s >= self.refresh_s):
            raise StartError(
                "The times for JWTs are out of range: leeway 0..300 s, refresh 1..86400 s, keep not below."
            )
        if not (256 <= self.max_token_bytes <= LONGEST_TOKEN and self.max_cached >= 1):
            raise StartError(f"JWTs may have 256 to {LONGEST_TOKEN} bytes, and at least one has to be remembered.")

    @property
    def is_url(self) -> bool:
        """Whether the key set is fetched by HTTP, and not read from a file."""
        return self.jwks.startswith(("https://", "http://"))

    @property
    def place(self) -> str:
        """Where the key set comes from, for messages: without the query, which may hold a secret."""
        if not self.is_url:
            return self.jwks
        parts = urlsplit(self.jwks)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _check_source(jwks: str) -> None:
    if not jwks:
        raise StartError("TIERLANE_JWT_JWKS is empty: name the file or URL of the JWKS.")
    if "://" not in jwks:
        return
    parts = urlsplit(jwks)
    if parts.scheme not in {"https", "http"} or not parts.hostname:
        raise StartError("TIERLANE_JWT_JWKS must be the path of a file, or a URL that begins with https:// or http://.")
    if parts.username is not None or parts.password is not None:
        raise StartError("TIERLANE_JWT_JWKS must not hold a user name or password: key sets are public.")


def _check_algorithms(algorithms: tuple[str, ...]) -> None:
    if not algorithms:
        raise StartError(f"TIERLANE_JWT_ALGORITHMS is empty: allow at least one of {', '.join(ALGORITHMS)}.")
    for name in algorithms:
        if name.upper().startswith("HS"):
            raise StartError(
                f"TIERLANE_JWT_ALGORITHMS must not hold {name}: its secret would be a key that everybody can read."
            )
        if name.lower() == "none":
            raise StartError("TIERLANE_JWT_ALGORITHMS must not hold none: such tokens are not signed.")
        if name not in ALGORITHMS:
            raise StartError(f"TIERLANE_JWT_ALGORITHMS holds {name}, which is not one of {', '.join(ALGORITHMS)}.")
