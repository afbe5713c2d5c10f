CREATE TABLE operators (
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    token_hash BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    last_used_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_operators PRIMARY KEY (name),
    CONSTRAINT uq_operators_token_hash UNIQUE (token_hash),
    CONSTRAINT ck_operators_name CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$'),
    CONSTRAINT ck_operators_role CHECK (role IN ('viewer', 'operator', 'admin')),
    CONSTRAINT ck_operators_token_hash CHECK (octet_length(token_hash) = 32),
    CONSTRAINT ck_operators_expires_at CHECK (expires_at > created_at)
);
COMMENT ON TABLE operators IS 'People and programs that may use the admin API.';
COMMENT ON COLUMN operators.name IS 'Name; config_changes records it as operator:NAME.';
COMMENT ON COLUMN operators.role IS 'viewer reads; operator also cordons, drains, suspends and revokes keys; admin changes everything.';
COMMENT ON COLUMN operators.token_hash IS 'SHA-256 of the token.';
COMMENT ON COLUMN operators.created_at IS 'Creation time of the token.';
COMMENT ON COLUMN operators.expires_at IS 'From when the token is rejected; null: never.';
COMMENT ON COLUMN operators.revoked_at IS 'Set: the token is rejected.';
COMMENT ON COLUMN operators.last_used_at IS 'Last use, at most a minute old.';

CREATE OR REPLACE FUNCTION record_config_change() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    hashes CONSTANT text[] := ARRAY['secret_hash', 'token_hash'];
    old_row jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - hashes END;
    new_row jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - hashes END;
BEGIN
    INSERT INTO config_changes (changed_by, table_name, row_key, old, new) VALUES (
        coalesce(nullif(current_setting('tierlane.actor', true), ''), session_user),
        TG_TABLE_NAME, coalesce(new_row, old_row) ->> TG_ARGV[0], old_row, new_row
    );
    RETURN NULL;
END
$$;

-- Gateways do not read operators, so catalog_version is not incremented.
CREATE TRIGGER operators_added_or_deleted AFTER INSERT OR DELETE ON operators
    FOR EACH ROW EXECUTE FUNCTION record_config_change('name');
CREATE TRIGGER operators_updated
    AFTER UPDATE OF name, role, token_hash, created_at, expires_at, revoked_at ON operators
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('name');
