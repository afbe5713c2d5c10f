COMMENT ON TABLE requests IS
    'The audit: one row for each accepted request, in day partitions requests_YYYYMMDD (UTC).';
COMMENT ON COLUMN requests.created_at IS 'Creation time, from the id.';
COMMENT ON COLUMN requests.customer_id IS 'Customer.';
COMMENT ON COLUMN requests.api_key_id IS 'Public part of its key.';
COMMENT ON COLUMN requests.model IS 'Requested model.';
COMMENT ON COLUMN requests.status IS 'queued, processing, then completed or failed.';
COMMENT ON COLUMN requests.error_code IS 'Reason of the failure, else null.';
COMMENT ON COLUMN requests.http_status IS 'Status of the response; null while open.';
COMMENT ON COLUMN requests.completed_at IS 'Time of the end (Redis clock); null while open.';
COMMENT ON COLUMN requests.latency_ms IS 'Acceptance to end, milliseconds.';
COMMENT ON COLUMN requests.gpu_ms IS 'Run time of its batch, milliseconds; null = no completed run.';
COMMENT ON COLUMN requests.batch_id IS 'Batch of its last run.';
COMMENT ON COLUMN requests.worker_id IS 'Worker of its last run.';
COMMENT ON COLUMN requests.gateway_id IS 'Gateway that admitted it.';
COMMENT ON COLUMN requests.attempts IS 'Started runs; null while open.';
COMMENT ON COLUMN requests.tokens_used IS 'Tokens of input and output.';
COMMENT ON COLUMN requests.input_bytes IS 'Input size, bytes.';
COMMENT ON COLUMN requests.output_bytes IS 'Output size, bytes.';
COMMENT ON COLUMN requests.trace_id IS 'Trace id.';
COMMENT ON COLUMN requests.mode IS 'queue: through Redis; direct: without Redis; null while open.';
COMMENT ON COLUMN requests.delivered IS
    'Whether the gateway that responded to the client wrote this end; null while open.';
COMMENT ON COLUMN requests.served_from IS
    'cache: a cached result; collapsed: the run of an equal request; null: its own run.';
COMMENT ON TABLE jobs IS 'Asynchronous requests (Prefer: respond-async), with body.';
COMMENT ON COLUMN jobs.created_at IS 'Creation time, from the id.';
COMMENT ON COLUMN jobs.customer_id IS 'Customer.';
COMMENT ON COLUMN jobs.api_key_id IS 'Public part of its key.';
COMMENT ON COLUMN jobs.model IS 'Requested model.';
COMMENT ON COLUMN jobs.body IS 'Encoded request, to queue it again after a loss of Redis.';
COMMENT ON COLUMN jobs.status IS 'queued, processing, then completed or failed.';
COMMENT ON COLUMN jobs.output IS 'Result in UTF-8; after a failure the backend''s message, or null.';
COMMENT ON COLUMN jobs.error_code IS 'Reason of the failure, else null.';
COMMENT ON COLUMN jobs.completed_at IS 'Time when its end was stored; null while open.';
COMMENT ON COLUMN jobs.expires_at IS 'Time from which the row may be deleted; null while open.';
COMMENT ON COLUMN jobs.pool IS 'GPU pool.';
COMMENT ON COLUMN jobs.deadline IS 'Time at which it fails if it has not ended.';
COMMENT ON COLUMN jobs.trace_id IS 'Trace id.';
COMMENT ON COLUMN jobs.idempotency IS 'Name of its Idempotency-Key in Redis; null = none.';
COMMENT ON COLUMN jobs.fingerprint IS 'Fingerprint of the body under that key.';
COMMENT ON COLUMN jobs.tokens_used IS 'Tokens of input and output; null = not counted.';
COMMENT ON COLUMN jobs.callback_url IS 'Webhook URL; null = none.';
COMMENT ON COLUMN jobs.callback_at IS 'Time of the next webhook attempt; null = none.';
COMMENT ON COLUMN jobs.callback_tries IS 'Webhook attempts.';
COMMENT ON COLUMN jobs.audited IS 'Whether requests has its end.';
COMMENT ON TABLE dead_letters IS 'Requests that failed in all attempts, or that break the model.';
COMMENT ON COLUMN dead_letters.request_id IS 'The failed request.';
COMMENT ON COLUMN dead_letters.dead_at IS 'Time of the failure.';
COMMENT ON COLUMN dead_letters.customer_id IS 'Customer.';
COMMENT ON COLUMN dead_letters.model IS 'Requested model.';
COMMENT ON COLUMN dead_letters.error_code IS 'Reason of the failure.';
COMMENT ON COLUMN dead_letters.attempts IS 'Started runs.';
COMMENT ON COLUMN dead_letters.worker_ids IS 'Workers that ran it, in order.';
COMMENT ON COLUMN dead_letters.body IS 'Encoded request; null = deleted.';
COMMENT ON COLUMN dead_letters.requeued_as IS 'Id of the new request; null = not requeued.';
COMMENT ON COLUMN dead_letters.requeued_at IS 'Time of the requeue.';
COMMENT ON TABLE tiers IS 'Service tiers. Gateways apply a changed row within one second.';
COMMENT ON TABLE customers IS
    'Customers. Null limits are those of the tier; see the view customer_limits.';
