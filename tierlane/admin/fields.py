"""The columns that the admin verbs can set, by table.

The fields of limits are those of `LIMIT_COLUMNS`, so a new limit needs no change here. Only the standard library and that
list are imported, so that help is fast; a test compares texts and types with those of the tables.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ratelimit.limits import AUXILIARY_COLUMNS, LIMIT_COLUMNS, LimitColumn
from tierlane.settings.declaration import Option

Kind: TypeAlias = Literal["whole", "decimal", "switch", "text", "names", "shares"]
_METAVARS: dict[Kind, str] = {
    "whole": "N",
    "decimal": "X",
    "switch": "on|off",
    "text": "NAME",
    "names": "NAMES",
    "shares": "X,X...|off",
}
REQUIRED = "required"
"""The default of a field that a new row must have."""


def without_sql(comment: str) -> str:
    """The comment of a column with the values of the command line instead of those of SQL."""
    text = comment.replace("null: none", "none: no limit").replace("null", "none")
    return text.replace("True:", "on:").replace("False:", "off:")


@dataclass(frozen=True, eq=False, repr=False)
class Field(Option):
    """A column; its description is the comment in the database, its default that of a new row."""

    name: str = ""
    kind: Kind = "text"
    none: bool = False

    @property
    def meaning(self) -> str:
        """The comment with the values of the command line."""
        text = without_sql(self.description)
        return text.replace("empty: none", "off: no alerts") if self.kind == "shares" else text

    def help(self, variable: str) -> str:
        return super().help(variable).replace(self.description, self.meaning)


def _field(
    name: str,
    kind: Kind,
    comment: str,
    *,
    none: bool = False,
    default: str = REQUIRED,
) -> Field:
    metavar = _METAVARS[kind] + ("|none" if none else "")
    return Field(default, comment, metavar, name=name, kind=kind, none=none)


def _may_be_none(name: str, kind: Kind, comment: str) -> Field:
    return _field(name, kind, comment, none=True, default="none")


def _limit(limit: LimitColumn, comment: str, *, required: bool) -> Field:
    kind: Literal["whole", "decimal"] = "decimal" if limit.type == "double" else "whole"
    return _field(limit.name, kind, comment) if required else _may_be_none(limit.name, kind, comment)


TIER = (
    _field("priority", "whole", "Order of service, 1 first; unique."),
    _field("guaranteed_share", "decimal", "Part of the capacity under contention, 0..1."),
    *(_limit(limit, limit.tier_text, required=limit.required) for limit in (*LIMIT_COLUMNS, *AUXILIARY_COLUMNS)),
    _field("max_queue_depth", "whole", "Most requests in its queue."),
    _may_be_none("max_queue_ms", "whole", "Longest wait in its queue; null: by the backend of the pool."),
    _may_be_none("shed_depth", "whole", "Waiting requests of this tier and above that shed it; null: never."),
    _may_be_none("shed_wait_ms", "whole", "Predicted wait that sheds it; null: never."),
    _field("shadow", "switch", "True: limits and shedding are counted, not enforced.", default="off"),
    _field("paused", "switch", "True: requests wait until it is resumed or their time is up.", default="off"),
    _may_be_none("slo_ms", "whole", "Objective of the response time's p95."),
    _may_be_none("slo_success", "decimal", "Objective of the share of successful requests, such as 0.999."),
    _field(
        "interactive_jobs", "switch", "True: a job may ask for the priority of interactive requests.", default="off"
    ),
)

CUSTOMER = (
    _field("tier", "text", "Tier of all its keys."),
    _field(
        "weight",
        "decimal",
        "Part of its tier's GPU time, in proportion to the weights of others that wait.",
        default="1",
    ),
    *(_limit(limit, limit.customer_text, required=False) for limit in LIMIT_COLUMNS),
    _may_be_none("max_queue_ms", "whole", "Longest wait in the queue; null: the tier's."),
    _field(
        "callback_hosts",
        "text",
        "Hosts of its callbacks, separated by commas, empty: none; null: the deployment's list.",
        none=True,
        default="none",
    ),
    _field("cell", "text", "Its cell; null: chosen by its id.", none=True, default="none"),
    _field("spread", "whole", "Number of cells that it uses, each with a part of its limits.", default="1"),
    _may_be_none("models", "names", "Models that its keys may use; null: all."),
    _field("manages_keys", "switch", "True: its keys may create, list and revoke its keys (/v1/keys).", default="off"),
    _may_be_none(
        "time_zone",
        "text",
        "Time zone in which days, weeks, months and years of its quotas begin, such as Europe/Amsterdam; null: UTC.",
    ),
    _may_be_none(
        "alert_url",
        "text",
        "Where alerts of its quotas are sent; its host must be one of its callback_hosts; null: nowhere.",
    ),
)

QUOTA = (
    _may_be_none(
        "alert_shares", "shares", "Shares of it that raise an alert, above 0 to 1; empty: none; null: 0.8 and 1."
    ),
)

CUSTOMER_STATUS = _field("status", "text", "active, or suspended: every request gets 403.", default="active")

CELL = (
    _field(
        "redis_url",
        "text",
        "Its server, without user and password: those of TIERLANE_REDIS_URL; null: that server.",
        none=True,
        default="none",
    ),
    _field(
        "weight",
        "decimal",
        "Its part of the customers, in proportion to the weights of the other open cells.",
        default="1",
    ),
)

CELL_STATE = _field(
    "state", "text", "open; draining: no new customers and requests; closed: not served.", default="open"
)

KEY = (
    _may_be_none("requests_per_second", "decimal", "Rate limit beside its customer's; null: none."),
    _may_be_none("burst", "decimal", "Bucket size, requests; null: no limit of its own."),
    _may_be_none(
        "weight", "decimal", "Part of its customer's GPU time, against its other keys; null: shared by those without."
    ),
    _may_be_none("models", "names", "Models that it may use, of those of its customer; null: all of these."),
    _may_be_none("quotas", "names", "Quotas beside its customer's, such as 100 usd/month; null: none."),
)

MODEL = (
    _field("pool", "text", "GPU pool.", default="default"),
    _field("max_batch_size", "whole", "Most requests in a batch.", default="32"),
    _may_be_none("max_batch_tokens", "whole", "Most input tokens in a batch; null: no limit."),
    _field("max_wait_ms", "whole", "Longest wait for a batch to fill.", default="40"),
    _field("rps_per_gpu", "decimal", "Requests per second of a GPU: a guess until measured.", default="100"),
    _field("rps_per_gpu_fixed", "switch", "True: rps_per_gpu counts, whatever is measured.", default="off"),
    _field("target_utilization", "decimal", "Part of the measured capacity to use, 0..1.", default="0.8"),
    _field("cache_ttl_s", "whole", "Seconds that equal requests share a result; 0: never.", default="0"),
    _field("cache_scope", "text", "Equal requests share within a customer, or global.", default="customer"),
    _may_be_none(
        "tpot_ms",
        "decimal",
        "Objective for the milliseconds per token of an answer, in engines with slots; null: none.",
    ),
    _field("enabled", "switch", "False: requests get 404.", default="on"),
    _field(
        "capabilities",
        "text",
        "Capabilities of its server, separated by commas; text: none; null: all but extensions.",
        none=True,
        default="none",
    ),
)

PRICE = (
    _field("usd_per_gpu_s", "decimal", "USD for a second of GPU time.", default="0"),
    _field("usd_per_1000_tokens", "decimal", "USD for 1,000 tokens of input and output.", default="0"),
)
