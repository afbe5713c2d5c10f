-- Partitions take both from their parent. Rows of before keep NULL: it is not known of them.
ALTER TABLE requests ADD COLUMN mode TEXT, ADD COLUMN delivered BOOLEAN,
    ADD CONSTRAINT ck_requests_mode CHECK (mode IN ('queue', 'direct'));
COMMENT ON COLUMN requests.mode IS 'queue: run through Redis; direct: a worker was called past it; null while open.';
COMMENT ON COLUMN requests.delivered IS 'Whether this end was written by the gateway that told it to its client; null while open.';
