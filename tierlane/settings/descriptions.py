"""What every setting means: its default as shown to people, its unit and the trade-off, grouped by who reads it.

Only the standard library is used, since `--help` is built from these. `tierlane.settings.model` has the types and
ranges.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One setting for readers: default as text ("" for none), description, and what stands for the value in help."""

    default: str
    description: str
    metavar: str = "TEXT"


def number(default: str, description: str) -> Text:
    """Return the text of a setting whose value is an integer."""
    return Text(default, description, "N")


ENDPOINT = {
    "endpoint_api_key": Text(
        "", "Key that the endpoint of openai:URL wants, as its Bearer token. Unset: none is sent."
    ),
    "endpoint_ca_file": Text(
        "", "PEM file of the authorities that may sign the endpoint's certificate. Unset: those of the system.", "FILE"
    ),
    "endpoint_cert_file": Text(
        "", "PEM file of the certificate that a worker shows to the endpoint. Unset: it shows none.", "FILE"
    ),
    "endpoint_key_file": Text(
        "", "PEM file of that certificate's key, not encrypted. Unset: it is in the certificate's file.", "FILE"
    ),
    "endpoint_connect_ms": number(
        "1000", "Milliseconds to connect to the endpoint. Shorter leaves more time for another try."
    ),
    "endpoint_first_byte_ms": number(
        "",
        "Milliseconds until the endpoint's answer begins; where nothing is streamed it begins when it is whole. Unset: "
        "what the batch has left.",
    ),
    "endpoint_total_ms": number("", "Milliseconds for a call to the endpoint. Unset: what its batch has left."),
    "endpoint_max_calls": number(
        "64", "Calls that one worker has at the endpoint at a time. More than it runs at once only wait there."
    ),
    "endpoint_max_batches": number(
        "8",
        "Batches that one worker has at the endpoint at a time, at most: it begins with one, and has more while they take "
        "no longer for it.",
    ),
}


AUTOSCALE = {
    "autoscale": Text(
        "",
        "Least and most workers that /internal/autoscale advises for a pool. With it `tierlane up` "
        "adds and drains workers of its own pool by that advice. Unset: 1:256, and only advice.",
        "MIN:MAX",
    ),
    "autoscale_wait_ms": number(
        "500", "Milliseconds within which what waits should be gone. Shorter asks for more workers for the same queue."
    ),
    "autoscale_need_ms": number(
        "10000",
        "Milliseconds that demand or backlog must need more workers before they are advised. Shorter follows bursts, too.",
    ),
    "autoscale_deep_ms": number(
        "30000", "Milliseconds with 500 or more waiting after which 3 more workers are advised."
    ),
    "autoscale_long_ms": number("60000", "Milliseconds with 100 or more waiting after which 1 more worker is advised."),
    "autoscale_busy_ms": number(
        "300000", "Milliseconds with over 85 % of the workers used after which 1 more is advised."
    ),
    "autoscale_calm_ms": number(
        "900000",
        "Milliseconds with under 40 % of the workers used after which fewer are advised. Shorter saves workers, and lacks "
        "them when the load comes back.",
    ),
    "autoscale_cooldown_ms": number(
        "60000", "Milliseconds between two steps. It should be longer than a worker takes to load its model."
    ),
}


TRACES = {
    "traces_endpoint": Text(
        "",
        "Where to send traces by OTLP over HTTP, such as http://collector:4318; /v1/traces is added. Needs the extra "
        "`tracing`. Unset: no traces, and no cost.",
        "URL",
    ),
    "traces_sample": Text(
        "0.01", "Share of the calls that are traced, 0 to 1. All of them cost a gateway noticeable CPU.", "SHARE"
    ),
    "traces_trust_callers": Text(
        "off",
        "on: a caller's valid traceparent decides whether its call is traced. For callers of your own: anybody could have "
        "everything traced.",
    ),
}


METRICS = {
    "metrics_dir": Text(
        "",
        "Directory where the gateways of one host keep their counters, so that /metrics of each is the sum of all. Unset: "
        "metrics in the data directory.",
    ),
    "request_log": Text(
        "off", "on: one log line for each call of a customer, without input, output or key. Costs some CPU a request."
    ),
}


