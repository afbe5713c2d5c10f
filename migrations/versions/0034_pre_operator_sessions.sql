-- Not recorded in config_changes, and not read by gateways: sessions are no configuration.
CREATE TABLE operator_sessions (
    session_hash BYTEA NOT NULL,
    token_hash BYTEA,
    person TEXT,
    role TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_operator_sessions PRIMARY KEY (session_hash),
    CONSTRAINT ck_operator_sessions_role CHECK (role IN ('viewer', 'operator', 'admin')),
    CONSTRAINT ck_operator_sessions_person CHECK (
        (person IS NULL) = (role IS NULL) AND (person IS NULL) <> (token_hash IS NULL)
    )
);
COMMENT ON TABLE operator_sessions IS 'Sessions of browsers in the admin API; delete a row to end one.';
COMMENT ON COLUMN operator_sessions.session_hash IS 'SHA-256 of the secret in the cookie.';
COMMENT ON COLUMN operator_sessions.token_hash IS 'That of the operator who signed in; null: an identity provider did.';
COMMENT ON COLUMN operator_sessions.person IS 'Name of the person whom an identity provider signed in: oidc:EMAIL.';
COMMENT ON COLUMN operator_sessions.role IS 'Role of this person.';
COMMENT ON COLUMN operator_sessions.created_at IS 'Time of the sign-in.';
COMMENT ON COLUMN operator_sessions.expires_at IS 'From when the session is rejected.';
