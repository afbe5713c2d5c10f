"""What a gateway is told at start: plain values with their units in their names. Nothing here reads settings."""

from dataclasses import dataclass, field
from pathlib import Path

from gateway.jobs_config import JobConfig
from scheduler.autoscale import ScaleRules
from scheduler.protocol.admission import REPLAYS, Replays


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
    replays: Replays = REPLAYS  # What is kept for those who send an Idempotency-Key again.
    max_pending: int = 4096  # Requests that wait for the next admission call; more are refused at once.

    header_timeout_s: float = 5.0  # From the first byte of a request to the end of its headers.
    body_timeout_s: float = 10.0
    write_timeout_s: float = 5.0  # How long a client may leave our answer unread.
    idle_timeout_s: float = 75.0
    max_connections: int = 10_000
    backlog: int = 1024

    drain_ms: int = 2000  # Not ready, but still serving, so that load balancers notice first.
    drain_timeout_s: float = 4.0  # Then what is still waiting gets this long before it is answered 503.
