CREATE TABLE responses (
    id TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    customer_id UUID NOT NULL,
    previous_id TEXT,
    document BYTEA NOT NULL,
    input_items BYTEA NOT NULL,
    bytes INTEGER NOT NULL,
    open BOOLEAN DEFAULT false NOT NULL,
    output BYTEA,
    error_code TEXT,
    finish_reason TEXT,
    tokens_used INTEGER,
    output_tokens INTEGER,
    CONSTRAINT pk_responses PRIMARY KEY (id),
    CONSTRAINT ck_responses_id CHECK (id ~ '^resp_[0-9a-f]{32}$'),
    CONSTRAINT ck_responses_bytes CHECK (bytes >= 0),
    CONSTRAINT fk_responses_customer_id FOREIGN KEY(customer_id) REFERENCES customers (id) ON DELETE CASCADE
);
CREATE INDEX ix_responses_customer_id_created_at ON responses (customer_id, created_at);
CREATE INDEX ix_responses_expires_at ON responses (expires_at);
COMMENT ON TABLE responses IS 'Stored responses of /v1/responses, with input.';
COMMENT ON COLUMN responses.id IS 'resp_ and the hex of the request id.';
COMMENT ON COLUMN responses.created_at IS 'Creation time of the request.';
COMMENT ON COLUMN responses.expires_at IS 'From when the row may be deleted.';
COMMENT ON COLUMN responses.customer_id IS 'Customer.';
COMMENT ON COLUMN responses.previous_id IS 'The response that this one continues.';
COMMENT ON COLUMN responses.document IS 'The response as JSON; of a background response without its output.';
COMMENT ON COLUMN responses.input_items IS 'Items of the input as JSON.';
COMMENT ON COLUMN responses.bytes IS 'Size of document, items and output.';
COMMENT ON COLUMN responses.open IS 'Whether it is a job that has not ended.';
COMMENT ON COLUMN responses.output IS 'Output of the job in UTF-8, or the backend''s message.';
COMMENT ON COLUMN responses.error_code IS 'Reason of the job''s failure.';
COMMENT ON COLUMN responses.finish_reason IS 'Why the job''s output ends; document: it is lines of JSON.';
COMMENT ON COLUMN responses.tokens_used IS 'Tokens of input and output of the job.';
COMMENT ON COLUMN responses.output_tokens IS 'Tokens of the output of the job.';
