-- For GET /v1/jobs. It also serves what the index on customer_id alone was for.
CREATE INDEX ix_jobs_customer_id_id ON jobs (customer_id, id);
DROP INDEX ix_jobs_customer_id;

ALTER TABLE customers ADD COLUMN manages_keys BOOLEAN NOT NULL DEFAULT false;
COMMENT ON COLUMN customers.manages_keys IS 'True: its keys may create, list and revoke its keys (/v1/keys).';
