"""The tables that the system itself writes: requests (the audit, partitioned by day), jobs and dead_letters."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from ledger.metadata import REQUEST_ID_PATTERN, check, column, matches, metadata, one_of

STATES = ("queued", "processing", "completed", "failed")
MODES = ("queue", "direct")
OPEN = "status IN ('queued', 'processing')"

# No foreign keys: an audit row must never be refused because a customer or a tier is gone. What only the accepted
# record knows is null-able, for a terminal record may arrive first.
requests = Table(
    "requests",
    metadata,
    column("id", Text, "req_ and a UUIDv7 in hex.", primary_key=True),
    column("created_at", DateTime(timezone=True), "Creation time carried by the id itself.", primary_key=True),
    column("customer_id", Uuid, "Whose request it was.", null=True),
    column("api_key_id", Text, "Public part of the key that was used.", null=True),
    column("tier", Text, "Tier at admission.", null=True),
    column("model", Text, "Model asked for.", null=True),
    column("status", Text, "queued -> processing -> completed or failed; the last two are final."),
    column("error_code", Text, "Why it failed; null unless failed.", null=True),
    column("http_status", SmallInteger, "Status of the answer; null while open.", null=True),
    column("completed_at", DateTime(timezone=True), "When it became final (Redis clock); null while open.", null=True),
    column("latency_ms", Double, "From acceptance to the end, milliseconds.", null=True),
    column("queue_ms", Double, "Wait in the tier queue, milliseconds; null = never left it.", null=True),
    column("gpu_ms", Double, "Run time of its batch, milliseconds; null = never ran to an end.", null=True),
    column("batch_id", Text, "The batch of its last run.", null=True),
    column("batch_size", Integer, "Requests in that batch.", null=True),
    column("worker_id", Text, "The worker of its last run.", null=True),
    column("gateway_id", Text, "The gateway that admitted it.", null=True),
    column("attempts", Integer, "Runs that were begun; null while open.", null=True),
    column("tokens_used", Integer, "Tokens in and out.", null=True),
    column("input_bytes", Integer, "Size of the input, bytes.", null=True),
    column("output_bytes", Integer, "Size of the output, bytes.", null=True),
    column("trace_id", Text, "Trace id of the request's traceparent.", null=True),
    column("mode", Text, "queue: run through Redis; direct: a worker was called past it; null while open.", null=True),
    column(
        "delivered",
        Boolean,
        "Whether this end was written by the gateway that told it to its client; null while open.",
        null=True,
    ),
    # REQUEST_ID_PATTERN in other words: counting "{32}" would be nearly half of what a row costs.
    check("id", "octet_length(id) = 36 AND id ~ '^req_[0-9a-f]*$'"),
    one_of("status", *STATES),
    one_of("mode", *MODES),
    check("error_code", "(status = 'failed') = (error_code IS NOT NULL)"),
    check("completed_at", "completed_at IS NULL OR status IN ('completed', 'failed')"),
    check("http_status", "http_status BETWEEN 100 AND 599"),
    check("times", "latency_ms >= 0 AND queue_ms >= 0 AND gpu_ms >= 0"),
    check("counts", "batch_size >= 0 AND attempts >= 0 AND tokens_used >= 0"),
    check("sizes", "input_bytes >= 0 AND output_bytes >= 0"),
    Index("ix_requests_customer_id_created_at", "customer_id", text("created_at DESC")),
    Index("ix_requests_open", "created_at", postgresql_where=text(OPEN)),
    postgresql_partition_by="RANGE (created_at)",
    comment="The audit: one row for each accepted request. Days are partitions named requests_YYYYMMDD (UTC).",
)

jobs = Table(
    "jobs",
    metadata,
    column("id", Text, "req_ and a UUIDv7 in hex; the customer's task_id.", primary_key=True),
    column("created_at", DateTime(timezone=True), "When it was taken in.", server_default=text("now()")),
    column("customer_id", Uuid, "Whose job it is.", ForeignKey("customers.id", ondelete="CASCADE"), index=True),
    column("api_key_id", Text, "Public part of the key that was used."),
    column("tier", Text, "Tier at submission."),
    column("model", Text, "Model asked for."),
    column("body", LargeBinary, "The encoded request, so that it can be queued again after a loss of Redis."),
    column("status", Text, "queued -> processing -> completed or failed.", server_default="queued"),
    column("output", Text, "The result; null until completed.", null=True),
    column("error_code", Text, "Why it failed; null unless failed.", null=True),
    column("attempts", Integer, "Times it was queued again after a loss.", server_default="0"),
    column("completed_at", DateTime(timezone=True), "When it became final; null while open.", null=True),
    column("expires_at", DateTime(timezone=True), "From when on the row may be deleted; null while open.", null=True),
    matches("id", REQUEST_ID_PATTERN),
    one_of("status", *STATES),
    check("error_code", "(status = 'failed') = (error_code IS NOT NULL)"),
    check("attempts", "attempts >= 0"),
    Index("ix_jobs_open", "created_at", postgresql_where=text(OPEN)),
    Index("ix_jobs_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    comment="Asynchronous requests (Prefer: respond-async), body included.",
)

dead_letters = Table(
    "dead_letters",
    metadata,
    column("id", BigInteger, "Row number.", Identity(), primary_key=True),
    column("request_id", Text, "The request that was given up.", unique=True),
    column("dead_at", DateTime(timezone=True), "When it was given up.", server_default=text("now()")),
    column("customer_id", Uuid, "Whose request it was.", null=True),
    column("tier", Text, "Tier at admission.", null=True),
    column("model", Text, "Model asked for.", null=True),
    column("error_code", Text, "Why it was given up."),
    column("attempts", Integer, "Runs that were begun.", server_default="0"),
    column("worker_ids", ARRAY(Text), "Workers that tried it, in order.", server_default=text("'{}'")),
    column("body", LargeBinary, "The encoded request where it may be kept; null = redacted.", null=True),
    column("requeued_as", Text, "Id of the new request made from it; null = not requeued.", null=True),
    column("requeued_at", DateTime(timezone=True), "When it was requeued.", null=True),
    matches("request_id", REQUEST_ID_PATTERN),
    matches("requeued_as", REQUEST_ID_PATTERN),
    check("requeued", "(requeued_as IS NULL) = (requeued_at IS NULL)"),
    check("attempts", "attempts >= 0"),
    Index("ix_dead_letters_dead_at", "dead_at"),
    comment="Requests that were given up after all attempts or that break the model.",
)
