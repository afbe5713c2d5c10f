CREATE TABLE files (
    id TEXT NOT NULL,
    customer_id UUID NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes BIGINT DEFAULT '0' NOT NULL,
    complete BOOLEAN DEFAULT false NOT NULL,
    batch_id TEXT,
    of_errors BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT pk_files PRIMARY KEY (id),
    CONSTRAINT ck_files_id CHECK (id ~ '^file-[0-9a-f]{32}$'),
    CONSTRAINT ck_files_purpose CHECK (purpose IN ('batch', 'batch_output')),
    CONSTRAINT ck_files_bytes CHECK (bytes >= 0),
    CONSTRAINT fk_files_customer_id FOREIGN KEY(customer_id) REFERENCES customers (id) ON DELETE CASCADE
);
CREATE INDEX ix_files_customer_id_id ON files (customer_id, id);
CREATE INDEX ix_files_expires_at ON files (expires_at);
COMMENT ON TABLE files IS 'Files of /v1/files.';
COMMENT ON COLUMN files.id IS 'file- and a UUIDv7 in hex.';
COMMENT ON COLUMN files.customer_id IS 'Customer.';
COMMENT ON COLUMN files.created_at IS 'Creation time.';
COMMENT ON COLUMN files.expires_at IS 'From when it is unknown to its customer, and may be deleted.';
COMMENT ON COLUMN files.purpose IS 'batch: input; batch_output: results.';
COMMENT ON COLUMN files.filename IS 'Name that the client sent.';
COMMENT ON COLUMN files.bytes IS 'Size of the content.';
COMMENT ON COLUMN files.complete IS 'False: the upload has not ended.';
COMMENT ON COLUMN files.batch_id IS 'Batch whose lines are the content; null: it is in file_chunks.';
COMMENT ON COLUMN files.of_errors IS 'Whether those are the failed lines.';
CREATE TABLE file_chunks (
    file_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    data BYTEA NOT NULL,
    CONSTRAINT pk_file_chunks PRIMARY KEY (file_id, number),
    CONSTRAINT fk_file_chunks_file_id FOREIGN KEY(file_id) REFERENCES files (id) ON DELETE CASCADE
);
COMMENT ON TABLE file_chunks IS 'Content of uploaded files.';
COMMENT ON COLUMN file_chunks.file_id IS 'File.';
COMMENT ON COLUMN file_chunks.number IS 'Position, from 0.';
COMMENT ON COLUMN file_chunks.data IS 'Part of the content.';
CREATE TABLE batches (
    id TEXT NOT NULL,
    customer_id UUID NOT NULL,
    api_key_id TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    deadline TIMESTAMP WITH TIME ZONE NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    pool TEXT DEFAULT 'default' NOT NULL,
    idempotency TEXT,
    fingerprint TEXT,
    metadata TEXT,
    output_kept_s INTEGER,
    status TEXT DEFAULT 'validating' NOT NULL,
    total INTEGER DEFAULT '0' NOT NULL,
    completed INTEGER DEFAULT '0' NOT NULL,
    failed INTEGER DEFAULT '0' NOT NULL,
    output_bytes BIGINT DEFAULT '0' NOT NULL,
    error_bytes BIGINT DEFAULT '0' NOT NULL,
    errors TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    in_progress_at TIMESTAMP WITH TIME ZONE,
    finalizing_at TIMESTAMP WITH TIME ZONE,
    cancelling_at TIMESTAMP WITH TIME ZONE,
    completed_at TIMESTAMP WITH TIME ZONE,
    failed_at TIMESTAMP WITH TIME ZONE,
    expired_at TIMESTAMP WITH TIME ZONE,
    cancelled_at TIMESTAMP WITH TIME ZONE,
    expires_at TIMESTAMP WITH TIME ZONE,
    audit_after INTEGER,
    owner TEXT,
    owned_until TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_batches PRIMARY KEY (id),
    CONSTRAINT ck_batches_id CHECK (id ~ '^batch_[0-9a-f]{32}$'),
    CONSTRAINT ck_batches_status CHECK (status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'expired', 'cancelled')),
    CONSTRAINT ck_batches_counts CHECK (total >= 0 AND completed >= 0 AND failed >= 0 AND output_bytes >= 0 AND error_bytes >= 0),
    CONSTRAINT fk_batches_customer_id FOREIGN KEY(customer_id) REFERENCES customers (id) ON DELETE CASCADE
);
CREATE INDEX ix_batches_customer_id_id ON batches (customer_id, id);
CREATE INDEX ix_batches_expires_at ON batches (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX ix_batches_finalizing_at ON batches (finalizing_at) WHERE audit_after IS NOT NULL;
CREATE UNIQUE INDEX ix_batches_idempotency ON batches (customer_id, idempotency) WHERE idempotency IS NOT NULL;
CREATE INDEX ix_batches_input_file_id ON batches (input_file_id) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX ix_batches_open ON batches (created_at) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
COMMENT ON TABLE batches IS 'Batches of /v1/batches.';
COMMENT ON COLUMN batches.id IS 'batch_ and a UUIDv7 in hex.';
COMMENT ON COLUMN batches.customer_id IS 'Customer.';
COMMENT ON COLUMN batches.api_key_id IS 'Key that created it.';
COMMENT ON COLUMN batches.created_at IS 'Creation time.';
COMMENT ON COLUMN batches.deadline IS 'When its open lines expire.';
COMMENT ON COLUMN batches.endpoint IS 'Path of all its lines.';
COMMENT ON COLUMN batches.input_file_id IS 'File with its lines.';
COMMENT ON COLUMN batches.pool IS 'GPU pool of the gateway that created it.';
COMMENT ON COLUMN batches.idempotency IS 'Hash of the client''s Idempotency-Key.';
COMMENT ON COLUMN batches.fingerprint IS 'Hash of the body, if there is one.';
COMMENT ON COLUMN batches.metadata IS 'The client''s metadata as JSON.';
COMMENT ON COLUMN batches.output_kept_s IS 'Seconds that its results are kept; null: the deployment''s.';
COMMENT ON COLUMN batches.status IS 'State, as in OpenAI''s API.';
COMMENT ON COLUMN batches.total IS 'Lines; 0: not validated yet.';
COMMENT ON COLUMN batches.completed IS 'Lines with a response.';
COMMENT ON COLUMN batches.failed IS 'Lines with an error.';
COMMENT ON COLUMN batches.output_bytes IS 'Size of the responses.';
COMMENT ON COLUMN batches.error_bytes IS 'Size of the errors.';
COMMENT ON COLUMN batches.errors IS 'Faults of the input file as JSON.';
COMMENT ON COLUMN batches.output_file_id IS 'File with the responses.';
COMMENT ON COLUMN batches.error_file_id IS 'File with the errors.';
COMMENT ON COLUMN batches.in_progress_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.finalizing_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.cancelling_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.completed_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.failed_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.expired_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.cancelled_at IS 'Begin of this state.';
COMMENT ON COLUMN batches.expires_at IS 'From when the row may be deleted.';
COMMENT ON COLUMN batches.audit_after IS 'Line after which audit rows are to be checked; null: none.';
COMMENT ON COLUMN batches.owner IS 'Gateway that runs it.';
COMMENT ON COLUMN batches.owned_until IS 'End of the owner''s lease.';
CREATE TABLE batch_lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    output BYTEA,
    failed BOOLEAN,
    CONSTRAINT pk_batch_lines PRIMARY KEY (batch_id, number),
    CONSTRAINT ck_batch_lines_request_id CHECK (request_id ~ '^req_[0-9a-f]{32}$'),
    CONSTRAINT ck_batch_lines_output CHECK ((output IS NULL) = (failed IS NULL)),
    CONSTRAINT fk_batch_lines_batch_id FOREIGN KEY(batch_id) REFERENCES batches (id) ON DELETE CASCADE
);
COMMENT ON TABLE batch_lines IS 'Lines of batches that were submitted or have ended.';
COMMENT ON COLUMN batch_lines.batch_id IS 'Batch.';
COMMENT ON COLUMN batch_lines.number IS 'Line of the input file, from 1.';
COMMENT ON COLUMN batch_lines.request_id IS 'Its request; of several inputs the first one.';
COMMENT ON COLUMN batch_lines.output IS 'Its line of the output or error file; null: it has not ended.';
COMMENT ON COLUMN batch_lines.failed IS 'Whether it belongs to the error file.';
