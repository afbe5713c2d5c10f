ALTER TABLE customers
    ADD COLUMN time_zone TEXT,
    ADD COLUMN alert_url TEXT,
    ADD CONSTRAINT ck_customers_time_zone CHECK (length(time_zone) <= 64 AND time_zone ~ '^[A-Za-z][A-Za-z0-9_+/-]*$'),
    ADD CONSTRAINT ck_customers_alert_url CHECK (
        length(alert_url) <= 2048 AND alert_url ~ '^https?://[^[:space:][:cntrl:]@#/?]+([/?][^[:space:][:cntrl:]#]*)?$'
    );
COMMENT ON COLUMN customers.time_zone IS
    'Time zone in which days, weeks, months and years of its quotas begin, such as Europe/Amsterdam; null: UTC.';
COMMENT ON COLUMN customers.alert_url IS
    'Where alerts of its quotas are sent; its host must be one of its callback_hosts; null: nowhere.';

ALTER TABLE quotas
    ADD COLUMN alert_shares DOUBLE PRECISION[],
    ADD CONSTRAINT ck_quotas_alert_shares CHECK (
        cardinality(alert_shares) = 0 OR array_ndims(alert_shares) = 1 AND cardinality(alert_shares) <= 10
        AND array_position(alert_shares, NULL) IS NULL AND 0 < ALL (alert_shares) AND 1 >= ALL (alert_shares)
    );
COMMENT ON COLUMN quotas.alert_shares IS 'Shares of it that raise an alert, above 0 to 1; empty: none; null: 0.8 and 1.';

CREATE TABLE quota_alerts (
    id TEXT NOT NULL,
    customer_id UUID NOT NULL,
    tier TEXT NOT NULL,
    quota TEXT NOT NULL,
    period BIGINT NOT NULL,
    period_start TIMESTAMPTZ NOT NULL,
    period_end TIMESTAMPTZ NOT NULL,
    share DOUBLE PRECISION NOT NULL,
    amount BIGINT NOT NULL,
    used BIGINT NOT NULL,
    reached_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    pending TEXT[] NOT NULL DEFAULT '{}',
    due_at TIMESTAMPTZ,
    tries INTEGER NOT NULL DEFAULT 0,
    CONSTRAINT pk_quota_alerts PRIMARY KEY (id),
    CONSTRAINT fk_quota_alerts_customer_id FOREIGN KEY (customer_id) REFERENCES customers (id) ON DELETE CASCADE
);
CREATE UNIQUE INDEX uq_quota_alerts_customer_id ON quota_alerts (customer_id, quota, period, share);
CREATE INDEX ix_quota_alerts_due_at ON quota_alerts (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX ix_quota_alerts_reached_at ON quota_alerts (reached_at);
COMMENT ON TABLE quota_alerts IS 'Shares of quotas that customers reached: one row for each customer, quota, period and share.';
COMMENT ON COLUMN quota_alerts.id IS 'Id of the event, made of the customer, quota, period and share.';
COMMENT ON COLUMN quota_alerts.customer_id IS 'Customer.';
COMMENT ON COLUMN quota_alerts.tier IS 'Its tier at that time.';
COMMENT ON COLUMN quota_alerts.quota IS 'Period and unit, such as 1day or 1month:usd.';
COMMENT ON COLUMN quota_alerts.period IS 'Number of the period, counted from 1970.';
COMMENT ON COLUMN quota_alerts.period_start IS 'Start of the period.';
COMMENT ON COLUMN quota_alerts.period_end IS 'End of the period.';
COMMENT ON COLUMN quota_alerts.share IS 'Share of the quota that was reached.';
COMMENT ON COLUMN quota_alerts.amount IS 'The quota, in the smallest parts of its unit.';
COMMENT ON COLUMN quota_alerts.used IS 'What was used of it.';
COMMENT ON COLUMN quota_alerts.reached_at IS 'Time of the event.';
COMMENT ON COLUMN quota_alerts.pending IS 'Where it is still to be sent: customer, installation.';
COMMENT ON COLUMN quota_alerts.due_at IS 'Next attempt to send it; null: none.';
COMMENT ON COLUMN quota_alerts.tries IS 'Attempts to send it.';
