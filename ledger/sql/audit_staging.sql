-- One a session. Its rows go with the transaction; an aborted one leaves nothing.
CREATE TEMP TABLE IF NOT EXISTS audit_staging (LIKE requests) ON COMMIT DELETE ROWS
