"""Settings of a gateway: HTTP, limits of memory, JWTs, asynchronous jobs, autoscaling, metrics, traces.

Each is declared once, here or in `role_sections`; a new one needs no other place in tierlane/settings. Only the
standard library is used, because `--help` must be quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tierlane.settings import checks
from tierlane.settings.declaration import boolean, memory, milliseconds, number, setting, share, tcp_port

if TYPE_CHECKING:
    from pydantic import SecretStr


class GatewaySettings:
    """Settings of a gateway."""

    host: str = setting("127.0.0.1", "Listening address; 0.0.0.0: the network.", not_empty=True)
    port: int = tcp_port(8080, "TCP port, shared by a host's gateways; 0: chosen by the system.")
    grpc_port: int = tcp_port(
        0, "TCP port of the Open Inference Protocol over gRPC, shared by a host's gateways; 0: off."
    )
    grpc_tls_cert: Path | None = setting(
        None,
        "PEM certificate chain of the gRPC port, read again when the file changes. Unset: no TLS, keys are readable.",
        "FILE",
        needs="grpc_tls_key",
    )
    grpc_tls_key: Path | None = setting(None, "PEM key of that certificate.", "FILE", needs="grpc_tls_cert")
    grpc_tls_ca: Path | None = setting(
        None,
        "PEM CA of clients: gRPC clients then need a certificate beside the key.",
        "FILE",
        needs="grpc_tls_cert",
    )
    max_body_bytes: int | None = number(
        None,
        "Largest request body or gRPC message. Unset: 8 MiB for an endpoint or a language model with slots, also for one text; "
        "256 KiB for a function, half of that for one text. More: more memory for each request in progress.",
        minimum=1024,
        maximum=64 << 20,
    )
    body_memory_bytes: int = memory(
        128 << 20,
        "Request bodies being received and messages of gRPC calls; more get 503. At most a quarter of the memory limit.",
    )
    customer_body_memory_bytes: int = memory(32 << 20, "The same for one customer, who gets 429.")
    key_body_memory_bytes: int = memory(16 << 20, "The same for one API key.")
    inline_body_bytes: int = number(
        65_536,
        "Larger chats for an endpoint are files in TIERLANE_BODY_DIR. Smaller values keep Redis smaller, at a file a request.",
        minimum=1024,
        maximum=64 << 20,
    )
    body_store_bytes: int = memory(
        256 << 20, "Those files of one gateway; more requests get 503. At most what the file system holds."
    )
    installation: str = setting(
        "",
        "Name of the installation in health, on the dashboard and in `tierlane top`, such as prod-eu.",
        pattern=r"^[A-Za-z0-9_. -]{0,64}$",
    )
    header_timeout_ms: int = milliseconds(5000, "Milliseconds for a request's headers.")
    body_timeout_ms: int = milliseconds(10_000, "Milliseconds for a request's body.")
    idle_timeout_ms: int = milliseconds(
        620_000,
        "Milliseconds until an idle connection is closed; must exceed the idle time of load balancers, or requests reach closed "
        "connections.",
    )
    trusted_proxies: str = setting(
        "",
        "Comma-separated networks of load balancers whose X-Forwarded-For is trusted. Unset: failed authentications are counted "
        "by the address of the connection. List only proxies that set the header.",
        "LIST",
        check=checks.networks,
    )
    max_connections: int = number(
        20_000, "Open connections, each with a file descriptor; more are closed.", maximum=1_000_000
    )
    customer_connection_share: float = share(
        0.5,
        "Share of TIERLANE_MAX_CONNECTIONS for one customer, gRPC calls included; more get 429. Less: more room for others.",
        minimum=0.001,
    )
    total_request_ms: int | None = milliseconds(
        None,
        "Milliseconds from acceptance to the end of the response, retries included. Unset: 600,000 for an endpoint or a "
        "language model with slots, as in OpenAI's clients; 4,000 for a function.",
    )
    notice_ms: int = milliseconds(
        10_000,
        "Milliseconds that a stopping gateway still accepts requests while /readyz fails; longer than load balancers take to see it.",
        minimum=0,
        maximum=600_000,
    )
    schedulers: int = number(
        2,
        "Schedulers that run. 0: gateways do their work from the start; fewer processes, but busier gateways.",
        minimum=0,
        maximum=64,
    )
    default_model: str | None = setting(None, "Model of requests that name none. Unset: the only enabled model.")
    direct_mode: Literal["on", "off"] = setting(
        "on",
        "Without Redis, on: call workers directly, within a share of the limits; off: reject (503).",
    )
    spool_max_bytes: int = number(
        64 << 20,
        "Audit records on disk without Redis, about 400 bytes each. Full: 503.",
        minimum=1 << 20,
        maximum=16 << 30,
    )
    cors_origins: str = setting(
        "",
        "Origins whose pages may call the API (CORS), separated by commas; *: all. A key in a page is public.",
        "LIST",
        check=checks.origins,
    )
    idempotency_keep_ms: int = milliseconds(
        86_400_000,
        "Milliseconds that the response to an Idempotency-Key is stored.",
        minimum=1000,
        maximum=604_800_000,
    )
    idempotency_max_answers: int = number(10_000, "Stored responses of one customer and pool.", maximum=1_000_000)
    idempotency_max_bytes: int = number(
        16 << 20,
        "Their Redis memory; maxmemory must suffice for all customers that send keys.",
        minimum=64 << 10,
        maximum=16 << 30,
    )
    stored_responses: int = number(
        1000, "Stored responses of one customer; the oldest are deleted. More: longer inserts.", maximum=100_000
    )
    stored_response_bytes: int = number(
        64 << 20,
        "Bytes of them, in PostgreSQL. Fewer: long conversations cannot be continued.",
        minimum=1 << 20,
        maximum=16 << 30,
    )
    stored_response_days: int = number(30, "Days that a response is stored. More: more disk.", maximum=3650)
    auth_failures: str = setting(
        "30/minute",
        "Failed authentications of an address (IPv6: /64) before more get 429; off: never.",
        "QUOTA",
        not_empty=True,
    )
    jwt_jwks: str | None = setting(
        None,
        "File or https:// URL of the JWKS. Unset: no JWTs. http:// allows forged tokens.",
        "PLACE",
    )
    jwt_issuer: str | None = setting(
        None,
        "Required iss. Sufficient alone only if the provider has separate keys for each client.",
    )
    jwt_audience: str | None = setting(
        None,
        "Required aud. JWTs need this (safer) or the issuer.",
    )
    jwt_algorithms: str = setting(
        "RS256,ES256,EdDSA",
        "Accepted algorithms, separated by commas; HS256 and none are rejected.",
        not_empty=True,
    )
    jwt_customer_claim: str = setting(
        "sub",
        "Claim with the customer's name or id; users must not choose it.",
        not_empty=True,
    )


class JobSettings:
    """Settings of asynchronous jobs."""

    job_deadline_ms: int = milliseconds(
        600_000,
        "Milliseconds from acceptance to end; the same for the auditor.",
    )
    job_result_ms: int = milliseconds(600_000, "Milliseconds that a result can be read.")
    callback_hosts: str = setting(
        "",
        "Hosts of callbacks, separated by commas: name, *.name, or name:port. Unset: none.",
        "HOSTS",
        check=checks.callback_hosts,
        needs="callback_secret",
    )
    callback_secret: "SecretStr" = setting(
        "",
        "whsec_ and 24 to 64 bytes in base64. Each customer's webhook secret is derived: `tierlane customer show NAME --webhook-secret`.",
        secret=True,
        check=checks.callback_secret,
    )
    callback_private_addresses: bool = boolean(
        "Allow callbacks to private addresses: exposes your network to every customer."
    )
    alert_url: str = setting(
        "",
        "URL for alerts of the quotas of all customers. Its webhook secret: `tierlane quota alerts --webhook-secret`. Unset: none.",
        "URL",
        check=checks.webhook_url,
        needs="callback_secret",
    )
    callback_shared_signature: bool = boolean(
        "Also sign with TIERLANE_CALLBACK_SECRET itself. Each receiver can then sign for all others.",
    )


class BatchSettings:
    """Settings of files and batches. Limits are those of one customer, except of a file and a batch."""

    batch_lines_in_progress: int = number(
        4096,
        "Most lines of one batch in Redis at a time: those of five seconds, but at least 256. More: larger Redis; fewer: workers "
        "may wait for lines after the loss of a gateway.",
        maximum=10_000,
    )
    batch_file_bytes: int = number(
        100 << 20,
        "Largest file. Larger files: longer uploads, and more disk in PostgreSQL.",
        minimum=1024,
        maximum=4 << 30,
    )
    batch_file_lines: int = number(
        50_000,
        "Most lines of a batch. More: about 100 bytes of memory a line while a file is checked.",
        maximum=1_000_000,
    )
    open_batches: int = number(
        16, "Open batches of a customer; four run at a time. More: longer scans of open batches.", maximum=10_000
    )
    stored_file_bytes: int = memory(
        1 << 30, "Bytes of a customer's files, results included, over which uploads are rejected. More: more disk."
    )
    stored_file_days: int = number(30, "Days that files and ended batches are kept. More: more disk.", maximum=3650)


class AutoscaleSettings:
    """Settings of the scale policy."""

    autoscale: str = setting(
        "",
        "Minimum and maximum of workers; `tierlane up` then starts and drains them. Unset: 1:256, advice only.",
        "MIN:MAX",
        check=checks.worker_bounds,
    )
    autoscale_wait_ms: int = milliseconds(
        500,
        "Milliseconds in which the queue should empty.",
    )
    autoscale_need_ms: int = milliseconds(
        10_000,
        "Milliseconds that a need must last.",
    )
    autoscale_deep_ms: int = milliseconds(30_000, "Milliseconds with 500 or more waiting until 3 more are recommended.")
    autoscale_long_ms: int = milliseconds(60_000, "Milliseconds with 100 or more waiting until 1 more is recommended.")
    autoscale_busy_ms: int = milliseconds(300_000, "Milliseconds over 85 % utilization until 1 more is recommended.")
    autoscale_calm_ms: int = milliseconds(
        900_000,
        "Milliseconds under 40 % utilization until fewer are recommended.",
    )
    autoscale_cooldown_ms: int = milliseconds(60_000, "Milliseconds between steps; longer than a model loads.")


class MetricsSettings:
    """Settings of metrics and log lines."""

    metrics_dir: Path | None = setting(
        None,
        "Shared directory for the counters of a host's gateways. Unset: `metrics` in the data directory.",
    )
    request_log: Literal["on", "off"] = setting(
        "off", "on: a log line per customer request, without input, output or key."
    )


class TraceSettings:
    """Settings of traces."""

    traces_endpoint: str = setting(
        "",
        "Collector for OTLP over HTTP, such as http://collector:4318; needs the extra `tracing`. Unset: no traces.",
        "URL",
        hidden=True,  # Somebody may try to put a password into it.
        check=checks.traces_endpoint,
    )
    traces_sample: float = share(0.01, "Share of calls that are traced, 0 to 1.")
    traces_trust_callers: Literal["on", "off"] = setting(
        "off",
        "on: a caller's traceparent decides about sampling.",
    )
