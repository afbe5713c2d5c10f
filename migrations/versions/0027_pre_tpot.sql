ALTER TABLE models ADD COLUMN tpot_ms DOUBLE PRECISION;
ALTER TABLE models ADD CONSTRAINT ck_models_tpot_ms CHECK (tpot_ms > 0);
COMMENT ON COLUMN models.tpot_ms IS 'Objective for the milliseconds per token of an answer, in engines with slots; null: none.';
