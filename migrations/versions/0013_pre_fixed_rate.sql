ALTER TABLE models ADD COLUMN rps_per_gpu_fixed BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN models.rps_per_gpu IS 'Requests per second of one GPU: a guess until measured.';
COMMENT ON COLUMN models.rps_per_gpu_fixed IS
    'True: capacity is rps_per_gpu of each healthy GPU, whatever is measured.';
