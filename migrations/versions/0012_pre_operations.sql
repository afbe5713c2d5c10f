ALTER TABLE tiers ADD COLUMN paused BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN tiers.paused IS
    'True: what waits in its queue stays there until it is resumed or its time is up.';

CREATE TABLE cordons (
    worker TEXT NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    cordoned_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_cordons PRIMARY KEY (worker),
    CONSTRAINT ck_cordons_worker CHECK (length(worker) BETWEEN 1 AND 200 AND worker !~ '[[:cntrl:]]'),
    CONSTRAINT ck_cordons_reason CHECK (length(reason) <= 500 AND reason !~ '[[:cntrl:]]')
);
COMMENT ON TABLE cordons IS 'Workers that get no new work until they are uncordoned, restarts included.';
COMMENT ON COLUMN cordons.worker IS 'Id of the worker, in whatever pool.';
COMMENT ON COLUMN cordons.reason IS 'Why, for whoever looks at it next.';
COMMENT ON COLUMN cordons.cordoned_at IS 'Since when.';

-- A part of the catalog: schedulers hear of it as they hear of a changed tier, and it is written down who did it.
CREATE TRIGGER cordons_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON cordons
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER cordons_added_or_deleted AFTER INSERT OR DELETE ON cordons
    FOR EACH ROW EXECUTE FUNCTION record_config_change('worker');
CREATE TRIGGER cordons_updated AFTER UPDATE ON cordons
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('worker');
