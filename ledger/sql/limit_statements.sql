-- $1 milliseconds. For the rest of the transaction.
SELECT set_config('statement_timeout', $1::bigint::text, true)
