"""The tables that the system writes: requests (the audit, partitioned by day), jobs and dead_letters."""

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

from ledger.schema.metadata import REQUEST_ID_PATTERN, check, column, matches, metadata, one_of

STATES = ("queued", "processing", "completed", "failed")
MODES = ("queue", "direct")
OPEN = "status IN ('queued', 'processing')"

# Without foreign keys: an audit row must not be rejected because its customer or tier was deleted. Columns of the accepted
# record are nullable, since the ended record may arrive first.
requests = Table(
    "requests",
    metadata,
    column("id", Text, "req_ and a UUIDv7 in hex.", primary_key=True),
    column("created_at", DateTime(timezone=True), "Creation time, from the id.", primary_key=True),
    column("customer_id", Uuid, "Customer.", null=True),
    column("api_key_id", Text, "Public part of its key.", null=True),
    column("tier", Text, "Tier at admission.", null=True),
    column("model", Text, "Requested model.", null=True),
    column("status", Text, "queued, processing, then completed or failed."),
    column("error_code", Text, "Reason of the failure, else null.", null=True),
    column("http_status", SmallInteger, "Status of the response; null while open.", null=True),
    column("completed_at", DateTime(timezone=True), "Time of the end (Redis clock); null while open.", null=True),
    column("latency_ms", Double, "Acceptance to end, milliseconds.", null=True),
    column("queue_ms", Double, "Wait in the tier queue, milliseconds; null = never left it.", null=True),
    column("gpu_ms", Double, "Run time of its batch, milliseconds; null = no completed run.", null=True),
    column("batch_id", Text, "Batch of its last run.", null=True),
    column("batch_size", Integer, "Requests in that batch.", null=True),
    column("worker_id", Text, "Worker of its last run.", null=True),
    column("gateway_id", Text, "Gateway that admitted it.", null=True),
    column("attempts", Integer, "Started runs; null while open.", null=True),
    column("tokens_used", Integer, "Tokens of input and output.", null=True),
    column("input_bytes", Integer, "Input size, bytes.", null=True),
    column("output_bytes", Integer, "Output size, bytes.", null=True),
    column("trace_id", Text, "Trace id.", null=True),
    column("mode", Text, "queue: through Redis; direct: without Redis; null while open.", null=True),
    column(
        "delivered",
        Boolean,
        "Whether the gateway that responded to the client wrote this end; null while open.",
        null=True,
    ),
    column(
        "served_from",
        Text,
        "cache: a cached result; collapsed: the run of an equal request; null: its own run.",
        null=True,
    ),
    # Equivalent to REQUEST_ID_PATTERN, whose "{32}" would be nearly half of the cost of an insert.
    check("id", "octet_length(id) = 36 AND id ~ '^req_[0-9a-f]*$'"),
    one_of("status", *STATES),
    one_of("mode", *MODES),
    one_of("served_from", "cache", "collapsed"),
    check("error_code", "(status = 'failed') = (error_code IS NOT NULL)"),
    check("completed_at", "completed_at IS NULL OR status IN ('completed', 'failed')"),
    check("http_status", "http_status BETWEEN 100 AND 599"),
    check("times", "latency_ms >= 0 AND queue_ms >= 0 AND gpu_ms >= 0"),
    check("counts", "batch_size >= 0 AND attempts >= 0 AND tokens_used >= 0"),
    check("sizes", "input_bytes >= 0 AND output_bytes >= 0"),
    Index("ix_requests_customer_id_created_at", "customer_id", text("created_at DESC")),
    Index("ix_requests_open", "created_at", postgresql_where=text(OPEN)),
    postgresql_partition_by="RANGE (created_at)",
    comment="The audit: one row for each accepted request, in day partitions requests_YYYYMMDD (UTC).",
)

