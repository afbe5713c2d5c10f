"""Configuration of a gateway, its jobs and its JWT verification: plain values, with units in their names.

This module reads no settings; a field that is a setting has no default of its own. JWT values that would accept wrong tokens are rejected at start.
"""

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from urllib.parse import urlsplit

from ratelimit.request_limits import FUNCTION, LANGUAGE_MODEL, RequestLimits
from scheduler.autoscale import ScaleRules
from scheduler.errors import StartError
from scheduler.protocol.admission import ReplayLimits
from scheduler.redis_client.keys import cell_of, place_name

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Allowed values. HS256 and similar are excluded: a JWKS is public, and so would be their secret."""

LONGEST_TOKEN = 8000
"""Bytes. With its name and scheme it fits into a header line of 8190 bytes, the maximum of the HTTP parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Configuration of jobs. Callbacks are rejected without a secret, and for customers without hosts."""

    database_url: str = field(repr=False)
    session_url: str = field(repr=False)  # For the lock of the reconciler; "": `database_url`.
    total_ms: int  # From the acceptance of a job to its end.
    kept_ms: int  # How long its result can be read after that.
    callback_hosts: tuple[str, ...]  # For customers without a list of their own: see gateway/host_lists.py.
    callback_secret: bytes = field(repr=False)  # Each customer's secret is derived from it.
    shared_signature: bool  # Whether to add a signature of the secret itself, as earlier versions did.
    private_addresses: bool  # Whether callbacks may go to addresses that are not public.
    alert_url: str  # For alerts of the quotas of all customers; "": none.


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """Configuration of the gRPC server, whose address and bounds are those of HTTP."""

    port: int  # 0: chosen by the system.
    tls_cert: Path | None  # PEM; None: no TLS.
    tls_key: Path | None
    tls_ca: Path | None  # Clients need a certificate of this CA; None: they need none.


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStoreConfig:
    """Configuration of the store of /v1/responses. The oldest responses of a customer over a limit are deleted."""

    database_url: str = field(repr=False)  # "": no responses are stored.
    count: int  # Of one customer.
    bytes: int  # Of one customer.
    kept_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Configuration of files and batches. Limits are those of one customer, except of a file and a batch."""

    database_url: str = field(repr=False)  # "": there are none; they also need `GatewayConfig.jobs`.
    window: int  # Most lines of one batch in Redis at a time.
    max_file_bytes: int
    max_lines: int
    max_open: int
    max_stored_bytes: int
    kept_s: float  # Files and ended batches.
    total_s: float = 86_400.0  # From the creation of a batch until its open lines expire.
    lease_s: float = 3.0  # Another gateway continues the batches of a lost one after this time.


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Configuration of a gateway."""

    gateway_id: str
    redis_url: str
    service_token: str
    installation: str  # The name that health and the dashboard show; "": none.
    direct_token: str  # For workers' direct endpoints; "": derived from the service token.
    host: str
    port: int
    reuse_port: bool = True
    pool: str
    only_own: bool  # Do not serve other pools of the catalog.
    default_model: str | None  # For requests without `model`; None: the pool's only enabled model.

    total_ms: int | None  # None, as for sizes: by the backend of the pool, see `request_limits`.
    lease_ms: int  # The duration of a lease of a batch; as `gone_ms`, the same in all roles of the pool.
    gone_ms: int  # A worker without a heartbeat for this time is not healthy.
    max_body_bytes: int | None
    max_input_bytes: int | None = None  # UTF-8 bytes of `input`; None: in proportion to the body.
    body_memory_bytes: int  # Of bodies being read: in total, of one customer, of one key.
    customer_body_memory_bytes: int
    key_body_memory_bytes: int
    direct: bool  # Call the workers' direct endpoints while Redis is unavailable; needs `data_dir`.
    body_dir: Path | None  # Files of chats larger than `inline_body_bytes`, shared with the host's workers.
    inline_body_bytes: int
    body_store_bytes: int  # Of those files; more requests get 503.
    data_dir: Path | None  # Contains the audit spool; gateways may share it. None: no spool.
    spool_max_bytes: int
    metrics_dir: Path | None  # Shared counters of the gateways of a host; None: each reports its own.
    request_log: bool  # One log line for each customer call.
    cors_origins: tuple[str, ...]  # Origins whose pages may call the customer API; "*": all.
    auth_failures: str  # Per address, in the notation of `limits`; "off": unlimited.
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...]  # Their X-Forwarded-For has the client's address.
    scale: ScaleRules  # For the recommended size of each pool.
    schedulers_expected: bool  # False: none is deployed, and gateways do their work from the start.
    silent_ms: float  # Gateways replace the schedulers when none has been active for this time.
    reap_ms: int  # Between two passes of a scheduler.
    jobs: JobConfig | None  # None: no asynchronous jobs are served.
    grpc: GrpcConfig | None  # None: gRPC is not served.
    responses: ResponseStoreConfig
    batches: BatchConfig
    replays: ReplayLimits
    max_pending: int = 4096  # Requests queued for the next admission call; more are rejected at once.

    header_timeout_s: float  # From the first byte of a request to the end of its headers.
    body_timeout_s: float
    write_timeout_s: float = 5.0  # How long a client may not read a response.
    idle_timeout_s: float
    max_connections: int
    customer_connections: int  # Of one customer, with its gRPC calls; more get 429.
    backlog: int = 1024

    notice_ms: int  # Reports not ready but still serves, so that load balancers notice first.
    drain_timeout_s: float  # The longest wait for pending requests after that; the rest gets 503.

    def request_limits(self, of_backend: RequestLimits) -> RequestLimits:
        """The limits of a request in a pool whose backend has these. A large body must also fit into the budget of its key."""
        budget = max(self.key_body_memory_bytes, FUNCTION.body_bytes)
        largest = self.max_body_bytes or min(of_backend.body_bytes, budget)
        return of_backend.override(self.total_ms, largest, self.max_input_bytes)

    @property
    def longest(self) -> RequestLimits:
        """The limits of a request in the pool with the longest and largest ones that there can be."""
        return self.request_limits(LANGUAGE_MODEL)

    @property
    def cell(self) -> str:
        """The cell of `redis_url`."""
        return cell_of(self.redis_url)

    @property
    def place(self) -> str:
        """Pool and cell."""
        return place_name(self.pool, self.cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """Which tokens are accepted. Raises StartError for invalid or unsafe values.

    At least one of `issuer` and `audience` is required: an identity provider signs tokens for many parties with the same
    keys, so a valid signature does not mean that a token is for this service. The audience does, and should be preferred;
    issuer alone is for providers with separate keys for each client, whose tokens may have no `aud`.
    """

    jwks: str  # Path of a file, or URL, of the key set.
    issuer: str | None  # Required `iss`.
    audience: str | None  # Required `aud`, or member of it.
    algorithms: tuple[str, ...]
    customer_claim: str  # The claim that names the customer, by its name or id.
    leeway_s: float = 10.0  # Allowed difference of the clocks of the issuer and this machine.
    refresh_s: float = 300.0  # Between fetches of a URL; a file is read every two seconds.
    keep_s: float = 86_400.0  # How long the last good key set is used while its source is unavailable.
    max_token_bytes: int = LONGEST_TOKEN
    max_cached: int = 10_000  # Cached verified tokens; about 500 bytes each.

    def __post_init__(self) -> None:
        _check_source(self.jwks)
        _check_algorithms(self.algorithms)
        if not self.issuer and not self.audience:
            raise StartError(
                "TIERLANE_JWT_JWKS is set: also set TIERLANE_JWT_AUDIENCE or TIERLANE_JWT_ISSUER, so that tokens for others are rejected."
            )
        if not self.customer_claim:
            raise StartError(
                "TIERLANE_JWT_CUSTOMER_CLAIM is empty: set it to the claim that identifies the customer, such as sub."
            )
        if not (0 <= self.leeway_s <= 300 and 1 <= self.refresh_s <= 86_400 and self.keep_s >= self.refresh_s):
            raise StartError(
                "The times for JWTs are out of range: leeway 0..300 s, refresh 1..86400 s, keep at least refresh."
            )
        if not (256 <= self.max_token_bytes <= LONGEST_TOKEN and self.max_cached >= 1):
            raise StartError(f"JWTs may have 256 to {LONGEST_TOKEN} bytes, and at least one must be cached.")

    @property
    def is_url(self) -> bool:
        """Whether the key set is fetched by HTTP instead of read from a file."""
        return self.jwks.startswith(("https://", "http://"))

    @property
    def place(self) -> str:
        """The source of the key set for messages, without the query, which may contain a secret."""
        if not self.is_url:
            return self.jwks
        parts = urlsplit(self.jwks)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _check_source(jwks: str) -> None:
    if not jwks:
        raise StartError("TIERLANE_JWT_JWKS is empty: set it to the file or URL of the JWKS.")
    if "://" not in jwks:
        return
    parts = urlsplit(jwks)
    if parts.scheme not in {"https", "http"} or not parts.hostname:
        raise StartError("TIERLANE_JWT_JWKS must be the path of a file, or a URL that starts with https:// or http://.")
    if parts.username is not None or parts.password is not None:
        raise StartError("TIERLANE_JWT_JWKS must not contain a user name or password: key sets are public.")


def _check_algorithms(algorithms: tuple[str, ...]) -> None:
    if not algorithms:
        raise StartError(f"TIERLANE_JWT_ALGORITHMS is empty: allow at least one of {', '.join(ALGORITHMS)}.")
    for name in algorithms:
        if name.upper().startswith("HS"):
            raise StartError(f"TIERLANE_JWT_ALGORITHMS must not contain {name}: its secret would be a public key.")
        if name.lower() == "none":
            raise StartError("TIERLANE_JWT_ALGORITHMS must not contain none: such tokens are not signed.")
        if name not in ALGORITHMS:
            raise StartError(f"TIERLANE_JWT_ALGORITHMS contains {name}, which is not one of {', '.join(ALGORITHMS)}.")
