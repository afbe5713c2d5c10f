-- Partitions take it from their parent. No default and no CHECK: neither would be possible without reading all rows.
ALTER TABLE requests ADD COLUMN endpoint TEXT;
COMMENT ON COLUMN requests.endpoint IS 'Its endpoint, as in metrics; dlq: a requeued dead letter.';
-- A job that is queued again, or audited after a loss of Redis, keeps it.
ALTER TABLE jobs ADD COLUMN endpoint TEXT;
COMMENT ON COLUMN jobs.endpoint IS 'Its endpoint, as in metrics; dlq: a requeued dead letter.';
