ALTER TABLE tiers ALTER COLUMN max_queue_ms DROP NOT NULL;
COMMENT ON COLUMN tiers.max_queue_ms IS 'Longest wait in its queue; null: by the backend of the pool.';

-- Without customers, no older version can be running that could not read it.
UPDATE tiers SET max_queue_ms = NULL WHERE max_queue_ms = 2000 AND NOT EXISTS (SELECT FROM customers);

ALTER TABLE tiers DROP CONSTRAINT ck_tiers_max_queue_ms;
ALTER TABLE tiers ADD CONSTRAINT ck_tiers_max_queue_ms CHECK (max_queue_ms BETWEEN 1 AND 3600000);
ALTER TABLE tiers DROP CONSTRAINT ck_tiers_shed_wait_ms;
ALTER TABLE tiers ADD CONSTRAINT ck_tiers_shed_wait_ms CHECK (shed_wait_ms BETWEEN 1 AND 3600000);
ALTER TABLE customers DROP CONSTRAINT ck_customers_max_queue_ms;
ALTER TABLE customers ADD CONSTRAINT ck_customers_max_queue_ms CHECK (max_queue_ms BETWEEN 1 AND 3600000);
ALTER TABLE models DROP CONSTRAINT ck_models_gpu_timeout_ms;
ALTER TABLE models ADD CONSTRAINT ck_models_gpu_timeout_ms CHECK (gpu_timeout_ms BETWEEN 1 AND 3600000);
