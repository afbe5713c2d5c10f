"""Settings that roles share, and those of schedulers, workers, auditors and `tierlane up`.

Each is declared once, here or in `gateway_sections`; a new one needs no other place in tierlane/settings. Only the
standard library is used, because `--help` must be quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tierlane.settings import checks
from tierlane.settings.checks import MAX_WORKERS
from tierlane.settings.declaration import boolean, milliseconds, number, setting

if TYPE_CHECKING:
    from pydantic import SecretStr


class SharedSettings:
    """Settings of more than one role."""

    redis_url: str = setting(
        "",
        "Redis or Valkey to use, as redis://, rediss://, unix://, or redis+sentinel://host:port,host:port/service. "
        "TLS: docs/deploy.md. `tierlane up` starts its own server when unset.",
        secret=True,
        check=checks.redis_url,
    )
    database_url: str = setting(
        "",
        "PostgreSQL to use; must begin with postgresql+asyncpg://. TLS: docs/deploy.md. `tierlane up` starts its own when unset.",
        secret=True,
        check=checks.database_url,
    )
    service_token: "SecretStr" = setting(
        "",
        "Secret of at least 16 characters that opens /internal/*. `tierlane up` makes one when unset.",
        secret=True,
        check=checks.token,
    )
    direct_token: "SecretStr" = setting(
        "",
        "Secret of workers' direct endpoints, the only one that a worker needs. Unset: gateways use the one that follows "
        "from TIERLANE_SERVICE_TOKEN (docs/deploy.md); a worker without either has no endpoint.",
        secret=True,
        check=checks.token,
    )
    # It becomes part of Redis keys, where braces and colons have a meaning.
    pool: str = setting(
        "default", "Name of the GPU pool: a set of workers with queues of their own.", pattern=r"^[A-Za-z0-9_-]{1,64}$"
    )
    serve_pools: Literal["all", "own"] = setting(
        "all",
        "Whether gateways and schedulers also serve the other pools that models name (all), or only their own (own): then "
        "the other pools are not served here.",
    )
    data_dir: Path = setting(
        Path(".tierlane"),
        "Directory for local state: the audit spool of a gateway, and everything that `tierlane up` keeps.",
    )
    log_format: Literal["auto", "console", "json"] = setting(
        "auto",
        "console (coloured text), json (one object a line), or auto: console on a terminal, else json.",
        check=checks.log_format,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe level that is logged: debug, info, warning or error. debug costs speed."
    )


class PoolTimeSettings:
    """Times that every role of a pool must share: otherwise a role takes live work of another for lost."""

    lease_ms: int = milliseconds(
        600, "Milliseconds of a batch lease. Shorter detects a dead worker sooner, at more load."
    )
    gone_ms: int = milliseconds(
        1000, "Milliseconds without a heartbeat after which a worker counts as lost. Shorter risks false alarms."
    )


class SchedulerSettings:
    """Settings of a scheduler."""

    reap_ms: int = milliseconds(
        100, "Milliseconds between checks for expired leases. Shorter retries sooner, at more load."
    )
    batch_lookahead_workers: int = number(
        4,
        "One batch is kept ready for each this many workers. Smaller keeps GPUs fed, larger keeps the order exact.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_headroom: float = setting(
        0.05,
        "Part (0 to 0.5) of a saturated pool's time that is left free, of 8 workers or more whose runs take the same "
        "time, and of fewer in proportion: one of them is then nearly always free for higher-priority requests. 0: batches leave "
        "immediately.",
        "SHARE",
        minimum=0,
        maximum=0.5,
    )
    ageing_ms: int = milliseconds(
        1000,
        "Milliseconds of waiting that move a request of a low tier up. Smaller reduces waits of low tiers and increases those of high tiers.",
    )


class WorkerSettings:
    """Settings of a worker."""

    backend: str = setting(
        "tiny",
        "Model to run: tiny, simulated[:MS] (sleeps MS a batch, for trials), pkg.module:function, hf:DIR, or "
        "openai:URL[#MODEL]. By default a batch may take 3 s (TIERLANE_GPU_TIMEOUT_MS) and a request 4 s "
        "(TIERLANE_TOTAL_REQUEST_MS).",
        not_empty=True,
    )
    # As with `pool`, but it may hold dots.
    worker_id: str | None = setting(
        None,
        "Name of this worker in Redis, unique in its pool. Unset: generated from host and process.",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
    )
    device: str = setting(
        "auto",
        "Device for the model: auto (CUDA when there is one), cpu, cuda or cuda:N.",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]+)$",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Numbers that an hf: model computes with: float32, bfloat16, float16, or auto (those of the weights on CUDA, float32 "
        "on CPU). Shorter is faster; only float32 gives a row the same text in every batch.",
    )
    torch_threads: int | None = number(
        None,
        "CPU threads of the model. Unset: 1 for tiny, else all: too many for a shared host.",
        minimum=1,
        maximum=1024,
    )
    max_batch_size: int | None = number(
        None,
        "Requests in a full batch, as in the model's row. Unset: 8 for tiny, else 32. Larger is faster but later.",
        minimum=1,
        maximum=4096,
    )
    heartbeat_ms: int = milliseconds(
        250, "Milliseconds between heartbeats of a worker. Shorter shows a loss sooner, at more load."
    )
    renew_ms: int = milliseconds(
        150, "Milliseconds between renewals of a running batch's lease; several must fit into the lease."
    )
    gpu_timeout_ms: int = milliseconds(
        3000,
        "Milliseconds that a batch may run. Shorter leaves time to retry, longer spares slow models: while a model takes "
        "longer for a batch of one, its worker claims nothing.",
    )
    direct_host: str = setting(
        "127.0.0.1",
        "Address to listen on for gateways that cannot reach Redis: reachable by them, not by customers. off: do not.",
        check=checks.direct_host,
    )
    direct_port: int = number(
        0, "TCP port for direct calls of gateways; 0 lets the system choose.", minimum=0, maximum=65535
    )
    direct_advertise: str = setting(
        "",
        "Host name or address of direct calls that is announced to gateways, which must reach it. Unset: that of "
        "TIERLANE_DIRECT_HOST; if that is 0.0.0.0 or ::, the address from which the worker reaches Redis.",
    )


class EndpointSettings:
    """Settings of a worker whose backend is `openai:URL`."""

    endpoint_api_key: "SecretStr" = setting(
        "",
        "Key that the endpoint of openai:URL wants, as its Bearer token. Unset: none is sent.",
        secret=True,
        check=checks.header_value,
    )
    endpoint_ca_file: Path | None = setting(
        None,
        "PEM file of the authorities that may sign the endpoint's certificate. Unset: those of the system.",
        "FILE",
    )
    endpoint_cert_file: Path | None = setting(
        None, "PEM file of the certificate that a worker shows to the endpoint. Unset: it shows none.", "FILE"
    )
    endpoint_key_file: Path | None = setting(
        None,
        "PEM file of that certificate's key, not encrypted. Unset: it is in the certificate's file.",
        "FILE",
        needs="endpoint_cert_file",
    )
    endpoint_connect_ms: int = milliseconds(
        1000, "Milliseconds to connect to the endpoint. Shorter leaves more time for another try."
    )
    endpoint_first_byte_ms: int | None = milliseconds(
        None,
        "Milliseconds until the endpoint's answer begins; where nothing is streamed it begins when it is whole. Unset: "
        "what the batch has left.",
    )
    endpoint_total_ms: int | None = milliseconds(
        None, "Milliseconds for a call to the endpoint. Unset: what its batch has left."
    )
    endpoint_max_calls: int = number(
        64,
        "Calls that one worker has at the endpoint at a time. More than it runs at once only wait there.",
        minimum=1,
        maximum=4096,
    )
    endpoint_max_batches: int = number(
        8,
        "Batches that one worker has at the endpoint at a time, at most: it begins with one, and has more while they take "
        "no longer for it.",
        minimum=1,
        maximum=64,
    )


class AuditorSettings:
    """Settings of the auditor."""

    audit_batch: int = number(
        500,
        "Outbox entries taken at once; each holds the records of one admission call or batch. Larger is cheaper.",
        minimum=1,
        maximum=1_000_000,
    )
    audit_interval_ms: int = milliseconds(
        500,
        "Milliseconds that audit entries may wait for a fuller batch; twice as long, requests wait for their end. "
        "Longer makes rows appear later.",
    )
    audit_grace_ms: int = milliseconds(
        10_000, "Milliseconds after its deadline at which an accepted request without an end is closed as abandoned."
    )


class StackSettings:
    """Settings of the local stack."""

    gateways: int | None = number(
        None,
        "Gateways that `tierlane up` starts, all on one port; not set: 2, or 1 on a single core. A single one leaves the "
        "port without a gateway while it restarts after a crash.",
        minimum=1,
        maximum=64,
    )
    schedulers: int = number(
        2,
        "Schedulers that `tierlane up` starts. With one alone requests wait while it is started again after a crash; with "
        "none the gateways form the batches themselves.",
        minimum=0,
        maximum=64,
    )
    workers: int = number(
        2,
        "Workers that `tierlane up` starts. Each loads the model once, in a process of its own.",
        minimum=1,
        maximum=MAX_WORKERS,
    )
    pools: str = setting(
        "",
        "Other pools that `tierlane up` starts workers for, each POOL=BACKEND or POOL=BACKEND*WORKERS, with commas between "
        "them.",
    )
    ephemeral: bool = boolean(
        "Keep nothing: the embedded servers use a temporary directory without fsync.", switch=True
    )
    replace: bool = boolean(
        "Stop processes that a killed `tierlane up` left on this data directory. Without it, the command asks first.",
        switch=True,
    )
