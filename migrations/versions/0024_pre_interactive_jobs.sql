ALTER TABLE tiers ADD COLUMN interactive_jobs BOOLEAN NOT NULL DEFAULT false;
COMMENT ON COLUMN tiers.interactive_jobs IS 'True: a job may ask for the priority of interactive requests.';

ALTER TABLE jobs ADD COLUMN interactive BOOLEAN NOT NULL DEFAULT false;
COMMENT ON COLUMN jobs.interactive IS 'Whether it waits as an interactive request.';
