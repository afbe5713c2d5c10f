"""The columns that verbs can set, as `--help` shows them: a test holds texts and types to those of the tables.

Only the standard library is used, because help must not wait for SQLAlchemy.
"""

from dataclasses import dataclass
from typing import Literal

REQUIRED = "required"
"""Stands for the default of what a new row cannot go without."""


@dataclass(frozen=True)
class Field:
    """One column: kind of value, its comment in the database, whether `none` is one, and the default of a new row."""

    name: str
    kind: Literal["whole", "decimal", "switch", "text"]
    says: str
    none: bool = False
    default: str = REQUIRED

    @property
    def metavar(self) -> str:
        """What stands for the value in help."""
        shown = {"whole": "N", "decimal": "X", "switch": "on|off", "text": "NAME"}[self.kind]
        return f"{shown}|none" if self.none else shown

    @property
    def help(self) -> str:
        """What it says, in the words of the command line instead of SQL's."""
        text = self.says.replace("null = none", "none = no limit").replace("null", "none")
        return text.replace("True:", "on:").replace("False:", "off:")


def _may_be_none(name: str, kind: Literal["whole", "decimal"], says: str) -> Field:
    return Field(name, kind, says, none=True, default="none")


TIER = (
    Field("priority", "whole", "Order of service, 1 first; no two tiers share one."),
    Field("guaranteed_share", "decimal", "Fraction of the capacity that is this tier's under contention, 0..1."),
    Field("requests_per_second", "decimal", "Default rate limit of each customer, requests per second."),
    Field("burst", "decimal", "Default bucket size of each customer, requests."),
    Field("max_concurrency", "whole", "Default limit of each customer's requests under way at a time."),
    _may_be_none("tokens_per_minute", "whole", "Default token limit of each customer per minute; null = none."),
    Field("max_queue_depth", "whole", "Requests that may wait in the tier's queue before it is full."),
    Field("max_queue_ms", "whole", "Longest wait in the tier's queue, milliseconds."),
    _may_be_none("shed_depth", "whole", "Waiting requests of this tier and above that shed it; null = never."),
    _may_be_none("shed_wait_ms", "whole", "Predicted wait that sheds this tier, milliseconds; null = never."),
    Field(
        "shadow",
        "switch",
        "True: its limits and its shedding are judged and counted, but not enforced.",
        default="off",
    ),
    Field(
        "paused",
        "switch",
        "True: what waits in its queue stays there until it is resumed or its time is up.",
        default="off",
    ),
)

CUSTOMER_TIER = Field("tier", "text", "The tier that all of the customer's keys get.")
CUSTOMER_LIMITS = (
    CUSTOMER_TIER,
    _may_be_none("requests_per_second", "decimal", "Own rate limit, requests per second; null = the tier's."),
    _may_be_none("burst", "decimal", "Own bucket size, requests; null = the tier's."),
    _may_be_none("max_concurrency", "whole", "Own limit of requests under way; null = the tier's."),
    _may_be_none("tokens_per_minute", "whole", "Own token limit per minute; null = the tier's."),
    _may_be_none("max_queue_ms", "whole", "Own longest wait in the queue, milliseconds; null = the tier's."),
)
CUSTOMER_HOSTS = Field(
    "callback_hosts",
    "text",
    "Hosts that its callbacks may go to, separated by commas, empty for no callbacks; null = the deployment's list.",
    none=True,
    default="none",
)

CUSTOMER = (*CUSTOMER_LIMITS, CUSTOMER_HOSTS)

KEY = (
    _may_be_none(
        "requests_per_second",
        "decimal",
        "The key's own rate limit beside its customer's, requests per second; null = none.",
    ),
    _may_be_none("burst", "decimal", "The key's own bucket size, requests; null where it has no limit of its own."),
)

MODEL = (
    Field("pool", "text", "The worker pool that runs it.", default="default"),
    Field("max_batch_size", "whole", "Most requests in one batch.", default="32"),
    _may_be_none("max_batch_tokens", "whole", "Most input tokens in one batch; null = no such limit."),
    Field("max_wait_ms", "whole", "Longest wait for a batch to fill, milliseconds.", default="40"),
    Field("gpu_timeout_ms", "whole", "Hard cap of one batch's run, milliseconds.", default="3000"),
    Field("rps_per_gpu", "decimal", "Requests per second of one GPU: a guess until measured.", default="100"),
    Field(
        "rps_per_gpu_fixed",
        "switch",
        "True: capacity is rps_per_gpu of each healthy GPU, whatever is measured.",
        default="off",
    ),
    Field("target_utilization", "decimal", "Fraction of the measured capacity to sell, 0..1.", default="0.8"),
    Field("cache_ttl_s", "whole", "How long equal requests share a result, seconds; 0 = never.", default="0"),
    Field(
        "cache_scope",
        "text",
        "Among whom equal requests share: customer (each for itself) or global.",
        default="customer",
    ),
    Field("enabled", "switch", "False: requests for it answer 404.", default="on"),
)

OF_TABLE = {"tiers": TIER, "customers": CUSTOMER, "api_keys": KEY, "models": MODEL}
"""The fields by the table whose columns they are."""
