ALTER TABLE customers
    ADD COLUMN webhook_secret INTEGER DEFAULT '1' NOT NULL,
    ADD COLUMN webhook_secret_oldest INTEGER,
    ADD COLUMN webhook_secret_until TIMESTAMP WITH TIME ZONE,
    ADD CONSTRAINT ck_customers_webhook_secret CHECK (webhook_secret BETWEEN 1 AND 1000000),
    ADD CONSTRAINT ck_customers_webhook_secret_oldest CHECK (webhook_secret_oldest BETWEEN 1 AND webhook_secret);
COMMENT ON COLUMN customers.webhook_secret IS 'Number of its webhook secret; a rotation adds 1.';
COMMENT ON COLUMN customers.webhook_secret_oldest IS 'Oldest webhook secret that callbacks are also signed with; null: none.';
COMMENT ON COLUMN customers.webhook_secret_until IS 'Until when earlier webhook secrets are valid; null: never rotated.';
