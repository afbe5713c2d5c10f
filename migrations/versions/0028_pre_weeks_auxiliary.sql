ALTER TABLE quotas DROP CONSTRAINT ck_quotas_quota;
ALTER TABLE quotas ADD CONSTRAINT ck_quotas_quota CHECK (
    quota ~ '^([1-9][0-9]{0,14}|[1-9][0-9]{0,14} tokens|[1-9][0-9]{0,11} gpu-ms|([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-s|([1-9][0-9]{0,4}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-h|([1-9][0-9]{0,5}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) usd) ?(/|per) ?([1-9][0-9]{0,3})? ?(second|minute|hour|day|week|month|year)s?$'
);
COMMENT ON COLUMN quotas.quota IS 'Such as 10000/day (requests), 3600 gpu-s/day, 1000000 tokens/week or 100 usd/month.';

ALTER TABLE tiers
    ADD COLUMN auxiliary_requests_per_second DOUBLE PRECISION,
    ADD COLUMN auxiliary_burst DOUBLE PRECISION,
    ADD CONSTRAINT ck_tiers_auxiliary_requests_per_second
        CHECK (auxiliary_requests_per_second > 0 AND auxiliary_requests_per_second <= 1000000),
    ADD CONSTRAINT ck_tiers_auxiliary_burst CHECK (auxiliary_burst BETWEEN 1 AND 10000000);
COMMENT ON COLUMN tiers.auxiliary_requests_per_second IS
    'Rate limit of each customer''s requests that run no model, at most that of its other requests; null: the same.';
COMMENT ON COLUMN tiers.auxiliary_burst IS 'Bucket size for them, at most that of its other requests; null: the same.';