COMMENT ON COLUMN customers.created_at IS 'Time of creation.';
COMMENT ON TABLE api_keys IS
    'API keys. SELECT issue_api_key(''customer'', ''purpose'') creates one and shows it once.';
COMMENT ON COLUMN api_keys.customer_id IS 'Customer.';
COMMENT ON COLUMN api_keys.created_at IS 'Time of creation.';
COMMENT ON COLUMN api_keys.secret_hash IS 'SHA-256 of the secret part; the secret is not stored.';
COMMENT ON COLUMN api_keys.last_used_at IS 'Last use, written within five seconds.';
COMMENT ON TABLE quotas IS
    'Requests per period, for a customer or for each customer of a tier. All applicable quotas are enforced.';
COMMENT ON TABLE models IS 'Models, and how their batches are formed.';
COMMENT ON TABLE cordons IS
    'Workers that get no new work until they are uncordoned, even after a restart.';
COMMENT ON COLUMN cordons.cordoned_at IS 'Time of the cordon.';
COMMENT ON TABLE catalog_version IS 'One row, maintained by triggers; do not edit.';
COMMENT ON COLUMN catalog_version.version IS 'Number of catalog changes; gateways compare it each second.';
COMMENT ON COLUMN catalog_version.changed_at IS 'Time of the last change.';
COMMENT ON COLUMN catalog_version.whole_version IS
    'Last version that config_changes does not describe row by row; gateways with an older one read everything.';
COMMENT ON TABLE config_changes IS 'Changes of catalog rows, written by triggers.';
COMMENT ON COLUMN config_changes.changed_at IS 'Time of the change.';
COMMENT ON COLUMN config_changes.changed_by IS 'The setting tierlane.actor, else the database user.';
COMMENT ON COLUMN config_changes.old IS 'The row before, without secrets; null = added.';
COMMENT ON COLUMN config_changes.new IS 'The row after, without secrets; null = deleted.';
COMMENT ON COLUMN config_changes.xact IS 'Transaction of the change.';
COMMENT ON VIEW customer_limits IS
    'Base limits of each customer, before the factor of its tier.';
COMMENT ON VIEW usage_hourly IS
    'Accepted requests by hour, customer, tier and model; gpu_ms divides each batch''s time equally. Filter by hour.';
COMMENT ON VIEW tier_slo IS 'Success and latency of accepted requests of the last hour, by tier.';
COMMENT ON FUNCTION ensure_request_partitions(integer) IS
    'Creates the audit''s day partitions from today to days_ahead; returns how many were missing.';
COMMENT ON FUNCTION issue_api_key(text, text, timestamptz) IS
    'Creates an API key for the customer and returns it, once.';
