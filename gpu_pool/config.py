"""What a worker is told at its start: plain values, checked where settings are read."""

from dataclasses import dataclass, field

from gpu_pool.endpoint.access import Access


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: one model process on one device."""

    redis_url: str
    worker_id: str
    backend: str = "tiny"
    """`tiny`, `simulated[:MS]`, `pkg.module:function`, `hf:DIR` or `openai:URL`."""
    pool: str = "default"
    device: str = "auto"
    """For torch backends: "cpu", "cuda", "cuda:N", or "auto": CUDA where there is one."""
    torch_threads: int = 1
    dtype: str = "auto"
    """For `hf:DIR`: "float32", "bfloat16", "float16", or "auto": that of the weights on CUDA, else float32."""
    max_batch_size: int = 32
    """The model's full batch: the size for which the measured rate is reported."""
    heartbeat_ms: int = 250
    renew_ms: int = 150
    """How often the lease of the running batch is renewed; well under half of `lease_ms`."""
    lease_ms: int = 600
    """What a claim and each renewal lend the batch for; the same in every role of the pool."""
    gpu_timeout_ms: int = 3000
    """The longest that any batch may run; measured service times lower it."""
    drain_ms: int = 3000
    """How long a stopping worker lets its batch run before it hands it back."""
    load_timeout_ms: int = 120_000
    """How long a model may take to load and warm up before its process is replaced."""
    direct_host: str = "127.0.0.1"
    """Where gateways reach this worker while Redis is away; "": nowhere."""
    direct_port: int = 0
    """0: any free one; the heartbeat tells which."""
    direct_advertise: str = ""
    """The host that gateways are told to call; "": that of `direct_host`, or the address from which Redis is reached."""
    direct_token: str = field(default="", repr=False)
    """What a gateway must show to be served directly."""
    service_token: str = field(default="", repr=False)
    """Of older deployments, where workers have it too: gateways may show it, or what follows from it. Without any token
    there is no direct endpoint."""
    endpoint: Access = field(default_factory=Access)
    """For `openai:URL`."""
