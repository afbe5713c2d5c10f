ALTER TABLE models ADD COLUMN capabilities TEXT;
COMMENT ON COLUMN models.capabilities IS 'Capabilities of its server, separated by commas; text: none; null: all but extensions.';
ALTER TABLE models ADD CONSTRAINT ck_models_capabilities CHECK (
    capabilities ~ '^(text|(tools|structured_output|logprobs|choices|penalties|logit_bias|reasoning|images|audio|files|dimensions|extensions)(,(tools|structured_output|logprobs|choices|penalties|logit_bias|reasoning|images|audio|files|dimensions|extensions))*)$'
);
