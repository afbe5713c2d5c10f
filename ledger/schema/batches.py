"""The tables of OpenAI's batch API: files with their chunks, batches, and the lines of batches."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    text,
)

from ledger.schema.metadata import REQUEST_ID_PATTERN, check, column, flag, matches, metadata, one_of

PURPOSES = ("batch", "batch_output")
OPEN_STATES = ("validating", "in_progress", "finalizing", "cancelling")
STATES = (*OPEN_STATES, "completed", "failed", "expired", "cancelled")
OPEN = f"status IN ({', '.join(repr(state) for state in OPEN_STATES)})"

files = Table(
    "files",
    metadata,
    column("id", Text, "file- and a UUIDv7 in hex.", primary_key=True),
    column("customer_id", Uuid, "Customer.", ForeignKey("customers.id", ondelete="CASCADE")),
    column("created_at", DateTime(timezone=True), "Creation time.", server_default=text("now()")),
    column("expires_at", DateTime(timezone=True), "From when it is unknown to its customer, and may be deleted."),
    column("purpose", Text, "batch: input; batch_output: results."),
    column("filename", Text, "Name that the client sent."),
    column("bytes", BigInteger, "Size of the content.", server_default="0"),
    flag("complete", "False: the upload has not ended."),
    column("batch_id", Text, "Batch whose lines are the content; null: it is in file_chunks.", null=True),
    flag("of_errors", "Whether those are the failed lines."),
    matches("id", "^file-[0-9a-f]{32}$"),
    one_of("purpose", *PURPOSES),
    check("bytes", "bytes >= 0"),
    Index("ix_files_customer_id_id", "customer_id", "id"),
    Index("ix_files_expires_at", "expires_at"),
    comment="Files of /v1/files.",
)

file_chunks = Table(
    "file_chunks",
    metadata,
    column("file_id", Text, "File.", ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    column("number", Integer, "Position, from 0.", primary_key=True),
    column("data", LargeBinary, "Part of the content."),
    comment="Content of uploaded files.",
)

batches = Table(
    "batches",
    metadata,
    column("id", Text, "batch_ and a UUIDv7 in hex.", primary_key=True),
    column("customer_id", Uuid, "Customer.", ForeignKey("customers.id", ondelete="CASCADE")),
    column("api_key_id", Text, "Key that created it."),
    column("created_at", DateTime(timezone=True), "Creation time.", server_default=text("now()")),
    column("deadline", DateTime(timezone=True), "When its open lines expire."),
    column("endpoint", Text, "Path of all its lines."),
    column("input_file_id", Text, "File with its lines."),
    column("pool", Text, "GPU pool of the gateway that created it.", server_default="default"),
    column("idempotency", Text, "Hash of the client's Idempotency-Key.", null=True),
    column("fingerprint", Text, "Hash of the body, if there is one.", null=True),
    column("metadata", Text, "The client's metadata as JSON.", null=True),
    column("output_kept_s", Integer, "Seconds that its results are kept; null: the deployment's.", null=True),
    column("status", Text, "State, as in OpenAI's API.", server_default="validating"),
    column("total", Integer, "Lines; 0: not validated yet.", server_default="0"),
    column("completed", Integer, "Lines with a response.", server_default="0"),
    column("failed", Integer, "Lines with an error.", server_default="0"),
    column("output_bytes", BigInteger, "Size of the responses.", server_default="0"),
    column("error_bytes", BigInteger, "Size of the errors.", server_default="0"),
    column("errors", Text, "Faults of the input file as JSON.", null=True),
    column("output_file_id", Text, "File with the responses.", null=True),
    column("error_file_id", Text, "File with the errors.", null=True),
    *(
        column(f"{state}_at", DateTime(timezone=True), "Begin of this state.", null=True)
        for state in STATES
        if state != "validating"
    ),
    column("expires_at", DateTime(timezone=True), "From when the row may be deleted.", null=True),
    column("audit_after", Integer, "Line after which audit rows are to be checked; null: none.", null=True),
    column("owner", Text, "Gateway that runs it.", null=True),
    column("owned_until", DateTime(timezone=True), "End of the owner's lease.", null=True),
    matches("id", "^batch_[0-9a-f]{32}$"),
    one_of("status", *STATES),
    check("counts", "total >= 0 AND completed >= 0 AND failed >= 0 AND output_bytes >= 0 AND error_bytes >= 0"),
    Index("ix_batches_customer_id_id", "customer_id", "id"),
    Index(
        "ix_batches_idempotency",
        "customer_id",
        "idempotency",
        unique=True,
        postgresql_where=text("idempotency IS NOT NULL"),
    ),
    Index("ix_batches_open", "created_at", postgresql_where=text(OPEN)),
    Index("ix_batches_input_file_id", "input_file_id", postgresql_where=text(OPEN)),
    Index("ix_batches_finalizing_at", "finalizing_at", postgresql_where=text("audit_after IS NOT NULL")),
    Index("ix_batches_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    comment="Batches of /v1/batches.",
)

batch_lines = Table(
    "batch_lines",
    metadata,
    column("batch_id", Text, "Batch.", ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    column("number", Integer, "Line of the input file, from 1.", primary_key=True),
    column("request_id", Text, "Its request; of several inputs the first one."),
    column("output", LargeBinary, "Its line of the output or error file; null: it has not ended.", null=True),
    column("failed", Boolean, "Whether it belongs to the error file.", null=True),
    matches("request_id", REQUEST_ID_PATTERN),
    check("output", "(output IS NULL) = (failed IS NULL)"),
    comment="Lines of batches that were submitted or have ended.",
)
