-- $1 which letters, in words, $2 what was there, $3 what is there now; null: nothing. As the triggers write it for the catalog.
INSERT INTO config_changes (changed_by, table_name, row_key, old, new) VALUES (
    coalesce(nullif(current_setting('tierlane.actor', true), ''), session_user), 'dead_letters', $1, $2::jsonb, $3::jsonb
)
