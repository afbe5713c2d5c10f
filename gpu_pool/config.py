"""What a worker and an endpoint backend are configured with: plain values, checked where settings are read.

Key and certificates of an endpoint reach the model process by its environment only.
"""

import os
import ssl
from dataclasses import dataclass, field

import msgspec

from gpu_pool.backends.openai_endpoint.settings import PREFIX
from scheduler.errors import StartError

VARIABLE = "GPU_POOL_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Access:
    """Empty texts and 0 mean: none. Times in milliseconds; where they are 0 a call may take what its batch has left."""

    api_key: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    connect_ms: int = 1000
    first_byte_ms: int = 0
    total_ms: int = 0
    max_calls: int = 64
    """Calls at a time over all batches; more wait for their turn."""
    max_batches: int = 8
    """Batches at a time, where the endpoint gets no slower by them."""

    def environment(self) -> dict[str, str]:
        """What the model process must find in its environment."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    def ssl_context(self) -> ssl.SSLContext:
        """For https. Raises StartError for a file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise _unusable("TIERLANE_ENDPOINT_CA_FILE", self.ca_file, error) from None
        if self.cert_file:
            try:
                context.load_cert_chain(self.cert_file, self.key_file or None, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                raise _unusable("TIERLANE_ENDPOINT_CERT_FILE", self.cert_file, error) from None
        return context


def secrets_of(backend: str, access: Access) -> dict[str, str]:
    """What the model process needs beyond its command line: nothing for other backends."""
    return access.environment() if backend.startswith(PREFIX) else {}


def take_access() -> Access:
    """What the environment holds; it is gone from there afterwards, so that no child of the model gets it."""
    text = os.environ.pop(VARIABLE, "")
    return msgspec.json.decode(text, type=Access) if text else Access()


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted")  # Else OpenSSL asks a terminal that nobody sits at.


def _unusable(setting: str, path: str, error: Exception) -> StartError:
    fault = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return StartError(f"{setting}: {path!r} cannot be used: {fault}.")


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
