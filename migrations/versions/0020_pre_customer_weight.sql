ALTER TABLE customers ADD COLUMN weight DOUBLE PRECISION NOT NULL DEFAULT '1';
COMMENT ON COLUMN customers.weight IS 'Part of its tier''s GPU time, in proportion to the weights of others that wait.';
ALTER TABLE customers ADD CONSTRAINT ck_customers_weight CHECK (weight BETWEEN 0.01 AND 1000);
