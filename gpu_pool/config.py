"""Configuration of a worker and of an endpoint backend: plain values, validated where settings are read.

Key and certificates of an endpoint reach the model process through its environment only.
"""

import os
import ssl
from dataclasses import dataclass, field

import msgspec

from gpu_pool.backends.openai_endpoint.settings import SERVERS
from scheduler.errors import StartError

VARIABLE = "GPU_POOL_ENDPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access to an endpoint. "" and 0 mean "not set". Times are in milliseconds; 0 leaves a call the time of its batch."""

    api_key: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    connect_ms: int
    first_byte_ms: int = 0
    total_ms: int = 0
    first_token_ms: int
    """From the call to the first token of a stream."""
    silence_ms: int
    """Between two tokens of a stream."""
    max_calls: int = 0
    """The most requests at a time; 0: as many as the endpoint can run, which is learnt."""
    body_dir: str = ""
    """Files of large chats, shared with the host's gateways; "": none."""

    def environment(self) -> dict[str, str]:
        """The variables that the model process needs."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    def ssl_context(self) -> ssl.SSLContext:
        """The context for https. Raises StartError for a file that cannot be used."""
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
    """The variables that the model process of this backend needs; none for backends other than an endpoint."""
    return access.environment() if backend.startswith(SERVERS) else {}


def take_access() -> Access:
    """Read the access from the environment and remove it there, so that child processes of the model do not get it."""
    return msgspec.json.decode(os.environ.pop(VARIABLE), type=Access)


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted")  # Otherwise OpenSSL prompts on the terminal.


def _unusable(setting: str, path: str, error: Exception) -> StartError:
    fault = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return StartError(f"{setting}: {path!r} cannot be used: {fault}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker: one model process on one device. A field that is a setting has no default of its own."""

    redis_url: str
    worker_id: str
    backend: str
    """`tiny`, `simulated[:MS]`, `pkg.module:function`, `hf:DIR`, `openai:URL` or `oip:URL`."""
    pool: str
    device: str
    """For torch backends: "cpu", "cuda", "cuda:N", or "auto": CUDA if available."""
    torch_threads: int
    dtype: str
    """For `hf:DIR`: "float32", "bfloat16", "float16", or "auto": the type of the weights on CUDA, else float32."""
    max_batch_size: int
    """The size of a full batch, for which the measured rate is reported."""
    heartbeat_ms: int
    renew_ms: int
    """How often the lease of a running batch is renewed; well under half of `lease_ms`."""
    lease_ms: int
    """Duration of a lease from claim or renewal; the same in every role of the pool."""
    gone_ms: int
    """A worker without a heartbeat for this time is not healthy; the same in every role of the pool."""
    gpu_timeout_ms: int
    """The longest time for any batch; measured service times lower it."""
    measure_at_start: bool = False
    """Whether one trial batch measures the model before the worker is ready; not if the backend is an endpoint."""
    drain_ms: int
    """The longest time that a stopping worker lets its requests run before it hands them back."""
    load_timeout_ms: int = 120_000
    """How long a model may take to load and warm up before its process is replaced."""
    direct_host: str
    """Where this worker listens for gateways while Redis is unavailable; "" disables the direct endpoint."""
    direct_port: int
    """0 selects any free port; the heartbeat reports it."""
    direct_advertise: str
    """The host that gateways connect to; "" means `direct_host`, or the address from which Redis is reached."""
    direct_token: str = field(repr=False)
    """The token that a gateway must send to the direct endpoint."""
    service_token: str = field(repr=False)
    """For older deployments: gateways may send it or the token derived from it. No token disables the endpoint."""
    endpoint: Access
    """For `openai:URL` and `oip:URL`."""
