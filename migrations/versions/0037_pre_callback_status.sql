ALTER TABLE jobs
    ADD COLUMN callback_status SMALLINT,
    ADD CONSTRAINT ck_jobs_callback_status CHECK (callback_status BETWEEN 0 AND 999);
COMMENT ON COLUMN jobs.callback_status IS 'HTTP status of the last webhook attempt; 0: no response.';
