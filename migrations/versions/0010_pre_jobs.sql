-- Nothing has written this table yet, so the type of a column may change. BYTEA, because a model may say the character NUL,
-- which no TEXT can hold.
ALTER TABLE jobs DROP COLUMN output;
ALTER TABLE jobs ADD COLUMN output BYTEA,
    ADD COLUMN pool TEXT DEFAULT 'default' NOT NULL,
    ADD COLUMN deadline TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    ADD COLUMN trace_id TEXT,
    ADD COLUMN idempotency TEXT,
    ADD COLUMN fingerprint TEXT,
    ADD COLUMN tokens_used INTEGER,
    ADD COLUMN callback_url TEXT,
    ADD COLUMN callback_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN callback_tries INTEGER DEFAULT '0' NOT NULL,
    ADD COLUMN audited BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN jobs.created_at IS 'Creation time carried by the id itself.';
COMMENT ON COLUMN jobs.output IS 'The result in UTF-8; of a failure what the backend said, or null.';
COMMENT ON COLUMN jobs.completed_at IS 'When its end was stored; null while open.';
COMMENT ON COLUMN jobs.pool IS 'The GPU pool that runs it.';
COMMENT ON COLUMN jobs.deadline IS 'When it fails where it has not ended.';
COMMENT ON COLUMN jobs.trace_id IS 'Trace id of the request''s traceparent.';
COMMENT ON COLUMN jobs.idempotency IS 'Name of its Idempotency-Key in Redis; null = none was sent.';
COMMENT ON COLUMN jobs.fingerprint IS 'What the body under that key is known by.';
COMMENT ON COLUMN jobs.tokens_used IS 'Tokens in and out; null where nobody counted.';
COMMENT ON COLUMN jobs.callback_url IS 'Where its end is told; null = nowhere.';
COMMENT ON COLUMN jobs.callback_at IS 'When that is tried next; null = not, or not any more.';
COMMENT ON COLUMN jobs.callback_tries IS 'Times that it was tried.';
COMMENT ON COLUMN jobs.audited IS 'Whether its end was found in, or written to, requests.';
CREATE INDEX ix_jobs_callback_at ON jobs (callback_at) WHERE callback_at IS NOT NULL;
CREATE INDEX ix_jobs_completed_at ON jobs (completed_at) WHERE completed_at IS NOT NULL AND NOT audited;
