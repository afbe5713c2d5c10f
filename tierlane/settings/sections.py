"""All settings by section, in the order of docs/configuration.md, and the rules between two settings.

A section is a class of `gateway_sections` or `role_sections`. Only the standard library is used, because `--help` must
be quick.
"""

from typing import NamedTuple

from tierlane.settings.declaration import Setting, settings_of
from tierlane.settings.gateway_sections import (
    AutoscaleSettings,
    BatchSettings,
    GatewaySettings,
    JobSettings,
    MetricsSettings,
    TraceSettings,
)
from tierlane.settings.role_sections import (
    AdminSettings,
    AuditorSettings,
    EndpointSettings,
    PoolTimeSettings,
    SchedulerSettings,
    SharedSettings,
    StackSettings,
    WorkerSettings,
)

SECTIONS: dict[str, type] = {
    "Shared": SharedSettings,
    "Times that every role of a pool must share": PoolTimeSettings,
    "Gateway": GatewaySettings,
    "Asynchronous jobs (gateway)": JobSettings,
    "Files and batches (gateway)": BatchSettings,
    "Autoscaling (gateway, `tierlane up`)": AutoscaleSettings,
    "Metrics and log lines (gateway)": MetricsSettings,
    "Traces (gateway, worker)": TraceSettings,
    "Scheduler": SchedulerSettings,
    "Worker": WorkerSettings,
    "Server of `openai:URL` or `oip:URL` (worker)": EndpointSettings,
    "Auditor": AuditorSettings,
    "Admin API (`tierlane admin`)": AdminSettings,
    "Local stack (`tierlane up`)": StackSettings,
}
"""Sections by title, which names the roles that read them."""

SETTINGS: dict[str, Setting] = settings_of(*SECTIONS.values())


class Order(NamedTuple):
    """A rule between two settings: the first is less than the second; `why` follows the numbers in the error."""

    smaller: str
    larger: str
    why: str


ORDERED = (
    Order("renew_ms", "lease_ms", "or a lease expires before it is renewed"),
    Order("reap_ms", "lease_ms", "or a lost batch waits longer for the reaper than for its lease"),
    Order("heartbeat_ms", "gone_ms", "or a live worker counts as gone between two heartbeats"),
    Order("gpu_timeout_ms", "total_request_ms", "or the client gets a response before its batch times out"),
    Order("gpu_timeout_ms", "job_deadline_ms", "or a job fails before its batch times out"),
    Order(
        "batch_file_bytes", "stored_file_bytes", "or a file of that size is rejected, or leaves no room for its results"
    ),
    Order("max_body_bytes", "key_body_memory_bytes", "or a body of that size cannot be received"),
    Order("key_body_memory_bytes", "customer_body_memory_bytes", "or one key blocks its customer's others"),
    Order("customer_body_memory_bytes", "body_memory_bytes", "or one customer blocks all others"),
    Order("audit_interval_ms", "audit_grace_ms", "or requests are closed as abandoned before their rows are written"),
)


class AllSettings(
    SharedSettings,
    PoolTimeSettings,
    GatewaySettings,
    JobSettings,
    BatchSettings,
    AutoscaleSettings,
    MetricsSettings,
    TraceSettings,
    SchedulerSettings,
    WorkerSettings,
    EndpointSettings,
    AuditorSettings,
    AdminSettings,
    StackSettings,
):
    """The settings of all sections."""
