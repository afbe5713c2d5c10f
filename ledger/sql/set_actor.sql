-- $1 who. Until the transaction ends, its changes are put down to this name in config_changes.
SELECT set_config('tierlane.actor', $1, true)
