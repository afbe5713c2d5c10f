"""The tables that admins edit: tiers, cells, customers, api_keys, quotas, models, prices, cordons, operators, and what is kept about their changes."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from ledger.schema.metadata import NAME_PATTERN, check, column, flag, limit_check, matches, metadata, one_of, within
from ratelimit.limits import AUXILIARY_COLUMNS, LIMIT_COLUMNS, MOST_COUNT, MOST_RATE
from ratelimit.quotas import PERIOD_S
from scheduler.capabilities import Capability

MOST_WAIT_MS = 3_600_000
MOST_WINDOW_MS = 60_000
MOST_OBJECTIVE_MS = 600_000
_PART = r"(\.[0-9]{1,6})?"
_BELOW_1 = r"0\.[0-9]{0,4}[1-9]0?"
# The lengths keep the amounts below MOST_AMOUNT of ledger/catalog/quotas.py.
_QUOTA = (
    "([1-9][0-9]{0,14}|[1-9][0-9]{0,14} tokens|[1-9][0-9]{0,11} gpu-ms"
    f"|([1-9][0-9]{{0,8}}{_PART}|{_BELOW_1}) gpu-s|([1-9][0-9]{{0,4}}{_PART}|{_BELOW_1}) gpu-h"
    f"|([1-9][0-9]{{0,5}}{_PART}|{_BELOW_1}) usd)"
    f" ?(/|per) ?([1-9][0-9]{{0,3}})? ?({'|'.join(PERIOD_S)})s?"
)
QUOTA_PATTERN = f"^{_QUOTA}$"
KEY_QUOTAS = (
    "array_ndims(quotas) = 1 AND cardinality(quotas) <= 10 AND array_position(quotas, NULL) IS NULL"
    " AND array_to_string(quotas, '') !~ ','"
    f" AND array_to_string(quotas, ',') ~ '^{_QUOTA}(,{_QUOTA})*$'"
)

MODEL_NAME = "[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}"
ALLOWED_MODELS = (
    "array_ndims(models) = 1 AND cardinality(models) <= 100 AND array_position(models, NULL) IS NULL"
    " AND array_to_string(models, '') !~ ','"
    f" AND array_to_string(models, ',') ~ '^{MODEL_NAME}(,{MODEL_NAME})*$'"
)
"""A list of names without NULL, not empty."""

ALERT_SHARES = (
    "cardinality(alert_shares) = 0 OR array_ndims(alert_shares) = 1 AND cardinality(alert_shares) <= 10"
    " AND array_position(alert_shares, NULL) IS NULL AND 0 < ALL (alert_shares) AND 1 >= ALL (alert_shares)"
)

URL_PATTERN = "^https?://[^[:space:][:cntrl:]@#/?]+([/?][^[:space:][:cntrl:]#]*)?$"
"""Without user, password and fragment, as gateway/jobs/callback_url.py requires."""

_HOST = r"(\[[0-9a-f:.]+\]|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?)"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
HOSTS_PATTERN = f"^( *{_HOST}(:{_PORT})? *(,|$))*$"  # As gateway/host_lists.py reads it.

SERVER_PATTERN = "^((rediss?([+](sentinel|cluster))?|unix)://[^[:space:][:cntrl:]@#]+)$"
"""The URL of a server without credentials."""

_TYPES = {"double": Double, "integer": Integer, "bigint": BigInteger}

now, clock = text("now()"), text("clock_timestamp()")

tiers = Table(
    "tiers",
    metadata,
    column("name", Text, "Name of the tier, and of its queue.", primary_key=True),
    column("priority", SmallInteger, "Order of service, 1 first; unique."),
    column("guaranteed_share", Double, "Part of the capacity under contention, 0..1."),
    *(
        column(limit.name, _TYPES[limit.type], limit.tier_text, null=not limit.required)
        for limit in (*LIMIT_COLUMNS, *AUXILIARY_COLUMNS)
    ),
    column("max_queue_depth", Integer, "Most requests in its queue."),
    column("max_queue_ms", Integer, "Longest wait in its queue; null: by the backend of the pool.", null=True),
    column("shed_depth", Integer, "Waiting requests of this tier and above that shed it; null: never.", null=True),
    column("shed_wait_ms", Integer, "Predicted wait that sheds it; null: never.", null=True),
    flag("shadow", "True: limits and shedding are counted, not enforced."),
    flag("paused", "True: requests wait until it is resumed or their time is up."),
    column("slo_ms", Integer, "Objective of the response time's p95.", null=True),
    column("slo_success", Double, "Objective of the share of successful requests, such as 0.999.", null=True),
    flag("interactive_jobs", "True: a job may ask for the priority of interactive requests."),
    matches("name", NAME_PATTERN),
    within("priority", 1, 1000),
    within("guaranteed_share", 0, 1),
    *map(limit_check, (*LIMIT_COLUMNS, *AUXILIARY_COLUMNS)),
    within("max_queue_depth", 1, MOST_COUNT),
    within("max_queue_ms", 1, MOST_WAIT_MS),
    within("shed_depth", 1, MOST_COUNT),
    within("shed_wait_ms", 1, MOST_WAIT_MS),
    within("slo_ms", 1, MOST_OBJECTIVE_MS),
    check("slo_success", "slo_success > 0 AND slo_success < 1"),
    # Deferrable, so that two tiers can trade places: in one UPDATE, or in two with SET CONSTRAINTS ... DEFERRED.
    UniqueConstraint("priority", deferrable=True, initially="IMMEDIATE"),
    comment="Service tiers.",
)

cells = Table(
    "cells",
    metadata,
    column("name", Text, "Name; the cell default exists without a row.", primary_key=True),
    column(
        "redis_url",
        Text,
        "Its server, without user and password: those of TIERLANE_REDIS_URL; null: that server.",
        null=True,
    ),
    column(
        "state",
        Text,
        "open; draining: no new customers and requests; closed: not served.",
        server_default="open",
    ),
    column(
        "weight",
        Double,
        "Its part of the customers, in proportion to the weights of the other open cells.",
        server_default="1",
    ),
    matches("name", NAME_PATTERN),
    check("redis_url", f"length(redis_url) <= 500 AND redis_url ~ '{SERVER_PATTERN}'"),
    one_of("state", "open", "draining", "closed"),
    check("default", "name <> 'default' OR (redis_url IS NULL AND state <> 'closed')"),
    within("weight", 0.01, 1000),
    comment="Cells: each has queues and limits of its own, for the customers whose home it is.",
)

customers = Table(
    "customers",
    metadata,
    column("id", Uuid, "Id.", primary_key=True, server_default=text("gen_random_uuid()")),
    column("name", Text, "Unique name.", unique=True),
    column("tier", Text, "Tier of all its keys.", ForeignKey("tiers.name", onupdate="CASCADE")),
    column("status", Text, "active, or suspended: every request gets 403.", server_default="active"),
    *(column(limit.name, _TYPES[limit.type], limit.customer_text, null=True) for limit in LIMIT_COLUMNS),
    column("max_queue_ms", Integer, "Longest wait in the queue; null: the tier's.", null=True),
    column("created_at", DateTime(timezone=True), "Creation time.", server_default=now),
    column(
        "callback_hosts",
        Text,
        "Hosts of its callbacks, separated by commas, empty: none; null: the deployment's list.",
        null=True,
    ),
    column(
        "weight",
        _TYPES["double"],
        "Part of its tier's GPU time, in proportion to the weights of others that wait.",
        server_default="1",
    ),
    column("cell", Text, "Its cell; null: chosen by its id.", ForeignKey("cells.name", onupdate="CASCADE"), null=True),
    column("spread", SmallInteger, "Number of cells that it uses, each with a part of its limits.", server_default="1"),
    column("models", ARRAY(Text), "Models that its keys may use; null: all.", null=True),
    flag("manages_keys", "True: its keys may create, list and revoke its keys (/v1/keys)."),
    column(
        "time_zone",
        Text,
        "Time zone in which days, weeks, months and years of its quotas begin, such as Europe/Amsterdam; null: UTC.",
        null=True,
    ),
    column(
        "alert_url",
        Text,
        "Where alerts of its quotas are sent; its host must be one of its callback_hosts; null: nowhere.",
        null=True,
    ),
    column("webhook_secret", Integer, "Number of its webhook secret; a rotation adds 1.", server_default="1"),
    column(
        "webhook_secret_oldest",
        Integer,
        "Oldest webhook secret that callbacks are also signed with; null: none.",
        null=True,
    ),
    column(
        "webhook_secret_until",
        DateTime(timezone=True),
        "Until when earlier webhook secrets are valid; null: never rotated.",
        null=True,
    ),
    check("name", r"length(name) BETWEEN 1 AND 200 AND name !~ '[[:cntrl:]]' AND name = btrim(name)"),
    one_of("status", "active", "suspended"),
    check("callback_hosts", f"length(callback_hosts) <= 2000 AND callback_hosts ~* '{HOSTS_PATTERN}'"),
    *map(limit_check, LIMIT_COLUMNS),
    within("max_queue_ms", 1, MOST_WAIT_MS),
    within("weight", 0.01, 1000),
    within("spread", 1, 64),
    check("models", ALLOWED_MODELS),
    check("time_zone", "length(time_zone) <= 64 AND time_zone ~ '^[A-Za-z][A-Za-z0-9_+/-]*$'"),
    check("alert_url", f"length(alert_url) <= 2048 AND alert_url ~ '{URL_PATTERN}'"),
    within("webhook_secret", 1, 1_000_000),
    check("webhook_secret_oldest", "webhook_secret_oldest BETWEEN 1 AND webhook_secret"),
    comment="Customers. The view customer_limits has their limits in force.",
)

api_keys = Table(
    "api_keys",
    metadata,
    column("id", Text, "Public part of the key: tl_<id>_...", primary_key=True),
    column("customer_id", Uuid, "Customer.", ForeignKey("customers.id", ondelete="CASCADE"), index=True),
    column("name", Text, "Purpose of the key."),
    column("secret_hash", LargeBinary, "SHA-256 of the secret part."),
    column("created_at", DateTime(timezone=True), "Creation time.", server_default=now),
    column("expires_at", DateTime(timezone=True), "From when the key is rejected; null: never.", null=True),
    column("revoked_at", DateTime(timezone=True), "Set: the key is rejected.", null=True),
    column("last_used_at", DateTime(timezone=True), "Last use, written within five seconds.", null=True),
    column(
        "requests_per_second",
        Double,
        "Rate limit beside its customer's; null: none.",
        null=True,
    ),
    column("burst", Double, "Bucket size, requests; null: no limit of its own.", null=True),
    column(
        "weight",
        Double,
        "Part of its customer's GPU time, against its other keys; null: shared by those without.",
        null=True,
    ),
    column("models", ARRAY(Text), "Models that it may use, of those of its customer; null: all of these.", null=True),
    column("quotas", ARRAY(Text), "Quotas beside its customer's, such as 100 usd/month; null: none.", null=True),
    column("quota_key", Text, "Key with which its quotas are counted together; null: only itself.", null=True),
    matches("id", "^[a-z0-9]{12}$"),
    matches("quota_key", "^[a-z0-9]{12}$"),
    check("quotas", KEY_QUOTAS),
    check("name", "length(name) BETWEEN 1 AND 200 AND name !~ '[[:cntrl:]]'"),
    check("secret_hash", "octet_length(secret_hash) = 32"),
    check("expires_at", "expires_at > created_at"),
    check("requests_per_second", f"requests_per_second > 0 AND requests_per_second <= {MOST_RATE}"),
    within("burst", 1, MOST_COUNT),
    within("weight", 0.01, 1000),
    check("models", ALLOWED_MODELS),
    check("limit", "(requests_per_second IS NULL) = (burst IS NULL)"),
    comment="API keys. SELECT issue_api_key('customer', 'purpose') creates one and shows it once.",
)

quotas = Table(
    "quotas",
    metadata,
    column("id", BigInteger, "Row number.", Identity(), primary_key=True),
    column(
        "customer_id",
        Uuid,
        "Owner; null: each customer of the tier.",
        ForeignKey("customers.id", ondelete="CASCADE"),
        null=True,
    ),
    column(
        "tier",
        Text,
        "Tier whose customers each have it.",
        ForeignKey("tiers.name", onupdate="CASCADE", ondelete="CASCADE"),
        null=True,
    ),
    column("quota", Text, "Such as 10000/day (requests), 3600 gpu-s/day, 1000000 tokens/week or 100 usd/month."),
    column(
        "alert_shares",
        ARRAY(Double),
        "Shares of it that raise an alert, above 0 to 1; empty: none; null: 0.8 and 1.",
        null=True,
    ),
    check("owner", "num_nonnulls(customer_id, tier) = 1"),
    matches("quota", QUOTA_PATTERN),
    check("alert_shares", ALERT_SHARES),
    UniqueConstraint("customer_id", "tier", "quota", postgresql_nulls_not_distinct=True),
    comment="Requests, GPU time, tokens or money per period, of a customer or of each customer of a tier.",
)

CAPABILITIES = "|".join(Capability)

models = Table(
    "models",
    metadata,
    column("name", Text, "Name in requests.", primary_key=True),
    column("pool", Text, "GPU pool.", server_default="default"),
    column("max_batch_size", Integer, "Most requests in a batch.", server_default="32"),
    column("max_batch_tokens", Integer, "Most input tokens in a batch; null: no limit.", null=True),
    column("max_wait_ms", Integer, "Longest wait for a batch to fill.", server_default="40"),
    column("gpu_timeout_ms", Integer, "Unused; TIERLANE_GPU_TIMEOUT_MS of the workers applies.", server_default="3000"),
    column("rps_per_gpu", Double, "Requests per second of a GPU: a guess until measured.", server_default="100"),
    flag("rps_per_gpu_fixed", "True: rps_per_gpu counts, whatever is measured."),
    column("target_utilization", Double, "Part of the measured capacity to use, 0..1.", server_default="0.8"),
    column("cache_ttl_s", Integer, "Seconds that equal requests share a result; 0: never.", server_default="0"),
    column(
        "cache_scope",
        Text,
        "Equal requests share within a customer, or global.",
        server_default="customer",
    ),
    column("enabled", Boolean, "False: requests get 404.", server_default=text("true")),
    column(
        "capabilities",
        Text,
        "Capabilities of its server, separated by commas; text: none; null: all but extensions.",
        null=True,
    ),
    column(
        "tpot_ms",
        Double,
        "Objective for the milliseconds per token of an answer, in engines with slots; null: none.",
        null=True,
    ),
    matches("capabilities", f"^(text|({CAPABILITIES})(,({CAPABILITIES}))*)$"),
    matches("name", f"^{MODEL_NAME}$"),
    matches("pool", NAME_PATTERN),
    within("max_batch_size", 1, 4096),
    check("max_batch_tokens", "max_batch_tokens > 0"),
    within("max_wait_ms", 0, MOST_WINDOW_MS),
    within("gpu_timeout_ms", 1, MOST_WAIT_MS),
    check("rps_per_gpu", f"rps_per_gpu > 0 AND rps_per_gpu <= {MOST_RATE}"),
    check("target_utilization", "target_utilization > 0 AND target_utilization <= 1"),
    within("cache_ttl_s", 0, 86_400),
    check("tpot_ms", "tpot_ms > 0"),
    one_of("cache_scope", "customer", "global"),
    comment="Models, and how their batches are formed.",
)

prices = Table(
    "prices",
    metadata,
    column("model", Text, "Model, by name.", primary_key=True),
    column(
        "valid_from",
        DateTime(timezone=True),
        "Creation time of the first request that it applies to.",
        primary_key=True,
        server_default=now,
    ),
    column("usd_per_gpu_s", Numeric, "USD for a second of GPU time.", server_default="0"),
    column("usd_per_1000_tokens", Numeric, "USD for 1,000 tokens of input and output.", server_default="0"),
    within("usd_per_gpu_s", 0, 1_000_000),
    within("usd_per_1000_tokens", 0, 1_000_000),
    comment="Prices of models, for tierlane usage export. A row applies to later requests, until the next row of its model.",
)

cordons = Table(
    "cordons",
    metadata,
    column("worker", Text, "Id of the worker, in any pool.", primary_key=True),
    column("reason", Text, "Reason.", server_default=""),
    column("cordoned_at", DateTime(timezone=True), "Time of the cordon.", server_default=now),
    check("worker", "length(worker) BETWEEN 1 AND 200 AND worker !~ '[[:cntrl:]]'"),
    check("reason", "length(reason) <= 500 AND reason !~ '[[:cntrl:]]'"),
    comment="Workers that get no new work, also after a restart.",
)

operators = Table(
    "operators",
    metadata,
    column("name", Text, "Name; config_changes records it as operator:NAME.", primary_key=True),
    column(
        "role",
        Text,
        "viewer reads; operator also cordons, drains, suspends and revokes keys; admin changes everything.",
    ),
    column("token_hash", LargeBinary, "SHA-256 of the token.", unique=True),
    column("created_at", DateTime(timezone=True), "Creation time of the token.", server_default=now),
    column("expires_at", DateTime(timezone=True), "From when the token is rejected; null: never.", null=True),
    column("revoked_at", DateTime(timezone=True), "Set: the token is rejected.", null=True),
    column("last_used_at", DateTime(timezone=True), "Last use, at most a minute old.", null=True),
    matches("name", "^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$"),
    one_of("role", "viewer", "operator", "admin"),
    check("token_hash", "octet_length(token_hash) = 32"),
    check("expires_at", "expires_at > created_at"),
    comment="People and programs that may use the admin API.",
)

operator_sessions = Table(
    "operator_sessions",
    metadata,
    column("session_hash", LargeBinary, "SHA-256 of the secret in the cookie.", primary_key=True),
    column("token_hash", LargeBinary, "That of the operator who signed in; null: an identity provider did.", null=True),
    column("person", Text, "Name of the person whom an identity provider signed in: oidc:EMAIL.", null=True),
    column("role", Text, "Role of this person.", null=True),
    column("created_at", DateTime(timezone=True), "Time of the sign-in.", server_default=now),
    column("expires_at", DateTime(timezone=True), "From when the session is rejected."),
    one_of("role", "viewer", "operator", "admin"),
    check("person", "(person IS NULL) = (role IS NULL) AND (person IS NULL) <> (token_hash IS NULL)"),
    comment="Sessions of browsers in the admin API; delete a row to end one.",
)

catalog_version = Table(
    "catalog_version",
    metadata,
    column("single", Boolean, "Always true: the table has one row.", primary_key=True, server_default=text("true")),
    column("version", BigInteger, "Number of catalog changes; gateways compare it each second."),
    column("changed_at", DateTime(timezone=True), "Time of the last change.", server_default=now),
    column(
        "whole_version",
        BigInteger,
        "Last version that config_changes does not describe row by row; gateways with an older one read everything.",
        server_default="0",
    ),
    check("single", "single"),
    comment="One row, maintained by triggers; do not edit.",
)

config_changes = Table(
    "config_changes",
    metadata,
    column("id", BigInteger, "Row number.", Identity(), primary_key=True),
    column("changed_at", DateTime(timezone=True), "Time of the change.", server_default=clock),
    column("changed_by", Text, "tierlane.actor, else the database user."),
    column("table_name", Text, "Table of the changed row."),
    column("row_key", Text, "Primary key of the changed row."),
    column("old", JSONB, "The row before, without secrets; null: added.", null=True),
    column("new", JSONB, "The row after, without secrets; null: deleted.", null=True),
    column(
        "xact",
        BigInteger,
        "Transaction of the change.",
        server_default=text("(pg_current_xact_id()::text)::bigint"),
        index=True,
    ),
    check("old_or_new", "num_nonnulls(old, new) >= 1"),
    comment="Changes of catalog rows, written by triggers.",
)
