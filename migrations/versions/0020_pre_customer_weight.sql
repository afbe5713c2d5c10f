ALTER TABLE customers ADD COLUMN weight DOUBLE PRECISION NOT NULL DEFAULT '1';
COMMENT ON COLUMN customers.weight IS 'Part of its tier''s GPU time, in proportion to the weights of others that wait.';
ALTER TABLE customers ADD CONSTRAINT ck_customers_weight CHECK (weight BETWEEN 0.01 AND 1000);

ALTER TABLE api_keys ADD COLUMN weight DOUBLE PRECISION;
COMMENT ON COLUMN api_keys.weight IS 'Part of its customer''s GPU time, against its other keys; null: shared by those without.';
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_weight CHECK (weight BETWEEN 0.01 AND 1000);