jobs = Table(
    "jobs",
    metadata,
    column("id", Text, "req_ and a UUIDv7 in hex; the customer's task_id.", primary_key=True),
    column("created_at", DateTime(timezone=True), "Creation time, from the id.", server_default=text("now()")),
    column("customer_id", Uuid, "Customer.", ForeignKey("customers.id", ondelete="CASCADE"), index=True),
    column("api_key_id", Text, "Public part of its key."),
    column("tier", Text, "Tier at submission."),
    column("model", Text, "Requested model."),
    column("body", LargeBinary, "Encoded request, to queue it again after a loss of Redis."),
    column("status", Text, "queued, processing, then completed or failed.", server_default="queued"),
    column("output", LargeBinary, "Result in UTF-8; after a failure the backend's message, or null.", null=True),
    column("error_code", Text, "Reason of the failure, else null.", null=True),
    column("attempts", Integer, "Times it was queued again after a loss.", server_default="0"),
    column("completed_at", DateTime(timezone=True), "Time when its end was stored; null while open.", null=True),
    column(
        "expires_at", DateTime(timezone=True), "Time from which the row may be deleted; null while open.", null=True
    ),
    column("pool", Text, "GPU pool.", server_default="default"),
    column(
        "deadline", DateTime(timezone=True), "Time at which it fails if it has not ended.", server_default=text("now()")
    ),
    column("trace_id", Text, "Trace id.", null=True),
    column("idempotency", Text, "Name of its Idempotency-Key in Redis; null = none.", null=True),
    column("fingerprint", Text, "Fingerprint of the body under that key.", null=True),
    column("tokens_used", Integer, "Tokens of input and output; null = not counted.", null=True),
    column("callback_url", Text, "Webhook URL; null = none.", null=True),
    column("callback_at", DateTime(timezone=True), "Time of the next webhook attempt; null = none.", null=True),
    column("callback_tries", Integer, "Webhook attempts.", server_default="0"),
    column("audited", Boolean, "Whether requests has its end.", server_default=text("false")),
    matches("id", REQUEST_ID_PATTERN),
    one_of("status", *STATES),
    check("error_code", "(status = 'failed') = (error_code IS NOT NULL)"),
    check("attempts", "attempts >= 0"),
    Index("ix_jobs_open", "created_at", postgresql_where=text(OPEN)),
    Index("ix_jobs_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("ix_jobs_callback_at", "callback_at", postgresql_where=text("callback_at IS NOT NULL")),
    Index("ix_jobs_completed_at", "completed_at", postgresql_where=text("completed_at IS NOT NULL AND NOT audited")),
    comment="Asynchronous requests (Prefer: respond-async), with body.",
)

dead_letters = Table(
    "dead_letters",
    metadata,
    column("id", BigInteger, "Row number.", Identity(), primary_key=True),
    column("request_id", Text, "The failed request.", unique=True),
    column("dead_at", DateTime(timezone=True), "Time of the failure.", server_default=text("now()")),
    column("customer_id", Uuid, "Customer.", null=True),
    column("tier", Text, "Tier at admission.", null=True),
    column("model", Text, "Requested model.", null=True),
    column("error_code", Text, "Reason of the failure."),
    column("attempts", Integer, "Started runs.", server_default="0"),
    column("worker_ids", ARRAY(Text), "Workers that ran it, in order.", server_default=text("'{}'")),
    column("body", LargeBinary, "Encoded request; null = deleted.", null=True),
    column("requeued_as", Text, "Id of the new request; null = not requeued.", null=True),
    column("requeued_at", DateTime(timezone=True), "Time of the requeue.", null=True),
    matches("request_id", REQUEST_ID_PATTERN),
    matches("requeued_as", REQUEST_ID_PATTERN),
    check("requeued", "(requeued_as IS NULL) = (requeued_at IS NULL)"),
    check("attempts", "attempts >= 0"),
    Index("ix_dead_letters_dead_at", "dead_at"),
    comment="Requests that failed in all attempts, or that break the model.",
)
