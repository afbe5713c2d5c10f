-- Earlier versions read the column, so it stays until none of them runs.
COMMENT ON COLUMN models.gpu_timeout_ms IS 'Unused; TIERLANE_GPU_TIMEOUT_MS of the workers applies.';
