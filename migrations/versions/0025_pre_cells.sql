CREATE TABLE cells (
    name TEXT NOT NULL,
    redis_url TEXT,
    state TEXT DEFAULT 'open' NOT NULL,
    weight DOUBLE PRECISION DEFAULT '1' NOT NULL,
    CONSTRAINT pk_cells PRIMARY KEY (name),
    CONSTRAINT ck_cells_name CHECK (name ~ '^[a-z][a-z0-9_-]{0,62}$'),
    CONSTRAINT ck_cells_redis_url CHECK (
        length(redis_url) <= 500
        AND redis_url ~ '^((rediss?([+](sentinel|cluster))?|unix)://[^[:space:][:cntrl:]@#]+)$'
    ),
    CONSTRAINT ck_cells_state CHECK (state IN ('open', 'draining', 'closed')),
    CONSTRAINT ck_cells_default CHECK (name <> 'default' OR (redis_url IS NULL AND state <> 'closed')),
    CONSTRAINT ck_cells_weight CHECK (weight BETWEEN 0.01 AND 1000)
);
COMMENT ON TABLE cells IS 'Cells: each has queues and limits of its own, for the customers whose home it is.';
COMMENT ON COLUMN cells.name IS 'Name; the cell default exists without a row.';
COMMENT ON COLUMN cells.redis_url IS 'Its server, without user and password: those of TIERLANE_REDIS_URL; null: that server.';
COMMENT ON COLUMN cells.state IS 'open; draining: no new customers and requests; closed: not served.';
COMMENT ON COLUMN cells.weight IS 'Its part of the customers, in proportion to the weights of the other open cells.';

CREATE TRIGGER cells_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON cells
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER cells_added_or_deleted AFTER INSERT OR DELETE ON cells
    FOR EACH ROW EXECUTE FUNCTION record_config_change('name');
CREATE TRIGGER cells_updated AFTER UPDATE ON cells
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('name');

ALTER TABLE customers ADD COLUMN cell TEXT;
COMMENT ON COLUMN customers.cell IS 'Its cell; null: chosen by its id.';
ALTER TABLE customers ADD CONSTRAINT fk_customers_cell FOREIGN KEY (cell) REFERENCES cells (name) ON UPDATE CASCADE;

ALTER TABLE customers ADD COLUMN spread SMALLINT NOT NULL DEFAULT '1';
COMMENT ON COLUMN customers.spread IS 'Number of cells that it uses, each with a part of its limits.';
ALTER TABLE customers ADD CONSTRAINT ck_customers_spread CHECK (spread BETWEEN 1 AND 64);
