ALTER TABLE models ADD COLUMN cache_scope TEXT DEFAULT 'customer' NOT NULL,
    ADD CONSTRAINT ck_models_cache_scope CHECK (cache_scope IN ('customer', 'global'));
COMMENT ON COLUMN models.cache_scope IS 'Among whom equal requests share: customer (each for itself) or global.';

-- Partitions take it from their parent. It is null in nearly all rows, and costs them nothing on the disk.
ALTER TABLE requests ADD COLUMN served_from TEXT,
    ADD CONSTRAINT ck_requests_served_from CHECK (served_from IN ('cache', 'collapsed'));
COMMENT ON COLUMN requests.served_from IS
    'cache: an answer that was kept; collapsed: the run of an equal request; null: its own run, if any.';
