-- Alerts at shares of quotas (ledger/alerts.py).

-- name: add_alerts
-- One array for each column. An alert that exists is not changed, so the statement can be repeated; those of deleted customers are
-- left out. Returns the new ones. It is due at once if it has to be sent.
INSERT INTO quota_alerts (id, customer_id, tier, quota, period, period_start, period_end, share, amount, used, pending, due_at)
SELECT a.id, a.customer_id, a.tier, a.quota, a.period, a.period_start, a.period_end, a.share, a.amount, a.used,
       string_to_array(a.pending, ','), CASE WHEN a.pending <> '' THEN clock_timestamp() END
FROM unnest(
    $1::text[], $2::uuid[], $3::text[], $4::text[], $5::bigint[], $6::timestamptz[], $7::timestamptz[], $8::float8[],
    $9::bigint[], $10::bigint[], $11::text[]
) AS a (id, customer_id, tier, quota, period, period_start, period_end, share, amount, used, pending)
WHERE EXISTS (SELECT FROM customers AS c WHERE c.id = a.customer_id)
ON CONFLICT DO NOTHING
RETURNING id

-- name: claim_alerts
-- $1: row limit. $2: seconds until another gateway may claim them. Alerts that are due, with the present URL of the customer.
UPDATE quota_alerts AS a SET due_at = clock_timestamp() + make_interval(secs => $2), tries = a.tries + 1
FROM (
    SELECT id FROM quota_alerts WHERE due_at <= clock_timestamp() ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED
) AS due, customers AS c
WHERE a.id = due.id AND c.id = a.customer_id
RETURNING a.id, a.customer_id::text, c.name, c.alert_url, a.quota, a.period_start, a.period_end, a.share, a.amount, a.used,
          a.reached_at, a.pending, a.tries,
          c.webhook_secret, c.webhook_secret_oldest, c.webhook_secret_until, clock_timestamp()

-- name: record_alert_attempt
-- $1: alert. $2: where it is still to be sent. $3: seconds until the next attempt; null: none.
UPDATE quota_alerts SET pending = $2, due_at = clock_timestamp() + make_interval(secs => $3) WHERE id = $1

-- name: customer_alerts
-- $1: customer. Of the present periods of its quotas.
SELECT quota, share, reached_at, period_end FROM quota_alerts
WHERE customer_id = $1 AND period_end > clock_timestamp() ORDER BY period_end, quota, share

-- name: delete_old_alerts
-- $1: days after their period that alerts are kept. $2: row limit.
DELETE FROM quota_alerts WHERE id IN (
    SELECT id FROM quota_alerts
    WHERE reached_at < now() - make_interval(days => $1) AND period_end < now() - make_interval(days => $1) AND due_at IS NULL
    LIMIT $2
)
