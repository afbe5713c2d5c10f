"""Settings of a gateway: HTTP, limits of memory, JWTs, asynchronous jobs, autoscaling, metrics, traces.

Each is declared once, here or in `role_sections`; a new one needs no other place in tierlane/settings. Only the
standard library is used, because `--help` must be quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tierlane.settings import checks
from tierlane.settings.declaration import boolean, milliseconds, number, setting

if TYPE_CHECKING:
    from pydantic import SecretStr

MIN_BODY_MEMORY = 1 << 20
MAX_BODY_MEMORY = 1 << 40


class GatewaySettings:
    """Settings of a gateway."""

    host: str = setting("127.0.0.1", "Address to listen on. 0.0.0.0 opens the gateway to the network.", not_empty=True)
    port: int = number(
        8080,
        "TCP port to listen on, shared by several gateways of one host; 0 lets the system choose.",
        minimum=0,
        maximum=65535,
    )
    max_body_bytes: int = number(
        262_144,
        "Largest request body in bytes. Larger costs memory for each open connection.",
        minimum=1024,
        maximum=64 << 20,
    )
    body_memory_bytes: int = number(
        128 << 20,
        "Most bytes of request bodies that a gateway reads at a time; further ones get 503. Bodies that come at once with "
        "their headers do not count. Each byte may take two of memory: keep it under a quarter of the memory limit.",
        minimum=MIN_BODY_MEMORY,
        maximum=MAX_BODY_MEMORY,
    )
    customer_body_memory_bytes: int = number(
        32 << 20,
        "The same of one customer, who gets 429. Smaller leaves more to others; larger lets more slow uploads run at a time.",
        minimum=MIN_BODY_MEMORY,
        maximum=MAX_BODY_MEMORY,
    )
    key_body_memory_bytes: int = number(
        16 << 20, "The same of one API key.", minimum=MIN_BODY_MEMORY, maximum=MAX_BODY_MEMORY
    )
    header_timeout_ms: int = milliseconds(
        5000, "Milliseconds a client has for its headers. Longer lets slow clients hold sockets."
    )
    body_timeout_ms: int = milliseconds(
        10_000, "Milliseconds a client has for its body. Shorter cuts off clients on slow links."
    )
    idle_timeout_ms: int = milliseconds(
        75_000, "Milliseconds an idle keep-alive connection is kept. Longer saves handshakes."
    )
    max_connections: int = number(
        20_000,
        "Open connections of one gateway; more are closed. Each costs a file descriptor.",
        minimum=1,
        maximum=1_000_000,
    )
    total_request_ms: int = milliseconds(4000, "Milliseconds from accepting a request to its answer, retries included.")
    notice_ms: int = milliseconds(
        2000,
        "Milliseconds that a stopping gateway still serves while /readyz says no. Too short: load balancers still send.",
        minimum=0,
        maximum=600_000,
    )
    drain_ms: int = milliseconds(
        4000, "Milliseconds that open requests get at shutdown. Longer makes a rollout slower."
    )
    default_model: str | None = setting(
        None, "Model that serves requests which name none. Unset: the only enabled model, if there is one."
    )
    direct_mode: Literal["on", "off"] = setting(
        "on",
        "on: while Redis is not available, call workers directly, each gateway by its own share of the limits. off: reject (503).",
    )
    spool_max_bytes: int = number(
        64 << 20,
        "Most bytes of audit records kept in the data directory while Redis is not available; about 400 a request. Full: 503.",
        minimum=1 << 20,
        maximum=16 << 30,
    )
    cors_origins: str = setting(
        "",
        "Origins whose pages may call the customers' API from a browser (CORS), separated by commas: https://app.example.com; * "
        "alone: all. Unset: none. A key in a page is visible to everyone who opens it.",
        "LIST",
        check=checks.origins,
    )
    idempotency_keep_ms: int = milliseconds(
        86_400_000,
        "Milliseconds that the response to a request with an Idempotency-Key is kept for repeated requests.",
        minimum=1000,
        maximum=604_800_000,
    )
    idempotency_max_answers: int = number(
        10_000,
        "Most such responses that are kept for one customer in one pool. The oldest are evicted first; their requests run again if repeated.",
        minimum=1,
        maximum=1_000_000,
    )
    idempotency_max_bytes: int = number(
        16 << 20,
        "Most bytes of Redis' memory for these. All customers that send keys together must fit into maxmemory.",
        minimum=64 << 10,
        maximum=16 << 30,
    )
    auth_failures: str = setting(
        "30/minute",
        "Failed authentications of one address (IPv6: /64) before further failures get 429 instead of 401; off: never. "
        "Good keys always pass. Behind one proxy all clients share it.",
        "QUOTA",
        not_empty=True,
    )
    jwt_jwks: str | None = setting(
        None,
        "File or https:// URL of the JWKS whose keys sign JWTs that are taken beside API keys. Unset: no JWTs. http:// "
        "lets whoever is on the way forge tokens.",
        "PLACE",
    )
    jwt_issuer: str | None = setting(
        None,
        "What a JWT's iss must be. Alone it is enough only where the provider has keys of its own for each client.",
    )
    jwt_audience: str | None = setting(
        None,
        "What a JWT's aud must hold. With JWTs this or the issuer is needed; this is the safer one: providers sign for "
        "many parties with the same keys.",
    )
    jwt_algorithms: str = setting(
        "RS256,ES256,EdDSA",
        "Signature algorithms that JWTs may use, separated by commas. HS256 and none are refused. EdDSA costs about "
        "3 x the CPU of RS256 to verify.",
        not_empty=True,
    )
    jwt_customer_claim: str = setting(
        "sub",
        "Claim of a JWT that holds the customer's name or id. It must be one that users cannot choose themselves.",
        not_empty=True,
    )


class JobSettings:
    """Settings of asynchronous jobs."""

    job_deadline_ms: int = milliseconds(
        600_000,
        "Milliseconds from taking in a job (Prefer: respond-async) to its end, waiting included. The same for the auditor.",
    )
    job_result_ms: int = milliseconds(
        600_000, "Milliseconds that the result of a job can be read. Longer needs disk space."
    )
    callback_hosts: str = setting(
        "",
        "Hosts that callbacks may go to, separated by commas: name, *.name, or name:port where the port is not the usual "
        "one. Unset: callbacks are refused.",
        "HOSTS",
        check=checks.callback_hosts,
        needs="callback_secret",
    )
    callback_secret: "SecretStr" = setting(
        "",
        "Secret of which the key that signs a customer's callbacks is made, as whsec_ and 24 to 64 bytes in base64 (Standard "
        "Webhooks); `tierlane customer show NAME --webhook-secret` shows a customer's. Needed with hosts.",
        secret=True,
        check=checks.callback_secret,
    )
    callback_private_addresses: bool = boolean(
        "Let callbacks go to addresses that are not public. True opens your own network to whoever has a key."
    )
    callback_shared_signature: bool = boolean(
        "Sign callbacks by TIERLANE_CALLBACK_SECRET itself as well, for receivers that do not have their customer's own "
        "secret yet. True lets each customer that knows it sign for every other one.",
    )


class AutoscaleSettings:
    """Settings of the scale policy."""

    autoscale: str = setting(
        "",
        "Least and most workers that /internal/autoscale advises for a pool. With it `tierlane up` "
        "adds and drains workers of its own pool by that advice. Unset: 1:256, and only advice.",
        "MIN:MAX",
        check=checks.worker_bounds,
    )
    autoscale_wait_ms: int = milliseconds(
        500,
        "Milliseconds in which the queue should be emptied. A shorter time advises more workers for the same queue.",
    )
    autoscale_need_ms: int = milliseconds(
        10_000,
        "Milliseconds that demand or backlog must need more workers before they are advised. Shorter follows bursts, too.",
    )
    autoscale_deep_ms: int = milliseconds(
        30_000, "Milliseconds with 500 or more waiting after which 3 more workers are advised."
    )
    autoscale_long_ms: int = milliseconds(
        60_000, "Milliseconds with 100 or more waiting after which 1 more worker is advised."
    )
    autoscale_busy_ms: int = milliseconds(
        300_000, "Milliseconds with over 85 % of the workers used after which 1 more is advised."
    )
    autoscale_calm_ms: int = milliseconds(
        900_000,
        "Milliseconds with under 40 % of the workers used after which fewer are advised. Shorter saves workers, and lacks "
        "them when the load comes back.",
    )
    autoscale_cooldown_ms: int = milliseconds(
        60_000, "Milliseconds between two steps. It should be longer than a worker takes to load its model."
    )


class MetricsSettings:
    """Settings of metrics and log lines."""

    metrics_dir: Path | None = setting(
        None,
        "Directory where the gateways of one host keep their counters, so that /metrics of each is the sum of all. Unset: "
        "metrics in the data directory.",
    )
    request_log: Literal["on", "off"] = setting(
        "off", "on: one log line for each call of a customer, without input, output or key. Costs some CPU a request."
    )


class TraceSettings:
    """Settings of traces."""

    traces_endpoint: str = setting(
        "",
        "Where to send traces by OTLP over HTTP, such as http://collector:4318; /v1/traces is added. Needs the extra "
        "`tracing`. Unset: no traces, and no cost.",
        "URL",
        hidden=True,  # Somebody may try to put a password into it.
        check=checks.traces_endpoint,
    )
    traces_sample: float = setting(
        0.01,
        "Share of the calls that are traced, 0 to 1. All of them cost a gateway noticeable CPU.",
        "SHARE",
        minimum=0,
        maximum=1,
    )
    traces_trust_callers: Literal["on", "off"] = setting(
        "off",
        "on: a caller's valid traceparent decides whether its call is traced. For callers of your own: anybody could have "
        "everything traced.",
    )