PREFIX = "TIERLANE_"
CONFIG_VARIABLE = "TIERLANE_CONFIG"
DEFAULT_CONFIG_FILE = "tierlane.toml"

# They have no flag: command lines are visible to every user of a host.
SECRET_SETTINGS = frozenset(
    {"redis_url", "database_url", "service_token", "direct_token", "callback_secret", "endpoint_api_key"}
)


def variable(setting: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + setting.upper()


def flag(setting: str) -> str:
    """Return the long command line flag of a setting."""
    return "--" + setting.replace("_", "-")


SHARED = {
    "redis_url": Text(
        "",
        "Redis or Valkey to use, as redis://, rediss://, unix://, or redis+sentinel://host:port,host:port/service. "
        "TLS: docs/deploy.md. `tierlane up` starts its own server when unset.",
    ),
    "database_url": Text(
        "",
        "PostgreSQL to use; must begin with postgresql+asyncpg://. TLS: docs/deploy.md. `tierlane up` starts its own when unset.",
    ),
    "service_token": Text(
        "",
        "Secret of at least 16 characters that opens /internal/*. `tierlane up` makes one when unset.",
    ),
    "direct_token": Text(
        "",
        "Secret of workers' direct endpoints, the only one that a worker needs. Unset: gateways use the one that follows "
        "from TIERLANE_SERVICE_TOKEN (docs/deploy.md); a worker without either has no endpoint.",
    ),
    "pool": Text("default", "Name of the GPU pool: a set of workers with queues of their own."),
    "serve_pools": Text(
        "all",
        "Whether gateways and schedulers also serve the other pools that models name (all), or only their own (own): then "
        "nobody answers for the others here.",
    ),
    "data_dir": Text(
        ".tierlane",
        "Directory for local state: the audit spool of a gateway, and everything that `tierlane up` keeps.",
    ),
    "log_format": Text(
        "auto", "console (coloured text), json (one object a line), or auto: console on a terminal, else json."
    ),
    "log_level": Text("info", "Least severe level that is logged: debug, info, warning or error. debug costs speed."),
}

# Roles that disagree on these would take each other's live work for lost.
POOL_TIMES = {
    "lease_ms": number(
        "600", "Milliseconds a batch is lent to a worker. Shorter finds a dead worker sooner, at more load."
    ),
    "gone_ms": number(
        "1000", "Milliseconds without a heartbeat that make a worker count as gone. Shorter risks false alarms."
    ),
}

GATEWAY = {
    "host": Text("127.0.0.1", "Address to listen on. 0.0.0.0 opens the gateway to the network."),
    "port": number("8080", "TCP port to listen on, shared by several gateways of one host; 0 lets the system choose."),
    "max_body_bytes": number("262144", "Largest request body in bytes. Larger costs memory for each open connection."),
    "body_memory_bytes": number(
        "134217728",
        "Most bytes of request bodies that a gateway reads at a time; further ones get 503. Bodies that come at once with "
        "their headers do not count. Each byte may take two of memory: keep it under a quarter of the memory limit.",
    ),
    "customer_body_memory_bytes": number(
        "33554432",
        "The same of one customer, who gets 429. Smaller leaves more to others; larger lets more slow uploads run at a time.",
    ),
    "key_body_memory_bytes": number("16777216", "The same of one API key."),
    "header_timeout_ms": number(
        "5000", "Milliseconds a client has for its headers. Longer lets slow clients hold sockets."
    ),
    "body_timeout_ms": number(
        "10000", "Milliseconds a client has for its body. Shorter cuts off clients on slow links."
    ),
    "idle_timeout_ms": number("75000", "Milliseconds an idle keep-alive connection is kept. Longer saves handshakes."),
    "max_connections": number(
        "20000", "Open connections of one gateway; more are closed. Each costs a file descriptor."
    ),
    "total_request_ms": number("4000", "Milliseconds from accepting a request to its answer, retries included."),
    "notice_ms": number(
        "2000",
        "Milliseconds that a stopping gateway still serves while /readyz says no. Too short: load balancers still send.",
    ),
    "drain_ms": number("4000", "Milliseconds that open requests get at shutdown. Longer makes a rollout slower."),
    "default_model": Text(
        "", "Model that serves requests which name none. Unset: the only enabled model, if there is one."
    ),
    "direct_mode": Text(
        "on",
        "on: while Redis is away, call workers directly, each gateway by its own share of the limits. off: refuse (503).",
    ),
    "spool_max_bytes": number(
        "67108864",
        "Most bytes of audit records kept in the data directory while Redis is away; about 400 a request. Full: 503.",
    ),
    "cors_origins": Text(
        "",
        "Origins whose pages may call the customers' API from a browser (CORS), separated by commas: https://app.example.com; * "
        "alone: all. Unset: none. A key in a page is known to everybody who opens it.",
        "LIST",
    ),
    "idempotency_keep_ms": number(
        "86400000",
        "Milliseconds that the answer to a request with an Idempotency-Key is kept for whoever sends it again.",
    ),
    "idempotency_max_answers": number(
        "10000",
        "Most such answers that are kept for one customer in one pool. The oldest leave first: sent again, it runs anew.",
    ),
    "idempotency_max_bytes": number(
        "16777216",
        "Most bytes of Redis' memory for these. All customers that send keys together must fit into maxmemory.",
    ),
    "auth_failures": Text(
        "30/minute",
        "Failed authentications of one address (IPv6: /64) before further failures get 429 instead of 401; off: never. "
        "Good keys always pass. Behind one proxy all clients share it.",
        "QUOTA",
    ),
    "jwt_jwks": Text(
        "",
        "File or https:// URL of the JWKS whose keys sign JWTs that are taken beside API keys. Unset: no JWTs. http:// "
        "lets whoever is on the way forge tokens.",
        "PLACE",
    ),
    "jwt_issuer": Text(
        "", "What a JWT's iss must be. Alone it is enough only where the provider has keys of its own for each client."
    ),
    "jwt_audience": Text(
        "",
        "What a JWT's aud must hold. With JWTs this or the issuer is needed; this is the safer one: providers sign for "
        "many parties with the same keys.",
    ),
    "jwt_algorithms": Text(
        "RS256,ES256,EdDSA",
        "Signature algorithms that JWTs may use, separated by commas. HS256 and none are refused. EdDSA costs about "
        "3 x the CPU of RS256 to verify.",
    ),
    "jwt_customer_claim": Text(
        "sub",
        "Claim of a JWT that holds the customer's name or id. It must be one that users cannot choose themselves.",
    ),
}

JOBS = {
    "job_deadline_ms": number(
        "600000",
        "Milliseconds from taking in a job (Prefer: respond-async) to its end, waiting included. The same for the auditor.",
    ),
    "job_result_ms": number("600000", "Milliseconds that the result of a job can be read. Longer needs disk space."),
    "callback_hosts": Text(
        "",
        "Hosts that callbacks may go to, separated by commas: name, *.name, or name:port where the port is not the usual "
        "one. Unset: callbacks are refused.",
        "HOSTS",
    ),
    "callback_secret": Text(
        "",
        "Secret of which the key that signs a customer's callbacks is made, as whsec_ and 24 to 64 bytes in base64 (Standard "
        "Webhooks); `tierlane customer show NAME --webhook-secret` shows a customer's. Needed with hosts.",
    ),
    "callback_private_addresses": Text(
        "false", "Let callbacks go to addresses that are not public. True opens your own network to whoever has a key."
    ),
    "callback_shared_signature": Text(
        "false",
        "Sign callbacks by TIERLANE_CALLBACK_SECRET itself as well, for receivers that do not have their customer's own "
        "secret yet. True lets each customer that knows it sign for every other one.",
    ),
}

SCHEDULER = {
    "reap_ms": number(
        "100", "Milliseconds between looks for leases that ran out. Shorter retries sooner, at more load."
    ),
    "batch_lookahead_workers": number(
        "4",
        "One batch is kept ready for each this many workers. Smaller keeps GPUs fed, larger keeps the order exact.",
    ),
    "batch_headroom": Text(
        "0.05",
        "Part (0 to 0.5) of a saturated pool's time that is left free, of 8 workers or more whose runs take the same "
        "time, and of fewer in proportion: one of them is then nearly always free for who may go first. 0: batches leave as "
        "they come.",
        "SHARE",
    ),
    "ageing_ms": number(
        "1000",
        "Milliseconds of waiting that move a request of a low tier up. Smaller is kinder to free, worse for paid.",
    ),
}

WORKER = {
    "backend": Text(
        "tiny",
        "Model to run: tiny, simulated[:MS] (sleeps MS a batch, for trials), pkg.module:function, hf:DIR, or "
        "openai:URL[#MODEL].",
    ),
    "worker_id": Text("", "Name of this worker in Redis, unique in its pool. Unset: generated from host and process."),
    "device": Text("auto", "Device for the model: auto (CUDA when there is one), cpu, cuda or cuda:N."),
    "dtype": Text(
        "auto",
        "Numbers that an hf: model computes with: float32, bfloat16, float16, or auto (those of the weights on CUDA, float32 "
        "on CPU). Shorter is faster; only float32 gives a row the same text in every batch.",
    ),
    "torch_threads": number("", "CPU threads of the model. Unset: 1 for tiny, else all: too many for a shared host."),
    "max_batch_size": number(
        "",
        "Requests in a full batch, as in the model's row. Unset: 8 for tiny, else 32. Larger is faster but later.",
    ),
    "heartbeat_ms": number(
        "250", "Milliseconds between heartbeats of a worker. Shorter shows a loss sooner, at more load."
    ),
    "renew_ms": number(
        "150", "Milliseconds between renewals of a running batch's lease; several must fit into the lease."
    ),
    "gpu_timeout_ms": number(
        "3000",
        "Milliseconds that a batch may run. Shorter leaves time to retry, longer spares slow models.",
    ),
    "direct_host": Text(
        "127.0.0.1",
        "Address to listen on for gateways that cannot reach Redis: reachable by them, not by customers. off: do not.",
    ),
    "direct_port": number("0", "TCP port for direct calls of gateways; 0 lets the system choose."),
    "direct_advertise": Text(
        "",
        "Host name or address that gateways are told to call, reachable by them. Unset: that of TIERLANE_DIRECT_HOST; where "
        "it is 0.0.0.0 or ::, the address from which the worker reaches Redis.",
    ),
}

AUDITOR = {
    "audit_batch": number(
        "500",
        "Outbox entries taken at once; each holds the records of one admission call or batch. Larger is cheaper.",
    ),
    "audit_interval_ms": number(
        "500",
        "Milliseconds that audit entries may wait for a fuller batch; twice as long, requests wait for their end. "
        "Longer makes rows appear later.",
    ),
    "audit_grace_ms": number(
        "10000", "Milliseconds after its deadline at which an accepted request without an end is closed as abandoned."
    ),
}

UP = {
    "gateways": number(
        "",
        "Gateways that `tierlane up` starts, all on one port; not set: 2, or 1 on a single core. With one alone nobody "
        "answers while it is started again after a crash.",
    ),
    "schedulers": number(
        "2",
        "Schedulers that `tierlane up` starts. With one alone requests wait while it is started again after a crash; with "
        "none the gateways form the batches themselves.",
    ),
    "workers": number("2", "Workers that `tierlane up` starts. Each loads the model once, in a process of its own."),
    "pools": Text(
        "",
        "Other pools that `tierlane up` starts workers for, each POOL=BACKEND or POOL=BACKEND*WORKERS, with commas between "
        "them.",
    ),
    "ephemeral": Text("false", "Keep nothing: the embedded servers use a temporary directory without fsync."),
    "replace": Text(
        "false", "End what a killed `tierlane up` left running on this data directory. Without it the user is asked."
    ),
}

SECTIONS: dict[str, dict[str, Text]] = {
    "Shared": SHARED,
    "Times that every role of a pool must share": POOL_TIMES,
    "Gateway": GATEWAY,
    "Asynchronous jobs (gateway)": JOBS,
    "Autoscaling (gateway, `tierlane up`)": AUTOSCALE,
    "Metrics and log lines (gateway)": METRICS,
    "Traces (gateway, worker)": TRACES,
    "Scheduler": SCHEDULER,
    "Worker": WORKER,
    "Endpoint of `openai:URL` (worker)": ENDPOINT,
    "Auditor": AUDITOR,
    "Local stack (`tierlane up`)": UP,
}

TEXTS: dict[str, Text] = {name: text for section in SECTIONS.values() for name, text in section.items()}
