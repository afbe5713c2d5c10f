-- The pools whose jobs still want something: their end, their callback, their audit, or to be deleted. Each part has its index.
SELECT pool FROM jobs WHERE status IN ('queued', 'processing')
UNION SELECT pool FROM jobs WHERE callback_at IS NOT NULL
UNION SELECT pool FROM jobs WHERE completed_at IS NOT NULL AND NOT audited
UNION SELECT pool FROM jobs WHERE expires_at <= clock_timestamp()
