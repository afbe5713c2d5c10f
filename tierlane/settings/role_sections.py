"""Settings that roles share, and those of schedulers, workers, auditors and `tierlane up`.

Each is declared once, here or in `gateway_sections`; a new one needs no other place in tierlane/settings. Only the
standard library is used, because `--help` must be quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tierlane.settings import checks
from tierlane.settings.checks import MAX_WORKERS
from tierlane.settings.declaration import boolean, milliseconds, number, setting, share, tcp_port

if TYPE_CHECKING:
    from pydantic import SecretStr


class SharedSettings:
    """Settings of more than one role."""

    redis_url: str = setting(
        "",
        "redis://, rediss://, unix://, redis+cluster://host:port or redis+sentinel://host:port,host:port/service (docs/deploy.md). Unset: `tierlane up` starts one.",
        secret=True,
        check=checks.redis_url,
    )
    database_url: str = setting(
        "",
        "postgresql:// or postgres:// (docs/deploy.md). Unset: `tierlane up` starts one.",
        secret=True,
        check=checks.database_url,
    )
    database_direct_url: str = setting(
        "",
        "The same database without its pooler, for LISTEN, locks, migrations and commands, where TIERLANE_DATABASE_URL is that of "
        "a pooler in transaction mode. Unset: TIERLANE_DATABASE_URL.",
        secret=True,
        check=checks.database_url,
        needs="database_url",
    )
    service_token: "SecretStr" = setting(
        "",
        "16 to 256 characters, for /internal/*. Unset: `tierlane up` generates one.",
        secret=True,
        check=checks.token,
    )
    direct_token: "SecretStr" = setting(
        "",
        "Token of direct endpoints, the only one that a worker needs. Unset: derived from TIERLANE_SERVICE_TOKEN (docs/deploy.md); without both: no endpoint.",
        secret=True,
        check=checks.direct_token,
    )
    # As the column `pool` of models has it: no request could be for another name.
    pool: str = setting(
        "default", "Name of the GPU pool: workers with queues of their own.", pattern=r"^[a-z][a-z0-9_-]{0,62}$"
    )
    serve_pools: Literal["all", "own"] = setting(
        "all",
        "Serve all pools that models name, or only the own.",
    )
    process_name: str | None = setting(
        None,
        "Name in health, logs and the audit. Unset: from host and process.",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
    )
    data_dir: Path = setting(
        Path(".tierlane"),
        "Local state: audit spool, metrics, data of `tierlane up`.",
    )
    body_dir: Path | None = setting(
        None,
        "Directory, best in shared memory, for chats beyond TIERLANE_INLINE_BODY_BYTES: they stay out of Redis. "
        "Shared by the gateways and workers of one host; unset: all travel through Redis. `tierlane up` sets it.",
    )
    drain_ms: int = milliseconds(
        600_000,
        "Longest time in milliseconds that a stopping gateway (after its notice) or worker waits for its open requests; it exits "
        "when none is left. Set at least the longest TIERLANE_TOTAL_REQUEST_MS, or responses are cut off. A second signal ends "
        "the wait.",
        maximum=3_600_000,
    )
    log_format: Literal["auto", "console", "json"] = setting(
        "auto",
        "console: coloured text; json: an object a line; auto: console on a terminal, else json.",
        check=checks.log_format,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe level that is logged.")


class PoolTimeSettings:
    """Times that every role of a pool must share: otherwise a role takes live work of another for lost."""

    lease_ms: int = milliseconds(
        600, "Lease of a batch, milliseconds. Shorter detects a dead worker sooner, at more load."
    )
    gone_ms: int = milliseconds(
        1000, "Milliseconds without a heartbeat until a worker is lost. Shorter risks false alarms."
    )


class SchedulerSettings:
    """Settings of a scheduler."""

    reap_ms: int = milliseconds(100, "Milliseconds between checks for expired leases.")
    batch_lookahead_workers: int = number(
        4, "Workers for which one batch is kept ready. Larger: more exact order, but GPUs wait.", maximum=1_000_000
    )
    background_share: float = share(
        0.05,
        "Share of every batch for jobs while they wait. More: they end sooner, and interactive requests wait longer.",
    )
    batch_headroom: float = share(
        0.05,
        "Share of a saturated pool's time kept free for higher tiers, with 8 workers or more; fewer: in proportion. 0: batches "
        "leave at uneven intervals too, and more requests find no free worker.",
        maximum=0.5,
    )
    ageing_ms: int = milliseconds(
        1000,
        "Milliseconds of waiting until a low tier gets a minimum share, at the expense of higher tiers.",
    )


class WorkerSettings:
    """Settings of a worker."""

    backend: str = setting(
        "tiny",
        "Model to run: tiny, simulated[:MS] (sleeps MS a batch, for trials), pkg.module:function, hf:DIR, "
        "openai:URL[#MODEL], or oip:URL#MODEL (Triton, KServe, MLServer). A batch of a function may take 3 s (TIERLANE_GPU_TIMEOUT_MS), a request to it 4 s "
        "(TIERLANE_TOTAL_REQUEST_MS).",
        not_empty=True,
    )
    # As with `pool`, but it may hold dots.
    worker_id: str | None = setting(
        None,
        "Name of this worker, unique in its pool. Unset: from host and process.",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
    )
    device: str = setting(
        "auto",
        "auto (CUDA if available), cpu, cuda or cuda:N.",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]+)$",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Number format of an hf: model; auto: the weights' on CUDA, float32 on CPU. Only float32 gives the same text in every batch.",
    )
    torch_threads: int | None = number(None, "CPU threads of the model. Unset: 1 for tiny, else all.", maximum=1024)
    max_batch_size: int | None = number(
        None, "Requests in a full batch, as in the model's row. Unset: 8 for tiny, else 32.", maximum=4096
    )
    heartbeat_ms: int = milliseconds(250, "Milliseconds between heartbeats.")
    renew_ms: int = milliseconds(150, "Milliseconds between renewals of a lease; several must fit into it.")
    gpu_timeout_ms: int = milliseconds(
        3000,
        "Milliseconds that a batch may run. Shorter leaves time to retry, longer spares slow models: while a model takes "
        "longer for a batch of one, its worker claims nothing.",
    )
    direct_host: str = setting(
        "127.0.0.1",
        "Listening address for direct calls; keep it unreachable for customers. off: no endpoint.",
        check=checks.direct_host,
    )
    direct_port: int = tcp_port(0, "TCP port for direct calls; 0: chosen by the system.")
    direct_advertise: str = setting(
        "",
        "Address announced for direct calls. Unset: TIERLANE_DIRECT_HOST, or for 0.0.0.0 and :: the address used towards Redis.",
    )


class EndpointSettings:
    """Settings of a worker whose backend is `openai:URL` or `oip:URL`."""

    endpoint_api_key: "SecretStr" = setting(
        "",
        "Bearer token for the endpoint. Unset: none is sent.",
        secret=True,
        check=checks.header_value,
    )
    endpoint_ca_file: Path | None = setting(
        None,
        "PEM file of accepted authorities. Unset: the system's.",
        "FILE",
    )
    endpoint_cert_file: Path | None = setting(None, "PEM file of the client certificate. Unset: none.", "FILE")
    endpoint_key_file: Path | None = setting(
        None,
        "PEM file of its key, not encrypted. Unset: in the certificate's file.",
        "FILE",
        needs="endpoint_cert_file",
    )
    endpoint_connect_ms: int = milliseconds(1000, "Milliseconds to connect.")
    endpoint_first_token_ms: int = milliseconds(
        120_000, "Milliseconds until the first token of a stream. Less: long prompts fail."
    )
    endpoint_silence_ms: int = milliseconds(
        60_000, "Milliseconds between two tokens of a stream. More: a hung engine is noticed later."
    )
    endpoint_first_byte_ms: int | None = milliseconds(
        None,
        "Milliseconds until the response begins, without streaming until its end. Unset: the request's remaining time.",
    )
    endpoint_total_ms: int | None = milliseconds(
        None, "Milliseconds for one call. Unset: the request's remaining time."
    )
    endpoint_max_calls: int | None = number(
        None,
        "Most requests of one worker at a time. Unset: as many as the endpoint can run, which is learnt.",
        maximum=4096,
    )


class AuditorSettings:
    """Settings of the auditor."""

    audit_batch: int = number(500, "Outbox entries taken at once.", maximum=1_000_000)
    audit_interval_ms: int = milliseconds(
        500,
        "Milliseconds that audit entries may wait for a fuller batch.",
    )
    audit_grace_ms: int = milliseconds(
        10_000, "Milliseconds after its deadline until an open request is closed as abandoned."
    )


class AdminSettings:
    """Settings of the admin API."""

    admin_host: str = setting(
        "127.0.0.1",
        "Listening address of the admin API; keep it unreachable for customers, and put TLS in front of other networks.",
        not_empty=True,
    )
    admin_port: int | None = number(
        None,
        "TCP port of the admin API; 0: chosen by the system. Unset: 8081; `tierlane up` starts none.",
        minimum=0,
        maximum=65_535,
    )
    admin_token: "SecretStr" = setting("", "Token of an operator, for verbs with `--url`.", secret=True)
    admin_oidc_issuer: str = setting(
        "",
        "Issuer URL of the OpenID Connect provider that signs browsers in, as in its metadata. Unset: tokens of operators only.",
        "URL",
        check=checks.issuer,
        needs="admin_oidc_client_id",
    )
    admin_oidc_client_id: str = setting(
        "",
        "Client ID at the provider, with the redirect URI https://HOST/admin/oidc/callback.",
        needs="admin_oidc_client_secret",
    )
    admin_oidc_client_secret: "SecretStr" = setting(
        "", "Secret of the client. It also signs cookies of sign-ins.", secret=True, needs="admin_oidc_roles"
    )
    admin_oidc_roles: str = setting(
        "",
        "Roles of groups: GROUP=viewer, GROUP=operator or GROUP=admin, separated by commas; the highest one applies.",
        "GROUP=ROLE",
        check=checks.group_roles,
        needs="admin_oidc_issuer",
    )
    admin_oidc_groups_claim: str = setting(
        "groups", "Claim with the groups, in the ID token or else from the userinfo endpoint.", not_empty=True
    )
    admin_oidc_scopes: str = setting(
        "openid email", "Scopes to request; some providers need another one for groups.", pattern=r"^openid( [!-~]+)*$"
    )


class StackSettings:
    """Settings of the local stack."""

    gateways: int | None = number(None, "Gateways, on one port. Unset: 2, or 1 on a single core.", maximum=64)
    workers: int = number(2, "Workers, each with its own model process.", maximum=MAX_WORKERS)
    pools: str = setting(
        "",
        "Workers of other pools: POOL=BACKEND or POOL=BACKEND*WORKERS, separated by commas.",
    )
    cluster: int = number(
        0,
        "Primaries of a Redis cluster, at least 3, each with a replica that takes over in about 3 s; 0: one server.",
        minimum=0,
        maximum=16,
    )
    cells: int = number(
        1,
        "Cells: the default one, and others named c2, c3, ..., each with a Redis server of its own, or a slot of the cluster.",
        maximum=16,
    )
    ephemeral: bool = boolean("Keep no data: the servers use a temporary directory, without fsync.", switch=True)
    replace: bool = boolean(
        "Stop processes of a killed `tierlane up` without asking.",
        switch=True,
    )
