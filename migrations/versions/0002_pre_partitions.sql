-- Rows of a day that has no partition go here instead of being refused. It should be empty; watch it.
CREATE TABLE requests_default PARTITION OF requests DEFAULT;
COMMENT ON TABLE requests_default IS 'Audit rows of days without a partition; should be empty.';

-- Makes the missing partitions from today (UTC) to `days_ahead` days from now; returns how many it made. Rows of such
-- a day that lie in requests_default move into the new partition. A table is made first and attached then, because
-- CREATE TABLE ... PARTITION OF would lock out readers and writers of the whole audit.
CREATE FUNCTION ensure_request_partitions(days_ahead integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    day date;
    today date := (now() AT TIME ZONE 'UTC')::date;
    lower_bound timestamptz;
    upper_bound timestamptz;
    partition_name text;
    made integer := 0;
BEGIN
    IF days_ahead IS NULL OR days_ahead NOT BETWEEN 0 AND 400 THEN
        RAISE EXCEPTION 'days_ahead must be 0 to 400, not %', days_ahead USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('ensure_request_partitions'));
    IF to_regclass('requests_default') IS NULL THEN
        CREATE TABLE requests_default PARTITION OF requests DEFAULT;
    END IF;
    FOR day IN SELECT today + n FROM generate_series(0, days_ahead) AS n LOOP
        partition_name := 'requests_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass(partition_name) IS NOT NULL;
        lower_bound := day::timestamp AT TIME ZONE 'UTC';
        upper_bound := (day + 1)::timestamp AT TIME ZONE 'UTC';
        EXECUTE format('CREATE TABLE %I (LIKE requests INCLUDING ALL)', partition_name);
        -- Before rows move, so that none is added to the day in between.
        LOCK TABLE requests_default IN ACCESS EXCLUSIVE MODE;
        EXECUTE format(
            'WITH moved AS (DELETE FROM requests_default WHERE created_at >= $1 AND created_at < $2 RETURNING *) '
            'INSERT INTO %I SELECT * FROM moved', partition_name
        ) USING lower_bound, upper_bound;
        EXECUTE format(
            'ALTER TABLE requests ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            partition_name, lower_bound, upper_bound
        );
        made := made + 1;
    END LOOP;
    RETURN made;
END
$$;
COMMENT ON FUNCTION ensure_request_partitions(integer) IS
    'Makes the audit''s day partitions from today to so many days ahead; returns how many were missing.';

SELECT ensure_request_partitions(7);
